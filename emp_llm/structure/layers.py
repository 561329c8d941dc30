"""Whole decoder layers: found, scored by how much each changes its input, and removed."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.modules import find_blocks
from emp_llm.models.offload import execution_device
from emp_llm.structure.units import (
    Changes,
    Indices,
    UnitModel,
    Units,
    field_path,
    shapes_of,
    smaller_model,
    sums_of_ranks,
)


@dataclass(frozen=True, eq=False)
class Layers(Units):
    """The decoder layers of a model, as the units of one group.

    Attributes:
        stored: a stored tensor of a layer -> its number, and the start and end of the number in the
            name. A layer that predicts several tokens follows the others, has a higher number, and
            stays.
    """

    stored: dict[str, tuple[int, int, int]]

    def new_name(self, tensor: str, kept: Sequence[int]) -> str | None:
        """The name of a stored tensor if only some layers stay; None if it goes."""
        if tensor not in self.stored:
            return tensor
        number, start, end = self.stored[tensor]
        if number < len(self) and number not in kept:
            return None
        before = sum(each < number for each in kept) + max(0, number - len(self))
        return f"{tensor[:start]}{before}{tensor[end:]}"


def find_layers(
    skeleton: PreTrainedModel, architecture: Architecture, blocks: str | None = None
) -> Layers:
    """The decoder layers of a model. UserError if it has fewer than two, or their tensors do not
    name their layer.
    """
    path, modules = find_blocks(skeleton, blocks)
    prefixes: dict[str, None] = {}
    names = dict(architecture.stored_names)
    names |= {
        layer.parameter: architecture.experts[layer.name].stored.name
        for layer in architecture.layers
        if layer.expert
    }
    for parameter, stored in names.items():
        if parameter.startswith(f"{path}."):
            number = parameter.removeprefix(f"{path}.").partition(".")[0]
            before = re.match(rf"((?:.*?\.)?){number}\.", stored)
            if before is None:
                raise UserError(
                    f"--structure layers: {stored} does not name its layer, or layers share it, so "
                    "none can go by itself. Leave out --structure to prune weights."
                )
            prefixes[before[1]] = None
    stored_at = {}
    for prefix in prefixes:
        for tensor in architecture.checkpoint.tensors:
            found = re.match(rf"{re.escape(prefix)}(\d+)\.", tensor)
            if found is not None:
                stored_at[tensor] = (int(found[1]), found.start(1), found.end(1))
    matrices = [
        target for target in architecture.select("all-linear") if target.layer.block is not None
    ]
    if len(modules) < 2:
        raise UserError(
            f"--structure layers: {type(skeleton).__name__} has {len(modules)} decoder "
            "layer; none can go."
        )
    return Layers(
        "layers", path, path, 0, np.zeros(len(modules), dtype=np.int64), 1, matrices, stored_at
    )


def layer_changes(model: UnitModel, kept: Indices) -> Changes:
    """The fields of config.json that change if only some layers stay.

    The number of layers, lists with a value for each layer, lists of numbers of layers, and the
    number of dense layers at the start of a mixture.

    Raises:
        UserError: the smaller model would have other shapes.
    """
    layers = model.units[0]
    assert isinstance(layers, Layers)
    config: Any = model.skeleton.config.get_text_config()
    number = len(layers)
    stays = [int(each) for each in kept]
    wanted = {}
    for name, shape in shapes_of(model.skeleton).items():
        inside = re.match(rf"{re.escape(layers.name)}\.(\d+)\.(.*)", name)
        if inside is None:
            wanted[name] = shape
        elif int(inside[1]) in stays:
            wanted[f"{layers.name}.{stays.index(int(inside[1]))}.{inside[2]}"] = shape
    fields = []
    values = dict(config.to_dict())
    changes = Changes()
    path = partial(field_path, model.skeleton, model.checkpoint.config)
    for name, value in values.items():
        if type(value) is int and value == number and "layer" in name:
            fields.append(name)
        elif name == "first_k_dense_replace" and type(value) is int:
            changes[path(name)] = sum(each < value for each in stays)
        elif (
            isinstance(value, list)
            and "layer" in name
            and value
            and all(type(each) is int for each in value)
        ):
            if len(value) != number or max(value) > 1:  # numbers of layers; else a choice for each
                changes[path(name)] = [stays.index(each) for each in value if each in stays]
            else:
                changes[path(name)] = [value[each] for each in stays]
        elif isinstance(value, list) and len(value) == number and "token" not in name:
            changes[path(name)] = [value[each] for each in stays]
    # The length of a list may be the number.
    by_field = [{path(field): len(stays)} | changes for field in fields] or [changes]
    every = [tried | _dense_by_name(config, stays, path) for tried in by_field]
    for tried in [*by_field, *every]:
        if smaller_model(model.skeleton, model.checkpoint.config, tried) == wanted:
            return tried
    raise UserError(
        f"--structure layers: no number in config.json gives {type(model.skeleton).__name__} these "
        f"{len(stays)} of its {number} layers."
    )


def _dense_by_name(
    config: Any, stays: Sequence[int], path: Callable[[str], tuple[str, ...]]
) -> Changes:
    """A list of the dense layers of a mixture in place of a step between its sparse ones; empty
    if its config has none.
    """
    step = getattr(config, "decoder_sparse_step", None)
    listed = getattr(config, "mlp_only_layers", None)
    if not isinstance(step, int) or not isinstance(listed, list):
        return {}
    dense = [place for place, each in enumerate(stays) if each in listed or (each + 1) % step]
    return {path("decoder_sparse_step"): 1, path("mlp_only_layers"): dense}


def check_layers(model: UnitModel) -> None:
    """Raise UserError if neither the first nor the middle layer can go, before anything is
    calibrated.
    """
    number = len(model.units[0])
    for gone in (0, number // 2):
        try:
            layer_changes(model, np.delete(np.arange(number), gone))
        except UserError:
            continue
        return
    raise UserError(
        f"--structure layers: the config of {type(model.skeleton).__name__} gives the kinds of its "
        "layers by a pattern, so that no layer can go by itself. Use --structure neurons, or leave "
        "it out to prune weights."
    )


def layer_sums(
    runner: BlockwiseModel, layers: Layers, tokens: Tensor, batch_size: int
) -> dict[str, Tensor]:
    """How much each layer changes the hidden states: the sum over tokens of 1 - cos(input, output),
    and their number.

    Args:
        runner: the dense model.
        layers: its layers.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.

    Returns:
        float64, shape (2, layers), by the name of the list.
    """
    batches = own_batches(tokens, batch_size)
    sums = torch.zeros(2, len(layers), dtype=torch.float64)
    with runner.walk(batches, "layers") as walk:
        for step in walk.steps():
            for number, batch in enumerate(batches):
                entered = walk.hidden.get(number, execution_device(step.block)).clone()
                left = step.output(number, walk.hidden, isolated=False)
                change = (
                    1 - functional.cosine_similarity(entered.float(), left.float(), dim=-1)
                ).clamp(min=0)
                sums[0, step.index] += change.double().sum().cpu()
                sums[1, step.index] += change.numel()
                walk.hidden.put(number, left)
                walk.advance(batch)
    return sums_of_ranks({layers.name: sums}, "its hidden states")


@contextmanager
def passed_by(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside this context, these decoder blocks return their hidden states unchanged."""

    def unchanged(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(unchanged, with_kwargs=True))
        yield
