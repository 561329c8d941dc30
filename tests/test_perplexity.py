"""Perplexity against twenty lines that take nothing from the package."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import make_tokenizer

from emp_llm.models import residency
from emp_llm.models.errors import UserError
from emp_llm.models.loading import load_model
from emp_llm.services.perplexity import block_length, perplexity, text_tokens
from emp_llm.services.suites import find_suite


def independent(model: Any, tokens: torch.Tensor, block: int) -> float:
    """Blocks one at a time; each block's mean loss by the model's own loss function, weighted by the block's tokens."""
    total, weight = 0.0, 0
    for start in range(0, len(tokens), block):
        ids = tokens[start : start + block][None]
        if ids.shape[1] < 2:
            continue
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss.double().item()
        total += loss * ids.shape[1]
        weight += ids.shape[1]
    return math.exp(total / weight)


@pytest.mark.parametrize(("length", "block"), [(640, 64), (650, 64), (641, 64), (50, 64), (600, 128)])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_equals_the_independent_computation(models: Any, length: int, block: int, batch_size: int | None) -> None:
    model = load_model(models("llama"), "cpu", "float32")
    tokens = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))
    result = perplexity(model, tokens, block, batch_size)
    assert result.perplexity == pytest.approx(independent(model, tokens, block), rel=2e-6)
    ends = length % block
    assert result.tokens == length - (ends if ends == 1 else 0)
    assert result.blocks == length // block + (ends > 1)


def test_limit_takes_the_first_blocks_and_says_so(models: Any) -> None:
    model = load_model(models("llama"), "cpu", "float32")
    tokens = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0))
    part = perplexity(model, tokens, 64, limit=3)
    assert part.partial
    assert (part.perplexity, part.blocks) == (perplexity(model, tokens[:192], 64).perplexity, 3)
    assert not perplexity(model, tokens, 64, limit=5).partial


def test_text_of_a_suite(tmp_path: Path, models: Any) -> None:
    (tmp_path / "prose.txt").write_text("A short walk in the long grass. " * 20)
    (tmp_path / "mine.toml").write_text('[perplexity]\nfile = "prose.txt"\nseqlen = 1000\n')
    corpus = find_suite(str(tmp_path / "mine.toml")).corpus
    assert corpus is not None
    tokens = text_tokens(corpus, transformers.AutoTokenizer.from_pretrained(models("llama")))
    assert tokens.tolist() == make_tokenizer()((tmp_path / "prose.txt").read_text())["input_ids"]
    assert block_length(corpus, load_model(models("llama"), "cpu").config) == 128  # the model's context


def test_too_little_text_and_broken_models_are_named(models: Any) -> None:
    model = load_model(models("llama"), "cpu", "float32")
    with pytest.raises(UserError, match="at least 2 tokens, got 1"):
        perplexity(model, torch.tensor([1]), 64)
    model.lm_head.weight.data[0] = math.nan
    with pytest.raises(UserError, match="loss is not finite"):
        perplexity(model, torch.arange(20), 64)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_model_that_does_not_fit_is_read_once(models: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 256, (64 * 5 + 10,), generator=torch.Generator().manual_seed(0))
    here = perplexity(load_model(models(family), "cpu"), tokens, 64, batch_size=2)
    read: list[torch.nn.Module] = []
    whole = residency._read

    def counting(modules: list[torch.nn.Module]) -> Any:
        held = whole(modules)
        read.extend(entry.module for entry in held)
        return held

    monkeypatch.setattr(residency, "_read", counting)
    model = load_model(models(family), "disk")
    there = perplexity(model, tokens, 64, batch_size=2)
    assert there.perplexity == here.perplexity
    weights = sum(1 for module in model.modules() if residency._offload_hook(module) is not None)
    assert weights > 10
    # The embedding and what else lies outside the blocks come for the beginning and again for the end.
    assert len(read) <= weights + 5
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
