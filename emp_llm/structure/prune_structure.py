"""`prune --structure`: a checkpoint without some heads or neurons, from the model's folder to the push."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from emp_llm.architecture.targets import Target
from emp_llm.calibration.calibration import Calibration
from emp_llm.checkpoint.identity import identity_of
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import MANIFEST_NAME, REPORT_NAME, STRUCTURE_NAME, TAYLOR_NAME
from emp_llm.common.progress_bars import progress_of
from emp_llm.common.provenance import command_line, versions
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.common.wording import count_of
from emp_llm.evaluation.suites import find_suite
from emp_llm.execution.blockwise import BlockwiseModel
from emp_llm.execution.device_map import parse_device_map
from emp_llm.execution.offload import is_offloaded
from emp_llm.hub.destination import Destination, check_login
from emp_llm.hub.local_model import find_model
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.output.manifest import write_manifest
from emp_llm.pruning.recipe import budget_of, read_report
from emp_llm.records.run_report import CostRecord, RunReport, StructureRecord, TargetsRecord, UnitsRecord
from emp_llm.records.source import CalibrationRecord, ModelSource, RecipeRecord, RefitRecord, StructureRecipe
from emp_llm.refit.fitted_weights import FittedFiles
from emp_llm.refit.fitters import MaskedFitter
from emp_llm.refit.refit_pass import RefitPass
from emp_llm.runs.dry_run import DryRun, planned_layers
from emp_llm.runs.stages.calibrating import CalibrateStage, given_norms, prepare_calibration, warn_if_foreign
from emp_llm.runs.stages.evaluating import PendingEvaluation, evaluation_stages
from emp_llm.runs.stages.pushing import PushStage
from emp_llm.runs.stages.refitting import fit_records
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import run_stages, stage_records
from emp_llm.runs.stages.writing import collected_norms, keep_norms
from emp_llm.selection.budgets import Budget, EffectiveBudget, TotalBudget
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.atomic import write_bytes
from emp_llm.storage.output.output_folder import OutputFolder
from emp_llm.structure.choice import Budgets, Choice, choose_units
from emp_llm.structure.scores import taylor_sums, unit_scores
from emp_llm.structure.units import Changes, UnitModel, Units, config_changes, unit_model
from emp_llm.structure.writing import Edits, Fitted, SideBySide, edits_of, side_by_side, size_of, write_checkpoint

logger = logging.getLogger(__name__)
_TARGETS = {"heads": "attention", "neurons": "mlp", "both": "all-linear"}


def prune_structure(options: PruneOptions) -> RunReport | DryRun:
    """Remove heads and neurons, or set them to zero, and write the checkpoint; evaluate and push it if that is asked for.

    Raises:
        UserError: the options conflict, or do not fit the model, the output or the Hub.
    """
    options.check()
    budgets = _budgets(options)
    given = given_norms(options, options)
    destination = None
    if options.push_to_hub is not None:
        destination = Destination(options.push_to_hub, options.push_revision, options.private, options.overwrite)
        destination.check_name()
    suite = None if options.evaluate is None else find_suite(options.evaluate)
    if options.device_map != "auto":
        parse_device_map(options.device_map)
    source = find_model(options.model, options.revision, options.trust_remote_code)
    kinds: Any = ("heads", "neurons") if options.structure == "both" else (options.structure,)
    model = unit_model(source.folder, kinds, options.head_units, options.blocks, options.trust_remote_code)
    routed = next((units for units in model.units if units.output.routed), None)
    if options.criterion_name == "taylor" and routed is not None:
        raise UserError(f"{routed.name}: --method taylor does not reach experts. Use --method wanda or magnitude.")
    path = options.output or Path(f"{source.short_name}-{options.structure}-{options.method}")
    new_output = partial(OutputFolder, path, [source.folder], model.checkpoint.output_bytes)
    pending = None if suite is None else PendingEvaluation(path)
    evaluates_only = pending is not None and pending.exists
    output = None if evaluates_only else new_output(options.overwrite or options.dry_run)  # a dry run replaces nothing
    if options.dry_run:
        return _dry_run(model, options, budgets, path)
    if destination is not None and ranks().main:
        check_login(destination)
    ranks().share(None)  # a barrier: all ranks check the output before the first rank creates it
    stopwatch = Stopwatch()
    models = RunModels(source, options, options.trust_remote_code, stopwatch)
    calibration = None
    if options.fits or (options.needs_activations and given is None):
        calibration = prepare_calibration(models, model.architecture, options, blocks=options.blocks)
        _check_calibration(options, calibration)
    signature = _signature(model, options, calibration, given)
    with ExitStack() as stack:
        if evaluates_only and pending is not None and pending.matches(signature):
            report = read_report(path)
        else:
            output = output or new_output(options.overwrite)
            if ranks().main:
                stack.enter_context(output)
                output.begin(signature)
            features, norms = None, None
            if options.criterion_name == "taylor":
                features = _taylor(models, model, calibration, options, output)
            elif options.criterion_name == "wanda":
                norms = _norms(models, model, calibration, given, output)
                found = {units.name: norms.norm(units.name) for units in model.units}
                features = {name: norm for name, norm in found.items() if norm is not None}
            choices, changes, used = _chosen(model, options, budgets, features)
            fits = _refitted(models, model, choices, calibration, options, output) if options.refit else None
            about = None if norms is None else norms.about
            if about is None and calibration is not None:
                name = source.name if source.revision is not None else source.folder.name
                about = calibration.origin(CalibrationRecord(model=name, revision=source.revision))
            written = None
            if ranks().main:
                written = _write(models, model, choices, changes, used, fits, options, output, given, about)
                files = output.files
                hashes, identity, recipe = written[1:]
                scheme = Scheme(options.criterion_name, used[0], "all" if options.compared == "all" else "matrix")
                digest = None if norms is None else norms.digest
                (files / MANIFEST_NAME).unlink(missing_ok=True)
                write_manifest(files, model.checkpoint, identity, recipe, scheme, digest, hashes)
                if pending is not None:
                    pending.begin(files, signature)
                output.publish()
            report = ranks().share(None if written is None else written[0])
        try:
            if suite is not None and pending is not None:
                stack.callback(pending.release)
                run_stages(evaluation_stages(models, suite, options, pending, lambda: report, stopwatch))
            if destination is not None:
                run_stages([PushStage(path, destination, lambda: report)])
        except BaseException:
            if ranks().main and pending is not None and pending.exists:
                logger.warning("the checkpoint in %s is complete, but not its evaluation; the same command resumes it.", path)
            raise
    times = ", ".join(f"{stage} {entry.seconds:.1f} s" for stage, entry in report.stages.items())
    logger.info("written to %s (%s)", path, times)
    return report


def _budgets(options: PruneOptions) -> Budgets:
    """How many heads or neurons stay, by kind and role; UserError for a number out of range, or a run to match."""
    if options.match is None:
        try:
            budget = budget_of(options, {})
        except ValueError as error:
            raise UserError(f"--{error}.") from error
        return lambda kind, role: budget
    matched = read_report(options.match).structure
    if matched is None:
        raise UserError(f"--match {options.match}: that run removed weights, not heads or neurons. Give one with --structure.")
    layers = matched.layers.values()

    def of(kind: str, role: str) -> Budget:
        own = [each for each in layers if (each.kind, each.role) == (kind, role)]
        total = sum(each.units for each in own)
        if not own:
            raise UserError(f"--match {options.match}: that run has no {kind} of {role}.")
        return TotalBudget(total - sum(each.kept for each in own), total)

    return of


def _dry_run(model: UnitModel, options: PruneOptions, budgets: Budgets, path: Path) -> DryRun:
    """The plan; for scores that need no calibration, with the numbers of heads and neurons that stay."""
    targets = [Target(layer, matrix) for layer, matrix in model.matrices.items()]
    notes = [_found(model.units)]
    if options.criterion_name == "magnitude" and ranks().main:
        choices, changes, _ = _chosen(model, options, budgets, None)
        for kind in ("heads", "neurons"):
            own = [choice for choice in choices if choice.units.kind == kind]
            if own:
                total, kept = sum(len(choice.units) for choice in own), sum(len(choice.kept) for choice in own)
                rule = sum(choice.count for choice in own)
                notes.append(f"{_words(own[0].units)}: {kept:,} of {total:,} stay (the rule keeps {rule:,})")
        if changes:
            notes.append(f"config.json: {', '.join(f'{field[-1]} {value}' for field, value in changes.items())}")
    return DryRun(
        layers=planned_layers(targets),
        coverage=model.architecture.coverage(targets),
        output=str(path),
        disk_bytes=model.checkpoint.output_bytes,
        needs_overwrite=os.path.lexists(path) and not options.overwrite,
        model_bytes=sum(size for size, _ in model.checkpoint.states.values()),
        push_to_hub=options.push_to_hub,
        recipe=options.method,
        notes=notes,
    )


def _found(every: Sequence[Units]) -> str:
    """The numbers of heads and neurons of a model."""
    roles: dict[tuple[str, str], list[Units]] = {}
    for units in every:
        roles.setdefault((units.kind, units.role), []).append(units)
    parts = [
        f"{count_of(len(members), 'layer')} with {len(members[0])} {_words(members[0])} ({role})"
        for (_, role), members in roles.items()
    ]
    return f"found: {'; '.join(parts)}"


def _words(units: Units) -> str:
    return f"groups of {units.heads} heads" if units.heads > 1 else units.kind


def _check_calibration(options: PruneOptions, calibration: Any) -> None:
    """Raise UserError if a run needs a calibration on text, block by block, and has another."""
    if not isinstance(calibration, Calibration):
        raise UserError("--structure is scored on text alone; leave out image= in --calibration.")
    if options.execution == "model" and (options.criterion_name == "taylor" or options.refit):
        what = "--method taylor" if options.criterion_name == "taylor" else "--refit"
        raise UserError(f"{what} runs block by block; leave out --execution model.")


def _signature(model: UnitModel, options: PruneOptions, calibration: Any, given: Any) -> dict[str, Any]:
    """Everything that the bytes of the checkpoint depend on."""
    made: dict[str, Any] = {} if given is None else {"norms": given.digest}
    if calibration is not None:
        made |= calibration.signature
    if options.match is not None:
        matched = read_report(options.match).structure
        made |= {"matched": {name: each.kept for name, each in matched.layers.items()} if matched else {}}
    return {
        "emp-llm": versions().get("emp-llm", "unknown"),
        "source": {"files": {name: list(state) for name, state in model.checkpoint.states.items()}},
        "recipe": _recipe(options, []).as_dict(),
        "calibration": made,
    }


def _taylor(
    models: RunModels, model: UnitModel, calibration: Any, options: PruneOptions, output: OutputFolder
) -> dict[str, Tensor]:
    """The sums of `taylor_sums`, from this run or an interrupted one."""
    path = output.files / TAYLOR_NAME
    noted = ranks().share(output.work.get("taylor") if ranks().main else None)
    if noted is not None:
        models.stopwatch.record |= noted
        kept: dict[str, Tensor] = ranks().share(load_file(path) if ranks().main else None)
        return kept
    runner = BlockwiseModel(models.dense(), options.blocks, options.hidden_states)
    with progress_of("taylor"), models.stopwatch("taylor"):
        sums = taylor_sums(runner, model.units, calibration.text.tokens, options.batch_size)
    if ranks().main:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(sums))
        output.work.note(taylor=dict(models.stopwatch.record))
    return sums


def _norms(models: RunModels, model: UnitModel, calibration: Any, given: Any, output: OutputFolder) -> Any:
    """The norms of the inputs of the units' output layers: given, from an interrupted run, or collected now."""
    layers = [units.output for units in model.units]
    stage = CalibrateStage(
        models,
        model.checkpoint,
        calibration,
        lambda: layers,
        output.calibration,
        given=given,
        restore=partial(collected_norms, output, models.stopwatch),
        keep=partial(keep_norms, output, models.stopwatch),
    )
    run_stages([stage])
    return stage.norms


