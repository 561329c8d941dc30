"""`emp-llm collect`: the finished results of a study -> tables and a report."""

from dataclasses import dataclass
from pathlib import Path

from emp_llm.checkpoint.locks import FileLock
from emp_llm.checkpoint.output import check_folder, write_folder
from emp_llm.cluster.collecting.study_results import study_results
from emp_llm.cluster.collecting.study_status import StudyStatus, study_status
from emp_llm.cluster.collecting.study_tables import study_csv, study_markdown, study_text
from emp_llm.common.errors import UserError, quotable, shortened_list
from emp_llm.options.jobs.studies import CollectOptions
from emp_llm.records.base import FileRecord

_SUMMARY = "collected.json"
RUNS_IN_DETAIL = 200
_PATIENCE = 120.0  # seconds to wait for another collector


class Collected(FileRecord, kw_only=True, omit_defaults=False):
    """What was collected of a study.

    Attributes:
        done, jobs: numbers of jobs.
        details: whether the report shows the matrices of the runs; it does not if there are too many.
        missing: ids of the jobs that are not done, with their status.
        unreadable: sentences about outputs that cannot be read.
        files: names of the files beside this one.
    """

    KIND = "collection"
    VERSION = 1

    done: int
    jobs: int
    details: bool
    missing: dict[str, str]
    unreadable: list[str]
    files: list[str]


@dataclass(frozen=True)
class CollectSummary:
    """Collected results.

    Attributes:
        output: their folder.
        record: content of collected.json.
        page: the tables as Markdown; text: for a terminal.
    """

    output: Path
    record: Collected
    page: str
    text: str


def collect_study(options: CollectOptions) -> CollectSummary:
    """Write the tables of what is done so far, and replace those of an earlier collection.

    Raises:
        UserError: the plan is wrong, an output was made by another command, or the output cannot be written.
    """
    output = options.output or options.study / "tables"
    status = study_status(options.study)
    foreign = status.of("foreign")
    if foreign:
        raise UserError(foreign[0].message)
    check_folder(output, True, _SUMMARY)
    results = study_results(status)
    missing = {view.job.id: view.status for view in status.views if view.status != "done"}
    done, jobs = len(status.views) - len(missing), len(status.views)
    page = study_markdown(results, done, jobs, [f"{name}: {word}" for name, word in _listed(status).items()])
    files = {"tables.md": page.encode(), "tables.csv": study_csv(results).encode()}
    details = len(results.runs) <= RUNS_IN_DETAIL
    paths = [*(results.runs if details else []), *results.outputs]
    if paths:
        from emp_llm.reporting.report_folder import report_content

        report = report_content(paths, f"Study {options.study.resolve().name}", not options.no_plots)
        files |= {f"report/{name}": content for name, content in report.files.items()}
    record = Collected(
        done=done, jobs=jobs, details=details, missing=missing, unreadable=results.unreadable, files=sorted(files)
    )
    files[_SUMMARY] = record.encoded()
    _write(output, files)
    return CollectSummary(output, record, page, study_text(results))


def _listed(status: StudyStatus) -> dict[str, str]:
    """The jobs that are not done, with what has become of them."""
    return {
        view.job.id: f"failed: {quotable(view.message)}" if view.status == "failed" and view.message else view.status
        for view in status.views
        if view.status != "done"
    }


def _write(output: Path, files: dict[str, bytes]) -> None:
    """Write the folder; another collector that writes it at this moment is waited for."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.parent / f".{output.name}.lock", str(output))
    lock.acquire(_PATIENCE)
    try:
        write_folder(output, files, True, _SUMMARY)
    finally:
        lock.release()


def collected_words(summary: CollectSummary) -> str:
    """The tables, and where they are."""
    record = summary.record
    lines = [summary.text]
    lines += [f"warning: unreadable, so left out: {quotable(each)}" for each in record.unreadable]
    if not record.details:
        lines.append(
            f"the report leaves out the matrices of more than {RUNS_IN_DETAIL} runs; emp-llm report shows those you name"
        )
    report = summary.output / "report" / "report.html"
    where = f"; open {report}" if "report/report.html" in record.files else ""
    if record.missing:
        names = shortened_list([f"{name} ({status})" for name, status in record.missing.items()], 6)
        lines.append(f"partial: {names} {'is' if len(record.missing) == 1 else 'are'} missing")
    lines.append(f"{record.done:,} of {record.jobs:,} jobs collected in {summary.output}{where}")
    return "\n".join(lines)
