"""The run of `prune --structure`: its stages, and the objects that they share."""

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.provenance import command_line, versions
from emp_llm.common.ranks import ranks
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.recipe import read_report
from emp_llm.records.run_report import RunReport, StructureRecord, TargetsRecord
from emp_llm.records.source import CalibrationRecord, ModelSource, RecipeRecord
from emp_llm.runs.checkpoint_run import CheckpointRun
from emp_llm.runs.dry_run import DryRun, planned_layers
from emp_llm.runs.stages.calibrating import CalibrateStage, given_norms, prepare_calibration, warn_if_foreign
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

    from emp_llm.calibration.calibration import ForwardPasses
    from emp_llm.runs.stages.evaluating import PendingEvaluation
    from emp_llm.update.moved import MovedWeights

logger = logging.getLogger(__name__)


class StructureRun(CheckpointRun):
    """One structured prune, as a context: `with run: run_stages(run.stages)`.

    Args:
        options: of the command, with `structure`.

    Raises:
        UserError: the options conflict, or do not fit the model, the output or the Hub.
    """

    write: StructureWriteStage

    def __init__(self, options: PruneOptions) -> None:
        options.check()
        _check_numbers(options)
        self._given = given_norms(options, options)
        super().__init__(options)
        kinds: Any = ("heads", "neurons") if options.structure == "both" else (options.structure,)
        self.plan = UnitPlan(self._source.folder, kinds, options.head_units, options.blocks, options.trust_remote_code)
        self._prepare_output(f"{options.structure}-{options.method}")
        self._before: list[Stage] = []
        self._norms: CalibrateStage | None = None
        self._taylor: TaylorStage | None = None
        self._fits: MovedWeights | None = None
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
            output=str(self._path),
            disk_bytes=checkpoint.output_bytes,
            needs_overwrite=os.path.lexists(self._path) and not options.overwrite,
            model_bytes=sum(size for size, _ in checkpoint.states.values()),
            push_to_hub=options.push_to_hub,
            recipe=options.method,
            notes=notes,
        )

    @property
    def stages(self) -> list[Stage]:
        return [*self._before, self.write, *self.evaluate, *self.publish]

    @property
    def written(self) -> RunReport | None:
        return self.write.report

    @property
    def _needed(self) -> int:
        return self.plan.checkpoint.output_bytes

    def _calibration(self) -> "ForwardPasses | None":
        options = self._options
        if not options.fits and (not options.needs_activations or self._given is not None):
            return None
        calibration = prepare_calibration(self._models, self.plan.architecture, options, blocks=options.blocks)
        check_structured_data(options, calibration)
        return calibration

    def _begin(self, calibration: Any, signature: dict[str, Any], output: OutputFolder) -> None:
        options = self._options
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
            from emp_llm.update.moved import MovedWeights

            self._fits = MovedWeights(output.work.fitted, lambda block: output.work.note(fitted=block))
            self._before.append(UnitRefitStage(self._models, choose, calibration, options, self._fits, output))
        if calibration is not None:
            name = self._source.name if self._source.revision is not None else self._source.folder.name
            self._about = calibration.origin(CalibrationRecord(model=name, revision=self._source.revision))
        begin = self._before_publishing(output, signature)
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
            fits={} if self._fits is None else self._fits.records(),
            structure=structure,
        )

    def _signature(self, calibration: Any) -> dict[str, Any]:
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

    def _skip(self, report: RunReport, pending: "PendingEvaluation") -> None:
        self.write = StructureWriteStage.finished_before(report)


def _check_numbers(options: PruneOptions) -> None:
    """Raise UserError for a number out of range, before the model is read."""
    try:
        unit_budgets(options)
    except ValueError as error:
        raise UserError(f"--{error}.") from error
