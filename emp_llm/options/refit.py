"""Options of the refit: kept weights moved to the least-squares optimum."""

from dataclasses import dataclass
from typing import Annotated, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options

Weighting = Literal["equal", "relative"]
FitTarget = Literal["block", "layer"]


@dataclass(frozen=True, kw_only=True)
class RefitOptions(Options):
    """The refit of the kept weights, block by block."""

    refit: Annotated[bool, Opt("Move the kept weights so that each layer's outputs stay close to the dense model's.")] = False
    refit_weighting: Annotated[
        Weighting | None, Opt("Weight of each token: equal, or relative to its output; default: equal.")
    ] = None
    refit_target: Annotated[
        FitTarget | None,
        Opt("What the last layer of a block restores: the outputs of the block, or of the layer; default: block."),
    ] = None
    refit_damping: Annotated[
        float | None,
        Opt("Pull towards the dense weights, as a share of the mean second moment; default: inputs / tokens, at least 0.01."),
    ] = None

    @property
    def weighting(self) -> Weighting:
        return self.refit_weighting or "equal"

    @property
    def restored(self) -> FitTarget:
        """What the last layer of a block restores."""
        return self.refit_target or "block"

    def check_refit(self) -> None:
        """Raise UserError for an invalid value, or one without --refit."""
        self.check_choice("refit_weighting", Weighting)
        self.check_choice("refit_target", FitTarget)
        if self.refit_damping is not None and not 0 < self.refit_damping <= 1:
            raise UserError(f"--refit-damping must be above 0 and at most 1, got {self.refit_damping:g}.")
        for name in ("refit_weighting", "refit_target", "refit_damping"):
            if not self.refit and getattr(self, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} has no effect without --refit. Add --refit, or leave it out.")
