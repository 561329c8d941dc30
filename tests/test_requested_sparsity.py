"""--sparsity with emp methods: the beta whose total is that number, to the weight."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from emp_llm import Recipe, prune_model
from emp_llm.prune import prune
from emp_llm.records.run_report import RunReport
from emp_llm.selection.rule import beta_keeping, kept_at
from emp_llm.verify import verify

Models = Callable[[str], Path]


@pytest.mark.parametrize(
    ("family", "method", "group"),
    [
        ("llama", "emp-wanda", "row"),
        ("mixtral", "emp-wanda", "row"),
        ("gpt2", "emp-magnitude", "matrix"),
        ("llama", "emp-wanda", "all"),
    ],
)
def test_exactly_as_many_are_removed(
    command: Run, models: Models, norms: Callable[[str], Path], tmp_path: Path, family: str, method: str, group: str
) -> None:
    source, out = models(family), tmp_path / "out"
    given_norms = ["--activations", norms(family), "--min-expert-tokens", 0] if method == "emp-wanda" else []
    options = ["--model", source, "--method", method, "--group", group, *given_norms]
    done = command("prune", *options, "--sparsity", 0.55, "--output", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "emp_report.json").read_text())
    targets, recipe = report["targets"], report["recipe"]
    removed = targets["weights"] - targets["kept"]
    if group == "row":
        assert removed == math.floor(0.55 * targets["weights"])
    else:  # few groups: a step of beta may be larger than a weight, by rounding
        assert abs(removed - 0.55 * targets["weights"]) <= len(report["matrices"])
    assert recipe["sparsity"] == 0.55
    assert 0 < recipe["beta"] < 2
    assert f"sparsity 0.55 is that of beta {recipe['beta']:.6g}" in done.stderr
    given_file = norms(family) if given_norms else None
    assert verify(out, source=str(source), activations=given_file).differences == []
    again = command("prune", *options, "--beta", repr(recipe["beta"]), "--output", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    for shard in out.glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "again" / shard.name).read_bytes()
    counts = [entry["kept_fraction_mean"] for entry in report["matrices"].values()]
    assert len(set(counts)) > 1  # EMP's allocation, not a fixed share


def test_in_memory_and_at_the_ends(models: Models, tmp_path: Path) -> None:
    source = models("llama")
    written = prune(model=source, method="emp-magnitude", sparsity=0.3, output=tmp_path / "out")
    assert isinstance(written, RunReport)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    found = prune_model(model, Recipe(method="emp-magnitude", sparsity=0.3))
    assert found.record.recipe.beta == written.recipe.beta
    assert found.targets == written.targets
    nothing = prune(model=source, method="emp-magnitude", sparsity=0, output=tmp_path / "nothing")
    assert isinstance(nothing, RunReport)
    assert nothing.targets.kept == nothing.targets.weights


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--sparsity", 0.9999], "--sparsity 0.9999: every group keeps at least one weight"),
        (["--sparsity", 1.0], "--sparsity must be at least 0 and below 1"),
        (["--sparsity", 0.5, "--beta", 0.5], "--sparsity finds the beta of emp-magnitude; leave out --beta"),
        (["--sparsity", 0.5, "--neff-dtype", "bfloat16"], "leave out --neff-dtype"),
        (["--method", "emp-wanda", "--sparsity", 0.5, "--propagate", "pruned"], "--sparsity needs the scores of all"),
    ],
)
def test_wrong_requests(command: Run, models: Models, tmp_path: Path, options: list[object], match: str) -> None:
    done = command("prune", "--model", models("llama"), "--method", "emp-magnitude", *options, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert match in done.stderr
    assert not (tmp_path / "out").exists()


@settings(deadline=None)  # a busy machine
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 1)), min_size=1, max_size=12),
    st.floats(0.05, 1),
)
def test_the_beta_is_the_smallest_that_keeps_as_many(rows: list[tuple[int, float]], share: float) -> None:
    groups = [(np.array([max(1.0, size * part)]), np.array([1.0]), size) for size, part in rows]
    total = sum(size for size, _ in rows)
    kept = max(len(rows), round(share * total))

    beta = beta_keeping(kept, groups)
    here, below = kept_at(groups, beta), kept_at(groups, math.nextafter(beta, 0))
    assert abs(here - kept) <= abs(below - kept) or here < kept
    assert here == kept or len({float(group[0][0]) for group in groups}) < len(groups) or abs(here - kept) < len(rows)
