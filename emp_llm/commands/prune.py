"""`emp-llm prune`: checkpoint (+ activations) -> pruned checkpoint, and a report."""

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from emp_llm.cli import command
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import check_one_process, ranks
from emp_llm.options.base import GivenOptions
from emp_llm.options.flat import RecipeWords
from emp_llm.options.prune import PruneOptions, checked_recipe
from emp_llm.options.recipe import ByCost, Recipe
from emp_llm.records.run_report import RunReport

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.pruning.dry_run import DryRun
    from emp_llm.pruning.masks import Pruner
    from emp_llm.pruning.scores import Scores
    from emp_llm.reporting.push import Destination
    from emp_llm.runs.prune_run import Inputs, LossSearch, PruneRun
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
    check_one_process("--loss")
    load_packages()
    from emp_llm.runs.loss_budget import LossBudget, prune_to_loss

    return prune_to_loss(recipe, LossBudget.of(options.loss), options, given, _pruned)


def _planned(recipe: Recipe, options: PruneOptions, given: GivenOptions) -> "DryRun":
    """What `_pruned` would do."""
    from emp_llm.pruning.dry_run import with_curve
    from emp_llm.runs.prune_run import find_inputs, plan_of

    _destination(options)
    if options.loss is not None:
        load_packages()
        from emp_llm.runs.loss_budget import LossBudget

        LossBudget.of(options.loss)
    inputs = find_inputs(recipe, options, given)
    if recipe.structure is not None:
        load_packages()
        from emp_llm.structure.prune_structure import find_units, plan_units

        return plan_units(*find_units(inputs, recipe.structure))
    run, scores = _find_weights(inputs)
    planned = plan_of(run)
    if options.loss is not None:
        return planned
    return with_curve(planned, scores, options.propagate, run.source.headers_only)


def _pruned(
    recipe: Recipe, options: PruneOptions, given: GivenOptions, judged: "LossSearch | None" = None
) -> RunReport:
    """Prune by options that are checked.

    Args:
        judged: of a run whose sparsity --loss has found.
    """
    from emp_llm.runs.prune_run import evaluated, find_inputs

    destination = _destination(options)
    inputs = find_inputs(recipe, options, given, judged)
    run: PruneRun
    if recipe.structure is None:
        run, scores = _find_weights(inputs)
        report = _prune_weights(run, scores)
    else:
        load_packages()
        from emp_llm.structure.prune_structure import find_units, prune_units

        run, model = find_units(inputs, recipe.structure)
        report = prune_units(run, model)
    report = evaluated(run, report)
    if destination is not None and ranks().main:
        from emp_llm.reporting.push import push_finished

        with stage("push"):
            report.push = push_finished(run.path, destination)
    times = [f"{name} {record.seconds:.1f} s" for name, record in report.stages.items()]
    logger.info("written to %s (%s)", run.path, ", ".join(times))
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


def _find_weights(inputs: "Inputs") -> "tuple[PruneRun, Scores]":
    """The run, and the scores by which its weights compete."""
    from emp_llm.pruning.budget import Budget, with_budget
    from emp_llm.pruning.chosen import scores_of, targets_of_folder
    from emp_llm.pruning.masks import check_device
    from emp_llm.pruning.report import pruned_before
    from emp_llm.pruning.scores import Scores
    from emp_llm.runs.prune_run import make_run

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
        recipe = with_budget(recipe, budget, chosen.checkpoint, chosen.targets)
        logger.info("%s is a sparsity of %.4f of the targets.", budget.flag, recipe.counts.sparsity)
    scores = scores_of(chosen, recipe, chosen.checkpoint.config)
    if norms is not None:
        scores = scores.with_activations(norms, str(options.activations))
    run = make_run(inputs, scores.recipe, chosen)
    if run.recipe != scores.recipe:  # --heal-minutes became steps
        scores = Scores(run.checkpoint, run.targets, run.recipe, scores.inputs)
    return run, scores


