"""The record of a rotation, which lies in the rotated folder."""

from typing import ClassVar

import msgspec

from emp_llm.records.base import FileRecord
from emp_llm.records.source import CalibrationRecord


class RotationRecord(FileRecord, kw_only=True):
    """A model whose basis was turned.

    Attributes:
        source: the model as it was, the text and the versions; command: of a run of `rotate`.
        steps, pattern: of the search, and for which the columns are ordered.
        n_eff_before, n_eff_after: the mean of N_eff/N over the rows of all linear layers in blocks,
            by EMP-Wanda's scores.
        difference: of the logits in float32, as a share of their norm.
        parameters_before, parameters_after: more if the head was tied to the embeddings.
        seconds: time taken.
        files: that the run wrote, for --overwrite.
    """

    KIND: ClassVar[str] = "rotation"

    source: CalibrationRecord = msgspec.field(default_factory=CalibrationRecord)
    command: str | None = None
    steps: int
    pattern: str | None = None
    n_eff_before: float
    n_eff_after: float
    difference: float
    parameters_before: int
    parameters_after: int
    seconds: float
    files: list[str] = []
