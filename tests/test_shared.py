"""Real models and real text, if present."""

import json
from pathlib import Path

import pytest

from emp_llm import prune


@pytest.fixture(scope="module")
def stories_suite(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suite") / "tinystories.toml"
    (path.parent / "part.txt").write_text(
        (shared / "text" / "tinystories_valid.txt").read_text()[:35_000]
    )
    path.write_text('[perplexity]\nfile = "part.txt"\n')
    return str(path)


def test_four_methods_on_a_real_model(shared: Path, stories_suite: str, tmp_path: Path) -> None:
    source = shared / "models" / "stories260K"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    text = tmp_path / "stories.txt"
    text.write_text((shared / "text" / "tinystories_train.txt").read_text()[:400_000])
    common = {
        "calibration": str(text),
        "samples": 16,
        "seqlen": 256,
        "evaluate": stories_suite,
    }
    change = {}
    sparsity = {}
    for method in ("emp-wanda", "emp-magnitude", "wanda", "magnitude"):
        report = prune(model=source, output=tmp_path / method, method=method, **common)
        common["baseline"] = tmp_path / "emp-wanda"  # the dense model is measured once
        evaluation = report["evaluation"]
        dense = evaluation["dense"]["perplexity"]
        pruned = evaluation["pruned"]["perplexity"]
        assert dense["block_length"] == 512
        change[method] = pruned["perplexity"] / dense["perplexity"]
        sparsity[method] = report["targets"]["sparsity_of_targets"]
    assert sparsity["wanda"] == sparsity["magnitude"] == 0.5
    assert 0.3 < sparsity["emp-magnitude"] < sparsity["emp-wanda"] < 0.5
    assert 1 < change["emp-wanda"] < change["wanda"] < change["magnitude"]
    # Healing for a tenth of its usual steps takes away at least two fifths of the damage.
    how = common | {"method": "wanda", "heal": True, "heal_steps": 30, "seqlen": 128}
    healed = prune(model=source, output=tmp_path / "healed", **how)
    evaluation = healed["evaluation"]
    assert healed["targets"]["zeros"] == report_zeros(tmp_path / "wanda")
    gained = (
        evaluation["pruned"]["perplexity"]["perplexity"]
        / evaluation["dense"]["perplexity"]["perplexity"]
    )
    assert 1 < gained < 1 + 0.6 * (change["wanda"] - 1)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def report_zeros(run: Path) -> int:
    return int(json.loads((run / "emp_report.json").read_text())["targets"]["zeros"])
