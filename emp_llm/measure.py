"""`emp-llm measure`: effective numbers and masses of a model's matrices, by criterion and order; no weights are written."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.commands import MeasureOptions

if TYPE_CHECKING:
    from emp_llm.records.measure import Measure


@takes(MeasureOptions)
def measure(options: MeasureOptions) -> "Measure":
    """Measure the effective number N_eff of every row of every matrix, and the share s_eff of the N_eff largest scores.

    The table shows, for every criterion and order, N_eff/N with its distribution over the rows, s_eff, and for order 2 the
    lower bound on s_eff. Each matrix is read once. The weights that EMP keeps at beta 1 are reported as by prune.

    Returns the content of the output.
    """
    from emp_llm.runs.measure_run import MeasureRun
    from emp_llm.runs.stages.stage import run_stages

    with MeasureRun(options) as job:
        run_stages([job.calibrate, job.measure])
    return job.record


def show(record: "Measure") -> None:
    """Print the tables."""
    from emp_llm.reporting.sweep_tables import measure_table

    print(measure_table(record))


callable_module(__name__)

if __name__ == "__main__":
    run(measure, show)
