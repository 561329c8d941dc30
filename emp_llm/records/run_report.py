"""emp_report.json: the effect of a pruning run on each matrix, its evaluation, and everything
that it depends on.
"""

import logging
import math
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from emp_llm.checkpoint.files import INDEX_LIMIT, STRICT, parse_own, reading
from emp_llm.common.errors import ReadError, UserError, quotable, reason
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.tables import percent_cell, table
from emp_llm.options.recipe import Recipe
from emp_llm.records.base import (
    CalibrationRecord,
    FileRecord,
    ModelIdentity,
    ModelSource,
    Part,
    QuantizationRecord,
    RecordedRecipe,
    StageRecord,
    TextRecord,
    read_record,
    record_of,
)
from emp_llm.records.evaluation import (
    CheckRecord,
    EvaluationRecord,
    Measures,
    PerplexityRecord,
    SuiteTask,
    TaskRecord,
)

logger = logging.getLogger(__name__)


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
        curve: [step, divergence on held-out sequences in nats per token], from step 0 on: from the
            dense model, or from its mixture with the labels; by blocks, the mean squared error of a
            block's outputs as a share of their squares. A loss that is not finite is null in JSON.
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


# emp_manifest.json: every file that a run wrote with its hash, and everything that the masks
# depend on.


class FileEntry(Part, kw_only=True):
    """A file: its size, and its BLAKE3 hash."""

    bytes: Annotated[int, Meta(ge=0)]
    blake3: str


class ManifestSource(Part, kw_only=True):
    """The checkpoint that was pruned.

    Attributes:
        identity: of its weights (`checkpoint.identity`).
        bytes: size of each shard.
    """

    identity: str | None = None
    bytes: dict[str, int] = {}


class NormsRecord(Part, kw_only=True):
    """The SHA-256 of the norms that the masks depend on."""

    norms: str


class Manifest(FileRecord, kw_only=True, omit_defaults=False):
    """The manifest of a finished checkpoint. It leaves out the report, whose times differ from
    run to run.
    """

    KIND: ClassVar[str] = "manifest"
    VERSION: ClassVar[int] = 3

    emp_llm: str = msgspec.field(default="unknown", name="emp-llm")
    source: ManifestSource
    recipe: RecordedRecipe
    activations: NormsRecord | None = None
    files: dict[str, FileEntry]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.files:
            path = PurePath(name)
            if not name.isprintable() or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{name[:80]!r} is not a file in this folder")


# The output of `measure`: effective numbers and masses of a model's matrices, by criterion and
# order.


class CurvePoint(Part, kw_only=True):
    """What EMP with one beta would leave.

    Attributes:
        beta: of the effective number.
        kept: number of kept weights of the targets.
        sparsity_of_targets, sparsity_of_all_parameters: removed weights, as shares.
    """

    beta: float
    kept: int
    sparsity_of_targets: float
    sparsity_of_all_parameters: float


class MeasureEntry(Part, kw_only=True, omit_defaults=False):
    """One criterion and one order, and the result of EMP with beta 1 for them.

    Attributes:
        score: whose norms scored the weights; count_by: whose effective numbers set the counts.
        curve: the sparsity at other betas; empty in older files.
    """

    criterion: str
    order: float
    score: str | None = None
    count_by: Literal["own", "magnitude"] | None = None
    targets: TargetsRecord
    sizes: SizesRecord | None = None
    matrices: dict[str, MatrixRecord]
    curve: list[CurvePoint] = []
    warnings: list[str] = []


class LossEntry(Part, kw_only=True):
    """How much can go within a budget of --loss.

    Attributes:
        flag: the budget as the user wrote it; budget: in nats per token.
        point: with the sparsity that was found; null: even the least that was tried goes beyond it.
        parameters: of the model, that are not zero; packed_bytes: of the packed checkpoint.
    """

    flag: str
    budget: float
    point: LossPoint | None = None
    parameters: int | None = None
    packed_bytes: int | None = None


class LossMeasure(Part, kw_only=True):
    """What a method's masks can remove within some budgets.

    Attributes:
        order: of the effective number; null for a fixed share.
        dense: the dense model's perplexity on the held-out text; sequences, length: of it.
        points: the curve, by sparsity.
    """

    method: str
    order: float | None = None
    dense: float
    sequences: int
    length: int
    budgets: list[LossEntry]
    points: list[LossPoint]


class Measure(FileRecord, kw_only=True, omit_defaults=False):
    """The measures of a model."""

    KIND: ClassVar[str] = "measure"
    VERSION: ClassVar[int] = 3

    source: ModelSource
    command: str = ""
    recipe: RecordedRecipe = msgspec.field(default_factory=Recipe)
    calibration: CalibrationRecord | None = None
    versions: dict[str, str] = {}
    measures: list[MeasureEntry]
    losses: list[LossMeasure] = []

    def __repr__(self) -> str:
        """A short table of what EMP with beta 1 removes."""
        rows = [["criterion", "order", "removed %"]]
        for entry in self.measures:
            rows.append(
                [
                    entry.criterion,
                    f"{entry.order:g}",
                    percent_cell(entry.targets.sparsity_of_targets),
                ]
            )
        return table(rows)


