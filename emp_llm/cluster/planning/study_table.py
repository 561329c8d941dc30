"""The definition of a study: options of `plan`, from the command line and from a TOML table, with their defaults."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from emp_llm.common.errors import UserError
from emp_llm.options.commands import METHODS
from emp_llm.options.jobs.planning import DEFAULT_GPU_GB, DEFAULT_SUITE, JobsPer, PlanOptions
from emp_llm.records.base import converted

if TYPE_CHECKING:
    from emp_llm.evaluation.suites import Suite

_Words = str | list[str] | None
_Numbers = str | float | list[float] | None
_LISTS = ("models", "methods", "patterns", "targets")
_NUMBERS = ("betas", "orders", "sparsities", "emp_sparsities")
_OF_COMMAND = ("table", "output", "overwrite", "verbose", "quiet")  # options that a table does not hold


def _table_type() -> type[msgspec.Struct]:
    """The type of a TOML table: the fields of `PlanOptions`; lists where the command line has commas."""
    hints = get_type_hints(PlanOptions)
    wider = dict.fromkeys(_LISTS, _Words) | dict.fromkeys(_NUMBERS, _Numbers)
    names = [each.name for each in fields(PlanOptions) if each.name not in _OF_COMMAND]
    return msgspec.defstruct(
        "StudyTable", [(name, wider.get(name, hints[name] | None), None) for name in names], forbid_unknown_fields=True
    )


@dataclass(frozen=True)
class Planned:
    """The options of a plan with their defaults; fields as for `PlanOptions`.

    Attributes:
        suite_content: the suite that `suite` names.
    """

    models: str | list[str]
    methods: str
    betas: str | None
    orders: str | None
    sparsities: str | None
    emp_sparsities: str | None
    patterns: str | None
    suite: str
    suite_content: "Suite"
    limit: int | None
    calibration: str | None
    samples: int | None
    seqlen: int | None
    targets: str | None
    dtype: str | None
    per: JobsPer
    prune_options: str
    evaluate_options: str
    gpu_gb: float
    processes: int
    nodes: int
    trust_remote_code: bool


def planned(options: PlanOptions) -> Planned:
    """The definition of a study.

    Raises:
        UserError: the table cannot be read or has an unknown key, or no models are named; or the suite is unknown.
    """
    from emp_llm.evaluation.suites import find_suite

    merged = _with_table(options)
    merged.check()
    if merged.models is None:
        raise UserError("--models is missing; name model folders or Hub ids, separated by commas.")
    suite = absolute(merged.suite or DEFAULT_SUITE)
    values: dict[str, Any] = {each.name: getattr(merged, each.name) for each in fields(merged) if each.name not in _OF_COMMAND}
    defaults = {"methods": METHODS, "per": "recipe", "prune_options": "", "evaluate_options": "", "gpu_gb": DEFAULT_GPU_GB}
    values |= {name: default for name, default in (defaults | {"processes": 1, "nodes": 1}).items() if values[name] is None}
    values["calibration"] = None if merged.calibration is None else absolute(merged.calibration)
    return Planned(**values | {"suite": suite, "suite_content": find_suite(suite)})


def _with_table(options: PlanOptions) -> PlanOptions:
    """The options, with those of the table where the command line has none."""
    if options.table is None:
        return options
    table = _read(options.table)
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if values[name] in (None, False) and value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) and name != "models" else value
            values[name] = str(text) if name in _NUMBERS else text
    return PlanOptions(**values)


def absolute(name: str) -> str:
    """A path that exists as an absolute path, because jobs run in the study's folder; other names as they are."""
    path, comma, rest = name.partition(",")
    found = Path(path).expanduser()
    return f"{found.resolve()}{comma}{rest}" if path and found.exists() else name


def _read(path: Path) -> msgspec.Struct:
    try:
        return converted(tomllib.loads(path.read_text(encoding="utf-8")), _table_type(), str(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: not a TOML table that can be read ({error}).") from error
