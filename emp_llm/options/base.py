"""Declaration of options: fields of frozen dataclasses, each annotated with an `Opt`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from emp_llm.common.errors import UserError
from emp_llm.common.progress import loudness, progress_of

T = TypeVar("T")
R = TypeVar("R")
_POSITIONAL, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Opt:
    """An option on the command line: `name: Annotated[type, Opt("Help.")] = default`.

    Attributes:
        help: a sentence.
        argument: positional, without a flag.
        metavar: the name in the usage line.
        flag: the flag, if it is not the field's name with hyphens.
        minimum: the smallest number allowed.
        short: a flag of one letter.
    """

    help: str
    argument: bool = False
    metavar: str | None = None
    flag: str | None = None
    minimum: int | None = None
    short: str | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options. Text is accepted for a path, and a path for text."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, is_path in _text_fields(kind).items():
            value = getattr(self, name)
            if is_path and isinstance(value, str):
                object.__setattr__(self, name, Path(value))
            elif is_path and isinstance(value, list | tuple):
                object.__setattr__(self, name, type(value)(Path(item) for item in value))
            elif not is_path and isinstance(value, Path):
                object.__setattr__(self, name, str(value))

    def check_choice(self, name: str, kind: Any, flag: str | None = None) -> None:
        """Raise UserError unless a field has one of a Literal's values; a default of None is allowed too."""
        value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
        if value not in get_args(kind) and not (value is None and default is None):
            raise UserError(f"--{flag or name.replace('_', '-')} {value!r} is not one of {', '.join(get_args(kind))}.")


@dataclass(frozen=True, kw_only=True)
class LoudnessOptions(Options):
    """What a command tells while it works. Warnings and errors are always shown."""

    verbose: Annotated[bool, Opt("Also log each step with its size, time and memory.", flag="--verbose", short="-v")] = False
    quiet: Annotated[bool, Opt("No progress and no log: only the result, warnings and errors.", flag="--quiet", short="-q")] = (
        False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verbose and self.quiet:
            raise UserError("--verbose and --quiet exclude each other; give one of them.")


def part(options: Any, kind: type[T]) -> T:
    """The options of one topic, taken from a command's options."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})  # type: ignore[arg-type]


class Some(NamedTuple):
    """Some fields of a group of options; the others keep their defaults."""

    kind: Any
    names: tuple[str, ...]


class Declared(NamedTuple):
    """An option: its type with its `Opt`; its default, or `inspect.Parameter.empty`; whether it needs no name in Python."""

    hint: Any
    default: Any
    positional: bool


def takes(*groups: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Turn a function of groups of options into a function of all their fields, as keyword arguments.

    Args:
        groups: dataclasses or structs whose fields are annotated with an `Opt`, or `Some` fields of one. The function gets a
            value of each. `LoudnessOptions` come on top.
    """

    def flat(function: Callable[..., R]) -> Callable[..., R]:
        loud = any(issubclass(_kind(group), LoudnessOptions) for group in groups)
        all_groups = groups if loud else (*groups, LoudnessOptions)
        declared = {name: each for group in all_groups for name, each in declared_options(group).items()}

        def grouped(given: Mapping[str, Any]) -> list[Any]:
            return [_kind(group)(**{n: given[n] for n in declared_options(group) if n in given}) for group in all_groups]

        @wraps(function)
        def command(*arguments: Any, **keywords: Any) -> R:
            given = command.__signature__.bind(*arguments, **keywords).arguments  # type: ignore[attr-defined]
            values = grouped(given)
            name, loudly = function.__name__, next(value for value in values if isinstance(value, LoudnessOptions))
            with loudness(name, loudly.verbose, loudly.quiet), progress_of(name):
                return function(*values[: len(groups)])

        parameters = [
            inspect.Parameter(name, _POSITIONAL if each.positional else _KEYWORD, default=each.default, annotation=each.hint)
            for name, each in sorted(declared.items(), key=lambda item: not item[1].positional)
        ]
        result = inspect.signature(function).return_annotation
        command.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        command.options, command.grouped = declared, grouped  # type: ignore[attr-defined]
        return command

    return flat


def declared_options(group: Any) -> dict[str, Declared]:
    """The options of a group, by name."""
    kind, hints = _kind(group), get_type_hints(_kind(group), include_extras=True)
    known: dict[str, tuple[Any, bool]] = {}
    if is_dataclass(kind):
        for each in fields(kind):
            known[each.name] = inspect.Parameter.empty if each.default is MISSING else each.default, not each.kw_only
    else:
        for part in msgspec.structs.fields(kind):
            factory: Any = part.default_factory
            known[part.name] = factory() if part.default is msgspec.NODEFAULT else part.default, False
    return {
        name: Declared(hints[name], *known[name])
        for name in (group.names if isinstance(group, Some) else known)
        if any(isinstance(each, Opt) for each in get_args(hints[name])[1:])
    }


def _kind(group: Any) -> Any:
    return group.kind if isinstance(group, Some) else group


@cache
def _text_fields(kind: Any) -> dict[str, bool]:
    """Name -> whether it holds a path, for each field that holds text or a path."""
    holds_path = {}
    for name, hint in get_type_hints(kind).items():
        parts = {hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))}
        if Path in parts:
            holds_path[name] = True
        elif str in parts:
            holds_path[name] = False
    return holds_path
