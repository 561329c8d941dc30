"""Structured pruning: a smaller dense model without whole attention heads or MLP neurons."""

import logging
import os
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from emp_llm.calibration.activations import keep_norms, kept_norms
from emp_llm.calibration.data import CalibrationText, calibration_data
from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
from emp_llm.calibration.passes import (
    calibrated,
    calibration_signature,
    delete_progress,
    fit_origin,
    model_origin,
)
from emp_llm.checkpoint.checkpoint import identity_of
from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import Stopwatch, command_line, versions
from emp_llm.common.paths import MANIFEST_NAME, REPORT_NAME, STRUCTURE_NAME, TAYLOR_NAME
from emp_llm.common.progress import stage
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.evaluate import (
    evaluate_checkpoint,
    mark_pending,
    measures_of_baseline,
    pending_matches,
    prepare_suite,
)
from emp_llm.evaluation.suites import find_suite
from emp_llm.hub.local_model import find_model
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.models.offload import is_offloaded
from emp_llm.models.one_model import OneModel
from emp_llm.options.calibration import NormOptions
from emp_llm.options.model import LoadingOptions, ModelOptions
from emp_llm.options.prune import PruneOptions
from emp_llm.options.recipe import Recipe, StructureRecipe
from emp_llm.pruning.counts import read_report
from emp_llm.pruning.dry_run import DryRun, planned_layers
from emp_llm.pruning.writing import run_signature, write_manifest
from emp_llm.records.run_report import CostRecord, RunReport, StructureRecord, TargetsRecord, UnitsRecord
from emp_llm.records.source import ModelSource, stage_records
from emp_llm.reporting.push import Destination, check_login
from emp_llm.structure.choice import Choice, choose_units
from emp_llm.structure.scores import taylor_sums, unit_scores
from emp_llm.structure.units import Changes, UnitModel, Units, config_changes, unit_model
from emp_llm.structure.writing import Edits, Fitted, SideBySide, edits_of, side_by_side, size_of, write_checkpoint
from emp_llm.update.moved import MovedWeights
from emp_llm.update.walk import update_model

logger = logging.getLogger(__name__)
_KINDS = {"heads": "attention", "neurons": "mlp", "both": "all-linear"}


def structure_recipe(recipe: Recipe, structure: StructureRecipe) -> Recipe:
    """The recipe of a structured run: of the units in place of weights."""
    return recipe.but(targets=_KINDS[structure.structure], structure=structure)


