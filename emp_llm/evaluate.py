"""`emp-llm evaluate`: checkpoint -> results.json, and a table with its baselines."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.commands import EvaluateOptions

if TYPE_CHECKING:
    from emp_llm.runs.evaluate_run import Evaluated, Prepared


@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> "Evaluated | Prepared":
    """Evaluate a model on a suite, write the results to a file, and compare them with a baseline in a table.

    Results are written after every task, and the same command resumes after the last finished one. A baseline that is a model
    is measured too, and its results are written beside the output as OUTPUT-baseline.json. With --load-in-8bit or
    --load-in-4bit and such a baseline, both models are measured with and without quantisation.

    Returns the results and the table; with --prepare, the content of the cache.
    """
    from emp_llm.runs.evaluate_run import EvaluateRun
    from emp_llm.runs.stages.stage import run_stages

    job = EvaluateRun(options)
    if options.prepare:
        return job.prepare()
    run_stages(job.stages)
    return job.evaluated


def show(result: "Evaluated | Prepared") -> None:
    """Print the table, or the content of the cache."""
    from emp_llm.runs.evaluate_run import Prepared

    if isinstance(result, Prepared):
        print("\n".join(["in the cache:", *(f"  {line}" for line in result.prepared)]))
    else:
        print(result.table)


callable_module(__name__)

if __name__ == "__main__":
    run(evaluate, show)
