"""The recipe: everything that defines which weights go, and which values stay. One frozen value.

It is the same on the command line (a field is an option), in Python, in reports and manifests (a
field is a key), in the points of a sweep and in the jobs of a study.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from emp_llm.common.errors import UserError, did_you_mean
from emp_llm.options.base import Given, Opt, check_values, options_of
from emp_llm.options.criterion import find_criterion, own_name
from emp_llm.selection.criteria import MAGNITUDE, RIA, WANDA, Criterion
from emp_llm.selection.rule import Group, KeepRule, check_beta, check_order
from emp_llm.update.update import SEARCHES, Refit, Update, search_named

MatchBy = Literal["total", "matrix"]
Tower = Literal["language", "vision", "all"]

# Built-in methods: the criterion that scores the weights. With "emp-" in front, N_eff sets the
# counts.
METHODS = {
    "wanda": WANDA,
    "magnitude": MAGNITUDE,
    "relative": WANDA,  # with norms relative to the outputs
    "ria": RIA,
}
# Fields that commands share.
TARGET_FIELDS = ("targets", "ignore", "tower", "blocks", "min_expert_tokens", "allow_partial")
REFIT_FIELDS = ("refit", "refit_weighting", "refit_target", "refit_damping")
SCORE_FIELDS = ("criterion", "scores", "score_map", "score", "count_by")


def always(value: Any) -> Any:
    """A default that is written to JSON too."""
    return msgspec.field(default_factory=lambda: value)


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
        structure: None: weights are pruned.
        structure_group: those that compete: of a layer, or of all layers. Whole layers always
            compete with each other.
        head_unit: "group": query heads together with the keys and values that they share; "query":
            single query heads.
        keep_shapes: they are set to zero where they are, and experts are closed in their routers;
            else they are removed, and all layers get one width.
        width_multiple: the number of neurons that stay is rounded up to a multiple of this.
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
    head_unit: Annotated[
        Literal["group", "query"] | None,
        Opt(
            "With shared keys and values: whole groups of query heads, or query heads within "
            "groups; default: group."
        ),
    ] = None
    keep_shapes: Annotated[
        bool, Opt("With --structure, set units to zero and keep every shape and the config.")
    ] = False
    width_multiple: Annotated[
        int | None,
        Opt("Round the width of the MLP up to a multiple of this; default: 64.", minimum=1),
    ] = None

    def __post_init__(self) -> None:
        if self.structure in ("heads", "both") and self.head_unit is None:
            msgspec.structs.force_setattr(self, "head_unit", "group")
        if (
            self.structure in ("neurons", "both")
            and self.width_multiple is None
            and not self.keep_shapes
        ):
            msgspec.structs.force_setattr(self, "width_multiple", 64)

    def check(self, given: Given) -> None:
        """Raise UserError for invalid or conflicting options, or a given one without
        --structure.
        """
        check_values(self)
        for name, option in options_of(StructureRecipe).items():
            if self.structure is None and name in given:
                raise UserError(
                    f"{option.flag} has no effect without --structure. Add that, or leave it out."
                )
        if self.structure not in (None, "neurons", "both") and self.width_multiple is not None:
            raise UserError(
                f"--width-multiple is for neurons, and --structure {self.structure} "
                "removes none. Leave it out."
            )
        if self.structure not in (None, "heads", "both") and self.head_unit is not None:
            raise UserError(
                f"--head-unit is for heads, and --structure {self.structure} removes "
                "none. Leave it out."
            )
        if self.structure == "layers" and self.keep_shapes:
            raise UserError(
                "--structure layers removes whole layers, so that no shape is left to keep. Leave "
                "out --keep-shapes."
            )
        if self.width_multiple is not None and self.keep_shapes:
            raise UserError("--keep-shapes keeps the width of the MLP; leave out --width-multiple.")


class Recipe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that defines the weights of a pruned model. Equal recipes, norms and weights give
    equal bits.

    None stands for the method's default. It is replaced when the recipe is made, so that a field
    holds the value in force, or None if the method does not use it.

    Attributes:
        method: "wanda", "magnitude", "relative", "ria", "sparsegpt", "admm", the name of a
            criterion of your own, or "scores". "best" is emp-admm (admm, for a pattern or a match)
            with refit and heal. With the prefix "emp-", the effective number sets the number of
            kept weights; without it, the sparsity is fixed. None: "emp-" and the criterion given by
            `criterion` or `scores`, else "emp-wanda".
        beta, order, neff_dtype: of the effective number; for emp methods. None: 1, 2, float64.
        sparsity, pattern, match: for the other methods, at most one. None: sparsity 0.5. With an
            emp method, `sparsity` is that of all targets; the beta that reaches it is found, and is
            then the recipe's.
        match_by: "total": remove as many weights in total as the matched run; "matrix": as many in
            every matrix. None: total.
        removed: how many weights the matched run removed, in total or by matrix; read from its
            report.
        group: the weights that compete with each other: those of a row, of a matrix, or of all
            targets.
        criterion: a criterion of your own: MODULE:FUNCTION, FILE.py:FUNCTION, or a module or file
            in which the method names a function; in Python also the function itself.
        scores: a safetensors file, or a folder of such files, with a score for each weight, under
            the weight's name and with its shape; in Python also a mapping from names to tensors.
        score_map: how signed scores become non-negative; None: they must not be negative.
        score: the norms that a criterion is given; None: wanda, the plain norms.
        count_by: for emp methods: the scores whose effective number sets the counts; None: own, but
            magnitude for emp-relative.
        shares, owl_lambda, owl_m: the sparsities of the blocks, for methods with a fixed sparsity
            and activations. None: uniform; 0.08; 5.
        refit, refit_weighting, refit_target, refit_damping: the kept weights move to the
            least-squares optimum.
        heal, heal_steps, heal_weights: then they are trained on the dense model's probabilities.
            None: 300, targets.
        targets, ignore, tower, blocks: the layers.
        min_expert_tokens: experts that saw fewer tokens are scored by magnitude.
        allow_partial: most of the model may be out of reach.
        structure: heads and neurons in place of weights.
    """

    method: Annotated[
        str,
        Opt(
            "best (emp-admm --refit --heal), wanda, magnitude, relative, ria, sparsegpt, admm, "
            "own; taylor (heads, neurons), reap, man, frequency, mass "
            "(experts), cosine (layers); emp-NAME: N_eff sets counts; default: emp-wanda, "
            "emp-reap, emp-cosine."
        ),
    ] = None  # type: ignore[assignment]  # __post_init__ sets it
    beta: Annotated[float | None, Opt("Keep beta x N_eff (emp methods); default: 1.")] = None
    order: Annotated[
        float | None, Opt("Hill order of the effective number (emp methods); default: 2.")
    ] = None
    neff_dtype: Annotated[
        Literal["float64", "bfloat16"] | None,
        Opt("float64, or bfloat16 for the paper's emp-magnitude arithmetic."),
    ] = None
    sparsity: Annotated[
        float | None,
        Opt(
            "Fraction to remove: of each group, default 0.5; with emp methods of all targets, by "
            "the beta that does."
        ),
    ] = None
    pattern: Annotated[str | None, Opt("N:M, keep N of every M inputs (other methods).")] = None
    match: Annotated[
        str | None,
        Opt("Output of an earlier run; remove as many weights as that run (other methods)."),
    ] = None
    match_by: Annotated[
        MatchBy | None, Opt("Match the total of that run, or every matrix; default: total.")
    ] = None
    removed: int | dict[str, int] | None = None
    group: Annotated[
        Group, Opt("Weights that compete with each other: of a row, a matrix, or all targets.")
    ] = always("row")
    criterion: Annotated[
        Any, Opt("A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION.")
    ] = None
    criterion_source: str | None = None  # SHA-256 of its file, in records
    scores: Annotated[
        Any, Opt("Scores of your own: a safetensors file with a score for each weight.")
    ] = None
    scores_digest: str | None = None  # a hash of the scores, in records
    score_map: Annotated[
        Literal["abs", "shift", "exp"] | None,
        Opt("Make your scores non-negative: abs, shift (s - min s), or exp.", flag="--map"),
    ] = None
    score: Annotated[
        Literal["wanda", "relative"] | None,
        Opt("Norms in the scores: wanda, or relative to each token's output; default: wanda."),
    ] = None
    count_by: Annotated[
        Literal["own", "magnitude"] | None,
        Opt(
            "N_eff of the method's own scores, or of the weight magnitudes (emp methods); default: "
            "own."
        ),
    ] = None
    shares: Annotated[
        Literal["uniform", "owl"] | None,
        Opt(
            "Sparsity of the blocks: uniform, or owl: lower where more scores are outliers; "
            "default: uniform."
        ),
    ] = None
    owl_lambda: Annotated[
        float | None, Opt("Largest distance of a block's sparsity from --sparsity; default: 0.08.")
    ] = None
    owl_m: Annotated[
        float | None,
        Opt("Scores above this multiple of their block's mean are outliers; default: 5."),
    ] = None
    refit: Annotated[
        bool,
        Opt("Move the kept weights so that each layer's outputs stay close to the dense model's."),
    ] = False
    refit_weighting: Annotated[
        Literal["equal", "relative"] | None,
        Opt("Weight of each token: equal, or relative to its output; default: equal."),
    ] = None
    refit_target: Annotated[
        Literal["block", "layer"] | None,
        Opt(
            "What the last layer of a block restores: the outputs of the block, or of the layer; "
            "default: block."
        ),
    ] = None
    refit_damping: Annotated[
        float | None,
        Opt(
            "Pull towards the dense weights, as a share of the mean second moment; default: inputs "
            "/ tokens, at least 0.01."
        ),
    ] = None
    heal: Annotated[
        bool, Opt("Then train the kept weights on the dense model's probabilities for the text.")
    ] = False
    heal_steps: Annotated[
        int | None, Opt("Steps of the training, of four sequences; default: 300.", minimum=1)
    ] = None
    heal_weights: Annotated[
        Literal["targets", "all"] | None,
        Opt(
            "What heals: kept weights of the targets, or of all linear layers in blocks, and "
            "norms; default: targets."
        ),
    ] = None
    targets: Annotated[
        str | list[str], Opt("Layers: mlp, attention, all-linear, name suffixes a,b, or a regex.")
    ] = always("mlp")
    ignore: Annotated[
        str | list[str] | None, Opt("Layers to leave out: name suffixes a,b, or a regex.")
    ] = None
    tower: Annotated[
        Tower, Opt("Part of a multimodal model to prune: language, vision, or all.")
    ] = "language"
    blocks: Annotated[str | None, Opt("Name of the list of decoder blocks; default: detected.")] = (
        None
    )
    min_expert_tokens: Annotated[
        int, Opt("Score experts by magnitude if they see fewer tokens.", minimum=0)
    ] = always(32)
    allow_partial: Annotated[
        bool, Opt("Continue if more than half of the weights in blocks cannot be pruned.")
    ] = False
    structure: StructureRecipe | None = None

    def __post_init__(self) -> None:
        fill = msgspec.structs.force_setattr
        if isinstance(self.match, Path):
            fill(self, "match", str(self.match))
        if self.method is None:
            fill(self, "method", f"emp-{own_name(self.criterion, self.scores) or 'wanda'}")
        if not isinstance(self.method, str):
            return  # `check` says what is wrong
        if self.method == "best":  # by docs/heal.md
            fill(
                self, "method", "admm" if (self.pattern, self.match) != (None, None) else "emp-admm"
            )
            fill(self, "refit", True)
            fill(self, "heal", True)
        if self.adaptive:
            used: dict[str, Any] = {"order": 2.0}
            if self.sparsity is None:
                used |= {"beta": 1.0, "neff_dtype": "float64"}
            if self.name == "relative":
                used["count_by"] = "magnitude"
        else:
            used = (
                {}
                if (self.pattern, self.match, self.removed) != (None, None, None)
                else {"sparsity": 0.5}
            )
            used |= {"match_by": "total"} if self.match is not None else {}
            used |= {"owl_lambda": 0.08, "owl_m": 5.0} if self.shares == "owl" else {}
        if self.refit is True:
            used |= {"refit_weighting": "equal", "refit_target": "block"}
        if self.heal is True:
            used |= {"heal_steps": 300, "heal_weights": "targets"}
        for name, value in used.items():
            if getattr(self, name) is None:
                fill(self, name, value)

    @property
    def adaptive(self) -> bool:
        """Whether the scores determine the number of kept weights."""
        return self.method.startswith("emp-")

    @property
    def name(self) -> str:
        """The method without "emp-"."""
        return self.method.removeprefix("emp-")

    @property
    def scored_by(self) -> Criterion:
        """The criterion that scores the weights. Raises UserError if there is none of this name.

        A recipe from a file names a criterion of the user's own and never loads its code.
        """
        if self.criterion_source is not None:
            raise UserError(
                f"the criterion {self.name} decided the masks; add --criterion {self.criterion}."
            )
        if self.structure is None:
            check_method(self)
        if self.name in SEARCHES:
            return MAGNITUDE  # of EMP's counts, and of experts with too few tokens
        return (
            METHODS[self.name]
            if self.name in METHODS
            else find_criterion(self.name, self.criterion, self.scores)
        )

    @property
    def needs_activations(self) -> bool:
        """Whether the scores need the norms of a calibration."""
        return self.scored_by.needs_norms

    @property
    def relative(self) -> bool:
        """Whether the norms are those relative to the outputs."""
        return self.name == "relative" or self.score == "relative"

    @property
    def counts_by_magnitude(self) -> bool:
        """Whether the effective numbers of the magnitudes set the counts, and other scores the
        masks.
        """
        return self.adaptive and self.count_by == "magnitude" and self.scored_by is not MAGNITUDE

    @property
    def rule(self) -> KeepRule | None:
        """The rule that sets the counts of every group by itself; None if `pruning.counts` must
        see all weights first.
        """
        if self.pattern is not None:
            return KeepRule(pattern=self.n_of_m)
        if self.beta is None or self.counts_by_magnitude:
            return None
        order = 2.0 if self.order is None else self.order
        return KeepRule(beta=self.beta, order=order, dtype=self.neff_dtype or "float64")

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """(N, M) of the pattern; None without one."""
        return None if self.pattern is None else parse_pattern(self.pattern)

    @property
    def updates(self) -> bool:
        """Whether kept weights move: by a refit, or by a search for masks and values."""
        return self.refit or self.name in SEARCHES

    @property
    def update(self) -> Update | None:
        """How kept weights move; None if they do not."""
        refit = None
        if self.refit:
            refit = Refit(
                weighting=self.refit_weighting or "equal",
                target=self.refit_target or "block",
                damping=self.refit_damping,
            )
        return search_named(self.name)(refit=refit) if self.name in SEARCHES else refit

    @property
    def moves(self) -> bool:
        """Whether kept weights get other values: by an update, or by healing."""
        return self.updates or self.heal

    @property
    def update_flag(self) -> str:
        """The option that moves weights."""
        return f"--method {self.method}" if self.name in SEARCHES else "--refit"

    @property
    def without_update(self) -> str:
        """What to do for a run in which weights stay, as the beginning of a sentence."""
        return "Use --method wanda" if self.name in SEARCHES else "Leave out --refit"

    def but(self, **changes: Any) -> "Recipe":
        """The recipe with other values in some fields."""
        return msgspec.structs.replace(self, **changes)

    def with_method(self, method: str, **changes: Any) -> "Recipe":
        """The recipe with another method. Options of the scores stay only if the method uses
        them; counts begin at defaults.
        """
        unused: dict[str, Any] = dict.fromkeys(
            ("beta", "order", "neff_dtype", "sparsity", "pattern", "match", "match_by")
        )
        adaptive = method.startswith("emp-")
        name = method.removeprefix("emp-")
        known = MAGNITUDE if name in SEARCHES else METHODS.get(name)
        if not adaptive or self.name == "relative":
            unused["count_by"] = None
        if adaptive or (known is not None and not known.needs_norms):
            unused |= {"shares": None, "owl_lambda": None, "owl_m": None}
        if known is not None:
            unused |= {"criterion": None, "scores": None, "score_map": None}
            if not known.needs_norms or name == "relative":
                unused["score"] = None
        return self.but(**unused | {"method": method} | changes)

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        return dict(msgspec.to_builtins(self))

    def check(self) -> None:
        """Raise UserError for invalid or conflicting options. Reads neither the model nor other
        files.
        """
        if not isinstance(self.method, str):
            raise UserError(f"--method must be a name such as emp-wanda, got {self.method!r}.")
        check_values(self)
        try:
            if self.beta is not None:
                check_beta(self.beta)
            if self.order is not None:
                check_order(self.order)
            if self.pattern is not None:
                parse_pattern(self.pattern)
        except ValueError as error:
            raise UserError(f"--{error}.") from error
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            hint = (
                f" It is a fraction: did you mean {self.sparsity / 100:g}?"
                if 5 <= self.sparsity < 100
                else ""
            )
            raise UserError(
                f"--sparsity must be at least 0 and below 1, got {self.sparsity:g}.{hint}"
            )
        if self.pattern is not None and self.group != "row":
            raise UserError(
                f"--pattern N:M is a budget within rows: it needs group row, not {self.group}."
            )
        if self.match_by == "matrix" and self.group == "all":
            raise UserError(
                "--match-by matrix fixes the sparsity of every matrix: it needs group "
                "row or matrix, not all."
            )
        fixed = self.order, self.group, self.count_by
        if (
            self.adaptive
            and self.neff_dtype == "bfloat16"
            and fixed not in ((2.0, "row", None), (2.0, "row", "own"))
        ):
            raise UserError(
                "--neff-dtype bfloat16 is the paper's arithmetic for the scores of rows: it needs "
                "order 2, group row and count-by own."
            )
        if self.structure is None:
            check_targets(self.tower, self.blocks)
            check_method(self)
            if self.criterion is not None and self.scores is not None:
                raise UserError("--criterion and --scores both define the scores; give only one.")
            if (
                isinstance(self.scores, str | Path)
                and not Path(self.scores).exists()
                and self.scores_digest is None
            ):
                raise UserError(
                    f"--scores {self.scores}: no such file. Give a safetensors file "
                    "with a tensor for each weight."
                )
            own = own_name(self.criterion, self.scores)
            known = self.scored_by
            if (own is not None and self.name != own) or (
                self.name in method_names() and self.criterion is not None
            ):
                flag = "--scores" if self.scores is not None else "--criterion"
                other = own or "the name of its function"
                raise UserError(
                    f"--method {self.method} does not use {flag}; leave one out, or give --method "
                    f"{other} or emp-{other}."
                )
            if self.score_map is not None and not known.own:
                raise UserError(
                    f"--map is for scores of your own; the scores of {self.name} are "
                    "never negative. Leave it out."
                )
            if self.score is not None and not known.needs_norms:
                raise UserError(
                    f"--score chooses the norms of the inputs, and method {self.method} needs "
                    "none. Leave it out, or use --method wanda or emp-wanda."
                )
            if self.score == "wanda" and self.name == "relative":
                raise UserError(
                    f"--method {self.method} has relative norms; leave out --score "
                    "wanda, or use --method wanda."
                )

        # The counts.
        wrong: tuple[str, ...] = ("beta", "order", "neff_dtype", "count_by")
        rule = "its sparsity is fixed, and --sparsity sets it"
        other = f"emp-{self.name}"
        if self.adaptive:
            wrong = ("pattern", "match", "shares")
            rule = "the effective number sets its sparsity, and --beta scales it"
            other = self.name
        for field in wrong:
            if getattr(self, field) is not None:
                flag = field.replace("_", "-")
                instead = "Use --sparsity, or" if field == "beta" else "Use"
                other = {"emp-sparsegpt": "emp-admm"}.get(other, other)
                raise UserError(
                    f"--{flag} does not go with method {self.method}: {rule}. "
                    f"{instead} --method {other}."
                )
        for field in ("beta", "neff_dtype"):
            if self.adaptive and self.sparsity is not None and getattr(self, field) is not None:
                raise UserError(
                    f"--sparsity finds the beta of {self.method}; leave out "
                    f"--{field.replace('_', '-')}."
                )
        given = [
            field for field in ("sparsity", "pattern", "match") if getattr(self, field) is not None
        ]
        if len(given) > 1:
            raise UserError(f"--{given[0]} and --{given[1]} both set the sparsity; give only one.")
        if self.match_by is not None and self.match is None:
            raise UserError(
                f"--match-by {self.match_by} needs an earlier run; name it with --match."
            )
        for field in ("owl_lambda", "owl_m"):
            if getattr(self, field) is not None and self.shares != "owl":
                raise UserError(
                    f"--{field.replace('_', '-')} is an option of --shares owl; add "
                    "that, or leave it out."
                )
        if self.shares == "owl":
            if not self.needs_activations:
                raise UserError(
                    f"--shares owl is for methods that need activations; {self.method} needs none. "
                    "Use --method wanda."
                )
            if given != ["sparsity"]:
                raise UserError(
                    f"--shares owl goes with --sparsity, not with --{given[0]}; leave one out."
                )
            if self.group == "all":
                raise UserError(
                    "--shares owl fixes the sparsity of every block; use --group row "
                    "or matrix, not all."
                )
            low = self.sparsity - self.owl_lambda  # type: ignore[operator]
            high = self.sparsity + self.owl_lambda  # type: ignore[operator]
            if not 0 <= low <= high < 1:
                raise UserError(
                    "--owl-lambda must leave every block a sparsity between 0 and 1, and it gives "
                    f"{low:g} to {high:g}."
                )
            if not 0 < self.owl_m < float("inf"):  # type: ignore[operator]
                raise UserError(
                    f"--owl-m must be a number above 0 (the paper uses 5), got {self.owl_m:g}."
                )

        # The update of the kept weights.
        for name in ("refit_weighting", "refit_target", "refit_damping"):
            if not self.refit and getattr(self, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} has no effect without --refit. Add "
                    "--refit, or leave it out."
                )
        for name in ("heal_steps", "heal_weights"):
            if not self.heal and getattr(self, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} has no effect without --heal. Add "
                    "--heal, or leave it out."
                )
        update = self.update
        if update is None or not update.searches:
            return
        if self.adaptive and update.keeps == "matrix":
            raise UserError(
                f"--method {self.method}: {update.title} shares the weights of a matrix among its "
                f"rows itself. Use --method {self.name}, or emp-admm."
            )
        if self.group == "all" or (update.keeps == "matrix" and self.group != "row"):
            raise UserError(
                f"--group {self.group} does not go with method {self.method}, which decides each "
                "matrix. Leave it out."
            )

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
        if not self.needs_activations and self.name not in SEARCHES:
            raise UserError(
                "--propagate pruned is for methods that need activations; "
                f"{self.method} needs none."
            )
        of_all = {
            "--sparsity": self.adaptive
            and self.sparsity is not None
            and not self.counts_by_magnitude,
            "--shares owl": self.shares == "owl",
            "--group all": self.group == "all",
        }
        for flag, given in of_all.items():
            if given:
                raise UserError(
                    f"--propagate pruned prunes block by block, and {flag} needs the "
                    "scores of all; leave one out."
                )


