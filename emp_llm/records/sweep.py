"""sweep.json: the definition of a sweep, and the measurements of its finished points."""

from typing import Any, ClassVar

import msgspec

from emp_llm.records.base import FileRecord
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import MadeBy
from emp_llm.records.run_report import PointRecord, Share
from emp_llm.records.source import ModelSource, StageRecord


class SweepMadeBy(MadeBy, kw_only=True, omit_defaults=False):
    """Everything that the measurements of all points depend on.

    Attributes:
        shared: the options that the recipes of all points share, by name.
        activations: everything that the norms depend on; None if no point needs norms.
    """

    shared: dict[str, Any] = {}
    activations: dict[str, Any] | None = None


class SweptPoint(PointRecord, kw_only=True, omit_defaults=False):
    """A finished point: its sparsity, its measurements, and a hash of its masks."""

    sparsity_of_targets: Share = 0.0
    sparsity_of_all_parameters: Share = 0.0
    evaluation: Measures = msgspec.field(default_factory=Measures)
    masks: str = ""


class Sweep(FileRecord, kw_only=True, omit_defaults=False):
    """The state of a sweep."""

    KIND: ClassVar[str] = "sweep"
    VERSION: ClassVar[int] = 3

    command: str = ""
    source: ModelSource | None = None
    suite: str = "suite"
    made_by: SweepMadeBy | None = None
    stages: dict[str, StageRecord] = {}
    dense: Measures | None = None
    points: list[SweptPoint] = []
