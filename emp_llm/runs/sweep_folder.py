"""The folder of a sweep.

DIR/sweep.jsonl               a line on what makes the sweep, and one for each finished point
DIR/activations.safetensors   the norms of its calibration
DIR/self.jsonl                the calibration text, if the model itself wrote it
DIR/points/NAME/              the checkpoint of a point, under --keep
DIR/.sweep.jsonl.lock, .calibration, .unfinished, points/.NAME.partial    unfinished work
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from emp_llm.checkpoint.files import explain_disk_error, own_line, remove, sync_path, write_bytes
from emp_llm.checkpoint.locks import lock
from emp_llm.checkpoint.output import CALIBRATION_FILES, check_apart, check_own, describe_difference
from emp_llm.common.errors import UserError
from emp_llm.common.paths import SELF_NAME, SWEEP_NAME
from emp_llm.options.sweep import SweepPoint
from emp_llm.pruning.scores import as_recorded
from emp_llm.records.run_report import PointRecord
from emp_llm.records.sweep import Sweep, SweptPoint, read_sweep

# In the order of their deletion.
_OWN = (
    "points",
    "activations.safetensors",
    SELF_NAME.name,
    ".calibration",
    ".unfinished",
    SWEEP_NAME,
)


def point_record(point: SweepPoint) -> PointRecord:
    """A point as a report records it."""
    recipe = as_recorded(point.recipe)
    return PointRecord(name=point.name, recipe=recipe, baseline_of=point.baseline_of)


def finished(sweep: Sweep | None, point: SweepPoint) -> SweptPoint | None:
    """The report of a point; None if it is not finished."""
    asked = point_record(point)
    return next((each for each in sweep.points if each.point == asked), None) if sweep else None


class SweepFolder:
    """The folder of a sweep. It keeps the finished points, so that the same sweep resumes and a
    larger sweep extends it.

    Args:
        path: the folder; created by `lock` if missing.
        source: the folder of the dense model; never touched.

    Attributes:
        activations: file in the folder; points: parent of the checkpoints; calibration, scratch:
            folders for unfinished work.
        record: what its file says; known from `begin` on.

    Raises:
        UserError: the path exists and is not the folder of a sweep, or it contains the source or
            lies in it.
    """

    record: Sweep

    def __init__(self, path: Path, source: Path) -> None:
        self.path = Path(path)
        self.points = self.path / "points"
        self.activations = self.path / "activations.safetensors"
        self.calibration = self.path / ".calibration"
        self.scratch = self.path / ".unfinished"
        self._file = self.path / SWEEP_NAME
        check_apart(path, [source])
        if os.path.lexists(self.path) and not self._ours():
            raise UserError(
                f"--output {path}: it exists and is not the folder of a sweep; name another folder."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run."""
        with lock(self._file, f"--output {self.path}"):
            check_own(self.points, ("*",))
            check_own(self.calibration, CALIBRATION_FILES)
            check_own(self.scratch, ("*",))
            try:
                yield
            except Exception as error:
                explained = explain_disk_error(error, self.path, [self.path])
                if explained is None:
                    raise
                raise explained from error

    def held(self) -> Sweep | None:
        """The sweep in the folder; None if it has not begun. UserError if it cannot be read."""
        return read_sweep(self._file) if self._file.is_file() else None

    def begin(self, record: Sweep, overwrite: bool) -> None:
        """Resume the sweep in the folder, or begin one.

        Args:
            record: the sweep without points. The `activations` that it is made by are None if no
                point needs norms; then it matches any activations in the folder.
            overwrite: discard a different sweep.

        Raises:
            UserError: the folder holds a different sweep, and `overwrite` is false.
        """
        held = self.held()
        if held is not None:
            before = held.made_by.as_dict()
            asked = record.made_by.as_dict()
            kept = held.made_by.activations
            if kept is None or record.made_by.activations is None:
                before["activations"] = asked["activations"]
            difference = describe_difference(before, asked)
            if difference is None:
                record.made_by.activations = record.made_by.activations or kept
                record.stages = held.stages
                record.dense = held.dense
                record.points = held.points
            elif not overwrite:
                raise UserError(
                    f"--output {self.path}: it holds a sweep with {difference}. Name another "
                    "folder, or add --overwrite to discard it."
                )
            else:
                for name in _OWN:
                    remove(self.path / name)
        remove(self.scratch)  # left by an interrupted run
        self.record = record
        self.save()

    def save(self) -> None:
        """Write the file of the sweep anew."""
        first = _line(msgspec.structs.replace(self.record, points=[]))
        write_bytes(self._file, first + b"".join(map(_line, self.record.points)))

    def add(self, report: SweptPoint) -> None:
        """Add a finished point; another one of its name goes."""
        others = [each for each in self.record.points if each.point.name != report.point.name]
        self.record.points = [*others, report]
        with self._file.open("ab") as file:
            file.write(_line(report))
        sync_path(self._file)
        remove(self.scratch)

    def _ours(self) -> bool:
        """Whether the path is the folder of a sweep that has at least begun, or empty."""
        if not self.path.is_dir():
            return False
        first = f".{SWEEP_NAME}."  # of a run that was killed at its first file
        return self._file.is_file() or all(
            entry.name.startswith(first) for entry in self.path.iterdir()
        )


def _line(record: Sweep | SweptPoint) -> bytes:
    return own_line(json.loads(record.as_json()))