def check_targets(tower: str, blocks: str | None) -> None:
    """Raise UserError for a tower that --blocks excludes."""
    if blocks is not None and tower != "language":
        raise UserError("--blocks and --tower both choose the blocks; give only one.")


def method_names() -> list[str]:
    """The built-in methods, without the prefix "emp-"."""
    return [*METHODS, *SEARCHES]


def check_method(recipe: Recipe, flag: str = "--method") -> None:
    """Raise UserError unless a recipe's method names a criterion, with or without the prefix
    "emp-".
    """
    name = recipe.name
    if name == "scores" and recipe.scores is None:
        raise UserError(f"{flag} {recipe.method} needs your scores; give a file with --scores.")
    known = method_names()
    if name not in known and recipe.criterion is None and recipe.scores is None:
        names = ", ".join(each if each == "sparsegpt" else f"emp-{each}, {each}" for each in known)
        hint = did_you_mean(recipe.method, names.split(", "))
        raise UserError(
            f"{flag} {recipe.method!r} is not one of {names}.{hint} A criterion of your own is "
            "named by --criterion MODULE:FUNCTION."
        )


def parse_pattern(text: str) -> tuple[int, int]:
    """ "2:4" as (2, 4); ValueError if the text is not of this form."""
    numbers = re.fullmatch(r"([0-9]+):([0-9]+)", str(text))
    if numbers is None or not 1 <= int(numbers[1]) < int(numbers[2]):
        raise ValueError(
            "pattern must be N:M, such as 2:4, which keeps N of every M weights, 1 "
            f"<= N < M; got {text!r}"
        )
    return int(numbers[1]), int(numbers[2])
