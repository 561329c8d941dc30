"""The stage that writes the checkpoint of a structured run, compares it with the dense model, and publishes it."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from emp_llm.checkpoint.identity import identity_of
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import MANIFEST_NAME, REPORT_NAME, STRUCTURE_NAME
from emp_llm.common.ranks import ranks
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.output.manifest import write_manifest
from emp_llm.records.run_report import CostRecord, RunReport, StructureRecord, TargetsRecord, UnitsRecord
from emp_llm.records.source import RecipeRecord, StructureRecipe
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import stage_records
from emp_llm.runs.stages.structuring import ChooseStage
from emp_llm.runs.stages.writing import PublishingStage
from emp_llm.selection.budgets import EffectiveBudget
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.output.output_folder import OutputFolder

if TYPE_CHECKING:
    import torch

    from emp_llm.structured.language.side_by_side import SideBySide
    from emp_llm.structured.language.tensor_edits import TensorEdit
    from emp_llm.structured.language.unit_plan import UnitPlan
    from emp_llm.structured.language.unit_writer import UnitWriter
    from emp_llm.update.moved import MovedWeights

logger = logging.getLogger(__name__)
_KINDS = {"heads": "attention", "neurons": "mlp", "both": "all-linear"}


class FittedUnits:
    """The fitted weights of layers, read from their files one block at a time.

    Args:
        files: None without a refit.
        choose: the finished choice.
    """

    def __init__(self, files: "MovedWeights | None", choose: ChooseStage) -> None:
        self._files = files
        self._choose = choose
        self._held: tuple[int, dict[str, Any]] | None = None

    def weight(self, layer: str) -> "torch.Tensor | None":
        """The weight of a layer, shape (outputs, inputs), in the dtype in which it is stored; None if it was not fitted."""
        block = self._blocks.get(layer)
        if self._files is None or block is None or not self._files.has(block):
            return None
        if self._held is None or self._held[0] != block:
            self._held = block, self._files.block(block)
        fitted = self._held[1].get(layer)
        return None if fitted is None else fitted.weight

    def words(self, layer: str) -> Any:
        """The same as words, or None."""
        from emp_llm.structured.language.tensor_edits import words_of_tensor

        weight = self.weight(layer)
        return None if weight is None else words_of_tensor(weight)

    @property
    def _blocks(self) -> dict[str, int]:
        return {choice.units.name: choice.units.block for choice in self._choose.choices}


class StructureWriteStage(PublishingStage):
    """Writes the checkpoint without the removed units, or with zeros in their place.

    Args:
        models, plan, options: of the run.
        choose: the finished choice.
        fitted: the weights of a refit; None without one.
        output: the output folder, open on the first rank.
        report: returns the report without its figures, given the figures' records and the source's identity.
        norms: returns the digest of the norms, or None.
        before_publishing: called when all other files are complete.
    """

    name = "prune"

    def __init__(
        self,
        models: RunModels,
        plan: "UnitPlan",
        options: PruneOptions,
        choose: ChooseStage,
        fitted: "MovedWeights | None",
        output: OutputFolder,
        report: Callable[[TargetsRecord, StructureRecord, RecipeRecord, str], RunReport],
        norms: Callable[[], str | None],
        before_publishing: Callable[[], None] | None,
    ) -> None:
        self._models = models
        self._plan = plan
        self._options = options
        self._choose = choose
        self._fitted = FittedUnits(fitted, choose)
        self._output = output
        self._assemble = report
        self._norms = norms
        self._before_publishing = before_publishing

    def run(self) -> None:
        self.report = ranks().share(self._write() if ranks().main else None)

    def _write(self) -> RunReport:
        from emp_llm.structured.language.unit_writer import UnitWriter

        checkpoint, files, work = self._plan.checkpoint, self._output.files, self._output.work
        edits = self._plan.edits(self._choose.choices)
        writer = UnitWriter(checkpoint, edits, self._choose.changes, self._fitted.words)
        with self._models.stopwatch(self.name):
            hashes = writer.write(files, work.get("shards") or {}, lambda done: work.note(shards=done))
            save_structure(files / STRUCTURE_NAME, self._choose)
            identity = identity_of(checkpoint)
        compared = self._compare()
        recipe = structure_recipe(self._options, self._choose)
        report = self._assemble(self._targets(edits), self._record(writer, compared), recipe, identity)
        report.stages = stage_records(self._models.stopwatch)
        report.save(files / REPORT_NAME)
        (files / MANIFEST_NAME).unlink(missing_ok=True)
        write_manifest(
            files, checkpoint, identity, recipe, structure_scheme(self._options, self._choose), self._norms(), hashes
        )
        if self._before_publishing is not None:
            self._before_publishing()
        self._output.publish()
        return report

    def _compare(self) -> "SideBySide | None":
        """Compare the written model with the dense one, if both fit in memory."""
        from emp_llm.execution.offload import is_offloaded
        from emp_llm.structured.language.side_by_side import side_by_side

        dense = self._models.dense()
        with self._models.stopwatch("compare"):
            written = None if is_offloaded(dense) else self._models.load(self._output.files)
            if written is None or is_offloaded(written):
                logger.warning("warning: both models do not fit in memory together; speed and logits are not compared.")
                return None
            return side_by_side(dense, written, self._choose.choices, self._fitted.weight)

    def _targets(self, edits: "dict[str, TensorEdit]") -> TargetsRecord:
        """Counts over the matrices of all units."""
        from emp_llm.architecture.targets import Target

        matrices, checkpoint = self._plan.matrices, self._plan.checkpoint
        weights, kept = self._plan.parameters, 0
        for matrix in matrices.values():
            shape = list(matrix.stored.shape[-2:])
            for axis, indices in edits[matrix.stored.name].slices[matrix.expert].kept.items():
                shape[axis] = len(indices)
            kept += shape[0] * shape[1]
        coverage = self._plan.architecture.coverage([Target(layer, matrix) for layer, matrix in matrices.items()])
        return TargetsRecord(
            matrices=len(matrices),
            matrices_in_blocks=coverage.matrices,
            weights=weights,
            kept=kept,
            zeros=0 if self._choose.changes is not None else weights - kept,
            sparsity_of_targets=1 - kept / weights,
            sparsity_of_all_parameters=(weights - kept) / checkpoint.parameters,
            parameters=checkpoint.parameters,
            share_of_all_parameters=weights / checkpoint.parameters,
            share_of_blocks=coverage.share_of_blocks,
        )

    def _record(self, writer: "UnitWriter", compared: "SideBySide | None") -> StructureRecord:
        checkpoint = self._plan.checkpoint
        size = sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
        dense = CostRecord(parameters=checkpoint.parameters, bytes=size)
        pruned = CostRecord(parameters=writer.parameters, bytes=writer.total_bytes)
        if compared is not None:
            for cost, flops, speed in zip((dense, pruned), compared.flops, compared.speed, strict=True):
                cost.flops_per_token, cost.tokens_per_second = flops, speed
        return StructureRecord(
            layers={choice.units.name: _units_record(choice) for choice in self._choose.choices},
            dense=dense,
            pruned=pruned,
            prompt_tokens=None if compared is None else compared.tokens,
            difference=None if compared is None else compared.difference,
            config={".".join(path): value for path, value in (self._choose.changes or {}).items()},
        )


def structure_recipe(options: PruneOptions, choose: ChooseStage | None = None) -> RecipeRecord:
    """The options that decide which units stay, defaults filled in; with the beta of a requested sparsity once it is known."""
    assert options.structure is not None
    record = RecipeRecord(method=options.method, targets=_KINDS[options.structure], blocks=options.blocks)
    record.structure = StructureRecipe(
        structure=options.structure,
        group=options.compared,
        head_unit=None if options.structure == "neurons" else options.head_units,
        keep_shapes=options.keep_shapes,
        width_multiple=None if options.keep_shapes or options.structure == "heads" else options.multiple,
    )
    if options.refit:
        from emp_llm.records.source import RefitRecord

        record.refit = RefitRecord(weighting=options.weighting, target=options.restored, damping=options.refit_damping)
    record.match = None if options.match is None else str(options.match)
    if options.adaptive:
        record.order = 2.0 if options.order is None else float(options.order)
        record.sparsity = options.sparsity
        record.beta = 1.0 if options.beta is None else float(options.beta)
        if options.sparsity is not None:
            settled = {budget.beta for budget in choose.budgets if isinstance(budget, EffectiveBudget)} if choose else set()
            record.beta = settled.pop() if len(settled) == 1 else None
    elif options.match is None:
        record.sparsity = 0.5 if options.sparsity is None else float(options.sparsity)
    record.dtype, record.device_map = options.dtype, options.device_map
    return record


def structure_scheme(options: PruneOptions, choose: ChooseStage) -> Scheme:
    """The scheme of a structured run, for the manifest."""
    return Scheme(options.criterion_name, choose.budgets[0], "all" if options.compared == "all" else "matrix")


def save_structure(path: Any, choose: ChooseStage) -> None:
    """Write the kept units and all scores: NAME.kept, int64, and NAME.scores, float64, for each layer that reads units."""
    import torch
    from safetensors.torch import save

    from emp_llm.storage.atomic import write_bytes

    tensors = {}
    for choice in choose.choices:
        tensors[f"{choice.units.name}.kept"] = torch.from_numpy(choice.kept.astype(np.int64))
        tensors[f"{choice.units.name}.scores"] = torch.from_numpy(choice.scores)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, save(tensors))


def _units_record(choice: Any) -> UnitsRecord:
    return UnitsRecord(
        kind=choice.units.kind,
        role=choice.units.role,
        block=choice.units.block,
        units=len(choice.units),
        kept=len(choice.kept),
        rule=choice.count,
        n_eff=choice.n_eff,
        s_eff=choice.s_eff,
        s_eff_bound=choice.bound,
        n_eff_together=choice.n_eff_together,
    )


def check_structured_data(options: PruneOptions, calibration: Any) -> None:
    """Raise UserError if a run needs a calibration on text, block by block, and has another."""
    from emp_llm.calibration.calibration import Calibration

    if not isinstance(calibration, Calibration):
        raise UserError("--structure is scored on text alone; leave out image= in --calibration.")
    if options.execution == "model" and (options.criterion_name == "taylor" or options.refit):
        what = "--method taylor" if options.criterion_name == "taylor" else "--refit"
        raise UserError(f"{what} runs block by block; leave out --execution model.")
