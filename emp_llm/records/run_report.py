"""emp_report.json: the effect of a pruning run on each matrix, its evaluation, and everything
that it depends on.
"""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.common.errors import UserError
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.tables import percent_cell, table
from emp_llm.records.base import FileRecord, Part, RecordedRecipe, read_record
from emp_llm.records.evaluation import CheckRecord, EvaluationRecord
from emp_llm.records.source import CalibrationRecord, ModelSource, StageRecord

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=-1e-9, le=1 + 1e-9)]  # between 0 and 1, up to rounding errors

# Mixtures have tens of thousands of matrices, each with an entry in the report.
REPORT_LIMIT = 4 * INDEX_LIMIT


class Quartiles(Part, kw_only=True, frozen=True):  # type: ignore[misc]  # msgspec allows it; dataclasses would not
    """min, quartiles and max of a quantity over the rows of a matrix."""

    min: float
    q1: float
    median: float
    q3: float
    max: float

    @property
    def values(self) -> tuple[float, float, float, float, float]:
        return self.min, self.q1, self.median, self.q3, self.max


class MatrixRecord(Part, kw_only=True, omit_defaults=False):
    """The effect of a run on one matrix. Masses are shares of sum |s|; quantities of rows are given
    as quartiles.

    Attributes:
        tensor: its stored name; role: its name within the block; block: index of its block, null
            outside the blocks.
        rows, columns: its shape; kept: number of weights kept.
        group_size: N, the number of weights in a group, if a group is a row or the matrix; else
            this and the fields below are null.
        n_eff, s_eff: effective number and effective mass; s_eff_bound: the lower bound on s_eff
            (order 2 only). If the magnitudes set the counts, n_eff is theirs, s_eff that of the
            scores, and there is no bound.
        least_margin_over_bound: the smallest s_eff - s_eff_bound of a group.
    """

    tensor: str = ""
    role: str
    block: int | None = None
    rows: Count
    columns: Count
    kept: Count
    kept_fraction_mean: Share = 0.0
    kept_fraction: Quartiles
    kept_mass: float = 1.0
    group_size: Annotated[int, Meta(ge=1)] | None = None
    n_eff: Quartiles | None = None
    n_eff_mean: Annotated[float, Meta(ge=0)] | None = None
    s_eff: Quartiles | None = None
    s_eff_mean: Share | None = None
    s_eff_bound: Quartiles | None = None
    s_eff_bound_mean: Share | None = None
    least_margin_over_bound: float | None = None


class FitRecord(Part, kw_only=True):
    """The fit of one matrix's kept weights to the calibration text.

    Attributes:
        tokens: number of tokens of the fit; 0 if it was not fitted.
        damping: pull towards the dense weights, as a share of the mean second moment.
        error_before, error_after: sum_t ||What xhat_t - W x_t||^2 / sum_t ||W x_t||^2 on the
            calibration tokens, of the masked and of the fitted weights; xhat and x are the inputs
            in the pruned and in the dense model. Of SparseGPT without a refit, both are those in
            the pruned model.
        held_out_before, held_out_after: the same on calibration sequences that were held out of the
            fit.
    """

    tokens: Count
    damping: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    held_out_before: float | None = None
    held_out_after: float | None = None


class TargetsRecord(Part, kw_only=True, omit_defaults=False):
    """Counts over all targets, and their share of the model.

    Attributes:
        matrices, matrices_outside: number of targets, and of those outside the decoder blocks.
        matrices_in_blocks: number of matrices in the blocks of the model.
        weights, kept, zeros: numbers of weights of the targets.
        sparsity_of_targets, sparsity_of_all_parameters: removed weights as a share of the targets,
            and of the model.
        parameters: of the model; share_of_all_parameters, share_of_blocks: the targets' share of
            the model, and of its blocks.
        unreachable: names of parameters in blocks that cannot be pruned; the next two fields are
            their shares.
        dense_towers: the share of the model of each part of a multimodal model that stays dense as
            a whole, by its name.
        scored_by_magnitude: matrices of experts with too few tokens for norms, and their numbers of
            tokens.
        n_eff, s_eff, s_eff_bound: of all targets as one group (--group all); else null.
    """

    matrices: Count = 0
    matrices_outside: Count = 0
    matrices_in_blocks: Count = 0
    weights: Count | None = None
    kept: Count | None = None
    zeros: Count | None = None
    sparsity_of_targets: Share
    sparsity_of_all_parameters: Share | None = None
    parameters: Count | None = None
    share_of_all_parameters: float | None = None
    share_of_blocks: float | None = None
    unreachable: list[str] = []
    unreachable_share_of_all_parameters: float = 0.0
    unreachable_share_of_blocks: float = 0.0
    dense_towers: dict[str, float] = {}
    scored_by_magnitude: dict[str, int] = {}
    n_eff: float | None = None
    s_eff: float | None = None
    s_eff_bound: float | None = None


