"""Whole decoder layers: found, scored by how much each changes its input, and removed."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.common.errors import RefusedError, UserError, count_of
from emp_llm.common.machine import in_float64
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.modules import find_blocks
from emp_llm.models.offload import execution_device
from emp_llm.structure.units import (
    Changes,
    Cuts,
    Indices,
    Scores,
    UnitModel,
    Units,
    finite_sums_of_ranks,
)


@dataclass(frozen=True, eq=False)
class Layers(Units):
    """The decoder layers of a model, as the units of one group.

    Attributes:
        stored: a stored tensor of a layer -> its number, and the start and end of the number in the
            name. A layer that predicts several tokens follows the others, has a higher number, and
            stays.
    """

    kind = "layers"
    sizes_known = True

    stored: dict[str, tuple[int, int, int]]

    @classmethod
    def find(cls, model: UnitModel, blocks: str | None) -> list[Self]:
        architecture = model.architecture
        path, modules = find_blocks(model.skeleton, blocks)
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
                        f"--structure layers: {stored} does not name its layer, or layers share "
                        "it, so none can go by itself. Leave out --structure to prune weights."
                    )
                prefixes[before[1]] = None
        numbered = {}
        for prefix in prefixes:
            for tensor in architecture.checkpoint.tensors:
                match = re.match(rf"{re.escape(prefix)}(\d+)\.", tensor)
                if match is not None:
                    numbered[tensor] = (int(match[1]), match.start(1), match.end(1))
        name = type(model.skeleton).__name__
        count = len(modules)
        if count < 2:
            raise UserError(f"--structure layers: {name} has {count} decoder layer; none can go.")
        layers = cls(
            name=path,
            role=path,
            block=0,
            places=np.zeros(count, dtype=np.int64),
            least=1,
            targets=[
                target
                for target in architecture.select("all-linear")
                if target.layer.block is not None
            ],
            stored=numbered,
        )
        # Before anything is calibrated.
        without = (np.delete(np.arange(count), number) for number in (0, count // 2))
        if all(layers._fitting(model, kept) is None for kept in without):
            raise UserError(
                f"--structure layers: the config of {name} gives the kinds of its layers by a "
                "pattern, so that no layer can go by itself. Use --structure neurons, or leave it "
                "out to prune weights."
            )
        return [layers]

    def line(self, count: int) -> str:
        return f"{count_of(len(self), 'decoder layer')} ({self.name})"

    @classmethod
    def sums(
        cls, runner: BlockwiseModel, units: Sequence[Units], tokens: Tensor, batch_size: int
    ) -> dict[str, Tensor]:
        """How much each layer changes the hidden states: the sum over tokens of 1 - cos(input,
        output), and their number. float64, shape (2, layers), by the name of the list.
        """
        (layers,) = units
        batches = own_batches(tokens, batch_size)
        sums = torch.zeros(layers.collected_shape, dtype=torch.float64)
        with runner.walk(batches, "layers") as walk:
            for step in walk.steps():
                for number, batch in enumerate(batches):
                    entered = walk.hidden.get(number, execution_device(step.block)).clone()
                    left = step.output(number, walk.hidden, isolated=False)
                    similarity = functional.cosine_similarity(entered.float(), left.float(), dim=-1)
                    change = (1 - similarity).clamp(min=0)
                    sums[0, step.index] += in_float64(change).sum().cpu()
                    sums[1, step.index] += change.numel()
                    walk.hidden.put(number, left)
                    walk.advance(batch)
        return finite_sums_of_ranks({layers.name: sums}, "its hidden states")

    @property
    def collected_shape(self) -> tuple[int, ...]:
        return 2, len(self)

    def score_of_sums(self, criterion: str, sums: Scores) -> Scores:
        change, tokens = sums
        return change / np.maximum(tokens, 1)  # type: ignore[no-any-return]

    def cut(self, model: UnitModel, kept: Indices, cuts: Cuts) -> None:
        gone = self.gone(kept)
        for tensor, (number, start, end) in self.stored.items():
            if number in gone:
                cuts.names[tensor] = None
            else:
                new = number - np.count_nonzero(gone < number)
                if new != number:
                    cuts.names[tensor] = f"{tensor[:start]}{new}{tensor[end:]}"

    @classmethod
    def config_changes(cls, model: UnitModel, kept: Sequence[Indices]) -> Changes:
        (layers,) = cls.among(model.units)
        changes = layers._fitting(model, kept[0])
        if changes is None:
            name = type(model.skeleton).__name__
            raise RefusedError(
                f"--structure layers: no number in config.json gives {name} these {len(kept[0])} "
                f"of its {len(layers)} layers. Give another --sparsity, or use --structure neurons."
            )
        return changes

    def _fitting(self, model: UnitModel, kept: Indices) -> Changes | None:
        """The fields of config.json that change if only some layers stay; None if no such change
        gives a model of these layers.

        The number of layers, lists with a value for each layer, lists of numbers of layers, and the
        number of dense layers at the start of a mixture.
        """
        stays = kept.tolist()
        shapes = {}
        for name, shape in model.shapes().items():
            inside = re.match(rf"{re.escape(self.name)}\.(\d+)\.(.*)", name)
            if inside is None:
                shapes[name] = shape
            elif int(inside[1]) in stays:
                shapes[f"{self.name}.{stays.index(int(inside[1]))}.{inside[2]}"] = shape
        counts = []
        changes = Changes()
        for name, value in model.config.to_dict().items():
            path = model.path(name)
            numbers = isinstance(value, list) and all(type(number) is int for number in value)
            if type(value) is int and value == len(self) and "layer" in name:
                counts.append(path)
            elif name == "first_k_dense_replace" and type(value) is int:
                changes[path] = sum(number < value for number in stays)
            elif numbers and value and "layer" in name:
                if len(value) != len(self) or max(value) > 1:  # numbers of layers
                    changes[path] = [stays.index(number) for number in value if number in stays]
                else:  # a choice for each
                    changes[path] = [value[number] for number in stays]
            elif isinstance(value, list) and len(value) == len(self) and "token" not in name:
                changes[path] = [value[number] for number in stays]
        # The length of a list may be the number.
        tried = [{path: len(stays)} | changes for path in counts] or [changes]
        tried += [by_count | _dense_by_name(model, stays) for by_count in tried]
        return next((fields for fields in tried if model.shapes_with(fields) == shapes), None)

    def without(self, model: PreTrainedModel, kept: Indices) -> AbstractContextManager[Any]:
        _, modules = find_blocks(model, self.name)
        return _passed_by([modules[number] for number in self.gone(kept)])

    def remedy(self, keeps_shapes: bool) -> str:
        return (
            "Its layers depend on their number in a way that is not known here. Please report the "
            "class of the model."
        )


def _dense_by_name(model: UnitModel, stays: Sequence[int]) -> Changes:
    """A list of the dense layers of a mixture in place of a step between its sparse ones; empty
    if its config has none.
    """
    step = getattr(model.config, "decoder_sparse_step", None)
    listed = getattr(model.config, "mlp_only_layers", None)
    if not isinstance(step, int) or not isinstance(listed, list):
        return {}
    dense = [place for place, number in enumerate(stays) if number in listed or (number + 1) % step]
    return {model.path("decoder_sparse_step"): 1, model.path("mlp_only_layers"): dense}


@contextmanager
def _passed_by(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside this context, these decoder blocks return their hidden states unchanged."""

    def unchanged(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(unchanged, with_kwargs=True))
        yield
