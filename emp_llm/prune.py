"""`emp-llm prune`: checkpoint (+ activations) -> pruned checkpoint, and a report."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.commands import PruneOptions

if TYPE_CHECKING:
    from emp_llm.records.run_report import RunReport
    from emp_llm.runs.dry_run import DryRun


@takes(PruneOptions)
def prune(options: PruneOptions) -> "RunReport | DryRun":
    """Prune a causal language model after training and write the pruned checkpoint.

    Under torchrun or accelerate launch, every process runs its share of the calibration and of the evaluation, and the first
    writes the checkpoint. Quantisation is for the calibration pass; the masks are applied to the original weights.

    Returns the report that is also written as emp_report.json, with the result of a push as `push`; for a dry run, the plan
    and its need of memory and disk.
    """
    if options.structure is not None:
        from emp_llm.structure.prune_structure import prune_structure

        return prune_structure(options)
    from emp_llm.runs.prune_run import PruneRun
    from emp_llm.runs.stages.stage import run_stages

    job = PruneRun(options)
    if options.dry_run:
        return job.dry_run()
    with job:
        run_stages(job.stages)
    return job.report


def show(result: "RunReport | DryRun") -> None:
    """Print the result of a run, or the plan of a dry run."""
    from emp_llm.records.run_report import RunReport

    if not isinstance(result, RunReport):
        from emp_llm.runs.dry_run import dry_run_table

        print(dry_run_table(result))
        return
    from emp_llm.reporting.fit_tables import fit_lines
    from emp_llm.reporting.run_tables import pruning_table

    print(pruning_table(result))
    for line in fit_lines(result):
        print(line)
    if result.evaluation is not None:
        from emp_llm.reporting.run_tables import evaluation_table

        print(evaluation_table(result))
    if result.push is not None:
        from emp_llm.hub.pushed import pushed_words

        print(pushed_words(result.push))


callable_module(__name__)

if __name__ == "__main__":
    run(prune, show)
