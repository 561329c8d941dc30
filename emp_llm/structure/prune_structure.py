"""The units of a model, of any kind."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import unfinished, write_bytes
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import (
    NothingRemovedError,
    RefusedError,
    UserError,
    count_of,
    format_bytes,
)
from emp_llm.common.machine import command_line, versions
from emp_llm.common.paths import ACTIVATIONS_NAME, STRUCTURE_NAME, SUMS_NAME
from emp_llm.common.progress import stage
from emp_llm.common.ranks import ranks
from emp_llm.common.tables import percent_cell
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import build_skeleton, check_head, is_offloaded, load_model
from emp_llm.options.prune import AMOUNTS
from emp_llm.options.recipe import BY_GRADIENTS, Effective, Match, Recipe, Share, Structure
from emp_llm.pruning.counts import Budget, Chosen
from emp_llm.pruning.dry_run import DryRun
from emp_llm.pruning.scores import as_recorded
from emp_llm.records.run_report import (
    CostRecord,
    RunReport,
    StructureRecord,
    TargetsRecord,
    UnitsRecord,
    read_report,
)
from emp_llm.runs.prune_run import (
    Inputs,
    PruneRun,
    awaits_evaluation,
    begin,
    finish,
    make_run,
    open_output,
    plan_of,
    update_weights,
)
from emp_llm.runs.run import calibrate, check, dense_model
from emp_llm.structure.choice import Choice, Removed, choose_units, count_removed, unit_scores
from emp_llm.structure.experts import Experts, note_lost_tokens
from emp_llm.structure.layers import Layers
from emp_llm.structure.parts import Heads, Neurons, Parts
from emp_llm.structure.units import Changes, Cuts, Indices, Scores, UnitModel, Units
from emp_llm.structure.writing import (
    active_parameters,
    compare_models,
    cuts_of,
    size_of,
    write_smaller_checkpoint,
)
from emp_llm.walk.checks import check_blocks_separable, update_warnings
from emp_llm.walk.updated import UpdatedWeights

logger = logging.getLogger(__name__)


# Their names are those of `options.recipe.UNIT_KINDS`.
KINDS: dict[str, type[Units]] = {kind.kind: kind for kind in (Heads, Neurons, Experts, Layers)}


def unit_model(
    folder: Path,
    structure: Structure,
    blocks: str | None = None,
    trust_remote_code: bool = False,
) -> UnitModel:
    """The heads, neurons, experts or layers of a model. No weight is read.

    Args:
        folder: of the model.
        structure: which units.
        blocks: name of the list of decoder blocks; None: detected.
        trust_remote_code: run code from the model's folder.

    Raises:
        UserError: the model has no such units, or they are stored in a form that cannot be pruned.
    """
    checkpoint = Checkpoint(folder)
    if checkpoint.config.get("quantization_config") is not None:
        raise UserError(
            f"{folder}: it is quantised, and --structure needs plain weights. Prune "
            "the original model."
        )
    skeleton = build_skeleton(folder, trust_remote_code)
    if getattr(skeleton.config, "is_encoder_decoder", False):
        raise UserError(
            f"{folder}: --structure is for decoder-only models, and this one has an encoder."
        )
    architecture = Architecture.of_model(checkpoint, skeleton, blocks)
    model = UnitModel(skeleton, architecture, structure)
    for name in structure.removed:
        model.units.extend(KINDS[name].find(model, blocks))
    model.units.sort(key=lambda units: units.block)  # of a block, heads come first
    return model


# Structured pruning: a smaller model without whole attention heads, MLP neurons, experts or
# decoder layers.


_NEARLY = 0.9  # of the units that the rule removes
_FEW = 12  # experts or layers; a dry run shows the size with each number of them
Feature = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Decision:
    """Which units stay.

    Attributes:
        recipe: with the sparsity in force.
        beta: in force; None: the number that stays is fixed.
        choices: in the order of the units.
        changes: the fields of config.json that change; None: units are set to zero.
    """

    recipe: Recipe
    beta: float | None
    choices: list[Choice]
    changes: Changes | None

    @property
    def kept(self) -> dict[Units, Indices]:
        """The numbers of the units that stay."""
        return {choice.units: choice.kept for choice in self.choices}

    @property
    def fitted(self) -> list[Target]:
        """The matrices whose weights a refit moves."""
        return [target for units, stays in self.kept.items() for target in units.fitted(stays)]


def find_units(inputs: Inputs, structure: Structure) -> tuple[PruneRun, UnitModel]:
    """The run, and the units of its model.

    Raises:
        UserError: the options do not fit the model or the output.
    """
    recipe = inputs.recipe
    options = inputs.options
    folder = inputs.source.folder
    model = unit_model(folder, structure, recipe.targets.blocks, options.trust_remote_code)
    config = model.checkpoint.config
    if recipe.update is not None:
        check_blocks_separable(config, recipe.update_flag, recipe.without_update)
    if recipe.name in (*BY_GRADIENTS, "perplexity"):
        instead = f"Use --method {'cosine' if recipe.name == 'perplexity' else 'wanda'}"
        check_head(folder, f"{instead}, which needs none.")
        check_blocks_separable(config, f"--method {recipe.name}", instead)
    made_of: dict[str, Any] = {}
    budget = Budget.of(options.parameters, options.memory)
    if budget is not None:
        made_of["budget"] = budget.flag
        if structure.group != "all":
            # Sizes do not depend on scores, which may take long: raises if none is small enough.
            _within_by_share(budget, recipe, model)
    if not structure.keep_shapes:
        _check_config(model, recipe)
    matched = _match(recipe)
    if matched is not None:
        made_of["matched"] = [[*role, *counts] for role, counts in matched.items()]
    for neurons in Neurons.among(model.units):
        neurons.check(recipe)
    if recipe.sums_units and options.execution == "model":
        raise UserError(
            f"--method {recipe.method} runs the model block by block; leave out --execution model."
        )
    coverage = model.architecture.coverage(model.targets)
    chosen = Chosen(model.architecture, model.targets, coverage)
    return make_run(inputs, recipe, chosen, made_of), model


def _check_config(model: UnitModel, recipe: Recipe) -> None:
    """Raise RefusedError if config.json can say no lower number of heads or neurons at all. Scores,
    which may take long, decide only which of them go.
    """
    ones = [np.ones(len(units)) for units in model.units]
    steps = min([len(parts) for parts in Parts.among(model.units) if len(parts) > 1], default=0)
    steps = min(steps, _FEW)
    refusal = None
    for gone in range(1, steps):
        try:
            choices, _ = choose_units(model.units, ones, recipe.but(counts=Share(gone / steps)))
        except UserError:  # fewer than a token needs
            continue
        cuts = cuts_of(model, choices, remove=True)
        if model.config_of(cuts) is not None:
            return
        refusal = refusal or _refusal(model, choices, cuts, another="")
    if refusal is not None:
        raise refusal


def sparsities_of_units(inputs: Inputs, structure: Structure) -> list[float]:
    """A sparsity for each size that the model can have without some of its units, from the lowest.
    No weight is read.
    """
    options = inputs.options
    folder = inputs.source.folder
    blocks = inputs.recipe.targets.blocks
    model = unit_model(folder, structure, blocks, options.trust_remote_code)
    # Without scores, only the numbers of units decide: units of one number are alike.
    every = list({(each.kind, each.role, len(each)): each for each in model.units}.values())
    ones = [np.ones(len(units)) for units in every]

    def kept_at(sparsity: float) -> tuple[int, ...] | None:
        uniform = inputs.recipe.but(counts=Share(sparsity))
        try:
            choices, _ = choose_units(every, ones, uniform)
        except UserError:  # fewer than a token needs
            return None
        return tuple(choice.record.kept for choice in choices)

    total = sum(map(len, every))
    found = {tuple(map(len, every)): 0.0}
    for thousandths in range(1, 991):
        sparsity = thousandths / 1000
        kept = kept_at(sparsity)
        if kept is not None and kept not in found:
            exact = 1 - sum(kept) / total
            found[kept] = exact if kept_at(exact) == kept else sparsity
    return sorted(found.values())[1:]


def plan_units(run: PruneRun, model: UnitModel) -> DryRun:
    """What `prune_units` would do."""
    plan = plan_of(run)
    notes = [_units_line(model.units)]
    given = run.inputs.given & AMOUNTS
    by_weights = run.recipe.name == "magnitude" and not run.source.headers_only
    if ranks().main and by_weights and given and "loss" not in given:
        notes += _decision_lines(_decide(run, model))
    elif ranks().main and not model.structure.keep_shapes:
        notes += _sizes_by_share(model, *_asked(run, model))
    return replace(plan, notes=[*notes, *plan.notes])


def _asked(run: PruneRun, model: UnitModel) -> tuple[Recipe, str]:
    """The recipe whose sparsity is asked for, and the option that asks; an empty one if what goes
    depends on scores.
    """
    recipe = run.recipe
    if "sparsity" in run.inputs.given:
        return recipe, f"--sparsity {recipe.counts.sparsity:g}"
    budget = Budget.of(run.options.parameters, run.options.memory)
    by_share = isinstance(recipe.counts, Share) or model.structure.units == "layers"
    if budget is None or model.structure.group == "all" or not by_share:
        return recipe, ""
    return _within_by_share(budget, recipe, model), budget.flag


def prune_units(run: PruneRun, model: UnitModel) -> RunReport:
    """Write the checkpoint without whole heads, neurons, experts or layers, or with zeros in their
    place.
    """
    if awaits_evaluation(run):
        return read_report(run.path)
    with open_output(run.inputs, run.checkpoint) as out:
        healing = begin(run, out)

        # What the scores need: sums over the text, or the norms of the inputs of last layers.
        sums: dict[str, Tensor] = {}
        norms = run.inputs.norms
        feature: Feature | None = None
        if run.recipe.sums_units:
            sums = _sums(run, model, out)
            feature = sums.get
        if run.inputs.calibrates:
            read = [parts.output.layer for parts in Parts.among(model.units)]
            file = out.files / ACTIVATIONS_NAME
            statistics = run.recipe.statistics
            with stage("calibrate"):
                norms = calibrate(run, read, statistics, out.calibration, file=file, out=out)
        if norms is not None:
            feature = norms.of

        # Which units stay, and the values of the last layers.
        with stage("choose"):
            decision = _decide(run, model, feature)
        updated = None
        update = decision.recipe.update
        if update is not None:
            refit = partial(
                model.units[0].refit,
                decision.kept,
                tokens=run.data.in_turns,
                update=update,
                min_expert_tokens=run.recipe.targets.min_expert_tokens,
                blocks=run.recipe.targets.blocks,
                batch_size=run.options.batch_size,
                hidden_states=run.options.hidden_states,
            )
            updated = update_weights(run, out, update.name, refit, decision.fitted)
        dense = check(run, run.source.folder)

        # The first rank writes, and compares with the dense model. Healing trains what was written.
        report, hashes = ranks().first(partial(_write, run, model, decision, sums, updated, out))
        return finish(run, out, report, hashes, norms, dense, healing)


def _match(recipe: Recipe) -> Removed | None:
    """What the run that a recipe matches has removed, by its report; None if it matches none."""
    if not isinstance(recipe.counts, Match):
        return None
    structure = read_report(Path(recipe.counts.run)).structure
    if structure is None:
        raise UserError(
            f"--match {recipe.counts.run}: that run removed weights, not heads or neurons. Give "
            "one with --structure."
        )
    return count_removed(structure.layers.values())


def _sums(run: PruneRun, model: UnitModel, out: OutputFolder) -> dict[str, Tensor]:
    """The sums over the text that score units, or those of an interrupted run."""

    def own_sums(path: Path) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = load_file(path)
        for units in model.units:
            units.collected(sums.get)  # fails if they are of others
        return sums

    with stage("score"):
        if out.has("sums", out.files / SUMS_NAME, run.stopwatch):
            kept = ranks().first(lambda: unfinished(out.files / SUMS_NAME, own_sums))
            if kept is not None:
                return kept
        blocks = run.recipe.targets.blocks
        runner = BlockwiseModel(dense_model(run), blocks, run.options.hidden_states)
        with run.stopwatch("score"):
            sums = model.units[0].sums(
                runner, model.units, run.data.tokens, run.options.batch_size, run.recipe
            )
        if ranks().main:
            write_bytes(out.files / SUMS_NAME, save(sums))
        out.keep("sums", out.files / SUMS_NAME, run.stopwatch)
    return sums


def _decide(run: PruneRun, model: UnitModel, feature: Feature | None = None) -> Decision:
    """Which units stay.

    Args:
        feature: what a score needs of the text, by name.

    Raises:
        NothingRemovedError: all do.
    """
    recipe = run.recipe
    structure = model.structure
    scores = unit_scores(model.units, recipe.name, feature)
    budget = Budget.of(run.options.parameters, run.options.memory)
    if budget is not None:
        recipe = _within(budget, recipe, model, scores)
    choices, beta = choose_units(model.units, scores, recipe, _match(recipe))
    counts = recipe.counts
    if isinstance(counts, Effective) and counts.in_force is None and beta is not None:
        logger.info("sparsity %g is that of beta %.6g.", counts.sparsity, beta)
    total = sum(choice.record.units for choice in choices)
    rule = sum(choice.record.rule for choice in choices)
    kept = sum(choice.record.kept for choice in choices)
    if rule == total:
        if counts.sparsity is not None:
            raise NothingRemovedError(
                f"--sparsity {counts.sparsity:g} removes none of the {total} "
                f"{structure.units}. Give a higher one."
            )
        raise NothingRemovedError(
            f"the rule keeps all {total} {structure.units}. Give a lower --beta, or --sparsity."
        )
    if kept == total:
        raise NothingRemovedError(
            f"the rule keeps {rule} of {total}, and rounded up to one width for all layers nothing "
            "is removed. Use --keep-shapes, which sets them to zero where they are, a lower "
            "--beta, a higher --sparsity, or a smaller --width-multiple."
        )
    cuts = cuts_of(model, choices, not structure.keep_shapes)  # raises if one cannot be left out
    if structure.keep_shapes:
        return Decision(recipe, beta, choices, None)
    changes = model.config_of(cuts)
    if changes is None:
        raise _refusal(model, choices, cuts)
    return Decision(recipe, beta, choices, changes)


def _refusal(
    model: UnitModel,
    choices: Sequence[Choice],
    cuts: Cuts,
    another: str = "Another amount may fit. ",
) -> RefusedError:
    """The error if no change of config.json gives the smaller model."""
    fewer = [choice for choice in choices if len(choice.kept) < len(choice.units)]
    choice = fewer[0]
    why = ""
    shapes = model.shapes_with(cuts.configs[0])
    if shapes is not None:
        name = next((name for name in cuts.shapes if shapes.get(name) != cuts.shapes[name]), "")
        why = f" (its model would need another {name})"
        of_name = (
            one for one in fewer if name in {each.layer.parameter for each in one.units.targets}
        )
        choice = next(of_name, choice)
    return RefusedError(
        choice.units.refusal.format(
            units=choice.units,
            kept=len(choice.kept),
            total=len(choice.units),
            model=type(model.skeleton).__name__,
            why=why,
            another=another,
        )
    )


def _within(budget: Budget, recipe: Recipe, model: UnitModel, scores: Sequence[Scores]) -> Recipe:
    """The recipe with the lowest sparsity that keeps to a budget."""
    total = sum(len(units) for units in model.units)

    def size_at(removed: int) -> tuple[int, int]:
        if removed == 0:
            return size_of(model, [])
        asked = recipe.at(removed / total)
        return size_of(model, choose_units(model.units, scores, asked)[0])

    fewest = sum(units.fewest for units in model.units)
    return recipe.at(budget.least(total - fewest, size_at) / total)


def _within_by_share(budget: Budget, recipe: Recipe, model: UnitModel) -> Recipe:
    """The recipe of a fixed share that keeps to a budget; no scores decide it."""
    ones = [np.ones(len(units)) for units in model.units]
    return _within(budget, recipe.but(counts=Share()), model, ones)


def _write(
    run: PruneRun,
    model: UnitModel,
    decision: Decision,
    sums: Mapping[str, Tensor],
    updated: UpdatedWeights | None,
    out: OutputFolder,
) -> tuple[RunReport, dict[str, str]]:
    """Write the shards and side files, and compare both models; the report so far, and the hash of
    each shard.
    """
    choices = decision.choices
    budget = Budget.of(run.options.parameters, run.options.memory)
    with stage("prune"):
        with run.stopwatch("prune"):
            hashes = write_smaller_checkpoint(model, choices, decision.changes, updated, out)
            tensors = {}
            for choice in choices:
                tensors[f"{choice.units.name}.kept"] = torch.from_numpy(choice.kept)
                tensors[f"{choice.units.name}.scores"] = torch.from_numpy(choice.scores)
            write_bytes(out.files / STRUCTURE_NAME, save(tensors))
        targets, record = _records(model, choices, decision.changes)
        warnings = []
        if sums:
            records = {choice.units: choice.record for choice in choices}
            warnings = note_lost_tokens(records, sums)
        compared = out.get("compared", StructureRecord)
        if compared is None:
            _compare(run, decision, updated, out.files, record)
            out.note(compared=record.as_dict())
        record = compared or record
    if run.inputs.search is None and budget is None:  # else the run has found how many go
        warnings += _rounding(choices, decision.recipe)
    fits = {} if updated is None else updated.records()
    update = decision.recipe.update
    if update is not None:
        warnings += update_warnings(fits, decision.fitted, update)
    report = RunReport(
        source=run.source.as_source(identity_of(model.checkpoint)),
        command=command_line(),
        recipe=as_recorded(decision.recipe).with_found(decision.beta),
        calibration=None,
        versions=versions(),
        stages={},
        targets=targets,
        sizes=None,
        matrices={},
        warnings=warnings,
        fits=fits,
        structure=record,
    )
    return report, hashes


def _compare(
    run: PruneRun,
    decision: Decision,
    updated: UpdatedWeights | None,
    written: Path,
    record: StructureRecord,
) -> None:
    """Compare the logits of both models; their difference is put into `record`."""
    options = run.options
    dense = dense_model(run)
    offloaded = is_offloaded(dense)
    with run.stopwatch("compare"):
        if offloaded and any(target.layer.expert is not None for target in decision.fitted):
            logger.warning("warning: the model is offloaded; the logits are not compared.")
            return
        device_map = "disk" if offloaded else options.device_map
        small = load_model(written, device_map, options.dtype, options.trust_remote_code)
        compare_models(dense, small, decision.choices, updated, record)


def _records(
    model: UnitModel, choices: Sequence[Choice], changes: Changes | None
) -> tuple[TargetsRecord, StructureRecord]:
    """The matrices of all units; the units, and the sizes of both models."""
    coverage = model.architecture.coverage(model.targets)
    cuts = cuts_of(model, choices, remove=changes is not None)
    stored = {target.matrix.stored.name: target.matrix.stored for target in model.targets}
    kept = sum(cuts.elements(tensor) for tensor in stored.values())
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
    structure = StructureRecord(
        layers={choice.units.name: choice.record for choice in choices},
        dense=_cost(model, []),
        pruned=_cost(model, [] if changes is None else choices),
        config={".".join(path): value for path, value in (changes or {}).items()},
    )
    return targets, structure


def _cost(model: UnitModel, choices: Sequence[Choice]) -> CostRecord:
    """The size of the model with the kept units; without choices, of the dense one."""
    parameters, size = size_of(model, choices)
    reached = active_parameters(model, choices, parameters)
    return CostRecord(
        parameters=parameters,
        bytes=size,
        active_parameters=reached if reached < parameters else None,
    )


def _units_line(every: Sequence[Units]) -> str:
    """The numbers of heads and neurons of a model."""
    roles: dict[str, list[Units]] = {}
    for units in every:
        roles.setdefault(units.role, []).append(units)
    lines = [
        f"{count_of(len(members), 'layer')} with {len(members[0])} "
        f"{members[0].noun or members[0].kind} ({role})"
        for role, members in roles.items()
    ]
    for layers in Layers.among(every):
        lines = [f"{count_of(len(layers), 'decoder layer')} ({layers.name})"]
    return f"found: {'; '.join(lines)}"


def _sizes_by_share(model: UnitModel, recipe: Recipe, flag: str) -> list[str]:
    """The size of the model with each number of its units, or with some shares of many; and what
    the sparsity of the recipe removes, if an option asks for it. They do not depend on scores.
    """
    asked = (recipe.counts.sparsity or 0.0) if flag else 0.0
    routed = any(experts.unreached(len(experts)) for experts in Experts.among(model.units))
    number = max(map(len, Parts.among(model.units)), default=len(model.units[0]))
    shares = [gone / number for gone in range(1, number)] if number <= _FEW else [0.25, 0.5, 0.75]
    ones = [np.ones(len(units)) for units in model.units]
    lines: dict[int, str] = {}
    remarks = []
    for share in [*shares, *([asked] if asked else [])]:
        by_share = recipe.but(counts=Share(share))
        try:
            choices, _ = choose_units(model.units, ones, by_share)
        except UserError:  # fewer than a token needs
            continue
        cost = _cost(model, choices)
        reached = cost.active_parameters or cost.parameters
        active = f", {reached:,} active per token" if routed else ""
        kinds = dict[str, UnitsRecord]()
        for each in choices:
            kinds.setdefault(each.units.noun or each.units.kind, each.record)
        said = " and ".join(f"{one.kept} of {one.units} {kind}" for kind, one in kinds.items())
        if share == asked:
            said += f" ({flag})"
            remarks = _rounding(choices, by_share) if flag.startswith("--sparsity") else []
        size = format_bytes(cost.bytes)
        lines[cost.parameters] = f"with {said}: {cost.parameters:,} parameters{active}, {size}"
    return [*(lines[size] for size in sorted(lines, reverse=True)), *remarks]


def _totals(choices: Sequence[Choice]) -> dict[str, tuple[int, int, int]]:
    """Noun of the units -> how many there are, how many the rule keeps, and how many stay."""
    totals: dict[str, tuple[int, int, int]] = {}
    for choice in choices:
        record = choice.record
        noun = choice.units.noun or choice.units.kind
        units, rule, kept = totals.get(noun, (0, 0, 0))
        totals[noun] = (units + record.units, rule + record.rule, kept + record.kept)
    return totals


def _rounding(choices: Sequence[Choice], recipe: Recipe) -> list[str]:
    """A sentence for each kind of units of which far fewer go than the rule removes, or than a
    sparsity asks for.
    """
    structure = recipe.structure
    assert structure is not None
    asked = recipe.counts.sparsity or 0.0
    messages = []
    for noun, (units, rule, kept) in _totals(choices).items():
        if units - rule < _NEARLY * asked * units:
            messages.append(
                f"--sparsity {asked:g} asks for {asked * units:.4g} of {units:,} {noun}, rounded "
                f"down to {units - rule:,} ({percent_cell(1 - rule / units)} %)."
            )
        if units - kept >= _NEARLY * (units - rule):
            continue
        multiple = structure.width_multiple if noun == "neurons" else None
        why = (
            "one number for all layers"
            if multiple is None
            else f"a multiple of {multiple} in each layer, by --width-multiple"
        )
        messages.append(
            f"the rule keeps {rule:,} of {units:,} {noun}, and {kept:,} stay: {why}. So "
            f"{units - kept:,} go in place of {units - rule:,}."
        )
    return messages


def _decision_lines(decision: Decision) -> list[str]:
    """How many heads and neurons stay, and what changes in config.json."""
    lines = []
    for noun, (units, rule, kept) in _totals(decision.choices).items():
        lines.append(f"{noun}: {kept:,} of {units:,} stay (the rule keeps {rule:,})")
    lines += _rounding(decision.choices, decision.recipe)
    if decision.changes:
        changes = [f"{path[-1]} {value}" for path, value in decision.changes.items()]
        lines.append(f"config.json: {', '.join(changes)}")
    return lines
