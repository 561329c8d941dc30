"""Structured pruning: a smaller dense model without whole attention heads or MLP neurons."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from emp_llm.calibration.activations import keep_norms, kept_norms
from emp_llm.calibration.data import CalibrationText, calibration_data
from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
from emp_llm.calibration.passes import calibrated, calibration_signature, delete_progress, fit_origin, model_origin
from emp_llm.checkpoint.checkpoint import identity_of
from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import Stopwatch, command_line, versions
from emp_llm.common.paths import REPORT_NAME, STRUCTURE_NAME, TAYLOR_NAME
from emp_llm.common.progress import stage
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.evaluate import evaluate_checkpoint, mark_pending, measures_of_baseline, pending_matches, prepare_suite
from emp_llm.evaluation.suites import find_suite
from emp_llm.hub.local_model import find_model
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.models.offload import is_offloaded
from emp_llm.models.one_model import OneModel
from emp_llm.options.prune import PruneOptions
from emp_llm.options.recipe import Recipe, StructureRecipe
from emp_llm.pruning.counts import read_report
from emp_llm.pruning.dry_run import DryRun, planned_layers
from emp_llm.pruning.outcome import log_warnings
from emp_llm.pruning.updates import moved_weights
from emp_llm.pruning.writing import run_signature, write_manifest
from emp_llm.records.run_report import CostRecord, RunReport, StructureRecord, TargetsRecord
from emp_llm.records.source import ModelSource, stage_records
from emp_llm.structure.choice import Choice, Removed, choose_units, removed_by_role
from emp_llm.structure.scores import taylor_sums, unit_scores
from emp_llm.structure.units import Changes, UnitModel, Units, config_changes, unit_model
from emp_llm.structure.writing import compare, kept_parts, size_of, write_checkpoint
from emp_llm.update.update import update_warnings

logger = logging.getLogger(__name__)
_KINDS = {"heads": "attention", "neurons": "mlp", "both": "all-linear"}


def structure_recipe(recipe: Recipe, structure: StructureRecipe) -> Recipe:
    """The recipe of a structured run: of the units in place of weights."""
    return recipe.but(targets=_KINDS[structure.structure], structure=structure)


def prune_structure(recipe: Recipe, options: PruneOptions) -> tuple[RunReport | DryRun, Path]:
    """Prune whole heads or neurons and write the checkpoint without them, or with zeros in their place.

    Args:
        recipe: of `structure_recipe`.
        options: the model, its calibration, the output, the evaluation.

    Returns:
        The report, or the plan of a dry run; and the folder of the checkpoint.

    Raises:
        UserError: the options do not fit the model or the output.
    """
    structure, taylor, stopwatch = recipe.structure, recipe.name == "taylor", Stopwatch()
    assert structure is not None
    norms = None if taylor else given_norms(options, recipe)
    suite = None if options.evaluate is None else find_suite(options.evaluate)
    source = find_model(options.model, options.revision, options.trust_remote_code, headers_suffice=options.dry_run)

    # Which units.
    plan = unit_model(source.folder, structure, recipe.blocks, options.trust_remote_code)
    checkpoint, path = plan.checkpoint, options.output or Path(f"{source.short_name}-{structure.structure}-{recipe.method}")
    matched = None if recipe.match is None else _matched(Path(recipe.match))
    if options.dry_run:
        OutputFolder(path, [source.folder], checkpoint.output_bytes, overwrite=True)  # is only checked
        notes = [_units_line(plan.units)]
        if recipe.name == "magnitude" and ranks().main and not source.hollow:
            choices, _, changes = _chosen(plan, recipe, matched)
            notes += _choice_lines(choices, changes)
        planned = DryRun(
            layers=planned_layers(plan.targets),
            coverage=plan.architecture.coverage(plan.targets),
            output=str(path),
            disk_bytes=checkpoint.output_bytes,
            needs_overwrite=os.path.lexists(path) and not options.overwrite,
            model_bytes=sum(size for size, _ in checkpoint.states.values()),
            push_to_hub=options.push_to_hub,
            recipe=recipe.method,
            notes=notes,
        )
        return planned, path

    # What is needed later is checked now: the text, the suite, the output.
    routed = next((units for units in plan.units if units.output.layer.routed), None)
    if taylor and routed is not None:
        raise UserError(f"{routed.name}: --method taylor does not reach experts. Use --method wanda or magnitude.")
    calibrates = recipe.name == "wanda" and norms is None
    data: CalibrationText | None = None
    made_of: dict[str, Any] = {} if norms is None else {"norms": norms.digest}
    if recipe.refit or taylor or calibrates:
        read = calibration_data(options, plan.architecture, options.trust_remote_code)
        if not isinstance(read, CalibrationText):
            raise UserError("--structure is scored on text alone; leave out image= in --calibration.")
        if options.execution == "model" and (taylor or recipe.refit):
            what = "--method taylor" if taylor else "--refit"
            raise UserError(f"{what} runs block by block; leave out --execution model.")
        data = read
        made_of |= calibration_signature(data, options) | {"dtype": options.dtype, "device_map": options.device_map}
    if matched is not None:
        made_of |= {"matched": [[*role, *counts] for role, counts in matched.items()]}
    signature = run_signature(checkpoint, recipe, made_of)
    prepared = None if suite is None else prepare_suite(suite, load_tokenizer(source.folder, options.trust_remote_code))
    measured = None if prepared is None else measures_of_baseline(options.baseline, source, prepared, options)
    models = OneModel(options.device_map, options.dtype, options.trust_remote_code, stopwatch)
    origin = model_origin(source.name, source.revision, checkpoint)
    if prepared is not None and pending_matches(path, signature):
        report = read_report(path)
    else:
        out = OutputFolder(path, [source.folder], checkpoint.output_bytes, options.overwrite)
        ranks().share(None)  # all ranks check the output before the first rank creates it
        with out if ranks().main else nullcontext():
            if ranks().main:
                out.begin(signature)

            # A number for each input of a last layer: the sum of gradients times inputs, or the norm.
            sums: dict[str, Tensor] | None = None
            if taylor:
                assert data is not None
                with stage("taylor"):
                    sums = ranks().share(_kept_sums(out, stopwatch) if ranks().main else None)  # of an interrupted run
                    if sums is None:
                        runner = BlockwiseModel(models.get(source.folder), recipe.blocks, options.hidden_states)
                        with stopwatch("taylor"):
                            sums = taylor_sums(runner, plan.units, data.tokens, options.batch_size)
                        del runner
                        if ranks().main:
                            write_bytes(out.files / TAYLOR_NAME, save(sums))
                            out.note(taylor=dict(stopwatch.record))
            if calibrates:
                assert data is not None
                with stage("calibrate"):
                    norms = ranks().share(kept_norms(out, stopwatch) if ranks().main else None)
                    if norms is None:
                        dense, outputs = models.get(source.folder), [units.output.layer for units in plan.units]
                        with stopwatch("calibrate"):
                            norms = calibrated(
                                dense, data, outputs, options, origin, blocks=recipe.blocks, resume=out.calibration
                            )
                        del dense
                        if ranks().main:
                            keep_norms(out, norms, stopwatch)
                    delete_progress(out.calibration)

            # Which units stay, and the values of the last layers.
            with stage("choose"):
                feature = sums.get if sums is not None else norms.norm if norms is not None else None
                choices, beta, changes = _chosen(plan, recipe, matched, feature)
            moved, fitted = None, [each.units.output for each in choices if each.record.kept < each.record.units]
            if recipe.updates:
                masks = {choice.units.name: _mask(choice) for choice in choices}
                moved = moved_weights(
                    source.folder, fitted, data, recipe, options, models, out, stopwatch, lambda target: masks[target.name]
                )

            # The first rank writes, and compares with the dense model.
            if ranks().main:
                with stage("prune"):
                    with stopwatch("prune"):
                        hashes = write_checkpoint(plan, choices, changes, moved, out)
                        tensors = {f"{choice.units.name}.kept": torch.from_numpy(choice.kept) for choice in choices}
                        tensors |= {f"{choice.units.name}.scores": torch.from_numpy(choice.scores) for choice in choices}
                        write_bytes(out.files / STRUCTURE_NAME, save(tensors))
                    targets, record = _records(plan, choices, changes)
                    dense, small = models.get(source.folder), None
                    with stopwatch("compare"):
                        if not is_offloaded(dense):
                            small = load_model(out.files, options.device_map, options.dtype, options.trust_remote_code)
                        if small is not None and not is_offloaded(small):
                            compare(dense, small, choices, moved, record)
                        else:
                            logger.warning(
                                "warning: both models do not fit in memory together; speed and logits are not compared."
                            )
                    del dense, small
                identity = identity_of(checkpoint)
                if norms is not None and not calibrates:
                    warn_if_foreign(norms, identity, source.folder)
                fits = {} if moved is None else moved.records()
                about = norms.about if norms is not None else None if data is None else fit_origin(data, options, origin)
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
                    warnings=update_warnings(fits, fitted, recipe) if recipe.updates else [],
                    fits=fits,
                    structure=record,
                    dtype=options.dtype,
                    device_map=options.device_map,
                )
                report.save(out.files / REPORT_NAME)
                digest = None if norms is None else norms.digest
                write_manifest(out.files, checkpoint, identity, report.recipe, digest, hashes)
                if prepared is not None:
                    mark_pending(out.files, signature)
                out.complete()
            report = ranks().share(report if ranks().main else None)
        log_warnings(report.warnings)

    if prepared is not None:
        report = evaluate_checkpoint(path, source, report, prepared, models, options, stopwatch, measured)
    return report, path


def _matched(run: Path) -> Removed:
    """What an earlier run has removed, by its report."""
    structure = read_report(run).structure
    if structure is None:
        raise UserError(f"--match {run}: that run removed weights, not heads or neurons. Give one with --structure.")
    return removed_by_role(structure.layers.values())


def _kept_sums(out: OutputFolder, stopwatch: Stopwatch) -> dict[str, Tensor] | None:
    """The sums of an interrupted run of the same command; None if it did not finish them."""
    if out.get("taylor") is None:
        return None
    stopwatch.record |= out.get("taylor")
    sums: dict[str, Tensor] = load_file(out.files / TAYLOR_NAME)
    return sums


def _chosen(
    plan: UnitModel, recipe: Recipe, matched: Removed | None, feature: Callable[[str], Tensor | None] | None = None
) -> tuple[list[Choice], float | None, Changes | None]:
    """The choices and the beta of `choose_units`, and the fields of config.json that change; None if all shapes stay."""
    structure, scores = recipe.structure, unit_scores(plan.units, recipe.name, feature)
    assert structure is not None
    choices, beta = choose_units(plan.units, scores, recipe, plan.width_by_block, matched)
    total, rule, kept = (sum(getattr(each.record, name) for each in choices) for name in ("units", "rule", "kept"))
    if rule == total:
        raise UserError(f"the rule keeps all {total} {structure.structure}. Give a lower --beta, or --sparsity.")
    if kept == total:
        raise UserError(
            f"the rule keeps {rule} of {total}, and rounded up to one width for all layers nothing is removed. Use "
            "--keep-shapes, which sets them to zero where they are, a lower --beta, --sparsity, or a smaller --width-multiple."
        )
    counts = [choice.record.kept for choice in choices]
    return choices, beta, None if structure.keep_shapes else config_changes(plan, counts)


def _mask(choice: Choice) -> Tensor:
    """Which weights of the last layer read units that stay: bool, shape (outputs, inputs)."""
    matrix = choice.units.output.matrix
    kept = torch.ones(matrix.columns, dtype=torch.bool)
    kept[choice.removed(choice.units.columns)] = False
    return kept.expand(matrix.rows, -1)


def _records(plan: UnitModel, choices: Sequence[Choice], changes: Changes | None) -> tuple[TargetsRecord, StructureRecord]:
    """The matrices of all units; the units, and the sizes of both models."""
    kept_of, checkpoint, coverage = kept_parts(plan, choices), plan.checkpoint, plan.architecture.coverage(plan.targets)
    kept, weights, parameters = 0, coverage.weights or 1, coverage.parameters or 1
    for target in plan.targets:
        rows, columns = kept_of[target.matrix.stored.name][target.matrix.expert]
        kept += int(rows.sum()) * int(columns.sum())
    targets = TargetsRecord(
        matrices=coverage.matrices,
        matrices_in_blocks=coverage.matrices_in_blocks,
        weights=weights,
        kept=kept,
        zeros=0 if changes is not None else weights - kept,
        sparsity_of_targets=1 - kept / weights,
        sparsity_of_all_parameters=(weights - kept) / parameters,
        parameters=coverage.parameters,
        share_of_all_parameters=coverage.share_of_all_parameters,
        share_of_blocks=coverage.share_of_blocks,
    )
    sizes = [size_of(checkpoint, {}), size_of(checkpoint, {} if changes is None else kept_of)]
    dense, pruned = (CostRecord(parameters=parameters, bytes=size) for parameters, size in sizes)
    structure = StructureRecord(
        layers={choice.units.name: choice.record for choice in choices},
        dense=dense,
        pruned=pruned,
        config={".".join(path): value for path, value in (changes or {}).items()},
    )
    return targets, structure


def _units_line(every: Sequence[Units]) -> str:
    """The numbers of heads and neurons of a model."""
    roles: dict[str, list[Units]] = {}
    for units in every:
        roles.setdefault(units.role, []).append(units)
    parts = [
        f"{count_of(len(members), 'layer')} with {len(members[0])} {_words(members[0])} ({role})"
        for role, members in roles.items()
    ]
    return f"found: {'; '.join(parts)}"


def _choice_lines(choices: Sequence[Choice], changes: Changes | None) -> list[str]:
    """How many heads and neurons stay, and what changes in config.json."""
    kinds: dict[str, list[Choice]] = {}
    for choice in choices:
        kinds.setdefault(_words(choice.units), []).append(choice)
    lines = []
    for words, members in kinds.items():
        kept, units, rule = (sum(getattr(each.record, name) for each in members) for name in ("kept", "units", "rule"))
        lines.append(f"{words}: {kept:,} of {units:,} stay (the rule keeps {rule:,})")
    if changes:
        lines.append(f"config.json: {', '.join(f'{path[-1]} {value}' for path, value in changes.items())}")
    return lines


def _words(units: Units) -> str:
    return f"groups of {units.heads} heads" if units.heads > 1 else units.kind
