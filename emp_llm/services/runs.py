"""Runs, sweeps, measures and results files, read back as points; whoever wrote them, what does not fit is a sentence."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, get_args

from emp_llm.models.errors import UserError
from emp_llm.models.headers import INDEX_LIMIT, read_json
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.models.sweeps import FORMAT as SWEEP_FORMAT
from emp_llm.models.sweeps import SWEEP_NAME
from emp_llm.services.comparison import Value, values_of
from emp_llm.services.records import Judgement, Match, MatrixStats, Point, Spread, printable
from emp_llm.services.results import pruned_record

MEASURE_FORMAT = "emp-llm measure 1"
_WHAT = "the output of prune, sweep or measure, or a results file of evaluate"
_LIMIT = 4 * INDEX_LIMIT  # a report of a mixture with ten thousands of experts' matrices is that long


def read_points(paths: list[Path]) -> list[Point]:
    """All points of what the user named, in that order, each once.

    Args:
        paths: output folders of prune or sweep, their report files, files of measure, results files of evaluate.

    Raises:
        UserError: one is nothing of that kind, or holds what cannot be.
    """
    points: dict[str, Point] = {}
    for path in paths:
        for point in _read(Path(path)):
            points.setdefault(point.id, point)
    return _with_results(list(points.values()))


def _read(path: Path) -> Iterator[Point]:
    if path.is_dir():
        found = next((path / name for name in (SWEEP_NAME, REPORT_NAME) if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: neither {SWEEP_NAME} nor {REPORT_NAME} is in it; give {_WHAT}.")
        path = found
    elif not path.is_file():
        raise UserError(f"{path}: there is no such file or folder; give {_WHAT}.")
    value = _Fields(read_json(path, limit=_LIMIT), str(path))
    if value.raw.get("format") == SWEEP_FORMAT:
        yield from _sweep(value, path.parent)
    elif value.raw.get("format") == MEASURE_FORMAT:
        yield from _measures(value, path)
    elif "made_by" in value.raw and "model" in value.raw:
        yield _result(value, path)
    elif "recipe" in value.raw and "matrices" in value.raw:
        yield _run(value, path.parent if path.name == REPORT_NAME else path)
    else:
        raise UserError(f"{path}: it is not {_WHAT}.")


class _Fields:
    """A JSON object whose values are asked for by key and kind; errors name the file and the place in it."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise UserError(f"{where}: it must be a JSON object; make the file anew.")
        self.raw: dict[str, Any] = raw
        self.where = where

    def object(self, key: str) -> "_Fields":
        return _Fields(self.raw.get(key), f"{self.where}: {key}")

    def objects(self, key: str) -> list["_Fields"]:
        entries = self.raw.get(key)
        if not isinstance(entries, list):
            raise self.wrong(key, "a list")
        return [_Fields(entry, f"{self.where}: {key}[{number}]") for number, entry in enumerate(entries)]

    def text(self, key: str) -> str:
        value = self.raw.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return printable(value)

    def number(self, key: str) -> float:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def maybe(self, key: str) -> float | None:
        """A number that may be missing or null."""
        return None if self.raw.get(key) is None else self.number(key)

    def share(self, key: str) -> float:
        """A number between 0 and 1, rounding errors apart."""
        value = self.number(key)
        if not -1e-9 <= value <= 1 + 1e-9:
            raise self.wrong(key, "between 0 and 1")
        return value

    def count(self, key: str) -> int:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, "a whole number")
        return value

    def spread(self, key: str) -> Spread | None:
        if self.raw.get(key) is None:
            return None
        entry = self.object(key)
        spread = Spread(*(entry.share(name) for name in ("min", "q1", "median", "q3", "max")))
        if list(spread.values) != sorted(spread.values):
            raise self.wrong(key, "quartiles in ascending order")
        return spread

    def wrong(self, key: str, rule: str) -> UserError:
        value = json.dumps(self.raw.get(key), default=str)
        return UserError(f"{self.where}: {key} must be {rule}, got {value[:40]}; make the file anew.")


