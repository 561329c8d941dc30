"""The state of a calibration by blocks, saved in a folder so that an interrupted one resumes after the last saved block.

The folder holds one state (the hidden states between two blocks, then the sums) and a manifest that describes it. The manifest
is replaced last and in one step, so that it always matches the state that it names. Each of several ranks writes a file of the
state, with the hidden states of its batches; the first rank decides when, and writes the manifest once all files are there.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emp_llm.calibration.input_norms import InputSums
from emp_llm.checkpoint.files import read_exactly, tensor_bytes, write_exactly, write_json
from emp_llm.common.errors import UserError, format_bytes, reason
from emp_llm.common.ranks import ranks
from emp_llm.models.blockwise import Walk

logger = logging.getLogger(__name__)
_FORMAT = "emp-llm calibration state 3"
_MANIFEST = "manifest.json"
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
        self._signature = json.loads(json.dumps({"format": _FORMAT} | signature))
        self._saved_at = time.monotonic()
        self._cost: float | None = None  # seconds of the last save
        self._full = False

    def restore(self, collected: InputSums, walk: Walk) -> int:
        """Restore the state that an earlier run with this signature saved; returns the number of its finished blocks.

        A collective call.

        Raises:
            UserError: the state is damaged.
        """
        manifest = ranks().share(self._manifest() if ranks().main else None)
        if manifest is None:
            return 0
        done = int(manifest["blocks"])
        hidden = manifest["hidden"] if ranks().count == 1 else manifest["hidden_of_ranks"][ranks().index]
        if not all(ranks().gather(ranks().main or self._path(done).exists())):  # another rank's file may be on another disk
            logger.info("%s: the files of some ranks are missing; the calibration starts over.", self.folder)
            return 0
        try:
            tensors = self._read(done, [*hidden, *([[n], "float64"] for n in manifest["sums"].values())])
            for number in range(len(walk.batches)):
                walk.hidden.put(number, next(tensors).to(walk.device))
            sums = dict(zip(manifest["sums"], tensors, strict=True))
        except (OSError, UserError) as error:
            raise UserError(f"{self.folder}: its progress cannot be read ({reason(error)}). Delete the folder.") from error
        collected.restore(sums, manifest["inputs"], manifest["finite"], manifest["tokens"])
        walk.bar.update(done * sum(batch.numel() for batch in walk.batches))
        logger.info("resumed after block %d of %d (%s).", done, len(walk.runner.blocks), self.folder)
        self._saved_at = time.monotonic()
        return done

    def _manifest(self) -> Any:
        """The manifest of an earlier run with this signature; None if there is none."""
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if manifest.get("signature") != self._signature:
            logger.info("%s: it holds the progress of another calibration; this one starts over.", self.folder)
            return None
        return manifest

    def _path(self, done: int) -> Path:
        """This rank's file of a state."""
        return self.folder / (f"state-{done}" if ranks().count == 1 else f"state-{done}-rank-{ranks().index}")

    def save(self, done: int, collected: InputSums, walk: Walk) -> None:
        """Save the state after `done` blocks in place of the last one, unless too little time has passed since then.

        On a full disk, the calibration continues and keeps the last saved state. A collective call.
        """
        began = time.monotonic()
        due = not self._full and began - self._saved_at >= max(_SECONDS, _RATIO * (self._cost or 0.0))
        if not ranks().share(due):
            return
        size = self._write(done, collected, walk)
        if size is None:
            self._full = True
            with suppress(OSError):
                self._path(done).unlink(missing_ok=True)
                self.folder.rmdir()  # unless it holds an earlier state
            logger.warning("warning: %s: the disk is full; the calibration continues without saving its state.", self.folder)
            return
        if self._cost is None:
            logger.info(
                "%s: hidden states are saved there for resuming (%s); --no-resumable-calibration turns this off.",
                self.folder,
                format_bytes(size),
            )
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began

    def _write(self, done: int, collected: InputSums, walk: Walk) -> int | None:
        """Write the state and its manifest, and delete the previous state.

        Returns the size of the state in bytes; None if a disk is full.
        """
        sums, finite = collected.state()
        files = ranks().gather(self._write_file(done, list(sums.values()), walk))
        if None in files:
            return None
        manifest = {
            "signature": self._signature,
            "blocks": done,
            "hidden": files[0][2],
            "sums": {name: total.numel() for name, total in sums.items()},
            "inputs": collected.input_of,
            "finite": finite,
            "tokens": collected.tokens,
        }
        if len(files) > 1:
            manifest["hidden_of_ranks"] = [hidden for _, _, hidden in files]
        names = [name for name, _, _ in files]
        if not ranks().share(self._write_manifest(manifest, names) if ranks().main else None):
            return None
        return int(sum(size for _, size, _ in files))

    def _write_file(self, done: int, sums: list[Tensor], walk: Walk) -> tuple[str, int, list[Any]] | None:
        """Write this rank's file; returns its name, its size, and shapes and dtypes of the hidden states. None: a full disk."""
        hidden: list[tuple[list[int], str]] = []
        size = 0
        with _full_disk() as full:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path(done), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                for number in range(len(walk.batches)):
                    tensor = walk.hidden.get(number, torch.device("cpu")).contiguous()
                    write_exactly(file, tensor_bytes(tensor), size)
                    size += tensor.nbytes
                    hidden.append((list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
                for total in sums:
                    write_exactly(file, tensor_bytes(total.contiguous()), size)
                    size += total.nbytes
                os.fsync(file)
            finally:
                os.close(file)
        return None if full else (self._path(done).name, size, hidden)

    def _write_manifest(self, manifest: dict[str, Any], names: list[str]) -> bool:
        """Replace the manifest, and delete all files but those of its state; returns whether the disk had room."""
        with _full_disk() as full:
            write_json(self.folder / _MANIFEST, manifest)
            for path in self.folder.iterdir():
                if path.name not in (_MANIFEST, *names):
                    path.unlink()
        return not full

    def _read(self, done: int, layout: list[Any]) -> Iterator[Tensor]:
        """The tensors of a state, on the CPU; `layout` holds their shapes and dtypes, in order."""
        path = self._path(done)
        file = os.open(path, os.O_RDONLY)
        try:
            offset = 0
            for shape, dtype in layout:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                read_exactly(file, tensor_bytes(tensor), offset, path)
                offset += tensor.nbytes
                yield tensor
        finally:
            os.close(file)


@contextmanager
def _full_disk() -> Iterator[list[OSError]]:
    """Yields a list, which gets the error of a full disk."""
    full: list[OSError] = []
    try:
        yield full
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full.append(error)
