"""sweep.jsonl: a line on what made a sweep, and one line for each finished point."""

import logging
from pathlib import Path
from typing import Any, ClassVar

from emp_llm.checkpoint.files import STRICT, parse_own, reading
from emp_llm.common.errors import ReadError, UserError, quotable, reason
from emp_llm.records.base import FileRecord, record_of
from emp_llm.records.evaluation import EvaluationRecord, Measures
from emp_llm.records.results import MadeBy
from emp_llm.records.run_report import PointRecord, RunReport
from emp_llm.records.source import ModelSource, StageRecord

logger = logging.getLogger(__name__)


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
