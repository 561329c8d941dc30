"""Headers of untrusted safetensors files.

Sizes claimed by a file are checked before memory is allocated, and a contradictory header is
refused in a sentence.
"""

import hashlib
import json
import math
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from blake3 import blake3

from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    FilePool,
    file_hash,
    parse_json,
    read_json,
    unique_keys,
    write_json,
)
from emp_llm.checkpoint.output import first_difference
from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.common.machine import versions
from emp_llm.common.paths import (
    CARD_NAME,
    EXTRAS,
    INDEX_NAME,
    MANIFEST_NAME,
    OTHER_WEIGHTS,
    PACK_NAME,
    REPORT_NAME,
    SINGLE_NAME,
    cache_folder,
    file_state,
    is_hidden,
)
from emp_llm.common.ranks import ranks

HEADER_LIMIT = 100_000_000  # the limit in safetensors
_DIMENSIONS = 32
_LARGEST = 1 << 63
BITS = {  # bits per number, by the safetensors name of the dtype
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a shard.

    Attributes:
        name: its name in the checkpoint.
        shard: its file.
        dtype: its safetensors name ("BF16").
        shape: as stored.
        start, end: offsets in the file of the first byte and of the byte after the last one.
    """

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(shard: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes. Every byte after the header
    belongs to exactly one tensor.

    Raises:
        UserError: the file is truncated or corrupt, or its header is invalid.
    """
    try:
        return parse_header(header_text(shard), shard, shard.stat().st_size)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{shard}: not a complete safetensors file ({reason(error)}). Download or "
            "convert it again."
        ) from error


def header_text(shard: Path) -> bytes:
    """The JSON text of a safetensors file's header, with its trailing spaces; ValueError if it is
    incomplete.
    """
    with shard.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it ends before its header does")
        if length > HEADER_LIMIT:
            raise ValueError(
                f"its header claims {length:,} bytes, and {HEADER_LIMIT:,} are allowed"
            )
        return file.read(length)


def parse_header(raw: bytes, shard: Path, size: int) -> list[StoredTensor]:
    """The tensors of a safetensors file of `size` bytes, from the JSON text of its header;
    ValueError if the header is invalid.
    """
    if not raw.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    header = parse_json(
        raw,
        object_pairs_hook=unique_keys,
        parse_int=_whole,
        parse_float=_no_number,
        parse_constant=_no_number,
    )
    _check_metadata(header.pop("__metadata__", {}))
    tensors = [_tensor(name, entry, shard, 8 + len(raw), size) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = 8 + len(raw)
    for tensor in tensors:
        if tensor.start < position:
            raise ValueError(f"tensor {quotable(tensor.name)} overlaps the tensor before it")
        if tensor.start > position:
            raise ValueError(f"tensor {quotable(tensor.name)} leaves a gap before it")
        position = tensor.end
    if position != size:
        raise ValueError(f"{size - position:,} bytes at its end belong to no tensor")
    return tensors


def _whole(text: str) -> int:
    return int(text) if text != "-0" else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{quotable(text)} is not a whole number")


def _check_metadata(metadata: Any) -> None:
    if metadata is None:  # as safetensors reads it
        return
    is_map = isinstance(metadata, dict)
    if not is_map or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not a map of strings")


def _tensor(name: str, entry: Any, shard: Path, base: int, size: int) -> StoredTensor:
    title = quotable(name)
    if not name.isprintable():
        raise ValueError(f"the tensor name {title} is not printable")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {title} has no dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {title} is of an unknown dtype, {quotable(str(dtype))}")
    if not _naturals(shape) or len(shape) > _DIMENSIONS:
        raise ValueError(
            f"the shape of tensor {title} is not a list of at most {_DIMENSIONS} sizes"
        )
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - base:
        raise ValueError(f"the data_offsets of tensor {title} do not lie within the file")
    if math.prod(shape) * BITS[dtype] >= _LARGEST or math.prod(filter(None, shape)) >= _LARGEST:
        raise ValueError(f"the shape of tensor {title} is too large")
    if math.prod(shape) * BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise ValueError(f"tensor {title} does not have the bytes that its dtype and shape need")
    return StoredTensor(name, shard, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < _LARGEST for number in value
    )


# Checkpoints on disk: safetensors shards with their index and config, the position of each
# tensor's bytes, and the identity.
#
# No shard is loaded as a whole: bytes are read by position. The folder is not trusted. Its identity
# is a hash of all shards, so that different models have different identities. The files are hashed
# once, and the hashes are cached by path, size, inode and change time. Dates of modification tell
# nothing: `cp -p`, `rsync -a` and `tar` set them.


# What a model computes depends on these files beside its weights: the config, the settings of its
# generation, and its own code. What its tokenizer gives depends on the others, with any templates.
_OF_MODEL = ("config.json", "generation_config.json", "*.py")
_OF_TOKENIZER = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*"),
)
SAVE_AGAIN = (
    "AutoModelForCausalLM.from_pretrained(DIR, dtype='auto').save_pretrained(NEW_DIR), "
    "and the tokenizer likewise"
)


