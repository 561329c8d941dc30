"""The recipe: everything that defines which weights go, and which values stay. A tree of values.

    Recipe(score=Wanda(), counts=Effective(beta=1), targets=Targets("mlp"))
    Recipe(score=Magnitude(), counts=Share(0.5), update=Admm(refit=Refit()), heal=Heal(steps=300))

Each node has its defaults, its checks, its behaviour, and beside each field the option that sets
it. Records hold the tree as it is (`Recipe.as_dict`); `recipe_of` reads the flat options of the
command line into it.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from emp_llm.common.declared import (
    Flag,
    Node,
    as_tree,
    check_fields,
    check_words,
    fields_of,
    has_kinds,
    kinds_of,
    node_in,
    options_apart,
    options_of,
)
from emp_llm.common.errors import UserError, quotable
from emp_llm.options.criterion import custom_name, find_criterion
from emp_llm.selection.criteria import GIVEN, MAGNITUDE, RIA, WANDA, Criterion
from emp_llm.selection.rule import Group, KeepRule, check_beta, check_order
from emp_llm.update.update import Admm as Admm  # known by their names from here on
from emp_llm.update.update import Refit, Update
from emp_llm.update.update import SparseGPT as SparseGPT

MatchBy = Literal["total", "matrix"]
Tower = Literal["language", "vision", "all"]
ScoreMap = Literal["abs", "shift", "exp"]
# Options of several nodes.
Norms = Annotated[
    Literal["plain", "relative"],
    Flag("Norms in the scores: plain, or relative to each token's output.", name="score"),
]
Mapped = Annotated[
    ScoreMap | None,
    Flag("Make your scores non-negative: abs, shift (s - min s), or exp.", flag="--map"),
]
_SPARSITY = Flag(
    "Fraction to remove, of each group (default 0.5); with an emp method, of all targets.",
    minimum=0,
    below=1,
)
# Options that a recipe's name shows, or that vary along a curve.
_SHOWN = (
    *("beta", "order", "sparsity", "pattern", "match", "match_by"),
    *("criterion", "scores", "width_multiple"),
)
_NO_PATTERN = (
    "--pattern must be N:M, such as 2:4, which keeps N of every M weights, 1 <= N < M; got {}."
)


# Scores: how much a weight matters.


@dataclass(frozen=True)
class Score(Node, ABC):
    """How much a weight matters: a criterion, and the norms that it is given.

    Attributes:
        title: for the model card.
    """

    kinds: ClassVar[dict[str, Any]] = {}
    title: ClassVar[str] = ""

    @property
    def method(self) -> str:
        """The name in methods."""
        return self.name

    @property
    @abstractmethod
    def criterion(self) -> Criterion:
        """The function that scores weights."""

    @property
    def relative(self) -> bool:
        """Whether its norms are relative to the outputs of each token."""
        return False


@dataclass(frozen=True)
class NormScore(Score):
    """Scores by the norms of the inputs.

    Attributes:
        norms: "plain": ||X_j||; "relative": sqrt(sum_t x_tj^2 / ||y_t||^2), relative to each
            token's output.
    """

    norms: Norms = "plain"

    @property
    def relative(self) -> bool:
        return self.norms == "relative"


@dataclass(frozen=True)
class Wanda(NormScore):
    """|W_ij| * ||X_j|| (Sun et al. 2023)."""

    name = "wanda"
    title = "Wanda scores (weight magnitude times input norm)"
    criterion = WANDA


@dataclass(frozen=True)
class Magnitude(Score):
    """|W_ij|. It needs no text."""

    name = "magnitude"
    title = "weight magnitudes"
    criterion = MAGNITUDE


@dataclass(frozen=True)
class Relative(Score):
    """Wanda with relative norms; magnitudes set EMP's counts."""

    name = "relative"
    title = "relative scores (weight magnitude times input norm relative to each token's output)"
    criterion = WANDA
    relative = True


