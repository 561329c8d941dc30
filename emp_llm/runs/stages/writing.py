"""The stage that prunes: it decides the masks and writes the checkpoint."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from emp_llm.common.errors import UserError
from emp_llm.common.file_names import ACTIVATIONS_NAME, REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.output.checkpoint_writer import CheckpointWriter
from emp_llm.pruning.output.manifest import write_manifest
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.recipe import recipe_record
from emp_llm.records.run_report import RunReport
from emp_llm.runs.stages.stage import stage_records
from emp_llm.storage.output.journal import Journal
from emp_llm.storage.output.output_folder import OutputFolder

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.update.moved import MovedWeights

logger = logging.getLogger(__name__)
_WARNINGS = 6  # that are logged; the report has all


class PublishingStage:
    """A stage that publishes a checkpoint.

    Attributes:
        report: available when the stage is finished, on all ranks.
    """

    report: RunReport | None = None

    @classmethod
    def finished_before(cls, report: RunReport) -> Self:
        """The finished stage of a checkpoint written by an earlier run, with its report."""
        stage = cls.__new__(cls)
        stage.report = report
        return stage

    def finished(self) -> bool:
        return self.report is not None


class WriteStage(PublishingStage):
    """Decides the masks, writes the checkpoint with report and manifest, and publishes the output.

    Args:
        plan, pruner, recipe: of the run.
        output: the output folder, open on the first rank.
        norms: returns the norms for the pruner, or None.
        assemble: creates the report from the outcomes and the source's identity.
        stopwatch: its record is added to the report.
        before_publishing: called when all other files are complete.
        moved: the weights of a refit, of SparseGPT or of ADMM.
    """

    name = "prune"  # in reports

    def __init__(
        self,
        plan: Plan,
        pruner: Pruner,
        recipe: Recipe,
        output: OutputFolder,
        norms: "Callable[[], Activations | None]",
        assemble: Callable[[list[Outcome], str], RunReport],
        stopwatch: Stopwatch,
        before_publishing: Callable[[], None] | None = None,
        moved: "MovedWeights | None" = None,
    ) -> None:
        self._plan = plan
        self._pruner = pruner
        self._recipe = recipe
        self._output = output
        self._norms = norms
        self._assemble = assemble
        self._stopwatch = stopwatch
        self._before_publishing = before_publishing
        self._moved = moved

    def run(self) -> None:
        report = ranks().share(self._write() if ranks().main else None)
        if ranks().main:
            _log_warnings(report.warnings)
        self.report = report

    def _write(self) -> RunReport:
        norms, files = self._norms(), self._output.files
        if norms is not None:
            self._pruner.scores.use(norms)
        journal = Journal(self._output.work)
        with self._stopwatch(self.name):
            writer = CheckpointWriter(self._pruner, journal, self._moved)
            settle_budget(self._pruner)
            outcomes = writer.write(files)
        report = self._assemble(outcomes, writer.source_identity)
        report.stages = stage_records(self._stopwatch)
        report.save(files / REPORT_NAME)
        digest = None if norms is None else norms.digest
        write_manifest(
            files,
            self._plan.checkpoint,
            writer.source_identity,
            recipe_record(self._recipe, self._pruner.scheme),
            self._pruner.scheme,
            digest,
            journal.hasher.finished,
        )
        if self._before_publishing is not None:
            self._before_publishing()
        self._output.publish()
        return report


def _log_warnings(warnings: list[str]) -> None:
    """Log the first few warnings of a report. A large model may have one for every matrix."""
    for sentence in warnings[:_WARNINGS]:
        logger.warning("warning: %s", sentence)
    if len(warnings) > _WARNINGS:
        logger.warning("warning: %s more like these are in %s.", len(warnings) - _WARNINGS, REPORT_NAME)


def collected_norms(output: OutputFolder, stopwatch: Stopwatch) -> "Activations | None":
    """The norms collected by an interrupted run of the same command; None if it did not finish its calibration."""
    from emp_llm.calibration.activations import Activations

    noted: dict[str, Any] | None = output.work.get("calibrated")
    if noted is None:
        return None
    norms = Activations.load(output.files / ACTIVATIONS_NAME)
    if norms.digest != noted["norms"]:
        raise UserError(f"{output.files / ACTIVATIONS_NAME}: it has changed since it was written. Delete {output.work.path}.")
    stopwatch.record |= noted["stages"]
    return norms


def keep_norms(output: OutputFolder, stopwatch: Stopwatch, norms: "Activations") -> None:
    """Save norms in an unfinished output, as a part of it and for resuming an interrupted run."""
    norms.save(output.files / ACTIVATIONS_NAME)
    output.work.note(calibrated={"norms": norms.digest, "stages": dict(stopwatch.record)})