def _run(report: _Fields, folder: Path, name: str | None = None, **more: Any) -> Point:
    recipe, targets = report.object("recipe"), report.object("targets")
    dense: tuple[Judgement, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    if report.raw.get("evaluation") is not None:
        evaluation = report.object("evaluation")
        about = evaluation.raw | {"dtype": recipe.raw.get("dtype")}
        dense, judgements = (
            (_judgement(about, evaluation.object(which)),) if which in evaluation.raw else () for which in ("dense", "pruned")
        )
    source = report.object("source")
    facts = _facts(source, recipe, report.raw.get("calibration"), targets)
    try:
        signature = json.dumps(pruned_record(report.raw), sort_keys=True)
    except (KeyError, TypeError) as error:
        raise UserError(f"{report.where}: {error} is missing in its recipe or targets; make the file anew.") from error
    values: dict[str, Any] = {
        "id": str(folder.resolve()),
        "name": printable(name or folder.resolve().name),
        **_origin(source),
        **_method(recipe, report.raw.get("calibration")),
        "sparsity": targets.share("sparsity_of_targets"),
        "sparsity_of_all": targets.maybe("sparsity_of_all_parameters"),
        "matrices": _matrices(report.object("matrices")),
        "judgements": judgements,
        "dense": dense,
        "signature": signature,
        "matches": str(recipe.raw.get("match") or ""),
        "facts": facts,
    }
    return Point(**values | more)


def _sweep(sweep: _Fields, folder: Path) -> Iterator[Point]:
    """Points by what their own reports tell; what is a baseline of what, by the sweep's."""
    base = folder.resolve() / "points"
    entries = sweep.objects("points")
    names = [entry.text("name") for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if PurePath(name).name != name:
            raise entry.wrong("name", "the name of a folder in points/")
        match, of = entry.raw.get("match"), entry.raw.get("baseline_of")
        if match is not None and match not in get_args(Match):
            raise entry.wrong("match", f"null or one of {', '.join(get_args(Match))}")
        if of is not None and of not in names:
            raise entry.wrong("baseline_of", "null or the name of another point")
        path = folder / "points" / name / REPORT_NAME
        if not path.is_file():
            raise UserError(f"{path}: the sweep names this point and its report is missing; run the sweep's command again.")
        report = _Fields(read_json(path, limit=_LIMIT), str(path))
        yield _run(report, path.parent, name, match=match, baseline_of=None if of is None else str(base / of))


def _measures(file: _Fields, path: Path) -> Iterator[Point]:
    source, calibration = file.object("source"), file.raw.get("calibration")
    told = file.raw.get("recipe")
    for number, entry in enumerate(file.objects("measures")):
        criterion, order = entry.text("criterion"), entry.number("order")
        made = {"targets": "mlp", "beta": 1.0} | (told if isinstance(told, dict) else {})
        recipe = _Fields(made | {"method": f"emp-{criterion}", "order": order}, entry.where)
        values: dict[str, Any] = {
            "id": f"{path.resolve()}#{number}",
            "name": printable(f"{path.stem} {criterion} {order:g}"),
            **_origin(source),
            **_method(recipe, calibration),
            "pruned": False,
            "matrices": _matrices(entry.object("matrices")),
            "facts": _facts(source, recipe, calibration, entry.object("targets")),
        }
        yield Point(**values)


def _result(record: _Fields, path: Path) -> Point:
    made_by = record.object("made_by")
    pruned = record.object("pruned") if record.raw.get("pruned") is not None else None
    about = made_by.raw | {"suite": record.raw.get("suite")}
    common: dict[str, Any] = {
        "id": str(path.resolve()),
        "name": printable(path.stem),
        "judgements": (_judgement(about, record),),
    }
    if pruned is None:
        model = made_by.raw.get("model")
        source = (model if isinstance(model, dict) else {}) | {"model": record.text("model")}
        return Point(**common, **_origin(_Fields(source, record.where)), method=None)
    of = pruned.text("of")
    return Point(
        **common,
        **{"model": of, "identity": of} | _method(pruned, None),
        sparsity=pruned.share("sparsity_of_targets"),
        signature=json.dumps(pruned.raw, sort_keys=True),
        matches=str(pruned.raw.get("match") or ""),
        facts={"model": of},
    )


def _judgement(about: dict[str, Any], measured: _Fields) -> Judgement:
    """What was measured, and all that makes it comparable with another."""
    quantization = about.get("quantization")
    key = {name: about.get(name) for name in ("text", "tasks", "limit")} | {"dtype": about.get("dtype") or "auto"}
    bits = quantization.get("bits", "quantised") if isinstance(quantization, dict) else None
    try:
        values = values_of(measured.raw)
        blocks = _block_losses(measured.raw.get("perplexity", {}))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{measured.where}: not what a suite measures ({type(error).__name__}: {error}).") from error
    for name, value in values.items():
        if not isinstance(value.value, int | float) or math.isnan(value.value):
            raise UserError(f"{measured.where}: {name} must be a number.")
    base, *changes = str(about.get("suite") or "suite").split(",")
    name = printable(", ".join([PurePath(base).stem or base, *changes, *([bits] if bits else [])]))
    values = {printable(measure): value for measure, value in _with_error_of_mean(values).items()}
    return Judgement(name, json.dumps(key | {"quantization": quantization}, sort_keys=True), values, blocks)


def _with_error_of_mean(values: dict[str, Value]) -> dict[str, Value]:
    """The mean of the accuracies with its standard error: of the means of tasks whose examples have nothing in common."""
    errors = [value.stderr for name, value in values.items() if name.endswith(" acc")]
    known = [error for error in errors if error is not None]
    mean = next((name for name in values if name.startswith("mean acc of ")), None)
    if mean is None or len(known) < len(errors):
        return values
    return values | {mean: replace(values[mean], stderr=math.hypot(*known) / len(known))}


def _block_losses(perplexity: dict[str, Any]) -> tuple[tuple[float, int], ...]:
    """Loss and tokens of every block; only the last may be shorter."""
    losses = [float(loss) for loss in perplexity.get("block_losses") or []]
    if not losses:
        return ()
    length = int(perplexity["block_length"])
    last = int(perplexity["tokens"]) - (len(losses) - 1) * length
    return tuple(zip(losses, [length] * (len(losses) - 1) + [last], strict=True))


def _matrices(entries: _Fields) -> tuple[MatrixStats, ...]:
    return tuple(_matrix(entries.object(name)) for name in entries.raw)


def _matrix(entry: _Fields) -> MatrixStats:
    rows, columns = entry.count("rows"), entry.count("columns")
    block = None if entry.raw.get("block") is None else entry.count("block")
    size, mean = entry.maybe("group_size"), entry.maybe("n_eff_mean")
    kept_fraction = entry.spread("kept_fraction")
    if kept_fraction is None:
        raise entry.wrong("kept_fraction", "quartiles")
    if size is not None and size < 1:
        raise entry.wrong("group_size", "at least 1")
    if size is not None and mean is not None and not 0 <= mean <= size * (1 + 1e-9):
        raise entry.wrong("n_eff_mean", "between 0 and group_size")
    return MatrixStats(
        role=entry.text("role"),
        block=block,
        weights=rows * columns,
        rows=rows,
        kept=entry.count("kept"),
        kept_fraction=kept_fraction,
        effective_share=mean / size if mean is not None and size is not None else None,
        group_size=None if size is None else int(size),
        s_eff=entry.spread("s_eff"),
        s_eff_mean=None if entry.raw.get("s_eff_mean") is None else entry.share("s_eff_mean"),
        bound=None if entry.raw.get("s_eff_bound_mean") is None else entry.share("s_eff_bound_mean"),
        margin=entry.maybe("least_margin_over_bound"),
    )


def _origin(source: _Fields) -> dict[str, Any]:
    """Of which dense model something is: by its fingerprint where there is one."""
    name = source.text("model")
    return {"model": name, "identity": str(source.raw.get("sha256_of_samples") or name)}


def _method(recipe: _Fields, calibration: Any) -> dict[str, Any]:
    method = recipe.text("method")
    adaptive = method.startswith("emp-")
    words = [str(recipe.raw["pattern"])] if recipe.raw.get("pattern") else []
    if recipe.raw.get("neff_dtype", "float64") not in (None, "float64"):
        words.append(f"N_eff in {recipe.raw['neff_dtype']}")
    if isinstance(calibration, dict) and calibration.get("propagate") == "pruned":
        words.append("pruned propagation")
    group = str(recipe.raw.get("group") or "row")
    if group != "row":
        words.append({"matrix": "whole matrices", "all": "all together"}.get(group, group))
    return {
        "method": method,
        "beta": recipe.number("beta") if adaptive else None,
        "order": recipe.number("order") if adaptive else None,
        "group": group,
        "scope": _scope(recipe.raw.get("targets"), recipe.raw.get("ignore")),
        "variant": printable(", ".join(words)),
        "match": _match(recipe) if recipe.raw.get("match") else None,
    }


def _match(recipe: _Fields) -> Match:
    """What of another run a baseline matches."""
    return "matrix" if recipe.raw.get("match_by") == "matrix" else "total"


def _scope(targets: Any, ignore: Any) -> str:
    def words(value: Any) -> str:
        return ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)

    return printable(words(targets) + (f" without {words(ignore)}" if ignore else ""))


def _facts(source: _Fields, recipe: _Fields, calibration: Any, targets: _Fields) -> dict[str, str]:
    """What a reader of the report wants to know of the model and how it was calibrated."""
    facts = {"model": source.text("model")}
    if source.raw.get("revision"):
        facts["revision"] = printable(str(source.raw["revision"]))
    if targets.maybe("parameters") is not None:
        facts["parameters"] = f"{targets.count('parameters'):,}"
    if targets.maybe("weights") is not None:
        scope = _scope(recipe.raw.get("targets"), recipe.raw.get("ignore"))
        share = targets.maybe("share_of_all_parameters")
        of_all = f", {100 * share:.1f} % of all parameters" if share is not None else ""
        facts["targets"] = f"{scope}: {targets.count('weights'):,} weights{of_all}"
    text = calibration.get("text") if isinstance(calibration, dict) else None
    if isinstance(calibration, dict) and isinstance(text, dict):
        name = str(text.get("dataset") or PurePath(str(text.get("file", ""))).name)
        facts["calibration"] = printable(f"{name}, {text.get('samples')} x {text.get('seqlen')} tokens")
    return facts


def _with_results(points: list[Point]) -> list[Point]:
    """Results files joined with the run they judge, where it is given too; to a run they add a suite.

    Runs of one signature may differ in their calibration, which a results file does not tell; its points then stay alone.
    """
    runs: dict[str, list[int]] = {}
    for number, point in enumerate(points):
        if point.matrices and point.pruned:
            runs.setdefault(point.signature, []).append(number)
    joined: dict[int, Point] = dict(enumerate(points))
    for number, point in enumerate(points):
        alike = runs.get(point.signature, [])
        if point.matrices or point.method is None or len({points[other].matrices for other in alike}) != 1:
            continue
        run = alike[-1]
        known = {judgement.key for judgement in joined[run].judgements}
        added = tuple(judgement for judgement in point.judgements if judgement.key not in known)
        joined[run] = replace(joined[run], judgements=joined[run].judgements + added)
        del joined[number]
    return list(joined.values())
