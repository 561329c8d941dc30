"""Declaration of options: fields of dataclasses and structs, or parameters of a command, each
annotated with an `Opt`.
"""

import inspect
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from emp_llm.common.errors import UserError


@dataclass(frozen=True)
class Opt:
    """An option on the command line: `name: Annotated[type, Opt("Help.")] = default`.

    Attributes:
        help: a sentence.
        argument: a word without a flag; one that names a flag may be given by that too.
        metavar: the name of an argument in the usage line.
        flag: the flag, if it is not the field's name with hyphens.
        minimum, maximum: the smallest and the largest number allowed.
    """

    help: str
    argument: bool = False
    metavar: str | None = None
    flag: str | None = None
    minimum: int | None = None
    maximum: int | None = None


class Some(NamedTuple):
    """Some fields of a group of options: `Annotated[Recipe, Some("targets", "ignore")]`. The
    others keep their defaults.
    """

    names: tuple[str, ...]


class Given(frozenset[str]):
    """The names of the options that a call of a command names, also with values that equal their
    defaults.

    A command that declares a parameter of this type is told.
    """


class Option(NamedTuple):
    """A declared option.

    Attributes:
        parameter: of Python.
        kind: its type; kinds: the members of that, if it is a union.
        about: its `Opt`.
    """

    parameter: inspect.Parameter
    kind: Any
    kinds: tuple[Any, ...]
    about: Opt

    @property
    def flag(self) -> str:
        return self.about.flag or f"--{self.parameter.name.replace('_', '-')}"

    @property
    def choices(self) -> list[Any]:
        """The values allowed; empty if not only some are."""
        return [
            choice
            for kind in self.kinds
            if get_origin(kind) is Literal
            for choice in get_args(kind)
        ]

    def checked(self, value: Any) -> Any:
        """A value of this option; text is accepted for a path, and a path for text.

        Raises:
            UserError: it is of another type, none of the choices, too small or too large.
        """
        flag = self.flag.split("/")[0]
        kinds = self.kinds
        if value is None and (self.parameter.default is None or NoneType in kinds):
            return None
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                raise UserError(f"{flag} {_shown(value)} is not one of {', '.join(self.choices)}.")
            return value
        if isinstance(value, str | Path):
            of_one = next((kind for kind in (str, Path) if kind in kinds), None)
            value = value if of_one is None or isinstance(value, of_one) else of_one(value)
        elif isinstance(value, list | tuple) and all(
            isinstance(item, str | Path) for item in value
        ):
            of_each = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
            value = value if of_each is None else [of_each(item) for item in value]
        check_type(flag, value, *kinds)
        if self.about.minimum is not None and value < self.about.minimum:
            raise UserError(f"{flag} must be at least {self.about.minimum}, got {value:g}.")
        if self.about.maximum is not None and value > self.about.maximum:
            raise UserError(f"{flag} must be at most {self.about.maximum}, got {value:g}.")
        return value


_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    list[str]: "a list of names",
    list[Path]: "a list of paths",
}


def check_type(name: str, value: Any, *kinds: Any) -> None:
    """Raise UserError unless an argument is of one of some types."""
    if Any not in kinds and not any(_is_of(value, kind) for kind in kinds):
        wanted = " or ".join(
            _WORDS.get(kind, f"of type {kind.__name__}") for kind in kinds if kind is not NoneType
        )
        hint = (
            " For a model in memory there is prune_model; or save it with save_pretrained, and "
            "give its folder."
        )
        hint = hint if hasattr(value, "forward") else ""
        raise UserError(f"{name} must be {wanted}, got {_shown(value)}.{hint}")


def _shown(value: Any) -> str:
    """A wrong value in a message: as it is, or by its type if that is long."""
    text = repr(value)
    return (
        text
        if len(text) <= 60 and text.isprintable()
        else f"a value of type {type(value).__name__}"
    )


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; whole numbers are numbers too, True and False are none."""
    if isinstance(value, bool):
        return kind is bool
    if get_origin(kind) is list:
        return isinstance(value, list) and all(
            isinstance(item, get_args(kind)[0]) for item in value
        )
    return isinstance(value, int | float if kind is float else kind)


def options_in(parameter: inspect.Parameter) -> tuple[Any, dict[str, Option]]:
    """The group of options that a parameter of a command is, or None for a single option; and
    its options by name.
    """
    hint = parameter.annotation
    if hint is Given:
        return Given, {}
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
    for mark in marks:
        if isinstance(mark, Opt):
            kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
            return None, {parameter.name: Option(parameter, kind, kinds, mark)}
        if isinstance(mark, Some):
            return kind, {name: options_of(kind)[name] for name in mark.names}
    return kind, options_of(kind)


@cache
def options_of(group: type[Any]) -> dict[str, Option]:
    """The options of a dataclass or struct, by name."""
    found: dict[str, Option] = {}
    for field in inspect.signature(group).parameters.values():
        if any(isinstance(mark, Opt) for mark in get_args(field.annotation)):
            found |= options_in(field)[1]
    if issubclass(group, msgspec.Struct):  # its signature does not tell what factories make
        for each in msgspec.structs.fields(group):
            if each.name in found and each.default_factory is not msgspec.NODEFAULT:
                parameter = found[each.name].parameter.replace(default=each.default_factory())
                found[each.name] = found[each.name]._replace(parameter=parameter)
    return found


def check_values(options: Any) -> None:
    """Raise UserError for a value of a dataclass or struct that its option, or its field's type,
    does not allow.
    """
    known = options_of(options.__class__)
    for name, option in known.items():
        option.checked(getattr(options, name))
    others = msgspec.structs.fields(options) if isinstance(options, msgspec.Struct) else ()
    for field in (field for field in others if field.name not in known):
        value = getattr(options, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise UserError(f"{field.name} is {_shown(value)}: {error}.") from error


def check_fields(node: Any, prefix: str = "--") -> None:
    """Raise UserError for a field of a dataclass whose value is not of its type.

    Args:
        node: its fields have no `Opt`.
        prefix: of their names in messages.
    """
    for field in inspect.signature(node.__class__).parameters.values():
        hint = field.annotation
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        about = Opt("", flag=f"{prefix}{field.name.replace('_', '-') if prefix else field.name}")
        Option(field, hint, kinds, about).checked(getattr(node, field.name))


def parse_words(text: str, flag: str) -> list[str]:
    """The values in an option with commas; UserError if one is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return words


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers in an option with commas; UserError if one is no number."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if any(math.isnan(number) for number in numbers):
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.")
    return numbers
