"""The flat options of a recipe, as on the command line, and the tree that they mean."""

from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import Any, NoReturn

from emp_llm.common.declared import Flag, Option, build, build_asked, options_of
from emp_llm.common.errors import UserError, did_you_mean, quotable
from emp_llm.options.criterion import custom_name
from emp_llm.options.recipe import (
    UNIT_CRITERIA,
    UNIT_KINDS,
    Counts,
    Effective,
    Given,
    Heal,
    Magnitude,
    Match,
    Own,
    Pattern,
    Recipe,
    Relative,
    Score,
    Share,
    Structure,
    Targets,
    UnitScore,
    Wanda,
    score_kinds,
    searches,
)
from emp_llm.update.update import Refit, Update

_METHOD = Flag(
    "admm, sparsegpt, wanda, relative, ria, magnitude or own; with emp-, N_eff says how many "
    "stay; best: emp-admm --refit --heal. Heads and neurons also taylor, fisher; experts reap, "
    "man, frequency, mass; layers perplexity, cosine. Default: emp-wanda (experts: emp-reap, "
    "layers: emp-perplexity)."
)


# Why an option has no place in a recipe.
_OF_EMP = (
    "{flag} does not go with method {method}: its sparsity is fixed, and --sparsity sets it. "
    "{instead} --method emp-{emp}."
)
_OF_FIXED = (
    "{flag} does not go with method {method}: the effective number sets its sparsity, and --beta "
    "scales it. Use --method {plain}."
)
_OF_MATCH = "--match-by {value} needs an earlier run; name it with --match."
_OF_OTHERS = "{flag} is for {users}, not for {method}. Leave it out, or use that method."
_TWICE = "{flag} and --{by} both set the sparsity; give only one."
_OWN = "--method {method} does not use {flag}; leave one out, or give --method {own} or emp-{own}."
_WHY_NOT = {
    "shares": "--shares cost goes with --sparsity, not with --{by}; leave one out.",
    "criterion": _OWN,
    "scores": _OWN,
    "score_map": "--map is for scores of your own; the scores of {plain} are never negative. Leave "
    "it out.",
    "score": "--score chooses the norms of the inputs, and method {method} {norms}. Leave it out, "
    "or use --method wanda or emp-wanda.",
}


class RecipeWords(dict[str, Any]):
    """The options of a recipe that a call gives, by name. A command with a parameter of this type
    has all of them.
    """

    @classmethod
    def options(cls) -> dict[str, Option]:
        """The options, by name."""
        parameter = Parameter("method", Parameter.KEYWORD_ONLY, default=None)
        return {"method": Option(parameter, str, _METHOD)} | options_of(Recipe)

    @property
    def recipe(self) -> Recipe:
        """The recipe that they mean.

        Raises:
            UserError: a value is out of range, or options do not go together.
        """
        return self.read()[0]

    def but(self, **changes: Any) -> "RecipeWords":
        """The same, with other values of some."""
        return RecipeWords(self | changes)

    def read(
        self, unused: tuple[str, ...] = (), flag: str = "--method"
    ) -> tuple[Recipe, frozenset[str]]:
        """The recipe, and the options that have no place in it.

        Args:
            unused: options that may have none; others are refused.
            flag: the option that names the method, for errors.
        """
        given = {name: value for name, value in self.items() if _says_something(name, value)}
        structure = build(Structure, given) if "structure" in given else None
        if structure is not None:
            given.setdefault("targets", structure.layers)
            if structure.units == "layers" and Refit.name in given:
                # A few tokens may have huge hidden states (docs/structure.md).
                given.setdefault("refit_weighting", "relative")
        method = _method_of(given, structure)
        adaptive = method.startswith("emp-")
        name = method.removeprefix("emp-")
        score_kind = _score_kind(method, given, structure is not None, flag)
        counts_kind = _counts_kind(adaptive, given)
        if adaptive and name == Relative.name:
            given.setdefault("count_by", "magnitude")
        if counts_kind is Effective and {"beta", "sparsity"} <= given.keys():
            raise UserError(f"--sparsity finds the beta of {method}; leave out --beta.")
        score = build(score_kind, given)
        update: Update | None = (
            build(searches()[name], given) if name in searches() else build_asked(Refit, given)
        )
        fields: dict[str, Any] = {"counts": build(counts_kind, given)}
        fields |= {"targets": build(Targets, given), "heal": build_asked(Heal, given)}
        if "group" in given:
            fields["group"] = given.pop("group")
        for left in given:
            if left not in unused:
                _refuse(left, method, self)
        if isinstance(score, Own):
            calibrated = score.criterion.calibrated
            if "score" in self and not calibrated and "score" not in unused:
                _refuse("score", method, self)
        recipe = Recipe(score=score, update=update, structure=structure, **fields)
        return recipe, frozenset(given)


def recipe_of(method: str | None = None, **options: Any) -> Recipe:
    """The recipe that options of the command line mean: `recipe_of("emp-admm", refit=True)`.

    Args:
        method: None: "emp-wanda".
        options: their names are those of the command line, with underscores.

    Raises:
        UserError: an option is unknown, out of range, or does not go with another.
    """
    if method is not None and not isinstance(method, str):
        raise UserError(f"--method must be a name such as emp-wanda, got {quotable(repr(method))}.")
    known = RecipeWords.options()
    words = RecipeWords()
    for name, value in ({"method": method} | options).items():
        if name not in known:
            raise UserError(f"{name} is not an option of a recipe.{did_you_mean(name, known)}")
        if value is not None:
            words[name] = known[name].checked(value)
    return words.recipe


