"""The structure of a model: its layers, their weights in the checkpoint, and the shapes of the parameters in its blocks."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emp_llm.architecture.layers import Layer, Tower, named_tower, stored_layers
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError, count_of, shortened_list

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
        towers: name of a module outside the language tower -> its tower; empty for a model of text alone.
        language: name of the module of the language tower; empty if it is the whole model.
        main: the tower of the decoder blocks: of the language model, or of the list that --blocks names.
    """

    layers: list[Layer]
    stored_names: dict[str, str]
    block_shapes: dict[str, Shape]
    shapes: dict[str, Shape] = field(default_factory=dict)
    experts: dict[str, Matrix] = field(default_factory=dict)
    towers: dict[str, Tower] = field(default_factory=dict)
    language: str = ""
    main: Tower = "language"


def structure_of_model(model: "PreTrainedModel", checkpoint: Checkpoint, blocks: str | None = None) -> Structure:
    """The structure of a model, or of its skeleton.

    Args:
        model: of any class of transformers.
        checkpoint: its weights.
        blocks: name of the list of decoder blocks; None: detected.

    Raises:
        UserError: the model has no decoder blocks, or the checkpoint lacks some of its weights.
    """
    from emp_llm.architecture.blocks import block_lists
    from emp_llm.architecture.experts import find_stacks
    from emp_llm.architecture.model_layers import model_layers
    from emp_llm.architecture.stored_names import find_names

    towers = block_lists(model, blocks)
    stored = find_names(model, checkpoint, find_stacks(model, blocks))
    _refuse_missing(checkpoint, stored.missing)
    layers = model_layers(model, blocks) + stored.experts
    order = {name: number for number, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return Structure(
        layers=sorted(layers, key=lambda layer: order.get(layer.parameter, len(order))),
        stored_names=stored.names,
        block_shapes={
            f"{each.path}.{name}": tuple(parameter.shape)
            for each in towers.lists
            for name, parameter in each.modules.named_parameters()
        },
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)},
        experts=stored.matrices,
        towers=towers.others,
        language=towers.language,
        main=towers.lists[0].tower,
    )


def structure_of_names(checkpoint: Checkpoint, reads_text: bool = True) -> Structure:
    """The structure derived from the names in a checkpoint, for a model without a known class; arguments as `stored_layers`."""
    layers = stored_layers(checkpoint, reads_text)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    towers: dict[str, Tower] = {}
    for name in shapes:
        root = _root_of_tower(name) if reads_text else name
        if root is not None:
            towers[root] = named_tower(root) or "vision"
    return Structure(
        layers=layers,
        stored_names={f"{layer.name}.weight": f"{layer.name}.weight" for layer in layers},
        block_shapes={name: shape for name, shape in shapes.items() if re.search(r"(^|\.)\d+\.", name)},
        shapes=shapes,
        towers=towers,
    )


def _root_of_tower(name: str) -> str | None:
    """The shortest beginning of a name that tells a tower; None if no part of it does."""
    parts = name.split(".")
    roots = (".".join(parts[: number + 1]) for number in range(len(parts)))
    return next((root for root in roots if named_tower(root) is not None), None)


def _refuse_missing(checkpoint: Checkpoint, missing: list[str]) -> None:
    """Raise UserError if weights of the model are missing in its checkpoint."""
    if missing:
        raise UserError(
            f"{checkpoint.folder}: {count_of(len(missing), 'weight')} of the model {'is' if len(missing) == 1 else 'are'} "
            f"missing: {shortened_list(missing)}. The checkpoint is incomplete; download it again."
        )
