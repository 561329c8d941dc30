"""The recipe: a tree, its words, and what cannot be meant."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from emp_llm.options.recipe_options import RecipeOptions
from hypothesis import given
from hypothesis import strategies as st

from emp_llm import (
    Admm,
    ByCost,
    Effective,
    Given,
    Heal,
    Magnitude,
    Match,
    Own,
    Pattern,
    Recipe,
    Refit,
    Relative,
    Ria,
    Share,
    SparseGPT,
    Targets,
    UserError,
    Wanda,
    recipe_of,
)
from emp_llm.update.update import Search


def row_share(weight: Any, inputs: Any) -> Any:
    """A criterion."""
    return weight.abs() * inputs.norms


class Mine(Search):
    """An update that the package does not know."""

    name = "mine"

    def solve(self, *_: Any) -> Any:
        raise NotImplementedError


share = st.integers(0, 99).map(lambda number: number / 100)
scores = st.one_of(
    st.just(Magnitude()),
    st.just(Relative()),
    st.sampled_from(["plain", "relative"]).flatmap(
        lambda norms: st.sampled_from([Wanda(norms), Ria(norms), Own(row_share, norms)])  # type: ignore[arg-type]
    ),
    st.builds(Given, st.just({"a": 1}), st.sampled_from([None, "abs", "shift", "exp"])),
)
effective = st.one_of(
    st.builds(Effective, beta=st.floats(0.1, 4), order=st.sampled_from([0.0, 1.0, 2.0])),
    st.builds(Effective, sparsity=share, count_by=st.sampled_from(["own", "magnitude"])),
    st.just(Effective(neff_dtype="bfloat16")),
)
fixed = st.one_of(
    st.builds(Share, share),
    st.integers(2, 16).flatmap(
        lambda group: st.builds(Pattern, st.integers(1, group - 1), st.just(group))
    ),
    st.builds(Match, st.just("run"), st.sampled_from(["total", "matrix"])),
)
# Any fields; the nodes refuse those that do not go together.
any_effective = st.fixed_dictionaries(
    {},
    optional={
        "beta": st.sampled_from([None, 0.5, 2.0]),
        "order": st.sampled_from([0.0, 1.0, 2.0]),
        "neff_dtype": st.sampled_from([None, "float64", "bfloat16"]),
        "count_by": st.sampled_from(["own", "magnitude"]),
        "sparsity": st.sampled_from([None, 0.0, 0.5]),
    },
)
any_shares = st.one_of(st.none(), st.just(ByCost()))
refits = st.builds(
    Refit,
    weighting=st.sampled_from(["equal", "relative"]),
    target=st.sampled_from(["block", "layer"]),
    damping=st.sampled_from([None, 0.01, 1.0]),
)
some_refit = st.one_of(st.none(), refits)
searches = st.one_of(st.builds(SparseGPT, refit=some_refit), st.builds(Admm, refit=some_refit))
targets = st.builds(
    Targets,
    st.sampled_from(["mlp", "all-linear", ["up_proj", "q_proj"]]),
    st.sampled_from([None, "q_proj"]),
    min_expert_tokens=st.integers(0, 64),
    allow_partial=st.booleans(),
)
heals = st.one_of(
    st.none(), st.builds(Heal, st.integers(1, 500), st.sampled_from(["targets", "all"]))
)
recipes = st.one_of(
    st.builds(
        Recipe,
        score=scores,
        counts=st.one_of(effective, fixed),
        targets=targets,
        update=some_refit,
        heal=heals,
    ),
    st.builds(
        Recipe,
        score=st.just(Magnitude()),
        counts=fixed,
        update=searches,
        heal=heals,
    ),
    st.builds(
        Recipe,
        score=st.just(Magnitude()),
        counts=effective,
        update=st.builds(Admm, refit=some_refit),
    ),
    st.builds(
        Recipe,
        score=scores,
        counts=effective.filter(lambda each: each.neff_dtype != "bfloat16"),
        group=st.sampled_from(["row", "matrix", "all"]),
    ),
)


@given(
    scores,
    st.one_of(
        any_effective.map(lambda fields: lambda: Effective(**fields)),
        st.builds(lambda *fields: lambda: Share(*fields), share, any_shares),
        fixed.map(lambda counts: lambda: counts),
    ),
    st.sampled_from(["row", "matrix", "all"]),
    st.one_of(some_refit, searches),
    heals,
)
def test_what_is_not_refused_is_recorded(
    score: Any, counts: Callable[[], Any], group: Any, update: Any, heal: Any
) -> None:
    """Of all scores with all counts and updates, and of all pairs of fields."""
    try:
        recipe = Recipe(score=score, counts=counts(), group=group, update=update, heal=heal)
    except UserError:
        return
    options = RecipeOptions.of(recipe)
    options.check()
    assert options.tree == recipe


@given(recipes)
def test_options_and_back(recipe: Recipe) -> None:
    options = RecipeOptions.of(recipe)
    options.check()
    assert options.tree == recipe
    assert RecipeOptions.of(options.tree) == options


@given(recipes)
def test_records_hold_a_recipe(recipe: Recipe) -> None:
    """The options go through JSON, unless a function or tensors are in them."""
    import msgspec

    options = RecipeOptions.of(recipe)
    if options.criterion is None and options.scores is None:
        assert msgspec.convert(options.as_dict(), RecipeOptions).tree == recipe


def test_defaults_are_the_papers() -> None:
    paper = Recipe()
    assert paper == recipe_of() == recipe_of("emp-wanda")
    assert paper == Recipe(score=Wanda(), counts=Effective(beta=1, order=2), group="row")
    assert (paper.method, paper.needs_activations, paper.moves) == ("emp-wanda", True, False)
    assert recipe_of("wanda") == Recipe(counts=Share(0.5))
    assert recipe_of("emp-admm") == Recipe(update=Admm())
    assert recipe_of("emp-admm") == Recipe(score=Magnitude(), update=Admm())
    assert recipe_of("wanda", pattern="2:4") == Recipe(counts=Pattern(2, 4))
    assert recipe_of("wanda", shares="cost") == Recipe(counts=Share(0.5, ByCost()))
    assert recipe_of("emp-relative").counts == Effective(count_by="magnitude")
    assert recipe_of(criterion=row_share) == Recipe(score=Own(row_share))


@pytest.mark.parametrize("counts", [Effective(), Share(0.5), Pattern(1, 8)])
def test_a_recipe_at_a_sparsity(counts: Any) -> None:
    found = replace(Recipe(), counts=counts).at(0.25).counts
    assert type(found) is type(counts)
    assert found in (Effective(sparsity=0.25), Share(0.25), Pattern(6, 8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Recipe(score="wanda"), r"of type Score, got 'wanda'\. Write Wanda\(\)\."),
        (lambda: Recipe(counts=0.5), r"of type Counts, got 0.5. Write Share\(0\.5\)"),
        (lambda: Recipe(update="refit"), r"of type Update, got 'refit'\. Write Refit\(\)"),
        (lambda: Recipe(heal=True), r"heal must be of type Heal, got True. Write Heal\(\)"),
        (lambda: Recipe(targets="mlp"), r"got 'mlp'. Write Targets\('mlp'\)"),
        (lambda: Recipe(score=Ria), r"Write Ria\(\)"),
        (lambda: Recipe(score="admm"), r"Write update=Admm\(\)"),
        (lambda: Recipe(counts=[1]), r"got \[1\]\. Write Share\(0\.5\)"),
        (lambda: Recipe(group="rows"), "group 'rows' is not one of row, matrix, all"),
        (lambda: Effective(beta=0), "beta must be a number above 0"),
        (lambda: Effective(beta="1"), "beta must be a number, got '1'"),
        (lambda: Effective(order=-1), "order must be"),
        (lambda: Share(50), "did you mean 0.5"),
        (lambda: Share(True), "sparsity must be a number, got True"),
        (lambda: Pattern(4, 4), "1 <= N < M; got '4:4'"),
        (lambda: Wanda("both"), "norms 'both' is not one of plain, relative"),
        (lambda: Own(5), "criterion must be a function or its name, got 5"),
        (lambda: Given("nowhere.safetensors"), "no such file"),
        (lambda: Given(5), "scores must be a file, a folder, or a mapping .* got int"),
        (lambda: Match(5), "run must be text, got 5"),
        (lambda: Match(""), "Match needs run"),
        (lambda: Match("a", "rows"), "by 'rows' is not one of total, matrix"),
        (lambda: Match("a", removed={"b": "c"}), "removed must be a whole number or a mapping"),
        (lambda: ByCost(3), "removed must be a mapping from names to whole numbers, got 3"),
        (lambda: Refit(damping=0), "refit.damping must be above 0"),
        (lambda: Refit(damping="1"), "damping must be a number, got '1'"),
        (lambda: Refit(weighting="rows"), "weighting 'rows' is not one of equal, relative"),
        (lambda: SparseGPT(refit=True), r"refit must be Refit\(...\) or None, got True"),
        (lambda: Heal(steps=0), "heal.steps must be at least 1, got 0"),
        (lambda: Targets(min_expert_tokens=-1), "min.expert.tokens must be at least 0"),
        (lambda: Targets(tower="vision", blocks="a"), "blocks and .*tower both choose"),
        (lambda: Recipe(counts=Pattern(2, 4), group="matrix"), "needs group row, not matrix"),
        (lambda: Recipe(counts=Match("a", "matrix"), group="all"), "not all"),
        (
            lambda: Recipe(counts=Effective(neff_dtype="bfloat16"), group="all"),
            "needs order 2, group row",
        ),
        (lambda: Recipe(counts=Share(0.5, ByCost()), group="all"), "shares cost fixes"),
        (
            lambda: Recipe(score=Wanda(), update=Admm()),
            r"update Admm counts by magnitudes; give score=Magnitude\(\), or leave the score out",
        ),
        (
            lambda: Recipe(score=Ria(), counts=Share(0.5), update=SparseGPT()),
            r"update SparseGPT counts by magnitudes",
        ),
        (lambda: Recipe(update=Mine()), "update Mine is not known by its name.*SEARCHES"),
        (lambda: Effective(beta=2, sparsity=0.5), "sparsity finds the beta; leave out beta"),
        (
            lambda: Effective(sparsity=0.5, neff_dtype="bfloat16"),
            "sparsity finds the beta; leave out neff_dtype",
        ),
        (lambda: Own(row_share, named="other"), "named is for a module or a file"),
        (lambda: Own("scores.py"), "scores.py names no function"),
        (lambda: Recipe(update=SparseGPT()), "shares the weights of a matrix among its rows"),
        (
            lambda: Recipe(score=Magnitude(), counts=Share(), group="matrix", update=SparseGPT()),
            "group matrix does not go with method sparsegpt",
        ),
        (
            lambda: recipe_of("wanda", metod="x"),
            "metod is not an option of a recipe. Did you mean method",
        ),
        (lambda: recipe_of("wanda", beta=1), "beta does not go with method wanda"),
    ],
)
def test_what_cannot_be_meant(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()