def _chosen(
    model: UnitModel, options: PruneOptions, budgets: Budgets, features: dict[str, Tensor] | None
) -> tuple[list[Choice], Changes | None, list[Budget]]:
    """The choices, the changes of config.json (None if all shapes stay), and the budgets; UserError if every unit stays."""
    scores = unit_scores(model.units, options.criterion_name, model.matrices, features)
    multiple, together = None if options.keep_shapes else options.multiple, options.compared == "all"
    choices, used = choose_units(model.units, scores, budgets, together, multiple, model.width_by_block)
    if not any(choice.removes for choice in choices):
        rule, total = sum(choice.count for choice in choices), sum(len(choice.units) for choice in choices)
        if options.keep_shapes or rule == total:
            raise UserError(f"the rule keeps all {total} {options.structure}. Give a lower --beta, or --sparsity.")
        raise UserError(
            f"the rule keeps {rule} of {total}, and rounded up to one width for all layers nothing is removed. Use "
            "--keep-shapes, which sets them to zero where they are, a lower --beta, --sparsity, or a smaller --width-multiple."
        )
    return choices, None if options.keep_shapes else config_changes(model, [choice.kept for choice in choices]), used


def _refitted(
    models: RunModels,
    model: UnitModel,
    choices: list[Choice],
    calibration: Any,
    options: PruneOptions,
    output: OutputFolder,
) -> FittedFiles:
    """The output layers fitted to the calibration text, so that they make up for the removed units."""
    files = FittedFiles(output.work.fitted, lambda block: output.work.note(fitted=block))
    done = ranks().share(output.work.get("refitted") if ranks().main else None)
    if done is not None:
        models.stopwatch.record |= done
        return files
    by_name = {choice.units.name: choice for choice in choices}

    def mask(target: Any) -> Tensor:
        kept = torch.ones(target.matrix.columns, dtype=torch.bool)
        stays = by_name[target.name].columns
        kept[: len(stays)] = stays
        return kept.expand(target.matrix.rows, -1)

    fitter = MaskedFitter(mask, options.refit_damping, options.min_expert_tokens)
    targets = [Target(c.units.output, model.matrices[c.units.output]) for c in choices if c.removes]
    tokens, restores = calibration.text.tokens, options.restored == "block"
    dense = models.dense()
    with progress_of("refit"), models.stopwatch("refit"):
        RefitPass(targets, tokens, options, fitter, options.weighting, options.blocks, restores).run(dense, files)
    if ranks().main:
        output.work.note(refitted=dict(models.stopwatch.record))
    return files


