"""A size in place of a sparsity: at most so many parameters, or so many bytes of weights."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import packed_bytes, word_bytes
from emp_llm.common.errors import UserError, format_bytes
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Recipe
from emp_llm.selection.rule import floor_count

_HEADER = 320  # bytes of a packed tensor's entries in headers, at most
_LEAST = 1000  # without a unit
_UNITS = {
    "": 1,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "KI": 2.0**10,
    "MI": 2.0**20,
    "GI": 2.0**30,
    "TI": 2.0**40,
}


@dataclass(frozen=True)
class Budget:
    """What a pruned model may have.

    Attributes:
        flag: the option and its value, as the user wrote it.
        parameters: number of parameters; of weights, those that are not zero.
        bytes: of all tensors in the dtypes of the checkpoint; of weights, in the packed format. One
            of both is None.
    """

    flag: str
    parameters: float | None
    bytes: float | None

    @classmethod
    def of(cls, parameters: str | None, memory: str | None) -> "Budget | None":
        """The budget of --parameters and --memory; None if neither is given. UserError if it is
        not a size.
        """
        if parameters is not None and memory is not None:
            raise UserError("--parameters and --memory both set the size; give only one.")
        if parameters is not None:
            return cls(
                f"--parameters {parameters}",
                _number(parameters, r"[BM]?", "--parameters", "6e9 or 6B"),
                None,
            )
        if memory is not None:
            return cls(
                f"--memory {memory}",
                None,
                _number(memory, r"[KMGT]I?B|B|", "--memory", "24GB or 20GiB"),
            )
        return None

    def fits(self, parameters: int, size: int) -> bool:
        """Whether a model of so many parameters and bytes keeps to the budget."""
        return (
            parameters <= self.parameters
            if self.parameters is not None
            else size <= (self.bytes or 0)
        )

    def least(self, steps: int, size_at: Callable[[int], tuple[int, int]]) -> int:
        """The fewest of `steps` steps of removal after which the model keeps to the budget.

        Args:
            steps: the most that can go.
            size_at: parameters and bytes after so many steps.

        Raises:
            UserError: the dense model keeps to it, or no smaller one does.
        """
        if self.fits(*size_at(0)):
            raise UserError(
                f"{self.flag}: the dense model has {self._words(size_at(0))}, which is "
                "no more. Leave it out."
            )
        if not self.fits(*size_at(steps)):
            raise UserError(
                f"{self.flag}: what cannot be removed has {self._words(size_at(steps))}. Give "
                "more, or prune other parts too."
            )
        # the first is too large, the last fits
        low = 0
        high = steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(*size_at(middle)) else (middle, high)
        return high

    def _words(self, size: tuple[int, int]) -> str:
        return f"{size[0]:,} parameters" if self.parameters is not None else format_bytes(size[1])


def _number(text: str, unit: str, flag: str, example: str) -> float:
    size = re.fullmatch(rf"([0-9.]+(?:e[0-9]+)?) ?({unit})", text.strip(), re.IGNORECASE)
    try:
        value = float(size[1])  # type: ignore[index]
        units = size[2].upper()  # type: ignore[index]
    except (TypeError, ValueError):
        hint = f" A share is --sparsity {text.strip()}." if text.strip().endswith("%") else ""
        raise UserError(f"{flag} {text!r} is not a size such as {example}.{hint}") from None
    if not units and value < _LEAST:
        unit = "B" if flag == "--parameters" else "GB"
        raise UserError(f"{flag} {text} has no unit. Did you mean {text.strip()}{unit}?")
    return value * (
        1e9 if units == "B" and flag == "--parameters" else _UNITS[units.removesuffix("B")]
    )


def with_budget(
    recipe: Recipe, budget: Budget, checkpoint: Checkpoint, targets: list[Target]
) -> Recipe:
    """The recipe with the lowest sparsity whose weights keep to a budget: parameters that are not
    zero, or packed bytes.

    Raises:
        UserError: the dense model keeps to it, or no sparsity does.
    """
    rest = checkpoint.parameters - sum(target.matrix.numel for target in targets)
    others = sum(tensor.end - tensor.start + _HEADER for tensor in checkpoint.tensors.values())
    others -= sum(target.matrix.numel * word_bytes(target.matrix.stored) for target in targets)
    adaptive = recipe.adaptive
    steps = 1_000_000

    def size_at(step: int) -> tuple[int, int]:
        kept = 0
        size = 0
        for target in targets:
            matrix = target.matrix
            sparsity = step / steps
            if adaptive:
                zeros = floor_count(sparsity * matrix.numel)
            else:
                zeros = matrix.rows * floor_count(sparsity * matrix.columns)
            kept += matrix.numel - zeros
            size += packed_bytes(matrix.numel, word_bytes(matrix.stored), zeros)
        return rest + kept, others + size

    return recipe.at(budget.least(steps - 1, size_at) / steps)
