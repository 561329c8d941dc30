"""The folder of a sweep.

DIR/sweep.json                      the definition of the sweep ("made_by"), and the measurements of
                                    all finished points
DIR/activations.safetensors         the norms of the calibration
DIR/self.jsonl                      the calibration text, if the model itself wrote it
DIR/dense.json                      the measurements of the dense model
DIR/points/NAME/emp_report.json     a finished point, with its checkpoint under --keep
DIR/.sweep.json.lock, .calibration, .checkpoint, .moved, points/.NAME.*    unfinished work
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    explain_disk_error,
    read_own,
    remove,
    unfinished,
    write_own,
)
from emp_llm.checkpoint.locks import locked
from emp_llm.checkpoint.output import CALIBRATION_FILES, check_own, describe_difference
from emp_llm.common.errors import UserError
from emp_llm.common.paths import REPORT_NAME, SELF_NAME, SWEEP_NAME
from emp_llm.options.sweep import SweepPoint
from emp_llm.pruning.scores import recorded
from emp_llm.records.base import read_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.run_report import PointRecord, RunReport, read_report
from emp_llm.records.source import StageRecord
from emp_llm.records.sweep import Sweep, SweepMadeBy, SweptPoint

# In the order of their deletion.
_OWN = (
    "points",
    "activations.safetensors",
    SELF_NAME.name,
    "dense.json",
    ".calibration",
    ".checkpoint",
    ".moved",
    SWEEP_NAME,
)


class _Measured(msgspec.Struct):
    """What an interrupted run measured of the model with these masks."""

    masks: str
    measures: Measures


def point_record(point: SweepPoint) -> PointRecord:
    """A point as a report records it."""
    recipe = recorded(point.recipe)
    return PointRecord(name=point.name, recipe=recipe, baseline_of=point.baseline_of)


def measures_of(report: RunReport) -> Measures:
    """The measurements of the point that a report is of."""
    pruned = None if report.evaluation is None else report.evaluation.pruned
    return pruned or Measures()


class SweepFolder:
    """The folder of a sweep. It keeps the finished parts, so that the same sweep resumes and a
    larger sweep extends it.

    Args:
        path: the folder; created if missing.
        source: the folder of the dense model; never touched.
        planned: the points of this run, in order.

    Attributes:
        activations, dense: files in the folder; points: parent of the points' folders; calibration,
            scratch, moved: folders for unfinished work.
        record: the content of sweep.json.

    Raises:
        UserError: the path exists and is not the folder of a sweep, or it contains the source or
            lies in it.
    """

    record: Sweep

    def __init__(self, path: Path, source: Path, planned: list[SweepPoint]) -> None:
        self.path = Path(path)
        self.points = self.path / "points"
        self.activations = self.path / "activations.safetensors"
        self.dense = self.path / "dense.json"
        self.calibration = self.path / ".calibration"
        self.scratch = self.path / ".checkpoint"
        self.moved = self.path / ".moved"
        self._planned = planned
        self._file = self.path / SWEEP_NAME
        real = self.path.resolve()
        origin = source.resolve()
        if real == origin or real in origin.parents or origin in real.parents:
            raise UserError(
                f"--output {path}: it is the input folder, lies inside it or contains "
                "it; name another folder."
            )
        if os.path.lexists(self.path) and not self._ours():
            raise UserError(
                f"--output {path}: it exists and is not the folder of a sweep; name another folder."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run."""
        with locked(self._file, f"--output {self.path}"):
            check_own(self.points, ("*",))
            check_own(self.calibration, CALIBRATION_FILES)
            check_own(self.scratch, ("*",))
            check_own(self.moved, ("*",))
            try:
                self.points.mkdir(exist_ok=True)
                yield
            except Exception as error:
                explained = explain_disk_error(error, self.path, [self.points])
                if explained is None:
                    raise
                raise explained from error

    def begin(self, made_by: SweepMadeBy, about: Sweep, overwrite: bool) -> None:
        """Resume the sweep in the folder, or begin one.

        Args:
            made_by: everything that the measurements depend on. Its `activations` are None if no
                point needs norms; then it matches any activations in the folder.
            about: the record to begin with: command, source, suite.
            overwrite: discard a different sweep.

        Raises:
            UserError: the folder holds a different sweep, and `overwrite` is false.
        """
        held = read_record(self._file, Sweep, INDEX_LIMIT) if self._file.is_file() else None
        before = held.made_by.as_dict() if held is not None and held.made_by is not None else {}
        asked = made_by.as_dict()
        kept = before.get("activations")
        if kept is None or made_by.activations is None:
            before["activations"] = asked.get("activations")
        difference = describe_difference(before, asked) if held is not None else None
        if difference is not None and not overwrite:
            raise UserError(
                f"--output {self.path}: it holds a sweep with {difference}. Name another folder, "
                "or add --overwrite to discard it."
            )
        if difference is not None:
            for name in _OWN:
                remove(self.path / name)
            self.points.mkdir()
            held = None
            kept = None
        shutil.rmtree(self.scratch, ignore_errors=True)  # left by an interrupted run
        made_by.activations = made_by.activations or kept
        self.record = about
        self.record.made_by = made_by
        if held is not None:
            self.record.stages = held.stages
            self.record.dense = held.dense
            self.record.points = held.points
        self.record.save(self._file)

    def note(self, stages: dict[str, StageRecord], dense: Measures) -> None:
        """Note times of stages, and the measurements of the dense model, in sweep.json."""
        self.record.stages |= stages
        self.record.dense = dense
        self.record.save(self._file)

    def report(self, point: SweepPoint) -> RunReport | None:
        """The report of a finished point; None if it is not finished."""
        path = self.points / point.name
        report = unfinished(path / REPORT_NAME, lambda _: read_report(path))
        if report is None or report.point != point_record(point):
            return None
        return report if report.evaluation is not None else None

    def measured_so_far(self, point: SweepPoint, masks: str) -> Measures:
        """The measurements of an interrupted run for a point with these masks."""
        held = read_own(self._partial(point), _Measured)
        return held.measures if held is not None and held.masks == masks else Measures()

    def note_measures(self, point: SweepPoint, masks: str, measures: Measures) -> None:
        """Note the measurements of an unfinished point."""
        write_own(self._partial(point), {"masks": masks, "measures": measures.as_dict()})

    def finish(self, point: SweepPoint, report: RunReport) -> Measures:
        """Note the measurements of a finished point in sweep.json; returns them."""
        measures = measures_of(report)
        entry = SweptPoint(
            **msgspec.structs.asdict(report.point or point_record(point)),
            sparsity_of_targets=report.targets.sparsity_of_targets,
            sparsity_of_all_parameters=report.targets.sparsity_of_all_parameters or 0.0,
            evaluation=measures,
            masks=report.masks or "",
        )
        known = {other.name: other for other in self.record.points} | {point.name: entry}
        order = dict.fromkeys([planned.name for planned in self._planned if planned.name in known])
        self.record.points = [known[name] for name in order | dict.fromkeys(known)]
        self.record.save(self._file)
        self._partial(point).unlink(missing_ok=True)
        return measures

    def _partial(self, point: SweepPoint) -> Path:
        """The file with the measurements of an unfinished point."""
        return self.points / f".{point.name}.measures.json"

    def _ours(self) -> bool:
        """Whether the path is the folder of a sweep that has at least begun, or empty."""
        if not self.path.is_dir():
            return False
        if self._file.is_file():
            return True
        # By a run that was killed at its first file.
        begun = {"points", f".{SWEEP_NAME}.lock", f".{SWEEP_NAME}.partial"}
        names = {entry.name for entry in self.path.iterdir()}
        return names <= begun and not (self.points.is_dir() and any(self.points.iterdir()))
