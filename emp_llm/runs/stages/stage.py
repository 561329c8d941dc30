"""Named stages of a run: each is run once, and skipped if an earlier run finished it."""

from collections.abc import Sequence
from typing import Protocol

from emp_llm.common.progress_bars import progress_of
from emp_llm.common.timing import Stopwatch
from emp_llm.records.source import StageRecord


class Stage(Protocol):
    """A part of a run that is finished and resumed separately. All ranks call its methods together.

    A stage times its work under its name, because the files that it writes include the time.
    """

    @property
    def name(self) -> str:
        """The name of the stage in reports."""

    def finished(self) -> bool:
        """Whether the result is available, from an earlier run or from the user. The same on all ranks."""

    def run(self) -> None:
        """Run the stage, or the rest of it after an interruption."""


def run_stages(stages: Sequence[Stage]) -> None:
    """Run the unfinished stages in order."""
    for stage in stages:
        if not stage.finished():
            with progress_of(stage.name):
                stage.run()


def stage_records(stopwatch: Stopwatch) -> dict[str, StageRecord]:
    """Time and memory of the stages so far, for a report."""
    return {name: StageRecord(**entry) for name, entry in stopwatch.record.items()}
