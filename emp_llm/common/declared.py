"""Options declared beside their fields, and trees of values: nodes that are read from JSON and from
flat options, and written as JSON.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from emp_llm.common.errors import UserError, did_you_mean, quotable

N = TypeVar("N", bound="Node")


@dataclass(frozen=True)
class Flag:
    """An option on the command line: `name: Annotated[type, Flag("Help.")] = default`.

    Attributes:
        help: a sentence.
        argument: it is positional; with a `flag`, it may be given by that too.
        metavar: the name of an argument in the usage line.
        name: the name of the option, if it is not the field's.
        flag: the flag, if it is not the name with hyphens.
        type: of the option's value, if it is not the field's.
        minimum, maximum: the smallest and the largest number allowed.
        above, below: numbers that the value must not reach.
    """

    help: str
    argument: bool = False
    metavar: str | None = None
    name: str | None = None
    flag: str | None = None
    type: Any = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def check_range(self, flag: str, value: float) -> None:
        """Raise UserError for a number that is too small or too large."""
        if isinstance(value, int) and value.bit_length() > 64:  # a float may not hold it
            raise UserError(f"{flag} is a number of more than 64 bits. Give a smaller one.")
        if not math.isfinite(value):  # JSON holds none
            raise UserError(f"{flag} must be a finite number, got {value:g}.")
        rules = [
            (f"at least {self.minimum}", self.minimum is None or value >= self.minimum),
            (f"above {self.above}", self.above is None or value > self.above),
            (f"at most {self.maximum}", self.maximum is None or value <= self.maximum),
            (f"below {self.below}", self.below is None or value < self.below),
        ]
        if all(kept for _, kept in rules):
            if not math.isfinite(value):
                raise UserError(f"{flag} must be a finite number, got {value:g}.")
            return
        limits = (self.minimum, self.above, self.maximum, self.below)
        rule = " and ".join(
            text for (text, _), limit in zip(rules, limits, strict=True) if limit is not None
        )
        percent = self.below == 1 and 5 <= value < 100
        hint = f" It is a fraction: did you mean {value / 100:g}?" if percent else ""
        got = value if isinstance(value, int) else f"{value:g}"
        raise UserError(f"{flag} must be {rule}, got {got}.{hint}")


class Option(NamedTuple):
    """A declared option.

    Attributes:
        parameter: the parameter in Python, by the option's name.
        annotation: its type, without the `Flag`.
        declared: its `Flag`.
    """

    parameter: inspect.Parameter
    annotation: Any
    declared: Flag

    @property
    def types(self) -> tuple[Any, ...]:
        """The members of its type, if that is a union; else its type."""
        return members_of(self.annotation)

    @property
    def required(self) -> bool:
        return self.parameter.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        return self.declared.flag or flag_of(self.parameter.name)

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
        if isinstance(value, int | float):
            self.declared.check_range(flag, value)
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


def number_in(text: str) -> float:
    """A number as a person writes it: 0.5, 50% or 50 %. ValueError for another text."""
    text = text.strip()
    return float(f"{text[:-1].strip()}e-2" if text.endswith("%") else text)


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a type, if that is a union; else the type; without marks such as `Flag`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


class Field(NamedTuple):
    """A field of a class, as declared.

    Attributes:
        name: of the field.
        value: its type, default and range, under its own name.
        option: the option of commands that sets it; None without a `Flag`.
        node: the kind of node that it holds; None for a plain value.
    """

    name: str
    value: Option
    option: Option | None
    node: "type[Node] | None"


class Node:
    """A value of a tree: a frozen dataclass whose fields are declared with their options.

    A class with a `name` of its own is known by it from its definition on: as a method, with its
    options, and in records.

    Attributes:
        name: in records, after the field that holds the node; "" if the field holds one class.
        kinds: of a class without a name: its classes, by name.
        switch: the option that asks for a node that may be left out.
        mark: the field that a node of a record must have, and the user's own has not; "": none.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[dict[str, Any]]
    switch: ClassVar[Flag | None] = None
    mark: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            bases = (vars(base) for base in cls.__mro__)
            kinds: dict[str, Any] = next((own["kinds"] for own in bases if "kinds" in own), {})
            known = kinds.setdefault(cls.name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise UserError(
                    f"name {cls.name!r} of {cls.__qualname__} is that of {known.__qualname__}. "
                    "Give it another."
                )
            kinds[cls.name] = cls

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of_options(cls, **values: Any) -> Self:
        """The node that options ask for; `values` are those of its fields."""
        return cls(**values)


def fields_of(group: Any) -> tuple[Field, ...]:
    """The fields of a class, in the order of its arguments."""
    fields: tuple[Field, ...] = _declared(group)
    return fields


@cache
def _declared(group: Any) -> tuple[Field, ...]:
    found = []
    for parameter in inspect.signature(group).parameters.values():
        annotation = parameter.annotation
        bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        about = next((mark for mark in get_args(annotation) if isinstance(mark, Flag)), None)
        node = next((each for each in members_of(bare) if _is_node(each)), None)
        own = replace(about or Flag(""), flag=flag_of(parameter.name))
        option = None
        if about is not None:
            of_command = parameter.replace(name=about.name or parameter.name)
            if _is_node(group):
                has_default = parameter.default is not parameter.empty and about.type is None
                default = parameter.default if has_default else None
                of_command = of_command.replace(kind=parameter.KEYWORD_ONLY, default=default)
            option = Option(of_command, bare if about.type is None else about.type, about)
        found.append(Field(parameter.name, Option(parameter, bare, own), option, node))
    return tuple(found)


def _is_node(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Node)


def has_kinds(node: type[Node]) -> bool:
    """Whether a node is one of several classes, which records name."""
    return "kinds" in vars(node)


def kinds_of(group: type[Any]) -> list[type[Any]]:
    """The classes that a node may be, or the class itself."""
    return list(group.kinds.values()) if _is_node(group) and has_kinds(group) else [group]


def options_of(group: type[Any]) -> dict[str, Option]:
    """The options of a class by name: those of its fields, and of the nodes in them. An option
    whose default differs between nodes has none.
    """
    options: dict[str, Option] = {}
    for kind in kinds_of(group):
        for field in fields_of(kind):
            found: dict[str, Option] = {}
            if field.option is not None:
                found[field.option.parameter.name] = field.option
            if field.node is not None:
                for node in kinds_of(field.node):
                    found |= switch_of(node)
                found |= options_of(field.node)
            for name, option in found.items():
                known = options.setdefault(name, option)
                if known.parameter.default != option.parameter.default:
                    without = known.parameter.replace(default=None)
                    options[name] = known._replace(parameter=without)
    return options


def switch_of(node: type[Node]) -> dict[str, Option]:
    """The option that asks for a node, by name; empty if it has none."""
    about = node.switch
    if about is None or about.name is None:
        return {}
    kind = about.type or bool
    parameter = inspect.Parameter(
        about.name, inspect.Parameter.KEYWORD_ONLY, default=False if kind is bool else None
    )
    return {about.name: Option(parameter, kind, about)}


def check_words(
    name: str,
    words: Iterable[str],
    known: Collection[str],
    hint: Callable[[str], str] = lambda _: "",
) -> None:
    """Raise TypeError, with the nearest word, for a keyword argument that a function does not take.

    Args:
        hint: what to say of a word that is near none.
    """
    for word in words:
        if word not in known:
            raise TypeError(
                f"{name}() got an unexpected keyword argument {word!r}."
                f"{did_you_mean(word, known) or hint(word)}"
            )


def check_fields(node: Any) -> None:
    """Raise UserError for a field whose value is not of its type, or out of its range."""
    for field in fields_of(type(node)):
        value = getattr(node, field.name)
        if field.node is None:
            field.value.checked(value)
        elif value is not None and not isinstance(value, field.node):
            kind = field.node.__name__
            raise UserError(f"{field.name} must be {kind}(...) or None, got {_quoted(value)}.")


def build(kind: type[N], given: dict[str, Any]) -> N:
    """A node of flat options, by the options' names or, for fields without one, the fields' names.
    Those that it uses are taken out of `given`.
    """
    values = {}
    for field in fields_of(kind):
        name = field.name if field.option is None else field.option.parameter.name
        if field.node is not None:
            values[field.name] = build_asked(field.node, given)
        elif name in given:
            values[field.name] = given.pop(name)
    return kind.of_options(**values)


def build_asked(kind: type[N], given: dict[str, Any]) -> N | None:
    """A node of flat options, if they ask for it by its switch."""
    (switch,) = switch_of(kind)
    return build(kind, given) if given.pop(switch, False) else None


def as_tree(node: Any) -> dict[str, Any]:
    """A node as JSON values: all its fields, and those of the nodes in it. What equals its default
    is written too: a later default does not change what a record means.
    """
    tree = {}
    for field in fields_of(type(node)):
        value = getattr(node, field.name)
        if isinstance(value, Node):
            named = field.node is not None and has_kinds(field.node)
            value = {value.name: as_tree(value)} if named else as_tree(value)
        tree[field.name] = value
    return tree


def options_apart(node: Any) -> dict[str, Any]:
    """The options, by name, that set a node apart from one with its defaults."""
    apart: dict[str, Any] = {}
    for field in fields_of(type(node)):
        value = getattr(node, field.name)
        if isinstance(value, Node):
            for name, option in switch_of(type(value)).items():
                apart[name] = True if option.annotation is bool else value.name
            apart |= options_apart(value)
        elif field.option is not None and value != field.value.parameter.default:
            apart[field.option.parameter.name] = value
    return apart


def node_in(kind: type[Any], tree: Any, where: str = "") -> Any:
    """The node that `as_tree` wrote.

    Args:
        where: the path to it, for errors; it begins with a point.

    Raises:
        ValueError: a field is unknown, or has no such value. The message begins with the path.
    """
    if not isinstance(tree, dict):
        raise ValueError(f"{where}: expected object, got {_quoted(tree)}")
    if _is_node(kind) and has_kinds(kind):
        if len(tree) != 1:
            raise ValueError(f"{where}: expected one value, got '{quotable(', '.join(tree))}'")
        (name,) = tree
        if name not in kind.kinds:
            hint = did_you_mean(name, kind.kinds) or (
                f" There are {', '.join(kind.kinds)}; a class of your own is known in a program "
                "that imports it"
            )
            raise ValueError(f"{where}: unknown value '{quotable(name)}'.{hint}")
        return node_in(kind.kinds[name], tree[name], f"{where}.{name}")
    known = {field.name: field.node for field in fields_of(kind)}
    required = [field.name for field in fields_of(kind) if field.value.required]
    if _is_node(kind) and kind.mark:
        required.append(kind.mark)
    missing = next((name for name in required if tree.get(name) is None), None)
    if missing is not None:
        raise ValueError(f"{where}: missing field {missing}")
    values = {}
    for name, value in tree.items():
        if name not in known:
            raise ValueError(f"{where}: unknown field '{quotable(name)}'")
        node = known[name]
        if node is not None and value is not None:
            value = node_in(node, value, f"{where}.{name}")
        values[name] = value
    try:
        return kind(**values)
    except (UserError, TypeError) as error:
        raise ValueError(f"{where}: {error}".removesuffix(".")) from error
