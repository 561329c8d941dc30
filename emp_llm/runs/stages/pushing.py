"""The stage that pushes a finished checkpoint to the Hub."""

from collections.abc import Callable
from pathlib import Path

from emp_llm.common.ranks import ranks
from emp_llm.hub.destination import Destination
from emp_llm.publishing.publish import publish_finished
from emp_llm.records.run_report import RunReport


class PushStage:
    """Pushes an output, and records the push in the report.

    Args:
        output: folder of the checkpoint.
        destination: on the Hub.
        report: returns the report of the run.
    """

    name = "push"

    def __init__(self, output: Path, destination: Destination, report: Callable[[], RunReport]) -> None:
        self._output = output
        self._destination = destination
        self._report = report

    def finished(self) -> bool:
        return False

    def run(self) -> None:
        if ranks().main:
            self._report().push = publish_finished(self._output, self._destination)