def prune_structure(
    model: ModelOptions,
    recipe: Recipe,
    text: NormOptions,
    loading: LoadingOptions,
    evaluation: PruneOptions,
    output: Path | None,
    overwrite: bool,
    dry_run: bool,
    destination: Destination | None,
) -> tuple[RunReport | DryRun, Path]:
    """Prune whole heads or neurons and write the checkpoint without them, or with zeros in their place.

    Args:
        recipe: of `structure_recipe`.
        destination: on the Hub, where the checkpoint will be pushed; None: nowhere.

    Returns:
        The report, or the plan of a dry run; and the folder of the checkpoint.

    Raises:
        UserError: the options do not fit the model or the output.
    """
    structure = recipe.structure
    assert structure is not None
    norms, stopwatch = given_norms(text, recipe) if recipe.name != "taylor" else None, Stopwatch()
    suite = None if evaluation.evaluate is None else find_suite(evaluation.evaluate)
    source = find_model(model.model, model.revision, model.trust_remote_code, headers_suffice=dry_run)
    kinds: Any = ("heads", "neurons") if structure.structure == "both" else (structure.structure,)
    plan = unit_model(source.folder, kinds, structure.head_unit or "group", recipe.blocks, model.trust_remote_code)
    checkpoint, path = plan.checkpoint, output or Path(f"{source.short_name}-{structure.structure}-{recipe.method}")
    removed = None if recipe.match is None else _matched(Path(recipe.match))
    multiple = None if structure.keep_shapes else structure.width_multiple or 1
    if dry_run:
        OutputFolder(path, [source.folder], checkpoint.output_bytes, overwrite=True)  # is only checked
        notes = [units_line(plan.units)]
        if recipe.name == "magnitude" and ranks().main and not source.hollow:
            scores = unit_scores(plan.units, "magnitude", plan.matrices)
            choices, _ = choose_units(plan.units, scores, recipe, multiple, plan.width_by_block, removed)
            _check_removes(choices, recipe)
            changes = None if structure.keep_shapes else config_changes(plan, [choice.kept for choice in choices])
            notes += choice_lines(choices, changes)
        return _planned(plan, recipe, path, overwrite, None if destination is None else destination.name, notes), path

    # What is needed later is checked now: the login, the text, the suite, the output.
    if destination is not None and ranks().main:
        check_login(destination)
    routed = next((units for units in plan.units if units.output.routed), None)
    if recipe.name == "taylor" and routed is not None:
        raise UserError(f"{routed.name}: --method taylor does not reach experts. Use --method wanda or magnitude.")
    calibrates, data = recipe.name == "wanda" and norms is None, None
    if recipe.refit or recipe.name == "taylor" or calibrates:
        data = calibration_data(text, plan.architecture, model.trust_remote_code)
        if not isinstance(data, CalibrationText):
            raise UserError("--structure is scored on text alone; leave out image= in --calibration.")
        if text.execution == "model" and (recipe.name == "taylor" or recipe.refit):
            what = "--method taylor" if recipe.name == "taylor" else "--refit"
            raise UserError(f"{what} runs block by block; leave out --execution model.")
    made_of: dict[str, Any] = {} if norms is None else {"norms": norms.digest}
    if data is not None:
        made_of |= calibration_signature(data, text)
    if removed is not None:
        made_of |= {"matched": [[*role, *counts] for role, counts in removed.items()]}
    signature = run_signature(checkpoint, recipe, made_of)
    prepared = None if suite is None else prepare_suite(suite, load_tokenizer(source.folder, model.trust_remote_code))
    measured = None if prepared is None else measures_of_baseline(evaluation.baseline, source, prepared, loading)
    models = OneModel(loading.device_map, loading.dtype, model.trust_remote_code, stopwatch)
    origin = model_origin(source.name, source.revision, checkpoint)
    if prepared is not None and pending_matches(path, signature):
        report = read_report(path)
    else:
        out = OutputFolder(path, [source.folder], checkpoint.output_bytes, overwrite)
        ranks().share(None)  # all ranks check the output before the first rank creates it
        with out if ranks().main else nullcontext():
            if ranks().main:
                out.begin(signature)

            # Numbers of the inputs of each last layer: norms, or sums of gradients times inputs.
            features: dict[str, Tensor] | None = None
            if recipe.name == "taylor":
                assert isinstance(data, CalibrationText)
                with stage("taylor"):
                    features = _kept_taylor(out, stopwatch)
                    if features is None:
                        dense = models.get(source.folder)
                        with stopwatch("taylor"):
                            runner = BlockwiseModel(dense, recipe.blocks, text.hidden_states)
                            features = taylor_sums(runner, plan.units, data.tokens, text.batch_size)
                            del runner
                        del dense
                        if ranks().main:
                            (out.files / TAYLOR_NAME).parent.mkdir(parents=True, exist_ok=True)
                            write_bytes(out.files / TAYLOR_NAME, save(features))
                            out.note(taylor=dict(stopwatch.record))
            elif recipe.name == "wanda":
                if calibrates:
                    assert data is not None
                    with stage("calibrate"):
                        norms = ranks().share(kept_norms(out, stopwatch) if ranks().main else None)
                        if norms is None:
                            dense = models.get(source.folder)
                            layers, resume = [units.output for units in plan.units], out.calibration
                            with stopwatch("calibrate"):
                                norms = calibrated(dense, data, layers, text, origin, blocks=recipe.blocks, resume=resume)
                            del dense
                            if ranks().main:
                                keep_norms(out, norms, stopwatch)
                        delete_progress(out.calibration)
                assert norms is not None
                found = {units.name: norms.norm(units.name) for units in plan.units}
                features = {name: norm for name, norm in found.items() if norm is not None}

            # Which units stay, and the values of the last layers.
            with stage("choose"):
                scores = unit_scores(plan.units, recipe.name, plan.matrices, features)
                choices, beta = choose_units(plan.units, scores, recipe, multiple, plan.width_by_block, removed)
                _check_removes(choices, recipe)
                changes = None if structure.keep_shapes else config_changes(plan, [choice.kept for choice in choices])
            moved = None
            if recipe.refit:
                assert isinstance(data, CalibrationText)
                with stage("refit"):
                    moved = _moved(models, source.folder, plan, choices, recipe, data.tokens, text, out, stopwatch)

            # The first rank writes, and compares with the dense model.
            written = None
            if ranks().main:
                with stage("prune"):
                    written = _written(models, source.folder, loading, model, plan, choices, changes, moved, out, stopwatch)
                identity = identity_of(checkpoint)
                if norms is not None and not calibrates:
                    warn_if_foreign(norms, identity, source.folder)
                targets, units_record, hashes = written
                about = norms.about if norms is not None else None if data is None else fit_origin(data, text, origin)
                report = RunReport(
                    source=ModelSource(model=source.name, revision=source.revision, identity=identity),
                    command=command_line(),
                    recipe=recipe.but(beta=beta) if recipe.adaptive else recipe,
                    calibration=about,
                    versions=versions(),
                    stages=stage_records(stopwatch.record),
                    targets=targets,
                    sizes=None,
                    matrices={},
                    warnings=[],
                    fits={} if moved is None else moved.records(),
                    structure=units_record,
                    dtype=loading.dtype,
                    device_map=loading.device_map,
                )
                report.save(out.files / REPORT_NAME)
                (out.files / MANIFEST_NAME).unlink(missing_ok=True)
                digest = None if norms is None else norms.digest
                write_manifest(out.files, checkpoint, identity, report.recipe, digest, hashes)
                if prepared is not None:
                    mark_pending(out.files, signature)
                out.complete()
            report = ranks().share(report if ranks().main else None)
    if prepared is not None:
        report = evaluate_checkpoint(path, source, report, prepared, models, loading, stopwatch, measured)
    return report, path


