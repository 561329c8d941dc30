"""Calibration in ordinary forward passes of the whole model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.input_norms import input_hooks
from emp_llm.common.errors import UserError
from emp_llm.common.memory import enough_memory
from emp_llm.common.progress_bars import progress_bar
from emp_llm.common.ranks import ranks
from emp_llm.common.wording import count_of
from emp_llm.models.blockwise import run_on_text
from emp_llm.models.layers import Layer
from emp_llm.models.modules import body_of, find_blocks
from emp_llm.models.offload import execution_device, input_device


def own_batches(tokens: Tensor, batch_size: int) -> list[Tensor]:
    """This rank's share of the batches. The batches do not depend on the number of ranks.

    Args:
        tokens: int64, shape (samples, length).
        batch_size: sequences per batch.

    Raises:
        UserError: there are fewer batches than ranks.
    """
    batches = torch.split(tokens, batch_size)
    if len(batches) < ranks().count:
        raise UserError(
            f"--batch-size {batch_size}: {count_of(tokens.shape[0], 'sample')} make "
            f"{count_of(len(batches), 'batch', 'batches')}, fewer than the {ranks().count} ranks. Lower it, or use fewer ranks."
        )
    return list(ranks().part(batches))


def calibrate_model(
    model: PreTrainedModel, layers: list[Layer], tokens: Tensor, batch_size: int = 4, blocks: str | None = None
) -> Activations:
    """Run the calibration tokens through a model and collect the input norms of its layers.

    Args:
        model: a causal language model, on any devices.
        layers: linear layers, and matrices of experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.
        blocks: name of the list of decoder blocks; None: detected.

    Returns:
        Norms over all tokens of all samples; `about` is empty.

    Raises:
        UserError: a norm is not finite, or memory runs out.
    """
    wants_head = any(layer.kind == "head" for layer in layers)
    body = model if wants_head else body_of(model)
    with input_hooks(model, layers) as collected, current_block(model, blocks) as where, torch.no_grad():
        batches = own_batches(tokens, batch_size)
        with progress_bar(sum(batch.numel() for batch in batches), "calibrate", "tok") as bar:
            for batch in batches:
                with enough_memory(where, batch):
                    run_on_text(model, body, batch)
                bar.update(batch.numel())
    collected.reduce()
    collected.complete(model, layers)
    return collected.activations(layers)


@contextmanager
def current_block(model: PreTrainedModel, blocks: str | None) -> Iterator[Callable[[], tuple[str, torch.device]]]:
    """Yields a function that returns the name of the decoder block that was entered last, and its device."""
    path, modules = find_blocks(model, blocks)
    last = f"{type(model).__name__} before its first block", input_device(model)

    def enter(block: nn.Module, args: object, name: str) -> None:
        nonlocal last
        last = name, execution_device(block)

    handles = [b.register_forward_pre_hook(partial(enter, name=f"{path}.{i}")) for i, b in enumerate(modules)]
    try:
        yield lambda: last
    finally:
        for handle in handles:
            handle.remove()
