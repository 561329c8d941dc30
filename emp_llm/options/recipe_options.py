"""A recipe as flat options: on the command line, in reports and in manifests.

A field is an option and a key. `RecipeOptions.tree` is the recipe that they mean, and
`RecipeOptions.of` gives the options of a recipe.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from emp_llm.common.errors import UserError, did_you_mean
from emp_llm.options.base import Opt, check_values, flag_of
from emp_llm.options.criterion import custom_name
from emp_llm.options.recipe import (
    METHODS,
    ByCost,
    Counts,
    Effective,
    Given,
    Heal,
    Magnitude,
    Match,
    MatchBy,
    NormScore,
    Own,
    Pattern,
    Recipe,
    Relative,
    Score,
    Share,
    StructureRecipe,
    Targets,
    Tower,
    UnitScore,
    parse_pattern,
)
from emp_llm.selection.rule import Group
from emp_llm.update.update import SEARCHES, Refit, Update, search_named

# Fields that commands share.
TARGET_FIELDS = ("targets", "ignore", "tower", "blocks", "min_expert_tokens", "allow_partial")
REFIT_FIELDS = ("refit", "refit_weighting", "refit_target", "refit_damping")
SCORE_FIELDS = ("criterion", "scores", "score_map", "score", "count_by")


def always(value: Any) -> Any:
    """A default that is written to JSON too."""
    return msgspec.field(default_factory=lambda: value)


class RecipeOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of a recipe.

    None stands for the method's default. It is replaced when the recipe is made, so that a field
    holds the value in force, or None if the method does not use it.

    Attributes:
        method: "wanda", "magnitude", "relative", "ria", "sparsegpt", "admm", the name of a
            criterion of your own, or "scores". "best" is emp-admm (admm, for a pattern or a match)
            with refit and heal. With the prefix "emp-", the effective number sets the number of
            kept weights; without it, the sparsity is fixed. None: "emp-" and the criterion given by
            `criterion` or `scores`, else "emp-wanda".
        beta, order, neff_dtype: the effective number, for emp methods. None: 1, 2, float64.
        sparsity, pattern, match: at most one, for the other methods. None: sparsity 0.5. With an
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
        shares: the sparsities of the blocks, for methods with a fixed sparsity. None: uniform.
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
            "admm, sparsegpt, wanda, relative, ria, magnitude or own; with emp- before it, N_eff "
            "says how many weights stay; best: emp-admm --refit --heal. Heads and neurons also "
            "taylor; experts reap, man, frequency, mass; layers cosine. Default: emp-wanda "
            "(experts: emp-reap, layers: emp-cosine)."
        ),
    ] = None  # type: ignore[assignment]  # __post_init__ sets it
    beta: Annotated[float | None, Opt("Keep beta x N_eff weights (emp methods); default: 1.")] = (
        None
    )
    order: Annotated[
        float | None, Opt("Hill order of the effective number (emp methods); default: 2.")
    ] = None
    neff_dtype: Annotated[
        Literal["float64", "bfloat16"] | None,
        Opt("float64, or bfloat16 for the paper's emp-magnitude arithmetic."),
    ] = None
    sparsity: Annotated[
        float | None,
        Opt("Fraction to remove, of each group (default 0.5); with an emp method, of all targets."),
    ] = None
    pattern: Annotated[str | None, Opt("N:M, keep N of every M inputs (not with emp methods).")] = (
        None
    )
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
        Any, Opt("A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION; the file is run.")
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
        Literal["uniform", "cost"] | None,
        Opt(
            "Sparsity of each block: uniform; cost: lower where a block costs more alone, on "
            "held-out text; default: uniform."
        ),
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
    ignore: Annotated[str | list[str] | None, Opt("Layers to leave out: as --targets.")] = None
    tower: Annotated[
        Tower, Opt("Part of a multimodal model to prune: language, vision, or all.")
    ] = "language"
    blocks: Annotated[
        str | None, Opt("Name of the list of decoder blocks; detected by default.")
    ] = None
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
            fill(self, "method", f"emp-{custom_name(self.criterion, self.scores) or 'wanda'}")
        if not isinstance(self.method, str):
            return  # `check` refuses it
        if self.method == "best":  # its evidence is in docs/heal.md
            fixed = (self.pattern, self.match) != (None, None)
            fill(self, "method", "admm" if fixed else "emp-admm")
            fill(self, "refit", True)
            fill(self, "heal", True)
        if self.adaptive:
            used: dict[str, Any] = {"order": Effective.order}
            if self.sparsity is None:
                used |= {"beta": 1.0, "neff_dtype": "float64"}
            if self.name == "relative":
                used["count_by"] = "magnitude"
        else:
            used = {}
            if (self.pattern, self.match, self.removed) == (None, None, None):
                used["sparsity"] = Share.sparsity
            if self.match is not None:
                used["match_by"] = Match.by
        if self.refit is True:
            used |= {"refit_weighting": Refit.weighting, "refit_target": Refit.target}
        if self.heal is True:
            used |= {"heal_steps": Heal.steps, "heal_weights": Heal.weights}
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
    def relative(self) -> bool:
        """Whether the norms are those relative to the outputs."""
        return self.name == "relative" or self.score == "relative"

    @property
    def custom_scores(self) -> dict[str, Any]:
        """The fields of a custom criterion, or of given scores."""
        names = ("criterion", "criterion_source", "scores", "scores_digest")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, recipe: Recipe) -> "RecipeOptions":
        """The options that mean a recipe."""
        options: dict[str, Any] = {"method": recipe.method, "group": recipe.group}
        options |= _options_of_score(recipe.score) | _options_of_counts(recipe.counts)
        if isinstance(recipe.score, Relative) and isinstance(recipe.counts, Effective):
            options["count_by"] = recipe.counts.count_by  # its default is another
        targets = dict(vars(recipe.targets))
        options |= {"targets": targets.pop("layers"), **targets, "structure": recipe.structure}
        refit = None if recipe.update is None else recipe.update.refit
        for name, node in (("refit", refit), ("heal", recipe.heal)):
            if node is not None:
                options[name] = True
                options |= {f"{name}_{field}": value for field, value in vars(node).items()}
        return cls(**options)

    @property
    def tree(self) -> Recipe:
        """The recipe that the options mean; UserError for a value that is out of range, or for
        values that do not go together.
        """
        return Recipe(
            score=self._score(),
            counts=self._counts(),
            group=self.group,
            targets=Targets(
                self.targets,
                self.ignore,
                self.tower,
                self.blocks,
                self.min_expert_tokens,
                self.allow_partial,
            ),
            update=self._update(),
            heal=Heal(**self._given(Heal, "heal_")) if self.heal else None,
            structure=self.structure,
        )

    def _score(self) -> Score:
        if self.scores is not None:
            return Given(self.scores, self.score_map, self.scores_digest)
        norms: Literal["plain", "relative"] = "relative" if self.score == "relative" else "plain"
        if self.criterion is not None:
            named = None if custom_name(self.criterion) is not None else self.name
            return Own(self.criterion, norms, self.score_map, named, self.criterion_source)
        score = _score_class(self.name)
        if score is None:
            return UnitScore(self.name)
        return score(norms) if issubclass(score, NormScore) else score()

    def _counts(self) -> Counts:
        if self.adaptive:
            given = self._given(Effective)
            if "beta" in given:  # a record holds the beta of a sparsity beside it
                given.pop("sparsity", None)
            return Effective(**given)
        if self.pattern is not None:
            return parse_pattern(self.pattern)
        if self.match is not None or (self.removed is not None and self.shares != "cost"):
            return Match(self.match or Match.run, self.match_by or Match.by, self.removed)
        shares = None
        if self.shares == "cost":
            shares = ByCost(None if isinstance(self.removed, int) else self.removed)
        return Share(Share.sparsity if self.sparsity is None else self.sparsity, shares)

    def _update(self) -> Update | None:
        refit = Refit(**self._given(Refit, "refit_")) if self.refit else None
        return search_named(self.name)(refit=refit) if self.name in SEARCHES else refit

    def _given(self, node: type[Any], prefix: str = "") -> dict[str, Any]:
        """The values for the fields of a node; it has defaults for those that are None."""
        values = {field.name: getattr(self, prefix + field.name) for field in fields(node)}
        return {name: value for name, value in values.items() if value is not None}

    def but(self, **changes: Any) -> "RecipeOptions":
        """The recipe with other values in some fields."""
        return msgspec.structs.replace(self, **changes)

    def with_method(self, method: str, **changes: Any) -> "RecipeOptions":
        """The recipe with another method. Options of the scores stay only if the method uses
        them; counts begin at defaults.
        """
        unused: dict[str, Any] = dict.fromkeys(
            ("beta", "order", "neff_dtype", "sparsity", "pattern", "match", "match_by")
        )
        adaptive = method.startswith("emp-")
        name = method.removeprefix("emp-")
        score = _score_class(name)
        needs_norms = score is None or score().criterion.calibrated
        if not adaptive or self.name == "relative":
            unused["count_by"] = None
        if score is not None:
            unused |= {"criterion": None, "scores": None, "score_map": None}
            if not needs_norms or name == "relative":
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
        if self.structure is None:
            check_method(self)
            self._check_scores()
        self._check_counts()
        for switch in ("refit", "heal"):
            for name in self.__struct_fields__:
                given = name.startswith(f"{switch}_") and getattr(self, name) is not None
                if given and not getattr(self, switch):
                    raise UserError(
                        f"{flag_of(name)} has no effect without --{switch}. Add --{switch}, or "
                        "leave it out."
                    )
        _ = self.tree

    def _check_scores(self) -> None:
        """Raise UserError for options of the scores that the method does not use."""
        if self.criterion is not None and self.scores is not None:
            raise UserError("--criterion and --scores both define the scores; give only one.")
        named = custom_name(self.criterion, self.scores)
        if (named is not None and self.name != named) or (
            self.name in method_names() and self.criterion is not None
        ):
            flag = "--scores" if self.scores is not None else "--criterion"
            other = named or "the name of its function"
            raise UserError(
                f"--method {self.method} does not use {flag}; leave one out, or give --method "
                f"{other} or emp-{other}."
            )
        if self.score_map is not None and named is None and self.criterion is None:
            raise UserError(
                f"--map is for scores of your own; the scores of {self.name} are "
                "never negative. Leave it out."
            )
        needs_norms = self._score().criterion.calibrated  # finds a custom criterion
        if self.score is not None and not needs_norms:
            raise UserError(
                f"--score chooses the norms of the inputs, and method {self.method} needs "
                "none. Leave it out, or use --method wanda or emp-wanda."
            )
        if self.score == "wanda" and self.name == "relative":
            raise UserError(
                f"--method {self.method} has relative norms; leave out --score "
                "wanda, or use --method wanda."
            )

    def _check_counts(self) -> None:
        """Raise UserError for options of the counts that exclude each other."""
        wrong: tuple[str, ...] = ("beta", "order", "neff_dtype", "count_by")
        rule = "its sparsity is fixed, and --sparsity sets it"
        other = f"emp-{self.name}"
        if self.adaptive:
            wrong = ("pattern", "match", "shares")
            rule = "the effective number sets its sparsity, and --beta scales it"
            other = self.name
        for name in wrong:
            if getattr(self, name) is not None:
                instead = "Use --sparsity, or" if name == "beta" else "Use"
                other = {"emp-sparsegpt": "emp-admm"}.get(other, other)
                raise UserError(
                    f"{flag_of(name)} does not go with method {self.method}: {rule}. "
                    f"{instead} --method {other}."
                )
        for name in ("beta", "neff_dtype"):
            if self.adaptive and self.sparsity is not None and getattr(self, name) is not None:
                raise UserError(
                    f"--sparsity finds the beta of {self.method}; leave out {flag_of(name)}."
                )
        given = [
            name for name in ("sparsity", "pattern", "match") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise UserError(f"--{given[0]} and --{given[1]} both set the sparsity; give only one.")
        if self.match_by is not None and self.match is None:
            raise UserError(
                f"--match-by {self.match_by} needs an earlier run; name it with --match."
            )
        if self.shares == "cost" and given != ["sparsity"]:
            raise UserError(
                f"--shares cost goes with --sparsity, not with --{given[0]}; leave one out."
            )


def _score_class(name: str) -> type[Score] | None:
    """The scores of a built-in method without "emp-"; None for any other."""
    return Magnitude if name in SEARCHES else METHODS.get(name)


def recipe_of(method: str | None = None, **options: Any) -> Recipe:
    """The recipe that options of the command line mean: `recipe_of("emp-admm", refit=True)`.

    Args:
        method: None: "emp-wanda".
        options: fields of `RecipeOptions`.

    Raises:
        UserError: an option is unknown, out of range, or does not go with another.
    """
    for name in options:
        if name not in RecipeOptions.__struct_fields__:
            hint = did_you_mean(name, RecipeOptions.__struct_fields__)
            raise UserError(f"{name} is not an option of a recipe.{hint}")
    asked = RecipeOptions(method=method, **options)  # type: ignore[arg-type]
    asked.check()
    return asked.tree


def _options_of_score(score: Score) -> dict[str, Any]:
    if isinstance(score, Given):
        return {
            "scores": score.scores,
            "score_map": score.score_map,
            "scores_digest": score.digest,
        }
    options: dict[str, Any] = {}
    if score.relative and not isinstance(score, Relative):
        options["score"] = "relative"
    if isinstance(score, Own):
        options |= {
            "criterion": score.function,
            "score_map": score.score_map,
            "criterion_source": score.source,
        }
    return options


def _options_of_counts(counts: Counts) -> dict[str, Any]:
    if isinstance(counts, Effective):
        return vars(counts) | {"count_by": None if counts.count_by == "own" else counts.count_by}
    if isinstance(counts, Pattern):
        return {"pattern": f"{counts.n}:{counts.m}"}
    if isinstance(counts, Match):
        return {
            "match": counts.run or None,
            "match_by": counts.by if counts.run else None,
            "removed": counts.removed,
        }
    assert isinstance(counts, Share)
    options: dict[str, Any] = {"sparsity": counts.sparsity}
    if counts.shares is not None:
        options |= {"shares": "cost", "removed": counts.shares.removed}
    return options


def method_names() -> list[str]:
    """The built-in methods, without the prefix "emp-"."""
    return [*METHODS, *SEARCHES]


def check_method(recipe: RecipeOptions, flag: str = "--method") -> None:
    """Raise UserError unless a recipe's method names a criterion, with or without the prefix
    "emp-".
    """
    name = recipe.name
    if name == "scores" and recipe.scores is None:
        raise UserError(f"{flag} {recipe.method} needs your scores; give a file with --scores.")
    known = method_names()
    if name not in known and recipe.criterion is None and recipe.scores is None:
        names = ", ".join(
            built_in if built_in == "sparsegpt" else f"emp-{built_in}, {built_in}"
            for built_in in known
        )
        hint = did_you_mean(recipe.method, names.split(", "))
        raise UserError(
            f"{flag} {recipe.method!r} is not one of {names}.{hint} A criterion of your own is "
            "named by --criterion MODULE:FUNCTION."
        )
