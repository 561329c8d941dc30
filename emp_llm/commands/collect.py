"""`emp-llm collect`: the finished results of a study -> tables and a report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Opt
from emp_llm.common.errors import UserError, quotable, shortened_list
from emp_llm.options.jobs import StudyFolder
from emp_llm.records.base import FileRecord

_SUMMARY = "collected.json"
_RUNS_IN_DETAIL = 200
_PATIENCE = 120.0  # seconds to wait for another collector


class Collected(FileRecord, kw_only=True, omit_defaults=False):
    """What was collected of a study.

    Attributes:
        done, jobs: numbers of jobs.
        details: whether the report shows the matrices of the runs; it does not if there are too
            many.
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


@command
def collect(
    study: StudyFolder,
    *,
    output: Annotated[Path | None, Opt("Folder to write; default: tables in the study.")] = None,
    no_plots: Annotated[bool, Opt("Write tables only, without matplotlib.")] = False,
) -> CollectSummary:
    """Collect the results of a study so far: tables with the paper's values as Markdown, and a
    report.

    It may run at any time, also while jobs write. Tables of a part of the study say what is
    missing. The same results give the same bytes, wherever the jobs ran.

    Returns the tables, and what is missing.
    """
    from emp_llm.checkpoint.locks import locked
    from emp_llm.checkpoint.output import check_folder, write_folder
    from emp_llm.cluster.collecting import (
        job_views,
        study_markdown,
        study_results,
        study_text,
    )

    views = job_views(study)
    output = output or study / "tables"
    foreign = next((view.message for view in views if view.status == "foreign"), None)
    if foreign is not None:
        raise UserError(foreign)
    check_folder(output, True, _SUMMARY)
    results = study_results(views)
    missing = {view.job.id: view for view in views if view.status != "done"}
    lines = [
        f"{name}: {view.status}" + (f": {quotable(view.message)}" if view.message else "")
        for name, view in missing.items()
    ]
    page = study_markdown(results, len(views) - len(missing), len(views), lines)
    files = {"tables.md": page.encode()}
    details = len(results.runs) <= _RUNS_IN_DETAIL
    paths = [*(results.runs if details else []), *results.outputs]
    if paths:
        from emp_llm.reporting.page import report_content
        from emp_llm.reporting.studies import read_inputs

        report, _ = report_content(
            *read_inputs(paths), f"Study {study.resolve().name}", not no_plots
        )
        files |= {f"report/{name}": content for name, content in report.items()}
    record = Collected(
        done=len(views) - len(missing),
        jobs=len(views),
        details=details,
        missing={name: view.status for name, view in missing.items()},
        unreadable=results.unreadable,
        files=sorted(files),
    )
    files[_SUMMARY] = record.encoded()
    # Another collector may write the folder at this moment.
    with locked(output, patience=_PATIENCE):
        write_folder(output, files, True, _SUMMARY)
    return CollectSummary(output, record, page, study_text(results))


def show(summary: CollectSummary) -> None:
    """Print the tables and their location."""
    record = summary.record
    print(summary.text)
    for sentence in record.unreadable:
        print(f"warning: unreadable, so left out: {quotable(sentence)}")
    if not record.details:
        print(
            f"the report leaves out the matrices of more than {_RUNS_IN_DETAIL} runs; emp-llm "
            "report shows those you name"
        )
    if record.missing:
        names = shortened_list([f"{name} ({status})" for name, status in record.missing.items()], 6)
        print(f"partial: {names} {'is' if len(record.missing) == 1 else 'are'} missing")
    report = summary.output / "report" / "report.md"
    where = f"; open {report}" if "report/report.md" in record.files else ""
    print(f"{record.done:,} of {record.jobs:,} jobs collected in {summary.output}{where}")
