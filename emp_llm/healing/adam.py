"""Adam for weights in two halves, which move within the backward pass, and its rate."""

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from emp_llm.checkpoint.files import (
    file_hash,
    is_intact,
    keep_only,
    read_own,
    remove,
    warn_of_damage,
    write_bytes,
    write_own,
)
from emp_llm.common.machine import available_memory
from emp_llm.common.ranks import ranks
from emp_llm.models.masks import Masks
from emp_llm.models.modules import set_to_zero

_PART = 1 << 28  # bytes of a part of a checkpoint
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_TINY = 1e-30  # a gradient may be zero
_RATE = 0.0085  # at most; only models of a few narrow blocks would have more


def rate_of(config: Any, blocks: float | None = None) -> float:
    """Adam's rate at its highest, as a share of the root mean square of a tensor's kept weights.

        min(0.0085, sqrt(2 / width) / blocks)

    Adam changes each weight by about its rate, and those of a row in step with their inputs. So a
    rate r changes the outputs of a layer with n inputs by about r * sqrt(n) of their size, and
    those of all L blocks by L times that.

    Args:
        config: of the model.
        blocks: that change at a time; None: all.
    """
    text = config.get_text_config()
    return min(_RATE, math.sqrt(2 / text.hidden_size) / (blocks or text.num_hidden_layers))


def rate_of_weight(weight: Tensor, rate: float) -> float:
    """The rate of a float32 weight: `rate` of the root mean square of its kept values."""
    kept = max(1, int(weight.count_nonzero()))
    return rate * float(weight.norm()) / math.sqrt(kept)


