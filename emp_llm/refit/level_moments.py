"""The second moments of a level's inputs, in the pruned and in the dense model, token by token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.options.refit import Weighting


@dataclass
class LayerMoments:
    """The moments of one input, weighted for one target or for all that share it.

    Attributes:
        gram: sum_t w_t xhat_t xhat_t^T over the inputs xhat in the pruned model, float32, shape (inputs, inputs).
        cross: sum_t w_t xhat_t x_t^T with the inputs x in the dense model, float32; None: equal to `gram`.
        energy: sum_t w_t y_tr^2 of each wanted output r by target, float64, shape (outputs,).
        wanted: sum_t w_t y_t xhat_t^T with the wanted outputs y, float32, shape (outputs, inputs); None: y_t = W x_t, or
            W xhat_t without `cross`.
        tokens: number of tokens.
    """

    gram: Tensor
    cross: Tensor | None
    energy: dict[str, Tensor]
    tokens: int = 0
    wanted: Tensor | None = None

    def to(self, device: torch.device) -> "LayerMoments":
        """The moments on a device."""
        cross, wanted = (None if each is None else each.to(device) for each in (self.cross, self.wanted))
        energy = {name: each.to(device) for name, each in self.energy.items()}
        return LayerMoments(self.gram.to(device), cross, energy, self.tokens, wanted)

    @classmethod
    def total(cls, parts: "list[LayerMoments]") -> "LayerMoments":
        """The sum of the moments of several ranks, in their order."""
        cross, wanted = _sum([part.cross for part in parts]), _sum([part.wanted for part in parts])
        energy = {name: torch.stack([part.energy[name] for part in parts]).sum(0) for name in parts[0].energy}
        gram = torch.stack([part.gram for part in parts]).sum(0)
        return cls(gram, cross, energy, sum(part.tokens for part in parts), wanted)


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.stack(known).sum(0) if known else None


class LevelMoments:
    """Collects the moments of the targets of a level.

    Args:
        weighting: of the tokens: equal, or relative to the norm of each target's dense output.
    """

    def __init__(self, weighting: Weighting) -> None:
        self._weighting = weighting
        self._moments: dict[str, LayerMoments] = {}

    def add(self, targets: list[Target], pruned: Tensor, dense: Tensor | None, shares: list[Tensor | None]) -> None:
        """Add the inputs of one batch.

        Args:
            targets: share the input.
            pruned: inputs in the pruned model, float32, shape (tokens, inputs).
            dense: of the same tokens in the dense model; None: the target's outputs on the pruned model's inputs are to be
                kept, because experts see other tokens there.
            shares: the weights of the tokens for each target, as `token_weights` returns them.
        """
        for target, share in zip(targets if shares[0] is not None else targets[:1], shares, strict=False):
            moments = self._moments.get(target.name)
            if moments is None:
                gram = pruned.new_zeros(pruned.shape[1], pruned.shape[1])
                moments = self._moments[target.name] = LayerMoments(gram, None if dense is None else gram.clone(), {})
            moments.tokens += pruned.shape[0]
            left = pruned.T if share is None else (pruned * share[:, None]).T
            moments.gram.addmm_(left, pruned)
            if dense is not None and moments.cross is not None:
                moments.cross.addmm_(left, dense)

    def add_wanted(self, target: Target, pruned: Tensor, wanted: Tensor, share: Tensor | None) -> None:
        """Add the inputs of one batch, and the outputs that a target without company shall return.

        Args:
            pruned: inputs in the pruned model, float32, shape (tokens, inputs).
            wanted: float32, shape (tokens, outputs).
            share: the weights of the tokens.
        """
        self.add([target], pruned, None, [share])
        moments = self._moments[target.name]
        if moments.wanted is None:
            moments.wanted = pruned.new_zeros(wanted.shape[1], pruned.shape[1])
        moments.wanted.addmm_((wanted if share is None else wanted * share[:, None]).T, pruned)
        self.add_energy([target], target, energy_of(wanted, share))

    def add_energy(self, targets: list[Target], target: Target, energy: Tensor) -> None:
        """Add to the energy of a target, one of those that share its input: float64, shape (outputs,)."""
        moments = self.of(targets, target)
        if moments is not None:
            known = moments.energy.get(target.name)
            moments.energy[target.name] = energy if known is None else known + energy

    def of(self, targets: list[Target], target: Target) -> LayerMoments | None:
        """The moments of a target among those that share its input; None if it saw no token."""
        return self._moments.get(targets[0].name if self._weighting == "equal" else target.name)

    def reduce(self) -> None:
        """Add up the moments of all ranks. A collective call.

        Raises:
            UserError: a moment is not finite.
        """
        if ranks().count > 1:
            shares = ranks().gather({name: moments.to(torch.device("cpu")) for name, moments in self._moments.items()})
            for name in dict.fromkeys(name for share in shares for name in share):
                held = [share[name] for share in shares if name in share]
                device = self._moments[name].gram.device if name in self._moments else torch.device("cpu")
                self._moments[name] = LayerMoments.total(held).to(device)
        for name, moments in self._moments.items():
            known = [each for each in (moments.gram, moments.cross, moments.wanted) if each is not None]
            if not all(bool(torch.isfinite(each).all()) for each in known):
                raise UserError(
                    f"{name}: the second moments of its inputs hold NaN or infinity, so it cannot be fitted. Try --dtype "
                    "float32, or prune without a fit."
                )


def token_weights(weighting: Weighting, outputs: Tensor) -> Tensor | None:
    """The weight of each token: 1 / ||y_t||^2 for the dense outputs y_t, 0 for outputs of zero; None for equal weights.

    Args:
        outputs: of a layer, with its bias, shape (tokens, outputs).
    """
    if weighting == "equal":
        return None
    squares = outputs.float().square().sum(1)
    return torch.where(squares > 0, squares.reciprocal(), torch.zeros_like(squares))


def energy_of(outputs: Tensor, share: Tensor | None) -> Tensor:
    """sum_t w_t y_tr^2 of each output r, float64, shape (outputs,).

    Args:
        outputs: without the bias, shape (tokens, outputs).
        share: the weights w_t of the tokens, shape (tokens,); None: all 1.
    """
    squares = outputs.float().square()
    return (squares if share is None else squares * share[:, None]).sum(0).double()
