"""Checkpoints on disk: safetensors shards with their index and config, and the position of each tensor's bytes.

No shard is loaded as a whole: bytes are read by position.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.folder_checks import check_layer_counts, check_links, check_shard_name, why_not_gguf
from emp_llm.checkpoint.safetensors_header import StoredTensor, read_header
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import (
    CARD_NAME,
    EXTRAS,
    INDEX_NAME,
    MANIFEST_NAME,
    OTHER_WEIGHTS,
    PACK_NAME,
    REPORT_NAME,
    SINGLE_NAME,
)
from emp_llm.common.wording import quotable
from emp_llm.storage.file_pool import FilePool
from emp_llm.storage.json_files import INDEX_LIMIT, read_json


class Checkpoint:
    """A folder of safetensors files with index, config, tokenizer and other files; read-only.

    Args:
        folder: the model folder.

    Raises:
        UserError: the folder or a shard is missing, a shard is truncated or corrupt, or index and shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"{folder}: no such model folder. Give a folder with safetensors, or a Hub id (owner/name).")
        check_links(folder)
        self.shards = [folder / name for name in self._shard_names()]
        self._states = {shard: file_state(shard) for shard in self.shards}
        self.tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for tensor in read_header(shard):
                if tensor.name in self.tensors:
                    raise UserError(
                        f"{shard}: tensor {quotable(tensor.name)} is also in {self.tensors[tensor.name].shard.name}."
                    )
                self.tensors[tensor.name] = tensor
        self._check_index()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; empty if the file is missing."""
        path = self.folder / "config.json"
        if not path.is_file():
            return {}
        config = read_json(path)
        check_layer_counts(path, config, len(self.tensors))
        return config

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors.values())

    @property
    def output_bytes(self) -> int:
        """Size of a pruned copy in bytes: the shards and the side files."""
        files = [*self.shards, *(self.folder / relative for relative in self.side_files())]
        return sum(file.stat().st_size for file in files)

    @property
    def states(self) -> dict[str, tuple[int, int]]:
        """Size and modification time (ns) of each shard, when the checkpoint was opened."""
        return {shard.name: state[:2] for shard, state in self._states.items() if state is not None}

    def open_files(self, again: bool = False) -> FilePool:
        """The shards, open for reading, as a context; `again` as for `FilePool`."""
        return FilePool(again)

    def check_unchanged(self) -> None:
        """Raise UserError if a shard has changed since the checkpoint was opened."""
        for shard, state in self._states.items():
            if file_state(shard) != state:
                raise UserError(f"{shard}: it changed while it was read. Make sure that nothing writes there, and run again.")

    def side_files(self) -> list[Path]:
        """The model's files other than weights, relative to the folder: config, tokenizer, licence, code."""
        files = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if not path.is_file() or any(part.startswith(".") for part in relative.parts):
                continue
            if path.suffix in OTHER_WEIGHTS or relative.parts[0] == EXTRAS:
                continue
            if relative.name in (CARD_NAME, REPORT_NAME, MANIFEST_NAME) or relative.name.endswith(".index.json"):
                continue
            files.append(relative)
        if self._weight_map:
            files.append(Path(INDEX_NAME))
        return files

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX_NAME
        if (self.folder / SINGLE_NAME).is_file() or not path.is_file():
            return {}
        weight_map = read_json(path, unique=True, limit=INDEX_LIMIT).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path}: its weight_map must map tensor names to file names. Download it again.")
        return weight_map

    def _check_index(self) -> None:
        """Raise UserError if the index and the shards disagree."""
        index = self.folder / INDEX_NAME
        for name, file in self._weight_map.items():
            if name not in self.tensors or self.tensors[name].shard.name != file:
                raise UserError(
                    f"{index}: it places {quotable(name)} in {file}, which does not hold it. Index and shards do not belong "
                    "together; download them again."
                )
        for name, tensor in self.tensors.items():
            if self._weight_map and name not in self._weight_map:
                raise UserError(
                    f"{index}: it does not name {quotable(name)}, which is in {tensor.shard.name}. Index and shards do not "
                    "belong together; download them again."
                )

    def _shard_names(self) -> list[str]:
        if (self.folder / PACK_NAME).is_file():
            raise UserError(f"{self.folder}: a packed checkpoint. Unpack it first: emp-llm unpack {self.folder} DIR")
        if (self.folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        if not self._weight_map:
            raise UserError(_why_no_safetensors(self.folder))
        names = sorted(set(self._weight_map.values()))
        for name in names:
            check_shard_name(self.folder / INDEX_NAME, name)
            if not (self.folder / name).is_file():
                raise UserError(f"{self.folder / INDEX_NAME}: it names {name}, which is missing. Download the model again.")
        return names


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Size, modification time (ns) and inode of a file, by which changes are detected; None if the file is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _why_no_safetensors(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: a PEFT adapter, not a model. Merge it into its base model first (merge_and_unload, save_pretrained)."
    gguf = why_not_gguf(folder, [path.name for path in folder.iterdir()])
    if gguf is not None:
        return gguf
    others = sorted({path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")})
    if others:
        return (
            f"{folder}: it holds weights only as {others[0]}, and pickles are not loaded here. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(DIR, dtype='auto').save_pretrained(NEW_DIR), and the tokenizer likewise."
        )
    return f"{folder}: it holds no {SINGLE_NAME} and no {INDEX_NAME}. Give the folder that save_pretrained wrote."
