"""The recipe: all options that define the masks of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options
from emp_llm.options.criterion import GIVEN, CriterionOptions, ScoreOptions
from emp_llm.options.refit import RefitOptions
from emp_llm.selection.criteria import CRITERIA, magnitude
from emp_llm.selection.scheme import CountBy, Group

MatchBy = Literal["total", "matrix"]
Shares = Literal["uniform", "owl"]
TowerChoice = Literal["language", "vision", "all"]


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """The layers to prune."""

    targets: Annotated[str | list[str], Opt("Layers: mlp, attention, all-linear, name suffixes a,b, or a regex.")] = "mlp"
    ignore: Annotated[str | list[str] | None, Opt("Layers to leave out: name suffixes a,b, or a regex.")] = None
    tower: Annotated[TowerChoice, Opt("Part of a multimodal model to prune: language, vision, or all.")] = "language"
    blocks: Annotated[str | None, Opt("Name of the list of decoder blocks; default: detected.")] = None
    min_expert_tokens: Annotated[int, Opt("Score experts by magnitude if they see fewer tokens.", minimum=0)] = 32
    allow_partial: Annotated[bool, Opt("Continue if more than half of the weights in blocks cannot be pruned.")] = False

    def check_targets(self) -> None:
        """Raise UserError for an unknown tower, or one that --blocks excludes."""
        self.check_choice("tower", TowerChoice)
        if self.blocks is not None and self.tower != "language":
            raise UserError("--blocks and --tower both choose the blocks; give only one.")


@dataclass(frozen=True, kw_only=True)
class ShareOptions(Options):
    """The shares of the blocks, for methods with a fixed sparsity and activations.

    Attributes:
        shares: None: uniform.
        owl_lambda: the largest distance of a block's sparsity from that of all; None: 0.08.
        owl_m: multiple of a block's mean score above which a score is an outlier; None: 5.
    """

    shares: Annotated[
        Shares | None, Opt("Sparsity of the blocks: uniform, or owl: lower where more scores are outliers; default: uniform.")
    ] = None
    owl_lambda: Annotated[float | None, Opt("Largest distance of a block's sparsity from --sparsity; default: 0.08.")] = None
    owl_m: Annotated[float | None, Opt("Scores above this multiple of their block's mean are outliers; default: 5.")] = None

    def check_shares(self) -> None:
        """Raise UserError for an unknown value, or options without effect."""
        self.check_choice("shares", Shares)
        for name in ("owl_lambda", "owl_m"):
            if getattr(self, name) is not None and self.shares != "owl":
                raise UserError(f"--{name.replace('_', '-')} is an option of --shares owl; add that, or leave it out.")


@dataclass(frozen=True, kw_only=True)
class Recipe(RefitOptions, ShareOptions, ScoreOptions, CriterionOptions, TargetOptions):
    """All options that define the weights of a run: its masks, and whether the kept weights are refitted.

    Attributes:
        method: a criterion: "wanda", "magnitude", "relative", "ria", "sparsegpt", "admm", the name of a registered one, or
            "scores". With the prefix "emp-", the effective number sets the number of kept weights; without it, the sparsity is
            fixed. None: "emp-" and the criterion given by `criterion` or `scores`, else "emp-wanda".
        beta, order, neff_dtype: of the effective number; for emp methods only. None: 1, 2, float64.
        sparsity, pattern, match: for the other methods, at most one. None: sparsity 0.5. With an emp method, `sparsity` is that
            of all targets, and takes the place of `beta`.
        match_by: "total": remove as many weights in total as the earlier run; "matrix": as many in every matrix. None: total.
        group: the weights that compete with each other: those of a row, of a matrix, or of all targets.
    """

    method: Annotated[
        str,
        Opt(
            "wanda, magnitude, relative, ria, sparsegpt, admm, taylor (heads), own; emp-NAME: N_eff sets counts; "
            "default: emp-wanda."
        ),
    ] = None  # type: ignore[assignment]  # __post_init__ sets it
    beta: Annotated[float | None, Opt("Keep beta x N_eff (emp methods); default: 1.")] = None
    order: Annotated[float | None, Opt("Hill order of the effective number (emp methods); default: 2.")] = None
    neff_dtype: Annotated[str | None, Opt("float64, or bfloat16 for the paper's emp-magnitude arithmetic.")] = None
    sparsity: Annotated[
        float | None,
        Opt("Fraction to remove: of each group, default 0.5; with emp methods of all targets, by the beta that does."),
    ] = None
    pattern: Annotated[str | None, Opt("N:M, keep N of every M inputs (other methods).")] = None
    match: Annotated[Path | None, Opt("Output of an earlier run; remove as many weights as that run (other methods).")] = None
    match_by: Annotated[MatchBy | None, Opt("Match the total of that run, or every matrix; default: total.")] = None
    group: Annotated[Group, Opt("Weights that compete with each other: of a row, a matrix, or all targets.")] = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method is None:
            object.__setattr__(self, "method", f"emp-{self.own_name or 'wanda'}")

    @property
    def adaptive(self) -> bool:
        """Whether the scores determine the number of kept weights."""
        return self.method.startswith("emp-")

    @property
    def criterion_name(self) -> str:
        return self.method.removeprefix("emp-")

    @property
    def needs_activations(self) -> bool:
        return CRITERIA[self.criterion_name].needs_norms

    @property
    def fits(self) -> bool:
        """Whether weights are fitted to the calibration text: by a refit, or by a method that changes the kept weights."""
        return self.refit or CRITERIA[self.criterion_name].fits

    @property
    def searches(self) -> bool:
        """Whether masks and weights are searched for together, by ADMM."""
        known = CRITERIA[self.criterion_name]
        return known.fits and not known.by_matrix

    @property
    def fit_flag(self) -> str:
        """The option that asks for a fit."""
        return f"--method {self.method}" if CRITERIA[self.criterion_name].fits else "--refit"

    @property
    def without_fit(self) -> str:
        """What to do for a run without a fit, as the beginning of a sentence."""
        return "Use --method wanda" if CRITERIA[self.criterion_name].fits else "Leave out --refit"

    @property
    def relative(self) -> bool:
        """Whether the norms are those relative to the outputs."""
        return CRITERIA[self.criterion_name].relative or self.score == "relative"

    @property
    def counts_by(self) -> CountBy:
        """The scores whose effective number sets the counts of an emp method."""
        if not self.adaptive or CRITERIA[self.criterion_name].score is magnitude:
            return "own"
        return self.count_by or ("magnitude" if CRITERIA[self.criterion_name].relative else "own")

    def with_method(self, method: str) -> "Recipe":
        """The recipe with another method. Options of the scores stay only if the method uses them."""
        known = CRITERIA.get(method.removeprefix("emp-"))
        unused: dict[str, Any] = {} if method.startswith("emp-") else {"count_by": None}
        if method.startswith("emp-") or (known is not None and not known.needs_norms):
            unused |= {"shares": None, "owl_lambda": None, "owl_m": None}
        if known is not None and not known.own:
            unused |= {"criterion": None, "scores": None, "score_map": None}
        if known is not None and (not known.needs_norms or known.relative):
            unused["score"] = None
        return replace(self, method=method, **unused)

    def check_recipe(self) -> None:
        """Raise UserError for invalid or conflicting options. Reads neither the model nor other files."""
        self.check_targets()
        self.check_criterion()
        self.check_score()
        self.check_shares()
        check_method(self.method)
        self._check_own()
        self._check_method()
        self._check_fit()
        given = [name for name in ("sparsity", "pattern", "match") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"--{given[0]} and --{given[1]} both set the sparsity; give only one.")
        if self.shares == "owl":
            self._check_owl(given)
        self.check_choice("group", Group)
        if self.min_expert_tokens < 0:
            raise UserError(f"--min-expert-tokens must be 0 or more, got {self.min_expert_tokens}.")
        if self.match_by is not None and self.match is None:
            raise UserError(f"--match-by {self.match_by} needs an earlier run; name it with --match.")
        self.check_choice("match_by", MatchBy)

    def _check_fit(self) -> None:
        """Raise UserError for options that do not go with a refit, or with a method that chooses its masks with the weights."""
        self.check_refit()
        known = CRITERIA[self.criterion_name]
        if known.by_matrix and self.adaptive:
            raise UserError(f"--method {self.method}: SparseGPT has no scores to count. Use --method sparsegpt, or emp-admm.")
        if known.fits and (self.group == "all" or (known.by_matrix and self.group != "row")):
            raise UserError(
                f"--group {self.group} does not go with method {self.method}, which decides each matrix. Leave it out."
            )

    def check_propagated(self) -> None:
        """Raise UserError if the masks of a block cannot be decided before the blocks after it are calibrated."""
        if not self.needs_activations:
            raise UserError(f"--propagate pruned is for methods that need activations; {self.method} needs none.")
        if self.adaptive and self.sparsity is not None and self.counts_by == "own":
            raise UserError("--propagate pruned prunes block by block, and --sparsity needs the numbers of all; give --beta.")
        if self.shares == "owl":
            raise UserError(
                "--propagate pruned prunes block by block, and --shares owl needs the scores of all; leave one out."
            )
        if self.group == "all":
            raise UserError(
                "--propagate pruned prunes block by block, --group all prunes all blocks at once; use --group row or matrix."
            )

    def _check_owl(self, given: list[str]) -> None:
        """Raise UserError for a recipe whose blocks cannot have shares by their outliers."""
        if not self.needs_activations:
            raise UserError(f"--shares owl is for methods that need activations; {self.method} needs none. Use --method wanda.")
        for name in set(given) - {"sparsity"}:
            raise UserError(f"--shares owl goes with --sparsity, not with --{name}; leave one out.")
        if self.group == "all":
            raise UserError("--shares owl fixes the sparsity of every block; use --group row or matrix, not all.")

    def _check_own(self) -> None:
        """Raise UserError if the method and the user's own scores do not belong together."""
        name, own = self.criterion_name, self.own_name
        if name == GIVEN and self.scores is None:
            raise UserError(f"--method {self.method} needs your scores; give a file with --scores.")
        if own is not None and name != own:
            flag = "--scores" if self.scores is not None else "--criterion"
            raise UserError(f"--method {self.method} does not use {flag}; leave one out, or give --method {own} or emp-{own}.")
        if self.score_map is not None and not CRITERIA[name].own:
            raise UserError(f"--map is for scores of your own; the scores of {name} are never negative. Leave it out.")

        known = CRITERIA[name]
        if self.score is not None and not known.needs_norms:
            raise UserError(
                f"--score chooses the norms of the inputs, and method {self.method} needs no activations. Leave it out, or use "
                "--method wanda or emp-wanda."
            )
        if self.score == "wanda" and known.relative:
            raise UserError(f"--method {self.method} has relative norms; leave out --score wanda, or use --method wanda.")

    def _check_method(self) -> None:
        """Raise UserError for an option of emp methods with another method, and the reverse."""
        if self.adaptive and self.sparsity is not None:
            for name in ("beta", "neff_dtype"):
                if getattr(self, name) is not None:
                    raise UserError(f"--sparsity finds the beta of {self.method}; leave out --{name.replace('_', '-')}.")
        if self.adaptive and self.shares == "owl":
            other = self.criterion_name if self.needs_activations else "wanda"
            raise UserError(
                f"--shares owl does not go with method {self.method}: the effective number sets its sparsity. Use --method "
                f"{other}."
            )
        for name in ("pattern", "match") if self.adaptive else ("beta", "order", "neff_dtype", "count_by"):
            if getattr(self, name) is not None:
                by_matrix = CRITERIA[self.criterion_name].by_matrix
                other = self.criterion_name if self.adaptive else "emp-admm" if by_matrix else f"emp-{self.criterion_name}"
                flag = name.replace("_", "-")
                if self.adaptive:
                    rule = "the effective number sets its sparsity, and --beta scales it"
                else:
                    rule = "its sparsity is fixed, and --sparsity sets it"
                instead = "Use --sparsity, or" if name == "beta" else "Use"
                raise UserError(f"--{flag} does not go with method {self.method}: {rule}. {instead} --method {other}.")


def check_method(method: str, flag: str = "--method") -> None:
    """Raise UserError unless a method is a registered criterion, with or without the prefix "emp-"."""
    if method.removeprefix("emp-") not in CRITERIA:
        known = {name: criterion for name, criterion in CRITERIA.items() if name != GIVEN}
        names = ", ".join(name if criterion.by_matrix else f"emp-{name}, {name}" for name, criterion in known.items())
        raise UserError(
            f"{flag} {method!r} is not one of {names}. A criterion of your own is named by --criterion MODULE:FUNCTION."
        )
