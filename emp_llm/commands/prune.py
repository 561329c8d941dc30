"""`emp-llm prune`: checkpoint (+ activations) -> pruned checkpoint, and a report."""

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from emp_llm.cli import command
from emp_llm.common.errors import UserError
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import ranks
from emp_llm.options.base import GivenOptions
from emp_llm.options.flat import RecipeWords
from emp_llm.options.prune import PruneOptions, checked_recipe
from emp_llm.options.recipe import ByCost, Recipe
from emp_llm.records.run_report import RunReport

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.pruning.chosen import Chosen
    from emp_llm.pruning.dry_run import DryRun
    from emp_llm.pruning.masks import Pruner
    from emp_llm.pruning.scores import Scores
    from emp_llm.reporting.push import Destination
    from emp_llm.runs.prune_run import LossSearch, PruneRun
    from emp_llm.walk.moved import MovedWeights

logger = logging.getLogger(__name__)


@command
def prune(words: RecipeWords, options: PruneOptions, given: GivenOptions) -> "RunReport | DryRun":
    """Prune a causal language model after training and write the pruned checkpoint.

    Under torchrun or accelerate launch, every process runs its share of the calibration and of the
    evaluation, and the first writes the checkpoint. --load-in-8bit and --load-in-4bit quantise the
    calibration pass alone; the original weights are pruned.

    Returns the report that is also written as emp_report.json, with the result of a push as `push`;
    for a dry run, the plan and its need of memory and disk.
    """
    recipe = checked_recipe(words, options, given)
    if options.dry_run:
        return _planned(recipe, options, given)
    if options.loss is None:
        return _pruned(recipe, options, given)
    if ranks().count > 1:
        raise UserError(
            "--loss runs in one process. Start it without torchrun; --device-map spreads a large "
            "model over devices."
        )
    load_packages()
    from emp_llm.runs.loss_budget import LossBudget, prune_to_loss

    return prune_to_loss(recipe, LossBudget.of(options.loss), options, given, _pruned)


def _planned(recipe: Recipe, options: PruneOptions, given: GivenOptions) -> "DryRun":
    """What `_pruned` would do."""
    from emp_llm.pruning.dry_run import with_curve
    from emp_llm.runs.prune_run import PruneRun

    _destination(options)
    planned = PruneRun.of(recipe, options, given)
    if recipe.structure is not None:
        load_packages()
        from emp_llm.structure.prune_structure import plan_units

        return plan_units(planned, recipe.structure)
    _, scores = _choose_weights(planned)
    if options.loss is not None:
        return planned.plan()
    return with_curve(planned.plan(), scores, options.propagate, planned.source.headers_only)


def _pruned(
    recipe: Recipe, options: PruneOptions, given: GivenOptions, judged: "LossSearch | None" = None
) -> RunReport:
    """Prune by options that are checked.

    Args:
        judged: of a run whose sparsity --loss has found.
    """
    from emp_llm.runs.prune_run import PruneRun

    destination = _destination(options)
    pruning = PruneRun.of(recipe, options, given, judged)
    if recipe.structure is None:
        report = _prune_weights(pruning)
    else:
        load_packages()
        from emp_llm.structure.prune_structure import prune_units

        report = prune_units(pruning, recipe.structure)
    report = pruning.evaluated(report)
    if destination is not None and ranks().main:
        from emp_llm.reporting.push import push_finished

        with stage("push"):
            report.push = push_finished(pruning.path, destination)
    times = [f"{name} {record.seconds:.1f} s" for name, record in report.stages.items()]
    logger.info("written to %s (%s)", pruning.path, ", ".join(times))
    return report


def _destination(options: PruneOptions) -> "Destination | None":
    """The repository to push to; UserError if it may not be written."""
    if options.push_to_hub is None:
        return None
    from emp_llm.reporting.push import Destination, check_login

    destination = Destination(
        options.push_to_hub, options.push_revision, options.private, options.overwrite
    )
    destination.check_name()
    if ranks().main and not options.dry_run:
        check_login(destination)
    return destination


def _choose_weights(pruning: "PruneRun") -> "tuple[Chosen, Scores]":
    """Which weights compete, and by which scores; the recipe of the run gets its counts."""
    from emp_llm.pruning.budget import Budget, with_budget
    from emp_llm.pruning.chosen import scores_of, targets_of_folder
    from emp_llm.pruning.masks import check_device
    from emp_llm.pruning.outcome import pruned_before

    options = pruning.options
    recipe = pruning.recipe
    source = pruning.source
    check_device(options.mask_device)
    if (source.folder / REPORT_NAME).is_file():
        logger.warning("%s", pruned_before(source.name, recipe))
    budget = Budget.of(options.parameters, options.memory)
    trust = options.trust_remote_code
    chosen = targets_of_folder(source.folder, source.name, recipe, trust, pruning.norms is None)
    targets = chosen.targets
    if budget is not None:
        recipe = with_budget(recipe, budget, chosen.checkpoint, targets)
        logger.info("%s is a sparsity of %.4f of the targets.", budget.flag, recipe.counts.sparsity)
    scores = scores_of(chosen, recipe, chosen.checkpoint.config)
    pruning.recipe = scores.recipe
    pruning.architecture = chosen.architecture
    pruning.targets = targets
    if pruning.norms is not None:
        scores = scores.with_activations(pruning.norms, str(options.activations))
    return chosen, scores


