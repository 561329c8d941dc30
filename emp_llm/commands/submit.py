"""`emp-llm submit`: the jobs of a study as arrays of Slurm."""

import logging
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from emp_llm.checkpoint.files import write_text
from emp_llm.checkpoint.locks import locked
from emp_llm.cli import command, options_from
from emp_llm.cluster.downloads import download, wanted_by
from emp_llm.cluster.jobs import JobFiles, read_plan, writable
from emp_llm.cluster.slurm import (
    FOLDER_NAME,
    JobArray,
    check_sbatch,
    grouped_jobs,
    list_text,
    needs_text,
    next_number,
    queued_jobs,
    quotes_well,
    read_site,
    sbatch_words,
    script_text,
    submit_script,
)
from emp_llm.common.declared import Opt
from emp_llm.common.errors import UserError, count_of, quotable
from emp_llm.common.progress import progress_bar
from emp_llm.common.tables import table
from emp_llm.options.jobs import StudyFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubmittedArray:
    """An array, and how it was submitted.

    Attributes:
        array: its jobs.
        needs: of each of its tasks, in words.
        command: that submitted it, or would.
        script: its text.
        number: of Slurm; None for a dry run.
    """

    array: JobArray
    needs: str
    command: list[str]
    script: str
    number: str | None = None


@dataclass
class SubmitSummary:
    """What was submitted of a study, or would be.

    Attributes:
        study: its folder.
        arrays: in their order.
        done, running: numbers of jobs that are done, or that a process works on without Slurm.
        queued: number of jobs that are in Slurm's queue already.
        dry_run: whether nothing was written.
    """

    study: Path
    arrays: list[SubmittedArray] = field(default_factory=list)
    done: int = 0
    running: int = 0
    queued: int = 0
    dry_run: bool = False


@command
def submit(
    study: StudyFolder,
    *,
    site: Annotated[
        Path, Opt("Settings of the cluster: a .toml file; examples lie in scripts/slurm.")
    ] = Path("site.toml"),
    prepare: Annotated[
        bool,
        Opt(
            "With an offline site, first download models and data into the cache.",
            flag="--prepare/--no-prepare",
        ),
    ] = True,
    dry_run: Annotated[bool, Opt("Print what would be submitted, and write nothing.")] = False,
) -> SubmitSummary:
    """Submit the jobs of a study that are neither done nor queued, as job arrays of Slurm with
    their dependencies.

    Jobs with equal needs share an array. Before its time limit a job is stopped and queued again;
    it then resumes. The scripts are written to STUDY/slurm. The same command submits what failed,
    and never a job twice.

    Returns the arrays and their numbers.
    """
    settings = read_site(site)
    plan = read_plan(study)
    folder = study.resolve()
    if not quotes_well(str(folder)):
        raise UserError(
            f"{quotable(str(folder))}: a batch script cannot hold its name. Rename the folder."
        )
    summary = SubmitSummary(study, dry_run=dry_run)
    if not dry_run:
        check_sbatch(study)
    with nullcontext() if dry_run else locked(folder / FOLDER_NAME / "arrays", str(study)):
        queued = queued_jobs(folder)
        statuses = {
            job.id: "queued" if job.id in queued else JobFiles(folder, job).status() for job in plan
        }
        summary.done, summary.running, summary.queued = (
            sum(status == word for status in statuses.values())
            for word in ("done", "running", "queued")
        )
        left = [job for job in plan if statuses[job.id] not in ("done", "running", "queued")]
        running = next(
            (name for job in left for name in job.after if statuses[name] == "running"), None
        )
        if running is not None:
            raise UserError(
                f"{study}: a process without Slurm works on {running}, and other jobs wait for it. "
                "Submit when it has ended."
            )
        arrays = grouped_jobs(left, settings, queued, next_number(folder))
        if settings.offline and prepare and not dry_run:
            download(
                wanted_by(left, [job.output for job in plan], options_from), folder, settings.cache
            )

        numbers = {array.name: array.name for array in arrays}
        with progress_bar(len(arrays), "submitting", "array") as bar:
            for array in arrays:
                text = script_text(array, settings, folder)
                words = sbatch_words(array, numbers)
                number = (
                    None
                    if dry_run
                    else _submit_array(array, text, words, folder, len(summary.arrays))
                )
                needs = needs_text(array.needs, settings)
                summary.arrays.append(SubmittedArray(array, needs, words, text, number))
                numbers[array.name] = number or array.name
                bar.update(1)
    return summary


def _submit_array(array: JobArray, text: str, words: list[str], study: Path, before: int) -> str:
    """Write the files of an array, and submit it; returns its number. `before`: arrays submitted
    before it.
    """
    script = study / FOLDER_NAME / f"{array.name}.sh"
    with writable(script):
        write_text(script.with_suffix(".jobs"), list_text(array))
        write_text(script, text)
    try:
        number = submit_script(words, study)
    except UserError as error:
        done = f"The arrays before it ({before}) are submitted. " if before else ""
        raise UserError(
            f"{script} was not submitted: {error} {done}Correct the site file, and run the same "
            "command again; it resumes with this array."
        ) from error
    logger.info("%s: %s, as %s.", array.name, count_of(len(array.jobs), "job"), number)
    return number


def show(summary: SubmitSummary) -> None:
    """Print a line for each array; for a dry run also the commands and scripts."""
    before = {
        "done": summary.done,
        "running without Slurm": summary.running,
        "already queued": summary.queued,
    }
    known = ", ".join(f"{number} {word}" for word, number in before.items() if number)
    total = sum(len(submitted.array.jobs) for submitted in summary.arrays)
    if not total:
        print(f"nothing to submit: {known}")
        return
    rows = [["array", "jobs", "each with", "after", *([] if summary.dry_run else ["Slurm"])]]
    for submitted in summary.arrays:
        after = next(
            (
                word.partition("=")[2]
                for word in submitted.command
                if word.startswith("--dependency=")
            ),
            "-",
        )
        shown = after if len(after) <= 40 else f"{after[:37]}..."
        rows.append(
            [
                submitted.array.name,
                str(len(submitted.array.jobs)),
                submitted.needs,
                shown,
                *filter(None, [submitted.number]),
            ]
        )
    print(table(rows))
    print(
        f"{count_of(total, 'job')} "
        f"{'to submit' if summary.dry_run else 'submitted'}{known and f'; {known}'}"
    )
    if not summary.dry_run:
        print(f"to see them: squeue --me, or emp-llm status {summary.study}")
        return
    for number, submitted in enumerate(summary.arrays):
        lines = [
            line
            for line in submitted.script.splitlines()
            if number == 0 or line.startswith(("#SBATCH ", "list="))
        ]
        what = "" if number == 0 else ", which differs from the first in these lines"
        print(f"\n{submitted.array.name}.sh{what}:")
        print(*lines, f"\n$ {shlex.join(submitted.command)}", sep="\n")