@dataclass(frozen=True)
class Ria(NormScore):
    """Relative importance times the root of the norms (Zhang et al. 2024)."""

    name = "ria"
    title = "RIA scores (relative importance and activations)"
    criterion = RIA


@dataclass(frozen=True)
class Own(Score):
    """A criterion of your own.

    Attributes:
        function: of (weight) or (weight, inputs); or its name: MODULE:FUNCTION, FILE.py:FUNCTION.
        norms: the norms of the inputs that it is given: "plain" or "relative", as in `NormScore`.
        score_map: how signed scores become non-negative; None: they must not be negative.
        named: the name of the function, if `function` is a module or file alone; in records, if it
            has another there.
        source: in records: the SHA-256 of the file; "" without one. A recipe with it never looks
            for the function, and cannot score.
    """

    name = "own"
    mark = "source"
    function: Annotated[
        Any,
        Flag(
            "A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION; the file is run.",
            name="criterion",
        ),
    ]
    norms: Norms = "plain"
    score_map: Mapped = None
    named: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.function, str) and not callable(self.function):
            given = quotable(repr(self.function))
            raise UserError(f"--criterion must be a function or its name, got {given}.")
        known = custom_name(self.function)
        if self.named is not None and known is not None and self.source is None:
            raise UserError(
                f"named is for a module or a file, and the function is {known}. Leave it out."
            )
        if self.named is None and known is None:
            raise UserError(f"--criterion {self.function} names no function; add :FUNCTION to it.")

    @property
    def method(self) -> str:
        return self.named or custom_name(self.function) or ""

    @property
    def relative(self) -> bool:
        return self.norms == "relative"

    @property
    def criterion(self) -> Criterion:
        if self.source is not None:
            raise UserError(
                f"the criterion {self.method} decided the masks; add --criterion {self.function}."
            )
        return find_criterion(self.method, self.function)


@dataclass(frozen=True)
class Given(Score):
    """Scores of your own.

    Attributes:
        scores: a safetensors file, or a folder of such files, with a score for each weight, under
            the weight's name and with its shape; or a mapping from names to tensors.
        score_map: how signed scores become non-negative; None: they must not be negative.
        digest: in records: a hash of the scores. A recipe with it never looks for the file, and
            cannot score.
    """

    name = "scores"
    mark = "digest"
    scores: Annotated[
        Any, Flag("Scores of your own: a safetensors file with a score for each weight.")
    ] = field(hash=False)
    score_map: Mapped = None
    digest: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scores, str | Path | Mapping):
            raise UserError(
                "--scores must be a file, a folder, or a mapping from names to tensors, got "
                f"{type(self.scores).__name__}."
            )
        given = self.scores if self.digest is None else None
        if isinstance(given, str | Path) and not Path(given).exists():
            raise UserError(
                f"--scores {given}: no such file. Give a safetensors file with a tensor for each "
                "weight."
            )

    @property
    def criterion(self) -> Criterion:
        if self.digest is not None:
            raise UserError(
                f"given scores ({self.scores}) decided the masks; give them with --scores."
            )
        return GIVEN


@dataclass(frozen=True)
class UnitScore(Score):
    """A criterion of heads, neurons, experts or layers, not of weights.

    Attributes:
        unit_criterion: its name, such as "taylor", "reap" or "cosine".
    """

    name = "unit"
    criterion = GIVEN  # it needs no norms of inputs
    unit_criterion: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit_criterion not in UNIT_CRITERIA:
            names = ", ".join(sorted(UNIT_CRITERIA))
            raise UserError(
                f"unit_criterion {quotable(repr(self.unit_criterion))} is not one of {names}."
            )

    @property
    def method(self) -> str:
        return self.unit_criterion


def score_kinds() -> dict[str, type[Score]]:
    """The scores that a method names, without "emp-". With "emp-" in front, N_eff sets the
    counts.
    """
    return {name: kind for name, kind in Score.kinds.items() if name not in _ASKED_FOR}


_ASKED_FOR = (Own.name, Given.name, UnitScore.name)  # by other options


