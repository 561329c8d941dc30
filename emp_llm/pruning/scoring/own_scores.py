"""Scores of whole matrices: computed by a criterion that compares rows, of the user or built in, or read from files."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrix import PRUNABLE_DTYPES, Matrix, as_tensor, dequantised_rows
from emp_llm.checkpoint.safetensors_header import StoredTensor, read_header
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.selection.criteria import Criterion, InputStatistics
from emp_llm.selection.scheme import Group, ScoreMap
from emp_llm.storage.buffers import tensor_bytes
from emp_llm.storage.hashing import file_hash

_BLOCK = 1 << 22


class ScoreSource(Protocol):
    """Scores before they are mapped."""

    name: str  # in messages

    def rows(self, target: Target, first: int, last: int) -> Tensor:
        """The scores of rows first to last - 1 of a target, on the CPU.

        Raises:
            UserError: the scores are missing, or have another shape or dtype.
        """


class OwnScores:
    """Scores of whole matrices, non-negative and finite.

    Args:
        source: of the scores.
        targets: of the run, in order.
        kind: how signed scores become non-negative; None: they must not be negative.
        group: the scores among which the minimum and the maximum of the map are taken.
    """

    def __init__(self, source: ScoreSource, targets: list[Target], kind: ScoreMap | None, group: Group) -> None:
        self._source = source
        self._targets = targets
        self._kind = kind
        self._group = group
        self._extremes: dict[str, tuple[float, float]] = {}

    def rows(self, target: Target, first: int, last: int) -> Tensor:
        """The mapped scores of rows first to last - 1: floating, shape (rows, columns).

        Without a map and with "abs" they keep their dtype; "shift" (s - min s) and "exp" (exp(s - max s), both over the group)
        are float64, so that distinct scores stay distinct.

        Raises:
            UserError: a score is NaN or infinite, or it is negative and there is no map.
        """
        scores = self._finite(target, first, last)
        if self._kind is None:
            if bool((scores < 0).any()):
                raise UserError(
                    f"{self._source.name}: {target.name} has scores below zero. Say what they mean with --map: abs (their size "
                    "counts), shift or exp (the smallest are removed)."
                )
            return scores
        if self._kind == "abs":
            return scores.abs()
        scores = scores.double()
        if self._group == "row":
            least, most = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
        else:
            least, most = (scores.new_tensor(value) for value in self._extremes_of(target))
        return scores - least if self._kind == "shift" else (scores - most).exp()

    def _finite(self, target: Target, first: int, last: int) -> Tensor:
        scores = self._source.rows(target, first, last)
        if not bool(torch.isfinite(scores).all()):
            raise UserError(f"{self._source.name}: the scores of {target.name} hold NaN or infinity.")
        return scores

    def _extremes_of(self, target: Target) -> tuple[float, float]:
        """The minimum and the maximum over the target, or over all targets."""
        key = target.name if self._group == "matrix" else ""
        if key not in self._extremes:
            members = [target] if self._group == "matrix" else self._targets
            least, most = float("inf"), -float("inf")
            for place in (place for member in members for place in _places(member)):
                scores = self._finite(*place)
                least, most = min(least, float(scores.min())), max(most, float(scores.max()))
            self._extremes[key] = least, most
        return self._extremes[key]


class CriterionScores:
    """The scores that a criterion computes, a whole matrix at a time; the last matrix is kept.

    Args:
        name: of the criterion.
        criterion: the criterion.
        checkpoint: of the targets.
        inputs: returns the statistics of a target's inputs, if the criterion needs them.
    """

    def __init__(
        self, name: str, criterion: Criterion, checkpoint: Checkpoint, inputs: Callable[[Target], InputStatistics | None]
    ) -> None:
        self.name = f"criterion {name}"
        self._criterion = criterion
        self._checkpoint = checkpoint
        self._inputs = inputs
        self._last: tuple[str, Tensor] | None = None

    def rows(self, target: Target, first: int, last: int) -> Tensor:
        if self._last is None or self._last[0] != target.name:
            self._last = None  # free its memory before the next matrix is read
            self._last = target.name, self._scores(target)
        return self._last[1][first:last]

    def _scores(self, target: Target) -> Tensor:
        matrix = target.matrix
        with self._checkpoint.open_files(again=True) as files, torch.no_grad():
            words = matrix.read(files.reader(matrix.stored.shard), 0, matrix.rows)
            weight = dequantised_rows(matrix, 0, as_tensor(words, matrix.stored.dtype))
            arguments = (weight, self._inputs(target)) if self._criterion.needs_norms else (weight,)
            try:
                scores = self._criterion.score(*arguments)
            except Exception as error:
                error.add_note(f"raised by the {self.name} for {target.name}, whose weight has the shape {list(weight.shape)}")
                raise
        if not isinstance(scores, Tensor) or scores.shape != weight.shape:
            what = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise UserError(
                f"{self.name}: it returned {what} for {target.name}, whose weight has the shape {list(weight.shape)}; it must "
                "return one score per weight."
            )
        return _floating(scores.detach().cpu(), self.name, target)


class GivenScores:
    """Scores from safetensors files, or from tensors in memory.

    Args:
        given: a file, a folder of files, or tensors by name. A name is that of the weight in the checkpoint, that of the
            parameter, or that of the layer; the shape is the weight's.
        targets: of the run.

    Raises:
        UserError: a file is unreadable, or the scores of a target are missing or have another shape or dtype.
    """

    def __init__(self, given: Path | Mapping[str, Any], targets: list[Target]) -> None:
        self.name = f"--scores {given}" if isinstance(given, Path) else "the scores"
        self._files = _score_files(given) if isinstance(given, Path) else []
        self._tensors: Mapping[str, Tensor | StoredTensor]
        if isinstance(given, Path):
            self._tensors = {tensor.name: tensor for file in self._files for tensor in read_header(file)}
        else:
            self._tensors = given
        for target in targets:
            self._check(target)

    @property
    def digest(self) -> str:
        """A hash of the scores: of the files, or of names and tensors."""
        digest = blake3()
        for file in self._files:
            status = file.stat()
            digest.update(_hash_of(file, status.st_mtime_ns, status.st_size).encode())
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            if isinstance(tensor, Tensor):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor_bytes(tensor.detach().cpu().contiguous()))
        return digest.hexdigest()

    def rows(self, target: Target, first: int, last: int) -> Tensor:
        tensor, matrix = self._tensors[self._name(target)], target.matrix
        if isinstance(tensor, Tensor):
            whole = tensor.detach() if matrix.expert is None else tensor.detach()[matrix.expert]
            scores = (whole.T if matrix.transposed else whole)[first:last].cpu()
        else:
            from emp_llm.storage.direct_io import FileReader

            with FileReader(tensor.shard) as file:
                words = Matrix(tensor, matrix.transposed, matrix.expert).read(file, first, last)
            scores = as_tensor(words, tensor.dtype)
        return _floating(scores, self.name, target).contiguous()

    def _name(self, target: Target) -> str:
        names = (target.matrix.stored.name, target.layer.parameter, target.name)
        found = next((name for name in names if name in self._tensors), None)
        if found is None:
            raise UserError(f"{self.name}: no scores for {names[0]}. Leave the layer out with --ignore, or add its scores.")
        return found

    def _check(self, target: Target) -> None:
        name = self._name(target)
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor | StoredTensor):
            raise UserError(f"{self.name}: {name} is a {type(tensor).__name__}, not a tensor.")
        if tuple(tensor.shape) != tuple(target.matrix.stored.shape):
            raise UserError(
                f"{self.name}: {name} has the shape {list(tensor.shape)}; the weight has {list(target.matrix.stored.shape)}."
            )
        if isinstance(tensor, StoredTensor) and tensor.dtype not in PRUNABLE_DTYPES:
            raise UserError(f"{self.name}: {name} is stored as {tensor.dtype}; give {', '.join(PRUNABLE_DTYPES)}.")


@cache
def _hash_of(file: Path, modified: int, size: int) -> str:
    """The hash of a file in this state, computed once."""
    return file_hash(file)


def _score_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"--scores {path}: the folder holds no safetensors files.")
    return files


def _floating(scores: Tensor, name: str, target: Target) -> Tensor:
    """Scores in a floating dtype of 16, 32 or 64 bits."""
    if scores.is_complex():
        raise UserError(f"{name}: the scores of {target.name} are complex numbers.")
    if not scores.is_floating_point():
        return scores.double()
    return scores if scores.element_size() >= 2 else scores.float()


def _places(target: Target) -> Iterator[tuple[Target, int, int]]:
    for first, last in target.matrix.row_blocks(_BLOCK):
        yield target, first, last
