"""The recipe: a tree, its words, and what cannot be meant."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import check_verified
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    prune_model,
    recipe_of,
)
from emp_llm.common.declared import fields_of, kinds_of
from emp_llm.options.recipe import Counts, Score, Structure, UnitScore
from emp_llm.pruning.scores import as_recorded
from emp_llm.pruning.writing import read_manifest
from emp_llm.records.base import record_of
from emp_llm.records.run_report import Manifest
from emp_llm.update.update import Search, Update


def row_share(weight: Any, inputs: Any) -> Any:
    """A criterion."""
    return weight.abs() * inputs.norms


class Nameless(Search):
    """An update that no record could name."""

    def solve(self, *_: Any) -> Any:
        raise NotImplementedError


class Finer(Wanda):
    """A score that a record would take for Wanda."""


share = st.integers(0, 99).map(lambda number: number / 100)
scores = st.one_of(
    st.just(Magnitude()),
    st.just(Relative()),
    st.sampled_from(["plain", "relative"]).flatmap(
        lambda norms: st.sampled_from([Wanda(norms), Ria(norms), Own(row_share, norms)])  # type: ignore[arg-type]
    ),
    st.builds(
        Given,
        st.just("scores.safetensors"),
        st.sampled_from([None, "abs", "shift", "exp"]),
        st.just("a hash"),
    ),
)
effective = st.one_of(
    st.builds(Effective, beta=st.floats(0.1, 4), order=st.sampled_from([0.0, 1.0, 2.0])),
    st.builds(
        Effective,
        sparsity=share,
        count_by=st.sampled_from(["own", "magnitude"]),
        found=st.sampled_from([None, 0.75]),
    ),
    st.just(Effective(neff_dtype="bfloat16")),
)
fixed = st.one_of(
    st.builds(Share, share),
    st.integers(2, 16).flatmap(
        lambda group: st.builds(Pattern, st.integers(1, group - 1), st.just(group))
    ),
    st.sampled_from(
        [Match("run"), Match("run", "matrix"), Match("r", removed=7)]
        + [Match("r", "matrix", removed) for removed in ({}, {"a.b": 3, "c": 0})]
    ),
)
# Any fields; the nodes refuse those that do not go together.
any_effective = st.fixed_dictionaries(
    {},
    optional={
        "beta": st.sampled_from([None, 0.5, 2.0]),
        "order": st.sampled_from([0.0, 1.0, 2.0]),
        "neff_dtype": st.sampled_from(["float64", "bfloat16"]),
        "count_by": st.sampled_from(["own", "magnitude"]),
        "sparsity": st.sampled_from([None, 0.0, 0.5]),
    },
)
any_shares = st.one_of(st.none(), st.builds(ByCost, st.sampled_from([None, {"a.b": 3}])))
# What a field may be given by mistake, and the largest and smallest numbers.
ODD = [
    *(math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, 1 - 2**-53, 0.5, 1.0, 2.0),
    *(0, 1, 3, -1, 2**63, 2**64 - 1, 2**64, -(2**64), 10**400),
    *("", " ", ",", "a", "inf", [], [""], ["a"], {}, {"a": 1}, {"a": -1}, {"a": 2**70}),
    *(None, True, False),
]


def odd_nodes(kind: Any) -> st.SearchStrategy[Callable[[], Any]]:
    """Functions that make a node of any values, or fail."""
    made = []
    for each in kinds_of(kind):
        if "emp_llm" not in each.__module__:  # of another test
            continue
        values = {}
        for field in fields_of(each):
            known = field.value.choices or ([] if field.node is None else [None, field.node])
            values[field.name] = st.sampled_from([*known, *ODD])
        required = {
            field.name: values.pop(field.name) for field in fields_of(each) if field.value.required
        }
        drawn = st.fixed_dictionaries(required, optional=values)
        made.append(drawn.map(lambda given, each=each: lambda: each(**given)))
    return st.one_of(made)


refits = st.builds(
    Refit,
    weighting=st.sampled_from(["equal", "relative"]),
    target=st.sampled_from(["block", "layer"]),
    damping=st.sampled_from([None, 0.01, 1.0]),
)
some_refit = st.one_of(st.none(), refits)
sparsegpts = st.builds(
    SparseGPT, refit=some_refit, damping=st.floats(0.001, 1), columns=st.integers(1, 512)
)
admms = st.builds(Admm, refit=some_refit, penalty=st.floats(0.01, 1), stages=st.integers(2, 12))
searches = st.one_of(sparsegpts, admms)
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
parts = st.one_of(
    st.builds(
        Structure,
        units=st.sampled_from(["neurons", "both"]),
        group=st.sampled_from(["layer", "all"]),
        width_multiple=st.sampled_from([None, 8]),
    ),
    st.builds(Structure, units=st.just("heads"), keep_shapes=st.booleans()),
)
experts = st.builds(Structure, units=st.just("experts"), keep_shapes=st.booleans())
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
        update=admms,
    ),
    st.builds(
        Recipe,
        score=scores,
        counts=effective.filter(lambda each: each.neff_dtype != "bfloat16"),
        group=st.sampled_from(["row", "matrix", "all"]),
    ),
    st.builds(
        Recipe,
        score=st.sampled_from([Magnitude(), UnitScore("taylor")]),
        counts=st.one_of(effective, st.builds(Share, share)),
        update=some_refit,
        heal=heals,
        structure=parts,
    ),
    st.builds(
        Recipe,
        score=st.sampled_from([Magnitude(), UnitScore("reap")]),
        counts=st.one_of(effective, st.builds(Share, share)),
        update=st.one_of(st.none(), st.builds(Refit, damping=st.sampled_from([None, 0.01]))),
        structure=experts,
    ),
)


def read_again(recipe: Recipe) -> Recipe:
    """A recipe that went through the JSON of a record."""
    written = Manifest(source={}, recipe=as_recorded(recipe), files={})  # type: ignore[arg-type]
    values = json.loads(written.encoded())
    return record_of(values, Manifest, "a manifest").recipe


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
    assert read_again(recipe) == as_recorded(recipe)


odd_heals = st.one_of(st.just(lambda: None), odd_nodes(Heal))
odd_structures = st.one_of(st.just(lambda: None), odd_nodes(Structure))


@given(
    st.tuples(
        *(odd_nodes(kind) for kind in (Score, Counts, Update, Targets)), odd_heals, odd_structures
    )
)
def test_odd_values_are_refused_or_recorded(made: tuple[Callable[[], Any], ...]) -> None:
    """Infinity, NaN, the largest numbers, and values of another type, in any field."""
    nodes = []
    for make in made:
        try:
            nodes.append(make())
        except UserError:
            nodes.append(None)
    score, counts, update, targets, heal, structure = nodes
    parts = {"score": score, "counts": counts, "update": update, "structure": structure}
    trees = [
        parts,
        {"heal": heal, "targets": targets or Targets()},
        *({name: node} for name, node in parts.items()),
    ]
    for tree in trees:
        try:
            recipe = as_recorded(Recipe(**tree))
        except UserError:
            continue
        assert read_again(recipe) == recipe
        assert hash(recipe) == hash(read_again(recipe))


@given(recipes)
def test_the_record_of_a_recipe_reads_back_equal(recipe: Recipe) -> None:
    assert read_again(recipe) == as_recorded(recipe)
    assert read_again(read_again(recipe)) == read_again(recipe)
    assert hash(read_again(recipe)) == hash(as_recorded(recipe))
    assert dataclasses.replace(recipe) == recipe
    assert list(dataclasses.asdict(recipe)) == [each.name for each in dataclasses.fields(recipe)]


def test_a_record_has_every_field() -> None:
    """So that another default, later, does not change what it means."""
    tree = Recipe(counts=Share(0.5, ByCost()), update=Admm(refit=Refit()), heal=Heal()).as_dict()
    assert tree["counts"] == {"share": {"sparsity": 0.5, "shares": {"removed": None}}}
    assert tree["targets"] == {
        "layers": "mlp",
        "ignore": None,
        "tower": "language",
        "blocks": None,
        "min_expert_tokens": 32,
        "allow_partial": False,
    }
    refit = {"weighting": "equal", "target": "block", "damping": None}
    assert tree["update"] == {"admm": {"refit": refit, "penalty": 0.15, "stages": 6}}
    expected = {"steps": 300, "weights": "targets", "labels": 0.0, "tokens": None, "minutes": None}
    assert tree["heal"] == expected
    assert (tree["group"], tree["structure"]) == ("row", None)
    (kind,) = Recipe(score=Own(row_share)).as_dict()["score"].values()
    assert kind["norms"] == "plain"


def test_a_recipe_is_a_dataclass_with_a_hash() -> None:
    recipe = Recipe(counts=Match("run", "matrix", {"a": 1}), targets=Targets(["a", "b"]))
    costs = Recipe(counts=Share(0.5, ByCost({"a": 1})))
    assert len({recipe, recipe.but(), costs, costs.but(heal=Heal())}) == 3
    assert dataclasses.replace(costs, group="matrix") == costs.but(group="matrix")
    assert dataclasses.asdict(costs)["counts"]["shares"] == {"removed": {"a": 1}}
    with pytest.raises(UserError, match="group 'rows' is not one of"):
        dataclasses.replace(costs, group="rows")  # type: ignore[arg-type]


small = st.builds(
    lambda recipe, targets: recipe.but(heal=None, targets=Targets(targets)),
    recipes.filter(
        lambda recipe: (
            recipe.structure is None
            and not isinstance(recipe.score, Own | Given)
            and not isinstance(recipe.counts, Match)
            and (not isinstance(recipe.counts, Pattern) or recipe.counts.m in (2, 4, 8, 16))
            and getattr(recipe.counts, "found", None) is None
        )
    ),
    st.sampled_from(["mlp", "all-linear"]),
)


@settings(max_examples=12, deadline=None)
@given(small)
def test_verify_finds_no_difference(
    tiny_llama: Path,
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recipe: Recipe,
) -> None:
    """By the record alone, whatever the recipe."""
    source = tiny_llama
    folder = tmp_path_factory.mktemp("saved")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    needs_text = recipe.needs_activations or recipe.moves
    try:
        report = prune_model(
            model, recipe, str(text) if needs_text else None, tokenizer, samples=4, seqlen=64
        )
    except UserError:  # it does not fit the model
        return
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report.save(folder)
    asked = report.record.recipe
    assert asked == as_recorded(recipe).with_found(asked.counts.in_force)
    assert read_manifest(folder).recipe == asked
    check_verified(folder, source)


def test_the_tree_is_what_is_written() -> None:
    admm = recipe_of("admm", refit=True, refit_target="layer", pattern="2:4", stages=4)
    assert admm.as_dict() == {
        "score": {"magnitude": {}},
        "counts": {"pattern": {"n": 2, "m": 4}},
        "group": "row",
        "update": {
            "admm": {
                "refit": {"weighting": "equal", "target": "layer", "damping": None},
                "penalty": 0.15,
                "stages": 4,
            }
        },
        "heal": None,
        "targets": Targets().__dict__,
        "structure": None,
    }
    counts = recipe_of("wanda", sparsity=0.5).as_dict()["counts"]
    assert counts == {"share": {"sparsity": 0.5, "shares": None}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"score": {"wandaa": {}}}, r"recipe\.score: unknown value 'wandaa'.* Did you mean wanda"),
        ({"score": "wanda"}, r"recipe\.score: expected object, got 'wanda'"),
        ({"counts": {"share": {"sparsity": 5.0}}}, r"recipe\.counts\.share: .*sparsity must be"),
        ({"counts": {"share": {"beta": 1}}}, r"recipe\.counts\.share: unknown field 'beta'"),
        ({"counts": {"share": {}, "pattern": {}}}, r"recipe\.counts: expected one value"),
        ({"update": {"admm": {"refit": {"damping": 2}}}}, r"update\.admm\.refit: .*at most 1"),
        ({"update": {"shrunk": {}}}, r"recipe\.update: unknown value 'shrunk'"),
        ({"score": {"own": {}}}, r"recipe\.score\.own: missing field function"),
        ({"group": "rows"}, "recipe: .*group 'rows' is not one of"),
        ({"colour": 1}, "recipe: unknown field 'colour'"),
        ([], r"recipe: expected object, got \[\]"),
    ],
)
def test_a_wrong_tree_is_refused(tree: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Recipe.of_dict(tree)
    values = {"format": "emp-llm manifest 3", "source": {}, "recipe": tree, "files": {}}
    with pytest.raises(UserError, match=said):
        record_of(values, Manifest, "a manifest")


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
    found = Recipe(counts=counts).at(0.25).counts
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
        (lambda: Effective(order=math.inf), "order must be a finite number, got inf"),
        (lambda: Heal(tokens=math.nan), "tokens must be a finite number, got nan"),
        (lambda: recipe_of("wanda", pattern=f"2:{'9' * 5000}"), r"must be N:M.*got '2:9+\.\.\."),
        (lambda: recipe_of("wanda", pattern="9" * 5000), "must be N:M"),
        (lambda: recipe_of("emp-magnitude", order=math.inf), "--order must be a finite number"),
        (lambda: Effective(beta=math.nan), "beta must be a finite number, got nan"),
        (lambda: Effective(beta=1, found=5), "found is the beta that reaches a sparsity"),
        (lambda: Effective(sparsity=0.5, found=-1), "beta must be a number above 0"),
        (lambda: Pattern(1, 2**70), "m is a number of more than 64 bits"),
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
        (lambda: Match("a", removed=-5), "removed must be at least 0, got -5"),
        (lambda: Match("a", removed={"b": 3}), "removed of Match must be a number by total"),
        (lambda: Match("a", "matrix", 3), "a mapping from matrices to numbers by matrix"),
        (lambda: ByCost({"x": -3}), "removed must be at least 0, got -3"),
        (lambda: ByCost({"x": 2**70}), "removed is a number of more than 64 bits"),
        (lambda: Share(0.97, ByCost()), "at most 0.95 of each block, and a sparsity of 0.97 needs"),
        (lambda: recipe_of("wanda", sparsity=0.97, shares="cost"), "at most 0.95 of each block"),
        (lambda: Targets(layers=""), "--targets '' has an empty name"),
        (lambda: Targets(layers=[]), r"--targets \[\] has an empty name"),
        (lambda: Targets(layers="up_proj,,"), "--targets 'up_proj,,' has an empty name"),
        (lambda: Targets(ignore=["a", " "]), r"--ignore \['a', ' '\] has an empty name"),
        (lambda: Targets(blocks=""), "--blocks '' has an empty name"),
        (lambda: Heal(tokens=-1), "tokens must be above 0, got -1"),
        (lambda: Heal(minutes=math.inf), "minutes must be a finite number, got inf"),
        (lambda: UnitScore("wanda"), "unit_criterion 'wanda' is not one of cosine, fisher"),
        (lambda: Recipe(score=UnitScore("reap")), "reap scores units, not weights"),
        (
            lambda: Recipe(score=UnitScore("reap"), structure=Structure(units="heads")),
            "reap does not score heads or neurons",
        ),
        (
            lambda: Recipe(score=Magnitude(), counts=Pattern(), structure=Structure(units="heads")),
            "structure removes whole units",
        ),
        (lambda: Match("a", removed={"b": "c"}), "removed must be a whole number or a mapping"),
        (lambda: ByCost(3), "removed must be a mapping from names to whole numbers, got 3"),
        (lambda: Refit(damping=0), "damping must be above 0"),
        (lambda: Refit(damping="1"), "damping must be a number, got '1'"),
        (lambda: Refit(weighting="rows"), "weighting 'rows' is not one of equal, relative"),
        (lambda: SparseGPT(refit=True), r"refit must be Refit\(...\) or None, got True"),
        (lambda: Heal(steps=0), "steps must be at least 1 and at most 10000000, got 0"),
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
        (lambda: Recipe(update=Nameless()), "update Nameless has no name of its own"),
        (lambda: Recipe(score=Finer()), "score Finer has no name of its own"),
        (lambda: Effective(beta=2, sparsity=0.5), "sparsity finds the beta; leave out .*beta"),
        (
            lambda: Effective(sparsity=0.5, neff_dtype="bfloat16"),
            "sparsity finds the beta; leave out .*neff.dtype",
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


def test_a_recipe_does_not_change() -> None:
    recipe = Recipe()
    with pytest.raises(AttributeError):
        recipe.heal = Heal()  # type: ignore[misc]
    assert recipe.but(heal=Heal()) == Recipe(heal=Heal()) != recipe


@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
def test_a_name_belongs_to_one_class(name: str) -> None:
    kind = Score if name == "wanda" else Search
    with pytest.raises(UserError, match=f"name '{name}' of .*Other is that of"):
        type("Other", (kind,), {"name": name})


def test_relative_scores_count_by_magnitude_in_a_tree_too() -> None:
    assert Recipe(score=Relative()) == recipe_of("emp-relative")
    own = Effective(count_by="own")
    assert Recipe(score=Relative(), counts=own) == recipe_of("emp-relative", count_by="own")


def test_what_heals_by_default() -> None:
    """All of a smaller model; the targets where shapes stay. The recipe says which."""
    units: dict[str, Any] = {"structure": "neurons", "sparsity": 0.5, "heal": True}
    heals = [recipe_of("wanda", **units, keep_shapes=keep).heal for keep in (False, True)]
    assert [heal and heal.weights for heal in heals] == ["all", "targets"]
    assert recipe_of("wanda", heal=True).heal == Heal(weights="targets")
    given = recipe_of("wanda", **units, heal_weights="targets").heal
    assert given == Heal(weights="targets")
