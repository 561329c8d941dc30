"""A run of `prune`: what it is given, and the steps that pruning of weights and of units share."""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emp_llm.calibration.texts import calibration_corpora, self_notes
from emp_llm.checkpoint.checkpoint import Checkpoint, check_agreement
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError
from emp_llm.common.machine import Stopwatch, machine_name
from emp_llm.common.paths import ACTIVATIONS_NAME, REPORT_NAME, SELF_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import ranks
from emp_llm.healing.planning import (
    HealingPlan,
    check_healable,
    check_tracker,
    check_trains,
    healing_bytes,
    in_steps,
    sequences_for,
)
from emp_llm.models.architecture import Target
from emp_llm.models.local_model import LocalModel, find_model
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import Quantization, max_context, parse_device_map, quantization_of
from emp_llm.options.prune import PruneOptions, check_wanted
from emp_llm.options.recipe import LAYER_TOKENS, ByCost, Recipe
from emp_llm.options.shared import GivenOptions
from emp_llm.pruning.counts import (
    Budget,
    Chosen,
    counts_of,
    scores_of,
    starving_rows,
    stored_bytes,
    targets_of_folder,
    with_budget,
)
from emp_llm.pruning.dry_run import (
    DryRun,
    healing_notes,
    needs_of,
    planned_layers,
    resume_bytes,
)
from emp_llm.pruning.masks import Pruner, check_device
from emp_llm.pruning.report import log_warnings, pruned_before, report_of
from emp_llm.pruning.scores import Scores
from emp_llm.pruning.writing import run_signature, write_checkpoint
from emp_llm.records.base import Corpus, samples_of, stage_records
from emp_llm.records.run_report import LossRecord, RunReport, read_report
from emp_llm.runs.run import (
    Run,
    calibrate,
    check,
    check_pruned,
    choose_healing,
    count_steps,
    dense_model,
    heal,
    keep_norms,
    read_given_norms,
    warn_if_foreign,
    why_unchecked,
    write_records,
)

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.data import CalibrationText
    from emp_llm.evaluation.evaluate import PreparedSuite
    from emp_llm.evaluation.results import Suite
    from emp_llm.records.evaluation import Measures, PerplexityRecord
    from emp_llm.walk.updated import UpdatedWeights
logger = logging.getLogger(__name__)
_A_BYTE = 1.5e-9  # seconds, to read it, decide a mask and write it
_LEAST = 6  # held-out sequences, to decide and to judge


@dataclass(frozen=True)
class LossSearch:
    """What a run that keeps to a budget needs beside its options.

    Attributes:
        tokens: the sequences that judge, int64, shape (sequences, length).
        norms: of the calibration; None if the recipe needs none.
        record: the curve, for the report.
    """

    tokens: "Tensor"
    norms: "Activations | None"
    record: LossRecord


@dataclass(frozen=True)
class Inputs:
    """What the options of a `prune` name, before its targets are known, and what the run needs.

    Attributes:
        recipe, options: as the user gave them.
        given: the names of the options that the user gave.
        source: the dense model.
        norms: of a file, or of a search by --loss; None: the run collects them, or needs none.
        search: of a run whose sparsity --loss has found; else None.
        suite: to evaluate both models with; None: no evaluation.
    """

    recipe: Recipe
    options: PruneOptions
    given: GivenOptions
    source: LocalModel
    norms: "Activations | None"
    search: LossSearch | None
    suite: "Suite | None"

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        structure = self.recipe.structure
        name = self.recipe.method
        name = name if structure is None else f"{structure.units}-{name}"
        return self.options.output or Path(f"{self.source.short_name}-{name}")

    @property
    def calibrates(self) -> bool:
        """Whether the run collects the norms of inputs. Costs are those of Wanda's masks."""
        needed = self.recipe.needs_activations or self.recipe.by_cost is not None
        return needed and self.norms is None

    @property
    def needs_text(self) -> bool:
        """Whether the checkpoint depends on a text. Another may read one that checks it."""
        recipe = self.recipe
        holds_out = self.options.loss is not None or recipe.by_cost is not None
        return holds_out or recipe.moves or recipe.sums_units or self.calibrates

    @property
    def reads_text(self) -> bool:
        """Whether the run reads a text, for the checkpoint or to check it."""
        return self.needs_text or (self.checks and self.options.calibration is not None)

    @property
    def checks(self) -> bool:
        """Whether the run ends with a check of held-out text, if it has one."""
        return self.options.check and self.options.evaluate is None