def _write(
    models: RunModels,
    model: UnitModel,
    choices: list[Choice],
    changes: Changes | None,
    budgets: list[Budget],
    fits: FittedFiles | None,
    options: PruneOptions,
    output: OutputFolder,
    given: Any,
    about: CalibrationRecord | None,
) -> tuple[RunReport, dict[str, str], str, RecipeRecord]:
    """Write all but the manifest; returns the report, the shards' hashes, the source's identity and the recipe."""
    checkpoint, files, work, source = model.checkpoint, output.files, output.work, models.source
    edits, fitted = edits_of(model, choices), _fitted(fits, choices)
    with progress_of("prune"), models.stopwatch("prune"):
        done = work.get("shards") or {}
        hashes = write_checkpoint(model, edits, changes, fitted, files, done, lambda hashes: work.note(shards=hashes))
        tensors = {f"{choice.units.name}.kept": torch.from_numpy(choice.kept) for choice in choices}
        tensors |= {f"{choice.units.name}.scores": torch.from_numpy(choice.scores) for choice in choices}
        (files / STRUCTURE_NAME).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(files / STRUCTURE_NAME, save(tensors))
        identity = identity_of(checkpoint)
    compared = None
    dense = models.dense()
    with models.stopwatch("compare"):
        written = None if is_offloaded(dense) else models.load(files)
        if written is None or is_offloaded(written):
            logger.warning("warning: both models do not fit in memory together; speed and logits are not compared.")
        else:
            compared = side_by_side(dense, written, choices, fitted)
    if given is not None:
        warn_if_foreign(given, identity, source.folder)
    recipe = _recipe(options, budgets)
    report = RunReport(
        source=ModelSource(model=source.name, revision=source.revision, identity=identity),
        command=command_line(),
        recipe=recipe,
        calibration=about,
        versions=versions(),
        stages=stage_records(models.stopwatch),
        targets=_targets(model, edits, changes is not None),
        sizes=None,
        matrices={},
        warnings=[],
        fits={} if fits is None else fit_records(fits.figures()),
        structure=_record(model, choices, changes, edits, compared),
    )
    report.save(files / REPORT_NAME)
    return report, hashes, identity, recipe


