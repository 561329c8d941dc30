"""`emp-llm submit`: the jobs of a plan that are left -> arrays of Slurm."""

import logging
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from emp_llm.checkpoint.files import write_text
from emp_llm.checkpoint.locks import FileLock
from emp_llm.cluster.plan_file import Job, read_plan
from emp_llm.cluster.running.job_files import JobFiles
from emp_llm.cluster.slurm.arrays import JobArray, check_fits, grouped_jobs
from emp_llm.cluster.slurm.downloads import download_for
from emp_llm.cluster.slurm.notes import Notes
from emp_llm.cluster.slurm.queue import check_sbatch, sbatch_words, submit_script
from emp_llm.cluster.slurm.script import FOLDER_NAME, list_text, script_text
from emp_llm.cluster.slurm.site import Site, read_site
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.progress import progress_bar
from emp_llm.common.tables import table
from emp_llm.options.jobs.submitting import SubmitOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubmittedArray:
    """An array, and how it was submitted.

    Attributes:
        array: its jobs.
        command: that submitted it, or would.
        script: its text.
        number: of Slurm; None for a dry run.
    """

    array: JobArray
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


def submit_study(options: SubmitOptions) -> SubmitSummary:
    """Submit the jobs of a study that are neither done nor queued.

    Raises:
        UserError: plan or site are wrong, a job needs more than any node has, an output was made by another command, Slurm is
            not here or refuses, or something cannot be downloaded.
    """
    site, plan = read_site(options.site), read_plan(options.study)
    study = options.study.resolve()
    if options.dry_run:
        return _submit(options, site, plan, Notes(study))
    check_sbatch(options.study)
    folder = study / FOLDER_NAME
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be made ({error.strerror}).") from error
    lock = FileLock(folder / ".lock", str(options.study))
    lock.acquire()
    try:
        return _submit(options, site, plan, Notes(study))
    finally:
        lock.release()


def _submit(options: SubmitOptions, site: Site, plan: list[Job], notes: Notes) -> SubmitSummary:
    study, summary = options.study.resolve(), SubmitSummary(options.study, dry_run=options.dry_run)
    queued = notes.queued()
    left: list[Job] = []
    waits: set[str] = set()
    running: set[str] = set()
    for job in plan:
        status = "queued" if job.id in queued else JobFiles(study, job).status()
        running |= {job.id} if status == "running" else set()
        if status in ("done", "running", "queued"):
            setattr(summary, status, getattr(summary, status) + 1)
        else:
            left.append(job)
            waits.update(job.after)
    if waits & running:
        raise UserError(
            f"{options.study}: a process without Slurm works on {next(iter(waits & running))}, and other jobs wait for it. "
            "Submit when it has ended."
        )
    check_fits(left, site, options.site)
    arrays = grouped_jobs(left, site, queued, notes.numbers())
    texts = [script_text(array, site, study) for array in arrays]
    if site.offline and options.prepare and not options.dry_run:
        download_for(left, plan, study, site.cache)
    tasks, numbers = dict(queued), {array.name: array.name for array in arrays}
    with progress_bar(len(arrays), "submitting", "array") as bar:
        for array, text in zip(arrays, texts, strict=True):
            words = sbatch_words(Path(FOLDER_NAME) / f"{array.name}.sh", _dependency(array, tasks, numbers, notes))
            number = None if options.dry_run else _submit_array(array, text, words, study, notes, summary)
            summary.arrays.append(SubmittedArray(array, words, text, number))
            numbers[array.name] = number or array.name
            tasks.update({job.id: f"{numbers[array.name]}_{index}" for index, job in array.jobs.items()})
            bar.update(1)
    return summary


def _submit_array(array: JobArray, text: str, words: list[str], study: Path, notes: Notes, summary: SubmitSummary) -> str:
    """Write the files of an array, submit it, and note it at once; returns its number."""
    script = notes.folder / f"{array.name}.sh"
    try:
        write_text(script.with_suffix(".jobs"), list_text(array))
        write_text(script, text)
    except OSError as error:
        raise UserError(f"{script}: cannot be written ({error.strerror}).") from error
    try:
        number = submit_script(words, study)
    except UserError as error:
        before = f"The arrays before it ({len(summary.arrays)}) are submitted. " if summary.arrays else ""
        raise UserError(
            f"{script} was not submitted: {error} {before}Correct the site file, and run the same command again; it goes on "
            "with this array."
        ) from error
    notes.add(array, number)
    logger.info("%s: %s, as %s.", array.name, count_of(len(array.jobs), "job"), number)
    return number


def _dependency(array: JobArray, tasks: Mapping[str, str], numbers: Mapping[str, str], notes: Notes) -> str:
    """The option --dependency of an array.

    Args:
        tasks: id -> task of the jobs that are queued.
        numbers: name -> number of the arrays.
        notes: of all that was submitted.
    """
    waits: dict[str, list[str]] = defaultdict(list)
    for name in array.waits:
        waits[tasks[name].rpartition("_")[0]].append(tasks[name])
    listed = []
    for number, found in waits.items():
        listed += [number] if set(found) == notes.tasks_of(number) else found
    parts = [f"afterok:{':'.join(listed)}"] if listed else []
    return ",".join([*parts, *([f"aftercorr:{numbers[array.follows]}"] if array.follows is not None else [])])


def submit_words(summary: SubmitSummary) -> str:
    """A line for each array; for a dry run also the commands and scripts."""
    before = {"done": summary.done, "running without Slurm": summary.running, "already queued": summary.queued}
    known = ", ".join(f"{number} {word}" for word, number in before.items() if number)
    total = sum(len(each.array.jobs) for each in summary.arrays)
    if not total:
        return f"nothing to submit: {known}"
    rows = [["array", "jobs", "each with", "after", *([] if summary.dry_run else ["Slurm"])]]
    for each in summary.arrays:
        waits = [word.partition("=")[2] for word in each.command if word.startswith("--dependency=")]
        shown = waits[0] if waits and len(waits[0]) <= 40 else f"{waits[0][:37]}..." if waits else "-"
        array = each.array
        rows.append([array.name, str(len(array.jobs)), array.request.words, shown, *filter(None, [each.number])])
    lines = [table(rows), f"{count_of(total, 'job')} {'to submit' if summary.dry_run else 'submitted'}{known and f'; {known}'}"]
    if summary.dry_run:
        for number, each in enumerate(summary.arrays):
            options = [line for line in each.script.splitlines() if number == 0 or line.startswith(("#SBATCH ", "list="))]
            lines += [
                "",
                f"{each.array.name}.sh{'' if number == 0 else ', which differs from the first in these lines'}:",
                *options,
            ]
            lines += ["", f"$ {shlex.join(each.command)}"]
    else:
        lines.append(f"to see them: squeue --me, or emp-llm status {summary.study}")
    return "\n".join(lines)