class SizesRecord(Part, kw_only=True):
    """Sizes of a pruned checkpoint's tensors in bytes: dense, packed raw, and as a mask of the
    targets; 0 after a refit.
    """

    dense: int
    packed: int
    mask: int


class PointRecord(Part, kw_only=True):
    """A point of a sweep: its recipe, and for a baseline the name of the EMP point that it is
    matched to.
    """

    name: str
    recipe: RecordedRecipe
    baseline_of: str | None = None


class UnitsRecord(Part, kw_only=True):
    """The heads of one attention, the neurons of one MLP or expert, the experts of one block, or
    all layers.

    Attributes:
        kind: "heads", "neurons", "experts" or "layers"; role: name of their last layer within the
            block, of the module of the experts, or of the list of layers; block: its number.
        units, kept: numbers in the dense and in the pruned model; groups of heads count as one.
        rule: the number that the rule keeps; where all layers get one width, `kept` may differ.
        n_eff, s_eff, s_eff_bound: effective number and effective mass of the scores, and its lower
            bound (order 2 only).
        tokens_lost, mass_lost: of experts, the share of the routed tokens, and of their gates times
            outputs, that lose theirs.
        n_eff_together: effective number of the scores of all layers with this role, if they are one
            group.
        scores, kept_units: of experts, the score of each to six digits, and the numbers of those
            that stay.
    """

    kind: str
    role: str
    block: Count
    units: Count
    kept: Count
    rule: Count
    n_eff: float
    s_eff: float
    s_eff_bound: float | None = None
    n_eff_together: float | None = None
    tokens_lost: Share | None = None
    mass_lost: Share | None = None
    scores: list[float] | None = None
    kept_units: list[Count] | None = None


class CostRecord(Part, kw_only=True):
    """Size of a model.

    Attributes:
        parameters: number of elements of all stored tensors; bytes: their size.
        active_parameters: of a mixture, those that a token reaches.
    """

    parameters: Count
    bytes: Count
    active_parameters: Count | None = None


class StructureRecord(Part, kw_only=True):
    """The removed heads, neurons, experts or layers.

    Attributes:
        layers: by the name of the layer that reads them.
        dense, pruned: their sizes.
        difference: ||a - b|| / ||a|| between the logits of the dense model with zeros in place of
            the removed heads and neurons, and of the written checkpoint; null if the models were
            too large to compare.
        config: the changed fields of config.json, with their new values.
    """

    layers: dict[str, UnitsRecord]
    dense: CostRecord
    pruned: CostRecord
    difference: float | None = None
    config: dict[str, Any] = {}


class HealingRecord(Part, kw_only=True, omit_defaults=False):
    """The training of the kept weights on the dense model's probabilities.

    Attributes:
        steps, tokens: length of the training.
        best: the step whose weights were kept; 0: those before the training.
        by: the whole model at once, or block by block.
        curve: [step, divergence on held-out sequences in nats per token], from step 0 on; by
            blocks, the mean squared error of a block's outputs as a share of their squares. A loss
            that is not finite is null in JSON.
        perplexity: on the held-out sequences: of the dense model, and of the pruned one "before"
            and "after"; empty by blocks.
        origin: its text, seed and versions; command: of a run of `heal`.
    """

    by: Literal["model", "blocks"] = "model"
    steps: Count
    tokens: Count
    best: Count
    curve: list[tuple[Count, float | None]]
    perplexity: dict[str, float | None] = {}
    origin: CalibrationRecord | None = None
    command: str | None = None


