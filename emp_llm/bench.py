"""`emp-llm bench DIR`: what the zeros of a pruned model buy on this machine."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.runtime import BenchOptions

if TYPE_CHECKING:
    from emp_llm.runs.bench_run import Benched


@takes(BenchOptions)
def bench(options: BenchOptions) -> "Benched":
    """Measure load time, memory, prefill and decoding of a pruned model from packed weights, and of the dense model, in turn.

    Both models are in one process, and each round runs one after the other, so that a machine that is busy slows both. The
    figures are medians; they are saved as JSON, and emp-llm report and emp-llm push --results read the file.

    Returns the figures and their table.
    """
    from emp_llm.runs.bench_run import run_bench

    return run_bench(options)


def show(result: "Benched") -> None:
    """Print the table."""
    print(result.table)


callable_module(__name__)

if __name__ == "__main__":
    run(bench, show)