def share_of_rate(step: int, steps: int) -> float:
    """The share of the highest rate in a step, the first of which is 0: it rises for a twentieth of
    the steps, and falls along a cosine.
    """
    return min((step + 1) / max(1, steps // 20), 0.5 + 0.5 * math.cos(math.pi * step / steps))


@dataclass
class _Moving:
    """A parameter that moves.

    Attributes:
        parameter: of the model.
        rate: the highest one.
        lower: the lower half of a weight in two halves, int16; None: the parameter is of float32.
        steps: how often it has moved since its moments began.
        mean, square: the moments of its gradients, bfloat16; None before the first step.
    """

    parameter: nn.Parameter
    rate: float
    lower: Tensor | None
    steps: int = 0
    mean: Tensor | None = None
    square: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The weight in float32; of one in two halves, a copy."""
        if self.lower is None:
            return self.parameter.data
        upper = self.parameter.data.view(torch.int16).int() << 16
        return upper.add_(self.lower).view(torch.float32)

    @value.setter
    def value(self, value: Tensor) -> None:
        if self.lower is None:
            self.parameter.data.copy_(value)
        else:
            upper, lower = _halves(value)
            self.parameter.data.copy_(upper)
            self.lower.copy_(lower)


class Adam:
    """Adam (Kingma & Ba 2015, arXiv 1412.6980) on float32 weights in two halves of 16 bits. The
    model computes with the upper one, which is the weight in bfloat16. The lower one lies here.

    The two moments of each weight are of bfloat16. A step changes the second by a twentieth, far
    more than rounding. A weight takes 6 bytes beside the model's: its lower half and two moments.
    Its gradient is freed as soon as it has moved, within the last backward pass of a step. So none
    is scaled by the norm of all of them; each has a root mean square of one instead, and no step
    counts more than others. That heals better than clipping the norm of all gradients.

    Args:
        parameters: those that move, by name, of float32, with zeros where the masks have them; from
            now on they take gradients.
        masks: weights that stay zero.
        rate: as a share of the root mean square of each parameter's kept weights.
        halved: whether matrices are halved; all else stays float32.

    Attributes:
        rate: as given.
        share: of the rate, in this step.
        due: whether this backward pass is the last one of its step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masks: Masks,
        rate: float,
        halved: bool = False,
    ) -> None:
        self.rate = rate
        self.share = 1.0
        self.due = True
        self._masks = masks
        self._weights: dict[str, _Moving] = {}
        self._order: list[str] = []  # of the weights that are still to move in this step
        self._complete: set[str] = set()  # those of them whose gradients are complete
        self._handles = []
        for name, parameter in parameters.items():
            weight = _Moving(parameter, rate_of_weight(parameter.data, rate), None)
            if halved and parameter.dim() > 1:  # layer_norm takes no other dtype than its input's
                parameter.data, weight.lower = _halves(parameter.data)
            parameter.requires_grad_(True)
            self._weights[name] = weight
            hook = partial(self._has_gradient, name)
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(hook))

    @property
    def on_cpu(self) -> bool:
        """Whether the weights lie in the memory of the CPU."""
        return all(weight.parameter.device.type == "cpu" for weight in self._weights.values())

    @property
    def bytes(self) -> int:
        """Of a checkpoint, at most."""
        return sum(8 * weight.parameter.numel() for weight in self._weights.values())

    def begin(self) -> None:
        """Begin a step."""
        self._order = list(reversed(self._weights))  # as the gradients come, nearly
        self._complete = set()

    def end(self) -> None:
        """Move what the last pass gave no gradient: experts that only earlier passes have reached,
        those of other ranks, and weights whose gradients the caller has put there.
        """
        for name in self._order:
            if ranks().count > 1 or self._weights[name].parameter.grad is not None:
                self._move(name)
        self._order = []

    def _has_gradient(self, name: str, parameter: Tensor) -> None:
        """Move a weight whose gradient is complete. Several ranks add theirs in the same order."""
        if not self.due:
            return
        if ranks().count == 1:
            self._move(name)
            return
        self._complete.add(name)
        while self._order and self._order[0] in self._complete:
            self._move(self._order.pop(0))

    @torch.no_grad()
    def _move(self, name: str) -> None:
        weight = self._weights[name]
        parameter = weight.parameter
        gradient = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            parameter.grad = None
        if ranks().count > 1:
            ranks().add_up(gradient)
            if not bool(gradient.any()):  # no rank has reached it
                return
        if weight.mean is None or weight.square is None:
            weight.mean = torch.zeros_like(parameter, dtype=torch.bfloat16)
            weight.square = torch.zeros_like(parameter, dtype=torch.bfloat16)
        weight.steps += 1
        size = gradient.norm() / math.sqrt(gradient.numel())
        gradient.div_(size.add_(_TINY))
        mean = weight.mean.float().lerp_(gradient, 1 - _BETAS[0])
        square = weight.square.float().mul_(_BETAS[1])
        square.addcmul_(gradient, gradient, value=1 - _BETAS[1])
        weight.mean.copy_(mean)
        weight.square.copy_(square)
        first, second = (1 - beta**weight.steps for beta in _BETAS)
        change = mean.div_(square.div_(second).sqrt_().add_(_EPSILON))
        value = weight.value
        value.add_(change, alpha=-self.share * weight.rate / first)
        if name in self._masks:
            set_to_zero(value, self._masks.removed(name, value))
        weight.value = value

    def _kept(self, name: str, values: Tensor) -> Tensor:
        """Where a parameter's weights are kept: bool, of its shape."""
        if name in self._masks:
            return ~self._masks.removed(name, values)
        return torch.ones_like(values, dtype=torch.bool)

    def parts(self, with_states: bool) -> Iterator[dict[str, Tensor]]:
        """The kept weights in float32 and their moments, on the CPU, a few at a time: "NAME", and
        "NAME/mean", "NAME/square", "NAME/steps".
        """
        part: dict[str, Tensor] = {}
        size = 0
        for name, weight in self._weights.items():
            kept = self._kept(name, weight.parameter)
            part[name] = weight.value[kept].cpu()
            if with_states and weight.mean is not None and weight.square is not None:
                part[f"{name}/mean"] = weight.mean[kept].cpu()
                part[f"{name}/square"] = weight.square[kept].cpu()
                part[f"{name}/steps"] = torch.tensor(weight.steps)
            size += 8 * part[name].numel()
            if size >= _PART:
                yield part
                part = {}
                size = 0
        if part:
            yield part

    def fits(self, parts: Iterable[dict[str, Tensor]], step: int) -> bool:
        """Whether parts of a checkpoint after so many steps are of these weights."""
        values = {name: tensor for part in parts for name, tensor in part.items()}
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, weight in self._weights.items():
            kept = (int(self._kept(name, weight.parameter).sum()),)
            expected[name] = (torch.float32, kept)
            if f"{name}/steps" in values:
                moments = dict.fromkeys((f"{name}/mean", f"{name}/square"), (torch.bfloat16, kept))
                expected |= moments | {f"{name}/steps": (torch.int64, ())}
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in values.items()}
        counts = (int(found_at) for name, found_at in values.items() if name.endswith("/steps"))
        return found == expected and all(0 < count <= step for count in counts)

    def restore(self, part: dict[str, Tensor], with_states: bool) -> None:
        """Take weights of `parts`, and their moments."""
        for name, values in part.items():
            name, _, state = name.partition("/")
            weight = self._weights[name]
            if state == "steps" and with_states:
                weight.steps = int(values)
            elif state in ("", "mean", "square") and (with_states or not state):
                dtype = torch.bfloat16 if state else torch.float32
                whole = torch.zeros_like(weight.parameter, dtype=dtype)
                whole[self._kept(name, whole)] = values.to(whole.device)
                setattr(weight, state or "value", whole)

    def forget(self) -> None:
        """Begin the moments anew."""
        for weight in self._weights.values():
            weight.steps = 0
            weight.mean = None
            weight.square = None

    def finish(self) -> None:
        """Free the moments, and give the model its weights in float32."""
        self.forget()
        for handle in self._handles:
            handle.remove()
        for weight in self._weights.values():
            weight.parameter.grad = None
            weight.parameter.requires_grad_(False)
            weight.parameter.data = weight.value
            weight.lower = None


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 values of a float32 tensor, and the difference of the bits, as integers:
    int16.
    """
    bits = value.view(torch.int32)
    upper = (bits + (1 << 15)) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


# How far a training is: its measurements, and the checkpoints from which it resumes.


_RECORD = "progress.json"  # beside the folders of the checkpoints
_RISE = 1.1  # of the held-out loss; a high rate may raise it by less for a while
_CUT = 3.0  # the rate is divided by this where the loss rises, and by its square where it doubles
_PATIENCE = 4  # rises in a row


@dataclass(frozen=True)
class Measure:
    """What was measured on the held-out sequences.

    Attributes:
        divergence: from the dense model, in nats per token.
        perplexity, dense: of the model that heals, and of the dense one.
    """

    divergence: float
    perplexity: float
    dense: float


_Step = Annotated[int, Meta(ge=0)]
_File = Annotated[str, Meta(pattern=r"^step-[0-9]+/[0-9]{5}\.safetensors\Z")]


class _Record(msgspec.Struct):
    """The content of the record; a number that is not finite is null.

    Attributes:
        step, cut: of `Progress`.
        measured: a step, and the fields of its `Measure`.
        files: BLAKE3 of those of the checkpoints.
    """

    step: _Step
    cut: Annotated[float, Meta(ge=1, le=1e12)]
    measured: list[tuple[_Step, float | None, float | None, float | None]]
    files: dict[_File, str]


class UnfitError(Exception):
    """A checkpoint is of other weights than those that train. It is deleted."""


class Progress:
    """How far a training is, in a folder of the first rank: the last checkpoint and the best one,
    and a record of both. The first rank writes and reads, and the others hear from it.

    Args:
        folder: what an interrupted training left there is taken up, or deleted if it is damaged.
        steps: of the training.

    Attributes:
        step: steps that are done.
        cut: divides the rate.
        measured: step -> what was measured.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        record = ranks().first(self._intact_record)
        self.step = record.step
        self.cut = record.cut
        self.measured = _measured(record)
        self._hashes = record.files
        self._adam: Adam | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def _intact_record(self) -> _Record:
        """The record of an interrupted training whose files are as they were written, or of one
        that begins. What cannot be taken up is deleted.
        """
        path = self._folder / _RECORD
        record = read_own(path, _Record)
        if record is not None and not self._is_whole(record):
            warn_of_damage(path, "it does not fit its checkpoints")
            record = None
        kept = set() if record is None else {_RECORD, *map(_checkpoint, _kept(record))}
        keep_only(self._folder, kept)
        return record or _Record(step=0, cut=1.0, measured=[], files={})

    def _is_whole(self, record: _Record) -> bool:
        """Whether a record is of this training, and its files are as they were written."""
        measured = [step for step, *_ in record.measured]
        if measured[:1] != [0] or measured != sorted(set(measured)):
            return False
        folders = {name.partition("/")[0] for name in record.files}
        return (
            measured[-1] == record.step <= self._steps
            and folders == set(map(_checkpoint, _kept(record)))
            and all(is_intact(self._folder / name, digest) for name, digest in record.files.items())
        )

    @property
    def best(self) -> int:
        """The step with the lowest divergence; the first of several."""
        return _best(self.measured)

    @property
    def _losses(self) -> list[float]:
        return [measure.divergence for measure in self.measured.values()]

    def has_ended(self) -> bool:
        """Whether all steps are done, or the held-out loss rose so many times in a row that no
        lower rate will help.
        """
        losses = self._losses
        hopeless = len(losses) > _PATIENCE and all(
            _rises(losses[: len(losses) - n]) for n in range(_PATIENCE)
        )
        return self.step >= self._steps or hopeless

    @contextmanager
    def writing(self, adam: Adam) -> Iterator[None]:
        """Inside this context, checkpoints are of the weights that `adam` moves. Those of a GPU are
        written beside the training. A collective call.

        Raises:
            UnfitError: those of an interrupted training are of other weights.
        """
        self._adam = adam
        if not ranks().first(self._fits):
            raise UnfitError
        with ThreadPoolExecutor(1, "emp-llm-healing") as self._thread:
            yield
            self._finish_writing()

    def _fits(self) -> bool:
        """Whether the checkpoints are of the weights that train; if not, they are deleted."""
        assert self._adam is not None
        for step in {self.step, self.best} if self.measured else ():
            try:
                parts = [load_file(path) for path in self._files_of(step)]
                fits = self._adam.fits(parts, step)
            except (SafetensorError, RuntimeError, TypeError, ValueError):
                fits = False
            if not fits:
                warn_of_damage(self._folder / _checkpoint(step), "it is of other weights")
                keep_only(self._folder, ())
                return False
        return True

    def save(self) -> None:
        """Write a checkpoint of the present step, and delete those that it replaces."""
        if not ranks().main or self._adam is None or self._thread is None:
            return
        self._finish_writing()
        values = self._adam.parts(with_states=self.step > 0)
        record = {
            "step": self.step,
            "cut": self.cut,
            "measured": [
                [step, *(value if math.isfinite(value) else None for value in astuple(measure))]
                for step, measure in self.measured.items()
            ],
        }
        kept = {_checkpoint(self.step), _checkpoint(self.best)}
        if self._adam.on_cpu or self._adam.bytes > available_memory():
            self._write(values, record, kept)
        else:
            self._pending = self._thread.submit(self._write, list(values), record, kept)

    def _write(
        self, parts: Iterable[dict[str, Tensor]], record: dict[str, Any], kept: set[str]
    ) -> None:
        folder = self._folder / _checkpoint(record["step"])
        remove(folder)  # of an interrupted write
        hashes = {
            name: value for name, value in self._hashes.items() if name.partition("/")[0] in kept
        }
        for number, part in enumerate(parts):
            path = folder / f"{number:05d}.safetensors"
            write_bytes(path, save(part))
            hashes[f"{folder.name}/{path.name}"] = file_hash(path)
        write_own(self._folder / _RECORD, record | {"files": hashes})
        self._hashes = hashes
        keep_only(self._folder, {_RECORD, *kept})

    def _finish_writing(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self, step: int, with_states: bool = True) -> None:
        """Give the weights the values that they had after a step; `with_states`: and their
        gradients' moments, which begin anew otherwise. A collective call.
        """
        assert self._adam is not None
        self._adam.forget()
        for path in ranks().first(partial(self._files_of, step)):
            self._adam.restore(ranks().first(partial(load_file, path)), with_states)

    def _files_of(self, step: int) -> list[Path]:
        """Those of a checkpoint, which are whole."""
        self._finish_writing()
        folder = f"{_checkpoint(step)}/"
        return [self._folder / name for name in sorted(self._hashes) if name.startswith(folder)]

    def go_back_if_worse(self) -> None:
        """Where the held-out loss rises, take the best weights again, with a lower rate."""
        if _rises(self._losses):
            self.cut *= _CUT**2 if _rises(self._losses, 2.0) else _CUT
            self.load(self.best, with_states=False)


def _checkpoint(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step}"


def _measured(record: _Record) -> dict[int, Measure]:
    return {
        step: Measure(*(math.nan if value is None else value for value in values))
        for step, *values in record.measured
    }


def _kept(record: _Record) -> set[int]:
    """The steps of the checkpoints: the last one and the best."""
    return {record.step, _best(_measured(record))}


def _best(measured: Mapping[int, Measure]) -> int:
    """The step with the lowest divergence; the first of several."""

    def rank(step: int) -> tuple[bool, float]:
        divergence = measured[step].divergence
        return not math.isfinite(divergence), divergence

    return min(measured, key=rank)


def _rises(losses: list[float], times: float = _RISE) -> bool:
    """Whether the last loss is NaN, or at least `times` the best one before it."""
    return len(losses) > 1 and not losses[-1] < times * min(losses[:-1])
