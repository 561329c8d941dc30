"""Perplexity against an independent computation, and its limits: little text, broken and
offloaded models.
"""

import json
import math
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from accelerate.utils import OffloadedWeightsLoader

from emp_llm.common.errors import UserError
from emp_llm.evaluation.evaluate import block_length, perplexity
from emp_llm.models.loading import load_model
from emp_llm.records.base import Corpus
from emp_llm.records.evaluation import PerplexityRecord


def independent(model: Any, tokens: torch.Tensor, block: int) -> float:
    """exp of the blocks' mean losses, weighted by their tokens: one block at a time, by the
    model's own loss function.
    """
    total = 0.0
    weight = 0
    for ids in tokens.split(block):
        if len(ids) < 2:
            continue
        with torch.no_grad():
            loss = model(input_ids=ids[None], labels=ids[None]).loss.double().item()
        total += loss * len(ids)
        weight += len(ids)
    return math.exp(total / weight)


@pytest.mark.parametrize("family", ["roberta", "camembert", "prophetnet", "opt"])
def test_a_block_is_no_longer_than_the_positions_of_a_model(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 40}
    heads = {"num_attention_heads": 2, "num_decoder_attention_heads": 2}
    config = transformers.AutoConfig.for_model(family, is_decoder=True, **sizes, **heads)
    config.is_encoder_decoder = False
    config.add_cross_attention = False
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    longest = block_length(Corpus(file="prose.txt"), config)
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


@pytest.mark.parametrize(("length", "block"), [(650, 64), (641, 64), (50, 64), (600, 128)])
def test_equals_the_independent_computation(tiny_llama: Path, length: int, block: int) -> None:
    model = load_model(tiny_llama, "cpu", "float32")
    tokens = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))
    expected = independent(model, tokens, block)
    for batch_size in (None, 1, 3):
        result = perplexity(model, tokens, block, batch_size)
        assert result.perplexity == pytest.approx(expected, rel=2e-6)
        ends = length % block
        assert result.tokens == length - (ends if ends == 1 else 0)
        assert result.blocks == length // block + (ends > 1)


def test_a_limit_takes_the_first_blocks_and_is_recorded(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, "cpu", "float32")
    tokens = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0))
    part = perplexity(model, tokens, 64, limit=3)
    assert part.partial
    assert (part.perplexity, part.blocks) == (perplexity(model, tokens[:192], 64).perplexity, 3)
    assert not perplexity(model, tokens, 64, limit=5).partial
    # The model's context.
    assert block_length(Corpus(file="prose.txt", seqlen=1000), model.config) == 128


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_logits_of_one_batch_are_in_memory_at_a_time(tiny_llama: Path, device_map: str) -> None:
    model = load_model(tiny_llama, device_map, "float32")
    seen = []
    alive = []

    def after_head(module: Any, arguments: Any, logits: torch.Tensor) -> None:
        alive.append(sum(each() is not None for each in seen))
        seen.append(weakref.ref(logits))

    model.lm_head.register_forward_hook(after_head)
    perplexity(model, torch.arange(256).repeat(2), 64, batch_size=2)
    assert alive[-3:] == [0, 0, 0], (
        "the logits of earlier batches that are alive when those of a batch are computed"
    )


def test_losses_that_are_too_large_or_not_finite(tiny_llama: Path) -> None:
    """An infinite perplexity is null in JSON, and the loss stands beside it."""
    model = load_model(tiny_llama, "cpu", "float32")
    with pytest.raises(UserError, match="at least 2 tokens, got 1"):
        perplexity(model, torch.tensor([1]), 64)
    model.lm_head.weight.data *= 1e5
    result = perplexity(model, torch.arange(200), 64)
    assert math.isinf(result.value)
    assert result.loss is not None
    assert 709 < result.loss < math.inf
    written = json.loads(msgspec.json.encode(result))
    assert written["perplexity"] is None
    assert math.isinf(msgspec.convert(written, PerplexityRecord).value)
    model.lm_head.weight.data[0] = math.nan
    with pytest.raises(UserError, match="loss is not finite"):
        perplexity(model, torch.arange(20), 64)


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_an_offloaded_model_is_read_once(
    models: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, 256, (64 * 5 + 10,), generator=torch.Generator().manual_seed(0))
    here = perplexity(load_model(models(family), "cpu"), tokens, 64, batch_size=2)
    read = []
    stored = OffloadedWeightsLoader.__getitem__
    monkeypatch.setattr(
        OffloadedWeightsLoader,
        "__getitem__",
        lambda self, key: read.append(key) or stored(self, key),
    )
    model = load_model(models(family), "disk")
    there = perplexity(model, tokens, 64, batch_size=2)
    assert there.perplexity == here.perplexity
    weights = len(list(model.parameters()))
    assert weights > 10
    # The first block, whose output is looked at first, is read twice, and so are modules outside of
    # the blocks.
    first = sum(1 for name in read if ".0." in name) // 2
    assert len(read) <= weights + first + 5
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
