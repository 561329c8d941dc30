"""Calibration passes: the whole model at once, or block by block; and what a block is shown.

dense: every block sees what the dense model gives it, as in one ordinary forward pass. pruned: once a block's norms are
collected its targets are masked, and the batches pass through it again to give the next block what the pruned model would
(Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023, do it so).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from emp_llm.models.activations import Activations
from emp_llm.models.blocks import body_of, find_blocks
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.errors import UserError
from emp_llm.models.hidden import Place, check_place
from emp_llm.models.input_sums import InputSums, input_hooks
from emp_llm.models.layers import Layer, weight_of
from emp_llm.models.loading import input_device
from emp_llm.models.memory import enough_memory
from emp_llm.models.progress import Progress
from emp_llm.models.pruning import Pruner
from emp_llm.models.ranks import ranks
from emp_llm.models.residency import execution_device, is_offloaded
from emp_llm.models.targets import Target

Mode = Literal["auto", "model", "blocks"]
Propagate = Literal["dense", "pruned"]


@dataclass(frozen=True)
class Execution:
    """How the calibration passes are run.

    Attributes:
        mode: the whole model at once or block by block; auto: by blocks where any part of the model is offloaded.
        propagate: what each block is shown.
        hidden_states: where they are kept between blocks.
        blocks: name of the list of decoder blocks; None: found by structure.
    """

    mode: Mode = "auto"
    propagate: Propagate = "dense"
    hidden_states: Place = "auto"
    blocks: str | None = None

    def check(self) -> None:
        """Raise UserError for what is no execution, or does not go together."""
        if self.mode not in get_args(Mode):
            raise UserError(f"--execution {self.mode!r} is none of {', '.join(get_args(Mode))}.")
        if self.propagate not in get_args(Propagate):
            raise UserError(f"--propagate {self.propagate!r} is none of {', '.join(get_args(Propagate))}.")
        if self.mode == "model" and self.propagate == "pruned":
            raise UserError("--propagate pruned goes block by block; leave out --execution model.")
        check_place(self.hidden_states)

    def by_blocks(self, model: PreTrainedModel) -> bool:
        """Whether this model is run block by block."""
        return self.mode == "blocks" or self.propagate == "pruned" or (self.mode == "auto" and is_offloaded(model))

    def calibrate(
        self,
        model: PreTrainedModel,
        layers: list[Layer],
        tokens: Tensor,
        batch_size: int,
        pruner: Pruner | None = None,
        progress: Progress | None = None,
    ) -> Activations:
        """Collect norms as `calibrate_model` does; `about` says how it was done. `pruner`: for pruned propagation."""
        if not self.by_blocks(model):
            norms = calibrate_model(model, layers, tokens, batch_size, self.blocks)
            return replace(norms, about={"execution": "model", "propagate": "dense"})
        runner = BlockwiseModel(model, self.blocks, self.hidden_states)
        masker = pruner if self.propagate == "pruned" else None
        return calibrate_blocks(runner, layers, tokens, batch_size, masker, progress)


def own_batches(tokens: Tensor, batch_size: int) -> list[Tensor]:
    """This rank's share of the batches, the same batches that one rank would make.

    Raises:
        UserError: there are fewer batches than ranks.
    """
    batches = torch.split(tokens, batch_size)
    if len(batches) < ranks().count:
        raise UserError(
            f"--batch-size {batch_size}: {tokens.shape[0]} samples are {len(batches)} batches, fewer than the "
            f"{ranks().count} ranks; lower it, or take fewer ranks."
        )
    return list(ranks().part(batches))


def calibrate_model(
    model: PreTrainedModel, layers: list[Layer], tokens: Tensor, batch_size: int = 4, blocks: str | None = None
) -> Activations:
    """Run the calibration tokens through a model and collect the norms of its layers' inputs.

    Args:
        model: a causal language model, on any devices.
        layers: linear layers, and matrices of experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences to a forward pass.
        blocks: name of the list of decoder blocks; None: found by structure.

    Returns:
        Norms over all tokens of all samples; `about` holds nothing yet.

    Raises:
        UserError: a norm is not finite, or memory runs out.
    """
    wants_head = any(layer.kind == "head" for layer in layers)
    body = model if wants_head else body_of(model)
    device = input_device(model)
    with input_hooks(model, layers) as memory, _whereabouts(model, blocks) as where, torch.no_grad():
        batches = own_batches(tokens, batch_size)
        total, quiet = sum(batch.numel() for batch in batches), None if ranks().main else True
        bar = tqdm(total=total, desc="calibrate", unit="tok", unit_scale=True, disable=quiet)
        for batch in batches:
            with enough_memory(where, batch):
                body(input_ids=batch.to(device), use_cache=False)
            bar.update(batch.numel())
        bar.close()
    memory.reduce()
    memory.complete(model, layers)
    return memory.activations(layers)


@contextmanager
def _whereabouts(model: PreTrainedModel, blocks: str | None) -> Iterator[Callable[[], tuple[str, torch.device]]]:
    """While this lasts, what it yields says which decoder block was entered last, and its device."""
    path, found = find_blocks(model, blocks)
    last = f"{type(model).__name__} before its first block", input_device(model)

    def enter(block: nn.Module, args: object, name: str) -> None:
        nonlocal last
        last = name, execution_device(block)

    handles = [b.register_forward_pre_hook(partial(enter, name=f"{path}.{i}")) for i, b in enumerate(found)]
    try:
        yield lambda: last
    finally:
        for handle in handles:
            handle.remove()


def calibrate_blocks(
    runner: BlockwiseModel,
    layers: list[Layer],
    tokens: Tensor,
    batch_size: int = 4,
    pruner: Pruner | None = None,
    progress: Progress | None = None,
) -> Activations:
    """Collect the norms of layers' inputs block by block.

    Args:
        runner: the model.
        layers: linear layers, and matrices of experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences to a forward pass.
        pruner: for pruned propagation: decides the masks of its targets; None: dense propagation.
        progress: where finished blocks are noted, and taken up again.

    Returns:
        Norms over all tokens of all samples; `about` tells the execution, propagation and the place of the hidden states.

    Raises:
        UserError: a norm is not finite, memory runs out, or the model cannot be run block by block.
    """
    with propagated(runner, layers, tokens, batch_size, pruner, progress) as (memory, walk):
        place = walk.place
    about = {"execution": "blocks", "propagate": "dense" if pruner is None else "pruned", "hidden_states": place}
    return replace(memory.activations(layers), about=about)


@contextmanager
def propagated(
    runner: BlockwiseModel,
    layers: list[Layer],
    tokens: Tensor,
    batch_size: int,
    pruner: Pruner | None,
    progress: Progress | None = None,
) -> Iterator[tuple[InputSums, Walk]]:
    """As `calibrate_blocks`; yields the sums and the walk at its end, for whoever wants the logits too."""
    model = runner.model
    batches = own_batches(tokens, batch_size)
    runner.prepare(batches[0])  # before there are hooks: what it runs does not count
    with input_hooks(model, layers) as memory, runner.walk(batches, "calibrate") as walk:
        memory.reduce()  # of the layers before the first block
        first = progress.restore(memory, walk) if progress is not None else 0
        for step in walk.steps(first):
            targets = [t for t in pruner.targets if t.name.startswith(f"{step.name}.")] if pruner is not None else []
            step.run(advance=not targets)
            seen = [name for name in memory.sums if name.startswith(f"{step.name}.")]
            memory.reduce(seen)  # so that the masks of all ranks keep in step
            memory.norms(seen)  # not finite: stop here
            memory.complete(model, [layer for layer in layers if layer.name.startswith(f"{step.name}.")])
            if pruner is not None and targets:
                memory.asleep = True
                masks = {t: pruner.mask(t, memory.norm(t.name), memory.tokens_of(t.name)) for t in targets}
                with _masked(model, masks):
                    step.run()
                memory.asleep = False
            if progress is not None:
                progress.save(step.index + 1, memory, walk)
        memory.asleep = True
        _finish(runner, walk, layers, memory)
        yield memory, walk


@contextmanager
def _masked(model: PreTrainedModel, masks: dict[Target, Tensor]) -> Iterator[None]:
    """While this lasts, weights are zero where their masks are false."""
    dense: list[tuple[Tensor, Tensor]] = []
    try:
        for target, mask in masks.items():
            weight = weight_of(model, target.layer)
            dense.append((weight, weight.clone()))
            weight.masked_fill_(~mask.to(weight.device), 0)
        yield
    finally:
        for weight, before in dense:
            weight.copy_(before)


def _finish(runner: BlockwiseModel, walk: Walk, layers: list[Layer], memory: InputSums) -> None:
    """Layers that come after the blocks (a projection of the output, the head, if it was named) have not been called yet."""
    left = [layer for layer in layers if layer.name not in memory.input_of and layer.block is None]
    if not left:
        return
    model = runner.model
    body = model if any(layer.kind == "head" for layer in left) else body_of(model)
    with input_hooks(model, left) as after:
        for number in range(len(walk.batches)):
            walk.tail(number, body)
    after.reduce()
    memory.add(after)
