"""Packs a checkpoint: each shard is read block by block, split and written. `packed_format` describes the format."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.safetensors_header import header_text
from emp_llm.checkpoint.words import mask_bytes, words_in
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import EXTRAS, OTHER_WEIGHTS, PACK_NAME, REPORT_NAME
from emp_llm.common.progress_bars import progress_bar
from emp_llm.packing.packed_format import FORMAT, SUFFIX, Form, PackLayout, packed_name
from emp_llm.packing.shard_packer import ShardPacker
from emp_llm.packing.zstd_codec import Zstd
from emp_llm.storage.atomic import write_json
from emp_llm.storage.hashing import FileHasher, file_hash
from emp_llm.storage.json_files import read_json


@dataclass(frozen=True)
class PackedSizes:
    """Sizes before and after.

    Attributes:
        dense_bytes, packed_bytes: of the shards.
        file_bytes: of the other files.
        tensors, sparse: the number of all tensors, and of those stored without their zeros.
    """

    dense_bytes: int
    packed_bytes: int
    file_bytes: int
    tensors: int
    sparse: int


class Packer:
    """Packs one checkpoint.

    Args:
        checkpoint: the source; only read.
        layout: of the packed folder.

    Raises:
        UserError: zstandard is not installed; or a mask is asked for, and the folder holds other weights or fitted ones.
    """

    def __init__(self, checkpoint: Checkpoint, layout: PackLayout) -> None:
        self.checkpoint, self.layout = checkpoint, layout
        self.coder = Zstd("--zstd") if layout.codec == "zstd" else None
        if layout.kind == "mask" and _is_fitted(checkpoint.folder):
            raise UserError(
                f"{checkpoint.folder}: its kept weights were fitted, so the dense model and a mask do not make it. Leave out "
                "--mask-only."
            )
        self.files = [path for path in _files(checkpoint.folder) if checkpoint.folder / path not in checkpoint.shards]
        for path in self.files:
            if path.name.endswith(SUFFIX):
                raise UserError(f"{checkpoint.folder / path}: it belongs to a packed checkpoint; move it away.")
            if layout.kind == "mask" and path.suffix in OTHER_WEIGHTS and path.parts[0] != EXTRAS:
                raise UserError(
                    f"{checkpoint.folder / path}: other weights, which do not belong in a mask; move the file away."
                )

    @property
    def largest(self) -> int:
        """An upper bound on the size of the packed folder, in bytes."""
        files = sum((self.checkpoint.folder / path).stat().st_size for path in self.files)
        if self.layout.kind == "mask":
            return files + sum(mask_bytes(words_in(tensor)) for tensor in self.checkpoint.tensors.values())
        return files + sum(shard.stat().st_size for shard in self.checkpoint.shards)

    def write(self, folder: Path) -> PackedSizes:
        """Write the packed files into a folder that exists.

        Raises:
            UserError: a file changed while it was read, or a mask is asked for and there are no zeros.
        """
        sizes = {shard.name: shard.stat().st_size for shard in self.checkpoint.shards}
        forms: list[Form] = []
        with progress_bar(sum(sizes.values()), "pack", "B") as bar, FileHasher() as digests:
            for shard in self.checkpoint.shards:
                tensors = [tensor for tensor in self.checkpoint.tensors.values() if tensor.shard == shard]
                shard_packer = ShardPacker(self.layout, self.coder, tensors, shard, digests, bar)
                forms += shard_packer.write(folder / packed_name(shard.name))
            checksums = digests.finish()
        self.checkpoint.check_unchanged()
        if self.layout.kind == "mask" and "sparse" not in forms:
            raise UserError(f"{self.checkpoint.folder}: it has no zeros, so it has no mask. Give a pruned checkpoint.")
        for path in self.files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoint.folder / path, folder / path)
        shards = {
            shard.name: {
                "bytes": sizes[shard.name],
                "blake3": checksums[shard.name],
                "packed": {"blake3": file_hash(folder / packed_name(shard.name))},
                "header": header_text(shard).decode("utf-8"),
            }
            for shard in self.checkpoint.shards
        }
        files = {
            path.as_posix(): {"bytes": (folder / path).stat().st_size, "blake3": file_hash(folder / path)}
            for path in self.files
        }
        index = {"format": FORMAT, "kind": self.layout.kind, "codec": self.layout.codec, "block": self.layout.block}
        write_json(folder / PACK_NAME, index | {"base": self._base(), "shards": shards, "files": files})
        return PackedSizes(
            dense_bytes=sum(sizes.values()),
            packed_bytes=sum((folder / packed_name(name)).stat().st_size for name in sizes),
            file_bytes=sum((folder / path).stat().st_size for path in self.files),
            tensors=len(forms),
            sparse=forms.count("sparse"),
        )

    def _base(self) -> dict[str, Any] | None:
        path = self.checkpoint.folder / REPORT_NAME
        source = read_json(path).get("source") if path.is_file() else None
        return source if isinstance(source, dict) else None


def _is_fitted(folder: Path) -> bool:
    """Whether a run changed kept weights of a checkpoint."""
    path = folder / REPORT_NAME
    fits = read_json(path).get("fits") if path.is_file() else None
    return isinstance(fits, dict) and any(isinstance(fit, dict) and fit.get("error_after") is not None for fit in fits.values())


def _files(folder: Path) -> list[Path]:
    """Every file of a model folder, relative to it, without the hidden files that downloads leave."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            found.append(relative)
    return found
