"""The table of results, changes with their errors, and the paper's published values."""

import math
import random
import statistics
from typing import Any

import msgspec
import pytest

from emp_llm import recipe_of
from emp_llm.evaluation.comparison import (
    Change,
    Value,
    change_between,
    change_of,
    change_text,
    paired_error_of_losses,
    value_cell,
    values_of,
)
from emp_llm.records.base import converted
from emp_llm.records.evaluation import Measures, packed_answers
from emp_llm.records.run_report import Results
from emp_llm.reporting.studies import compare
from emp_llm.study.tables import published_values

WIKITEXT = {
    "dataset": "Salesforce/wikitext",
    "config": "wikitext-2-raw-v1",
    "split": "test",
    "seqlen": 2048,
}
PERPLEXITY = "perplexity, blocks of 64"


def model(
    name: str,
    method: str | None = None,
    block_length: int = 2048,
    zeros: float = 0.4,
    text: dict[str, Any] | None = None,
    perplexity: float | None = 5.5,
    **recipe: Any,
) -> Results:
    """A model with a perplexity and two tasks, as from a results file."""
    counts = {"original": 100, "effective": 100}
    tasks = {
        name: {
            "results": {
                name: {"alias": name, "acc,none": value, "acc_stderr,none": 0.01, "f1,none": 0.5}
            },
            "n-samples": {name: counts},
        }
        for name, value in (("boolq", 0.7), ("rte", 0.6))
    }
    pruned = {
        "of": "meta-llama/Llama-2-7b-hf",
        "recipe": recipe_of(method, **recipe).as_dict() if method else None,
        "sparsity_of_targets": zeros,
    }
    measured = {
        "perplexity": perplexity,
        "tokens": 1000,
        "block_length": block_length,
        "partial": False,
    }
    values = {
        "model": name,
        "suite": "paper",
        "pruned": pruned if method else None,
        "perplexity": measured,
        "tasks": tasks,
    }
    made_by = {"model": {}, "text": text or WIKITEXT}
    return converted(values | {"made_by": made_by}, Results, "results")


def measures(**tasks: Any) -> Measures:
    return msgspec.convert({"tasks": tasks}, Measures)


def test_published_values_of_the_papers_models() -> None:
    for measured, perplexity in (
        (model("/models/Llama-2-7b-hf"), 5.47),
        (model("out", "emp-wanda"), 6.513),
    ):
        _, values = published_values(measured) or pytest.fail("none")
        assert values["perplexity, blocks of 2048"].value == pytest.approx(perplexity, abs=5e-4)
        assert "boolq acc" in values


def test_published_values_stand_nowhere_else() -> None:
    assert published_values(model("somebody/else")) is None
    assert published_values(model("out", "ria")) is None
    for key, value in (
        ("beta", 1.25),
        ("order", 1.0),
        ("targets", "all-linear"),
        ("group", "matrix"),
    ):
        assert published_values(model("out", "emp-wanda", **{key: value})) is None
    _, values = published_values(model("meta-llama/Llama-2-7b-hf", text={"file": "x"})) or (0, {})
    assert not any(name.startswith("perplexity") for name in values)


def test_a_ruined_model_is_told_with_what_to_try() -> None:
    said = "out: The perplexity rises by more than a half. This would cost less: "
    assert f"\n{said}" in compare([model("dense"), model("out", "wanda", perplexity=8.3)])
    for other in (
        model("out", "wanda", perplexity=8.2),
        model("out", "wanda", perplexity=None),
        model("out", perplexity=12.1),
    ):
        assert "cost less" not in compare([model("dense"), other])
    ruined = model("out", "wanda", perplexity=12.1)
    assert "cost less" not in compare([model("dense", "wanda"), ruined])


def test_models_of_one_name_are_told_apart_by_as_few_folders_as_it_takes() -> None:
    models = [model("/home/me/runs/one/out"), model("/home/me/runs/two/out")]
    head = compare(models).splitlines()[0].split()
    assert head == ["one/out", "two/out", "change"]


def test_models_with_other_zeros_are_told() -> None:
    dense = model("dense")
    few = model("few", "emp-wanda", zeros=0.367)
    more = model("more", "wanda", zeros=0.5)
    assert (
        "\nthe models differ in their zeros: few 36.70 %, more 50.00 % of the targets"
    ) in compare([dense, few, more])
    assert "zeros" not in compare([dense, few, model("near", "wanda", zeros=0.375)])
    assert "zeros" not in compare([dense, few])