def _kept_taylor(out: OutputFolder, stopwatch: Stopwatch) -> dict[str, Tensor] | None:
    """The sums of an interrupted run of the same command."""
    noted = ranks().share(out.get("taylor") if ranks().main else None)
    if noted is None:
        return None
    stopwatch.record |= noted
    sums: dict[str, Tensor] = ranks().share(load_file(out.files / TAYLOR_NAME) if ranks().main else None)
    return sums


def _moved(
    models: OneModel,
    folder: Path,
    plan: UnitModel,
    choices: list[Choice],
    recipe: Recipe,
    tokens: Tensor,
    text: NormOptions,
    out: OutputFolder,
    stopwatch: Stopwatch,
) -> MovedWeights:
    """The last layer of each unit, refitted so that it makes up for the removed units."""
    moved = MovedWeights(out.fitted, lambda block: out.note(fitted=block))
    done = ranks().share(out.get("refitted") if ranks().main else None)
    if done is not None:
        stopwatch.record |= done
        return moved
    of_layer = {choice.units.name: choice for choice in choices}

    def mask(target: Target) -> Tensor:
        stays = of_layer[target.name].columns
        kept = torch.ones(target.matrix.columns, dtype=torch.bool)
        kept[: len(stays)] = stays
        return kept.expand(target.matrix.rows, -1)

    targets = [Target(c.units.output, plan.matrices[c.units.output]) for c in choices if c.removes]
    dense, update = models.get(folder), recipe.update
    assert update is not None
    with stopwatch("refit"):
        update_model(
            dense,
            targets,
            tokens,
            update,
            moved,
            mask_of=mask,
            batch_size=text.batch_size,
            hidden_states=text.hidden_states,
            blocks=recipe.blocks,
        )
    if ranks().main:
        out.note(refitted=dict(stopwatch.record))
    return moved


