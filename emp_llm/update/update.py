"""Updates of the kept weights, and the refit. torch is imported when one is solved.

A new update that searches for its own mask is one file with a class like `admm.Admm`. Its fields
are its parameters: in Python, on the command line once the class is defined, and in records.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from emp_llm.common.declared import Flag, Node

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from emp_llm.update.least_squares import Solution

Pattern = tuple[int, int]
LEAST_DAMPING = 0.01


@dataclass(frozen=True)
class Moments:
    """What a layer saw and what it shall return: sums over the calibration tokens t with weights
    w_t.

    Attributes:
        gram: sum_t w_t xhat_t xhat_t^T of its inputs xhat in the pruned model, float32, shape
            (inputs, inputs).
        right: sum_t w_t y_t xhat_t^T of the outputs y that it shall return, float32, shape
            (outputs, inputs). None: those of the dense weights on the same inputs.
        energy: sum_t w_t y_tr^2 of each output r, float64, shape (outputs,).
        tokens: their number.
    """

    gram: "Tensor"
    right: "Tensor | None"
    energy: "Tensor"
    tokens: int


@dataclass(frozen=True)
class Allowed:
    """What may stay of a layer: one of the three.

    Attributes:
        mask: the weights that stay, bool, shape (outputs, inputs).
        counts: how many stay, int64; of each row, shape (outputs,), or of the matrix, shape (1,).
        pattern: (N, M): N of every M consecutive inputs.
    """

    mask: "Tensor | None" = None
    counts: "Tensor | None" = None
    pattern: Pattern | None = None

    def to(self, device: "torch.device") -> "Allowed":
        """The same on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        counts = None if self.counts is None else self.counts.to(device)
        return Allowed(mask, counts, self.pattern)


@dataclass(frozen=True, kw_only=True)
class Update(Node, ABC):
    """New values for the weights that stay, layer by layer, by the outputs on calibration tokens.

    Attributes:
        name: of the stage of a run; of a search, the method.
        title: for messages and the model card.
        searches: whether it decides which weights stay; else masks are given.
        keeps: the groups in which a search keeps the number of weights that the recipe says.
    """

    kinds: ClassVar[dict[str, Any]] = {}
    title: ClassVar[str] = ""
    searches: ClassVar[bool] = False
    keeps: ClassVar[Literal["row", "matrix"]] = "row"

    @property
    @abstractmethod
    def refit(self) -> "Refit | None":
        """The refit of the kept weights; None: the values of the search stay."""

    @property
    def restores_dense(self) -> bool:
        """Whether the target is the dense model's output; if not, the dense weights' output on the
        pruned inputs.
        """
        return True

    @property
    def relative(self) -> bool:
        """Whether the error of a token is measured relative to its output."""
        return self.refit is not None and self.refit.weighting == "relative"

    @property
    def restores_block(self) -> bool:
        """Whether the last layer of a block restores the outputs of the block."""
        return self.refit is None or self.refit.target == "block"

    def damping_of(self, inputs: int, tokens: int) -> float:
        """The damping that is tried first for a layer, as a share of the mean second moment."""
        given = None if self.refit is None else self.refit.damping
        return damping_for(inputs, tokens) if given is None else given

    @abstractmethod
    def solve(
        self, weight: "Tensor", moments: Moments, allowed: Allowed, damping: float
    ) -> "Solution":
        """The values, and the mask, of a layer.

        Args:
            weight: the dense weights, float32, shape (outputs, inputs).
            moments: of its inputs and outputs.
            allowed: a mask, or what a search may keep.
            damping: of `damping_of`.

        Raises:
            NonFiniteError: an argument holds NaN or infinity, or values too large for their
                products.
        """

    def workspace_bytes(self, outputs: int, inputs: int) -> int:
        """The memory that `solve` needs beside its arguments, with the weights that it returns."""
        from emp_llm.update.least_squares import workspace_bytes

        return workspace_bytes(outputs, inputs)

    def operations(self, outputs: int, inputs: int) -> float:
        """Multiplications and additions of `solve`, about: those of a refit."""
        return (40 * outputs + 3 * inputs) * float(inputs * inputs)


@dataclass(frozen=True, kw_only=True)
class Refit(Update):
    """The kept weights of a given mask at the least-squares optimum (`least_squares`).

    Attributes:
        weighting: of the tokens: "equal", or "relative": 1 / ||y_t||^2 for the dense outputs y_t.
        target: what the last layer of a block restores.
        damping: the pull towards the dense weights; None: inputs / tokens, at least 0.01.
    """

    name = "refit"
    title = "a refit of the kept weights"
    switch = Flag(
        "Move the kept weights so that each layer's outputs stay close to the dense model's.",
        name="refit",
    )
    weighting: Annotated[
        Literal["equal", "relative"],
        Flag("Weight of each token: equal, or relative to its output.", name="refit_weighting"),
    ] = "equal"
    target: Annotated[
        Literal["block", "layer"],
        Flag(
            "What the last layer of a block restores: the outputs of the block, or of the layer.",
            name="refit_target",
        ),
    ] = "block"
    damping: Annotated[
        float | None,
        Flag(
            "Pull towards the dense weights, as a share of the mean second moment; default: inputs "
            "/ tokens, at least 0.01.",
            name="refit_damping",
            above=0,
            maximum=1,
        ),
    ] = None

    @property
    def refit(self) -> "Refit":
        return self

    def solve(
        self,
        weight: "Tensor",
        moments: Moments,
        allowed: Allowed,
        damping: float,
        start: "Tensor | None" = None,
    ) -> "Solution":
        """The values of a mask.

        Args:
            weight, moments, allowed, damping: of `Update.solve`.
            start: values near the optimum, such as a search's, float32, shape (outputs, inputs).
        """
        from emp_llm.update.least_squares import refit_rows

        assert allowed.mask is not None
        return refit_rows(
            weight,
            allowed.mask,
            moments.gram,
            moments.right,
            damping=damping,
            energy=moments.energy,
            start=start if moments.right is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class Search(Update):
    """An update that decides which weights stay, within the counts of a recipe.

    Attributes:
        refit: of the weights that it keeps; None: the values that it found stay.
    """

    searches = True
    refit: Refit | None = None


def damping_for(inputs: int, tokens: int) -> float:
    """A damping for a number of calibration tokens: inputs / tokens, at least 0.01.

    With few tokens for each input, a refit follows chance. On tokens that a refit has not seen,
    this is the best damping or within 2 % of it, on three models, from 2 to 250 tokens for each
    input.
    """
    return max(LEAST_DAMPING, inputs / max(tokens, 1))
