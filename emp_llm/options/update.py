"""How kept weights move: the settings of a refit, of SparseGPT and of ADMM."""

from dataclasses import dataclass
from typing import Literal

_LEAST_DAMPING = 0.01


@dataclass(frozen=True)
class Update:
    """How kept weights move.

    Attributes:
        search: the method that chooses the mask while it moves the weights; None: the masks are given.
        refit: the kept weights end at the least-squares optimum of their mask. Needed without a search.
        damping: pull towards the dense weights, as a share of the mean second moment; None: `damping_for` the tokens.
        weighting: of the tokens: equal, or relative to the square of the layer's dense output.
        target: what the last layer of a block restores: the outputs of the block, where its output is added to that of the
            block, or those of the layer.
        pattern: (N, M) of a search that keeps N of every M weights.
        min_expert_tokens: experts that saw fewer tokens keep their weights.
    """

    search: Literal["sparsegpt", "admm"] | None = None
    refit: bool = True
    damping: float | None = None
    weighting: Literal["equal", "relative"] = "equal"
    target: Literal["block", "layer"] = "block"
    pattern: tuple[int, int] | None = None
    min_expert_tokens: int = 0

    def damping_of(self, inputs: int, tokens: int) -> float:
        """The damping that is tried first, for a layer with some inputs, on some tokens."""
        if self.search == "sparsegpt" and not self.refit:
            return _LEAST_DAMPING  # the paper's
        return damping_for(inputs, tokens) if self.damping is None else self.damping


def damping_for(inputs: int, tokens: int) -> float:
    """A damping for a number of calibration tokens: inputs / tokens, at least 0.01.

    The fewer tokens there are for each input, the more of a refit is chance. On tokens that a refit has not seen, this is the
    best damping or within 2 % of it, on three models, from 2 to 250 tokens for each input (scripts/results/damping.md).
    """
    return max(_LEAST_DAMPING, inputs / max(tokens, 1))
