"""The recipe: everything that defines which weights go, and which values stay. A tree of values.

    Recipe(score=Wanda(), counts=Effective(beta=1), targets=Targets("mlp"))
    Recipe(score=Magnitude(), counts=Share(0.5), update=Admm(refit=Refit()), heal=Heal(steps=300))

Each node has its defaults, its checks and its behaviour. `recipe_options.py` turns the
flat options of the command line, of reports and of manifests into the tree, and back.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from emp_llm.common.errors import UserError, quotable
from emp_llm.options.base import GivenOptions, Opt, check_fields, check_values, flag_of, options_of
from emp_llm.options.criterion import custom_name, find_criterion
from emp_llm.selection.criteria import GIVEN, MAGNITUDE, RIA, WANDA, Criterion
from emp_llm.selection.rule import Group, KeepRule, check_beta, check_order
from emp_llm.update.update import SEARCHES, Refit, Update

MatchBy = Literal["total", "matrix"]
Tower = Literal["language", "vision", "all"]
ScoreMap = Literal["abs", "shift", "exp"]
_NO_PATTERN = (
    "--pattern must be N:M, such as 2:4, which keeps N of every M weights, 1 <= N < M; got {}."
)


# Scores: how much a weight matters.


@dataclass(frozen=True)
class Score(ABC):
    """How much a weight matters: a criterion, and the norms that it is given.

    Attributes:
        name: the name in methods.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    @abstractmethod
    def criterion(self) -> Criterion:
        """The function that scores weights."""

    @property
    def relative(self) -> bool:
        """Whether its norms are relative to the outputs of each token."""
        return False


@dataclass(frozen=True)
class Magnitude(Score):
    """|W_ij|. It needs no text."""

    name = "magnitude"
    criterion = MAGNITUDE


@dataclass(frozen=True)
class NormScore(Score):
    """Scores by the norms of the inputs.

    Attributes:
        norms: "plain": ||X_j||; "relative": sqrt(sum_t x_tj^2 / ||y_t||^2), relative to each
            token's output.
    """

    norms: Literal["plain", "relative"] = "plain"

    @property
    def relative(self) -> bool:
        return self.norms == "relative"


@dataclass(frozen=True)
class Wanda(NormScore):
    """|W_ij| * ||X_j|| (Sun et al. 2023)."""

    name = "wanda"
    criterion = WANDA


@dataclass(frozen=True)
class Ria(NormScore):
    """Relative importance times the root of the norms (Zhang et al. 2024)."""

    name = "ria"
    criterion = RIA


@dataclass(frozen=True)
class Relative(Score):
    """Wanda with relative norms; magnitudes set EMP's counts."""

    name = "relative"
    criterion = WANDA
    relative = True


# By the name of the method. With "emp-" in front, N_eff sets the counts.
METHODS: dict[str, type[Score]] = {score.name: score for score in (Wanda, Magnitude, Relative, Ria)}


@dataclass(frozen=True)
class Own(Score):
    """A criterion of your own.

    Attributes:
        function: of (weight) or (weight, inputs); or its name: MODULE:FUNCTION, FILE.py:FUNCTION.
        norms: the norms of the inputs that it is given: "plain" or "relative", as in `NormScore`.
        score_map: how signed scores become non-negative; None: they must not be negative.
        named: the name of the function, if `function` is a module or file alone.
        source: in records: the SHA-256 of the file. A recipe with it cannot score.
    """

    function: Any
    norms: Literal["plain", "relative"] = "plain"
    score_map: ScoreMap | None = None
    named: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.function, str) and not callable(self.function):
            raise UserError(f"--criterion must be a function or its name, got {self.function!r}.")
        known = custom_name(self.function)
        if self.named is not None and known is not None:
            raise UserError(
                f"named is for a module or a file, and the function is {known}. Leave it out."
            )
        if self.named is None and known is None:
            raise UserError(f"--criterion {self.function} names no function; add :FUNCTION to it.")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.named or custom_name(self.function) or ""

    @property
    def relative(self) -> bool:
        return self.norms == "relative"

    @property
    def criterion(self) -> Criterion:
        if self.source is not None:
            raise UserError(
                f"the criterion {self.name} decided the masks; add --criterion {self.function}."
            )
        return find_criterion(self.name, self.function)


