"""The frame of a run that writes a checkpoint: its output, its evaluation and its push. `prune` has two kinds of such runs."""

import logging
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.hub.local_model import find_model
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.recipe import read_report
from emp_llm.records.run_report import RunReport
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import Stage
from emp_llm.storage.output.output_folder import OutputFolder

if TYPE_CHECKING:
    from emp_llm.calibration.calibration import ForwardPasses
    from emp_llm.evaluation.suites import Suite
    from emp_llm.hub.destination import Destination
    from emp_llm.runs.dry_run import DryRun
    from emp_llm.runs.stages.evaluating import PendingEvaluation

logger = logging.getLogger(__name__)


class CheckpointRun(ABC):
    """One run, as a context: `with run: run_stages(run.stages)`.

    Args:
        options: of the command, checked.

    Attributes:
        evaluate, publish: stages after the checkpoint, available inside the context; they may be empty.

    Raises:
        UserError: the options do not fit the model or the Hub.
    """

    def __init__(self, options: PruneOptions) -> None:
        self._options = options
        self._destination = _destination(options)
        self._suite = _suite(options)
        if options.device_map != "auto":
            from emp_llm.models.placement import parse_device_map

            parse_device_map(options.device_map)
        self._source = find_model(options.model, options.revision, options.trust_remote_code)
        self._stopwatch = Stopwatch()
        self._stack = ExitStack()
        self.evaluate: list[Stage] = []
        self.publish: list[Stage] = []

    @abstractmethod
    def dry_run(self) -> "DryRun":
        """The plan of the run; nothing is written."""

    @property
    @abstractmethod
    def written(self) -> RunReport | None:
        """The report of the written checkpoint, once it is."""

    @property
    @abstractmethod
    def stages(self) -> list[Stage]:
        """The stages in order, inside the context."""

    @property
    @abstractmethod
    def _needed(self) -> int:
        """Bytes that the output needs."""

    @abstractmethod
    def _calibration(self) -> "ForwardPasses | None":
        """The text to calibrate on; None if none is needed."""

    @abstractmethod
    def _signature(self, calibration: "ForwardPasses | None") -> dict[str, Any]:
        """Everything that the bytes of the checkpoint depend on."""

    @abstractmethod
    def _begin(self, calibration: "ForwardPasses | None", signature: dict[str, Any], output: OutputFolder) -> None:
        """Prepare the stages that write the checkpoint."""

    @abstractmethod
    def _skip(self, report: RunReport, pending: "PendingEvaluation") -> None:
        """Skip the stages of a checkpoint that an earlier run wrote but did not evaluate."""

    @property
    def report(self) -> RunReport:
        """The report of the run, when its stages are finished."""
        assert self.written is not None
        return self.written

    def __enter__(self) -> Self:
        options = self._options
        if self._destination is not None and ranks().main:
            from emp_llm.hub.destination import check_login

            check_login(self._destination)
        ranks().share(None)  # a barrier: all ranks check the output before the first rank creates it
        self._models = RunModels(self._source, options, options.trust_remote_code, self._stopwatch)
        calibration = self._calibration()
        signature = self._signature(calibration)
        try:
            if self._pending is not None and self._output is None and self._pending.matches(signature):
                self._skip(read_report(self._path), self._pending)
            else:
                output = self._output or self._new_output()
                if ranks().main:
                    self._stack.enter_context(output)
                    output.begin(signature)
                self._begin(calibration, signature, output)
            if self._suite is not None and self._pending is not None:
                self._add_evaluation(self._pending, self._suite)
        except BaseException as error:
            if not self._stack.__exit__(type(error), error, error.__traceback__):
                raise
        if self._destination is not None:
            from emp_llm.runs.stages.pushing import PushStage

            self.publish = [PushStage(self._path, self._destination, lambda: self.report)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, traceback)
        if error is not None and ranks().main and self._pending is not None and self._pending.exists:
            logger.warning("the checkpoint in %s is complete, but not its evaluation; the same command resumes it.", self._path)
        if error is None:
            times = ", ".join(f"{stage} {entry.seconds:.1f} s" for stage, entry in self.report.stages.items())
            logger.info("written to %s (%s)", self._path, times)

    def _prepare_output(self, name: str) -> None:
        """Check the output, or find its unfinished evaluation; `name` is that of the default folder without the model's."""
        self._path = self._options.output or Path(f"{self._source.short_name}-{name}")
        self._pending = None if self._suite is None else _pending_evaluation(self._path)
        self._output = None if self._pending is not None and self._pending.exists else self._new_output()

    def _before_publishing(self, output: OutputFolder, signature: dict[str, Any]) -> Any:
        """What to call when all files of the checkpoint are complete; None for nothing."""
        return None if self._pending is None else partial(self._pending.begin, output.files, signature)

    def _new_output(self) -> OutputFolder:
        replace = self._options.overwrite or self._options.dry_run  # a dry run replaces nothing
        return OutputFolder(self._path, [self._source.folder], self._needed, replace)

    def _add_evaluation(self, pending: "PendingEvaluation", suite: "Suite") -> None:
        from emp_llm.runs.stages.evaluating import evaluation_stages

        self._stack.callback(pending.release)
        self.evaluate = evaluation_stages(self._models, suite, self._options, pending, lambda: self.report, self._stopwatch)


def _pending_evaluation(path: Path) -> "PendingEvaluation":
    from emp_llm.runs.stages.evaluating import PendingEvaluation

    return PendingEvaluation(path)


def _destination(options: PruneOptions) -> "Destination | None":
    if options.push_to_hub is None:
        return None
    from emp_llm.hub.destination import Destination

    destination = Destination(options.push_to_hub, options.push_revision, options.private, options.overwrite)
    destination.check_name()
    return destination


def _suite(options: PruneOptions) -> "Suite | None":
    if options.evaluate is None:
        return None
    from emp_llm.evaluation.suites import find_suite

    return find_suite(options.evaluate)