def find_inputs(
    recipe: Recipe, options: PruneOptions, given: GivenOptions, search: LossSearch | None = None
) -> Inputs:
    """What checked options name.

    Raises:
        UserError: the model, the suite or the file of norms is missing.
    """
    if options.device_map != "auto":
        parse_device_map(options.device_map)
    norms = None
    if search is not None:
        norms = search.norms
    elif options.loss is None and not recipe.sums_units:
        checks = options.check and options.evaluate is None
        norms = read_given_norms(options, recipe, given, checks=checks)
    suite = None
    if options.evaluate is not None:
        from emp_llm.evaluation.results import find_suite

        suite = find_suite(options.evaluate)
    trust = options.trust_remote_code
    source = find_model(options.model, options.revision, trust, headers_suffice=options.dry_run)
    if recipe.heal is not None:
        check_tracker(options.report_to)
    return Inputs(recipe, options, given, source, norms, search, suite)


@dataclass(frozen=True, kw_only=True)
class PruneRun(Run):
    """A run of `prune`.

    Attributes:
        recipe: with counts of its own: the targets are known.
        suite: evaluates both models; None: there is no evaluation, or the run is dry.
        baseline: earlier results of the dense model; None: there are none.
        deciding: held-out sequences that decide how much goes; None: none do.
    """

    options: PruneOptions
    inputs: Inputs
    suite: "PreparedSuite | None"
    baseline: "Measures | None"
    deciding: "Tensor | None"


def make_run(
    inputs: Inputs, recipe: Recipe, chosen: Chosen, made_of: dict[str, Any] | None = None
) -> PruneRun:
    """The run, with the text and the suite, which are read before a model is loaded, to fail early.
    A dry run reads neither. A collective call.

    Args:
        made_of: what the checkpoint depends on beside model, recipe, norms and text.

    Raises:
        UserError: the model cannot heal, or not on so few sequences; the output may not be written,
            or holds other work; or the text or the data of the suite is missing, or does not do; or
            a rank reads something else.
    """
    options = inputs.options
    checkpoint = chosen.checkpoint
    stopwatch = Stopwatch()
    models = OneModel(options.device_map, options.dtype, options.trust_remote_code, stopwatch)
    quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
    if recipe.heal is not None:
        check_healable(checkpoint.config, chosen.targets)
        corpora = _corpora(options, checkpoint.config)
        recipe = recipe.but(heal=in_steps(recipe.heal, corpora))
        check_trains(samples_of(corpora), corpora[0].seqlen or 0)
    text = deciding = suite = baseline = None
    held_out = None if inputs.search is None else inputs.search.tokens
    signature: dict[str, Any] = {}
    if inputs.search is None:
        check_wanted(options, inputs.given, inputs.reads_text)
    if not options.dry_run:
        made_of = made_of or {}
        output = partial(open_output, inputs, checkpoint)
        if recipe.heal is not None and recipe.heal.minutes is not None:
            made_of |= {"minutes": recipe.heal.minutes}
            left = ranks().first(lambda: _pending(inputs.path) or output().left)
            again = options.overwrite
            recipe = count_steps(chosen, recipe, options, models, checkpoint, corpora, left, again)
        if inputs.suite is None or not inputs.path.exists():  # else `awaits_evaluation` decides
            work = output()
            if options.loss is None:  # a search has work of its own
                work.check_leftover(run_signature(checkpoint, recipe, None))
        if inputs.reads_text:
            text, deciding, judges = _read_text(inputs, recipe, chosen, models, quantization)
            held_out = judges if inputs.search is None else held_out
        if inputs.suite is not None:
            suite, baseline = _read_suite(inputs, inputs.suite)
        made_of |= _sign(inputs, text, deciding, quantization)
        signature = run_signature(checkpoint, recipe, made_of or None)
        agreed = signature | made_of
        del agreed["source"], agreed["activations"]
        if suite is not None:
            agreed["suite"] = msgspec.to_builtins(suite.suite.record())
        check_agreement(agreed, model=checkpoint)
    moves_blocks = recipe.update is not None or options.propagate == "pruned"
    return PruneRun(
        source=inputs.source,
        recipe=recipe,
        chosen=chosen,
        options=options,
        text=text,
        path=inputs.path,
        models=models,
        stopwatch=stopwatch,
        quantization=quantization,
        held_out=held_out if inputs.checks else None,
        by_blocks=moves_blocks and recipe.structure is None,
        signature=signature,
        inputs=inputs,
        suite=suite,
        baseline=baseline,
        deciding=deciding,
    )


