"""The table: published values where they belong, and nowhere else."""

from typing import Any

from emp_llm.services.comparison import compare, values_of

WIKITEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test", "seqlen": 2048}


def record(
    model: str, method: str | None = None, block_length: int = 2048, text: dict[str, Any] | None = None
) -> dict[str, Any]:
    counts = {"original": 100, "effective": 100}
    tasks = {
        name: {
            "results": {name: {"alias": name, "acc,none": value, "acc_stderr,none": 0.01, "f1,none": 0.5}},
            "n-samples": {name: counts},
            "groups": [],
        }
        for name, value in (("boolq", 0.7), ("rte", 0.6))
    }
    return {
        "model": model,
        "suite": "paper",
        "pruned": {"of": "meta-llama/Llama-2-7b-hf", "method": method, "sparsity_of_targets": 0.4} if method else None,
        "made_by": {"text": text or WIKITEXT},
        "perplexity": {"perplexity": 5.5, "tokens": 1000, "block_length": block_length, "partial": False},
        "tasks": tasks,
    }


def test_published_values_stand_beside_the_papers_models() -> None:
    text = compare([record("/models/Llama-2-7b-hf"), record("out", "emp-wanda")])
    head, _, perplexity, boolq = text.splitlines()[:4]
    assert head.split("  ")[-1].strip() == "out, paper"
    assert perplexity.split()[-2:] == ["5.470", "6.513"]
    assert boolq.count("†") == 2
    assert "paper: meta-llama/Llama-2-7b-hf emp-wanda (41.07 % of the MLP linears removed)" in text
    assert "† another protocol than lm-eval's" in text
    assert "f1" not in text


def test_published_values_stand_nowhere_else() -> None:
    assert "\npaper:" not in compare([record("somebody/else")])
    assert "\npaper:" not in compare([record("out", "a-method-of-ones-own")])
    for key, value in (("beta", 1.25), ("order", 1.0), ("targets", "all-linear"), ("group", "matrix")):
        other = record("out", "emp-wanda")
        other["pruned"][key] = value
        assert "\npaper:" not in compare([other])
    for other in (record("meta-llama/Llama-2-7b-hf", text={"file": "x"}), record("meta-llama/Llama-2-7b-hf", block_length=512)):
        (line,) = (line for line in compare([other]).splitlines() if line.startswith("perplexity"))
        assert line.split()[-1] == "-"


def test_models_with_other_contexts_are_not_compared() -> None:
    lines = compare([record("a"), record("b", block_length=512)]).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("perplexity")] == [["-", "-"], ["5.500", "-"]]


def test_groups_show_their_own_line_or_their_members() -> None:
    members = {f"g_{i}": {"acc,none": 0.5, "acc_stderr,none": "N/A"} for i in range(3)}
    counts = {name: {"original": 4, "effective": 2 if name == "g_1" else 4} for name in members}
    loose = {"results": members, "n-samples": counts, "groups": []}
    assert list(values_of({"tasks": {"g": loose}})) == ["g_0 acc", "g_1 acc", "g_2 acc", "mean acc of 3"]
    summed = loose | {"results": {"g": {"acc,none": 0.5}} | members, "groups": ["g"]}
    (value,) = values_of({"tasks": {"g": summed}}).values()
    assert (value.value, value.stderr, value.partial) == (50, None, True)
