"""Scores of units: by their weights, or by what a pass of the text has collected; and the pass
that collects gradients (taylor).

There, all batches pass through the blocks once, and the hidden states that enter each block are
kept. Then the blocks run again in reverse order, with the gradient of the hidden states that leave
them. No gradient of a weight is computed, so that a model that cannot be trained on a machine can
still be scored there.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from emp_llm.calibration.passes import own_batches
from emp_llm.checkpoint.files import FilePool
from emp_llm.checkpoint.matrices import Matrix, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.common.machine import enough_memory, exact_device
from emp_llm.common.progress import progress_bar
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Walk, choose_place
from emp_llm.models.offload import execution_device, load_blocks
from emp_llm.structure.units import Scores, Units, finite_sums_of_ranks

BY_WEIGHTS = ("magnitude", "wanda")  # scores that read weights; all others need `Units.sums`
_CHUNK = 1 << 22  # weights read at a time


def unit_scores(
    every: Sequence[Units], criterion: str, feature: Callable[[str], Tensor | None] | None = None
) -> list[Scores]:
    """The score of every unit: float64, shape (units,), for each element of `every`.

    Args:
        every: heads and neurons, experts, or layers.
        criterion: of the recipe. Weights are read for "magnitude" and "wanda".
        feature: name of the units -> what a calibration has collected: for "wanda" the norms of the
            inputs of their last layer, shape (inputs,); else the result of `Units.sums`. None if
            there is nothing for this name.

    Raises:
        UserError: features of a layer are missing, or weights are not finite.
    """
    if criterion not in BY_WEIGHTS:
        assert feature is not None
        return [units.score_of_sums(criterion, units.collected(feature)) for units in every]
    collected = [None if feature is None else units.collected(feature) for units in every]
    weights = sum(target.matrix.numel for units in every for target in units.scored)
    scores = []
    with FilePool() as files, progress_bar(weights, "scores", "W") as bar:

        def squares(matrix: Matrix, axis: int) -> Scores:
            sums = np.zeros(matrix.columns if axis == 0 else matrix.rows)
            for first, last in matrix.row_chunks(_CHUNK):
                words = matrix.read(files.reader(matrix.stored.shard), first, last)
                values = as_tensor(words, matrix.stored.dtype).to(torch.float64)
                sums_of_chunk = values.square_().sum(axis).numpy()
                if axis == 0:
                    sums += sums_of_chunk
                else:
                    sums[first:last] = sums_of_chunk
                bar.update(words.size)
            return sums

        for units, norms in zip(every, collected, strict=True):
            score = units.score_of_weights(squares, norms)
            if not np.isfinite(score).all():
                raise UserError(
                    f"{units.name}: the weights of its {units.kind} hold NaN or infinity."
                )
            scores.append(score)
    return scores


def taylor_sums(
    runner: BlockwiseModel, units: Sequence[Units], tokens: Tensor, batch_size: int
) -> dict[str, Tensor]:
    """sum over tokens of |dL/dY * Y| for the inputs Y of each unit's last layer: float64, shape
    (inputs,), by its name.

    L is the sum of -log p(next token) over all tokens of a batch.

    Args:
        runner: the dense model.
        units: its heads and neurons.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.

    Raises:
        UserError: a sum is not finite, memory runs out, or a block passes no gradient to its
            inputs.
    """
    batches = own_batches(tokens, batch_size)
    sums = dict[str, Tensor]()
    numbers = range(len(batches))
    blocks = list(runner.blocks)
    read = [member.name for member in units]
    runner.model.requires_grad_(False)
    with runner.walk(batches, "forward") as walk:
        needed = sum(
            walk.hidden.get(number, torch.device("cpu")).nbytes for number in numbers
        ) * len(blocks)
        with closing(
            HiddenStates(choose_place(runner.hidden_states, needed, walk.device))
        ) as entered:
            for step in walk.steps():
                for number in numbers:
                    walk.hidden.copy(
                        number, entered, step.index * len(batches) + number, walk.device
                    )
                step.run()
            # From here on, the hidden states of the walk are their gradients.
            for number in numbers:
                walk.hidden.put(number, _gradient_of_loss(walk, number))
            with (
                progress_bar(len(blocks), "backward", " blocks") as bar,
                closing(load_blocks(blocks[::-1])) as loaded,
            ):
                for index, _ in zip(reversed(range(len(blocks))), loaded, strict=True):
                    names = [name for name in read if name.startswith(f"{runner.path}.{index}.")]
                    for number in numbers:
                        gradient = _backward(walk, index, number, entered, names, sums)
                        walk.hidden.put(number, gradient)
                        bar.update(1 / len(batches))
    in_order = {name: sums[name] for name in read if name in sums}
    return finite_sums_of_ranks(in_order, "its gradients", "float32 or bfloat16")


def _gradient_of_loss(walk: Walk, number: int) -> Tensor:
    """dL/dh for the hidden states h that leave the last block."""
    final = (
        walk.hidden.get(number, execution_device(walk.runner.blocks[-1])).detach().requires_grad_()
    )
    logits = walk.tail(number, final=final).logits[:, :-1]
    labels = walk.batches[number][:, 1:].to(logits.device)
    with torch.enable_grad():
        loss = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction="sum"
        )
        (gradient,) = torch.autograd.grad(loss, final)
    return gradient


def _backward(
    walk: Walk,
    index: int,
    number: int,
    entered: HiddenStates,
    names: list[str],
    sums: dict[str, Tensor],
) -> Tensor:
    """dL/dh for the hidden states h that enter a block, from that for those that leave it; adds
    to the sums of its layers.
    """
    runner = walk.runner
    block = walk.runner.blocks[index]
    where = f"{runner.path}.{index} backwards"
    device = execution_device(block)
    seen = dict[str, Tensor]()
    hooks = ExitStack()
    for name in names:

        def note(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = args[0]

        hooks.enter_context(runner.model.get_submodule(name).register_forward_pre_hook(note))
    with hooks, torch.enable_grad(), enough_memory(lambda: (where, device), walk.batches[number]):
        key = index * len(walk.batches) + number
        state = entered.get(key, device).detach().requires_grad_()
        handed = entered.handed(key, device)
        if any(tensor.is_floating_point() for tensor in handed.values()):
            raise UserError(
                f"{runner.path}.{index}: a gradient passes through what the block before hands on "
                "beside its hidden states; use another score than taylor."
            )
        output = walk.call(number, index, block, state, handed)
        upper = walk.hidden.get(number, device)
        entering, *gradients = torch.autograd.grad(
            output, [state, *seen.values()], upper, allow_unused=True
        )
    if entering is None:
        raise UserError(
            f"{runner.path}.{index}: no gradient passes through it; use another score than taylor."
        )
    for (name, inputs), gradient in zip(seen.items(), gradients, strict=True):
        if gradient is not None:
            sizes = (inputs.detach().float() * gradient.float()).abs().flatten(0, -2)
            products = sizes.to(exact_device(sizes.device)).sum(0, dtype=torch.float64).cpu()
            sums[name] = sums[name] + products if name in sums else products
    return entering
