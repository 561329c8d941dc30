"""What becomes of a stored tensor when units are removed or set to zero: the rows and columns that stay."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emp_llm.checkpoint.headers import BITS, StoredTensor
from emp_llm.checkpoint.matrices import WORD, Matrix, Words, word_bytes
from emp_llm.models.layers import Layer
from emp_llm.structure.choice import Choice
from emp_llm.structure.units import Indices

FittedWords = Callable[[str], Words | None]


@dataclass
class Slice:
    """The changes of one matrix or bias, in its stored orientation.

    Attributes:
        kept: axis -> indices that stay, ascending; an axis that is missing stays whole.
        target: the layer whose fitted weights take its place, if there are any.
        transposed: stored as (inputs, outputs).
    """

    kept: dict[int, Indices] = field(default_factory=dict)
    target: str | None = None
    transposed: bool = False

    def applied(self, words: Words, remove: bool) -> Words:
        """The words with all others removed, or set to zero."""
        for axis, kept in self.kept.items():
            if remove:
                words = np.take(words, kept, axis)
            else:
                gone = np.ones(words.shape[axis], dtype=bool)
                gone[kept] = False
                words[(slice(None),) * axis + (gone,)] = 0
        return words


class TensorEdit:
    """The changes of one stored tensor.

    Args:
        stored: the tensor.

    Attributes:
        slices: by expert; None for a tensor of one matrix, or a bias.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.slices: dict[int | None, Slice] = {}

    def slice_of(self, expert: int | None, transposed: bool = False) -> Slice:
        return self.slices.setdefault(expert, Slice(transposed=transposed))

    @property
    def smaller_shape(self) -> tuple[int, ...]:
        """The shape after the removal. All experts of a tensor have the same."""
        shape, first = list(self.stored.shape), next(iter(self.slices.values()))
        stack = len(shape) - 2 if None not in self.slices else 0
        for axis, kept in first.kept.items():
            shape[stack + axis] = len(kept)
        return tuple(shape)

    def pieces(self, read: Callable[[int, int], Words], remove: bool, fitted: FittedWords) -> Iterator[Words]:
        """The words of the edited tensor, matrix by matrix.

        Args:
            read: returns words of the dense tensor, given the first and their number.
            remove: leave the others out, instead of setting them to zero.
            fitted: returns the fitted weights of a layer as words, shape (outputs, inputs), or None.
        """
        shape = self.stored.shape if None in self.slices else self.stored.shape[1:]
        size = int(np.prod(shape))
        for number in [None] if None in self.slices else range(self.stored.shape[0]):
            part = self.slices[number]
            weights = None if part.target is None else fitted(part.target)
            if weights is None:
                words = read((number or 0) * size, size).reshape(shape)
            else:
                words = np.array(weights.T if part.transposed else weights)
            yield np.ascontiguousarray(part.applied(words, remove))


def tensor_edits(
    choices: Sequence[Choice],
    matrices: Mapping[Layer, Matrix],
    stored_names: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
) -> dict[str, TensorEdit]:
    """The changes of all stored tensors, by name.

    Args:
        choices: the kept units.
        matrices: the stored weight of each layer.
        stored_names: parameter -> stored tensor.
        tensors: of the checkpoint, by name.
    """
    edits: dict[str, TensorEdit] = {}

    def edit(stored: StoredTensor) -> TensorEdit:
        return edits.setdefault(stored.name, TensorEdit(stored))

    def keep(layer: Layer, axis: int, taken: Indices, kept: Indices) -> Slice:
        matrix = matrices[layer]
        size = matrix.rows if axis == 0 else matrix.columns
        part = edit(matrix.stored).slice_of(matrix.expert, matrix.transposed)
        place = 1 - axis if matrix.transposed else axis
        part.kept[place] = np.setdiff1d(np.arange(size, dtype=np.int64), np.setdiff1d(taken, kept))
        return part

    for choice in choices:
        units = choice.units
        part = keep(units.output, 1, np.unique(units.columns), units.columns_of(choice.kept))
        part.target = units.name
        for layer, rows in units.rows.items():
            part = keep(layer, 0, np.unique(rows), units.rows_of(layer, choice.kept))
            bias = tensors.get(stored_names.get(f"{layer.name}.bias", ""))
            if bias is not None and layer.expert is None:
                axis = 1 if part.transposed else 0
                edit(bias).slice_of(None).kept[0] = part.kept[axis]
    return edits


def words_of_tensor(weight: Any) -> Words:
    """The bits of a torch tensor of 16, 32 or 64 bits on the CPU, in its shape."""
    import torch

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    words: Words = weight.contiguous().view(integer).numpy().view(WORD[weight.element_size()])
    return words


def stored_words(tensor: StoredTensor) -> np.dtype[Any]:
    """The dtype of a tensor's words."""
    return WORD[word_bytes(tensor)]


def bytes_of_shape(tensor: StoredTensor, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this dtype with another shape."""
    return int(np.prod(shape)) * BITS[tensor.dtype] // 8
