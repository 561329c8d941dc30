"""report.json: the files of a report, by which --overwrite knows them."""

from typing import ClassVar

from emp_llm.records.base import FileRecord


class ReportPage(FileRecord, kw_only=True):
    """A written report.

    Attributes:
        title: heading of its page.
        files: their names in its folder.
    """

    KIND: ClassVar[str] = "report"

    title: str
    files: list[str] = []
