"""What a model folder says about itself, read with suspicion: safetensors headers, JSON files, and links.

Somebody else wrote these files. Nothing is allocated because a file says so, nothing outside the folder is opened because a
file points there, and what contradicts itself is refused in a sentence.
"""

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from emp_llm.models.errors import UserError, reason

HEADER_LIMIT = 100_000_000  # the limit of safetensors itself
JSON_LIMIT = 1 << 24
INDEX_LIMIT = 1 << 26  # the largest in use has 9 MB
_DIMENSIONS = 32
_LARGEST = 1 << 63
BITS = {  # of a number, by safetensors' names of dtypes
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a shard.

    Attributes:
        name: its name in the checkpoint.
        shard: the file it lies in.
        dtype: as safetensors writes it ("BF16").
        shape: as stored.
        start, end: first byte and one past the last, from the start of the file.
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
    """The tensors of a safetensors file in the order of their bytes; every byte after the header belongs to exactly one.

    Raises:
        UserError: the file is truncated or corrupt, or its header says what cannot be.
    """
    try:
        return parse_header(header_text(shard), shard, shard.stat().st_size)
    except (OSError, ValueError) as error:
        raise UserError(f"{shard}: not a complete safetensors file ({reason(error)}). Download or convert it again.") from error


def header_text(shard: Path) -> bytes:
    """The header of a safetensors file, to its last blank, without the length before it; ValueError where there is none."""
    with shard.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it ends before its header does")
        if length > HEADER_LIMIT:
            raise ValueError(f"its header claims {length:,} bytes, and {HEADER_LIMIT:,} are allowed")
        return file.read(length)


def parse_header(raw: bytes, shard: Path, size: int) -> list[StoredTensor]:
    """What `read_header` returns, from the text of the header of a file of some size; ValueError where it cannot be."""
    if not raw.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    header = _parse(raw, object_pairs_hook=_unique, parse_int=_whole, parse_float=_no_number, parse_constant=_no_number)
    _check_metadata(header.pop("__metadata__", {}))
    tensors = [_tensor(name, entry, shard, 8 + len(raw), size) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = 8 + len(raw)
    for tensor in tensors:
        if tensor.start != position:
            wrong = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise ValueError(f"tensor {shown(tensor.name)} {wrong}")
        position = tensor.end
    if position != size:
        raise ValueError(f"{size - position:,} bytes at its end belong to no tensor")
    return tensors


def read_json(path: Path, unique: bool = False, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        unique: refuse an object that holds a key twice.
        limit: bytes that it may have.

    Raises:
        UserError: it is not one, is too large, or nested too deeply.
    """
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > limit:
                raise ValueError(f"it has {size:,} bytes, and {limit:,} are allowed")
            value = _parse(file.read(size), **{"object_pairs_hook": _unique} if unique else {})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({reason(error)}). Download it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object.")
    return value


def check_links(folder: Path) -> None:
    """Refuse links that lead out of a model folder; those of the Hub's cache (snapshots/REVISION to blobs) belong to it.

    Raises:
        UserError: there is one, or one that leads nowhere but to itself.
    """
    real = folder.resolve()
    blobs = real.parent.parent / "blobs" if real.parent.name == "snapshots" else None
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            end = path.resolve()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: a link that leads in a circle. Remove it.") from error
        if real not in end.parents and end.parent != blobs:
            raise UserError(
                f"{path}: a link to {end}, which lies outside the model folder. Give the folder that holds the files, or copy "
                "them into this one."
            )


def check_shard_name(index: Path, name: str) -> None:
    """Refuse what an index must not name as a shard: anything but the plain name of a safetensors file beside it.

    Raises:
        UserError: it is a path, no safetensors file, or no name that a file can have.
    """
    plain = Path(name).name == name and name.isprintable() and len(name.encode()) <= 255
    if not plain or "\\" in name or not name.endswith(".safetensors") or name.startswith("."):
        raise UserError(
            f"{index}: '{shown(name)}' is not the plain name of a safetensors file in this folder. Do not trust it."
        )


def check_layer_counts(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Refuse a config that asks for more layers than a checkpoint of so many tensors can have: building them would not end.

    Raises:
        UserError: it does.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            check_layer_counts(path, value, tensors)
        elif type(value) is int and key.endswith(("layer", "layers")) and value > max(tensors, 1000):
            raise UserError(
                f"{path}: {shown(key)} is {value}, and the checkpoint has {tensors} tensors; they are not of one model. "
                "Download it again."
            )


def shown(text: str) -> str:
    """Somebody else's text as it can stand in a message: printable, and not too long."""
    text = text if text.isprintable() and text else ascii(text)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _parse(raw: bytes, **hooks: Any) -> Any:
    try:
        value = json.loads(raw.decode("utf-8"), **hooks)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text, and ends in an error here
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair") from error
    return value


def _whole(text: str) -> int:
    return int(text) if text != "-0" else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{shown(text)} is not a whole number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{shown(twice)} is in it twice")
    return found


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not a map of strings")


def _tensor(name: str, entry: Any, shard: Path, base: int, size: int) -> StoredTensor:
    title = shown(name)
    if not name.isprintable():
        raise ValueError(f"the tensor name {title} is not printable")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {title} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {title} is of an unknown dtype, {shown(str(dtype))}")
    if not _naturals(shape) or len(shape) > _DIMENSIONS:
        raise ValueError(f"the shape of tensor {title} is not a list of at most {_DIMENSIONS} sizes")
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - base:
        raise ValueError(f"the data_offsets of tensor {title} do not lie within the file")
    if math.prod(shape) * BITS[dtype] >= _LARGEST or math.prod(filter(None, shape)) >= _LARGEST:
        raise ValueError(f"the shape of tensor {title} is too large")
    if math.prod(shape) * BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise ValueError(f"tensor {title} does not have the bytes that its dtype and shape need")
    return StoredTensor(name, shard, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < _LARGEST for number in value)