class Checkpoint:
    """A folder of safetensors files with index, config, tokenizer and other files; read-only.

    Args:
        folder: the model folder.

    Raises:
        UserError: the folder or a shard is missing, a shard is truncated or corrupt, or index and
            shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such model folder. Give a folder with safetensors, or a "
                "Hub id (owner/name)."
            )
        check_links(folder)
        check_no_adapter(folder)
        self.shards = [folder / name for name in self._shard_names()]
        self._states = {shard: file_state(shard) for shard in self.shards}
        self.tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for tensor in read_header(shard):
                if tensor.name in self.tensors:
                    raise UserError(
                        f"{shard}: tensor {quotable(tensor.name)} is also in "
                        f"{self.tensors[tensor.name].shard.name}, and which of them is loaded "
                        f"depends on the program. Save the model once more: {SAVE_AGAIN}."
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
    def elements(self) -> int:
        """The number of elements of all tensors, also of those that the model does not use."""
        return sum(tensor.numel for tensor in self.tensors.values())

    @property
    def output_bytes(self) -> int:
        """Size of a pruned copy in bytes: the shards and the side files."""
        files = [*self.shards, *(self.folder / path for path in self.side_files())]
        return sum(file.stat().st_size for file in files)

    @property
    def states(self) -> dict[str, list[int]]:
        """`file_state` of each shard, when the checkpoint was opened; as JSON, for records."""
        return {shard.name: list(state) for shard, state in self._states.items() if state}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each shard in bytes."""
        return {name: size for name, (size, *_) in self.states.items()}

    def open_files(self) -> FilePool:
        """The shards, open for reading, as a context."""
        return FilePool()

    def check_unchanged(self) -> None:
        """Raise UserError if a shard has changed since the checkpoint was opened."""
        for shard, state in self._states.items():
            if file_state(shard) != state:
                raise UserError(
                    f"{shard}: it changed while it was read. Make sure that nothing "
                    "writes there, and run again."
                )

    def side_files(self) -> list[Path]:
        """The model's files other than weights, relative to the folder: config, tokenizer,
        licence, code.
        """
        files = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if not path.is_file() or is_hidden(relative):
                continue
            is_weights = bool(set(path.suffixes) & set(OTHER_WEIGHTS))
            is_index = path.name.endswith(".index.json")
            is_ours = path.name in (CARD_NAME, REPORT_NAME, MANIFEST_NAME)
            if not (is_weights or is_index or is_ours or relative.parts[0] == EXTRAS):
                files.append(relative)
        if self._weight_map:
            files.append(Path(INDEX_NAME))
        return files

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX_NAME
        if (self.folder / SINGLE_NAME).is_file() or not path.is_file():
            return {}
        weight_map = read_json(path, strict=True, limit=INDEX_LIMIT).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise UserError(
                f"{path}: its weight_map must map tensor names to file names. Download it again."
            )
        return weight_map

    def _check_index(self) -> None:
        """Raise UserError if the index names a tensor that its shard does not hold. Tensors that
        the index does not name are part of the checkpoint, as in transformers.
        """
        index = self.folder / INDEX_NAME
        for name, file in self._weight_map.items():
            if name not in self.tensors or self.tensors[name].shard.name != file:
                raise UserError(
                    f"{index}: it places {quotable(name)} in {file}, which does not hold it. Index "
                    "and shards do not belong together; download them again."
                )

    def _shard_names(self) -> list[str]:
        if (self.folder / PACK_NAME).is_file():
            raise UserError(
                f"{self.folder}: a packed checkpoint. Unpack it first: emp-llm unpack "
                f"{self.folder} DIR"
            )
        if (self.folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        if not self._weight_map:
            raise UserError(_why_no_safetensors(self.folder))
        names = sorted(set(self._weight_map.values()))
        for name in names:
            check_shard_name(self.folder / INDEX_NAME, name)
            if not (self.folder / name).is_file():
                raise UserError(
                    f"{self.folder / INDEX_NAME}: it names {name}, which is missing. "
                    "Download the model again."
                )
        return names


def _why_no_safetensors(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder}: a PEFT adapter, not a model. Merge it into its base model first "
            "(merge_and_unload, save_pretrained)."
        )
    gguf = why_not_gguf(folder, [path.name for path in folder.iterdir()])
    if gguf is not None:
        return gguf
    others = sorted(
        {path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")}
    )
    if others:
        return (
            f"{folder}: it holds weights only as {others[0]}, and pickles are not loaded here. "
            f"Convert them once: {SAVE_AGAIN}."
        )
    return (
        f"{folder}: it holds no {SINGLE_NAME} and no {INDEX_NAME}. Give the folder that "
        "save_pretrained wrote."
    )


def check_no_adapter(folder: Path) -> None:
    """Raise UserError if a folder holds a model and an adapter: transformers runs both, if peft
    is installed.
    """
    weights = (path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter"))
    if (folder / "adapter_config.json").is_file() and any(weights):
        raise UserError(
            f"{folder}: it holds a model and a PEFT adapter (adapter_config.json), and whether "
            "both are run depends on what is installed. Merge them first (merge_and_unload, "
            "save_pretrained), or move the adapter's files away."
        )


def check_links(folder: Path) -> None:
    """Refuse links that point out of a model folder. Links of the Hub's cache (snapshots/REVISION
    to blobs) are allowed.

    Raises:
        UserError: a link points out of the folder, or is circular.
    """
    real = folder.resolve()
    blobs = real.parent.parent / "blobs" if real.parent.name == "snapshots" else None
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() or is_hidden(path.relative_to(folder)):
            continue
        try:
            end = path.resolve()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: a circular link. Remove it.") from error
        if real not in end.parents and end.parent != blobs:
            raise UserError(
                f"{path}: a link to {end}, which lies outside the model folder. Give the folder "
                "that holds the files, or copy them into this one."
            )


def why_not_gguf(place: Path | str, files: Iterable[str]) -> str | None:
    """The refusal of a GGUF file, or of a folder or repository of GGUF files; None if no name
    ends in ".gguf".
    """
    name = next((file for file in sorted(files) if file.lower().endswith(".gguf")), None)
    if name is None:
        return None
    problem = f"it holds its weights as GGUF ({quotable(name)})"
    if Path(name).name == Path(place).name:
        problem = "a GGUF file"
    return (
        f"{place}: {problem}, a format of llama.cpp that cannot be pruned here. Give the "
        "safetensors checkpoint of the model that it was made from; then convert the pruned "
        "checkpoint to GGUF."
    )


def check_shard_name(index: Path, name: str) -> None:
    """Refuse a shard name in an index unless it is the plain name of a safetensors file in the same
    folder.

    Raises:
        UserError: the name is a path, has another suffix, or is not a valid file name.
    """
    plain = Path(name).name == name and name.isprintable() and len(name.encode()) <= 255
    if not plain or "\\" in name or not name.endswith(".safetensors") or name.startswith("."):
        raise UserError(
            f"{index}: '{quotable(name)}' is not the plain name of a safetensors file in this "
            "folder. Do not trust it."
        )


def check_layer_counts(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Refuse a config with more layers than the checkpoint has tensors: building the model would
    take forever.

    Raises:
        UserError: a count of layers is too large.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            check_layer_counts(path, value, tensors)
        elif (
            type(value) is int and key.endswith(("layer", "layers")) and value > max(tensors, 1000)
        ):
            raise UserError(
                f"{path}: {quotable(key)} is {value}, and the checkpoint has {tensors} tensors; "
                "they do not belong together. Download the model again."
            )


def config_digest(folder: Path) -> str:
    """SHA-256 of the files beside the weights on which the outputs of a model depend."""
    return _digest_of(folder, _OF_MODEL)


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the files on which the tokens of a text or a conversation depend."""
    return _digest_of(folder, _OF_TOKENIZER)


def _digest_of(folder: Path, patterns: Iterable[str]) -> str:
    digest = hashlib.sha256()
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def identity_of(checkpoint: Checkpoint) -> str:
    """The identity of a checkpoint: BLAKE3 of its shards' names, sizes and BLAKE3 hashes, in
    hexadecimal.

    Raises:
        UserError: a shard cannot be read, or changes while it is read.
    """
    hashes = known_hashes(checkpoint)
    if hashes is None:
        with ThreadPoolExecutor(2, thread_name_prefix="emp-llm-identity") as threads:
            hashes = dict(
                zip(checkpoint.states, threads.map(file_hash, checkpoint.shards), strict=True)
            )
        checkpoint.check_unchanged()
        remember_hashes(checkpoint, hashes)
    return identity_from_hashes(checkpoint, hashes)


def known_hashes(checkpoint: Checkpoint) -> dict[str, str] | None:
    """BLAKE3 of each shard by name, from the cache; None if not all are known."""
    with suppress(UserError):
        entry = read_json(_cache_file(checkpoint), limit=INDEX_LIMIT)
        hashes = entry.get("blake3") if entry.get("files") == checkpoint.states else None
        if isinstance(hashes, dict) and hashes.keys() == checkpoint.states.keys():
            return {name: str(digest) for name, digest in hashes.items()}
    return None


def remember_hashes(checkpoint: Checkpoint, hashes: dict[str, str]) -> None:
    """Cache the shards' hashes, for their states when the checkpoint was opened."""
    with suppress(OSError):  # the cache is optional
        write_json(_cache_file(checkpoint), {"files": checkpoint.states, "blake3": hashes})


def identity_from_hashes(checkpoint: Checkpoint, hashes: dict[str, str]) -> str:
    """The identity of a checkpoint, given BLAKE3 of each shard by name."""
    sizes = checkpoint.sizes
    return identity_from_files({name: (sizes[name], digest) for name, digest in hashes.items()})


def identity_from_files(files: dict[str, tuple[int, str]]) -> str:
    """The identity of a checkpoint, given size and BLAKE3 of each shard by name."""
    lines = [f"{name} {size} {digest}\n" for name, (size, digest) in sorted(files.items())]
    return blake3("".join(lines).encode()).hexdigest()


def _cache_file(checkpoint: Checkpoint) -> Path:
    key = blake3(str(checkpoint.folder.resolve()).encode()).hexdigest()[:32]
    return cache_folder() / "identities" / f"{key}.json"


# Ranks on machines with disks of their own: whether all of them read the same inputs.


_LONGEST = 40  # letters of a value


def check_agreement(made_of: Mapping[str, Any], **checkpoints: Checkpoint) -> None:
    """Check that all ranks read the same inputs, before a model runs. A collective call.

    Weights are compared by size, inode and change time, which one disk gives all ranks; where
    these differ, by their hashes. One rank of each machine computes and caches them.

    Args:
        made_of: what the results of this rank depend on beside weights and versions, as JSON.
        checkpoints: of the models that it reads, by their names in the message.

    Raises:
        UserError: on all ranks; a rank reads something else than the first.
    """
    if ranks().count == 1:
        return
    mine = {
        "weights": _weights(checkpoints),
        "config": {name: checkpoint.config for name, checkpoint in checkpoints.items()},
        **made_of,
        "versions": versions(),
    }
    host = socket.gethostname()
    found = ranks().gather((host, json.loads(json.dumps(mine))))
    first_host, first = found[0]
    for number, (other_host, other) in enumerate(found):
        difference = first_difference(first, other)
        if difference is not None:
            field, before, now = difference
            field = "text (its token ids)" if field in ("ids", "training") else field
            raise UserError(
                f"{field}: rank {number} on {other_host} has {_shown(now)}, and rank 0 on "
                f"{first_host} has {_shown(before)}. All ranks must read the same. Copy the files "
                "of rank 0 to every machine, or let all machines share one folder."
            )


def _weights(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """What tells the weights of this rank from those of the others."""
    states = {name: checkpoint.states for name, checkpoint in checkpoints.items()}
    folders = [str(checkpoint.folder.resolve()) for checkpoint in checkpoints.values()]
    found = ranks().gather((states, socket.gethostname(), folders))
    if all(other == states for other, *_ in found):
        return states
    # Of the ranks of one machine that read the same files, the first hashes them.
    first = found.index(found[ranks().index])
    hashes = None
    if first == ranks().index:
        hashes = {name: identity_of(checkpoint) for name, checkpoint in checkpoints.items()}
    result: dict[str, Any] = ranks().gather(hashes)[first]
    return result


def _shown(value: Any) -> str:
    text = quotable(str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
