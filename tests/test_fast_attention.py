"""Causal attention on CPUs, and the blocks that are read when their turn comes."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from emp_llm import heal, prune
from emp_llm.evaluation.evaluate import perplexity
from emp_llm.models import attention
from emp_llm.models.attention import FastAttention
from emp_llm.models.loading import load_model

Models = Callable[[str], Path]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths that this module's attention sees, from 33 tokens on, on any processor."""
    seen = []
    own = attention._CausalAttention.apply

    def counted(query: Tensor, *rest: Any) -> Tensor:
        seen.append(query.shape[2])
        return own(query, *rest)

    monkeypatch.setattr(attention, "_SHORT", 32)
    monkeypatch.setattr(attention, "_BLOCK", 16)
    monkeypatch.setattr(attention, "_is_slow_in_torch", lambda: True)
    monkeypatch.setattr(attention._CausalAttention, "apply", counted)
    return seen


def features(*shape: int, seed: int) -> Tensor:
    """In the layout of a model: the heads of a token side by side."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().transpose(1, 2)


def results(tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """The attention, and the gradients of a function of it."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = torch_attention(*leaves, is_causal=True, **how)
    weights = features(*output.transpose(1, 2).shape, seed=3).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    sequences=st.integers(1, 3),
    length=st.integers(257, 450),
    shared=st.integers(1, 3),
    groups=st.integers(1, 3),
    width=st.sampled_from([16, 24, 64]),
    value_width=st.sampled_from([None, 8, 40]),
    scale=st.sampled_from([None, 0.3]),
    cache=st.sampled_from([1, 1 << 20]),
)
def test_as_exact_as_torch(
    sequences: int,
    length: int,
    shared: int,
    groups: int,
    width: int,
    value_width: int | None,
    scale: float | None,
    cache: int,
) -> None:
    """Against float64: the result and its gradients are off by no more than torch's are, but for
    their own rounding to bfloat16.
    """
    heads = shared * groups
    given = [
        features(sequences, length, heads, width, seed=0),
        features(sequences, length, shared, width, seed=1),
        features(sequences, length, shared, value_width or width, seed=2),
    ]
    how = {"scale": scale, "enable_gqa": groups > 1}
    wanted = results([tensor.double() for tensor in given], **how)
    plain = results(given, **how)
    with pytest.MonkeyPatch.context() as patch, FastAttention():
        patch.setattr(attention, "_is_slow_in_torch", lambda: True)
        patch.setattr(attention, "_CACHE", cache)
        ours = results(given, **how)
    assert not torch.equal(ours[0], plain[0])  # it was not torch's
    for own, by_torch, exact in zip(ours, plain, wanted, strict=True):
        assert (own.dtype, own.shape) == (by_torch.dtype, by_torch.shape)
        error, of_torch = (float((x.double() - exact).norm()) for x in (own, by_torch))
        assert error <= 1.1 * of_torch + 0.002 * float(exact.norm())


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": torch.float32},
        {"length": 32},
        {"is_causal": False},
        {"is_causal": False, "attn_mask": torch.ones(64, 64, dtype=torch.bool).tril()},
        {"dropout_p": 0.5},
        {"queries": 40},
        {"instructions": False},
    ],
    ids=str,
)
def test_the_rest_is_torchs(
    how: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, where torch is as fast or another attention is asked for."""
    how = {"is_causal": True} | how
    dtype = how.pop("dtype", torch.bfloat16)
    length = how.pop("length", 64)
    queries = how.pop("queries", length)
    if not how.pop("instructions", True):
        monkeypatch.setattr(attention, "_is_slow_in_torch", lambda: False)
    key, value = (features(1, length, 2, 16, seed=seed).to(dtype) for seed in (1, 2))
    query = features(1, queries, 2, 16, seed=0).to(dtype)
    found = []
    for context in (nullcontext(), FastAttention()):
        torch.manual_seed(0)
        with context:
            found.append(torch_attention(query, key, value, **how))
    assert torch.equal(*found)
    assert not calls


@pytest.mark.parametrize(
    ("fields", "slow"),
    [
        ({"flags": "avx2 avx512f avx512_bf16"}, True),
        ({"flags": "avx512_bf16 amx_bf16 amx_tile"}, False),
        ({"flags": "avx2 avx512f"}, False),
        ({"Features": "asimd bf16"}, False),
        ({}, False),
    ],
)
def test_processors(fields: dict[str, str], slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cpu_fields", lambda: fields)
    assert attention._is_slow_in_torch() == slow


def test_commands_take_it(
    tiny_llama: Path, text: Path, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration in both ways, updates, perplexity, and the training, whose features are float32
    before autocast.
    """
    how = {"calibration": str(text), "samples": 16, "seqlen": 64}
    model = str(tiny_llama)
    runs = {
        "whole": {"method": "wanda"},
        "blocks": {"method": "wanda", "propagate": "pruned"},
        "moved": {"method": "sparsegpt"},
    }
    for name, changes in runs.items():
        calls.clear()
        prune(model, output=tmp_path / name, check=False, **how, **changes)
        assert set(calls) == {64}
    calls.clear()
    perplexity(load_model(tiny_llama, "cpu"), torch.arange(4, 84), 80)
    assert set(calls) == {80}
    calls.clear()
    monkeypatch.setattr("emp_llm.healing.training.has_bfloat16", lambda device: True)
    heal(tmp_path / "whole", dense=model, output=tmp_path / "healed", heal_steps=1, **how)
    assert set(calls) == {64}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"method": "wanda"}, ["auto", "auto"]),
        ("llama", {"method": "wanda", "propagate": "pruned"}, ["disk", "disk"]),
        ("llama", {"method": "sparsegpt"}, ["disk", "disk"]),
        ("llama", {"method": "sparsegpt", "device_map": "cpu"}, ["cpu", "cpu"]),
        ("llama", {"method": "wanda", "refit": True}, ["auto", "disk", "disk"]),
        ("mixtral", {"method": "sparsegpt"}, ["auto", "auto"]),
    ],
)
def test_blocks_are_read_when_their_turn_comes(
    family: str,
    changes: dict[str, Any],
    expected: list[str],
    models: Models,
    text: Path,
    tmp_path: Path,
    places: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU, and unless the user says where the model lies: of the dense model, and of the
    pruned one that is checked. Not of experts, which transformers would write to disk once more.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    how = {"calibration": str(text), "samples": 4, "seqlen": 32}
    prune(str(models(family)), output=tmp_path / "out", **how, **changes)
    assert places == expected
