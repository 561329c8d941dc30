"""`emp-llm sweep`: one calibration, many recipes, and the measurements of each."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from emp_llm.calibration.texts import self_notes
from emp_llm.cli import command
from emp_llm.common.errors import count_of, format_bytes
from emp_llm.common.progress import load_packages
from emp_llm.common.ranks import check_one_process
from emp_llm.options.recipe import Score, Targets
from emp_llm.options.shared import (
    GivenOptions,
    LoadingOptions,
    ModelOptions,
    NormOptions,
    Some,
    SuiteOptions,
)
from emp_llm.options.sweep import SweepOptions, plan_points
from emp_llm.options.words import RecipeWords
from emp_llm.records.run_report import Sweep
from emp_llm.update.update import Update

if TYPE_CHECKING:
    from emp_llm.records.run_report import TargetsRecord
    from emp_llm.runs.sweep import SweepRun

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepDryRun:
    """The plan of a sweep.

    Attributes:
        points: names of the unfinished points.
        coverage: the targets' share of the model.
        disk_bytes: size of the checkpoints under --keep.
    """

    points: list[str]
    coverage: "TargetsRecord"
    disk_bytes: int


class _Swept(Sweep, kw_only=True):
    """A sweep, and the baseline of its table."""

    against: str | None


@command
def sweep(
    model: ModelOptions,
    shared: Annotated[RecipeWords, Some(Targets, "group", Score, "count_by", Update)],
    text: NormOptions,
    loading: LoadingOptions,
    suite_options: SuiteOptions,
    options: SweepOptions,
    given: GivenOptions,
) -> Sweep | SweepDryRun:
    """Prune a model by many recipes and measure each: curves over beta and sparsity, with the dense
    model.

    The model is loaded and calibrated once. For each point the weights are masked in memory, the
    model is measured, and the weights are restored. Finished points are not measured again: the
    same command resumes an interrupted sweep, and more betas or methods add points to it.

    Returns the content of sweep.jsonl; for a dry run, the plan.
    """
    points = plan_points(options, shared)
    check_one_process("A sweep")
    load_packages()
    from emp_llm.evaluation.results import suite_of
    from emp_llm.runs.sweep import SweepRun, sweep_points

    run = SweepRun.of(points, model, text, loading, suite_of(suite_options), options, given)
    if options.dry_run:
        return _plan(run)
    with run.folder.locked():
        record = sweep_points(run, shared)
    return _Swept(**msgspec.structs.asdict(record), against=options.against)


def _plan(run: "SweepRun") -> SweepDryRun:
    """What the run would do."""
    from emp_llm.runs.sweep import finished

    points = run.points
    held = run.folder.held()
    notes = self_notes(run.options.text_name) if run.needs_text else []
    for note in notes:
        logger.info("%s", note)
    size = run.checkpoint.output_bytes if run.sweeping.keep else 0
    return SweepDryRun(
        [point.name for point in points if finished(held, point) is None],
        run.chosen.coverage,
        size * len(points),
    )


def show(result: Sweep | SweepDryRun) -> None:
    """Print the table of all points; for a dry run, names of the points, the targets, and the
    disk space of the checkpoints.
    """
    if isinstance(result, SweepDryRun):
        coverage = result.coverage
        print(
            *result.points,
            f"{count_of(len(result.points), 'point')} to measure, and the dense model",
            sep="\n",
        )
        inside = coverage.matrices - coverage.matrices_outside
        print(
            f"targets: {inside} of {count_of(coverage.matrices_in_blocks, 'matrix', 'matrices')} "
            "in blocks"
        )
        if result.disk_bytes:
            print(f"disk: {format_bytes(result.disk_bytes)} for the checkpoints")
        return
    from emp_llm.reporting.studies import sweep_table

    print(sweep_table(result, result.against if isinstance(result, _Swept) else None))