def _read_text(
    inputs: Inputs,
    recipe: Recipe,
    chosen: Chosen,
    models: OneModel,
    quantization: Quantization | None,
) -> "tuple[CalibrationText, Tensor | None, Tensor | None]":
    """The text, and of what is held out of it, what decides how much goes, and what is left."""
    load_packages()
    from emp_llm.calibration.data import CHECKED, CHOOSING, calibration_data

    options = inputs.options
    decides = recipe.by_cost is not None or options.loss is not None
    text = calibration_data(
        options,
        chosen.architecture,
        models,
        options.propagate,
        quantization,
        # A run that --loss has begun trains on none of the sequences by which it chose.
        held_out=CHECKED if not decides and inputs.search is None else CHOOSING,
        training=0 if recipe.heal is None else sequences_for(recipe.heal.steps),
    )
    if not decides:
        return text, None, text.held_out
    flag = "--shares cost" if options.loss is None else "--loss"
    return text, *split_held_out(text.held_out, options.text_name, flag)


def _read_suite(inputs: Inputs, suite: "Suite") -> "tuple[PreparedSuite, Measures | None]":
    """The suite with its data, and earlier results of the dense model."""
    load_packages()
    from emp_llm.evaluation.evaluate import measures_of_baseline, prepare_suite
    from emp_llm.models.loading import load_tokenizer

    options = inputs.options
    source = inputs.source
    tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
    prepared = prepare_suite(suite, source.folder, tokenizer)
    return prepared, measures_of_baseline(
        options.baseline, source, prepared, options.dtype, options.device_map
    )


def _sign(
    inputs: Inputs,
    text: "CalibrationText | None",
    deciding: "Tensor | None",
    quantization: Quantization | None,
) -> dict[str, Any]:
    """What the checkpoint depends on of the norms and the text, as JSON."""
    options = inputs.options
    made_of: dict[str, Any] = {} if inputs.norms is None else {"norms": inputs.norms.digest}
    if text is None or not inputs.needs_text:
        return made_of
    from emp_llm.calibration.passes import calibration_signature

    made_of |= calibration_signature(text, options, options.propagate, quantization)
    made_of |= {"dtype": options.dtype, "device_map": options.device_map}
    if inputs.recipe.heal is not None:
        made_of["seed"] = options.seed  # of the order of the sequences
        made_of["training"] = text.for_training.signature
    if deciding is not None and text.held_out is not None:
        made_of["held out"] = replace(text, tokens=text.held_out).signature
    return made_of


def _pending(path: Path) -> dict[str, Any]:
    """The signature of the run whose checkpoint is finished, and its evaluation is not."""
    from emp_llm.evaluation.evaluate import pending_signature

    return pending_signature(path)


def awaits_evaluation(run: PruneRun) -> bool:
    """Whether the checkpoint is finished, and only its evaluation is not."""
    if run.suite is None:
        return False
    return bool(_pending(run.path) == json.loads(json.dumps(run.signature)))


def open_output(inputs: Inputs, checkpoint: Checkpoint, more: int = 0) -> OutputFolder:
    """The output.

    Args:
        checkpoint: the dense model's.
        more: bytes that the work takes beside those of the checkpoint.

    Raises:
        UserError: it may not be written.
    """
    overwrite = inputs.options.overwrite or inputs.options.dry_run
    sources = [inputs.source.folder]
    return OutputFolder(inputs.path, sources, checkpoint.output_bytes + more, overwrite)


def _passes_of_sums(run: PruneRun, corpora: Sequence[Corpus]) -> int:
    """How many times as long as a pass of the text the sums take that score units."""
    recipe = run.recipe
    if not recipe.sums_units or recipe.name != "perplexity":
        return 3 * recipe.sums_units
    layers = len({target.layer.block for target in run.targets})
    tokens = sum((corpus.samples or 0) * (corpus.seqlen or 0) for corpus in corpora)
    # In each turn a model without each layer runs from there to the end; and the refit.
    share = min(1, LAYER_TOKENS / max(1, tokens))
    return math.ceil(recipe.turns_of(layers) * (layers / 2 + 3) * share)


