"""report.json: the content of a report, to be read by programs."""

from typing import ClassVar

from emp_llm.records.base import FileRecord, Part


class StudySummary(Part, kw_only=True):
    """One model and one choice of targets: points, suites, figures, and comparisons of EMP with
    its baselines (`verdicts`).
    """

    title: str
    model: str = ""
    targets: str = ""
    points: list[str] = []
    suites: list[str] = []
    verdicts: list[str] = []
    figures: list[str] = []


class ReportPage(FileRecord, kw_only=True):
    """The summary of a report. `files`: those of its folder, for --overwrite."""

    KIND: ClassVar[str] = "report"

    title: str
    studies: list[StudySummary] = []
    files: list[str] = []
