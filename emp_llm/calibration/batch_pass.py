"""Input norms from batches: the model is called with each of them."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.input_norms import input_hooks
from emp_llm.common.errors import UserError
from emp_llm.common.progress_bars import progress_bar
from emp_llm.models.blockwise import decoder_ids, reads_twice
from emp_llm.models.layers import Layer
from emp_llm.models.modules import body_of
from emp_llm.models.offload import execution_device

Guard = Callable[[Any], AbstractContextManager[None]]  # a context around the call with a batch, given its first argument


def norms_of_batches(
    model: nn.Module, layers: list[Layer], data: Iterable[Any], *, shared: bool = False, guard: Guard = nullcontext
) -> tuple[Activations, int]:
    """The input norms of a model's layers over batches.

    Args:
        model: on any devices.
        layers: linear layers, and matrices of experts.
        data: as for `batches_of`.
        shared: the data is this rank's share; the sums of all ranks are added.
        guard: explains errors of the model.

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
            first = next(iter(arguments.values()))
            with guard(first):
                _call(body, arguments, device)
            tokens += int(counted.sum()) if counted is not None else _tokens(first)
            bar.update(1)
    if shared:
        collected.reduce()
    collected.complete(model, layers)
    return collected.activations(layers), tokens


def batches_of(data: Any) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """(keyword arguments for the model, the tokens that count) of each batch of a DataLoader or another iterable.

    A batch is a mapping with `input_ids` and optionally more, a tensor, or a list or tuple that begins with one. The tokens
    that `attention_mask` leaves out do not count. Labels are left out.

    Raises:
        UserError: a batch is none of these, or there is none.
    """
    empty = True
    for batch in data:
        empty = False
        if isinstance(batch, Mapping):
            if "input_ids" not in batch and "inputs_embeds" not in batch:
                raise UserError(f"data: a batch has no input_ids; its keys are {', '.join(map(str, batch)) or 'none'}.")
            arguments = {name: value for name, value in batch.items() if name != "labels" and value is not None}
            mask = arguments.get("attention_mask")
            padded = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
            yield arguments, mask.bool() if isinstance(mask, Tensor) and padded else None
            continue
        first = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(first, Tensor):
            raise UserError(f"data: a batch is {type(first).__name__}; give tensors, or mappings with input_ids.")
        yield {"": first}, None
    if empty:
        raise UserError("data: it gives no batches.")


def size_of(data: Any) -> int | None:
    """The number of batches, if it is known."""
    return len(data) if isinstance(data, Sized) else None


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
