"""Named stages of a run: each is run once, and skipped if an earlier run finished it."""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from emp_llm.common.progress import progress_of
from emp_llm.common.machine import Stopwatch, memory_words
from emp_llm.records.source import StageRecord

logger = logging.getLogger(__name__)


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
        if stage.finished():
            logger.debug("%s: nothing to do.", stage.name)
            continue
        logger.debug("%s: begins.", stage.name)
        start = time.perf_counter()
        with progress_of(stage.name):
            stage.run()
        logger.debug("%s: finished in %.1f s, %s.", stage.name, time.perf_counter() - start, memory_words())


def stage_records(stopwatch: Stopwatch) -> dict[str, StageRecord]:
    """Time and memory of the stages so far, for a report."""
    return {name: StageRecord(**entry) for name, entry in stopwatch.record.items()}
