"""Gradients of the loss with respect to the inputs of layers, one decoder block in memory at a time.

All batches pass through the blocks once, and the hidden states that enter each block are kept. Then the blocks run again in
reverse order, with the gradient of the hidden states that leave them. No gradient of a weight is computed, so that a model that
cannot be trained on a machine can still be scored there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.common.machine import enough_memory
from emp_llm.common.progress import progress_bar
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Walk, choose_place
from emp_llm.models.offload import execution_device, loaded_blocks

Take = Callable[[str, Tensor, Tensor], None]


def input_gradients(runner: BlockwiseModel, batches: Sequence[Tensor], layers: Sequence[str], take: Take) -> None:
    """Run the text forwards and backwards.

    The loss is the sum of -log p(next token) over all tokens of a batch.

    Args:
        runner: the model.
        batches: token ids, int64, shape (sequences, length), length > 1.
        layers: names of linear layers in the decoder blocks.
        take: called with the name of a layer, its inputs Y and dL/dY, each of shape (..., inputs), for every layer and batch.

    Raises:
        UserError: memory runs out, or a block passes no gradient to its inputs.
    """
    tokens = sum(batch.numel() for batch in batches)
    _freeze(runner.model)
    with runner.walk(batches, "forward") as walk:
        needed = sum(walk.hidden.get(n, torch.device("cpu")).nbytes for n in range(len(batches))) * len(runner.blocks)
        with closing(HiddenStates(choose_place(runner.hidden_states, needed, walk.device))) as entered:
            for step in walk.steps():
                for number in range(len(batches)):
                    entered.put(_place(walk, step.index, number), walk.hidden.get(number, walk.device).clone())
                step.run()
            for number in range(len(batches)):
                walk.hidden.put(number, _gradient_of_loss(walk, number))
            with progress_bar(tokens * len(runner.blocks), "backward", "tok") as bar:
                for index, block in _backwards(runner):
                    own = [name for name in layers if name.startswith(f"{runner.path}.{index}.")]
                    for number, batch in enumerate(batches):
                        state = entered.get(_place(walk, index, number), execution_device(block))
                        walk.hidden.put(number, _through(walk, index, block, number, state, own, take))
                        bar.update(batch.numel())


def _place(walk: Walk, index: int, number: int) -> int:
    return index * len(walk.batches) + number


def _freeze(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _backwards(runner: BlockwiseModel) -> Iterator[tuple[int, nn.Module]]:
    """The blocks with their weights loaded, the last one first."""
    reverse = list(runner.blocks)[::-1]
    with closing(loaded_blocks(reverse)) as loader:
        for (place, block), _ in zip(enumerate(reverse), loader, strict=True):
            yield len(reverse) - 1 - place, block


def _gradient_of_loss(walk: Walk, number: int) -> Tensor:
    """dL/dh for the hidden states h that leave the last block."""
    device = execution_device(walk.runner.blocks[-1])
    final = walk.hidden.get(number, device).detach().requires_grad_()
    logits = walk.tail(number, final=final).logits[:, :-1]
    labels = walk.batches[number][:, 1:].to(logits.device)
    with torch.enable_grad():
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, final)
    return gradient


def _through(walk: Walk, index: int, block: nn.Module, number: int, state: Tensor, layers: list[str], take: Take) -> Tensor:
    """dL/dh for the hidden states that enter a block, from that for those that leave it; calls `take` for its layers."""
    runner, device = walk.runner, execution_device(block)
    where = f"{runner.path}.{index} backwards"
    with torch.enable_grad(), enough_memory(lambda: (where, device), walk.batches[number]):
        state = state.detach().requires_grad_()
        with _seen_inputs(runner.model, layers) as seen:
            output = walk.call(number, index, block, state)
        used = [name for name in layers if name in seen]
        wanted = [state, *(seen[name] for name in used)]
        upper = walk.hidden.get(number, device)
        entering, *gradients = torch.autograd.grad(output, wanted, upper, allow_unused=True)
    if entering is None:
        raise UserError(f"{runner.path}.{index}: no gradient passes through it; use another score than taylor.")
    for name, gradient in zip(used, gradients, strict=True):
        if gradient is not None:
            take(name, seen[name].detach(), gradient)
    return entering


@contextmanager
def _seen_inputs(model: nn.Module, layers: list[str]) -> Iterator[dict[str, Tensor]]:
    """The inputs of layers in the calls inside this context, as parts of the graph."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0]

        return note

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
