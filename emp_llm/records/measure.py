"""The output of `measure`: effective numbers and masses of a model's matrices, by criterion and
order.
"""

from typing import ClassVar, Literal

import msgspec

from emp_llm.common.tables import percent_cell, table
from emp_llm.options.recipe import Recipe
from emp_llm.records.base import FileRecord, Part, RecordedRecipe
from emp_llm.records.run_report import (
    LossPoint,
    MatrixRecord,
    SizesRecord,
    TargetsRecord,
)
from emp_llm.records.source import CalibrationRecord, ModelSource


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
