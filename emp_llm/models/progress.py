"""How far a calibration block by block has come, in a folder, so that a killed one goes on behind its last finished block.

The folder holds the hidden states between two blocks, the sums so far, and a manifest that names them. The manifest is
replaced last and in one step, so that whatever moment a run is killed at, it and the files it names are of one block.
"""

import errno
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from emp_llm.models.blockwise import Walk
from emp_llm.models.direct import bytes_of, read_exactly, write_exactly
from emp_llm.models.errors import UserError, reason
from emp_llm.models.files import replace_json, sync_path
from emp_llm.models.input_sums import InputSums

logger = logging.getLogger(__name__)
_MANIFEST = "manifest.json"


class Progress:
    """A folder of progress.

    Args:
        folder: made when the first block is finished.
        signature: what defines the run; progress of another is thrown away.
    """

    def __init__(self, folder: Path, signature: dict[str, Any]) -> None:
        self.folder = folder
        self._signature = json.loads(json.dumps(signature))

    def restore(self, memory: InputSums, walk: Walk) -> int:
        """Take up what an earlier run of this signature left; returns how many blocks are finished."""
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0
        if manifest.get("signature") != self._signature:
            logger.info("%s: progress of another calibration; this one starts anew.", self.folder)
            return 0
        done = int(manifest["blocks"])
        try:
            file = os.open(self.folder / f"hidden-{done}", os.O_RDONLY)
            try:
                offset = 0
                for number, (shape, dtype) in enumerate(manifest["hidden"]):
                    hidden = torch.empty(shape, dtype=getattr(torch, dtype))
                    read_exactly(file, bytes_of(hidden), offset, self.folder / f"hidden-{done}")
                    offset += hidden.nbytes
                    walk.hidden.put(number, hidden.to(walk.device))
            finally:
                os.close(file)
            sums = load_file(self.folder / f"sums-{done}.safetensors")
        except (OSError, KeyError, SafetensorError) as error:
            raise UserError(f"{self.folder}: its progress cannot be read ({reason(error)}). Delete the folder.") from error
        memory.restore(sums, manifest["inputs"], manifest["finite"], manifest["tokens"])
        walk.bar.update(done * sum(batch.numel() for batch in walk.batches))
        logger.info("continued behind block %d of %d (%s).", done, len(walk.runner.blocks), self.folder)
        return done

    def save(self, done: int, memory: InputSums, walk: Walk) -> None:
        """Keep what there is when `done` blocks are finished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors: list[tuple[list[int], str]] = []
        file = os.open(self.folder / f"hidden-{done}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            offset = 0
            for number in range(len(walk.batches)):
                hidden = walk.hidden.get(number, torch.device("cpu")).contiguous()
                write_exactly(file, bytes_of(hidden), offset)
                offset += hidden.nbytes
                tensors.append((list(hidden.shape), str(hidden.dtype).removeprefix("torch.")))
            os.fsync(file)
        finally:
            os.close(file)
        sums, finite = memory.state()
        try:
            save_file(sums, self.folder / f"sums-{done}.safetensors")
        except SafetensorError as error:  # it tells the system's error in words
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
        sync_path(self.folder / f"sums-{done}.safetensors")
        manifest = {
            "signature": self._signature,
            "blocks": done,
            "hidden": tensors,
            "inputs": memory.input_of,
            "finite": finite,
            "tokens": memory.tokens,
        }
        replace_json(self.folder / _MANIFEST, manifest)
        for path in self.folder.iterdir():
            if path.name not in (_MANIFEST, f"hidden-{done}", f"sums-{done}.safetensors"):
                path.unlink()


def tokens_signature(tokens: Tensor) -> str:
    """A hash of token ids and their shape."""
    import hashlib

    return hashlib.sha256(str(tuple(tokens.shape)).encode() + tokens.contiguous().numpy().tobytes()).hexdigest()