# Results files: the measurements of `evaluate` on a model, and everything that they depend on.


class MadeBy(Part, kw_only=True, omit_defaults=False):
    """Everything that the numbers depend on.

    Attributes:
        runtime: "sparse" if the model ran from packed weights.
    """

    model: ModelIdentity
    limit: int | None = None
    text: TextRecord | None = None
    tasks: list[SuiteTask] = []
    batch_size: int | str | None = None
    dtype: str | None = None
    quantization: QuantizationRecord | None = None
    device_map: str | None = None
    runtime: str | None = None
    ranks: int = 1
    device: str = ""
    versions: dict[str, str] = {}


class PrunedBy(Part, kw_only=True):
    """From the report of a pruned checkpoint: the name of the dense model, the recipe, and the
    sparsity of the targets, and whether it was trained since.
    """

    of: str = ""
    recipe: RecordedRecipe
    sparsity_of_targets: Share = 0.0
    trained: bool = False


class Results(FileRecord, kw_only=True, omit_defaults=False):
    """The measurements of a suite on one model.

    Attributes:
        model: the name that the user gave; revision: its commit on the Hub.
        pruned: recipe and sparsity of a pruned model; null for a dense one.
        suite, command: name of the suite, and the command line; made_by: everything that the
            numbers depend on.
        complete: whether the whole suite is measured.
        perplexity, tasks: what was measured so far.
    """

    KIND: ClassVar[str] = "results"
    VERSION: ClassVar[int] = 4

    model: str
    revision: str | None = None
    pruned: PrunedBy | None = None
    suite: str = "suite"
    made_by: MadeBy
    command: str = ""
    complete: bool = False
    perplexity: PerplexityRecord | None = None
    tasks: dict[str, TaskRecord] = {}

    @property
    def measures(self) -> Measures:
        """The measurements so far."""
        return Measures(perplexity=self.perplexity, tasks=self.tasks)

    def take(self, measures: Measures) -> None:
        """Replace the measurements by these."""
        self.perplexity = measures.perplexity
        self.tasks = measures.tasks


def pruned_by(report: RunReport) -> PrunedBy:
    """The part of a pruning report that a results file keeps."""
    return PrunedBy(
        of=report.source.model,
        recipe=report.recipe,
        sparsity_of_targets=report.targets.sparsity_of_targets,
        trained=report.trained,
    )


# sweep.jsonl: a line on what made a sweep, and one line for each finished point.


class SweepMadeBy(MadeBy, kw_only=True, omit_defaults=False):
    """Everything that the measurements of all points depend on.

    Attributes:
        shared: the options that the recipes of all points share, by name.
        activations: everything that the norms depend on; None if no point needs norms.
    """

    shared: dict[str, Any] = {}
    activations: dict[str, Any] | None = None


class SweptPoint(RunReport, kw_only=True):
    """The report of a finished point, which is measured."""

    point: PointRecord
    masks: str
    evaluation: EvaluationRecord

    @property
    def measures(self) -> Measures:
        """The measurements of the pruned model."""
        return self.evaluation.pruned or Measures()


class Sweep(FileRecord, kw_only=True):
    """A sweep: in its file, the first line, and a line for each of `points`.

    Attributes:
        command, source, suite, made_by: everything that it depends on.
        stages, dense: what its points share: times, and the measurements of the dense model.
        points: the finished ones.
    """

    KIND: ClassVar[str] = "sweep"
    VERSION: ClassVar[int] = 4

    command: str = ""
    source: ModelSource
    suite: str = "suite"
    made_by: SweepMadeBy
    stages: dict[str, StageRecord] = {}
    dense: Measures | None = None
    points: list[SweptPoint] = []


def read_sweep(path: Path) -> Sweep:
    """The sweep in a file. A damaged line, or one that a killed run has half written, is left out
    with a warning.

    Raises:
        UserError: the first line is damaged; or a line holds another kind of record or another
            version of it, or a field is missing or wrong.
        ReadError: there is no file, or the disk fails.
    """
    try:
        with reading(path):
            first, *lines = path.read_bytes().splitlines() or [b""]
        values = parse_own(first, **STRICT)
    except ReadError:
        raise
    except ValueError as error:
        raise UserError(
            f"{path}: its first line does not tell a sweep ({quotable(reason(error))}). Move it "
            "away, and run the sweep again."
        ) from error
    sweep = record_of(values, Sweep, f"{path}, line 1")
    points = {}
    for number, line in enumerate(lines, 2):
        try:
            values = parse_own(line, **STRICT)
        except ValueError as error:
            logger.warning(
                "warning: %s: line %d is damaged (%s). The same sweep measures its point again.",
                path,
                number,
                quotable(reason(error)),
            )
            continue
        point = record_of(values, SweptPoint, f"{path}, line {number}")
        points[point.point.name] = point
    sweep.points = list(points.values())
    return sweep
