"""The run of `prune`: its stages, and the objects that they share."""

import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from emp_llm.common.file_names import REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.execution.quantization import quantization_of
from emp_llm.hub.local_model import find_model
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.output.manifest import run_signature
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.recipe import check_ranges, read_report, recipe_record
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.runs.dry_run import DryRun, planned_curve, planned_layers, resume_bytes, why_no_curve
from emp_llm.runs.stages.calibrating import (
    CalibrateStage,
    given_norms,
    may_reach_images,
    prepare_calibration,
    warn_if_foreign,
)
from emp_llm.runs.stages.refitting import RefitStage, fit_disk, fit_memory, fit_records, fit_warnings, refit_stage
from emp_llm.runs.stages.report_assembly import assemble_report
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import Stage
from emp_llm.runs.stages.writing import WriteStage, collected_norms, keep_norms
from emp_llm.storage.output.output_folder import OutputFolder

if TYPE_CHECKING:
    from emp_llm.calibration.calibration import ForwardPasses
    from emp_llm.evaluation.suites import Suite
    from emp_llm.hub.destination import Destination
    from emp_llm.runs.stages.evaluating import PendingEvaluation

logger = logging.getLogger(__name__)


class PruneRun:
    """One prune, as a context: `with run: run_stages(run.stages)`.

    Args:
        options: of the command.

    Attributes:
        calibrate, refit, write, evaluate, publish: the stages, available inside the context; all but calibrate and write may be
            empty.

    Raises:
        UserError: the options conflict, or do not fit the model, the output or the Hub.
    """

    calibrate: CalibrateStage
    write: WriteStage

    def __init__(self, options: PruneOptions) -> None:
        options.check()
        check_ranges(options)
        self._options = options
        self._quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
        self._destination = destination_of(options)
        self._suite = chosen_suite(options)
        if options.device_map != "auto":
            from emp_llm.execution.device_map import parse_device_map

            parse_device_map(options.device_map)
        self._given = given_norms(options, options)
        self._source = find_model(options.model, options.revision, options.trust_remote_code)
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
        self._path = options.output or Path(f"{self._source.short_name}-{options.method}")
        self._pending = self._pending_evaluation()
        self._output = None if self._pending is not None and self._pending.exists else self._new_output()
        self._stopwatch = Stopwatch()
        self._stack = ExitStack()
        self.refit: list[RefitStage] = []
        self.evaluate: list[Stage] = []
        self.publish: list[Stage] = []

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
            fit_bytes=fit_memory(self._pruner, self._options) if self._options.fits else None,
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
    def report(self) -> RunReport:
        """The report of the run, when its stages are finished."""
        assert self.write.report is not None
        return self.write.report

    def __enter__(self) -> "PruneRun":
        options = self._options
        if self._destination is not None and ranks().main:
            from emp_llm.hub.destination import check_login

            check_login(self._destination)
        ranks().share(None)  # a barrier: all ranks check the output before the first rank creates it
        self._models = RunModels(self._source, options, options.trust_remote_code, self._stopwatch)
        calibration = None
        if options.fits or (options.needs_activations and self._given is None):
            blocks, quantization = options.blocks, self._quantization
            calibration = prepare_calibration(
                self._models, self._plan.architecture, options, options.propagate, quantization, blocks
            )
        signature = self._signature(calibration)
        try:
            if self._pending is not None and self._output is None and self._pending.matches(signature):
                self._resume_evaluation(self._pending)
            else:
                self._begin(calibration, signature)
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

    def _begin(self, calibration: "ForwardPasses | None", signature: dict[str, Any]) -> None:
        """Prepare the stages that write the checkpoint."""
        output, options = self._output or self._new_output(), self._options
        record = recipe_record(options)
        if ranks().main:
            self._stack.enter_context(output)
            output.begin(signature)
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
        begin = None if self._pending is None else partial(self._pending.begin, output.files, signature)
        self.write = WriteStage(
            self._plan,
            self._pruner,
            self._options,
            output,
            self._norms,
            self._assemble,
            self._stopwatch,
            before_publishing=begin,
            fitted=self.refit[0].files if self.refit else None,
        )

    def _resume_evaluation(self, pending: "PendingEvaluation") -> None:
        """Skip the stages of a checkpoint that an earlier run wrote but did not evaluate."""
        self.calibrate = CalibrateStage(self._models, self._plan.checkpoint, None, list, pending.folder)
        self.write = WriteStage.finished_before(read_report(self._path))

    def _add_evaluation(self, pending: "PendingEvaluation", suite: "Suite") -> None:
        from emp_llm.runs.stages.evaluating import evaluation_stages

        self._stack.callback(pending.release)
        self.evaluate = evaluation_stages(self._models, suite, self._options, pending, lambda: self.report, self._stopwatch)

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
            figures = self.refit[0].files.figures()
            report.fits = fit_records(figures)
            report.warnings = [*fit_warnings(figures, self._pruner, self._options), *report.warnings]
        return report

    def _signature(self, calibration: "ForwardPasses | None") -> dict[str, Any]:
        """Everything that the bytes of the checkpoint depend on."""
        options = self._options
        activations: dict[str, Any] | None = None if self._given is None else {"norms": self._given.digest}
        if calibration is not None:
            activations = (
                (activations or {}) | calibration.signature | {"dtype": options.dtype, "device_map": options.device_map}
            )
        return run_signature(self._plan.checkpoint, recipe_record(options), self._pruner.scheme, activations)

    def _new_output(self) -> OutputFolder:
        needed = self._plan.checkpoint.output_bytes + (fit_disk(self._pruner) if self._options.fits else 0)
        replace = self._options.overwrite or self._options.dry_run  # a dry run replaces nothing
        return OutputFolder(self._path, [self._source.folder], needed, replace)

    def _pending_evaluation(self) -> "PendingEvaluation | None":
        if self._suite is None:
            return None
        from emp_llm.runs.stages.evaluating import PendingEvaluation

        return PendingEvaluation(self._path)


def destination_of(options: PruneOptions) -> "Destination | None":
    """The repository to push to, with a valid name; None if there is none."""
    if options.push_to_hub is None:
        return None
    from emp_llm.hub.destination import Destination

    destination = Destination(options.push_to_hub, options.push_revision, options.private, options.overwrite)
    destination.check_name()
    return destination


def chosen_suite(options: PruneOptions) -> "Suite | None":
    """The suite that evaluates the run; None if there is none."""
    if options.evaluate is None:
        return None
    from emp_llm.evaluation.suites import find_suite

    return find_suite(options.evaluate)
