"""How far a training is: its measurements, and the checkpoints from which it resumes."""

import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from emp_llm.checkpoint.files import file_hash, read_json, write_bytes, write_json
from emp_llm.common.errors import UserError
from emp_llm.common.machine import available_memory
from emp_llm.common.ranks import ranks
from emp_llm.healing.adam import Adam

logger = logging.getLogger(__name__)
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


class Progress:
    """How far a training is, in a folder of the first rank: the last checkpoint and the best one,
    and a record of both. The first rank writes and reads, and the others hear from it.

    Args:
        folder: what an interrupted training left there is taken up, or deleted if it is damaged.

    Attributes:
        step: steps that are done.
        cut: divides the rate.
        measured: step -> what was measured.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        record = ranks().first(partial(_intact_record, folder)) or {}
        self.step: int = record.get("step", 0)
        self.cut: float = record.get("cut", 1.0)
        self.measured: dict[int, Measure] = {
            step: Measure(*(math.nan if value is None else value for value in values))
            for step, *values in record.get("measured", ())
        }
        self._hashes: dict[str, str] = record.get("files", {})
        self._adam: Adam | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @property
    def best(self) -> int:
        """The step with the lowest divergence; the first of several."""

        def rank(step: int) -> tuple[bool, float]:
            divergence = self.measured[step].divergence
            return not math.isfinite(divergence), divergence

        return min(self.measured, key=rank)

    @property
    def _losses(self) -> list[float]:
        return [measure.divergence for measure in self.measured.values()]

    def has_ended(self, steps: int) -> bool:
        """Whether all steps are done, or the held-out loss rose so many times in a row that no
        lower rate will help.
        """
        losses = self._losses
        hopeless = len(losses) > _PATIENCE and all(
            _rises(losses[: len(losses) - n]) for n in range(_PATIENCE)
        )
        return self.step >= steps or hopeless

    @contextmanager
    def writing(self, adam: Adam) -> Iterator[None]:
        """Inside this context, checkpoints are of the weights that `adam` moves. Those of a GPU are
        written beside the training.
        """
        self._adam = adam
        with ThreadPoolExecutor(1, "emp-llm-healing") as self._thread:
            yield
            self._finish_writing()

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
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted write
        hashes = {
            name: value for name, value in self._hashes.items() if name.partition("/")[0] in kept
        }
        for number, part in enumerate(parts):
            path = folder / f"{number:05d}.safetensors"
            write_bytes(path, save(part))
            hashes[f"{folder.name}/{path.name}"] = file_hash(path)
        write_json(self._folder / _RECORD, record | {"files": hashes})
        self._hashes = hashes
        for path in self._folder.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path)

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
        return sorted((self._folder / _checkpoint(step)).glob("*.safetensors"))

    def go_back_if_worse(self) -> None:
        """Where the held-out loss rises, take the best weights again, with a lower rate."""
        if _rises(self._losses):
            self.cut *= _CUT**2 if _rises(self._losses, 2.0) else _CUT
            self.load(self.best, with_states=False)


def _checkpoint(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step}"


def _intact_record(folder: Path) -> dict[str, Any] | None:
    """The record of an interrupted training whose files are as they were written; None if there is
    none. What cannot be taken up is deleted.
    """
    if not os.path.lexists(folder):
        return None
    with suppress(UserError, OSError, AttributeError, KeyError, TypeError, ValueError):
        record = read_json(folder / _RECORD)
        measured = [Measure(*values) for _, *values in record["measured"]]
        known = measured and isinstance(record["step"], int) and record["cut"] >= 1
        if known and all(
            file_hash(folder / name) == value for name, value in record["files"].items()
        ):
            return record
    if folder.is_dir() and not any(folder.iterdir()):
        return None
    logger.warning(
        "healing: %s is damaged or incomplete, so the training begins again.", folder.name
    )
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()
    return None


def _rises(losses: list[float], times: float = _RISE) -> bool:
    """Whether the last loss is NaN, or at least `times` the best one before it."""
    return len(losses) > 1 and not losses[-1] < times * min(losses[:-1])
