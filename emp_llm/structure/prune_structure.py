"""Structured pruning: a smaller model without whole attention heads, MLP neurons, experts or
decoder layers.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.activations import keep_norms, kept_norms
from emp_llm.calibration.data import CalibrationText, calibration_data, keep_generated
from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
from emp_llm.calibration.passes import (
    calibrated,
    calibration_signature,
    delete_progress,
    fit_origin,
    model_origin,
)
from emp_llm.calibration.texts import self_notes
from emp_llm.checkpoint.checkpoint import identity_of
from emp_llm.checkpoint.files import write_bytes, write_json
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import NothingRemovedError, UserError, format_bytes
from emp_llm.common.machine import Stopwatch, command_line, machine_name, versions
from emp_llm.common.paths import REPORT_NAME, SELF_NAME, STRUCTURE_NAME, SUMS_NAME
from emp_llm.common.progress import stage
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.check import Check
from emp_llm.evaluation.evaluate import (
    evaluate_checkpoint,
    mark_pending,
    measures_of_baseline,
    pending_matches,
    prepare_suite,
)
from emp_llm.evaluation.suites import find_suite
from emp_llm.hub.local_model import find_model
from emp_llm.in_memory.healing import check_healable, heal_folder, healing_warnings
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import check_head, load_model, load_tokenizer
from emp_llm.models.offload import is_offloaded
from emp_llm.models.one_model import OneModel
from emp_llm.options.base import Given
from emp_llm.options.prune import PruneOptions, check_wanted
from emp_llm.options.recipe import Effective, Match, Recipe, Share
from emp_llm.pruning.budget import Budget
from emp_llm.pruning.counts import read_report
from emp_llm.pruning.dry_run import DryRun, healing_notes, planned_layers
from emp_llm.pruning.outcome import log_warnings
from emp_llm.pruning.scores import recorded
from emp_llm.pruning.updates import moved_weights
from emp_llm.pruning.writing import run_signature, write_manifest
from emp_llm.records.run_report import CostRecord, RunReport, StructureRecord, TargetsRecord
from emp_llm.records.source import ModelSource, stage_records
from emp_llm.structure.choice import Choice, Removed, choose_units, removed_by_role
from emp_llm.structure.scores import BY_WEIGHTS, unit_scores, unit_sums
from emp_llm.structure.unit_model import unit_model
from emp_llm.structure.units import Changes, UnitModel, Units
from emp_llm.structure.writing import (
    active_parameters,
    compare,
    cuts_of,
    elements_left,
    size_of,
    write_checkpoint,
)
from emp_llm.walk.checks import check_apart, update_warnings
from emp_llm.walk.moved import MovedWeights

if TYPE_CHECKING:
    from emp_llm.evaluation.loss_budget import Judged

logger = logging.getLogger(__name__)
WHO_LOADS = (
    "its layers differ in width, and transformers' own classes do not load that yet: "
    "emp_llm.runtime.load does, and llama.cpp, after emp-llm export."
)


def prune_structure(
    recipe: Recipe, options: PruneOptions, given: Given, judged: "Judged | None" = None
) -> tuple[RunReport | DryRun, Path]:
    """Prune whole heads, neurons, experts or layers and write the checkpoint without them, or with
    zeros in their place.

    Args:
        recipe: of `options.prune.structured`.
        options: the model, its calibration, the output, the evaluation.
        given: the names of the options that the user gave.
        judged: of a run for --loss.

    Returns:
        The report, or the plan of a dry run; and the folder of the checkpoint.

    Raises:
        UserError: the options do not fit the model or the output.
    """
    structure = recipe.structure
    stopwatch = Stopwatch()
    assert structure is not None
    summed = recipe.name not in BY_WEIGHTS
    reads_no_norms = summed or (judged is not None and recipe.name == "magnitude")
    norms = None if reads_no_norms else given_norms(options, recipe, given)
    suite = None if options.evaluate is None else find_suite(options.evaluate)
    source = find_model(
        options.model, options.revision, options.trust_remote_code, headers_suffice=options.dry_run
    )

    # Which units.
    plan = unit_model(source.folder, structure, recipe.targets.blocks, options.trust_remote_code)
    checkpoint = plan.checkpoint
    path = options.output or Path(f"{source.short_name}-{structure.structure}-{recipe.method}")
    if recipe.update is not None:
        check_apart(checkpoint.config, recipe.update_flag, recipe.without_update)
    if recipe.name == "taylor":
        check_head(source.folder, "Use --method wanda, which needs none.")
        check_apart(checkpoint.config, "--method taylor", "Use --method wanda")
    counts = recipe.counts
    matched = _matched(Path(counts.run)) if isinstance(counts, Match) else None
    budget = Budget.of(options.parameters, options.memory)
    if options.dry_run:
        # Is only checked.
        OutputFolder(path, [source.folder], checkpoint.output_bytes, overwrite=True)
        notes = [_units_line(plan.units)]
        if recipe.name == "magnitude" and ranks().main and not source.hollow:
            _, choices, changes = _chosen(plan, recipe, matched, budget)
            notes += _choice_lines(choices, changes)
        elif ranks().main and plan.units[0].sizes_known:
            notes += _sizes_by_share(plan, recipe)
        if recipe.moves or (recipe.name != "magnitude" and norms is None):
            notes += self_notes(options.text_name)
        notes += healing_notes(checkpoint, plan.targets, recipe, options)
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
    for units in plan.units:
        units.check(recipe)
    calibrates = recipe.name == "wanda" and norms is None
    models = OneModel(options.device_map, options.dtype, options.trust_remote_code, stopwatch)
    data: CalibrationText | None = None
    made_of: dict[str, Any] = {} if norms is None else {"norms": norms.digest}
    if recipe.moves or summed or calibrates:
        data = calibration_data(
            options, plan.architecture, options.trust_remote_code, models=models
        )
        if options.execution == "model" and summed:
            raise UserError(
                f"--method {recipe.method} runs the model block by block; leave out "
                "--execution model."
            )
        if recipe.heal is not None:
            check_healable(checkpoint.config, data, plan.targets)
        made_of |= calibration_signature(data, options) | {
            "dtype": options.dtype,
            "device_map": options.device_map,
        }
    if judged is None:
        check_wanted(options, given, data)
    if budget is not None:
        made_of |= {"budget": budget.flag}
    if matched is not None:
        made_of |= {"matched": [[*role, *counts] for role, counts in matched.items()]}
    signature = run_signature(checkpoint, recipe, made_of)
    prepared = None
    if suite is not None:
        prepared = prepare_suite(
            suite, source.folder, load_tokenizer(source.folder, options.trust_remote_code)
        )
    measured = (
        None
        if prepared is None
        else measures_of_baseline(options.baseline, source, prepared, options)
    )
    origin = model_origin(source.name, source.revision, checkpoint)
    if prepared is not None and pending_matches(path, signature):
        report = read_report(path)
    else:
        out = OutputFolder(path, [source.folder], checkpoint.output_bytes, options.overwrite)
        with out:
            out.begin(signature, "" if data is None else machine_name())
            keep_generated(out.files / SELF_NAME, data)

            # What the scores need: sums over the text, or the norms of the inputs of last layers.
            sums: dict[str, Tensor] | None = None
            if summed:
                assert data is not None
                with stage("score"):
                    # Of an interrupted run.
                    sums = _kept_sums(out, stopwatch)
                    if sums is None:
                        runner = BlockwiseModel(
                            models.get(source.folder), recipe.targets.blocks, options.hidden_states
                        )
                        with stopwatch("score"):
                            sums = unit_sums(runner, plan.units, data.tokens, options.batch_size)
                        del runner
                        out.write(SUMS_NAME, save(sums))
                        out.note(sums=dict(stopwatch.record))
            if calibrates:
                assert data is not None
                with stage("calibrate"):
                    norms = kept_norms(out, stopwatch)
                    if norms is None:
                        dense = models.get(source.folder)
                        with stopwatch("calibrate"):
                            norms = calibrated(
                                dense,
                                data,
                                plan.calibrated,
                                options,
                                origin,
                                blocks=recipe.targets.blocks,
                                resume=out.calibration,
                            )
                        del dense
                        keep_norms(out, norms, stopwatch)
                    delete_progress(out.calibration)

            # Which units stay, and the values of the last layers.
            with stage("choose"):
                feature: Any = None if norms is None else norms.of
                if sums is not None:
                    feature = sums.get
                recipe, choices, changes = _chosen(plan, recipe, matched, budget, feature)
            moved = None
            update = recipe.update
            kept = {choice.units: choice.kept for choice in choices}
            moving = [target for units, stays in kept.items() for target in units.fitted(stays)]
            if update is not None:
                assert data is not None
                tokens = data.tokens

                def refit(dense: PreTrainedModel, moved: MovedWeights) -> None:
                    plan.units[0].refit(
                        kept,
                        dense,
                        tokens,
                        update,
                        moved,
                        min_expert_tokens=recipe.targets.min_expert_tokens,
                        blocks=recipe.targets.blocks,
                        batch_size=options.batch_size,
                        hidden_states=options.hidden_states,
                    )

                moved = moved_weights(source.folder, models, out, stopwatch, "refit", refit)

            # The first rank writes, and compares with the dense model. Healing trains what was
            # written.
            healing = None
            if ranks().main:
                with stage("prune"):
                    with stopwatch("prune"):
                        hashes = write_checkpoint(plan, choices, changes, moved, out)
                        tensors = {
                            f"{choice.units.name}.kept": torch.from_numpy(choice.kept)
                            for choice in choices
                        }
                        tensors |= {
                            f"{choice.units.name}.scores": torch.from_numpy(choice.scores)
                            for choice in choices
                        }
                        write_bytes(out.files / STRUCTURE_NAME, save(tensors))
                    targets, record = _records(plan, choices, changes)
                    if sums is not None:
                        for choice in choices:
                            choice.units.add_losses(choice.record, choice.kept, sums)
                    for name, content in plan.units[0].side_files(kept).items():
                        write_json(out.files / name, content)
                    if out.get("compared") is None:
                        dense = models.get(source.folder)
                        in_stacks = any(target.layer.expert is not None for target in moving)
                        with stopwatch("compare"):
                            if is_offloaded(dense) and in_stacks:
                                logger.warning(
                                    "warning: the model is offloaded; speed and logits "
                                    "are not compared."
                                )
                            else:
                                device_map = "disk" if is_offloaded(dense) else options.device_map
                                small = load_model(
                                    out.files, device_map, options.dtype, options.trust_remote_code
                                )
                                compare(dense, small, choices, moved, record)
                                del small
                        del dense
                        out.note(compared=record.as_dict())
                    record = msgspec.convert(out.get("compared"), StructureRecord)
            check = None
            further = getattr(data, "further", None) if judged is None else judged.tokens
            if options.check and suite is None and further is not None:
                check = Check(further, checkpoint.config, models)
                with stopwatch("check"):
                    check.measure_dense(source.folder)
            if recipe.heal is not None:
                assert data is not None
                ranks().share(None)
                models.free()
                with stopwatch("heal"):
                    healing = heal_folder(out, source.folder, recipe, data, options, origin)
            checked = None
            if check is not None:
                ranks().share(None)  # the first rank has written
                with stopwatch("check"):
                    checked = check.record(out.files)
                models.free()
            if ranks().main:
                identity = identity_of(checkpoint)
                if norms is not None and not calibrates:
                    warn_if_foreign(norms, identity, source.folder)
                fits = {} if moved is None else moved.records()
                about = None
                if norms is not None:
                    about = norms.about
                elif data is not None:
                    about = fit_origin(data, options, origin)
                report = RunReport(
                    source=ModelSource(
                        model=source.name, revision=source.revision, identity=identity
                    ),
                    command=command_line(),
                    recipe=recorded(recipe),
                    calibration=about,
                    versions=versions(),
                    stages=stage_records(stopwatch.record),
                    targets=targets,
                    sizes=None,
                    matrices={},
                    warnings=([] if sums is None else plan.units[0].warnings(plan.units, sums))
                    + ([WHO_LOADS] if structure.per_layer else [])
                    + ([] if update is None else update_warnings(fits, moving, update)),
                    fits=fits,
                    structure=record,
                    dtype=options.dtype,
                    device_map=options.device_map,
                    healing=healing,
                    check=checked,
                )
                if healing is not None:
                    report.warnings += healing_warnings(healing)
                report.save(out.files / REPORT_NAME)
                digest = None if norms is None else norms.digest
                write_manifest(
                    out.files,
                    checkpoint,
                    identity,
                    report.recipe,
                    digest,
                    hashes if recipe.heal is None else {},
                )
                if prepared is not None:
                    mark_pending(out.files, signature)
            out.complete()
            report = ranks().share(report if ranks().main else None)
        log_warnings(report.warnings)

    if prepared is not None:
        report = evaluate_checkpoint(
            path, source, report, prepared, models, options, stopwatch, measured
        )
    return report, path


def _matched(run: Path) -> Removed:
    """What an earlier run has removed, by its report."""
    structure = read_report(run).structure
    if structure is None:
        raise UserError(
            f"--match {run}: that run removed weights, not heads or neurons. Give one "
            "with --structure."
        )
    return removed_by_role(structure.layers.values())


def _kept_sums(out: OutputFolder, stopwatch: Stopwatch) -> dict[str, Tensor] | None:
    """The sums of an interrupted run of the same command; None if it did not finish them."""
    if out.get("sums") is None:
        return None
    stopwatch.record |= out.get("sums")
    sums: dict[str, Tensor] = ranks().first(lambda: load_file(out.files / SUMS_NAME))
    return sums


def _chosen(
    plan: UnitModel,
    recipe: Recipe,
    matched: Removed | None,
    budget: Budget | None,
    feature: Callable[[str], Tensor | None] | None = None,
) -> tuple[Recipe, list[Choice], Changes | None]:
    """The recipe with its beta and sparsity in force, the choices, and the fields of config.json
    that change, if any do.
    """
    structure = recipe.structure
    scores = unit_scores(plan.units, recipe.name, feature)
    assert structure is not None
    if budget is not None:
        all_units = sum(len(units) for units in plan.units)

        def size_at(removed: int) -> tuple[int, int]:
            if removed == 0:
                return size_of(plan, [])
            asked = recipe.at(removed / all_units)
            return size_of(plan, choose_units(plan.units, scores, asked, plan.width_by_block)[0])

        fewest = sum(units.fewest for units in plan.units)
        recipe = recipe.at(budget.least(all_units - fewest, size_at) / all_units)
    choices, beta = choose_units(plan.units, scores, recipe, plan.width_by_block, matched)
    counts = recipe.counts
    if isinstance(counts, Effective):
        if counts.beta is None and beta is not None:
            logger.info("sparsity %g is that of beta %.6g.", counts.sparsity, beta)
        recipe = replace(recipe, counts=replace(counts, beta=beta))
    total, rule, kept = (
        sum(getattr(each.record, name) for each in choices) for name in ("units", "rule", "kept")
    )
    if rule == total:
        raise NothingRemovedError(
            f"the rule keeps all {total} {structure.structure}. Give a lower --beta, or --sparsity."
        )
    if kept == total:
        raise NothingRemovedError(
            f"the rule keeps {rule} of {total}, and rounded up to one width for all layers nothing "
            "is removed. Use --keep-shapes, which sets them to zero where they are, a lower "
            "--beta, --sparsity, or a smaller --width-multiple."
        )
    if not structure.keep_shapes:
        kept_units = [choice.kept for choice in choices]
        return recipe, choices, plan.units[0].config_changes(plan, kept_units)
    for units in plan.units:
        units.check_zeroed()
    return recipe, choices, None


def _records(
    plan: UnitModel, choices: Sequence[Choice], changes: Changes | None
) -> tuple[TargetsRecord, StructureRecord]:
    """The matrices of all units; the units, and the sizes of both models."""
    coverage = plan.architecture.coverage(plan.targets)
    cuts = cuts_of(plan, choices, remove=True)
    stored = {target.matrix.stored.name: target.matrix.stored for target in plan.targets}
    kept = sum(elements_left(tensor, cuts) for tensor in stored.values())
    weights = coverage.weights or 1
    parameters = coverage.parameters or 1
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
    removed = [] if changes is None else choices
    sizes = [size_of(plan, []), size_of(plan, removed)]
    active = [
        active_parameters(plan, [], sizes[0][0]),
        active_parameters(plan, removed, sizes[1][0]),
    ]
    dense, pruned = (
        CostRecord(
            parameters=parameters,
            bytes=size,
            active_parameters=reached if reached < parameters else None,
        )
        for (parameters, size), reached in zip(sizes, active, strict=True)
    )
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
    lines = [members[0].line(len(members)) for members in roles.values()]
    return f"found: {'; '.join(lines)}"


def _sizes_by_share(plan: UnitModel, recipe: Recipe) -> list[str]:
    """The size of the model with some shares of its experts or layers. It does not depend on
    their scores.
    """
    routed = any(units.unreached(len(units)) for units in plan.units)
    lines = []
    for share in (0.75, 0.5, 0.25):
        asked = replace(recipe, counts=Share(1 - share))
        ones = [np.ones(len(units)) for units in plan.units]
        try:
            choices, _ = choose_units(plan.units, ones, asked, plan.width_by_block)
        except UserError:  # fewer than a token needs
            continue
        parameters, size = size_of(plan, choices)
        reached = active_parameters(plan, choices, parameters)
        active = f", {reached:,} active per token" if routed else ""
        first = choices[0]
        kept = f"{first.record.kept} of {len(first.units)} {first.units.kind}"
        lines.append(f"with {kept}: {parameters:,} parameters{active}, {format_bytes(size)}")
    return lines


def _choice_lines(choices: Sequence[Choice], changes: Changes | None) -> list[str]:
    """How many heads and neurons stay, and what changes in config.json."""
    kinds: dict[str, list[Choice]] = {}
    for choice in choices:
        kinds.setdefault(choice.units.noun, []).append(choice)
    lines = []
    for words, members in kinds.items():
        kept, units, rule = (
            sum(getattr(each.record, name) for each in members)
            for name in ("kept", "units", "rule")
        )
        lines.append(f"{words}: {kept:,} of {units:,} stay (the rule keeps {rule:,})")
    if changes:
        lines.append(
            f"config.json: {', '.join(f'{path[-1]} {value}' for path, value in changes.items())}"
        )
    return lines
