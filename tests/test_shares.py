"""Shares of blocks by their outliers (--shares owl), checked against a slow version written from the paper."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import transformers
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from emp_llm import Recipe, prune_model
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.prune import prune
from emp_llm.pruning import writing
from emp_llm.pruning.counts import block_sparsities
from emp_llm.records.run_report import RunReport
from emp_llm.sweep import sweep

Models = Callable[[str], Path]
M, LAMBDA, S = 1.5, 0.1, 0.55  # random weights have no scores at five times the mean


def slow_shares(scores: dict[int, list[oracle.Array]]) -> dict[int, float]:
    """The sparsity of each block: the more of its scores are outliers, the lower; the mean over all weights is S."""
    outliers, sizes = {}, {}
    for block, matrices in scores.items():
        values = np.concatenate([matrix.reshape(-1) for matrix in matrices])
        outliers[block] = sum(1 for value in values if value > M * values.mean()) / values.size
        sizes[block] = values.size
    mean = sum(outliers[block] * sizes[block] for block in outliers) / sum(sizes.values())
    farthest = max(abs(share - mean) for share in outliers.values())
    return {block: S - LAMBDA * (share - mean) / farthest for block, share in outliers.items()}


@pytest.mark.parametrize(
    ("family", "method", "group"),
    [("llama", "wanda", "row"), ("mixtral", "wanda", "matrix"), ("gpt2", "relative", "row"), ("llama", "ria", "matrix")],
)
def test_blocks_with_outliers_lose_less(
    command: Run, models: Models, norms: Models, tmp_path: Path, family: str, method: str, group: str
) -> None:
    source, out = models(family), tmp_path / "out"
    options = ["--method", method, "--shares", "owl", "--owl-lambda", LAMBDA, "--owl-m", M, "--sparsity", S, "--group", group]
    given = ["--activations", norms(family), "--min-expert-tokens", 0]
    done = command("prune", "--model", source, *options, *given, "--output", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "emp_report.json").read_text())
    entries, own = report["matrices"], oracle.load_norms(norms(family), relative=method == "relative")
    scores, masks = {}, {}
    for layer, entry in entries.items():
        weight = oracle.weight(source, entry["tensor"], family == "gpt2")
        scores[layer] = oracle.ria(np.abs(weight), own[layer]) if method == "ria" else oracle.scores(weight, own[layer])
        masks[layer] = oracle.weight(out, entry["tensor"], family == "gpt2") != 0
    blocks = dict.fromkeys(entry["block"] for entry in entries.values())
    shares = slow_shares({b: [scores[layer] for layer, entry in entries.items() if entry["block"] == b] for b in blocks})
    assert max(shares.values()) - min(shares.values()) > LAMBDA
    total = report["targets"]["weights"]
    assert report["targets"]["kept"] == total - math.floor(S * total), "exactly the sparsity that was asked for"
    for layer, mask in masks.items():
        wanted = (1 - shares[entries[layer]["block"]]) * (mask.shape[1] if group == "row" else mask.size)
        rows = (mask, scores[layer]) if group == "row" else (mask.reshape(1, -1), scores[layer].reshape(1, -1))
        for kept, score in zip(*rows, strict=True):
            assert abs(kept.sum() - wanted) < 1 + 1e-6, "uniform within the block, rounded down or up"
            np.testing.assert_array_equal(kept, oracle.keep(score, int(kept.sum())))
    recipe = report["recipe"]
    assert (recipe["shares"], recipe["owl_lambda"], recipe["owl_m"], recipe["sparsity"]) == ("owl", LAMBDA, M, S)
    assert "blocks lose" in done.stderr
    checked = command("verify", out, "--source", source, "--activations", norms(family))
    assert (checked.returncode, checked.stdout[:13]) == (0, "0 differences"), checked.stdout
    manifest = json.loads((out / "emp_manifest.json").read_text())
    assert [manifest["recipe"][name] for name in ("shares", "owl_lambda", "owl_m", "sparsity")] == ["owl", LAMBDA, M, S]
    manifest["recipe"]["owl_lambda"] = 0.0
    (out / "emp_manifest.json").write_text(json.dumps(manifest))
    assert command("verify", out, "--source", source, "--activations", norms(family)).returncode == 1


def test_in_memory_and_in_a_sweep(evaluable: Models, task_suite: Path, norms: Models, tmp_path: Path) -> None:
    """The points of a sweep with a fixed sparsity have the shares; the others stay as they are."""
    source, out = evaluable("llama"), tmp_path / "sweep"
    options: dict[str, Any] = {"shares": "owl", "owl_m": M}
    common: dict[str, Any] = {"activations": norms("llama"), "device_map": "cpu"}
    written = prune(source, output=tmp_path / "owl", method="wanda", **options, **common)
    uniform = prune(source, output=tmp_path / "uniform", method="wanda", **common)
    assert isinstance(written, RunReport)
    found = prune_model(source, Recipe(method="wanda", **options), activations=norms("llama"))
    assert found.targets == written.targets
    assert {name: entry.kept for name, entry in found.matrices.items()} == {n: e.kept for n, e in written.matrices.items()}
    assert written.matrices["model.layers.0.mlp.up_proj"].s_eff_bound is not None
    suite = str(task_suite.parent / "short.toml")
    swept = sweep(
        source,
        output=out,
        methods="wanda,magnitude",
        sparsities="0.5",
        patterns="2:4",
        suite=suite,
        keep=True,
        **options,
        **common,
    )
    assert [point.name for point in swept.points] == ["wanda-0.5", "wanda-2of4", "magnitude-0.5", "magnitude-2of4"]
    for shard in (tmp_path / "owl").glob("*.safetensors"):
        assert shard.read_bytes() == (out / "points" / "wanda-0.5" / shard.name).read_bytes()
    assert swept.points[0].sparsity_of_targets == written.targets.sparsity_of_targets
    assert written.targets.kept == uniform["targets"]["kept"]
    for name in ("wanda-2of4", "magnitude-0.5"):
        assert "shares" not in json.loads((out / "points" / name / "emp_report.json").read_text())["recipe"]


@pytest.mark.parametrize(
    "options",
    [{"method": "emp-relative", "sparsity": 0.4}, {"method": "ria", "shares": "owl", "owl_m": M}],
    ids=["counts by magnitude", "owl"],
)
def test_an_interrupted_run_settles_the_same_again(
    models: Models, norms: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """And another rule does not continue its work."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models("llama"), dtype="auto")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    common: dict[str, Any] = {"model": str(tmp_path / "sharded"), "activations": norms("llama")}
    prune(output=tmp_path / "whole", **common, **options)
    put_rows, begun = writing._ShardFile.put_rows, []

    def stopping(file: Any, target: Target, chunks: Any) -> Any:
        begun.append(target.name)
        if len(begun) == 5:
            raise KeyboardInterrupt
        return put_rows(file, target, chunks)

    monkeypatch.setattr(writing._ShardFile, "put_rows", stopping)
    with pytest.raises(KeyboardInterrupt):
        prune(output=tmp_path / "out", **common, **options)
    other = {"count_by": "own"} if "sparsity" in options else {"owl_m": 1.2}
    with pytest.raises(UserError, match=rf"unfinished run with recipe\.{next(iter(other))}"):
        prune(output=tmp_path / "out", **common, **options | other)
    prune(output=tmp_path / "out", **common, **options)
    assert 5 < len(begun) < 5 + len(json.loads((tmp_path / "whole" / "emp_report.json").read_text())["matrices"])
    for file in (tmp_path / "whole").glob("model*"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.fractions(0, 1, max_denominator=60)), st.integers(50, 10**6)), min_size=1),
    st.floats(0.1, 0.8),
    st.floats(0, 0.1),
)
def test_the_sparsities_stay_within_lambda_and_their_mean_is_that_of_all(
    blocks: list[tuple[Fraction | None, int]], sparsity: float, spread: float
) -> None:
    outliers, sizes = dict(enumerate(share for share, _ in blocks)), dict(enumerate(size for _, size in blocks))
    shares = block_sparsities(sparsity, spread, outliers, sizes)
    assert all(abs(share - sparsity) <= spread + 1e-12 for share in shares.values())
    weighted = sum(shares[key] * sizes[key] for key in sizes) / sum(sizes.values())
    assert weighted == pytest.approx(sparsity, abs=1e-9)
    if len(set(outliers.values())) == 1:
        assert set(shares.values()) == {sparsity}, "no rounding is taken for a difference"
    known = [(outliers[key], share) for key, share in shares.items() if outliers[key] is not None]
    assert [share for _, share in sorted(known, reverse=True)] == sorted(share for _, share in known)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("--method emp-wanda --shares owl", "--shares does not go with method emp-wanda"),
        ("--method emp-admm --shares owl", "emp-admm: the effective number sets its sparsity"),
        ("--method magnitude --shares owl", "--shares owl is for methods that need activations; magnitude needs none"),
        ("--method wanda --shares owl --pattern 2:4", "--shares owl goes with --sparsity, not with --pattern"),
        ("--method wanda --shares owl --match x", "--shares owl goes with --sparsity, not with --match"),
        ("--method wanda --shares owl --group all", "--shares owl fixes the sparsity of every block"),
        ("--method wanda --shares owl --propagate pruned", "--shares owl needs the scores of all"),
        ("--method wanda --owl-m 3", "--owl-m is an option of --shares owl"),
        ("--method wanda --shares uniform --owl-lambda 0.1", "--owl-lambda is an option of --shares owl"),
        ("--method wanda --shares owl --sparsity 0.95", "--owl-lambda must leave every block a sparsity between 0 and 1"),
        ("--method wanda --shares owl --owl-lambda -1", "--owl-lambda must leave every block"),
        ("--method wanda --shares owl --owl-m 0", "--owl-m must be a number above 0"),
        ("--method wanda --shares layers", "layers"),
    ],
)
def test_wrong_options(command: Run, models: Models, tmp_path: Path, options: str, match: str) -> None:
    done = command("prune", "--model", models("llama"), *options.split(), "--output", tmp_path / "out")
    assert done.returncode == 2
    assert match in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_options_elsewhere(command: Run, models: Models, text: Path, tmp_path: Path) -> None:
    done = command(
        "sweep", "--model", models("llama"), "--methods", "emp-wanda", "--shares", "owl", "--output", tmp_path / "out"
    )
    assert done.returncode == 2
    assert "--shares owl is for methods with a fixed sparsity and activations" in done.stderr
    for recipe, match in (
        (Recipe(method="wanda", shares="owl"), "--shares owl needs the scores of all"),
        (Recipe(sparsity=0.5), "--sparsity needs the scores of all"),
    ):
        with pytest.raises(UserError, match=match):
            prune_model(models("llama"), recipe, text, propagate="pruned", samples=1, seqlen=32)
