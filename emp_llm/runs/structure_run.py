"""The run of `prune --structure`: its stages, and the objects that they share."""

import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.provenance import command_line, versions
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.hub.local_model import find_model
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.recipe import read_report
from emp_llm.records.run_report import RunReport, StructureRecord, TargetsRecord
from emp_llm.records.source import CalibrationRecord, ModelSource, RecipeRecord
from emp_llm.runs.dry_run import DryRun, planned_layers
from emp_llm.runs.stages.calibrating import CalibrateStage, given_structure_norms, prepare_calibration, warn_if_foreign
from emp_llm.runs.stages.refitting import fit_records
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import Stage
from emp_llm.runs.stages.structure_writing import StructureWriteStage, check_structured_data, structure_recipe
from emp_llm.runs.stages.structuring import (
    ChooseStage,
    TaylorStage,
    UnitRefitStage,
    choice_lines,
    unit_budgets,
    units_line,
)
from emp_llm.runs.stages.writing import collected_norms, keep_norms
from emp_llm.storage.output.output_folder import OutputFolder
from emp_llm.structured.language.unit_plan import UnitPlan

if TYPE_CHECKING:
    import torch

    from emp_llm.refit.fitted_weights import FittedFiles

logger = logging.getLogger(__name__)


class StructureRun:
    """One structured prune, as a context: `with run: run_stages(run.stages)`.

    Args:
        options: of the command, with `structure`.

    Raises:
        UserError: the options conflict, or do not fit the model, the output or the Hub.
    """

    write: StructureWriteStage

    def __init__(self, options: PruneOptions) -> None:
        from emp_llm.runs.prune_run import chosen_suite, destination_of

        options.check()
        self._options = options
        self._destination = destination_of(options)
        self._suite = chosen_suite(options)
        _check_numbers(options)
        self._given = given_structure_norms(options)
        self._source = find_model(options.model, options.revision, options.trust_remote_code)
        kinds: Any = ("heads", "neurons") if options.structure == "both" else (options.structure,)
        self.plan = UnitPlan(self._source.folder, kinds, options.head_units, options.blocks, options.trust_remote_code)
        self.path = options.output or Path(f"{self._source.short_name}-{options.structure}-{options.method}")
        self._pending = self._pending_evaluation()
        self._output = None if self._pending is not None and self._pending.exists else self._new_output()
        self._stopwatch = Stopwatch()
        self._stack = ExitStack()
        self._before: list[Stage] = []
        self._after: list[Stage] = []
        self._norms: CalibrateStage | None = None
        self._taylor: TaylorStage | None = None
        self._fits: FittedFiles | None = None
        self._about: CalibrationRecord | None = None

    def dry_run(self) -> DryRun:
        """The plan of the run; for scores that need no calibration, with the numbers of heads and neurons that stay."""
        from emp_llm.architecture.targets import Target

        options, checkpoint = self._options, self.plan.checkpoint
        targets = [Target(layer, matrix) for layer, matrix in self.plan.matrices.items()]
        notes = [units_line(self.plan.units)]
        if options.criterion_name == "magnitude" and ranks().main:
            choose = ChooseStage(self.plan, options, self._features)
            choose.run()
            notes += choice_lines(choose.choices, choose.changes)
        return DryRun(
            layers=planned_layers(targets),
            coverage=self.plan.architecture.coverage(targets),
            output=str(self.path),
            disk_bytes=checkpoint.output_bytes,
            needs_overwrite=os.path.lexists(self.path) and not options.overwrite,
            model_bytes=sum(size for size, _ in checkpoint.states.values()),
            push_to_hub=options.push_to_hub,
            recipe=options.method,
            notes=notes,
        )

    @property
    def stages(self) -> list[Stage]:
        """The stages in order, inside the context."""
        return [*self._before, self.write, *self._after]

    @property
    def report(self) -> RunReport:
        """The report of the run, when its stages are finished."""
        assert self.write.report is not None
        return self.write.report

    def __enter__(self) -> "StructureRun":
        options = self._options
        if self._destination is not None and ranks().main:
            from emp_llm.hub.destination import check_login

            check_login(self._destination)
        ranks().share(None)  # a barrier: all ranks check the output before the first rank creates it
        self._models = RunModels(self._source, options, options.trust_remote_code, self._stopwatch)
        calibration = None
        if options.refit or (options.criterion_name != "magnitude" and self._given is None):
            calibration = prepare_calibration(self._models, self.plan.architecture, options, blocks=options.blocks)
            check_structured_data(options, calibration)
        signature = self._signature(calibration)
        try:
            if self._pending is not None and self._output is None and self._pending.matches(signature):
                self.write = StructureWriteStage.finished_before(read_report(self.path))
            else:
                self._begin(calibration, signature)
            self._add_evaluation()
        except BaseException as error:
            if not self._stack.__exit__(type(error), error, error.__traceback__):
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, traceback)
        if error is None:
            times = ", ".join(f"{stage} {entry.seconds:.1f} s" for stage, entry in self.report.stages.items())
            logger.info("written to %s (%s)", self.path, times)

    def _begin(self, calibration: Any, signature: dict[str, Any]) -> None:
        """Prepare the stages that write the checkpoint."""
        options, output = self._options, self._output or self._new_output()
        if ranks().main:
            self._stack.enter_context(output)
            output.begin(signature)
        layers = [units.output for units in self.plan.units]
        if options.criterion_name == "taylor":
            self._taylor = TaylorStage(self._models, self.plan, calibration, options, output)
            self._before.append(self._taylor)
        elif options.criterion_name == "wanda":
            self._norms = CalibrateStage(
                self._models,
                self.plan.checkpoint,
                calibration,
                lambda: layers,
                output.calibration,
                given=self._given,
                restore=partial(collected_norms, output, self._stopwatch),
                keep=partial(keep_norms, output, self._stopwatch),
            )
            self._before.append(self._norms)
        choose = ChooseStage(self.plan, options, self._features)
        self._before.append(choose)
        if options.refit:
            from emp_llm.refit.fitted_weights import FittedFiles

            self._fits = FittedFiles(output.work.fitted, lambda block: output.work.note(fitted=block))
            self._before.append(UnitRefitStage(self._models, choose, calibration, options, self._fits, output))
        if calibration is not None:
            name = self._source.name if self._source.revision is not None else self._source.folder.name
            self._about = calibration.origin(CalibrationRecord(model=name, revision=self._source.revision))
        begin = None if self._pending is None else partial(self._pending.begin, output.files, signature)
        self.write = StructureWriteStage(
            self._models, self.plan, options, choose, self._fits, output, self._assemble, self._digest, begin
        )

    def _features(self) -> "dict[str, torch.Tensor] | None":
        if self._taylor is not None:
            return self._taylor.sums
        norms = None if self._norms is None else self._norms.norms
        if norms is None:
            return None
        found = {units.name: norms.norm(units.name) for units in self.plan.units}
        return {name: norm for name, norm in found.items() if norm is not None}

    def _digest(self) -> str | None:
        norms = None if self._norms is None else self._norms.norms
        return None if norms is None else norms.digest

    def _assemble(self, targets: TargetsRecord, structure: StructureRecord, recipe: RecipeRecord, identity: str) -> RunReport:
        if self._given is not None:
            warn_if_foreign(self._given, identity, self._source.folder)
        norms = None if self._norms is None else self._norms.norms
        return RunReport(
            source=ModelSource(model=self._source.name, revision=self._source.revision, identity=identity),
            command=command_line(),
            recipe=recipe,
            calibration=self._about if norms is None else norms.about,
            versions=versions(),
            stages={},
            targets=targets,
            sizes=None,
            matrices={},
            warnings=[],
            fits={} if self._fits is None else fit_records(self._fits.figures()),
            structure=structure,
        )

    def _signature(self, calibration: Any) -> dict[str, Any]:
        """Everything that the bytes of the checkpoint depend on."""
        options = self._options
        made: dict[str, Any] = {} if self._given is None else {"norms": self._given.digest}
        if calibration is not None:
            made |= calibration.signature
        if options.match is not None:
            matched = read_report(options.match).structure
            made |= {"matched": {name: each.kept for name, each in matched.layers.items()} if matched else {}}
        return {
            "emp-llm": versions().get("emp-llm", "unknown"),
            "source": {"files": {name: list(state) for name, state in self.plan.checkpoint.states.items()}},
            "recipe": structure_recipe(options).as_dict(),
            "calibration": made,
        }

    def _new_output(self) -> OutputFolder:
        replace = self._options.overwrite or self._options.dry_run
        return OutputFolder(self.path, [self._source.folder], self.plan.checkpoint.output_bytes, replace)

    def _pending_evaluation(self) -> Any:
        if self._suite is None:
            return None
        from emp_llm.runs.stages.evaluating import PendingEvaluation

        return PendingEvaluation(self.path)

    def _add_evaluation(self) -> None:
        if self._suite is not None and self._pending is not None:
            from emp_llm.runs.stages.evaluating import evaluation_stages

            self._stack.callback(self._pending.release)
            self._after += evaluation_stages(
                self._models, self._suite, self._options, self._pending, lambda: self.report, self._stopwatch
            )
        if self._destination is not None:
            from emp_llm.runs.stages.pushing import PushStage

            self._after.append(PushStage(self.path, self._destination, lambda: self.report))


def _check_numbers(options: PruneOptions) -> None:
    """Raise UserError for a number out of range, before the model is read."""
    try:
        unit_budgets(options)
    except ValueError as error:
        raise UserError(f"--{error}.") from error