def test_models_with_different_block_lengths_are_not_compared() -> None:
    lines = compare([model("a"), model("b", block_length=512)]).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("perplexity")] == [
        ["-", "-"],
        ["5.500", "-"],
    ]


def test_groups_show_their_own_line_or_their_members() -> None:
    members = {f"g_{i}": {"acc,none": 0.5, "acc_stderr,none": "N/A"} for i in range(3)}
    counts = {name: {"original": 4, "effective": 2 if name == "g_1" else 4} for name in members}
    loose = {"results": members, "n-samples": counts, "groups": []}
    assert list(values_of(measures(g=loose))) == ["g_0 acc", "g_1 acc", "g_2 acc", "mean acc of 3"]
    summary = loose | {"results": {"g": {"acc,none": 0.5}} | members, "groups": ["g"]}
    (value,) = values_of(measures(g=summary)).values()
    assert (value.value, value.stderr, value.partial) == (50, None, True)


@pytest.mark.parametrize(
    ("name", "base", "value", "text"),
    [
        (PERPLEXITY, 10.0, 12.5, "+25.00 %"),
        (PERPLEXITY, 16.0, 16.0 * (1 - 2.8e-16), "0.00 %"),
        # A real difference, but below the digits shown: no sign.
        (PERPLEXITY, 10.0, 9.9999, "0.00 %"),
        (PERPLEXITY, 10.0, math.inf, "+inf %"),
        (PERPLEXITY, math.inf, 10.0, "-100.00 %"),
        (PERPLEXITY, math.inf, math.inf, "-"),
        (PERPLEXITY, 0.0, 1.0, "-"),
        ("sums acc", 50.0, 47.5, "-2.50"),
        ("sums acc", 70.0, 70.0 - 1e-14, "0.00"),
        ("sums acc", 70.0, 70.0 - 0.006, "-0.01"),
        ("sums acc", 0.0, 0.0, "0.00"),
    ],
)
def test_changes_as_text(name: str, base: float, value: float, text: str) -> None:
    assert change_text(name, Change(change_between(name, base, value))) == text


def answered(
    sizes: dict[str, int],
    seed: int,
    asked: str = "the same",
    group: str | None = None,
    equal: bool = False,
) -> Any:
    """Measures with random answers to some tasks, or to the members of a group, and the answers
    themselves.
    """
    chance = random.Random(seed)
    given = {name: [chance.random() < 0.7 for _ in range(size)] for name, size in sizes.items()}
    tasks = {
        name: {
            "results": {name: {"acc,none": statistics.mean(bits), "acc_stderr,none": 0.03}},
            "answers": {name: answers_of(bits, f"{name} {asked}")},
            "n-samples": {name: {"original": len(bits), "effective": len(bits)}},
        }
        for name, bits in given.items()
    }
    if group is None:
        return measures(**tasks), given
    merged = {
        key: {name: task[key][name] for name, task in tasks.items()}
        for key in ("results", "answers", "n-samples")
    }
    every = (
        [statistics.mean(bits) for bits in given.values()]
        if equal
        else [bit for bits in given.values() for bit in bits]
    )
    merged["results"] = {
        group: {"acc,none": statistics.mean(every), "acc_stderr,none": 0.02}
    } | merged["results"]
    return measures(**{group: merged}), given


def answers_of(bits: list[bool], asked: str = "") -> dict[str, Any]:
    return {"examples": len(bits), "sha256": asked, "correct": {"acc,none": packed_answers(bits)}}


def error_by_hand(first: list[bool], second: list[bool]) -> float:
    """In points: the standard deviation of the differences by the root of their number."""
    gaps = [100.0 * (a - b) for a, b in zip(first, second, strict=True)]
    return statistics.stdev(gaps) / math.sqrt(len(gaps))


def test_accuracies_have_the_error_of_paired_answers() -> None:
    (before, a), (after, b) = (answered({"first": 37, "second": 400}, seed) for seed in (1, 2))
    base = values_of(before)
    values = values_of(after)
    errors = []
    for name in ("first", "second"):
        change = change_of(f"{name} acc", values[f"{name} acc"], base[f"{name} acc"])
        assert change.paired
        assert change.value == pytest.approx(
            100 * (statistics.mean(b[name]) - statistics.mean(a[name]))
        )
        assert change.stderr == pytest.approx(error_by_hand(b[name], a[name]))
        errors.append(change.stderr)
    mean = change_of("mean acc of 2", values["mean acc of 2"], base["mean acc of 2"])
    assert (mean.stderr, mean.paired) == (pytest.approx(math.hypot(*errors) / 2), True)
    same = change_of("first acc", base["first acc"], base["first acc"])
    assert (same.value, same.stderr, same.paired) == (0, 0, True)