def searches() -> dict[str, type[Update]]:
    """The updates that a method names."""
    return {name: kind for name, kind in Update.kinds.items() if kind.searches}


# Counts: how many weights of each group stay.


@dataclass(frozen=True)
class Counts(Node):
    """How many weights of each group stay."""

    kinds: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""

    @property
    def sparsity(self) -> float | None:
        """The fraction of weights that goes; None if other fields set it."""
        return None

    @property
    def order(self) -> float | None:
        """The order of the effective number that sets the counts; None without one."""
        return None

    @property
    def in_force(self) -> float | None:
        """The beta that sets the counts; None without one."""
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
        found: the beta that reaches the sparsity; None until it is found.
    """

    name = "effective"
    beta: Annotated[float | None, Flag("Keep beta x N_eff weights (emp methods); default: 1.")] = (
        None
    )
    order: Annotated[float, Flag("Hill order of the effective number (emp methods).")] = 2.0
    neff_dtype: Annotated[
        Literal["float64", "bfloat16"],
        Flag("float64, or bfloat16 for the paper's emp-magnitude arithmetic."),
    ] = "float64"
    count_by: Annotated[
        Literal["own", "magnitude"],
        Flag("N_eff of the method's own scores, or of the weight magnitudes (emp methods)."),
    ] = "own"
    sparsity: Annotated[float | None, _SPARSITY] = None
    found: float | None = None

    def __post_init__(self) -> None:
        if self.sparsity is None and self.beta is None:
            object.__setattr__(self, "beta", 1.0)
        super().__post_init__()

    def check(self) -> None:
        try:
            for beta in (self.beta, self.found):
                if beta is not None:
                    check_beta(beta)
            check_order(self.order)
        except ValueError as error:
            raise UserError(f"--{error}.") from error
        if self.sparsity is None:
            if self.found is not None:
                raise UserError("found is the beta that reaches a sparsity. Give it as beta.")
            return
        for name in ("beta", "neff_dtype"):
            if getattr(self, name) not in (None, "float64"):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"--sparsity finds the beta; leave out {flag}, or --sparsity.")

    def at(self, sparsity: float) -> "Effective":
        return replace(self, sparsity=sparsity, beta=None, found=None, neff_dtype="float64")

    @property
    def in_force(self) -> float | None:
        """The beta that is asked for or found; None before that of a sparsity is known."""
        return self.beta if self.sparsity is None else self.found

    @property
    def rule(self) -> KeepRule | None:
        """The rule that sets the count of a group by its own scores; None before the beta of a
        sparsity is known.
        """
        if self.in_force is None:
            return None
        return KeepRule(beta=self.in_force, order=self.order, dtype=self.neff_dtype)


@dataclass(frozen=True)
class ByCost(Node):
    """Sparsities of the blocks at which one weight more costs as much in every block. The cost is
    the loss of held-out text when a block is pruned alone. For the command prune.

    Attributes:
        removed: name of a target -> number of weights that it loses; None until it is measured.
    """

    name = "cost"
    switch = Flag(
        "Sparsity of each block: uniform; cost: lower where a block costs more alone, on held-out "
        "text; default: uniform.",
        name="shares",
        type=Literal["uniform", "cost"],
    )
    removed: dict[str, int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_removed(self.removed)


MOST_BY_COST = 0.95  # of a block


@dataclass(frozen=True)
class Share(Counts):
    """A fixed sparsity of every group.

    Attributes:
        sparsity: the fraction of weights that goes.
        shares: how the blocks differ in it; None: they do not.
    """

    name = "share"
    sparsity: Annotated[float, _SPARSITY] = 0.5
    shares: ByCost | None = None

    def check(self) -> None:
        asked = self.shares is not None and self.shares.removed is None
        if asked and self.sparsity > MOST_BY_COST:
            raise UserError(
                f"--shares cost removes at most {MOST_BY_COST:g} of each block, and a sparsity of "
                f"{self.sparsity:g} needs more. Lower it, or leave out --shares."
            )

    def at(self, sparsity: float) -> "Share":
        return replace(self, sparsity=sparsity)


@dataclass(frozen=True)
class Pattern(Counts):
    """N of every M consecutive inputs stay.

    Attributes:
        n, m: N and M.
    """

    name = "pattern"
    n: Annotated[
        int, Flag("N:M, keep N of every M inputs (not with emp methods).", name="pattern", type=str)
    ] = 2
    m: int = 4

    @classmethod
    def of_options(cls, n: str) -> "Pattern":  # type: ignore[override]
        return parse_pattern(n)

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

    name = "match"
    run: Annotated[
        str,
        Flag(
            "Output of an earlier run; remove as many weights as that run (other methods).",
            name="match",
        ),
    ] = ""
    by: Annotated[
        MatchBy, Flag("Match the total of that run, or every matrix.", name="match_by")
    ] = "total"
    removed: int | dict[str, int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.run, Path):
            object.__setattr__(self, "run", str(self.run))
        super().__post_init__()

    def check(self) -> None:
        if not self.run:
            raise UserError("Match needs run, the output folder of an earlier prune.")
        if self.removed is not None and isinstance(self.removed, int) != (self.by == "total"):
            raise UserError(
                "removed of Match must be a number by total, and a mapping from matrices to "
                f"numbers by matrix, and by is {self.by}."
            )
        _check_removed(self.removed)


def _check_removed(removed: int | dict[str, int] | None) -> None:
    """Raise UserError for a number of weights that is negative or too large."""
    for number in removed.values() if isinstance(removed, dict) else [removed or 0]:
        Flag("", minimum=0).check_range("removed", number)


# What is pruned, and what follows.


@dataclass(frozen=True)
class Targets(Node):
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

    layers: Annotated[
        str | list[str],
        Flag("Layers: mlp, attention, all-linear, name suffixes a,b, or a regex.", name="targets"),
    ] = field(default="mlp", hash=False)
    ignore: Annotated[str | list[str] | None, Flag("Layers to leave out: as --targets.")] = field(
        default=None, hash=False
    )
    tower: Annotated[
        Tower, Flag("Part of a multimodal model to prune: language, vision, or all.")
    ] = "language"
    blocks: Annotated[
        str | None, Flag("Name of the list of decoder blocks; detected by default.")
    ] = None
    min_expert_tokens: Annotated[
        int, Flag("Score experts by magnitude if they see fewer tokens.", minimum=0)
    ] = 32
    allow_partial: Annotated[
        bool, Flag("Continue if more than half of the weights in blocks cannot be pruned.")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, layers in (
            ("targets", self.layers),
            ("ignore", self.ignore),
            ("blocks", self.blocks),
        ):
            names = layers.split(",") if isinstance(layers, str) else layers
            if names is not None and not (names and all(each.strip() for each in names)):
                raise UserError(f"--{name} {layers!r} has an empty name. Leave it out.")
        if self.blocks is not None and self.tower != "language":
            raise UserError("--blocks and --tower both choose the blocks; give only one.")


MOST_STEPS = 10_000_000  # of a training


@dataclass(frozen=True)
class Heal(Node):
    """The kept weights are trained on the dense model's probabilities.

    Attributes:
        steps: number of training steps, of four sequences each.
        weights: "targets": the kept weights of the targets; "all": of all linear layers in blocks,
            and norms; None: "all" of a model with fewer units, else "targets". A recipe sets it.
        labels: share of the text's own next tokens in the probabilities that the weights learn; the
            rest is the dense model's.
        tokens, minutes: what the steps read, and how long they take, in place of their number; for
            commands, which record the steps.
    """

    switch = Flag(
        "Then train the kept weights on the dense model's probabilities for the text.", name="heal"
    )
    steps: Annotated[
        int,
        Flag(
            "Steps of the training, of four sequences (default 300).",
            name="heal_steps",
            minimum=1,
            maximum=MOST_STEPS,
        ),
    ] = None  # type: ignore[assignment]  # __post_init__ sets it
    weights: Annotated[
        Literal["targets", "all"] | None,
        Flag(
            "What heals: kept weights of the targets, or of all linear layers in blocks, and "
            "norms (default after --structure; else targets).",
            name="heal_weights",
        ),
    ] = None
    labels: Annotated[
        float,
        Flag(
            "Share of the text's own next tokens in what the training learns; the rest is the "
            "dense model's probabilities (default 0).",
            name="heal_labels",
            minimum=0,
            maximum=1,
        ),
    ] = 0.0
    tokens: Annotated[
        float | None,
        Flag(
            "Tokens of the training, such as 2e6, in place of its steps.",
            name="heal_tokens",
            above=0,
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Flag(
            "Minutes of the training, in place of its steps; two steps are timed first.",
            name="heal_minutes",
            above=0,
            maximum=1_000_000,
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [each for each in (self.steps, self.tokens, self.minutes) if each is not None]
        if not given:
            object.__setattr__(self, "steps", 300)
        super().__post_init__()
        if len(given) > 1:
            raise UserError(
                "--heal-steps, --heal-tokens and --heal-minutes all say how long it trains; give "
                "one."
            )


@dataclass(frozen=True)
class UnitKind:
    """What the options know of a kind of unit.

    Attributes:
        title: the name in sentences.
        targets: the layers from which a unit is cut.
        criteria: those that score it. The first is the default, unless that is "magnitude".
    """

    title: str
    targets: str
    criteria: tuple[str, ...]


_CRITERIA_OF_PARTS = ("magnitude", "wanda", "taylor", "fisher")
UNIT_KINDS = {
    "heads": UnitKind("attention heads", "attention", _CRITERIA_OF_PARTS),
    "neurons": UnitKind("MLP neurons", "mlp", _CRITERIA_OF_PARTS),
    "experts": UnitKind("experts", "mlp", ("reap", "man", "frequency", "mass", "magnitude")),
    "layers": UnitKind("decoder layers", "all-linear", ("perplexity", "cosine")),
}
LAYER_TOKENS = 1 << 15  # that measure the loss without each layer
# How criteria score units, in the words of the model card.
UNIT_SCORES = {
    "magnitude": "the norms of their weights",
    "wanda": "the norms of their weights and activations",
    "taylor": "their first-order effect on the loss (Taylor)",
    "fisher": "their squared first-order effect on the loss of each token (Fisher)",
    "reap": "the mean norm of their outputs times the router's weight (REAP)",
    "man": "the mean norm of their outputs",
    "frequency": "how many tokens reach them",
    "mass": "the norms of their outputs times the router's weight, added up",
    "cosine": "how much they turn the hidden states (1 - cosine)",
    "perplexity": "what the model without one of them loses on text",
}
# Those that need the gradients of activations.
BY_GRADIENTS = ("taylor", "fisher")
# Those that do not score weights.
UNIT_CRITERIA = UNIT_SCORES.keys() - {Magnitude.name, Wanda.name}


@dataclass(frozen=True, kw_only=True)
class Structure(Node):
    """Heads, neurons, experts or layers removed in place of weights.

    Attributes:
        units: what is removed.
        group: the units that compete: those of a layer, or of all layers. Whole layers always
            compete with each other.
        keep_shapes: units are set to zero where they are, and routers choose no removed expert.
            Else units are removed, and all layers get one width.
        width_multiple: the number of neurons that stay is rounded up to a multiple of this. None:
            64, if neurons are removed.
    """

    units: Annotated[
        Literal["heads", "neurons", "both", "experts", "layers"],
        Flag(
            "Remove whole attention heads, MLP neurons, both (the same share of each, which costs "
            "more than neurons alone), experts of a mixture, or decoder layers, in place of "
            "weights.",
            name="structure",
        ),
    ]
    group: Annotated[
        Literal["layer", "all"],
        Flag("Units that compete: of a layer, or of all layers.", name="structure_group"),
    ] = "layer"
    keep_shapes: Annotated[
        bool, Flag("With --structure, set units to zero and keep every shape and the config.")
    ] = False
    width_multiple: Annotated[
        int | None,
        Flag("Round the width of the MLP up to a multiple of this; default: 64.", minimum=1),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check()
        if "neurons" in self.removed and self.width_multiple is None and not self.keep_shapes:
            object.__setattr__(self, "width_multiple", 64)

    @property
    def removed(self) -> dict[str, UnitKind]:
        """The units that are removed, by name."""
        names = ("heads", "neurons") if self.units == "both" else (self.units,)
        return {name: UNIT_KINDS[name] for name in names}

    @property
    def criteria(self) -> tuple[str, ...]:
        """The criteria that score the units."""
        return next(iter(self.removed.values())).criteria

    @property
    def layers(self) -> str:
        """The layers from which units are cut, as targets."""
        layers = {units.targets for units in self.removed.values()}
        return layers.pop() if len(layers) == 1 else "all-linear"

    def _check(self) -> None:
        """Raise UserError for fields that exclude each other."""
        if self.width_multiple is not None and "neurons" not in self.removed:
            raise UserError(
                f"--width-multiple is for neurons, and --structure {self.units} removes none. "
                "Leave it out."
            )
        if self.units == "layers" and self.keep_shapes:
            raise UserError(
                "--structure layers removes whole layers, and --keep-shapes keeps them. Leave out "
                "--keep-shapes."
            )
        if self.width_multiple is not None and self.keep_shapes:
            raise UserError("--keep-shapes keeps the width of the MLP; leave out --width-multiple.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines the weights of a pruned model. Equal recipes, norms and weights give
    equal bits. It does not change; `but` gives another.

    Attributes:
        score: what a weight is worth: `Wanda()`, `Magnitude()`, `Relative()`, `Ria()`,
            `Own(function)`, `Given(scores)`; None: `Wanda()`. For a search (`SparseGPT`, `Admm`) it
            only sets EMP's counts, and is always `Magnitude()`.
        counts: how many weights stay: `Effective()`, `Share(0.5)`, `Pattern(2, 4)`, `Match(run)`;
            None: `Effective()`, by magnitudes for `Relative()`.
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
    counts: Counts = None  # type: ignore[assignment]  # as above
    group: Annotated[
        Group, Flag("Weights that compete with each other: of a row, a matrix, or all targets.")
    ] = "row"
    update: Update | None = None
    heal: Heal | None = None
    targets: Targets = Targets()
    structure: Structure | None = None

    def __post_init__(self) -> None:
        if self.score is None:
            searching = isinstance(self.update, Update) and self.update.searches
            object.__setattr__(self, "score", Magnitude() if searching else Wanda())
        if self.counts is None:
            relative = isinstance(self.score, Relative)
            counts = Effective(count_by="magnitude" if relative else "own")
            object.__setattr__(self, "counts", counts)
        _check_nodes(self)
        if self.heal is not None and self.heal.weights is None:
            smaller = self.structure is not None and not self.structure.keep_shapes
            heals = replace(self.heal, weights="all" if smaller else "targets")
            object.__setattr__(self, "heal", heals)
        check_fields(self)
        _check_groups(self)
        _check_shares(self)
        _check_search(self)
        _check_units(self)

    def but(self, **changes: Any) -> "Recipe":
        """The recipe with other values in some fields."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """The tree as JSON values."""
        return as_tree(self)

    @classmethod
    def of_dict(cls, tree: dict[str, Any]) -> "Recipe":
        """The recipe that `as_dict` wrote; UserError if it is none."""
        try:
            recipe: Recipe = node_in(cls, tree)
        except ValueError as error:
            raise UserError(f"recipe{error}.") from error
        return recipe

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
        return self.update.name if self.update is not None and self.searches else self.score.method

    @property
    def method(self) -> str:
        """The method of the command line."""
        return f"emp-{self.name}" if self.adaptive else self.name

    @property
    def words(self) -> str:
        """The method in words, for the model card."""
        if self.structure is not None:
            rule = "EMP" if self.adaptive else "a fixed share"
            units = " and ".join(kind.title for kind in self.structure.removed.values())
            words = f"{rule} of whole {units} scored by {UNIT_SCORES.get(self.name, self.name)}"
        else:
            words = self.score.title or self.name
            if self.update is not None and self.searches:
                counts = "counts by magnitudes, " if self.adaptive else ""
                words = f"{counts}{self.update.title}"
            words = f"Effective Model Pruning (EMP) with {words}" if self.adaptive else words
        if self.score.relative and not isinstance(self.score, Relative):
            words += ", with input norms relative to the output"
        if isinstance(self.counts, Share) and self.counts.shares is not None:
            words += ", with a sparsity for each block by what it costs alone"
        if isinstance(self.counts, Effective) and self.counts.count_by == "magnitude":
            words += ", and as many weights in each group as its magnitudes are worth"
        if self.update is not None and self.update.refit is not None:
            words += f", with {Refit.title}"
        if self.heal is not None:
            words += ", healed by self-distillation"
            if self.heal.labels:
                words += f" with labels of {self.heal.labels:g}"
        return words

    @property
    def variant(self) -> list[str]:
        """What sets the recipe apart from others of its method and targets, in the words of its
        options; without the quantities that vary along a curve.
        """
        apart = options_apart(self)
        for name in (*options_of(Targets), *_SHOWN):
            apart.pop(name, None)
        if isinstance(self.counts, Pattern):
            apart = {"pattern": f"{self.counts.n}:{self.counts.m}"} | apart
        if isinstance(self.score, Relative):
            apart.pop("count_by", None)
        words = [name if value is True else f"{name} {value}" for name, value in apart.items()]
        if isinstance(self.score, Own | Given):
            digest = self.score.source if isinstance(self.score, Own) else self.score.digest
            words += [f"version {digest[:6]}"] if digest else []
        return [word.replace("_", " ") for word in words]

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
    def by_cost(self) -> Share | None:
        """The counts, if blocks lose by what their weights cost; None for others."""
        counts = self.counts
        return counts if isinstance(counts, Share) and isinstance(counts.shares, ByCost) else None

    @property
    def sums_units(self) -> bool:
        """Whether units are scored by sums over the text."""
        return self.structure is not None and self.name in UNIT_CRITERIA

    def turns_of(self, layers: int) -> int:
        """How often the layers of a model are scored by the loss without them."""
        sparsity = self.counts.sparsity
        going = layers if sparsity is None else int(layers * sparsity + 1e-6)
        return max(1, math.ceil(min(going, layers // 2) / layers_at_once(layers)))

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
        return self.but(counts=self.counts.at(sparsity))

    def with_found(self, beta: float | None) -> "Recipe":
        """The recipe with the beta that reaches its sparsity, if it has one to reach."""
        if not isinstance(self.counts, Effective) or self.counts.sparsity is None:
            return self
        return self.but(counts=replace(self.counts, found=beta))

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
            "--shares cost": self.by_cost is not None,
            "--group all": self.group == "all",
        }
        for flag, given in of_all.items():
            if given:
                raise UserError(
                    f"--propagate pruned prunes block by block, and {flag} needs the "
                    "scores of all; leave one out."
                )


def _checks_words(init: Any) -> Any:
    """The constructor of a recipe, which says where a word belongs that is none of its fields."""

    @wraps(init)
    def checked(self: Recipe, *values: Any, **words: Any) -> None:
        check_words("Recipe", words, [field.name for field in fields_of(Recipe)], _places_of)
        init(self, *values, **words)

    return checked


def _places_of(word: str) -> str:
    """The nodes of a recipe that have a field of this name, as a question; empty if none has."""
    places = [
        f"{branch.name}={kind.__name__}({field.name}=...)"
        for branch in fields_of(Recipe)
        if branch.node is not None
        for kind in kinds_of(branch.node)
        for field in fields_of(kind)
        if field.name == word
    ]
    return f" Did you mean {' or '.join(places)}?" if places else ""


Recipe.__init__ = _checks_words(Recipe.__init__)  # type: ignore[method-assign]


def _check_nodes(recipe: Recipe) -> None:
    """Raise UserError, with what to write, for a word or a number in the place of a node."""
    known: dict[str, type[Any]] = Update.kinds | score_kinds()
    for name, kind, example in (
        ("score", Score, "Wanda()"),
        ("counts", Counts, "Share(0.5)"),
        ("targets", Targets, "Targets('mlp')"),
        ("update", Update, "Refit()"),
        ("heal", Heal, "Heal()"),
    ):
        value = getattr(recipe, name)
        if value is None and name in ("update", "heal"):
            continue
        if isinstance(value, kind):
            _check_name(name, value, kind)
            continue
        if isinstance(value, type):
            example = f"{value.__name__}()"
        elif isinstance(value, str) and value in known:
            where = "update=" if name == "score" and value in Update.kinds else ""
            example = f"{where}{known[value].__name__}()"
        elif name == "targets" and value is not None:
            example = f"Targets({value!r})"
        elif name == "counts" and isinstance(value, float):
            example = f"Share({value:g})"
        raise UserError(
            f"{name} must be of type {kind.__name__}, got {quotable(repr(value))}. Write {example}."
        )


def _check_name(field: str, node: Node, kind: type[Node]) -> None:
    """Raise UserError for a node that records could not name."""
    own = type(node)
    if has_kinds(kind) and kind.kinds.get(node.name) is not own:
        raise UserError(
            f"{field} {own.__qualname__} has no name of its own. Give its class one, such as "
            f'name = "{own.__name__.lower()}", so that records can hold it.'
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
    """Raise UserError for scores or groups that a search does not allow."""
    update = recipe.update
    if update is None or not update.searches:
        return
    if recipe.score != Magnitude():
        raise UserError(
            f"update {type(update).__qualname__} counts by magnitudes; give score=Magnitude(), or "
            "leave the score out."
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


def _check_units(recipe: Recipe) -> None:
    """Raise UserError for scores, counts or updates that do not go with units."""
    structure = recipe.structure
    if structure is None:
        if isinstance(recipe.score, UnitScore):
            raise UserError(
                f"--method {recipe.method} scores units, not weights. Add --structure, or use "
                "emp-wanda."
            )
        return
    criteria = structure.criteria
    if recipe.name not in criteria:
        methods = ", ".join(f"emp-{name}, {name}" for name in criteria)
        scored = " or ".join(
            name for name, units in UNIT_KINDS.items() if units.criteria == criteria
        )
        raise UserError(f"--method {recipe.method} does not score {scored}. Use one of {methods}.")
    refit = None if recipe.update is None else recipe.update.refit
    needless = {
        "--structure-group": structure.group == "all" and structure.units == "layers",
        "--refit-target": refit is not None
        and refit.target == "layer"
        and structure.units in ("experts", "layers"),
        "--refit-weighting": refit is not None
        and refit.weighting == "relative"
        and structure.units == "experts",
    }
    for flag, given in needless.items():
        if given:
            raise UserError(
                f"{flag} has no effect with --structure {structure.units}. Leave it out."
            )
    counts = recipe.counts
    if recipe.group != "row" or isinstance(counts, Pattern) or getattr(counts, "shares", None):
        raise UserError(
            "--structure removes whole units: --group, --pattern and --shares are for weights. "
            "Leave them out."
        )


def parse_pattern(text: str) -> Pattern:
    """ "2:4" as a pattern; UserError if the text is not of this form."""
    numbers = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", str(text))
    if numbers is None:
        raise UserError(_NO_PATTERN.format(quotable(repr(text))))
    return Pattern(int(numbers[1]), int(numbers[2]))


def layers_at_once(layers: int) -> int:
    """How many layers go before the others are scored again by the loss without them: an eighth."""
    return math.ceil(layers / 8)