def _prune_weights(run: "PruneRun", scores: "Scores") -> RunReport:
    """Write the checkpoint with zeros in the place of weights."""
    from emp_llm.pruning.counts import counts_of
    from emp_llm.pruning.masks import Pruner
    from emp_llm.pruning.scores import Scores
    from emp_llm.records.run_report import read_report
    from emp_llm.runs.prune_run import (
        awaits_evaluation,
        begin,
        calibrate_once,
        finish,
        moved_weights,
        output_of,
        work_bytes,
    )
    from emp_llm.runs.run import check

    options = run.options
    inputs = run.inputs
    update = run.recipe.update
    if awaits_evaluation(run):
        return read_report(run.path)
    with output_of(inputs, run.checkpoint, work_bytes(run)) as out:
        healing = begin(run, out)

        # Norms of the inputs. With pruned propagation, the masks of a block are decided before the
        # next is calibrated.
        propagated = None
        if options.propagate == "pruned":
            propagated = Pruner(scores, counts_of(scores), options.mask_device)
        norms = inputs.norms
        if inputs.calibrates:
            norms = calibrate_once(run, out, run.chosen.layers_to_calibrate(), propagated)
            if run.recipe.needs_activations:
                scores = scores.with_activations(norms)

        # How many weights of each group stay, which ones, and their values.
        if inputs.by_cost is not None:
            removed = _removed_by_cost(run, inputs.by_cost.sparsity, norms, out)
            counts = replace(inputs.by_cost, shares=ByCost(removed))
            by_cost = run.recipe.but(counts=counts)
            scores = Scores(run.checkpoint, run.targets, by_cost, scores.inputs)
        number = counts_of(scores) if propagated is None else propagated.counts
        pruner = Pruner(scores, number, options.mask_device)
        moved = None
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
            moved = moved_weights(run, out, update.name, move, run.targets)
        dense = check(run, run.source.folder)
        if run.suite is None:
            run.models.free()  # the dense model is no longer needed

        # The first rank writes. Healing trains what was written.
        report, hashes = ranks().first(partial(_write, run, pruner, moved, out))
        return finish(run, out, report, hashes, norms, dense, healing)


def _removed_by_cost(
    run: "PruneRun", sparsity: float, norms: "Activations | None", out: "OutputFolder"
) -> dict[str, int]:
    """How many weights each target loses, measured now or by an interrupted run."""
    from emp_llm.runs.block_shares import removed_by_cost
    from emp_llm.runs.loss_budget import LossCurve

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
            removed = removed_by_cost(sparsity, curve, run.targets, norms)
        out.note(shares=removed)
    return removed


def _write(
    run: "PruneRun",
    pruner: "Pruner",
    moved: "MovedWeights | None",
    out: "OutputFolder",
) -> tuple[RunReport, dict[str, str]]:
    """Write the shards and side files; the report so far, and the hash of each shard."""
    from emp_llm.pruning.report import report_of
    from emp_llm.pruning.starving import starving_rows
    from emp_llm.pruning.writing import write_checkpoint

    with stage("prune"), run.stopwatch("prune"):
        written = write_checkpoint(pruner, out.files, out, moved)
        starving = starving_rows(pruner, written.outcomes)
    report = report_of(
        run.made_from(written.identity), pruner, written.outcomes, run.chosen.coverage, moved
    )
    if starving is not None:
        report.warnings.insert(0, starving)
    return report, written.hashes


def show(result: "RunReport | DryRun") -> None:
    """Print the result of a run, or the plan of a dry run."""
    from emp_llm.reporting.points import evaluation_table
    from emp_llm.reporting.run_tables import (
        check_lines,
        dry_run_table,
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
    for line in [*loss_lines(result), *check_lines(result)]:
        print(line)
    if result.push is not None:
        from emp_llm.reporting.push import pushed_words

        print(pushed_words(result.push))
