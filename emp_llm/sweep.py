"""`emp-llm sweep`: one calibration, many recipes, and the measurements of each."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.commands import SweepOptions

if TYPE_CHECKING:
    from emp_llm.records.sweep import Sweep
    from emp_llm.runs.sweeping.sweep_run import SweepDryRun


@takes(SweepOptions)
def sweep(options: SweepOptions) -> "Sweep | SweepDryRun":
    """Prune a model by many recipes and measure each: curves over beta and sparsity, with the dense model.

    The model is loaded and calibrated once. For each point the weights are masked in memory, the model is measured, and the
    weights are restored. Finished points are not measured again: the same command resumes an interrupted sweep, and more betas
    or methods add points to it.

    Returns the content of sweep.json; for a dry run, the plan.
    """
    from emp_llm.runs.stages.stage import run_stages
    from emp_llm.runs.sweeping.sweep_run import SweepRun

    job = SweepRun(options)
    if options.dry_run:
        return job.dry_run()
    with job:
        run_stages([job.calibrate, job.evaluate_dense, *job.points])
    return job.record


def show(result: "Sweep | SweepDryRun") -> None:
    """Print the table of all points; for a dry run, the plan."""
    from emp_llm.records.sweep import Sweep

    if isinstance(result, Sweep):
        from emp_llm.reporting.sweep_tables import sweep_table

        print(sweep_table(result))
    else:
        from emp_llm.runs.sweeping.sweep_run import dry_run_words

        print(dry_run_words(result))


callable_module(__name__)

if __name__ == "__main__":
    run(sweep, show)
