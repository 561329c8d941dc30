"""What a caller of the library has set in torch changes nothing, and is as it was afterwards."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import weights_of as weights_of_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from emp_llm import (
    heal_model,
    masks_of,
    prune,
    prune_model,
    reapply_mask,
    recipe_of,
    runtime,
)
from emp_llm.models import attention
from emp_llm.models.attention import FastAttention, fast_attention

Models = Callable[[str], Path]
Weights = dict[str, Tensor]
IDS = torch.randint(3, 256, (6, 48), generator=torch.Generator().manual_seed(0))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "dtype": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module")
def dense(models: Models) -> Callable[[str], Any]:
    """A model in memory by its family; copy it before changing it."""
    return cache(lambda family: AutoModelForCausalLM.from_pretrained(models(family)).eval())


def weights_of(model: Any) -> Weights:
    return {name: values.detach().clone() for name, values in model.state_dict().items()}


def updated(model: Any, dense: Any) -> Weights:
    prune_model(model, "emp-admm", IDS)
    return weights_of(model)


def healed(model: Any, dense: Any) -> Weights:
    """Masks of Wanda, which stay when all weights have moved."""
    masks = masks_of(model, "wanda", IDS)
    reapply_mask(model, masks)
    heal_model(model, dense, IDS, masks=masks, steps=1)
    return weights_of(model)


def propagated(model: Any, dense: Any) -> Weights:
    prune_model(model, recipe_of("wanda", refit=True), IDS, propagate="pruned")
    return weights_of(model)


CALLS = [updated, healed, propagated]


@pytest.fixture(scope="module")
def expected(dense: Callable[[str], Any]) -> Callable[[Any], Weights]:
    return cache(lambda call: call(deepcopy(dense("llama")), dense("llama")))


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_modes_of_the_caller(
    call: Callable[..., Weights],
    mode: str,
    dense: Callable[[str], Any],
    expected: Callable[[Any], Weights],
) -> None:
    model = deepcopy(dense("llama"))
    with MODES[mode]():
        before = settings()
        found = call(model, dense("llama"))
        assert settings() == before
    assert same(found, expected(call))


def settings() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
    )


@pytest.mark.parametrize("call", CALLS)
def test_weights_made_in_inference_mode(
    call: Callable[..., Weights], dense: Callable[[str], Any], expected: Callable[[Any], Weights]
) -> None:
    with torch.inference_mode():
        model = deepcopy(dense("llama"))
    assert same(call(model, dense("llama")), expected(call))


def test_models_in_training(dense: Callable[[str], Any]) -> None:
    """Neither the pruned model drops anything out, nor the dense one that it learns from."""
    found = []
    for training in (False, True):
        model, teacher = (deepcopy(dense("gpt2")).train(training) for _ in range(2))
        if training:
            model.gradient_checkpointing_enable()
        found.append(healed(model, teacher))
        assert model.training == teacher.training == training
    assert same(*found)


def test_commands_in_python(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    def shards(name: str) -> Weights:
        how = {"calibration": str(text), "samples": 2, "seqlen": 32}
        prune(tiny_llama, method="emp-admm", output=tmp_path / name, **how)
        return weights_of_folder(tmp_path / name)

    plain = shards("plain")
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.float16):
        found = shards("other")
    assert same(found, plain)


@pytest.mark.parametrize("tokens", [3, 40])
def test_packed_layers_in_another_default_dtype(pruned_llama: Path, tokens: int) -> None:
    """The compiled kernel writes float32 numbers, and has the room for them."""
    model = runtime.load(pruned_llama, least_zeros=0)
    plain = model(input_ids=IDS[:1, :tokens]).logits
    with default_dtype(torch.float64), torch.inference_mode():
        model = runtime.load(pruned_llama, least_zeros=0)
        assert torch.equal(model(input_ids=IDS[:1, :tokens]).logits, plain)


@pytest.mark.parametrize(
    ("device", "dtype", "slow", "used"),
    [
        ("cpu", torch.bfloat16, True, True),
        ("cpu", torch.float32, True, False),
        ("cpu", torch.bfloat16, False, False),
        ("cuda", torch.bfloat16, True, False),
        ("mps", torch.bfloat16, True, False),
    ],
)
def test_calls_of_torch_are_inspected_only_where_it_helps(
    device: str, dtype: torch.dtype, slow: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_is_slow_in_torch", lambda: slow)
    context = fast_attention(torch.device(device), dtype)
    assert isinstance(context, FastAttention if used else nullcontext)
    with torch.autocast("cpu", torch.bfloat16):
        context = fast_attention(torch.device(device), dtype)
    assert isinstance(context, FastAttention) == (device == "cpu" and slow)
