"""The run of `prune`: its stages, and the objects that they share."""

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from emp_llm.common.file_names import REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.execution.quantization import quantization_of
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.output.manifest import run_signature
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.recipe import check_ranges, recipe_record
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.runs.checkpoint_run import CheckpointRun
from emp_llm.runs.dry_run import DryRun, planned_curve, planned_layers, resume_bytes, why_no_curve
from emp_llm.runs.stages.calibrating import (
    CalibrateStage,
    given_norms,
    may_reach_images,
    prepare_calibration,
    warn_if_foreign,
)
from emp_llm.runs.stages.refitting import RefitStage, fit_disk, refit_stage, update_of
from emp_llm.runs.stages.report_assembly import assemble_report
from emp_llm.runs.stages.stage import Stage
from emp_llm.runs.stages.writing import WriteStage, collected_norms, keep_norms
from emp_llm.storage.output.output_folder import OutputFolder
from emp_llm.update.update import update_bytes, update_warnings

if TYPE_CHECKING:
    from emp_llm.calibration.calibration import ForwardPasses
    from emp_llm.runs.stages.evaluating import PendingEvaluation

logger = logging.getLogger(__name__)


class PruneRun(CheckpointRun):
    """One prune of weights, as a context: `with run: run_stages(run.stages)`.

    Args:
        options: of the command.

    Attributes:
        calibrate, refit, write: stages besides those of `CheckpointRun`, available inside the context; refit may be empty.

    Raises:
        UserError: the options conflict, or do not fit the model, the output or the Hub.
    """

    calibrate: CalibrateStage
    write: WriteStage

    def __init__(self, options: PruneOptions) -> None:
        options.check()
        check_ranges(options)
        self._quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
        self._given = given_norms(options, options)
        super().__init__(options)
        if (self._source.folder / REPORT_NAME).is_file():
            logger.warning(
                "warning: %s is already pruned. Its zeros count as weights of the rows, with the lowest scores.",
                self._source.name,
            )
        images = options.needs_activations and may_reach_images(options)
        self._plan = Plan.of_folder(
            self._source.folder, self._source.name, options, options.trust_remote_code, options.mask_device, images
        )
        self._pruner = self._plan.pruner_of(options)
        if self._given is not None:
            self._pruner.scores.use(self._given, str(options.activations))
        self._prepare_output(options.method)
        self.refit: list[RefitStage] = []

    def dry_run(self) -> DryRun:
        """The plan of the run, and its need of memory and disk."""
        calibrates = self._options.needs_activations and self._given is None
        checkpoint, recipe = self._plan.checkpoint, recipe_record(self._options)
        by_magnitude = self._options.counts_by == "magnitude"
        unknown = calibrates and not by_magnitude
        known = self._options.adaptive and not unknown and ranks().main
        return DryRun(
            layers=planned_layers(self._plan.chosen),
            coverage=self._plan.coverage,
            output=str(self._path),
            disk_bytes=checkpoint.output_bytes,
            needs_overwrite=os.path.lexists(self._path) and not self._options.overwrite,
            model_bytes=sum(size for size, _ in checkpoint.states.values()) if calibrates or self._options.fits else None,
            resume_bytes=resume_bytes(self._options, checkpoint, self._options.propagate) if calibrates else None,
            fit_bytes=update_bytes(self._pruner.targets, update_of(self._options, self._pruner))
            if self._options.fits
            else None,
            fit_disk_bytes=fit_disk(self._pruner) if self._options.fits else None,
            push_to_hub=self._options.push_to_hub,
            recipe=f"{recipe.method}, order {recipe.order:g}, group {recipe.group}{', counts by |W|' if by_magnitude else ''}"
            if self._options.adaptive
            else recipe.method,
            curve=planned_curve(self._options, self._pruner, self._plan.coverage.parameters) if known else [],
            no_curve=why_no_curve(self._options.propagate) if self._options.adaptive and unknown else "",
        )

    @property
    def stages(self) -> list[Stage]:
        """The stages in order, inside the context."""
        return [self.calibrate, *self.refit, self.write, *self.evaluate, *self.publish]

    @property
    def written(self) -> RunReport | None:
        return self.write.report

    @property
    def _needed(self) -> int:
        return self._plan.checkpoint.output_bytes + (fit_disk(self._pruner) if self._options.fits else 0)

    def _calibration(self) -> "ForwardPasses | None":
        options = self._options
        if not options.fits and (not options.needs_activations or self._given is not None):
            return None
        architecture, blocks = self._plan.architecture, options.blocks
        return prepare_calibration(self._models, architecture, options, options.propagate, self._quantization, blocks)

    def _begin(self, calibration: "ForwardPasses | None", signature: dict[str, Any], output: OutputFolder) -> None:
        options, record = self._options, recipe_record(self._options)
        pruned = self._options.propagate == "pruned"
        if pruned:
            settle_budget(self._pruner)  # the masks of the first block are decided before the norms of the last are known
        self.calibrate = CalibrateStage(
            self._models,
            self._plan.checkpoint,
            calibration if options.needs_activations else None,
            self._plan.layers_to_calibrate,
            output.calibration,
            given=self._given,
            restore=partial(collected_norms, output, self._stopwatch),
            keep=partial(keep_norms, output, self._stopwatch),
            masker=self._pruner if pruned else None,
            pruned_by=record if pruned else None,
        )
        if options.fits and calibration is not None:
            self.refit = [
                refit_stage(self._models, self._pruner, options, calibration, output.work, lambda: self.calibrate.norms)
            ]
        self.write = WriteStage(
            self._plan,
            self._pruner,
            self._options,
            output,
            self._norms,
            self._assemble,
            self._stopwatch,
            before_publishing=self._before_publishing(output, signature),
            moved=self.refit[0].files if self.refit else None,
        )

    def _skip(self, report: RunReport, pending: "PendingEvaluation") -> None:
        self.calibrate = CalibrateStage(self._models, self._plan.checkpoint, None, list, pending.folder)
        self.write = WriteStage.finished_before(report)

    def _norms(self) -> Any:
        if self._suite is None:
            self._models.free()  # the dense model is no longer needed
        return self.calibrate.norms

    def _assemble(self, outcomes: list[Outcome], identity: str) -> RunReport:
        source = ModelSource(model=self._source.name, revision=self._source.revision, identity=identity)
        norms = self.calibrate.norms
        if self._given is not None:
            warn_if_foreign(self._given, identity, self._source.folder)
        about = None if norms is None else norms.about
        if about is None and self.refit:
            about = self.refit[0].origin()
        report = assemble_report(source, self._plan, self._options, self._options, self._pruner, outcomes, about)
        if self.refit:
            report.fits, update = self.refit[0].files.records(), update_of(self._options, self._pruner)
            report.warnings = [*update_warnings(report.fits, self._pruner.targets, update), *report.warnings]
        return report

    def _signature(self, calibration: "ForwardPasses | None") -> dict[str, Any]:
        options = self._options
        activations: dict[str, Any] | None = None if self._given is None else {"norms": self._given.digest}
        if calibration is not None:
            activations = (
                (activations or {}) | calibration.signature | {"dtype": options.dtype, "device_map": options.device_map}
            )
        return run_signature(self._plan.checkpoint, recipe_record(options), self._pruner.scheme, activations)