def _written(
    models: OneModel,
    folder: Path,
    loading: LoadingOptions,
    model: ModelOptions,
    plan: UnitModel,
    choices: list[Choice],
    changes: Changes | None,
    moved: MovedWeights | None,
    out: OutputFolder,
    stopwatch: Stopwatch,
) -> tuple[TargetsRecord, StructureRecord, dict[str, str]]:
    """Write the shards and the kept units, and compare the written model with the dense one, if both fit in memory."""
    edits, fitted = edits_of(plan, choices), _fitted(moved, choices)
    with stopwatch("prune"):
        hashes = write_checkpoint(
            plan, edits, changes, fitted, out.files, out.get("shards") or {}, lambda done: out.note(shards=done)
        )
        save_structure(out.files / STRUCTURE_NAME, choices)
    dense = models.get(folder)
    with stopwatch("compare"):
        compared = None
        if not is_offloaded(dense):
            smaller = load_model(out.files, loading.device_map, loading.dtype, model.trust_remote_code)
            if not is_offloaded(smaller):
                compared = side_by_side(dense, smaller, choices, fitted)
        if compared is None:
            logger.warning("warning: both models do not fit in memory together; speed and logits are not compared.")
    return _targets_record(plan, edits, changes), _structure_record(plan, choices, changes, edits, compared), hashes


def _fitted(moved: MovedWeights | None, choices: list[Choice]) -> Fitted:
    """Returns the fitted weight of a layer, read one block at a time; None without a refit."""
    blocks = {choice.units.name: choice.units.block for choice in choices}

    @lru_cache(maxsize=1)
    def of_block(block: int) -> Any:
        return moved.block(block) if moved is not None and moved.has(block) else {}

    def weight(layer: str) -> Tensor | None:
        found = of_block(blocks[layer]).get(layer)
        return None if found is None else found.weight

    return weight


def _targets_record(plan: UnitModel, edits: Edits, changes: Changes | None) -> TargetsRecord:
    """Counts over the matrices of all units."""
    weights, kept = plan.weights, 0
    for matrix in plan.matrices.values():
        shape = list(matrix.stored.shape[-2:])
        for axis, indices in edits[matrix.stored.name][matrix.expert].kept.items():
            shape[axis] = len(indices)
        kept += shape[0] * shape[1]
    coverage = plan.architecture.coverage([Target(layer, matrix) for layer, matrix in plan.matrices.items()])
    parameters = plan.checkpoint.parameters
    return TargetsRecord(
        matrices=len(plan.matrices),
        matrices_in_blocks=coverage.matrices,
        weights=weights,
        kept=kept,
        zeros=0 if changes is not None else weights - kept,
        sparsity_of_targets=1 - kept / weights,
        sparsity_of_all_parameters=(weights - kept) / parameters,
        parameters=parameters,
        share_of_all_parameters=weights / parameters,
        share_of_blocks=coverage.share_of_blocks,
    )


def _structure_record(
    plan: UnitModel, choices: list[Choice], changes: Changes | None, edits: Edits, compared: SideBySide | None
) -> StructureRecord:
    tensors = plan.checkpoint.tensors
    costs = [size_of(tensors, {}), size_of(tensors, {} if changes is None else edits)]
    dense, pruned = (CostRecord(parameters=parameters, bytes=size) for parameters, size in costs)
    if compared is not None:
        for cost, flops, speed in zip((dense, pruned), compared.flops, compared.speed, strict=True):
            cost.flops_per_token, cost.tokens_per_second = flops, speed
    layers = {
        choice.units.name: UnitsRecord(
            kind=choice.units.kind,
            role=choice.units.role,
            block=choice.units.block,
            units=len(choice.units),
            kept=len(choice.kept),
            rule=choice.count,
            n_eff=choice.n_eff,
            s_eff=choice.s_eff,
            s_eff_bound=choice.bound,
            n_eff_together=choice.n_eff_together,
        )
        for choice in choices
    }
    return StructureRecord(
        layers=layers,
        dense=dense,
        pruned=pruned,
        prompt_tokens=None if compared is None else compared.tokens,
        difference=None if compared is None else compared.difference,
        config={".".join(path): value for path, value in (changes or {}).items()},
    )


