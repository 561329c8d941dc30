"""`emp-llm prune`: checkpoint (+ activations) -> pruned checkpoint, and a report."""

import logging
from typing import TYPE_CHECKING

from emp_llm.cli import command
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import check_one_process, ranks
from emp_llm.options.prune import PruneOptions, check_recipe
from emp_llm.options.recipe import Recipe
from emp_llm.options.shared import GivenOptions
from emp_llm.options.words import RecipeWords
from emp_llm.records.run_report import RunReport

if TYPE_CHECKING:
    from emp_llm.pruning.dry_run import DryRun
    from emp_llm.reporting.push import Destination
    from emp_llm.runs.prune_run import LossSearch, PruneRun

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
    recipe = check_recipe(words, options, given)
    if options.dry_run:
        return _plan(recipe, options, given)
    if options.loss is None:
        return _prune(recipe, options, given)
    check_one_process("--loss")
    load_packages()
    from emp_llm.runs.loss_budget import LossBudget, prune_to_loss
    from emp_llm.structure.prune_structure import sparsities_of_units

    budget = LossBudget.of(options.loss)
    return prune_to_loss(recipe, budget, options, given, _prune, sparsities_of_units)


def _plan(recipe: Recipe, options: PruneOptions, given: GivenOptions) -> "DryRun":
    """What `_prune` would do."""
    from emp_llm.pruning.dry_run import with_curve
    from emp_llm.runs.prune_run import find_inputs, find_weights, plan_of

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
    run, scores = find_weights(inputs)
    planned = plan_of(run)
    if options.loss is not None:
        return planned
    return with_curve(planned, scores, options.propagate, run.source.headers_only)


def _prune(
    recipe: Recipe, options: PruneOptions, given: GivenOptions, search: "LossSearch | None" = None
) -> RunReport:
    """Prune by options that are checked.

    Args:
        search: of a run whose sparsity --loss has found.
    """
    from emp_llm.runs.prune_run import evaluate, find_inputs, find_weights, prune_weights

    destination = _destination(options)
    inputs = find_inputs(recipe, options, given, search)
    run: PruneRun
    if recipe.structure is None:
        run, scores = find_weights(inputs)
        report = prune_weights(run, scores)
    else:
        load_packages()
        from emp_llm.structure.prune_structure import find_units, prune_units

        run, model = find_units(inputs, recipe.structure)
        report = prune_units(run, model)
    report = evaluate(run, report)
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


def show(result: "RunReport | DryRun") -> None:
    """Print the result of a run, or the plan of a dry run."""
    from emp_llm.reporting.run_tables import (
        check_lines,
        dry_run_table,
        fit_lines,
        healing_lines,
        loss_lines,
        pruning_table,
    )
    from emp_llm.reporting.studies import evaluation_table

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
