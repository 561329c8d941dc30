"""How far a training is: its measurements, and the checkpoints from which it resumes."""

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

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
from emp_llm.healing.adam import Adam

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
