"""The structure of a model: its layers, their weights in the checkpoint, and the shapes of the parameters in its blocks."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emp_llm.architecture.layers import Layer, stored_layers
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrix import Matrix
from emp_llm.common.errors import UserError
from emp_llm.common.wording import count_of, shortened_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """The layers of a model and their stored weights.

    Attributes:
        layers: in the model's order.
        stored_names: parameter -> stored tensor, for parameters stored one to one.
        block_shapes: parameter -> shape in the model, for the parameters of decoder blocks.
        shapes: parameter -> shape in the model, if the model's class is known.
        experts: name of an expert's layer -> its stored matrix.
    """

    layers: list[Layer]
    stored_names: dict[str, str]
    block_shapes: dict[str, Shape]
    shapes: dict[str, Shape] = field(default_factory=dict)
    experts: dict[str, Matrix] = field(default_factory=dict)


def structure_of_model(model: "PreTrainedModel", checkpoint: Checkpoint, blocks: str | None = None) -> Structure:
    """The structure of a model, or of its skeleton.

    Args:
        model: of any class of transformers.
        checkpoint: its weights.
        blocks: name of the list of decoder blocks; None: detected.

    Raises:
        UserError: the model has no decoder blocks, or the checkpoint lacks some of its weights.
    """
    from emp_llm.architecture.blocks import find_blocks
    from emp_llm.architecture.experts import find_stacks
    from emp_llm.architecture.model_layers import model_layers
    from emp_llm.architecture.stored_names import find_names

    path, modules = find_blocks(model, blocks)
    stored = find_names(model, checkpoint, find_stacks(model, blocks))
    _refuse_missing(checkpoint, stored.missing)
    layers = model_layers(model, blocks) + stored.experts
    order = {name: number for number, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return Structure(
        layers=sorted(layers, key=lambda layer: order.get(layer.parameter, len(order))),
        stored_names=stored.names,
        block_shapes={f"{path}.{name}": tuple(parameter.shape) for name, parameter in modules.named_parameters()},
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)},
        experts=stored.matrices,
    )


def structure_of_names(checkpoint: Checkpoint) -> Structure:
    """The structure derived from the names in a checkpoint, for a model without a known class."""
    layers = stored_layers(checkpoint)
    numbered = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if re.search(r"(^|\.)\d+\.", name)}
    return Structure(layers, {f"{layer.name}.weight": f"{layer.name}.weight" for layer in layers}, numbered)


def _refuse_missing(checkpoint: Checkpoint, missing: list[str]) -> None:
    """Raise UserError if weights of the model are missing in its checkpoint."""
    if missing:
        raise UserError(
            f"{checkpoint.folder}: {count_of(len(missing), 'weight')} of the model {'is' if len(missing) == 1 else 'are'} "
            f"missing: {shortened_list(missing)}. The checkpoint is incomplete; download it again."
        )
