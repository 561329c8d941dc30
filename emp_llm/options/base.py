"""Declaration of options: fields of frozen dataclasses, each annotated with an `Opt`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from emp_llm.common.errors import UserError
from emp_llm.common.loudness import loudness
from emp_llm.common.progress_bars import progress_of

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


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


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Turn a function of one options object into a function of its fields, as typed keyword arguments.

    The options include `LoudnessOptions`.
    """

    def flat(function: Callable[[T], R]) -> Callable[P, R]:
        @wraps(function)
        def command(*arguments: P.args, **keywords: P.kwargs) -> R:
            chosen: Any = options(*arguments, **keywords)
            name = function.__name__
            with loudness(name, chosen.verbose, chosen.quiet), progress_of(name):
                return function(chosen)

        result = inspect.signature(function).return_annotation
        command.__signature__ = inspect.signature(options).replace(return_annotation=result)  # type: ignore[attr-defined]
        command.options = options  # type: ignore[attr-defined]
        return command

    return flat


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