def _fitted(files: FittedFiles | None, choices: list[Choice]) -> Fitted:
    """Returns the fitted weight of a layer, read one block at a time; None without a refit."""
    blocks = {choice.units.name: choice.units.block for choice in choices}

    @lru_cache(maxsize=1)
    def of_block(block: int) -> Any:
        return files.block(block) if files is not None and files.has(block) else {}

    def weight(layer: str) -> Tensor | None:
        found = of_block(blocks[layer]).get(layer)
        return None if found is None else found.weight

    return weight


def _targets(model: UnitModel, edits: Edits, removed: bool) -> TargetsRecord:
    """Counts over the matrices of all units."""
    weights, kept, parameters = model.weights, 0, model.checkpoint.parameters
    for matrix in model.matrices.values():
        shape = list(matrix.stored.shape[-2:])
        for axis, indices in edits[matrix.stored.name][matrix.expert].kept.items():
            shape[axis] = len(indices)
        kept += shape[0] * shape[1]
    coverage = model.architecture.coverage([Target(layer, matrix) for layer, matrix in model.matrices.items()])
    return TargetsRecord(
        matrices=len(model.matrices),
        matrices_in_blocks=coverage.matrices,
        weights=weights,
        kept=kept,
        zeros=0 if removed else weights - kept,
        sparsity_of_targets=1 - kept / weights,
        sparsity_of_all_parameters=(weights - kept) / parameters,
        parameters=parameters,
        share_of_all_parameters=weights / parameters,
        share_of_blocks=coverage.share_of_blocks,
    )


