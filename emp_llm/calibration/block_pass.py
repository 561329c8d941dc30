"""Calibration block by block, with dense or pruned propagation.

dense: every block sees the dense model's inputs, as in an ordinary forward pass. pruned: once a block's norms are collected,
its targets are masked and the batches pass through it again, so that the next block sees the pruned model's inputs (as in Sun
et al., A Simple and Effective Pruning Approach for Large Language Models, 2023).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.input_norms import InputSums, input_hooks
from emp_llm.calibration.resume import CalibrationProgress
from emp_llm.calibration.whole_pass import own_batches
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.layers import Layer
from emp_llm.models.modules import body_of, set_to_zero, weight_of
from emp_llm.records.source import CalibrationRecord


class Masker(Protocol):
    """Computes the masks of a block's targets from the norms of their inputs. The pruner of a run implements it."""

    @property
    def targets(self) -> Sequence[Target]:
        """The targets of all blocks."""

    @property
    def relative(self) -> bool:
        """Whether it takes the norms relative to the outputs."""

    def mask(self, target: Target, norm: Tensor | None, tokens: int | None = None) -> Tensor:
        """The mask of a target: bool, shape (outputs, inputs), true where kept.

        Args:
            target: of the current block.
            norm: float32, shape (inputs,); None if the layer was not called.
            tokens: number of tokens in the norm.
        """


def calibrate_blocks(
    runner: BlockwiseModel,
    layers: list[Layer],
    tokens: Tensor,
    batch_size: int = 4,
    masker: Masker | None = None,
    progress: CalibrationProgress | None = None,
) -> Activations:
    """Collect the input norms of layers block by block.

    Args:
        runner: the model.
        layers: linear layers, and matrices of experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.
        masker: computes the masks of a pruned propagation; None: dense propagation.
        progress: saves the state between blocks, and restores it.

    Returns:
        Norms over all tokens of all samples; `about` holds the execution, the propagation and the place of the hidden states.

    Raises:
        UserError: a norm is not finite, memory runs out, or the blocks cannot be run one at a time.
    """
    with propagated(runner, layers, tokens, batch_size, masker, progress) as (collected, walk):
        place = walk.place
    propagate = "dense" if masker is None else "pruned"
    about = CalibrationRecord(execution="blocks", propagate=propagate, hidden_states=place)
    return replace(collected.activations(layers), about=about)


@contextmanager
def propagated(
    runner: BlockwiseModel,
    layers: list[Layer],
    tokens: Tensor,
    batch_size: int,
    masker: Masker | None,
    progress: CalibrationProgress | None = None,
) -> Iterator[tuple[InputSums, Walk]]:
    """As `calibrate_blocks`; yields the sums, and the walk after the last block, from which logits can be computed."""
    model = runner.model
    batches = own_batches(tokens, batch_size)
    runner.prepare(batches[0])  # before the hooks, so that its passes do not count
    with input_hooks(model, layers) as collected, runner.walk(batches, "calibrate") as walk:
        collected.reduce()  # layers before the first block
        first = progress.restore(collected, walk) if progress is not None else 0
        for step in walk.steps(first):
            targets = [t for t in masker.targets if t.name.startswith(f"{step.name}.")] if masker is not None else []
            step.run(advance=not targets)
            seen = [name for name in collected.sums if name.startswith(f"{step.name}.")]
            collected.reduce(seen)  # so that all ranks compute the same masks
            collected.norms(seen)  # stop here if one is not finite
            collected.complete(model, [layer for layer in layers if layer.name.startswith(f"{step.name}.")])
            if masker is not None and targets:
                collected.paused = True
                norms = {t: collected.norm(t.name, masker.relative) for t in targets}
                masks = {t: masker.mask(t, norm, collected.tokens_of(t.name)) for t, norm in norms.items()}
                with _masked(model, masks):
                    step.run()
                collected.paused = False
            if progress is not None and step.index + 1 < len(runner.blocks):
                progress.save(step.index + 1, collected, walk)
        collected.paused = True
        _finish(runner, walk, layers, collected)
        yield collected, walk


@contextmanager
def _masked(model: PreTrainedModel, masks: dict[Target, Tensor]) -> Iterator[None]:
    """Inside this context, weights are zero where their masks are false."""
    dense: list[tuple[Tensor, Tensor]] = []
    try:
        for target, mask in masks.items():
            weight = weight_of(model, target.layer)
            dense.append((weight, weight.clone()))
            set_to_zero(weight, ~mask.to(weight.device))
        yield
    finally:
        for weight, before in dense:
            weight.copy_(before)


def _finish(runner: BlockwiseModel, walk: Walk, layers: list[Layer], collected: InputSums) -> None:
    """Collect the layers after the blocks: a projection of the output, and the head if it is a target."""
    remaining = [layer for layer in layers if layer.name not in collected.input_of and layer.block is None]
    if not remaining:
        return
    model = runner.model
    body = model if any(layer.kind == "head" for layer in remaining) else body_of(model)
    with input_hooks(model, remaining) as after:
        for number in range(len(walk.batches)):
            walk.tail(number, body)
    after.reduce()
    collected.add(after)
