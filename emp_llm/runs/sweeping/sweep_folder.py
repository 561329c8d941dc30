"""The folder of a sweep. It keeps the finished parts, so that the same sweep resumes and a larger sweep extends it.

DIR/sweep.json                      the definition of the sweep ("made_by"), and the measurements of all finished points
DIR/activations.safetensors         the norms of the calibration
DIR/dense.json                      the measurements of the dense model
DIR/points/NAME/emp_report.json     a finished point, with its checkpoint under --keep
DIR/.lock, .calibration, .checkpoint, points/.NAME.*    unfinished work
"""

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError, reason
from emp_llm.common.file_names import REPORT_NAME, SWEEP_NAME
from emp_llm.pruning.recipe import REPORT_LIMIT
from emp_llm.records.base import converted, read_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.run_report import PointRecord, RunReport
from emp_llm.records.sweep import Sweep, SweepMadeBy, SweptPoint
from emp_llm.runs.sweeping.sweep_points import SweepPoint
from emp_llm.storage.atomic import write_json
from emp_llm.storage.disk_errors import explain_disk_error
from emp_llm.storage.json_files import INDEX_LIMIT, read_json
from emp_llm.storage.output.lock import FileLock
from emp_llm.storage.output.signature import describe_difference

# In the order of their deletion.
_OWN = ("points", "activations.safetensors", "dense.json", ".calibration", ".checkpoint", SWEEP_NAME)


class SweepFolder:
    """`with SweepFolder(...) as folder: folder.begin(...); ...; folder.finish(point, report)`.

    Args:
        path: the folder; created if missing.
        source: the dense checkpoint; never touched.
        points: of this run, in order.
        overwrite: discard a different sweep.

    Attributes:
        activations, dense: files in the folder; points: parent of the points' folders; calibration, scratch: folders for
            unfinished work.
        record: the content of sweep.json.

    Raises:
        UserError: the path exists and is not the folder of a sweep, or it contains the source or lies in it.
    """

    def __init__(self, path: Path, source: Checkpoint, points: list[SweepPoint], overwrite: bool = False) -> None:
        self.path = Path(path)
        self.points = self.path / "points"
        self.activations, self.dense = self.path / "activations.safetensors", self.path / "dense.json"
        self.calibration, self.scratch = self.path / ".calibration", self.path / ".checkpoint"
        self.record = Sweep()
        self._given = path
        self._planned = points
        self._overwrite = overwrite
        self._file = self.path / SWEEP_NAME
        self._lock = FileLock(self.path / ".lock", f"--output {path}")
        real, origin = self.path.resolve(), source.folder.resolve()
        if real == origin or real in origin.parents or origin in real.parents:
            raise UserError(f"--output {path}: it is the input folder, lies inside it or contains it; name another folder.")
        if os.path.lexists(self.path) and not self._ours():
            raise UserError(f"--output {path}: it exists and is not the folder of a sweep; name another folder.")

    def __enter__(self) -> "SweepFolder":
        try:
            self.points.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise UserError(f"--output {self._given}: cannot be written there ({reason(error)}).") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lock.release()
        explanation = explain_disk_error(error, self._given, [self.points])
        if explanation is not None:
            raise explanation from error

    def begin(self, made_by: SweepMadeBy, about: Sweep) -> None:
        """Resume the sweep in the folder, or begin one.

        Args:
            made_by: everything that the measurements depend on. Its `activations` are None if no point needs norms; then it
                matches any activations in the folder.
            about: the record to begin with: command, source, suite.

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
        if difference is not None and not self._overwrite:
            raise UserError(
                f"--output {self._given}: it holds a sweep with {difference}. Name another folder, or add --overwrite to "
                "discard it."
            )
        if difference is not None:
            self._clear()
            held, kept = None, None
        shutil.rmtree(self.scratch, ignore_errors=True)  # left by an interrupted run
        made_by.activations = made_by.activations or kept
        self.record = about
        self.record.made_by = made_by
        if held is not None:
            self.record.stages, self.record.dense, self.record.points = held.stages, held.dense, held.points
        self.save()

    def collected_norms(self) -> Activations | None:
        """The norms of the sweep's calibration; None if it is not finished."""
        return Activations.load(self.activations) if self.activations.is_file() else None

    def report(self, point: SweepPoint) -> RunReport | None:
        """The report of a finished point; None if it is not finished."""
        path = self.points / point.name / REPORT_NAME
        if not path.is_file():
            return None
        report = read_record(path, RunReport, REPORT_LIMIT)
        return report if report.point == point.record() and report.evaluation is not None else None

    def measured_so_far(self, point: SweepPoint, masks: str) -> Measures:
        """The measurements of an interrupted run for a point with these masks."""
        path = self._partial(point)
        before = read_json(path) if path.is_file() else {}
        return converted(before["measures"], Measures, str(path)) if before.get("masks") == masks else Measures()

    def note_measures(self, point: SweepPoint, masks: str, measures: Measures) -> None:
        """Note the measurements of an unfinished point."""
        write_json(self._partial(point), {"masks": masks, "measures": measures.as_dict()})

    def finish(self, point: SweepPoint, report: RunReport) -> None:
        """Note the measurements of a finished point in sweep.json."""
        assert report.evaluation is not None
        entry = SweptPoint(
            **{name: getattr(report.point, name) for name in PointRecord.__struct_fields__},
            sparsity_of_targets=report.targets.sparsity_of_targets,
            sparsity_of_all_parameters=report.targets.sparsity_of_all_parameters or 0.0,
            evaluation=report.evaluation.pruned or Measures(),
            masks=report.masks or "",
        )
        known = {other.name: other for other in self.record.points} | {point.name: entry}
        order = dict.fromkeys([planned.name for planned in self._planned if planned.name in known])
        self.record.dense = report.evaluation.dense
        self.record.points = [known[name] for name in order | dict.fromkeys(known)]
        self.save()
        self._partial(point).unlink(missing_ok=True)

    def save(self) -> None:
        """Write sweep.json atomically."""
        self.record.save(self._file)

    def _partial(self, point: SweepPoint) -> Path:
        """The file with the measurements of an unfinished point."""
        return self.points / f".{point.name}.measures.json"

    def _ours(self) -> bool:
        """Whether the path is the folder of a sweep that has at least begun, or empty."""
        if not self.path.is_dir():
            return False
        if self._file.is_file():
            return True
        names = {entry.name for entry in self.path.iterdir()}
        return names <= {"points", ".lock", ".sweep.json.partial"} and not (self.points.is_dir() and any(self.points.iterdir()))

    def _clear(self) -> None:
        for name in _OWN:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.points.mkdir()
