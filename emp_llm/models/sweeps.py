"""The folder of a sweep: what is finished of it, for the same sweep to go on with, or a larger one of the same kind.

DIR/sweep.json                      what defines the sweep ("made_by"), and the figures of all finished points
DIR/activations.safetensors         the one calibration
DIR/dense.json                      what the dense model measures
DIR/points/NAME/emp_report.json     a finished point; with its checkpoint, if that is kept
DIR/.lock, .calibration, .checkpoint, points/.NAME.*    of the run at work
"""

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.errors import UserError, reason
from emp_llm.models.faults import explained
from emp_llm.models.files import replace_json
from emp_llm.models.headers import read_json
from emp_llm.models.locks import Lock
from emp_llm.models.points import Point
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.models.work import difference

SWEEP_NAME = "sweep.json"
FORMAT = "emp-llm sweep 1"
_OWN = ("points", "activations.safetensors", "dense.json", ".calibration", ".checkpoint", SWEEP_NAME)  # in this order they go


class SweepFolder:
    """`with SweepFolder(...) as folder: folder.begin(...); ...; folder.finish(point, report)`.

    Args:
        path: the folder; made where it is not there.
        source: the model; never touched.
        points: of this run, in order.
        overwrite: throw away what a sweep of another kind left there.

    Attributes:
        activations, dense: files of the folder; `points`: holds the folders of points; `calibration`, `scratch`: folders for
            the run at work.

    Raises:
        UserError: the path is something else than a sweep's folder, or the source is in it or holds it.
    """

    def __init__(self, path: Path, source: Checkpoint, points: list[Point], overwrite: bool = False) -> None:
        self.path = Path(path)
        self.points = self.path / "points"
        self.activations, self.dense = self.path / "activations.safetensors", self.path / "dense.json"
        self.calibration, self.scratch = self.path / ".calibration", self.path / ".checkpoint"
        self.record: dict[str, Any] = {}
        self._given = path
        self._planned = points
        self._overwrite = overwrite
        self._file = self.path / SWEEP_NAME
        self._lock = Lock(self.path / ".lock", f"--output {path}")
        real, origin = self.path.resolve(), source.folder.resolve()
        if real == origin or real in origin.parents or origin in real.parents:
            raise UserError(f"--output {path}: it is the input, lies in it or holds it; name another folder.")
        if os.path.lexists(self.path) and not self._ours():
            raise UserError(f"--output {path}: it exists and holds no sweep; name another folder.")

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
        explanation = explained(error, self._given, [self.points])
        if explanation is not None:
            raise explanation from error

    def begin(self, made_by: dict[str, Any], about: dict[str, Any]) -> None:
        """Take up what is finished, or begin.

        Args:
            made_by: what all figures depend on, as JSON. Its entry "activations" is None where no point needs any, and goes
                with any that are there.
            about: more for the record: command, source, suite.

        Raises:
            UserError: the folder holds a sweep of another kind, and there is no `overwrite`.
        """
        held = read_json(self._file) if self._file.is_file() else {}
        if held and held.get("format") != FORMAT:
            raise UserError(f"{self._file}: not a sweep that this version of emp-llm can read.")
        before = dict(held.get("made_by", {}))
        kept = before.get("activations")
        if kept is None or made_by["activations"] is None:
            before["activations"] = made_by["activations"]
        found = difference(before, made_by) if held else None
        if found is not None and not self._overwrite:
            raise UserError(
                f"--output {self._given}: it holds a sweep with {found}. Name another folder, or add --overwrite to begin anew."
            )
        if found is not None:
            self._clear()
            held, kept = {}, None
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
        made_by = made_by | {"activations": made_by["activations"] or kept}
        self.record = {"format": FORMAT, **about, "made_by": made_by, "stages": {}, "dense": None, "points": []} | {
            key: held[key] for key in ("stages", "dense", "points") if key in held
        }
        self.save()

    def report(self, point: Point) -> dict[str, Any] | None:
        """The report of a finished point; None where it is not finished."""
        path = self.points / point.name / REPORT_NAME
        if not path.is_file():
            return None
        report = read_json(path)
        return report if report.get("point") == point.record() and "evaluation" in report else None

    def partial(self, point: Point) -> Path:
        """Where what is measured so far of a point is noted."""
        return self.points / f".{point.name}.measures.json"

    def finish(self, point: Point, report: dict[str, Any]) -> None:
        """Note the figures of a finished point."""
        targets = report["targets"]
        entry = point.record() | {
            "sparsity_of_targets": targets["sparsity_of_targets"],
            "sparsity_of_all_parameters": targets["sparsity_of_all_parameters"],
            "evaluation": report["evaluation"]["pruned"],
            "masks": report["masks"],
        }
        known = {other["name"]: other for other in self.record["points"]} | {point.name: entry}
        order = dict.fromkeys([planned.name for planned in self._planned if planned.name in known])
        self.record["points"] = [known[name] for name in order | dict.fromkeys(known)]
        self.save()
        self.partial(point).unlink(missing_ok=True)

    def save(self) -> None:
        """Write sweep.json, whole or not at all."""
        replace_json(self._file, self.record)

    def _ours(self) -> bool:
        """Whether the path is a folder that a sweep began, or an empty one."""
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
