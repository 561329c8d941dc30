"""config.json of a model with fewer heads or neurons: found by trying its numbers until the model has the wanted shapes."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from emp_llm.common.errors import UserError
from emp_llm.models.layers import Layer
from emp_llm.structure.choice import Choice

Shapes = dict[str, tuple[int, ...]]
Field = tuple[str, ...]  # the names of a field and of the parts around it, outermost first
Changes = dict[Field, Any]
_HEAD_DIM = "head_dim"
_WIDTHS = ("inner", "inter", "ffn", "hidden")  # parts of the names of fields that hold a width
_KEEP = "Keep all shapes and set the removed ones to zero: --keep-shapes."


def wanted_shapes(shapes: Mapping[str, Sequence[int]], choices: Sequence[Choice]) -> Shapes:
    """The shape of every parameter of the model after the removal.

    Args:
        shapes: parameter -> shape in the dense model.
        choices: the kept units.
    """
    wanted = {name: tuple(shape) for name, shape in shapes.items()}

    def shrink(layer: Layer, outputs: int, inputs: int) -> None:
        """Take rows and columns from a layer's parameter."""
        *stack, first, second = wanted[layer.parameter]
        transposed = layer.transposed if layer.expert is None else layer.expert.transposed
        less = (inputs, outputs) if transposed else (outputs, inputs)
        wanted[layer.parameter] = (*stack, first - less[0], second - less[1])
        bias = f"{layer.name}.bias"
        if layer.expert is None and outputs and bias in wanted:
            wanted[bias] = (wanted[bias][0] - outputs,)

    for choice in choices:
        units, kept = choice.units, choice.kept
        if units.output.expert is not None and units.output.expert.expert > 0:
            continue  # all experts have the width of the first
        shrink(units.output, 0, units.columns.size - units.columns_of(kept).size)
        for layer, rows in units.rows.items():
            shrink(layer, len(set(rows.flat)) - units.rows_of(layer, kept).size, 0)
    return wanted


def smaller_config(
    config: dict[str, Any], choices: Sequence[Choice], wanted: Shapes, build: Callable[[dict[str, Any]], Shapes]
) -> Changes:
    """The fields of config.json that the smaller model changes, with their values.

    Args:
        config: of the dense model, with the defaults of its class.
        choices: the kept units.
        wanted: the shapes of the smaller model.
        build: returns the shapes of the model that a configuration describes; it may fail with any error.

    Raises:
        UserError: no configuration describes the smaller model.
    """
    changes: Changes = {}
    for kind in ("neurons", "heads"):
        changed = [choice for choice in choices if choice.units.kind == kind and choice.removes]
        if not changed:
            continue
        touched = {p for c in changed for layer in c.units.layers for p in (layer.parameter, f"{layer.name}.bias")}
        attempts = _neuron_attempts(config, changed) if kind == "neurons" else _head_attempts(config, changed)
        found = next((each for each in attempts if _fits(changed_config(config, changes | each), build, wanted, touched)), None)
        if found is None:
            raise UserError(f"config.json has no number for the {kind} of {changed[0].units.role} in this form. {_KEEP}")
        changes |= found
    final = build(changed_config(config, changes))
    different = [name for name in wanted if final.get(name) != wanted[name]]
    if different:
        raise UserError(f"the smaller model would need another {different[0]} too, of shape {final.get(different[0])}. {_KEEP}")
    return changes


def changed_config(config: dict[str, Any], changes: Mapping[Field, Any]) -> dict[str, Any]:
    """A copy of a configuration with some values replaced or added."""
    changed = copy.deepcopy(config)
    for path, value in changes.items():
        part = changed
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = value
    return changed


def has_width_list(config: dict[str, Any], name: str = "intermediate_size") -> bool:
    """Whether a configuration has a width of the MLP for each layer."""
    return any(isinstance(part.get(name), list) for part in _parts(config))


def _fits(config: dict[str, Any], build: Callable[[dict[str, Any]], Shapes], wanted: Shapes, touched: set[str]) -> bool:
    """Whether the model of a configuration has the wanted shapes in the touched parameters."""
    try:
        shapes = build(config)
    except Exception:  # a configuration that no model has may fail in any way
        return False
    return all(shapes.get(name) == wanted[name] for name in touched if name in wanted)


def _neuron_attempts(config: dict[str, Any], choices: list[Choice]) -> Iterator[Changes]:
    """The numbers of neurons, in all the fields that may hold them."""
    by_role: dict[str, list[Choice]] = {}
    for choice in choices:
        by_role.setdefault(choice.units.role, []).append(choice)
    options: list[list[tuple[Field, Any]]] = []
    for members in by_role.values():
        after = len(members[0].kept)
        unset = [path for path in _fields(config, lambda value: value is None) if any(part in path[-1] for part in _WIDTHS)]
        fields = _fields(config, _equals(len(members[0].units))) + unset
        lists = _fields(config, lambda value: isinstance(value, list) and len(value) > 1 and type(value[0]) is int)
        values: list[tuple[Field, Any]] = [(path, after) for path in fields]
        if lists:
            values = [(path, _list_with(_value(config, path), members)) for path in lists] + values
        options.append(values)
    for chosen in itertools.product(*options):
        yield dict(chosen)
    for several in _subsets([value for values in options for value in values]):  # one role may need several fields
        yield dict(several)


def _list_with(values: list[int], members: list[Choice]) -> list[int]:
    """A list of widths by layer, with those of the members replaced."""
    by_block = {choice.units.block: len(choice.kept) for choice in members}
    return [by_block.get(number, value) for number, value in enumerate(values)]


def _head_attempts(config: dict[str, Any], choices: list[Choice]) -> Iterator[Changes]:
    """The numbers of heads, without and with the width of a head written out."""
    units, kept = choices[0].units, len(choices[0].kept)
    width = units.columns.shape[1] // units.heads
    before, after = len(units) * units.heads, kept * units.heads
    heads = {path: after for path in _fields(config, _equals(before)) if "head" in path[-1]}
    keys: Changes = {}
    if units.keys:
        every_key = len(units)
        keys = {
            path: kept
            for path in _fields(config, _equals(every_key))
            if "head" in path[-1] and ("kv" in path[-1] or "key" in path[-1])
        }
    queries = {path: value for path, value in heads.items() if path not in keys}
    for parts in ({**queries, **keys}, queries, heads):
        yield parts
        for path in sorted({path[:-1] for path in parts}):
            yield {**parts, (*path, _HEAD_DIM): width}


def _subsets(items: list[Any]) -> Iterator[tuple[Any, ...]]:
    for size in range(2, min(len(items), 3) + 1):
        yield from itertools.combinations(items, size)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _fields(config: dict[str, Any], is_it: Callable[[Any], bool], path: Field = ()) -> list[Field]:
    """The places of a configuration whose value passes a test."""
    found = []
    for name, value in config.items():
        if isinstance(value, dict):
            found += _fields(value, is_it, (*path, name))
        elif not isinstance(value, bool) and is_it(value):
            found.append((*path, name))
    return found


def _equals(number: int) -> Callable[[Any], bool]:
    """A test for a whole number."""
    return lambda value: type(value) is int and value == number


def _value(config: dict[str, Any], path: Field) -> Any:
    for name in path:
        config = config[name]
    return config
