"""`emp-llm plan`: models x recipes -> plan.jsonl, the jobs of a study."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from emp_llm.cli import callable_module, parse, run
from emp_llm.options.base import takes
from emp_llm.options.jobs.planning import PlanOptions

if TYPE_CHECKING:
    from emp_llm.cluster.planning.plan_study import PlanSummary


@takes(PlanOptions)
def plan(options: PlanOptions) -> "PlanSummary":
    """Plan a study of models x methods as a file: one job a line, with its command, the jobs that come first, and its needs.

    Each model is evaluated dense and calibrated once; each recipe is pruned and evaluated. The needs (GPUs, memory, disk,
    hours) are estimated from the models' configs alone; no weights are read or downloaded. The file may be edited. Paths in
    further options are relative to the study's folder, where the jobs run.

    Returns the jobs, and the assumptions of the estimates.
    """
    from emp_llm.cluster.planning.plan_study import plan_study

    return plan_study(options, _parsed)


def _parsed(kind: str, words: list[str]) -> Any:
    """The options of a job's command."""
    command = getattr(import_module(f"emp_llm.{kind}"), kind)
    return command.options(**parse(command, words, f"emp-llm plan: {kind}"))


def show(summary: "PlanSummary") -> None:
    """Print the jobs by kind, and the assumptions."""
    from emp_llm.cluster.planning.plan_study import plan_words

    print(plan_words(summary))


callable_module(__name__)

if __name__ == "__main__":
    run(plan, show)
