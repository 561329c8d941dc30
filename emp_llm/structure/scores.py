"""Scores of heads and neurons: by magnitude, by activations (wanda), or by gradients block by block (taylor).

magnitude: of a head ||W_O[:, h]||_F, the norm of its columns in the output projection; of a neuron the product of the norms of
    its rows and of its column, ||gate row|| * ||up row|| * ||down column||.
wanda: the same, with every column of the last matrix multiplied by the norm of its input, ||X_j||_2.
taylor: sum over tokens and columns of |dL/dY * Y|, with Y the inputs of the last matrix (the heads' outputs, the activations of
    the neurons) and L the loss of the next token.

For taylor, all batches pass through the blocks once, and the hidden states that enter each block are kept. Then the blocks
run again in reverse order, with the gradient of the hidden states that leave them. No gradient of a weight is computed, so
that a model that cannot be trained on a machine can still be scored there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.checkpoint.files import FilePool
from emp_llm.checkpoint.matrices import Matrix, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.common.machine import enough_memory
from emp_llm.common.progress import progress_bar
from emp_llm.common.ranks import ranks
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Walk, choose_place
from emp_llm.models.layers import Layer
from emp_llm.models.offload import execution_device, loaded_blocks
from emp_llm.structure.units import Units

Scores = NDArray[np.float64]
_BLOCK = 1 << 22  # weights read at a time


def unit_scores(
    every: Sequence[Units], criterion: str, matrices: Mapping[Layer, Matrix], features: Mapping[str, Tensor] | None = None
) -> list[Scores]:
    """The score of every unit: float64, shape (units,), for each element of `every`.

    Args:
        every: heads and neurons.
        criterion: "magnitude", "wanda" or "taylor".
        matrices: the stored weights of their layers; not read for "taylor".
        features: name of an output layer -> a number for each of its inputs, shape (inputs,): norms for "wanda"; sums of
            |dL/dY * Y| for "taylor".

    Raises:
        UserError: features of a layer are missing, or weights are not finite.
    """
    numbers = [None if features is None else _feature_numbers(units, features) for units in every]
    if criterion == "taylor":
        return [each[units.columns].sum(1) for units, each in zip(every, numbers, strict=True) if each is not None]
    total = sum(matrices[layer].numel for units in every for layer in _read_layers(units))
    scores = []
    with FilePool() as files, progress_bar(total, "scores", "W") as bar:
        for units, each in zip(every, numbers, strict=True):
            squares = _squares(matrices[units.output], files, 0, bar)
            if each is not None:
                squares = squares * each**2
            score = np.sqrt(squares[units.columns].sum(1))
            if units.kind == "neurons":
                for layer, rows in units.rows.items():
                    norms = np.sqrt(_squares(matrices[layer], files, 1, bar))
                    score = score * norms[rows].prod(1)
            if not np.isfinite(score).all():
                raise UserError(f"{units.name}: the weights of its {units.kind} hold NaN or infinity.")
            scores.append(score)
    return scores


def _read_layers(units: Units) -> list[Layer]:
    return units.layers if units.kind == "neurons" else [units.output]


def _feature_numbers(units: Units, features: Mapping[str, Tensor]) -> Scores:
    """The numbers of the inputs of a layer; zeros for an expert that saw no token."""
    numbers = features.get(units.name)
    if numbers is None and units.output.routed:
        return np.zeros(units.columns.max() + 1)
    if numbers is None:
        raise UserError(f"{units.name}: the calibration did not reach it, so its {units.kind} have no scores.")
    return numbers.double().numpy(force=True)


def _squares(matrix: Matrix, files: FilePool, axis: int, bar: Any) -> Scores:
    """Sums of squared weights: of each column (axis 0), or of each row (axis 1); float64."""
    sums = np.zeros(matrix.columns if axis == 0 else matrix.rows)
    for first, last in matrix.row_chunks(_BLOCK):
        words = matrix.read(files.reader(matrix.stored.shard), first, last)
        squares = as_tensor(words, matrix.stored.dtype).to(torch.float64).square_().sum(axis).numpy()
        if axis == 0:
            sums += squares
        else:
            sums[first:last] = squares
        bar.update(words.size)
    return sums


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
    with closing(loaded_blocks(reverse)) as loaded:
        for number, block, _ in zip(reversed(range(len(reverse))), reverse, loaded, strict=True):
            yield number, block


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


def taylor_sums(runner: BlockwiseModel, every: Sequence[Units], tokens: Tensor, batch_size: int) -> dict[str, Tensor]:
    """sum over tokens of |dL/dY * Y| for the inputs Y of each unit's last layer: float64, shape (inputs,), by its name.

    Args:
        runner: the dense model.
        every: its units.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.

    Raises:
        UserError: a sum is not finite, memory runs out, or the model cannot run block by block.
    """
    sums: dict[str, Tensor] = {}

    def take(name: str, inputs: Tensor, gradient: Tensor) -> None:
        products = (inputs.float() * gradient.float()).abs().reshape(-1, inputs.shape[-1]).sum(0, dtype=torch.float64).cpu()
        sums[name] = sums[name] + products if name in sums else products

    names = [units.name for units in every]
    input_gradients(runner, own_batches(tokens, batch_size), names, take)
    shares = ranks().gather(sums)
    total = {name: sum(share[name] for share in shares) for name in names if name in shares[0]}
    for name, each in total.items():
        if not bool(torch.isfinite(each).all()):
            raise UserError(f"{name}: its gradients are not finite. Load the model with --dtype float32 or bfloat16.")
    return total
