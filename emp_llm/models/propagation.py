"""Calibration block by block, and what a block is shown: the dense model's activations, or the pruned model's.

dense: every block sees what the dense model gives it, as in one ordinary forward pass. pruned: once a block's norms are
collected its targets are masked, and the batches pass through it again to give the next block what the pruned model would
(Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023, do it so).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.models.activations import Activations, InputSums, calibrate_model, input_hooks, own_batches
from emp_llm.models.blocks import body_of
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.errors import UserError
from emp_llm.models.hidden import Place, check_place
from emp_llm.models.progress import Progress
from emp_llm.models.pruning import Pruner
from emp_llm.models.residency import is_offloaded
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
        layers: list[str],
        tokens: Tensor,
        batch_size: int,
        pruner: Pruner | None = None,
        progress: Progress | None = None,
    ) -> Activations:
        """Collect norms as `calibrate_model` does; `about` says how it was done. `pruner`: for pruned propagation."""
        if not self.by_blocks(model):
            norms = calibrate_model(model, layers, tokens, batch_size)
            return Activations(norms.norms, norms.input_of, {"execution": "model", "propagate": "dense"})
        runner = BlockwiseModel(model, self.blocks, self.hidden_states)
        masker = pruner if self.propagate == "pruned" else None
        return calibrate_blocks(runner, layers, tokens, batch_size, masker, progress)


def calibrate_blocks(
    runner: BlockwiseModel,
    layers: list[str],
    tokens: Tensor,
    batch_size: int = 4,
    pruner: Pruner | None = None,
    progress: Progress | None = None,
) -> Activations:
    """Collect the norms of layers' inputs block by block.

    Args:
        runner: the model.
        layers: names of linear layers.
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
    return Activations(memory.norms(), memory.input_of, about)


@contextmanager
def propagated(
    runner: BlockwiseModel,
    layers: list[str],
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
        first = progress.restore(memory, walk) if progress is not None else 0
        for step in walk.steps(first):
            targets = [t for t in pruner.targets if t.name.startswith(f"{step.name}.")] if pruner is not None else []
            step.run(advance=not targets)
            seen = [name for name in memory.sums if name.startswith(f"{step.name}.")]
            memory.reduce(seen)  # so that the masks of all ranks keep in step
            memory.norms(seen)  # not finite: stop here
            if pruner is not None and targets:
                memory.asleep = True
                with _masked(model, {target: pruner.mask(target, memory.norm(target.name)) for target in targets}):
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
            weight = model.get_submodule(target.name).weight.data
            dense.append((weight, weight.clone()))
            weight.masked_fill_(~(mask.T if target.matrix.transposed else mask).to(weight.device), 0)
        yield
    finally:
        for weight, before in dense:
            weight.copy_(before)


def _finish(runner: BlockwiseModel, walk: Walk, layers: list[str], memory: InputSums) -> None:
    """Layers that come after the blocks (a projection of the output, the head, if it was named) have not been called yet."""
    left = [name for name in layers if name not in memory.input_of and not name.startswith(f"{runner.path}.")]
    if not left:
        return
    model = runner.model
    head = model.get_output_embeddings()
    body = model if any(model.get_submodule(name) is head for name in left) else body_of(model)
    with input_hooks(model, left) as after:
        for number in range(len(walk.batches)):
            walk.tail(number, body)
    after.reduce()
    memory.add(after)
