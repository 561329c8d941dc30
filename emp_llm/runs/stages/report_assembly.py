"""The report of a pruning run, assembled once for `prune` and `sweep`."""

from emp_llm.common.provenance import command_line, versions
from emp_llm.options.model import LoadingOptions
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.recipe import recipe_record
from emp_llm.pruning.summary import matrix_records, sizes_record, targets_record, warnings_of
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import CalibrationRecord, ModelSource


def assemble_report(
    source: ModelSource,
    plan: Plan,
    recipe: Recipe,
    loading: LoadingOptions,
    pruner: Pruner,
    outcomes: list[Outcome],
    calibration: CalibrationRecord | None,
) -> RunReport:
    """The report of a run, without stages and evaluation, which are added later.

    Args:
        source: the dense model.
        plan, recipe, loading: of the run.
        pruner, outcomes: of the finished pruning.
        calibration: origin of the norms; None if none were needed.
    """
    matrices = matrix_records(outcomes, pruner)
    record = recipe_record(recipe, pruner.scheme)
    record.dtype, record.device_map = loading.dtype, loading.device_map
    return RunReport(
        source=source,
        command=command_line(),
        recipe=record,
        calibration=calibration,
        versions=versions(),
        stages={},
        targets=targets_record(outcomes, plan.coverage, pruner),
        sizes=sizes_record(outcomes, plan.checkpoint, recipe.fits),
        matrices=matrices,
        warnings=warnings_of(matrices, pruner),
    )
