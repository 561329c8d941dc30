"""The dense model and the written one side by side: the same logits, and size and speed of both."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.common.progress import progress_bar
from emp_llm.models.modules import weight_of
from emp_llm.models.offload import input_device
from emp_llm.models.placement import max_context
from emp_llm.structure.choice import Choice

_PROMPT = 512  # tokens
_ROUNDS = 7
_SECONDS = 15.0  # no new round of passes begins after this time
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class SideBySide:
    """Attributes are those of `records.structure`: numbers of the dense and of the written model."""

    tokens: int
    difference: float
    flops: tuple[float, float]
    speed: tuple[float, float]


def side_by_side(
    dense: PreTrainedModel, written: PreTrainedModel, choices: Sequence[Choice], fitted: Callable[[str], Tensor | None]
) -> SideBySide:
    """Compare the models on one prompt, and time them in turn.

    Args:
        dense: the dense model; it is changed and restored.
        written: loaded from the written checkpoint.
        choices: the kept units.
        fitted: returns the fitted weights of a layer, shape (outputs, inputs), or None.

    Raises:
        UserError: the models compute different logits.
    """
    length = min(_PROMPT, max_context(dense.config) or _PROMPT)
    ids = torch.randint(0, dense.config.get_text_config().vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with _without_units(dense, choices, fitted):
        wanted = _logits(dense, ids)
    got = _logits(written, ids)
    difference = float((wanted - got).norm() / wanted.norm())
    if not difference <= _LIMITS.get(dense.dtype, 0.1):
        raise UserError(
            f"the written model does not compute what the dense model does without its removed parts: the logits differ by "
            f"{difference:.2g} of their norm. Its attention may depend on the number of heads; add --keep-shapes."
        )
    flops = (_flops(dense, ids), _flops(written, ids))
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    with progress_bar(2 * _ROUNDS, "speed", "pass") as bar:
        for number in range(_ROUNDS):
            if number > 1 and time.perf_counter() - start > _SECONDS:
                break
            for model, own in zip((dense, written), times, strict=True):
                own.append(_seconds(model, ids))
                bar.update(1)
    speeds = [length / statistics.median(own) for own in times]
    return SideBySide(length, difference, (flops[0] / length, flops[1] / length), (speeds[0], speeds[1]))


@contextmanager
def _without_units(model: PreTrainedModel, choices: Sequence[Choice], fitted: Callable[[str], Tensor | None]) -> Iterator[None]:
    """Inside this context, the columns that read removed units are zero, and the others have their fitted values."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for choice in choices:
            weight, new = weight_of(model, choice.units.output), fitted(choice.units.name)
            before.append((weight, weight.clone()))
            if new is not None:
                weight.copy_(new)
            gone = torch.ones(weight.shape[1], dtype=torch.bool)
            gone[torch.from_numpy(choice.units.columns_of(choice.kept))] = False
            weight[:, gone.to(weight.device)] = 0
        yield
    finally:
        for weight, values in before:
            weight.copy_(values)


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids.to(input_device(model)), use_cache=False).logits
    return logits.float().cpu()


def _flops(model: PreTrainedModel, ids: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        _logits(model, ids)
    return float(counter.get_total_flops())


def _seconds(model: PreTrainedModel, ids: Tensor) -> float:
    device = input_device(model)
    start = time.perf_counter()
    with torch.no_grad():
        model(ids.to(device), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