def check_used(shared: RecipeWords, left: Iterable[frozenset[str]], methods: str) -> None:
    """Raise UserError for an option that has no place in any of several recipes.

    Args:
        shared: what they share.
        left: of each recipe, the options without a place in it.
        methods: the option that names the methods.
    """
    for name in frozenset.intersection(*left):
        flag = RecipeWords.options()[name].flag
        value = "" if isinstance(shared[name], bool) else f" {shared[name]}"
        raise UserError(
            f"{flag}{value} is for {_users_of(name)}, and {methods} has none that it changes. "
            "Leave it out, or add one."
        )


def method_names() -> list[str]:
    """The methods, without the prefix "emp-"."""
    return [*score_kinds(), *searches()]


def _says_something(name: str, value: Any) -> bool:
    """Whether an option asks for more than its absence does."""
    return value is not None and value is not False and (name, value) != ("shares", "uniform")


def _method_of(given: dict[str, Any], structure: Structure | None) -> str:
    """The method that is asked for, or the default; taken out of the options. "best" adds
    options.
    """
    method: str | None = given.pop("method", None)
    if method is None:
        default = Wanda.name
        if structure is not None and structure.criteria[0] != Magnitude.name:
            default = structure.criteria[0]
        own = custom_name(given.get("criterion"), given.get("scores"))
        return f"emp-{own or default}"
    if method == "best":  # its evidence is in docs/heal.md
        if structure is not None:
            raise UserError(
                "--method best removes weights, and --structure units. Give one; --heal goes with "
                "both."
            )
        given |= {Refit.name: True, "heal": True}
        return "admm" if {"pattern", "match"} & given.keys() else "emp-admm"
    return method


def _score_kind(method: str, given: dict[str, Any], of_units: bool, flag: str) -> type[Score]:
    """The class of the scores of a method; UserError if there is none."""
    name = method.removeprefix("emp-")
    if {"criterion", "scores"} <= given.keys():
        raise UserError("--criterion and --scores both define the scores; give only one.")
    if name in searches():
        return Magnitude
    if name in score_kinds():
        return score_kinds()[name]
    if of_units and name in UNIT_CRITERIA:
        given["unit_criterion"] = name
        return UnitScore
    if name == Given.name and "scores" in given:
        return Given
    if "criterion" in given:
        own = custom_name(given["criterion"])
        if own is None:
            given["named"] = name
        if own == name or "named" in given:
            return Own
    for option in ("criterion", "scores"):
        if option in given:
            _refuse(option, method, given)
    if name == Given.name:
        raise UserError(f"{flag} {method} needs your scores; give a file with --scores.")
    if name in UNIT_CRITERIA:
        scored = [units for units, kind in UNIT_KINDS.items() if name in kind.criteria]
        raise UserError(
            f"{flag} {method} scores {' and '.join(scored)}, not weights. Add --structure, or use "
            "emp-wanda."
        )
    names = ", ".join(
        built_in if built_in == "sparsegpt" else f"emp-{built_in}, {built_in}"
        for built_in in method_names()
    )
    names += ", best"
    hint = did_you_mean(method, names.split(", "))
    raise UserError(
        f"{flag} {method!r} is not one of {names}.{hint} A criterion of your own is named by "
        "--criterion MODULE:FUNCTION."
    )


def _counts_kind(adaptive: bool, given: Mapping[str, Any]) -> type[Counts]:
    """The class of the counts that options ask for."""
    if adaptive:
        return Effective
    if "match" in given:
        return Match
    return Pattern if "pattern" in given else Share


def _refuse(name: str, method: str, words: Mapping[str, Any]) -> NoReturn:
    """Raise UserError for an option that has no place in the recipe of a method."""
    plain = method.removeprefix("emp-")
    sentence = _WHY_NOT.get(name, _OF_OTHERS)
    if name in options_of(Effective) and name != "sparsity":
        sentence = _OF_EMP
    elif name == "match_by" and "match" not in words:
        sentence = _OF_MATCH
    elif name in options_of(Counts):
        sentence = _OF_FIXED if plain != method else _WHY_NOT.get(name, _TWICE)
    for switch, node in (("refit", Refit), ("heal", Heal), ("structure", Structure)):
        if name in options_of(node):
            sentence = (
                f"{{flag}} has no effect without --{switch}. Add --{switch}, or leave it out."
            )
    facts = {
        "flag": RecipeWords.options()[name].flag,
        "value": words[name],
        "method": method,
        "plain": plain,
        "emp": "admm" if plain == "sparsegpt" else plain,
        "instead": "Use --sparsity, or" if name == "beta" else "Use",
        "by": "match" if "match" in words else "pattern",
        "norms": "has relative norms" if plain == Relative.name else "needs none",
        "own": custom_name(words.get("criterion"), words.get("scores"))
        or "the name of its function",
        "users": _users_of(name),
    }
    raise UserError(sentence.format(**facts))


def _users_of(name: str) -> str:
    """The methods whose recipes have a place for an option."""
    if name in options_of(Effective):
        return "emp methods"
    if name == "score":
        return "methods that need activations"
    if name in ("criterion", "scores", "score_map"):
        return "scores of your own"
    kinds = (score_kinds() | searches()).items()
    users = [user for user, kind in kinds if name in options_of(kind)]
    return f"method {' or '.join(users)}"