def plan_of(run: PruneRun) -> DryRun:
    """What the run would do, and its need of memory and disk.

    Raises:
        UserError: the output may not be written.
    """
    options = run.options
    checkpoint = run.checkpoint
    inputs = run.inputs
    update = run.recipe.update
    heal = run.recipe.heal
    units = run.recipe.structure is not None
    open_output(inputs, checkpoint)  # is only checked
    fits = update is not None and not units
    corpora = _corpora(options, checkpoint.config)
    needs = None
    if inputs.reads_text:
        needs = needs_of(
            checkpoint,
            run.targets,
            update if fits else None,
            options,
            options.device_map,
            corpora,
            passes=inputs.calibrates
            + _passes_of_sums(run, corpora)
            + 3 * (units and run.recipe.moves),
            by_blocks=options.execution == "blocks" or options.propagate == "pruned" or fits,
        )
    resumes = inputs.calibrates and options.resumable_calibration and not units
    minutes = None
    if options.loss is None and heal is None:
        minutes = (checkpoint.output_bytes * _A_BYTE + (0 if needs is None else needs.seconds)) / 60
    notes = self_notes(options.text_name) if inputs.needs_text else []
    if options.loss is not None:
        notes.append(
            f"how many go: found by the run, which measures the loss of held-out text at some "
            f"sparsities (--loss {options.loss})"
        )
    if heal is not None:
        length = corpora[0].seqlen or 0
        shape = samples_of(corpora), length
        timed = heal.minutes is not None
        healing = choose_healing(run.chosen, run.recipe, options, run.models, shape, timed)
        notes += healing_notes(checkpoint, run.targets, heal, length, healing)
    return DryRun(
        layers=planned_layers(run.targets),
        coverage=run.chosen.coverage,
        output=str(run.path),
        # --loss keeps its best run beside the one that it makes.
        disk_bytes=checkpoint.output_bytes
        * (2 if options.loss is not None and (units or run.recipe.moves) else 1),
        needs_overwrite=os.path.lexists(run.path) and not options.overwrite,
        needs=needs,
        minutes=minutes,
        resume_bytes=resume_bytes(checkpoint.config, corpora)
        if resumes and needs is not None and needs.by_blocks
        else None,
        fit_disk_bytes=stored_bytes(run.targets) if fits else None,
        push_to_hub=options.push_to_hub,
        recipe=run.recipe.method,
        notes=notes,
    )


def _corpora(options: PruneOptions, config: Any) -> list[Corpus]:
    context = max_context(config)
    return calibration_corpora(options.text_name, context, options.samples, options.seqlen)


def plan_healing_of(run: PruneRun, kept: HealingPlan | None = None) -> HealingPlan | None:
    """How the model heals on the text of the run; None if it does not. `kept` and the errors are
    those of `choose_healing`.
    """
    heal = run.inputs.recipe.heal
    if heal is None:
        return None
    shape = run.data.tokens.shape
    timed = heal.minutes is not None
    return choose_healing(run.chosen, run.recipe, run.options, run.models, shape, timed, kept)


def work_bytes(run: PruneRun, plan: HealingPlan | None = None) -> int:
    """The disk that the work takes beside the output: the weights that an update moves, and those
    of a healing that is planned.
    """
    recipe = run.recipe
    size = 0
    if recipe.update is not None and recipe.structure is None:
        size += stored_bytes(run.targets)
    if recipe.heal is not None and plan is not None:
        size += healing_bytes(run.checkpoint, run.targets, recipe.heal, plan.by == "blocks")
    return size


def begin(run: PruneRun, out: OutputFolder) -> HealingPlan | None:
    """Resume the work of an interrupted run, or start.

    Returns:
        How the model heals; None if it does not.

    Raises:
        UserError: the healing will not find the memory or the disk that it needs.
    """
    inputs = run.inputs
    out.begin(run.signature, machine_name() if inputs.needs_text else "")
    plan = plan_healing_of(run, out.get("healing_plan", HealingPlan))
    if plan is not None:
        out.check_space(run.checkpoint.output_bytes + work_bytes(run, plan))
    if inputs.needs_text:
        from emp_llm.calibration.data import keep_generated

        keep_generated(out.files / SELF_NAME, run.text)
    if inputs.search and inputs.norms is not None and run.options.activations is None:
        # What decided the masks lies beside them.
        keep_norms(run, inputs.norms, out.files / ACTIVATIONS_NAME, out)
    return plan


