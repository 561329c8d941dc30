"""The state of a calibration by blocks, saved in a folder so that an interrupted one resumes after the last saved block.

    hidden-BLOCKS-BATCH.safetensors   the hidden states of a batch after so many blocks
    state.safetensors                 the sums after these blocks, and what describes them

`state.safetensors` is replaced last and in one step, so that the hidden states that it names are complete. Each of several
ranks writes the hidden states of its batches; the first rank decides when, and writes the state once all of them are there.
"""

import errno
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from emp_llm.calibration.input_norms import InputSums
from emp_llm.checkpoint.files import write_bytes
from emp_llm.common.errors import UserError, format_bytes, reason
from emp_llm.common.ranks import ranks
from emp_llm.models.blockwise import Walk

logger = logging.getLogger(__name__)
_FORMAT = "emp-llm calibration state 4"
_STATE = "state.safetensors"
# A large model's state takes gigabytes. It is saved when losing the work since the last save would hurt, and saving is a small
# part of that work.
_SECONDS = 30.0
_RATIO = 10


class CalibrationProgress:
    """A folder of progress.

    Args:
        folder: created by the first save.
        signature: everything that the norms depend on, as JSON. The progress of another calibration is not used.
    """

    def __init__(self, folder: Path, signature: dict[str, Any]) -> None:
        self.folder = folder
        self._signature = json.dumps({"format": _FORMAT} | signature)
        self._saved_at = time.monotonic()
        self._cost: float | None = None  # seconds of the last save
        self._full = False

    def restore(self, collected: InputSums, walk: Walk) -> int:
        """Restore the state that an earlier run with this signature saved; returns the number of its finished blocks.

        A collective call.

        Raises:
            UserError: the hidden states are damaged.
        """
        state = ranks().share(self._read_state() if ranks().main else None)
        if state is None:
            return 0
        done, sums, input_of, tokens = state
        paths = [self._path(done, number) for number in range(len(walk.batches))]
        if not all(ranks().gather(all(path.is_file() for path in paths))):  # those of another rank may be on another disk
            logger.info("%s: the files of some ranks are missing; the calibration starts over.", self.folder)
            return 0
        try:
            for number, path in enumerate(paths):
                walk.hidden.put(number, load_file(path)["hidden"].to(walk.device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.folder}: its progress cannot be read ({reason(error)}). Delete the folder.") from error
        collected.restore(sums, input_of, tokens)
        walk.bar.update(done * sum(batch.numel() for batch in walk.batches))
        logger.info("resumed after block %d of %d (%s).", done, len(walk.runner.blocks), self.folder)
        self._saved_at = time.monotonic()
        return int(done)

    def _read_state(self) -> tuple[int, dict[str, Tensor], dict[str, str], dict[str, int]] | None:
        """The number of finished blocks, and the sums; None if no run with this signature has saved them."""
        try:
            with safe_open(self.folder / _STATE, framework="pt") as file:
                metadata = file.metadata()
                sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
        if metadata["signature"] != self._signature:
            logger.info("%s: it holds the progress of another calibration; this one starts over.", self.folder)
            return None
        return int(metadata["blocks"]), sums, json.loads(metadata["input_of"]), json.loads(metadata["tokens"])

    def _path(self, done: int, number: int) -> Path:
        """The file of a batch of this rank; batches are numbered over all ranks."""
        return self.folder / f"hidden-{done}-{number * ranks().count + ranks().index}.safetensors"

    def save(self, done: int, collected: InputSums, walk: Walk) -> None:
        """Save the state after `done` blocks in place of the last one, unless too little time has passed since then.

        On a full disk, the calibration continues and keeps the last saved state. A collective call.
        """
        began = time.monotonic()
        due = not self._full and began - self._saved_at >= max(_SECONDS, _RATIO * (self._cost or 0.0))
        if not ranks().share(due):
            return
        sizes = ranks().gather(_unless_full(lambda: self._write_hidden(done, walk)))
        if None not in sizes and ranks().main:
            sizes.append(_unless_full(lambda: self._write_state(done, collected)))
        sizes = ranks().share(sizes)
        if None in sizes:
            self._full = True
            with suppress(OSError):
                for number in range(len(walk.batches)):
                    self._path(done, number).unlink(missing_ok=True)
                self.folder.rmdir()  # unless it holds an earlier state
            logger.warning("warning: %s: the disk is full; the calibration continues without saving its state.", self.folder)
            return
        if self._cost is None:
            told = "%s: hidden states are saved there for resuming (%s); --no-resumable-calibration turns this off."
            logger.info(told, self.folder, format_bytes(sum(sizes)))
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began

    def _write_hidden(self, done: int, walk: Walk) -> int:
        """Write the hidden states of this rank's batches, one at a time; returns their size in bytes."""
        size = 0
        for number in range(len(walk.batches)):
            content = save({"hidden": walk.hidden.get(number, torch.device("cpu")).contiguous()})
            write_bytes(self._path(done, number), content)
            size += len(content)
        return size

    def _write_state(self, done: int, collected: InputSums) -> int:
        """Replace the state, and delete the hidden states of the one before; returns its size in bytes."""
        metadata = {"signature": self._signature, "blocks": str(done)}
        metadata |= {"input_of": json.dumps(collected.input_of), "tokens": json.dumps(collected.tokens)}
        content = save({name: total.cpu() for name, total in collected.sums.items()}, metadata)
        write_bytes(self.folder / _STATE, content)
        for path in self.folder.glob("hidden-*"):
            if not path.name.startswith(f"hidden-{done}-"):
                path.unlink()
        return len(content)


def _unless_full(write: Callable[[], int]) -> int | None:
    """What `write` returns; None if the disk is full."""
    try:
        return write()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return None