@pytest.mark.parametrize("equal", [True, False])
def test_groups_have_the_error_of_their_tasks(equal: bool) -> None:
    """The members weigh by their size, or equally, as in the group's own accuracy."""
    sizes = {"small": 20, "large": 180}
    (before, a), (after, b) = (answered(sizes, seed, group="both", equal=equal) for seed in (3, 4))
    change = change_of("both acc", values_of(after)["both acc"], values_of(before)["both acc"])
    weights = {name: 1 / 2 if equal else size / 200 for name, size in sizes.items()}
    expected = math.hypot(*(weights[name] * error_by_hand(b[name], a[name]) for name in sizes))
    assert (change.stderr, change.paired) == (pytest.approx(expected), True)


def test_without_the_same_examples_errors_are_unpaired() -> None:
    (base,) = values_of(answered({"first": 37}, 1)[0]).values()
    others = [
        answered({"first": 37}, 2, asked="others")[0],
        answered({"first": 36}, 2)[0],
        answered({"first": 37}, 2)[0],
    ]
    others[2].tasks["first"].answers = {}
    tampered = answered({"first": 37}, 2)[0]
    tampered.tasks["first"].results["first"]["acc,none"] = 0.123  # not the share of these answers
    for other in [*others, tampered]:
        (value,) = values_of(other).values()
        change = change_of("first acc", value, base)
        assert (change.stderr, change.paired) == (pytest.approx(math.hypot(3, 3)), False)
        assert change_text("first acc", change).endswith(" ± 4.24 ‡")


def test_errors_of_changes_by_hand() -> None:
    first = ((1.0, 10), (2.0, 10), (4.0, 10))
    second = ((1.0, 10), (1.0, 10), (2.0, 10))
    # differences 0, 1, 2: mean 1, standard deviation 1, error 1 / sqrt(3)
    assert paired_error_of_losses(first, second) == pytest.approx(1 / math.sqrt(3))
    assert paired_error_of_losses(first, second[:2]) is None
    assert paired_error_of_losses(first[:1], second[:1]) is None
    change = change_of(PERPLEXITY, Value(11.0, losses=first), Value(10.0, losses=second))
    assert change == Change(pytest.approx(10.0), pytest.approx(110 / math.sqrt(3)))
    assert change_of("t acc", Value(50, 3.0), Value(48, 4.0)) == Change(2, 5.0, paired=False)
    assert change_of("t acc", Value(50, 3.0), Value(48)) == Change(2)
    assert change_of("word_perplexity", Value(11), Value(10)) == Change(pytest.approx(10))


def share_of(metric: str, value: float, stderr: Any, higher: bool = True) -> dict[str, Value]:
    """The values of a task as lm-eval reports it."""
    results = {"task": {f"{metric},none": value, f"{metric}_stderr,none": stderr}}
    counts = {"task": {"original": 9, "effective": 9}}
    return values_of(
        measures(
            task={
                "results": results,
                "n-samples": counts,
                "higher_is_better": {"task": {metric: higher}},
            }
        )
    )


@pytest.mark.parametrize("metric", ["exact_match", "a_metric_of_ones_own"])
def test_any_share_of_examples_is_in_percent_with_its_error(metric: str) -> None:
    base = share_of(metric, 0.5, 0.03)
    value = share_of(metric, 0.4, 0.04)
    (name,) = value
    assert name == f"task {metric} %"
    assert value_cell(name, value[name]) == "40.00 ± 4.00"
    assert change_text(name, change_of(name, value[name], base[name])) == "-10.00 ± 5.00 ‡"


@pytest.mark.parametrize(
    ("value", "stderr", "higher"),
    [(12.5, 0.3, True), (0.5, "N/A", True), (0.5, 0.03, False)],
    ids=["not a fraction", "no error", "lower is better"],
)
def test_other_measures_are_in_their_own_unit(value: float, stderr: Any, higher: bool) -> None:
    (name,) = values = share_of("bleu", value, stderr, higher)
    assert name == "task bleu"
    assert values[name].value == value
    assert change_text(name, change_of(name, values[name], values[name])).endswith("0.00 %")
