"""The table of results: published values beside the paper's models only, and changes as text."""

import math
from typing import Any

import msgspec
import pytest

from emp_llm.evaluation.comparison import compare
from emp_llm.evaluation.evaluated_model import EvaluatedModel, model_of_results
from emp_llm.evaluation.measured_values import change_between, change_text, signed, values_of
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import Results

WIKITEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test", "seqlen": 2048}
PERPLEXITY = "perplexity, blocks of 64"


def model(
    name: str,
    method: str | None = None,
    block_length: int = 2048,
    text: dict[str, Any] | None = None,
    perplexity: float | None = 5.5,
    **recipe: Any,
) -> EvaluatedModel:
    """A model with a perplexity and two tasks, as from a results file."""
    counts = {"original": 100, "effective": 100}
    tasks = {
        name: {
            "results": {name: {"alias": name, "acc,none": value, "acc_stderr,none": 0.01, "f1,none": 0.5}},
            "n-samples": {name: counts},
        }
        for name, value in (("boolq", 0.7), ("rte", 0.6))
    }
    pruned = {"of": "meta-llama/Llama-2-7b-hf", "method": method, "sparsity_of_targets": 0.4, **recipe} if method else None
    values = {
        "model": name,
        "suite": "paper",
        "pruned": pruned,
        "made_by": {"model": {}, "text": text or WIKITEXT},
        "perplexity": {"perplexity": perplexity, "tokens": 1000, "block_length": block_length, "partial": False},
        "tasks": tasks,
    }
    return model_of_results(msgspec.convert(values, Results))


def measures(**tasks: Any) -> Measures:
    return msgspec.convert({"tasks": tasks}, Measures)


def test_published_values_stand_beside_the_papers_models() -> None:
    text = compare([model("/models/Llama-2-7b-hf"), model("out", "emp-wanda")])
    head, _, perplexity, boolq = text.splitlines()[:4]
    assert head.split("  ")[-1].strip() == "out, paper"
    assert perplexity.split()[-2:] == ["5.470", "6.513"]
    assert boolq.count("†") == 2
    assert "paper: meta-llama/Llama-2-7b-hf emp-wanda (41.07 % of the MLP linears removed)" in text
    assert "\n† " in text
    assert "f1" not in text


def test_published_values_stand_nowhere_else() -> None:
    assert "\npaper:" not in compare([model("somebody/else")])
    assert "\npaper:" not in compare([model("out", "a-method-of-ones-own")])
    for key, value in (("beta", 1.25), ("order", 1.0), ("targets", "all-linear"), ("group", "matrix")):
        assert "\npaper:" not in compare([model("out", "emp-wanda", **{key: value})])
    for other in (model("meta-llama/Llama-2-7b-hf", text={"file": "x"}), model("meta-llama/Llama-2-7b-hf", block_length=512)):
        (line,) = (line for line in compare([other]).splitlines() if line.startswith("perplexity"))
        assert line.split()[-1] == "-"


def test_models_with_different_block_lengths_are_not_compared() -> None:
    lines = compare([model("a"), model("b", block_length=512)]).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("perplexity")] == [["-", "-"], ["5.500", "-"]]


def test_groups_show_their_own_line_or_their_members() -> None:
    members = {f"g_{i}": {"acc,none": 0.5, "acc_stderr,none": "N/A"} for i in range(3)}
    counts = {name: {"original": 4, "effective": 2 if name == "g_1" else 4} for name in members}
    loose = {"results": members, "n-samples": counts, "groups": []}
    assert list(values_of(measures(g=loose))) == ["g_0 acc", "g_1 acc", "g_2 acc", "mean acc of 3"]
    summary = loose | {"results": {"g": {"acc,none": 0.5}} | members, "groups": ["g"]}
    (value,) = values_of(measures(g=summary)).values()
    assert (value.value, value.stderr, value.partial) == (50, None, True)


def test_an_infinite_perplexity_is_a_word_in_every_format() -> None:
    models = [model("a"), model("b", perplexity=None)]
    for form in ("terminal", "markdown"):
        (line,) = (line for line in compare(models, form).splitlines() if "perplexity" in line and "suite" not in line)
        assert "infinite" in line
        assert "+inf %" in line
    (line,) = (line for line in compare(models, "csv").splitlines() if line.startswith('"perplexity'))
    assert ",inf," in line
    task = {"results": {"t": {"word_perplexity,none": None}}, "n-samples": {"t": {"original": 1, "effective": 1}}}
    (value,) = values_of(measures(t=task)).values()
    assert math.isinf(value.value)


@pytest.mark.parametrize(
    ("name", "base", "value", "text"),
    [
        (PERPLEXITY, 10.0, 12.5, "+25.00 %"),
        (PERPLEXITY, 16.0, 16.0 * (1 - 2.8e-16), "0.00 %"),
        (PERPLEXITY, 10.0, 9.9999, "0.00 %"),  # a real difference, but below the digits shown: no sign
        (PERPLEXITY, 10.0, math.inf, "+inf %"),
        (PERPLEXITY, math.inf, 10.0, "-100.00 %"),
        (PERPLEXITY, math.inf, math.inf, "-"),
        (PERPLEXITY, 0.0, 1.0, "-"),
        ("sums acc", 50.0, 47.5, "-2.50"),
        ("sums acc", 70.0, 70.0 - 1e-14, "0.00"),
        ("sums acc", 0.0, 0.0, "0.00"),
    ],
)
def test_changes_as_text(name: str, base: float, value: float, text: str) -> None:
    assert change_text(name, change_between(name, base, value)) == text


def test_rounding_errors_are_no_difference() -> None:
    assert change_between(PERPLEXITY, 3.7, 3.7 * (1 - 2.8e-16)) == 0
    assert change_between(PERPLEXITY, 3.7, 3.7 * (1 - 2e-9)) < 0
    assert signed(-0.0) == signed(-0.004) == "0.00"
    assert signed(-0.006) == "-0.01"
