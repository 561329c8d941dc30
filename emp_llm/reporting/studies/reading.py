"""Reads runs, sweeps, measures and results files as the points of a report."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, get_args

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, printable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.evaluation.results import model_of_results, models_of_report
from emp_llm.options.recipe import MatchBy
from emp_llm.pruning.counts import REPORT_LIMIT
from emp_llm.pruning.outcome import ALL_KEPT
from emp_llm.records.base import FileRecord, record_of, version_of
from emp_llm.records.measure import Measure
from emp_llm.records.results import Results, pruned_by
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.records.sweep import Sweep
from emp_llm.reporting.studies.measured_points import MeasuredPoint
from emp_llm.reporting.studies.point_parts import (
    facts_of,
    fits_of,
    matrices_of,
    method_of,
    origin_of,
    suite_result_of,
    whole_group_of,
)

_ACCEPTED = "the output of prune, sweep, measure or bench, or a results file of evaluate"


def read_points(paths: list[Path]) -> list[MeasuredPoint]:
    """Read all points of some files and folders, in the order given, each once.

    Args:
        paths: output folders of prune or sweep, their report files, outputs of measure, results files of evaluate.

    Raises:
        UserError: a path is none of these, or a value in it is impossible.
    """
    points: dict[str, MeasuredPoint] = {}
    for path in paths:
        for point in _read(Path(path)):
            points.setdefault(point.id, point)
    return _with_results(list(points.values()))


def _read(path: Path) -> Iterator[MeasuredPoint]:
    if path.is_dir():
        found = next((path / name for name in (SWEEP_NAME, REPORT_NAME) if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: it holds neither {SWEEP_NAME} nor {REPORT_NAME}; give {_ACCEPTED}.")
        path = found
    elif not path.is_file():
        raise UserError(f"{path}: no such file or folder; give {_ACCEPTED}.")
    values = read_json(path, limit=REPORT_LIMIT)
    kind, where = _kind_of(values, path), str(path)
    if kind is Sweep:
        yield from _sweep(record_of(values, Sweep, where), path.parent, where)
    elif kind is Measure:
        yield from _measures(record_of(values, Measure, where), path)
    elif kind is Results:
        yield _result(record_of(values, Results, where), path)
    else:
        report = record_of(values, RunReport, where)
        yield _run(report, path.parent if path.name == REPORT_NAME else path, where)


def _kind_of(values: dict[str, Any], path: Path) -> type[FileRecord]:
    """The kind of a record, from its format."""
    kind = next((kind for kind in (Sweep, Measure, Results, RunReport) if version_of(values, kind) is not None), None)
    if kind is None:
        raise UserError(f"{path}: this is not {_ACCEPTED}; give one of these.")
    return kind


def _run(report: RunReport, folder: Path, where: str, name: str | None = None, **more: Any) -> MeasuredPoint:
    models = models_of_report(report)
    dense = tuple(suite_result_of(model, where) for model in models if model.pruned is None)
    values: dict[str, Any] = {
        "id": str(folder.resolve()),
        "name": printable(name or folder.resolve().name),
        **origin_of(report.source),
        **method_of(report.recipe, report.calibration, where),
        "sparsity": report.targets.sparsity_of_targets,
        "sparsity_of_all": report.targets.sparsity_of_all_parameters,
        "matrices": matrices_of(report.matrices, where),
        "whole": whole_group_of(report.targets),
        "fits": fits_of(report, where),
        "structure": report.structure,
        "results": tuple(suite_result_of(model, where) for model in models if model.pruned is not None),
        "dense": dense,
        "signature": json.dumps(pruned_by(report).as_dict(), sort_keys=True),
        "masks": _masks_key(report.masks, folder),
        "matches": report.recipe.match or "",
        "facts": facts_of(report.source, report.recipe, report.calibration, report.targets),
    }
    return MeasuredPoint(**values | more)


def _masks_key(masks: str | None, folder: Path) -> str:
    """A key that is equal for equal masks only. The hash in a report leaves out the norms, so it is valid in its sweep only."""
    if masks is None or masks == ALL_KEPT:
        return masks or ""
    return f"{folder.resolve().parent} {masks}"


def _sweep(sweep: Sweep, folder: Path, where: str) -> Iterator[MeasuredPoint]:
    """The points of a sweep: each from its own report, its baselines from sweep.json."""
    base = folder.resolve() / "points"
    names = [entry.name for entry in sweep.points]
    for number, entry in enumerate(sweep.points):
        place = f"{where}: points[{number}]"
        if PurePath(entry.name).name != entry.name:
            raise UserError(f"{place}: name must be the name of a folder in points/, got {printable(entry.name, 40)!r}.")
        if entry.match is not None and entry.match not in get_args(MatchBy):
            raise UserError(f"{place}: match must be null or one of {', '.join(get_args(MatchBy))}.")
        if entry.baseline_of is not None and entry.baseline_of not in names:
            raise UserError(f"{place}: baseline_of must be null or the name of another point.")
        path = folder / "points" / entry.name / REPORT_NAME
        if not path.is_file():
            raise UserError(f"{path}: the report of this point of the sweep is missing; run the sweep's command again.")
        report = record_of(read_json(path, limit=REPORT_LIMIT), RunReport, str(path))
        of = None if entry.baseline_of is None else str(base / entry.baseline_of)
        yield _run(report, path.parent, str(path), entry.name, match=entry.match, baseline_of=of)


def _measures(measure: Measure, path: Path) -> Iterator[MeasuredPoint]:
    for number, entry in enumerate(measure.measures):
        where = f"{path}: measures[{number}]"
        recipe = measure.recipe.with_method(
            f"emp-{entry.criterion}", group="row", order=entry.order, score=entry.score, count_by=entry.count_by
        )
        values: dict[str, Any] = {
            "id": f"{path.resolve()}#{number}",
            "name": printable(f"{path.stem} {entry.criterion} {entry.order:g}"),
            **origin_of(measure.source),
            **method_of(recipe, measure.calibration, where),
            "pruned": False,
            "matrices": matrices_of(entry.matrices, where),
            "whole": whole_group_of(entry.targets),
            "facts": facts_of(measure.source, recipe, measure.calibration, entry.targets),
        }
        yield MeasuredPoint(**values)


def _result(results: Results, path: Path) -> MeasuredPoint:
    where = str(path)
    common: dict[str, Any] = {
        "id": str(path.resolve()),
        "name": printable(path.stem),
        "results": (suite_result_of(model_of_results(results), where),),
    }
    pruned = results.pruned
    if pruned is None:
        made = results.made_by.model
        source = ModelSource(model=results.model, revision=results.revision, identity=made.identity)
        return MeasuredPoint(**common, **origin_of(source), method=None)
    return MeasuredPoint(
        **common,
        **{"model": printable(pruned.of), "identity": pruned.of} | method_of(pruned.recipe, None, where),
        sparsity=pruned.sparsity_of_targets,
        signature=json.dumps(pruned.as_dict(), sort_keys=True),
        matches=pruned.recipe.match or "",
        facts={"model": printable(pruned.of)},
    )


def _with_results(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Join results files with the run of the same checkpoint, if that is given too: they add a suite to the run.

    Runs with equal signatures may differ in their calibration, which results do not record. Their point then stays alone.
    """
    runs: dict[str, list[int]] = {}
    for number, point in enumerate(points):
        if point.matrices and point.pruned:
            runs.setdefault(point.signature, []).append(number)
    joined: dict[int, MeasuredPoint] = dict(enumerate(points))
    for number, point in enumerate(points):
        alike = runs.get(point.signature, [])
        if point.matrices or point.method is None or len({points[other].matrices for other in alike}) != 1:
            continue
        run = alike[-1]
        known = {result.key for result in joined[run].results}
        added = tuple(result for result in point.results if result.key not in known)
        joined[run] = replace(joined[run], results=joined[run].results + added)
        del joined[number]
    return list(joined.values())