def _prune_weights(pruning: "PruneRun") -> RunReport:
    """Write the checkpoint with zeros in the place of weights."""
    from emp_llm.pruning.counts import counts_of
    from emp_llm.pruning.masks import Pruner
    from emp_llm.pruning.scores import Scores
    from emp_llm.records.run_report import read_report

    chosen, scores = _choose_weights(pruning)
    options = pruning.options
    recipe = pruning.recipe
    update = recipe.update
    pruning.check()
    if pruning.awaits_evaluation:
        return read_report(pruning.path)
    with pruning.output(pruning.work_bytes) as out:
        pruning.begin(out)

        # Norms of the inputs. With pruned propagation, the masks of a block are decided before the
        # next is calibrated.
        propagated = None
        if options.propagate == "pruned":
            propagated = Pruner(scores, counts_of(scores), options.mask_device)
        norms = pruning.norms
        if pruning.calibrates:
            norms = pruning.calibrated(out, chosen.layers_to_calibrate(), propagated)
            if recipe.needs_activations:
                scores = scores.with_activations(norms)

        # How many weights of each group stay, which ones, and their values.
        by_cost = pruning.by_cost
        if by_cost is not None:
            removed = _removed_by_cost(pruning, by_cost.sparsity, chosen, norms, out)
            recipe = recipe.but(counts=replace(by_cost, shares=ByCost(removed)))
            scores = Scores(chosen.checkpoint, chosen.targets, recipe, scores.inputs)
        counts = counts_of(scores) if propagated is None else propagated.counts
        pruner = Pruner(scores, counts, options.mask_device)
        moved = None
        if update is not None:
            from emp_llm.pruning.updates import move_weights

            move = partial(
                move_weights,
                pruner=pruner,
                update=update,
                tokens=pruning.text.tokens,
                batch_size=options.batch_size,
                hidden_states=options.hidden_states,
            )
            moved = pruning.moved(out, update.name, move)
        dense = pruning.held_out_perplexity(pruning.source.folder)
        if pruning.suite is None:
            pruning.models.free()  # the dense model is no longer needed

        # The first rank writes. Healing trains what was written.
        report, hashes = ranks().first(partial(_write, pruning, chosen, pruner, moved, out))
        return pruning.finish(out, report, hashes, norms, dense)


def _removed_by_cost(
    pruning: "PruneRun",
    sparsity: float,
    chosen: "Chosen",
    norms: "Activations | None",
    out: "OutputFolder",
) -> dict[str, int]:
    """How many weights each target loses, measured now or by an interrupted run."""
    from emp_llm.runs.block_shares import removed_by_cost
    from emp_llm.runs.loss_budget import LossCurve

    removed: dict[str, int] | None = out.get("shares")
    if removed is None:
        tokens, _ = pruning.divided
        with stage("shares"), pruning.stopwatch("shares"):
            curve = LossCurve(
                pruning.models,
                pruning.source.folder,
                chosen.checkpoint,
                chosen.targets,
                tokens,
                pruning.options.mask_device,
                out.work / "curve",
            )
            removed = removed_by_cost(sparsity, curve, chosen.targets, norms)
        out.note(shares=removed)
    return removed


def _write(
    pruning: "PruneRun",
    chosen: "Chosen",
    pruner: "Pruner",
    moved: "MovedWeights | None",
    out: "OutputFolder",
) -> tuple[RunReport, dict[str, str]]:
    """Write the shards and side files; the report so far, and the hash of each shard."""
    from emp_llm.pruning.outcome import report_of
    from emp_llm.pruning.starving import starving_rows
    from emp_llm.pruning.writing import write_checkpoint

    with stage("prune"), pruning.stopwatch("prune"):
        written = write_checkpoint(pruner, out.files, out, moved)
        starving = starving_rows(pruner, written.outcomes)
    report = report_of(
        pruning.made_from(written.identity), pruner, written.outcomes, chosen.coverage, moved
    )
    if starving is not None:
        report.warnings.insert(0, starving)
    return report, written.hashes


def show(result: "RunReport | DryRun") -> None:
    """Print the result of a run, or the plan of a dry run."""
    from emp_llm.reporting.run_tables import (
        advice_lines,
        check_lines,
        dry_run_table,
        evaluation_table,
        fit_lines,
        healing_lines,
        loss_lines,
        pruning_table,
    )

    if not isinstance(result, RunReport):
        print(dry_run_table(result))
        return
    print(pruning_table(result))
    for line in [*fit_lines(result), *healing_lines(result)]:
        print(line)
    if result.evaluation is not None:
        print(evaluation_table(result))
    for line in [*loss_lines(result), *check_lines(result), *advice_lines(result)]:
        print(line)
    if result.push is not None:
        from emp_llm.reporting.push import pushed_words

        print(pushed_words(result.push))