@dataclass(frozen=True)
class Given(Score):
    """Scores of your own.

    Attributes:
        scores: a safetensors file, or a folder of such files, with a score for each weight, under
            the weight's name and with its shape; or a mapping from names to tensors.
        score_map: how signed scores become non-negative; None: they must not be negative.
        digest: in records: a hash of the scores.
    """

    name = "scores"
    criterion = GIVEN
    scores: Any
    score_map: ScoreMap | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scores, str | Path | Mapping):
            raise UserError(
                "--scores must be a file, a folder, or a mapping from names to tensors, got "
                f"{type(self.scores).__name__}."
            )
        missing = isinstance(self.scores, str | Path) and not Path(self.scores).exists()
        if missing and self.digest is None:
            raise UserError(
                f"--scores {self.scores}: no such file. Give a safetensors file "
                "with a tensor for each weight."
            )


@dataclass(frozen=True)
class UnitScore(Score):
    """A criterion of heads, neurons, experts or layers, not of weights.

    Attributes:
        unit_criterion: its name, such as "taylor", "reap" or "cosine".
    """

    criterion = GIVEN  # it needs no norms of inputs
    unit_criterion: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.unit_criterion


# Counts: how many weights of each group stay.


@dataclass(frozen=True)
class Counts:
    """How many weights of each group stay."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""

    @property
    def sparsity(self) -> float | None:
        """The fraction of weights that goes; None if other fields set it."""
        return None

    def at(self, sparsity: float) -> "Counts":
        """Counts with a sparsity, which keep their other fields."""
        return Share(sparsity)


@dataclass(frozen=True)
class Effective(Counts):
    """Effective Model Pruning: beta * N_eff weights of each group stay. N_eff = 1 / sum omega^2,
    where omega = |s| / sum |s| for the scores s.

    Attributes:
        beta: factor of N_eff. None: 1; with a sparsity, the beta that reaches it.
        order: order of the Hill number N_eff; 2 is the paper's.
        neff_dtype: "float64", or "bfloat16" for the paper's arithmetic of magnitudes.
        count_by: the scores of N_eff: the recipe's "own", or the "magnitude" of the weights.
        sparsity: the fraction of all targets that goes, in place of a beta.
    """

    beta: float | None = None
    order: float = 2.0
    neff_dtype: Literal["float64", "bfloat16"] | None = None
    count_by: Literal["own", "magnitude"] = "own"
    sparsity: float | None = None

    def __post_init__(self) -> None:
        if self.sparsity is None:
            for name, value in (("beta", 1.0), ("neff_dtype", "float64")):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
        super().__post_init__()

    def check(self) -> None:
        try:
            if self.beta is not None:
                check_beta(self.beta)
            check_order(self.order)
        except ValueError as error:
            raise UserError(f"--{error}.") from error
        _check_sparsity(self.sparsity)
        for name in ("beta", "neff_dtype"):
            if self.sparsity is not None and getattr(self, name) is not None:
                raise UserError(f"sparsity finds the beta; leave out {name}, or sparsity.")

    def at(self, sparsity: float) -> "Effective":
        return replace(self, sparsity=sparsity, beta=None, neff_dtype=None)

    @property
    def rule(self) -> KeepRule | None:
        """The rule that sets the count of a group by its own scores; None before the beta of a
        sparsity is known.
        """
        if self.beta is None:
            return None
        return KeepRule(beta=self.beta, order=self.order, dtype=self.neff_dtype or "float64")


@dataclass(frozen=True)
class ByCost:
    """Sparsities of the blocks at which one weight more costs as much in every block. The cost is
    the loss of held-out text when a block is pruned alone. For the command prune.

    Attributes:
        removed: name of a target -> number of weights that it loses; None until it is measured.
    """

    removed: dict[str, int] | None = None

    def __post_init__(self) -> None:
        check_fields(self, as_flags=False)


@dataclass(frozen=True)
class Share(Counts):
    """A fixed sparsity of every group.

    Attributes:
        sparsity: the fraction of weights that goes.
        shares: how the blocks differ in it; None: they do not.
    """

    sparsity: float = 0.5
    shares: ByCost | None = None

    def check(self) -> None:
        _check_sparsity(self.sparsity)

    def at(self, sparsity: float) -> "Share":
        return replace(self, sparsity=sparsity)


@dataclass(frozen=True)
class Pattern(Counts):
    """N of every M consecutive inputs stay.

    Attributes:
        n, m: N and M.
    """

    n: int = 2
    m: int = 4

    def check(self) -> None:
        if not 1 <= self.n < self.m:
            raise UserError(_NO_PATTERN.format(f"'{self.n}:{self.m}'"))

    def at(self, sparsity: float) -> "Pattern":
        return Pattern(round(self.m * (1 - sparsity)), self.m)


@dataclass(frozen=True)
class Match(Counts):
    """As many weights as an earlier run removed.

    Attributes:
        run: the output folder of that run.
        by: "total": as many in all; "matrix": as many in every matrix.
        removed: the number that the run removed, or name of a matrix -> number; read from its
            report.
    """

    run: str = ""
    by: MatchBy = "total"
    removed: int | dict[str, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.run, Path):
            object.__setattr__(self, "run", str(self.run))
        super().__post_init__()

    def check(self) -> None:
        """Raise UserError without a run."""
        if not self.run:
            raise UserError("Match needs run, the output folder of an earlier prune.")


def _check_sparsity(sparsity: float | None) -> None:
    if sparsity is None or 0 <= sparsity < 1:
        return
    hint = f" It is a fraction: did you mean {sparsity / 100:g}?" if 5 <= sparsity < 100 else ""
    raise UserError(f"--sparsity must be at least 0 and below 1, got {sparsity:g}.{hint}")


# What is pruned, and what follows.


@dataclass(frozen=True)
class Targets:
    """The layers.

    Attributes:
        layers: "mlp", "attention", "all-linear" and name suffixes, as a list or with commas; or a
            regex. Each must match a layer.
        ignore: layers to leave out, in the same form.
        tower: the part of a multimodal model.
        blocks: name of the list of decoder blocks; None: detected.
        min_expert_tokens: experts that saw fewer tokens are scored by magnitude.
        allow_partial: prune even if more than half of the weights in blocks cannot be pruned.
    """

    layers: str | list[str] = "mlp"
    ignore: str | list[str] | None = None
    tower: Tower = "language"
    blocks: str | None = None
    min_expert_tokens: int = 32
    allow_partial: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_expert_tokens < 0:
            raise UserError(
                f"--min-expert-tokens must be at least 0, got {self.min_expert_tokens}."
            )
        check_targets(self.tower, self.blocks)


@dataclass(frozen=True)
class Heal:
    """The kept weights are trained on the dense model's probabilities.

    Attributes:
        steps: number of training steps, of four sequences each.
        weights: "targets": the kept weights of the targets; "all": of all linear layers in blocks,
            and norms.
    """

    steps: int = 300
    weights: Literal["targets", "all"] = "targets"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps < 1:
            raise UserError(f"--heal-steps must be at least 1, got {self.steps}.")


@dataclass(frozen=True)
class UnitKind:
    """What the options know of a kind of unit.

    Attributes:
        title: the name in sentences.
        targets: the layers from which a unit is cut.
        criteria: those that score it. The first is the default, unless that is "magnitude".
        refits: whether a refit can make up for a removed unit.
    """

    title: str
    targets: str
    criteria: tuple[str, ...]
    refits: bool = True


_CRITERIA_OF_PARTS = ("magnitude", "wanda", "taylor")
UNIT_KINDS = {
    "heads": UnitKind("attention heads", "attention", _CRITERIA_OF_PARTS),
    "neurons": UnitKind("MLP neurons", "mlp", _CRITERIA_OF_PARTS),
    "experts": UnitKind("experts", "mlp", ("reap", "man", "frequency", "mass", "magnitude")),
    "layers": UnitKind("decoder layers", "all-linear", ("cosine",), refits=False),
}
# Criteria that do not score weights.
UNIT_CRITERIA = {name for kind in UNIT_KINDS.values() for name in kind.criteria} - METHODS.keys()


class StructureRecipe(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"structure_group": "group"},
):
    """Heads, neurons, experts or layers removed in place of weights.

    None stands for the default. It is replaced when the recipe is made; a field that the structure
    does not use stays None.

    Attributes:
        structure: the units; None: weights are pruned.
        structure_group: the units that compete: those of a layer, or of all layers. Whole layers
            always compete with each other.
        keep_shapes: units are set to zero where they are, and routers choose no removed expert.
            Else units are removed, and all layers get one width.
        width_multiple: the number of neurons that stay is rounded up to a multiple of this.
        per_layer: each layer keeps its own number of heads or neurons.
    """

    structure: Annotated[
        Literal["heads", "neurons", "both", "experts", "layers"],
        Opt(
            "Remove whole attention heads, MLP neurons, both, experts of a mixture, or decoder "
            "layers, in place of weights."
        ),
    ] = None  # type: ignore[assignment]
    structure_group: Annotated[
        Literal["layer", "all"], Opt("Units that compete: of a layer, or of all layers.")
    ] = "layer"
    keep_shapes: Annotated[
        bool, Opt("With --structure, set units to zero and keep every shape and the config.")
    ] = False
    width_multiple: Annotated[
        int | None,
        Opt("Round the width of the MLP up to a multiple of this; default: 64.", minimum=1),
    ] = None
    per_layer: Annotated[
        bool,
        Opt(
            "Give each layer its own number of heads or neurons. emp-llm and llama.cpp run such a "
            "model; transformers reads its config alone."
        ),
    ] = False
    head_unit: Literal["group"] | None = None  # in records of version 0.2

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "head_unit", None)
        if self.structure is None:
            return
        if "neurons" in self.kinds and self.width_multiple is None and not self.keep_shapes:
            msgspec.structs.force_setattr(self, "width_multiple", 64)

    @property
    def kinds(self) -> dict[str, UnitKind]:
        """The units that are removed, by name."""
        names = ("heads", "neurons") if self.structure == "both" else (self.structure,)
        return {name: UNIT_KINDS[name] for name in names}

    @property
    def criteria(self) -> tuple[str, ...]:
        """The criteria that score the units."""
        return next(iter(self.kinds.values())).criteria

    def check(self, given: GivenOptions) -> None:
        """Raise UserError for invalid or conflicting options, or if one is given without
        --structure.
        """
        check_values(self)
        for name, option in options_of(StructureRecipe).items():
            if self.structure is None and name in given:
                raise UserError(
                    f"{option.flag} has no effect without --structure. Add that, or leave it out."
                )
        if self.structure is None:
            return
        for name, units in (
            ("width_multiple", ["neurons"]),
            ("per_layer", ["heads", "neurons"]),
        ):
            if getattr(self, name) and not self.kinds.keys() & units:
                raise UserError(
                    f"{flag_of(name)} is for {' and '.join(units)}, and --structure "
                    f"{self.structure} removes none. Leave it out."
                )
        if self.structure == "layers" and self.keep_shapes:
            raise UserError(
                "--structure layers removes whole layers, and --keep-shapes keeps them. Leave out "
                "--keep-shapes."
            )
        if self.width_multiple is not None and self.keep_shapes:
            raise UserError("--keep-shapes keeps the width of the MLP; leave out --width-multiple.")
        if self.per_layer and self.keep_shapes:
            raise UserError(
                "--keep-shapes gives each layer its own number already, and keeps its width. Leave "
                "out --per-layer."
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines the weights of a pruned model. Equal recipes, norms and weights give
    equal bits.

    Attributes:
        score: what a weight is worth: `Wanda()`, `Magnitude()`, `Relative()`, `Ria()`,
            `Own(function)`, `Given(scores)`; None: `Wanda()`. For a search (`SparseGPT`, `Admm`) it
            only sets EMP's counts, and is always `Magnitude()`.
        counts: how many weights stay: `Effective()`, `Share(0.5)`, `Pattern(2, 4)`, `Match(run)`.
        group: the weights that compete with each other: those of a "row", of a "matrix", or of
            "all" targets.
        targets: the layers.
        update: how kept weights move: `Refit()`, `SparseGPT()`, `Admm(refit=Refit())`; None: not
            at all.
        heal: `Heal()` trains the kept weights at the end; None: they are not trained.
        structure: removes heads, neurons, experts or layers in place of weights; for checkpoints.

    Raises:
        UserError: fields do not go together.
    """

    score: Score = None  # type: ignore[assignment]  # __post_init__ sets it
    counts: Counts = field(default_factory=Effective)
    group: Group = "row"
    targets: Targets = field(default_factory=Targets)
    update: Update | None = None
    heal: Heal | None = None
    structure: StructureRecipe | None = None

    def __post_init__(self) -> None:
        if self.score is None:
            searches = isinstance(self.update, Update) and self.update.searches
            object.__setattr__(self, "score", Magnitude() if searches else Wanda())
        _check_nodes(self)
        check_fields(self, as_flags=False)
        _check_groups(self)
        _check_shares(self)
        _check_search(self)

    @property
    def adaptive(self) -> bool:
        """Whether the scores determine the number of kept weights."""
        return isinstance(self.counts, Effective)

    @property
    def searches(self) -> bool:
        """Whether the update chooses the weights itself."""
        return self.update is not None and self.update.searches

    @property
    def name(self) -> str:
        """The method without "emp-": a search, or the scores."""
        return self.update.name if self.update is not None and self.searches else self.score.name

    @property
    def method(self) -> str:
        """The method of the command line."""
        return f"emp-{self.name}" if self.adaptive else self.name

    @property
    def needs_activations(self) -> bool:
        """Whether the scores need the statistics of a calibration."""
        return self.score.criterion.calibrated

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that the scores need beside the norms."""
        relative = ("relative",) if self.score.relative else ()
        return (*relative, *self.score.criterion.statistics)

    @property
    def counts_by_magnitude(self) -> bool:
        """Whether the effective numbers of the magnitudes set the counts, and other scores the
        masks.
        """
        by_magnitude = isinstance(self.counts, Effective) and self.counts.count_by == "magnitude"
        return by_magnitude and self.score.criterion is not MAGNITUDE

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """(N, M) of a pattern; None without one."""
        if not isinstance(self.counts, Pattern):
            return None
        return self.counts.n, self.counts.m

    @property
    def rule(self) -> KeepRule | None:
        """The rule that sets the counts of every group by itself; None if `pruning.counts` must
        see all weights first.
        """
        if isinstance(self.counts, Pattern):
            return KeepRule(pattern=self.n_of_m)
        if not isinstance(self.counts, Effective) or self.counts_by_magnitude:
            return None
        return self.counts.rule

    @property
    def moves(self) -> bool:
        """Whether kept weights get other values: by an update, or by healing."""
        return self.update is not None or self.heal is not None

    @property
    def update_flag(self) -> str:
        """The option that asks for the update."""
        return f"--method {self.method}" if self.searches else "--refit"

    @property
    def without_update(self) -> str:
        """How to run without the update, as the beginning of a sentence."""
        return "Use --method wanda" if self.searches else "Leave out --refit"

    def at(self, sparsity: float) -> "Recipe":
        """The recipe at a sparsity, or with the pattern that has it."""
        return replace(self, counts=self.counts.at(sparsity))

    def check_propagated(self, activations: object) -> None:
        """Raise UserError if the masks of a block cannot be decided before the blocks after it are
        calibrated.

        Args:
            activations: given norms; None: they are calibrated.
        """
        if activations is not None:
            raise UserError(
                "--propagate pruned collects its norms itself; leave out --activations."
            )
        # A search sees pruned blocks anyway.
        if not self.needs_activations and not self.searches:
            raise UserError(
                "--propagate pruned is for methods that need activations; "
                f"{self.method} needs none."
            )
        counts = self.counts
        of_all = {
            "--sparsity": isinstance(counts, Effective)
            and counts.sparsity is not None
            and not self.counts_by_magnitude,
            "--shares cost": isinstance(counts, Share) and isinstance(counts.shares, ByCost),
            "--group all": self.group == "all",
        }
        for flag, given in of_all.items():
            if given:
                raise UserError(
                    f"--propagate pruned prunes block by block, and {flag} needs the "
                    "scores of all; leave one out."
                )


def _check_nodes(recipe: Recipe) -> None:
    """Raise UserError, with what to write, for a word or a number in the place of a node."""
    known: dict[str, type[Any]] = {"refit": Refit} | METHODS
    for name, kind, example in (
        ("score", Score, "Wanda()"),
        ("counts", Counts, "Share(0.5)"),
        ("targets", Targets, "Targets('mlp')"),
        ("update", Update, "Refit()"),
        ("heal", Heal, "Heal()"),
    ):
        value = getattr(recipe, name)
        if isinstance(value, kind) or (value is None and name in ("update", "heal")):
            continue
        if isinstance(value, type):
            example = f"{value.__name__}()"
        elif isinstance(value, str) and value in SEARCHES:
            example = f"update={SEARCHES[value].rpartition(':')[2]}()"
        elif isinstance(value, str) and value in known:
            example = f"{known[value].__name__}()"
        elif name == "targets":
            example = f"Targets({value!r})"
        elif name == "counts" and isinstance(value, float):
            example = f"Share({value:g})"
        raise UserError(
            f"{name} must be of type {kind.__name__}, got {quotable(repr(value))}. Write {example}."
        )


def _check_groups(recipe: Recipe) -> None:
    """Raise UserError for counts that do not go with the group."""
    counts = recipe.counts
    if isinstance(counts, Pattern) and recipe.group != "row":
        raise UserError(
            f"--pattern N:M is a budget within rows: it needs group row, not {recipe.group}."
        )
    if isinstance(counts, Match) and counts.by == "matrix" and recipe.group == "all":
        raise UserError(
            "--match-by matrix fixes the sparsity of every matrix: it needs group "
            "row or matrix, not all."
        )
    if isinstance(counts, Effective) and counts.neff_dtype == "bfloat16":
        fixed = counts.order, recipe.group, counts.count_by
        if fixed != (2.0, "row", "own"):
            raise UserError(
                "--neff-dtype bfloat16 is the paper's arithmetic for the scores of rows: it needs "
                "order 2, group row and count-by own."
            )


def _check_shares(recipe: Recipe) -> None:
    """Raise UserError for shares of the blocks that the scores or the group do not allow."""
    if not isinstance(recipe.counts, Share) or recipe.counts.shares is None:
        return
    if recipe.group == "all":
        raise UserError(
            "--shares cost fixes the sparsity of every block; use --group row or matrix, not all."
        )


def _check_search(recipe: Recipe) -> None:
    """Raise UserError for an update that a record cannot name, or for scores or groups that a
    search does not allow.
    """
    update = recipe.update
    if update is None:
        return
    kind = type(update)
    known = SEARCHES.get(update.name) if update.searches else f"{Refit.__module__}:Refit"
    if known != f"{kind.__module__}:{kind.__qualname__}":
        raise UserError(
            f"update {kind.__qualname__} is not known by its name, so that records cannot hold "
            "it. Add it to emp_llm.update.update.SEARCHES."
        )
    if not update.searches:
        return
    if recipe.score != Magnitude():
        raise UserError(
            f"update {kind.__qualname__} counts by magnitudes; give score=Magnitude(), or leave "
            "the score out."
        )
    if recipe.adaptive and update.keeps == "matrix":
        raise UserError(
            f"--method {recipe.method}: {update.title} shares the weights of a matrix among its "
            f"rows itself. Use --method {recipe.name}, or emp-admm."
        )
    if recipe.group == "all" or (update.keeps == "matrix" and recipe.group != "row"):
        raise UserError(
            f"--group {recipe.group} does not go with method {recipe.method}, which decides each "
            "matrix. Leave it out."
        )


def check_targets(tower: str, blocks: str | None) -> None:
    """Raise UserError for a tower that --blocks excludes."""
    if blocks is not None and tower != "language":
        raise UserError("--blocks and --tower both choose the blocks; give only one.")


def parse_pattern(text: str) -> Pattern:
    """ "2:4" as a pattern; UserError if the text is not of this form."""
    numbers = re.fullmatch(r"([0-9]+):([0-9]+)", str(text))
    if numbers is None:
        raise UserError(_NO_PATTERN.format(repr(text)))
    return Pattern(int(numbers[1]), int(numbers[2]))