def update_weights(
    run: PruneRun,
    out: OutputFolder,
    name: str,
    update: Callable[..., None],
    targets: Sequence[Target],
) -> "UpdatedWeights":
    """The weights that an update moves, or those of an interrupted run, in the work folder. A
    collective call.

    Args:
        name: of the update.
        update: puts the blocks that are not finished into `updated`, given the dense model.
        targets: that it moves.
    """
    from emp_llm.walk.updated import UpdatedWeights

    with stage(name):
        updated = UpdatedWeights(out.fitted, lambda block: out.note(fitted=block))
        finished = out.has("refitted", updated.record, run.stopwatch)
        if finished and ranks().first(lambda: updated.are_intact(targets)):
            return updated
        dense = dense_model(run, by_blocks=True)
        with run.stopwatch(name):
            update(dense, updated=updated)
        out.keep("refitted", updated.record, run.stopwatch)
    return updated


def finish(
    run: PruneRun,
    out: OutputFolder,
    report: RunReport,
    hashes: dict[str, str],
    norms: "Activations | None",
    dense: "PerplexityRecord | None",
    healing: HealingPlan | None,
) -> RunReport:
    """Heal and check what is written, and put it at its path. A collective call.

    Args:
        out: with the shards and side files of the checkpoint.
        report: of the pruning; the rest is added.
        hashes: BLAKE3 of each shard, by name.
        norms: that scored; None: no norms did.
        dense: of the dense model, from `check`.
        healing: from `begin`.
    """
    log_warnings(report.warnings)
    if healing is not None:
        run.models.free()
        number = len(report.warnings)
        heal(run, out, healing, report, run.options.report_to)
        log_warnings(report.warnings[number:])
        hashes = {}
    report.check = check_pruned(run, out.files, dense)
    if run.inputs.checks and run.held_out is None:
        report.unchecked = why_unchecked(run)
    if norms is not None:
        report.calibration = norms.about
    elif run.inputs.needs_text:
        from emp_llm.calibration.passes import fit_origin

        report.calibration = fit_origin(run.data, run.options.batch_size, run.origin)
    report.dtype = run.options.dtype
    report.device_map = run.options.device_map
    search = run.inputs.search
    report.loss = None if search is None else search.record
    report.stages = stage_records(run.stopwatch.record)
    if ranks().main:
        identity = report.source.identity or ""
        if run.inputs.norms is not None:
            warn_if_foreign(run.inputs.norms, identity, run.source.folder)
        digest = None if norms is None else norms.digest
        write_records(run, out.files, report, identity, digest, hashes)
        if run.suite is not None:
            from emp_llm.evaluation.evaluate import mark_pending

            mark_pending(out.files, run.signature)
    out.complete()
    return report


def evaluate(run: PruneRun, report: RunReport) -> RunReport:
    """The report of the finished checkpoint with the results of both models, if they are asked
    for.
    """
    if run.suite is None:
        return report
    from emp_llm.evaluation.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(
        run.path,
        run.source,
        report,
        run.suite,
        run.models,
        run.stopwatch,
        run.baseline,
    )


def split_held_out(
    held_out: "Tensor | None", text: str, flag: str = "--loss"
) -> "tuple[Tensor, Tensor]":
    """The held-out sequences that decide, and every third one, which judges.

    Args:
        text: its name.
        flag: what needs them.

    Raises:
        UserError: there are too few.
    """
    if held_out is None or len(held_out) < _LEAST:
        has = 0 if held_out is None else len(held_out)
        raise UserError(
            f"{flag} needs at least {_LEAST} sequences of text behind those of the "
            f"calibration, and {text} has {has}. Give a longer text, or fewer --samples."
        )
    return held_out[[number for number in range(len(held_out)) if number % 3 != 2]], held_out[2::3]


# Weights.


