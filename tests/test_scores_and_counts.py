"""Which weights go, and how many: --score, --count-by, RIA, and --sparsity with
emp methods.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import check_verified, report_of
from transformers import AutoModelForCausalLM

from emp_llm import measure, prune, prune_model, recipe_of, sweep, verify
from emp_llm.calibration.activations import Activations
from emp_llm.records.run_report import RunReport
from emp_llm.selection.criteria import InputStatistics, ria
from emp_llm.selection.rule import beta_keeping, kept_at

Models = Callable[[str], Path]


def pruned(source: Path, norms: Path, out: Path, **options: Any) -> RunReport:
    report = prune(source, output=out, activations=norms, min_expert_tokens=0, **options)
    assert isinstance(report, RunReport)
    return report


def masks_in(source: Path, out: Path, report: RunReport) -> dict[str, Any]:
    """Which weights are not removed; the tiny models hold no zeros."""
    return {
        layer: oracle.weight(out, entry.tensor) != 0 for layer, entry in report.matrices.items()
    }


@pytest.mark.parametrize("group", ["matrix", "all"])
def test_counts_by_magnitude_and_choice_by_score(
    tiny_llama: Path, llama_norms: Path, tmp_path: Path, group: str
) -> None:
    """As many weights in each group as its magnitudes are worth, those with the largest scores;
    beta and order apply.
    """
    source = tiny_llama
    file = llama_norms
    report = pruned(
        source, file, tmp_path / "out", method="emp-relative", group=group, beta=0.8, order=1.0
    )
    relative = oracle.load_norms(file, relative=True)
    masks = masks_in(source, tmp_path / "out", report)
    weights = {
        layer: oracle.scores(oracle.weight(source, entry.tensor))
        for layer, entry in report.matrices.items()
    }
    scores = {layer: oracle.scores(matrix, relative[layer]) for layer, matrix in weights.items()}
    layers = list(weights)
    groups = [layers] if group == "all" else [[layer] for layer in layers]
    numbers = []
    for members in groups:
        size, choice = (
            np.concatenate([each[layer].reshape(-1) for layer in members])
            for each in (weights, scores)
        )
        mask = np.concatenate([masks[layer].reshape(-1) for layer in members])
        np.testing.assert_array_equal(mask, oracle.keep(choice, oracle.count(size, 0.8, 1.0)))
        numbers.append(oracle.effective(size, 1.0))
    entry = report.matrices[layers[0]]
    if group == "all":
        assert report.targets.n_eff == pytest.approx(numbers[0])
        assert report.targets.s_eff_bound is None
    else:
        assert entry.n_eff_mean == pytest.approx(numbers[0])
        assert entry.s_eff_bound is None
    assert (report.recipe.method, report.recipe.counts.count_by) == ("emp-relative", "magnitude")
    assert verify(tmp_path / "out", source=str(source), activations=file).differences == []


def test_names_of_one_rule(models: Models, norms: Models, tmp_path: Path) -> None:
    """The words for the norms and for the counts combine to the methods of their own."""
    source = models("mixtral")
    file = norms("mixtral")

    def run(name: str, **options: Any) -> dict[str, Any]:
        return masks_in(source, tmp_path / name, pruned(source, file, tmp_path / name, **options))

    same = [
        (
            run("a", method="emp-relative"),
            run("b", method="emp-wanda", score="relative", count_by="magnitude"),
        ),
        (
            run("c", method="emp-relative", count_by="own"),
            run("d", method="emp-wanda", score="relative"),
        ),
        (
            run("e", method="relative", sparsity=0.3),
            run("f", method="wanda", score="relative", sparsity=0.3),
        ),
    ]
    for one, other in same:
        assert all(np.array_equal(one[layer], other[layer]) for layer in one)
    plain = run("g", method="emp-wanda", count_by="magnitude")
    for layer, mask in plain.items():
        assert np.array_equal(mask.sum(1), same[0][0][layer].sum(1)), (
            "the counts do not depend on the norms"
        )
    assert any(not np.array_equal(mask, same[0][0][layer]) for layer, mask in plain.items())
    assert verify(tmp_path / "b", source=str(source), activations=file).differences == []
    manifest = json.loads((tmp_path / "b" / "emp_manifest.json").read_text())
    manifest["recipe"]["counts"]["effective"].pop("count_by")
    (tmp_path / "b" / "emp_manifest.json").write_text(json.dumps(manifest))
    assert len(verify(tmp_path / "b", source=str(source), activations=file).differences) > 1


def test_pruned_propagation(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """The counts do not depend on the norms, so that a sparsity can be asked for too."""
    given = {
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
        "device_map": "cpu",
    }
    source = tiny_llama
    out = tmp_path / "out"
    sparsity = 0.4
    report = prune(
        source, output=out, method="emp-relative", propagate="pruned", sparsity=sparsity, **given
    )
    check_verified(out, source)
    dense = prune(
        source, output=tmp_path / "dense", method="emp-relative", sparsity=sparsity, **given
    )
    for layer, entry in report["matrices"].items():
        assert entry["kept"] == dense["matrices"][layer]["kept"]
    files = [
        Activations.load(folder / "emp_llm" / "activations.safetensors")
        for folder in (out, tmp_path / "dense")
    ]
    first = "model.layers.0.mlp.up_proj"
    last = "model.layers.1.mlp.up_proj"
    norm = [[each.of(layer, "relative") for each in files] for layer in (first, last)]
    assert torch.equal(norm[0][0], norm[0][1])  # type: ignore[arg-type]
    assert not torch.equal(norm[1][0], norm[1][1])  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokens = {"samples": 4, "seqlen": 64, "propagate": "pruned"}
    found = prune_model(
        model, recipe_of(method="emp-relative", sparsity=sparsity), text, source, **tokens
    )  # type: ignore[arg-type]
    for layer, entry in found.matrices.items():
        assert torch.equal(
            model.get_submodule(layer).weight != 0,
            torch.from_numpy(oracle.weight(out, entry.tensor) != 0),
        )


@pytest.mark.parametrize(
    "options", [{}, {"score": "relative", "count_by": "magnitude"}], ids=["plain", "relative"]
)
def test_ria_of_rows_and_columns_of_zeros(
    tiny_llama: Path, llama_norms: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A row of zeros has scores of zero, and so has a column. Either kind of norms and of counts
    goes with the score.
    """
    name = "model.layers.0.mlp.up_proj"

    def plant(matrix: oracle.Array) -> None:
        matrix[3] = 0
        matrix[:, 5] = 0

    source = oracle.edited_copy(tiny_llama, tmp_path / "planted", f"{name}.weight", plant)
    report = pruned(source, llama_norms, tmp_path / "out", method="emp-ria", **options)
    own = oracle.load_norms(llama_norms, relative=bool(options))
    for layer, entry in report.matrices.items():
        size = oracle.scores(oracle.weight(source, entry.tensor))
        scores = oracle.ria(size, own[layer])
        mask = oracle.row_masks(scores, True, counting=size if options else None)
        np.testing.assert_array_equal(
            oracle.weight(tmp_path / "out", entry.tensor) != 0, mask & (size != 0), err_msg=layer
        )
        assert entry.kept == mask.sum()
    assert verify(tmp_path / "out", source=str(source), activations=llama_norms).differences == []