def save_structure(path: Path, choices: list[Choice]) -> None:
    """Write the kept units and all scores: NAME.kept, int64, and NAME.scores, float64, for each layer that reads units."""
    tensors = {}
    for choice in choices:
        tensors[f"{choice.units.name}.kept"] = torch.from_numpy(choice.kept.astype(np.int64))
        tensors[f"{choice.units.name}.scores"] = torch.from_numpy(choice.scores)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, save(tensors))


def _matched(run: Path) -> "dict[tuple[str, str], tuple[int, int]]":
    """(removed, total) of the units of each kind and role in an earlier run, by its report."""
    matched = read_report(run).structure
    if matched is None:
        raise UserError(f"--match {run}: that run removed weights, not heads or neurons. Give one with --structure.")
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for each in matched.layers.values():
        gone, total = found.get((each.kind, each.role), (0, 0))
        found[each.kind, each.role] = gone + each.units - each.kept, total + each.units
    return found


def _planned(plan: UnitModel, recipe: Recipe, path: Path, overwrite: bool, push_to_hub: str | None, notes: list[str]) -> DryRun:
    """The plan of a run; for scores that need no calibration, with the numbers of heads and neurons that stay."""
    targets = [Target(layer, matrix) for layer, matrix in plan.matrices.items()]
    return DryRun(
        layers=planned_layers(targets),
        coverage=plan.architecture.coverage(targets),
        output=str(path),
        disk_bytes=plan.checkpoint.output_bytes,
        needs_overwrite=os.path.lexists(path) and not overwrite,
        model_bytes=sum(size for size, _ in plan.checkpoint.states.values()),
        push_to_hub=push_to_hub,
        recipe=recipe.method,
        notes=notes,
    )


def units_line(every: list[Units]) -> str:
    """The numbers of heads and neurons of a model."""
    roles: dict[tuple[str, str], list[Units]] = {}
    for units in every:
        roles.setdefault((units.kind, units.role), []).append(units)
    parts = []
    for (kind, role), members in roles.items():
        words = f"groups of {members[0].heads} heads" if members[0].heads > 1 else kind
        parts.append(f"{count_of(len(members), 'layer')} with {len(members[0])} {words} ({role})")
    return f"found: {'; '.join(parts)}"


def choice_lines(choices: list[Choice], changes: Changes | None) -> list[str]:
    """How many heads and neurons stay, and what changes in config.json."""
    lines = []
    for kind in ("heads", "neurons"):
        own = [choice for choice in choices if choice.units.kind == kind]
        if own:
            total, rule = sum(len(choice.units) for choice in own), sum(choice.count for choice in own)
            units = f"groups of {own[0].units.heads} heads" if own[0].units.heads > 1 else kind
            lines.append(f"{units}: {sum(len(c.kept) for c in own):,} of {total:,} stay (the rule keeps {rule:,})")
    if changes:
        lines.append(f"config.json: {', '.join(f'{path[-1]} {value}' for path, value in changes.items())}")
    return lines


def _check_removes(choices: list[Choice], recipe: Recipe) -> None:
    """Raise UserError if every unit stays."""
    if any(choice.removes for choice in choices):
        return
    assert recipe.structure is not None
    rule, total = sum(choice.count for choice in choices), sum(len(choice.units) for choice in choices)
    if recipe.structure.keep_shapes or rule == total:
        raise UserError(f"the rule keeps all {total} {recipe.structure.structure}. Give a lower --beta, or --sparsity.")
    raise UserError(
        f"the rule keeps {rule} of {total}, and rounded up to one width for all layers nothing is removed. Use --keep-shapes, "
        "which sets them to zero where they are, a lower --beta, --sparsity, or a smaller --width-multiple."
    )