def find_weights(inputs: Inputs) -> tuple[PruneRun, Scores]:
    """The run, and the scores by which its weights compete."""
    options = inputs.options
    recipe = inputs.recipe
    source = inputs.source
    norms = inputs.norms
    check_device(options.mask_device)
    if (source.folder / REPORT_NAME).is_file():
        logger.warning("%s", pruned_before(source.name, recipe))
    budget = Budget.of(options.parameters, options.memory)
    trust = options.trust_remote_code
    chosen = targets_of_folder(source.folder, source.name, recipe, trust, norms is None)
    if budget is not None:
        recipe = with_budget(recipe, budget, chosen.architecture, chosen.targets)
        logger.info("%s is a sparsity of %.4f of the targets.", budget.flag, recipe.counts.sparsity)
    scores = scores_of(chosen, recipe, chosen.checkpoint.config)
    if norms is not None:
        scores = scores.with_activations(norms, str(options.activations))
    run = make_run(inputs, scores.recipe, chosen)
    if run.recipe != scores.recipe:  # minutes or tokens of --heal became steps
        scores = Scores(run.checkpoint, run.targets, run.recipe, scores.inputs)
    return run, scores


def prune_weights(run: PruneRun, scores: Scores) -> RunReport:
    """Write the checkpoint with zeros in the place of weights."""
    options = run.options
    inputs = run.inputs
    update = run.recipe.update
    if awaits_evaluation(run):
        return read_report(run.path)
    with open_output(inputs, run.checkpoint, work_bytes(run)) as out:
        healing = begin(run, out)

        # Norms of the inputs. With pruned propagation, the masks of a block are decided before the
        # next is calibrated.
        propagated = None
        if options.propagate == "pruned":
            propagated = Pruner(scores, counts_of(scores), options.mask_device)
        norms = inputs.norms
        if inputs.calibrates:
            with stage("calibrate"):
                norms = calibrate(
                    run,
                    run.chosen.layers_to_calibrate(),
                    run.recipe.statistics,
                    out.calibration,
                    propagated,
                    file=out.files / ACTIVATIONS_NAME,
                    out=out,
                )
            if run.recipe.needs_activations:
                scores = scores.with_activations(norms)

        # How many weights of each group stay, which ones, and their values.
        share = run.recipe.by_cost
        if share is not None:
            removed = _remove_by_cost(run, share.sparsity, norms, out)
            recipe = run.recipe.but(counts=replace(share, shares=ByCost(removed)))
            scores = Scores(run.checkpoint, run.targets, recipe, scores.inputs)
        number = counts_of(scores) if propagated is None else propagated.counts
        pruner = Pruner(scores, number, options.mask_device)
        updated = None
        if update is not None:
            from emp_llm.pruning.updates import move_weights

            move = partial(
                move_weights,
                pruner=pruner,
                update=update,
                tokens=run.data.in_turns,
                batch_size=options.batch_size,
                hidden_states=options.hidden_states,
            )
            updated = update_weights(run, out, update.name, move, run.targets)
        dense = check(run, run.source.folder)
        if run.suite is None:
            run.models.free()  # the dense model is no longer needed

        # The first rank writes. Healing trains what was written.
        report, hashes = ranks().first(partial(_write, run, pruner, updated, out))
        return finish(run, out, report, hashes, norms, dense, healing)


def _remove_by_cost(
    run: PruneRun, sparsity: float, norms: "Activations | None", out: OutputFolder
) -> dict[str, int]:
    """How many weights each target loses, measured now or by an interrupted run."""
    from emp_llm.runs.trials import LossCurve, remove_by_cost

    removed = out.get("shares", dict[str, int])
    sizes = {target.name: target.matrix.numel for target in run.targets}
    if (
        removed is None
        or removed.keys() != sizes.keys()
        or not all(0 <= number <= sizes[name] for name, number in removed.items())
    ):
        assert run.deciding is not None
        with stage("shares"), run.stopwatch("shares"):
            device = run.options.mask_device
            curve = LossCurve(run, run.deciding, device, out.work / "curve")
            removed = remove_by_cost(sparsity, curve, run.targets, norms)
        out.note(shares=removed)
    return removed


def _write(
    run: PruneRun, pruner: Pruner, updated: "UpdatedWeights | None", out: OutputFolder
) -> tuple[RunReport, dict[str, str]]:
    """Write the shards and side files; the report so far, and the hash of each shard."""
    with stage("prune"), run.stopwatch("prune"):
        written = write_checkpoint(pruner, out.files, out, updated)
        starving = starving_rows(pruner, written.outcomes)
    report = report_of(
        run.source.as_source(written.identity),
        pruner,
        written.outcomes,
        run.chosen.coverage,
        updated,
    )
    if starving is not None:
        report.warnings.insert(0, starving)
    return report, written.hashes