def test_ria_of_a_large_matrix() -> None:
    """It is computed a piece at a time, and the pieces do not show."""
    weight = torch.randn(1025, 1030).bfloat16()
    norm = torch.rand(1030)
    size = weight.double().abs()
    wanted = (size / size.sum(1, keepdim=True) + size / size.sum(0)) * norm.double().sqrt()
    torch.testing.assert_close(
        ria(weight, InputStatistics(norm)), wanted.float(), rtol=1e-6, atol=0
    )


def test_sweep_and_measure(
    evaluable_llama: Path, task_suite: Path, llama_norms: Path, tmp_path: Path
) -> None:
    """Points with counts by magnitude share one pass of numbers; masks are those of prune."""
    source = evaluable_llama
    out = tmp_path / "sweep"
    common = {"activations": llama_norms, "device_map": "cpu"}
    sweep(
        source,
        output=out,
        methods="emp-relative,emp-wanda",
        betas="0.7,1",
        emp_sparsities="0.5",
        suite=str(task_suite.parent / "short.toml"),
        score="relative",
        keep=True,
        **common,
    )
    for name, options in {
        "emp-relative-beta-0.7": {"method": "emp-relative", "beta": 0.7},
        "emp-relative-0.5": {"method": "emp-relative", "sparsity": 0.5},
        "emp-wanda-beta-1": {"method": "emp-wanda", "score": "relative"},
    }.items():
        prune(source, output=tmp_path / name, **common, **options)
        assert oracle.shards(tmp_path / name) == oracle.shards(out / "points" / name), name
        check_verified(out / "points" / name, source)
    record = measure(
        source,
        output=tmp_path / "m.json",
        criteria="magnitude,relative,wanda",
        betas="0.7,1",
        **common,
    )
    magnitude, relative, wanda = record.measures
    assert [each.count_by for each in record.measures] == [None, "magnitude", None]
    assert [each.score for each in record.measures] == [None, "relative", None]
    assert relative.curve == magnitude.curve != wanda.curve
    assert (
        relative.curve[0].kept == report_of(tmp_path / "emp-relative-beta-0.7")["targets"]["kept"]
    )
    for layer, entry in relative.matrices.items():
        assert (entry.n_eff, entry.kept) == (
            magnitude.matrices[layer].n_eff,
            magnitude.matrices[layer].kept,
        )
        assert entry.s_eff != magnitude.matrices[layer].s_eff
    both = measure(
        source,
        output=tmp_path / "n.json",
        criteria="wanda",
        score="relative",
        count_by="magnitude",
        **common,
    )
    assert both.measures[0].matrices == relative.matrices


