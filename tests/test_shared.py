"""Real models and real text, if present."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Run
from test_perplexity import independent

from emp_llm.evaluation.perplexity import perplexity, text_tokens
from emp_llm.evaluation.suites import find_suite
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.prune import prune


@pytest.fixture(scope="module")
def stories_suite(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suite") / "tinystories.toml"
    path.write_text(f'[perplexity]\nfile = "{shared / "text" / "tinystories_valid.txt"}"\n')
    return str(path)


def test_four_methods_on_a_real_model(shared: Path, stories_suite: str, tmp_path: Path) -> None:
    source = shared / "models" / "stories260K"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    text = tmp_path / "stories.txt"
    text.write_text((shared / "text" / "tinystories_train.txt").read_text()[:400_000])
    common: dict[str, Any] = {"calibration": str(text), "samples": 32, "seqlen": 256, "evaluate": stories_suite}
    change, sparsity = {}, {}
    for method in ("emp-wanda", "emp-magnitude", "wanda", "magnitude"):
        report = prune(model=source, output=tmp_path / method, method=method, **common)
        common["baseline"] = tmp_path / "emp-wanda"  # the dense model is measured once
        evaluation = report["evaluation"]
        dense, pruned = evaluation["dense"]["perplexity"], evaluation["pruned"]["perplexity"]
        assert dense["block_length"] == 512
        change[method] = pruned["perplexity"] / dense["perplexity"]
        sparsity[method] = report["targets"]["sparsity_of_targets"]
    assert sparsity["wanda"] == sparsity["magnitude"] == 0.5
    assert 0.3 < sparsity["emp-magnitude"] < sparsity["emp-wanda"] < 0.5
    assert 1 < change["emp-wanda"] < change["wanda"] < change["magnitude"]
    matched = prune(model=source, output=tmp_path / "matched", method="wanda", match=tmp_path / "emp-wanda", **common)
    assert matched["targets"]["kept"] == prune_kept(tmp_path / "emp-wanda")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def prune_kept(run_folder: Path) -> int:
    """The number of target weights that are left, counted in the file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(run_folder, dtype="auto")
    weights = [p for name, p in model.named_parameters() if ".mlp." in name and name.endswith("weight")]
    return sum(int(torch.count_nonzero(weight)) for weight in weights)


def test_wikitext_by_its_hub_id_through_the_command(shared: Path, run: Run, tmp_path: Path) -> None:
    model = shared / "models" / "wiki-llama-5m"
    arguments = ("--model", model, "--output", tmp_path / "out", "--samples", 16, "--seqlen", 128, "--method", "emp-wanda")
    done = run("prune", *arguments, cwd=shared / "datasets")
    assert done.returncode == 0, done.stderr
    assert "18 of 42 matrices in blocks" in done.stdout
    for shard in model.glob("*.safetensors"):
        assert (tmp_path / "out" / shard.name).stat().st_size == shard.stat().st_size


def test_perplexity_of_a_real_model_is_its_own_loss(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared / "datasets")
    folder = shared / "models" / "wiki-llama-5m"
    corpus = find_suite("perplexity").corpus
    assert corpus is not None
    tokens = text_tokens(corpus, load_tokenizer(folder))
    assert tokens.numel() == 385_695
    model = load_model(folder, "cpu")
    part = tokens[: 512 * 9 + 100]
    assert perplexity(model, part, 512, batch_size=4).perplexity == pytest.approx(independent(model, part, 512), rel=1e-5)
