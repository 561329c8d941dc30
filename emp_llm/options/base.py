"""The options of commands: groups of fields, or parameters, each annotated with a `Flag`."""

import inspect
import math
from typing import Annotated, Any, get_args, get_origin

from emp_llm.common.declared import Flag, Node, Option, number_in, options_of
from emp_llm.common.errors import UserError


class Some:
    """The options of a group that a command has: `Annotated[ModelOptions, Some("dtype")]`. The
    others keep their defaults.

    Args:
        wanted: names of options, and nodes with all of theirs.
    """

    def __init__(self, *wanted: str | type[Node]) -> None:
        self._wanted = wanted

    def of(self, options: dict[str, Option]) -> dict[str, Option]:
        """Those of the options that the command has."""
        names: list[str] = []
        for each in self._wanted:
            names += [each] if isinstance(each, str) else [*options_of(each)]
        return {name: options[name] for name in options if name in names}


class GivenOptions(frozenset[str]):
    """The names of the options that a call of a command gives, even if their values equal the
    defaults. A command with a parameter of this type gets them.
    """


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
        if isinstance(mark, Flag):
            return None, {parameter.name: Option(parameter, annotation, mark)}
    own = getattr(annotation, "options", None)
    options = options_of(annotation) if own is None else own()
    for mark in marks:
        if isinstance(mark, Some):
            return annotation, mark.of(options)
    return annotation, options


def check_values(options: Any) -> None:
    """Raise UserError for a value of a group that its option does not allow."""
    for name, option in options_of(options.__class__).items():
        option.checked(getattr(options, name))


def parse_list(text: str, flag: str) -> list[str]:
    """The values in an option with commas; UserError if one is empty."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return values


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers in an option with commas; UserError if a value is not a number."""
    try:
        numbers = [number_in(number) for number in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if any(math.isnan(number) for number in numbers):
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.")
    return numbers