@pytest.mark.parametrize(
    ("family", "method", "group"),
    [
        ("llama", "emp-relative", "row"),
        ("mixtral", "emp-wanda", "row"),
        ("gpt2", "emp-magnitude", "matrix"),
        ("llama", "emp-wanda", "all"),
    ],
)
def test_exactly_as_many_are_removed(
    command: Run,
    models: Models,
    norms: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    method: str,
    group: str,
) -> None:
    source = models(family)
    out = tmp_path / "out"
    given_norms = (
        ["--activations", norms(family), "--min-expert-tokens", 0]
        if method != "emp-magnitude"
        else []
    )
    options = ["--model", source, "--method", method, "--group", group, *given_norms]
    done = command("prune", *options, "--sparsity", 0.55, "--output", out)
    report = json.loads((out / "emp_report.json").read_text())
    targets = report["targets"]
    recipe = report["recipe"]["counts"]["effective"]
    removed = targets["weights"] - targets["kept"]
    if group == "row":
        assert removed == math.floor(0.55 * targets["weights"])
    else:  # few groups: a step of beta may be larger than a weight, by rounding
        assert abs(removed - 0.55 * targets["weights"]) <= len(report["matrices"])
    assert recipe["sparsity"] == 0.55
    assert 0 < recipe["found"] < 2
    assert f"sparsity 0.55 is that of beta {recipe['found']:.6g}" in done.stderr
    given_file = norms(family) if given_norms else None
    assert verify(out, source=str(source), activations=given_file).differences == []
    command("prune", *options, "--beta", repr(recipe["found"]), "--output", tmp_path / "again")
    assert oracle.shards(out) == oracle.shards(tmp_path / "again")
    counts = [entry["kept_fraction_mean"] for entry in report["matrices"].values()]
    assert len(set(counts)) > 1  # EMP's allocation, not a fixed share


def test_a_requested_sparsity_in_memory_and_at_the_ends(tiny_llama: Path, tmp_path: Path) -> None:
    source = tiny_llama
    written = prune(model=source, method="emp-magnitude", sparsity=0.3, output=tmp_path / "out")
    found = prune_model(source, recipe_of(method="emp-magnitude", sparsity=0.3))
    assert (found.record.recipe.counts, found.targets) == (written.recipe.counts, written.targets)  # type: ignore[union-attr]
    nothing = prune(model=source, method="emp-magnitude", sparsity=0, output=tmp_path / "nothing")
    assert nothing.targets.kept == nothing.targets.weights  # type: ignore[union-attr]


@settings(deadline=None)  # a busy machine
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 1)), min_size=1, max_size=12),
    st.floats(0.05, 1),
)
def test_the_beta_is_the_smallest_that_keeps_as_many(
    rows: list[tuple[int, float]], share: float
) -> None:
    groups = [(np.array([max(1.0, size * part)]), np.array([1.0]), size) for size, part in rows]
    total = sum(size for size, _ in rows)
    kept = max(len(rows), round(share * total))

    beta = beta_keeping(kept, groups)
    here = kept_at(groups, beta)
    below = kept_at(groups, math.nextafter(beta, 0))
    assert abs(here - kept) <= abs(below - kept) or here < kept
    assert (
        here == kept
        or len({float(group[0][0]) for group in groups}) < len(groups)
        or abs(here - kept) < len(rows)
    )
