"""Input norms from batches that a user gives: the model is called with each of them."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.architecture.blocks import body_of
from emp_llm.architecture.layers import Layer
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.input_norms import input_hooks
from emp_llm.common.progress_bars import progress_bar
from emp_llm.execution.offload import execution_device
from emp_llm.execution.text_inputs import decoder_ids, reads_twice
from emp_llm.in_memory.calibration_data import batches_of, size_of


def norms_of_batches(model: nn.Module, layers: list[Layer], data: Iterable[Any]) -> tuple[Activations, int]:
    """The input norms of a model's layers over batches.

    Args:
        model: on any devices.
        layers: linear layers, and matrices of experts.
        data: as for `batches_of`.

    Returns:
        The norms, without their origin, and the number of tokens (of rows, for a model without token ids).

    Raises:
        UserError: a batch cannot be used, or a norm is not finite.
    """
    wants_head = any(layer.kind in ("head", "other") for layer in layers)
    body = model if wants_head or not isinstance(model, PreTrainedModel) else body_of(model)
    device, tokens = execution_device(model), 0
    bar = progress_bar(size_of(data) or 0, "calibrate", "batch")
    with input_hooks(model, layers) as collected, in_evaluation_mode(model), torch.no_grad(), bar:
        for arguments, counted in batches_of(data):
            collected.counted = counted
            _call(body, arguments, device)
            first = next(iter(arguments.values()))
            tokens += int(counted.sum()) if counted is not None else _tokens(first)
            bar.update(1)
    collected.complete(model, layers)
    return collected.activations(layers), tokens


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside this context; afterwards every module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _call(body: nn.Module, arguments: dict[str, Any], device: torch.device) -> None:
    """Call a model with a batch, moved to its device. Arguments that it does not take are left out."""
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    if not isinstance(body, PreTrainedModel):
        if set(moved) == {""}:
            body(moved[""])
        else:
            body(**moved)
        return
    if "" in moved:
        moved["input_ids"] = moved.pop("")
    if reads_twice(body) and "input_ids" in moved and "decoder_input_ids" not in moved:
        moved["decoder_input_ids"] = decoder_ids(body, moved["input_ids"])
    parameters = inspect.signature(body.forward).parameters
    if not any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
        moved = {name: value for name, value in moved.items() if name in parameters}
    body(**moved, use_cache=False)


def _tokens(first: Any) -> int:
    """The number of tokens of a batch of token ids, or of rows of another tensor."""
    if not isinstance(first, Tensor):
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[:-1].numel()