class LossPoint(Part, kw_only=True, omit_defaults=False):
    """A point of the curve of --loss.

    Attributes:
        sparsity: share of zeros among the targets.
        rise, error: of the mean loss of held-out tokens, from the dense model's, in nats per token,
            with the paired standard error.
        whole_run: with weights that moved; else of the masks alone.
    """

    sparsity: Share
    rise: float
    error: float
    whole_run: bool = False

    @property
    def most(self) -> float:
        """The rise, and its standard error on top."""
        return self.rise + self.error

    @property
    def removes_nothing(self) -> bool:
        """Whether it stands for a run that would remove no unit: the dense model itself."""
        return self.whole_run and self.rise == 0 == self.error

    @property
    def rise_text(self) -> str:
        """The rise and its error in percent of the perplexity."""
        change = 100 * math.expm1(min(self.rise, 50.0))
        error = 100 * self.error * math.exp(min(self.rise, 50.0))
        return f"{change:+.2f} ± {error:.2f} %"

    @property
    def words(self) -> str:
        """The point in a line."""
        return f"{100 * self.sparsity:.1f} %: {self.rise_text}"


class LossRecord(Part, kw_only=True):
    """How --loss chose the sparsity.

    Attributes:
        flag: the budget as the user wrote it; budget: in nats per token.
        sparsity: that was taken.
        sequences, length: of the held-out text that decided; dense: the dense model's perplexity on
            it.
        points: the curve, by sparsity.
    """

    flag: str
    budget: Annotated[float, Meta(gt=0)]
    sparsity: Share
    sequences: Count
    length: Count
    dense: float
    points: list[LossPoint]


class RunReport(FileRecord, kw_only=True):
    """The report of a pruning run, or of a point of a sweep.

    Attributes:
        source, command, recipe, calibration, versions: everything that the run depends on.
        dtype, device_map: precision and place of the forward passes.
        stages: time and memory of each stage.
        targets, sizes, matrices, warnings: the effect of the run.
        fits: of refitted matrices, and of those by SparseGPT or ADMM, by layer name.
        structure: the removed heads and neurons; null if weights were pruned.
        healing: the training of --heal, or of the command heal.
        check: the perplexity of held-out text before and after; null without a text, or where the
            run does not measure it.
        unchecked: what a check would have needed, of a run that has none.
        trained: whether weights were trained after the run, by other programs; then `check` and
            `evaluation` are left out, which were measured before.
        loss: how --loss chose the sparsity.
        evaluation: the measurements of --evaluate.
        point, masks: in a sweep, the point, and a hash of its masks.
        push: the result of --push-to-hub (`reporting.push.Pushed`); in memory only.
    """

    KIND: ClassVar[str] = "run"
    VERSION: ClassVar[int] = 3

    source: ModelSource
    command: str
    recipe: RecordedRecipe
    calibration: CalibrationRecord | None
    versions: dict[str, str]
    stages: dict[str, StageRecord]
    targets: TargetsRecord
    sizes: SizesRecord | None
    matrices: dict[str, MatrixRecord]
    warnings: list[str]
    fits: dict[str, FitRecord] = {}
    structure: StructureRecord | None = None
    healing: HealingRecord | None = None
    check: CheckRecord | None = None
    unchecked: str | None = None
    trained: bool = False
    loss: LossRecord | None = None
    evaluation: EvaluationRecord | None = None
    point: PointRecord | None = None
    masks: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    push: Any = None

    def __repr__(self) -> str:
        """A short table."""
        rows = [["layers", "weights", "kept %"]]
        for role in dict.fromkeys(entry.role for entry in self.matrices.values()):
            entries = [entry for entry in self.matrices.values() if entry.role == role]
            weights = sum(entry.rows * entry.columns for entry in entries)
            kept = sum(entry.kept for entry in entries)
            rows.append(
                [f"{role} x {len(entries)}", f"{weights:,}", percent_cell(kept / (weights or 1))]
            )
        removed = percent_cell(self.targets.sparsity_of_targets)
        damage = ""
        if self.check is not None:
            dense, pruned = (each.value for each in (self.check.dense, self.check.pruned))
            damage = f"\nheld-out text: perplexity {dense:.4g} to {pruned:.4g}"
        elif self.unchecked is not None:
            damage = f"\ndamage not measured: {self.unchecked}"
        return (
            f"{table(rows)}\n{self.recipe.method} removed {removed} % of the targets of "
            f"{self.source.model}{damage}"
        )


def read_report(run: Path) -> RunReport:
    """The report in a run's output folder; UserError if it is missing or invalid."""
    if not (run / REPORT_NAME).is_file():
        raise UserError(
            f"{run}: no {REPORT_NAME} in it; give the --output folder of a finished prune."
        )
    return read_record(run / REPORT_NAME, RunReport, REPORT_LIMIT)
