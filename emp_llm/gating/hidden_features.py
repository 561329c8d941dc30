"""The layers that read the hidden features of a model's MLPs (down_proj, fc2, c_proj), found by their shapes."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.models.layers import Layer
from emp_llm.models.modules import ExpertStack, find_stacks, inputs_of, model_layers


@dataclass(frozen=True)
class HiddenReader:
    """A layer that maps the hidden features of an MLP back to the model's hidden states.

    Attributes:
        name: of the module; for all experts of a block, of the parameter that holds their matrices.
        width: number of hidden features.
        transposed: of the experts' matrices, as for `ExpertStack`; None for a module.
    """

    name: str
    width: int
    transposed: bool | None = None


@dataclass(frozen=True)
class _Map:
    """A matrix of an MLP by its shape; `reader` is what it would be."""

    inputs: int
    outputs: int
    reader: HiddenReader


def hidden_readers(model: PreTrainedModel) -> list[HiddenReader]:
    """The readers of all MLPs in the decoder blocks of the language tower, in the model's order; experts included.

    An MLP is the linear layers of a block, without attention and routers, that one module holds. One of them maps hidden states
    to hidden features, or to as many features and as many gates; its reader is the last layer that maps these features back.

    Raises:
        UserError: there is none.
    """
    groups: dict[str, list[_Map]] = {}
    for layer in model_layers(model):
        if layer.kind == "mlp" and layer.tower == "language":
            groups.setdefault(layer.name.rpartition(".")[0], []).append(_map_of_layer(model, layer))
    for stack in find_stacks(model).values():
        if stack.tower == "language":
            groups.setdefault(stack.module, []).append(_map_of_stack(stack))
    size = getattr(model.config.get_text_config(), "hidden_size", None)
    found = [reader for maps in groups.values() if (reader := _reader_of(maps, size)) is not None]
    if not found:
        raise UserError(
            f"--activation-emp: {type(model).__name__} has no MLP with hidden features in its blocks (a linear layer that maps "
            "hidden states to features, and one that maps them back). Leave the option out."
        )
    return found


def _map_of_layer(model: nn.Module, layer: Layer) -> _Map:
    inputs, module = inputs_of(model, layer), model.get_submodule(layer.name)
    outputs: Any = module.out_features if isinstance(module, nn.Linear) else module.nf
    return _Map(inputs, int(outputs), HiddenReader(layer.name, inputs))


def _map_of_stack(stack: ExpertStack) -> _Map:
    return _Map(stack.inputs, stack.outputs, HiddenReader(stack.name, stack.inputs, bool(stack.transposed)))


def _reader_of(maps: list[_Map], size: int | None) -> HiddenReader | None:
    """The reader of an MLP's features: the last matrix that maps back what another one made.

    Args:
        maps: the matrices of the MLP.
        size: of the hidden states; None if the config does not tell it.
    """
    for place in range(len(maps) - 1, -1, -1):
        last, others = maps[place], maps[:place] + maps[place + 1 :]
        sources = [each for each in others if each.inputs == last.outputs and each.outputs in (last.inputs, 2 * last.inputs)]
        if sources and size in (None, last.outputs):
            return last.reader
    return None
