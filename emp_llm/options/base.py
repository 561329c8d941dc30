"""Declaration of options: fields of dataclasses and structs, or parameters of a command, each
annotated with an `Opt`.
"""

import inspect
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from emp_llm.common.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Opt:
    """An option on the command line: `name: Annotated[type, Opt("Help.")] = default`.

    Attributes:
        help: a sentence.
        argument: it is positional; with a `flag`, it may be given by that too.
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
    """The fields of a group that are options of a command:
    `Annotated[RecipeOptions, Some(("targets", "ignore"))]`. The others keep their defaults.
    """

    names: tuple[str, ...]


class GivenOptions(frozenset[str]):
    """The names of the options that a call of a command gives, even if their values equal the
    defaults. A command with a parameter of this type gets them.
    """


class Option(NamedTuple):
    """A declared option.

    Attributes:
        parameter: the parameter or field in Python.
        annotation: its type, without the `Opt`.
        about: its `Opt`.
    """

    parameter: inspect.Parameter
    annotation: Any
    about: Opt

    @property
    def types(self) -> tuple[Any, ...]:
        """The members of its type, if that is a union; else its type."""
        if get_origin(self.annotation) in (Union, UnionType):
            return get_args(self.annotation)
        return (self.annotation,)

    @property
    def required(self) -> bool:
        return self.parameter.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        return self.about.flag or flag_of(self.parameter.name)

    @property
    def choices(self) -> list[Any]:
        """The values of a `Literal`; empty for other types."""
        literals = (member for member in self.types if get_origin(member) is Literal)
        return [choice for literal in literals for choice in get_args(literal)]

    def in_shell(self, value: Any) -> Any:
        """A value of this option from words of a shell; errors are those of `checked`."""
        if isinstance(value, str) and not self.choices and str not in self.types:
            for kind, read in ((int, int), (float, number_in)):
                if kind in self.types:
                    with suppress(ValueError):
                        value = read(value)
                    break
        return self.checked(value)

    def checked(self, value: Any) -> Any:
        """A value of this option; text is accepted for a path, and a path for text.

        Raises:
            UserError: it is of another type, none of the choices, too small or too large.
        """
        flag = self.flag.split("/")[0]
        types = self.types
        if value is None and (self.parameter.default is None or NoneType in types):
            return None
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                hint = did_you_mean(str(value), self.choices)
                raise UserError(
                    f"{flag} {_quoted(value)} is not one of {', '.join(self.choices)}.{hint}"
                )
            return value
        if isinstance(value, str | Path):
            wanted = next((member for member in (str, Path) if member in types), None)
            value = value if wanted is None else wanted(value)
        elif isinstance(value, list | tuple) and all(
            isinstance(item, str | Path) for item in value
        ):
            of_item = next((get_args(each)[0] for each in types if get_origin(each) is list), None)
            value = value if of_item is None else [of_item(item) for item in value]
        check_type(flag, value, *types)
        if self.about.minimum is not None and value < self.about.minimum:
            raise UserError(f"{flag} must be at least {self.about.minimum}, got {value:g}.")
        if self.about.maximum is not None and value > self.about.maximum:
            raise UserError(f"{flag} must be at most {self.about.maximum}, got {value:g}.")
        return value


_TYPE_NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    list[str]: "a list of names",
    list[Path]: "a list of paths",
    dict[str, int]: "a mapping from names to whole numbers",
}


def flag_of(name: str) -> str:
    """The flag of an option by its name in Python."""
    return f"--{name.replace('_', '-')}"


def check_type(name: str, value: Any, *types: Any) -> None:
    """Raise UserError unless an argument is of one of some types."""
    if Any in types or any(_is_of(value, allowed) for allowed in types):
        return
    wanted = " or ".join(
        _TYPE_NAMES.get(allowed, f"of type {allowed.__name__}")
        for allowed in types
        if allowed is not NoneType
    )
    hint = ""
    if hasattr(value, "forward"):
        hint = (
            " For a model in memory there is prune_model; or save it with save_pretrained, and "
            "give its folder."
        )
    raise UserError(f"{name} must be {wanted}, got {_quoted(value)}.{hint}")


def _quoted(value: Any) -> str:
    """A wrong value in a message: as it is, or by its type if that is long."""
    text = repr(value)
    short = len(text) <= 60 and text.isprintable()
    return text if short else f"a value of type {type(value).__name__}"


def _is_of(value: Any, allowed: Any) -> bool:
    """Whether a value is of a type. A whole number is also a float; True and False are neither."""
    if isinstance(value, bool):
        return allowed is bool
    if get_origin(allowed) is list:
        (of_item,) = get_args(allowed)
        return isinstance(value, list) and all(isinstance(item, of_item) for item in value)
    if get_origin(allowed) is dict:
        of_key, of_value = get_args(allowed)
        return isinstance(value, dict) and all(
            _is_of(key, of_key) and _is_of(item, of_value) for key, item in value.items()
        )
    return isinstance(value, int | float if allowed is float else allowed)


def options_in(parameter: inspect.Parameter) -> tuple[Any, dict[str, Option]]:
    """The group of options that a parameter of a command is, or None for a single option; and
    its options by name.
    """
    annotation = parameter.annotation
    if annotation is GivenOptions:
        return GivenOptions, {}
    marks = []
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
    for mark in marks:
        if isinstance(mark, Opt):
            return None, {parameter.name: Option(parameter, annotation, mark)}
        if isinstance(mark, Some):
            return annotation, {name: options_of(annotation)[name] for name in mark.names}
    return annotation, options_of(annotation)


@cache
def options_of(group: type[Any]) -> dict[str, Option]:
    """The options of a dataclass or struct, by name."""
    options: dict[str, Option] = {}
    for field in inspect.signature(group).parameters.values():
        if any(isinstance(mark, Opt) for mark in get_args(field.annotation)):
            options |= options_in(field)[1]
    if issubclass(group, msgspec.Struct):  # its signature does not tell what factories make
        for info in msgspec.structs.fields(group):
            if info.name in options and info.default_factory is not msgspec.NODEFAULT:
                option = options[info.name]
                parameter = option.parameter.replace(default=info.default_factory())
                options[info.name] = option._replace(parameter=parameter)
    return options


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
            raise UserError(f"{field.name} is {_quoted(value)}: {error}.") from error


def check_fields(node: Any, as_flags: bool = True) -> None:
    """Raise UserError for a field of a dataclass whose value is not of its type.

    Args:
        node: a dataclass whose fields have no `Opt`.
        as_flags: messages name the flag of a field; else the field.
    """
    for field in inspect.signature(node.__class__).parameters.values():
        name = flag_of(field.name) if as_flags else field.name
        Option(field, field.annotation, Opt("", flag=name)).checked(getattr(node, field.name))


def parse_list(text: str, flag: str) -> list[str]:
    """The values in an option with commas; UserError if one is empty."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return values


def number_in(text: str) -> float:
    """A number as a person writes it: 0.5 or 50%. ValueError for another text."""
    text = text.strip()
    return float(f"{text[:-1]}e-2" if text.endswith("%") else text)


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers in an option with commas; UserError if a value is not a number."""
    try:
        numbers = [number_in(number) for number in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if any(math.isnan(number) for number in numbers):
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.")
    return numbers