def _record(
    model: UnitModel, choices: list[Choice], changes: Changes | None, edits: Edits, compared: SideBySide | None
) -> StructureRecord:
    """The units that stay, and parameters, bytes, FLOPs and speed of both models."""
    tensors = model.checkpoint.tensors
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
        config={".".join(field): value for field, value in (changes or {}).items()},
    )


def _recipe(options: PruneOptions, budgets: Sequence[Budget]) -> RecipeRecord:
    """The options that decide which units stay, defaults filled in; with the beta of a requested sparsity once it is known."""
    assert options.structure is not None
    record = RecipeRecord(method=options.method, targets=_TARGETS[options.structure], blocks=options.blocks)
    record.structure = StructureRecipe(
        structure=options.structure,
        group=options.compared,
        head_unit=None if options.structure == "neurons" else options.head_units,
        keep_shapes=options.keep_shapes,
        width_multiple=None if options.keep_shapes or options.structure == "heads" else options.multiple,
    )
    if options.refit:
        record.refit = RefitRecord(weighting=options.weighting, target=options.restored, damping=options.refit_damping)
    record.match = None if options.match is None else str(options.match)
    if options.adaptive:
        record.order = 2.0 if options.order is None else float(options.order)
        record.sparsity = options.sparsity
        record.beta = 1.0 if options.beta is None else float(options.beta)
        if options.sparsity is not None:
            betas = {budget.beta for budget in budgets if isinstance(budget, EffectiveBudget)}
            record.beta = betas.pop() if len(betas) == 1 else None
    elif options.match is None:
        record.sparsity = 0.5 if options.sparsity is None else float(options.sparsity)
    record.dtype, record.device_map = options.dtype, options.device_map
    return record
