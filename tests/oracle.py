"""An independent oracle in numpy: the correct content of a pruned checkpoint, from the input's
bytes and the norms alone.

It imports neither emp_llm nor torch. Scores, sums and masks are computed again, in float64 and with
a stable sort, so that a mistake goes unnoticed only if it is made twice.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class Stored:
    """A tensor of a shard: its file, its dtype and shape, and the position of its bytes in the
    file.
    """

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(shard: Path) -> bytes:
    """The first bytes of a safetensors file, up to the first weight: 8 bytes of length, then
    JSON.
    """
    raw = shard.read_bytes()
    return raw[: 8 + int.from_bytes(raw[:8], "little")]


def tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder's safetensors, by name."""
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        head = header(shard)
        for name, entry in json.loads(head[8:]).items():
            if name != "__metadata__":
                start, end = (len(head) + offset for offset in entry["data_offsets"])
                found[name] = Stored(shard, entry["dtype"], tuple(entry["shape"]), start, end)
    return found


def shards(folder: Path) -> dict[str, str]:
    """The hash of each shard of a folder, to compare all bytes of two checkpoints' weights."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }


def bits(tensor: Stored) -> Array:
    """A tensor's numbers as unsigned integers of their bits."""
    raw = tensor.shard.read_bytes()[tensor.start : tensor.end]
    return np.frombuffer(raw, dtype=f"<u{_SIZES[tensor.dtype]}").reshape(tensor.shape)


def values(pattern: Array, dtype: str) -> Array:
    """The values of floats given by their bits, in float64, which holds 16-, 32- and 64-bit
    floats exactly.
    """
    if dtype == "BF16":  # the upper half of a float32
        return (pattern.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return pattern.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).astype(
        np.float64
    )


def weight(folder: Path, name: str, transposed: bool = False) -> Array:
    """A stored matrix in float64, with one output per row."""
    tensor = tensors(folder)[name]
    matrix = values(bits(tensor), tensor.dtype)
    return matrix.T if transposed else matrix


def load_norms(path: Path, relative: bool = False) -> dict[str, Array]:
    """The norms in an activations file, float32, by the name of the layer; or those relative to
    the outputs.
    """
    stored = tensors_of_file(path)
    input_of = json.loads(json.loads(header(path)[8:])["__metadata__"]["emp_llm"])[
        "relative" if relative else "inputs"
    ]
    return {layer: stored[key] for layer, key in input_of.items()}


def tensors_of_file(path: Path) -> dict[str, Array]:
    """The float32 tensors of one safetensors file."""
    head = header(path)
    raw = path.read_bytes()
    entries = {
        name: entry["data_offsets"]
        for name, entry in json.loads(head[8:]).items()
        if name != "__metadata__"
    }
    return {
        name: np.frombuffer(raw[len(head) :][slice(*place)], dtype="<f4")
        for name, place in entries.items()
    }


def scores(matrix: Array, norm: Array | None = None) -> Array:
    """|W|, or float32(|W|) times float32 norms with one rounding to float32; in float64."""
    if norm is None:
        return np.abs(matrix)
    return (np.abs(matrix).astype(np.float32) * norm.astype(np.float32)).astype(np.float64)


def ria(size: Array, norm: Array) -> Array:
    """(|W_ij| / sum_j |W_ij| + |W_ij| / sum_i |W_ij|) * norm_j^0.5 from |W|, rounded to float32;
    0 where W_ij is 0.
    """
    rows = size.sum(1)
    columns = size.sum(0)
    shares = [
        [w / rows[i] + w / columns[j] if w else 0.0 for j, w in enumerate(row)]
        for i, row in enumerate(size)
    ]
    return (
        (np.array(shares) * np.sqrt(norm.astype(np.float64))).astype(np.float32).astype(np.float64)
    )


def effective(row: Array, order: float = 2.0) -> float:
    """The Hill number of a row of scores; its length for a row of zeros."""
    total = row.sum()
    if total == 0:
        return float(row.size)
    omega = row[row > 0] / total
    if order == 1.0:
        return math.exp(-(omega * np.log(omega)).sum())
    if order == 2.0:
        return float(total * total / (row * row).sum())
    return float((omega**order).sum() ** (1 / (1 - order)))


def count(row: Array, beta: float = 1.0, order: float = 2.0) -> int:
    """clip(floor(beta N_eff), 1, N), and N for a row of zeros."""
    return (
        row.size
        if not row.any()
        else int(np.clip(math.floor(beta * effective(row, order)), 1, row.size))
    )


def keep(row: Array, kept: int) -> Array:
    """The mask of the `kept` largest of a row; the lowest index first among equals."""
    mask = np.zeros(row.size, dtype=bool)
    mask[np.argsort(-row, kind="stable")[:kept]] = True
    return mask


def row_masks(
    matrix: Array, adaptive: bool, sparsity: float = 0.5, counting: Array | None = None
) -> Array:
    """The mask of a matrix of scores, row by row: by the effective number of the row, or of the
    same row of other scores (`counting`); or with a fixed share removed."""
    fixed = matrix.shape[1] - math.floor(sparsity * matrix.shape[1])
    rows = zip(matrix, matrix if counting is None else counting, strict=True)
    return np.stack([keep(row, count(other) if adaptive else fixed) for row, other in rows])


def mass(row: Array) -> float:
    """s_eff: the share of the floor(N_eff) largest."""
    return float(np.sort(row)[::-1][: count(row)].sum() / row.sum()) if row.any() else 1.0


def mass_bound(row: Array) -> float:
    """The theorem's lower bound on s_eff."""
    n = row.size
    nu = count(row)
    if nu in (1, n):
        return 0.5 if nu == 1 else 1.0
    return nu / n + (n - nu) / n * math.sqrt((n - nu - 1) / ((nu + 1) * (n - 1)))


def digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and modification time of every file in a folder, to check that nothing has touched
    it.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(f.relative_to(folder)): (
            hashlib.sha256(f.read_bytes()).hexdigest(),
            f.stat().st_mtime_ns,
        )
        for f in files
    }


def edited_copy(source: Path, folder: Path, name: str, edit: Callable[[Array], object]) -> Path:
    """A copy of a model with one tensor changed, in place, in its bits."""
    shutil.copytree(source, folder)
    tensor = tensors(folder)[name]
    matrix = bits(tensor).copy()
    edit(matrix)
    raw = bytearray(tensor.shard.read_bytes())
    raw[tensor.start : tensor.end] = matrix.tobytes()
    tensor.shard.write_bytes(raw)
    return folder
