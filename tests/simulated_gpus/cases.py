"""Models over GPUs, CPU and disk, in one process: SIMULATED_GPUS=4 pytest -p simulated_gpus.

tests/test_simulated_gpus.py runs these tests, with some of tests/test_cuda.py.
"""

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import simulated_gpus
import tiny
import torch
from test_blockwise import block_map
from test_cuda import spread
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from emp_llm import (
    effective_mask,
    effective_mass,
    effective_mass_bound,
    effective_number,
    prune,
    prune_model,
    recipe_of,
    verify,
)
from emp_llm.common.machine import has_float64
from emp_llm.models.loading import load_model

Models = Callable[[str], Path]
TEXT: dict[str, Any] = {"samples": 8, "seqlen": 32}


@pytest.fixture(autouse=True)
def _no_leaks() -> Any:
    """Each test gives the memory of all GPUs back."""
    yield
    gc.collect()
    assert simulated_gpus.used() == [0] * simulated_gpus.DEVICES


# ---- the simulation bites


def test_two_devices_do_not_mix() -> None:
    one, other = (torch.ones(3, device=f"cuda:{number}") for number in range(2))
    for wrong in (other, torch.ones(3)):
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and"):
            one + wrong
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and"):
            torch.cat([one, wrong])
    assert (one * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a scalar of the CPU
    assert one[torch.tensor([0, 2])].tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        one.normal_(generator=torch.Generator())


def test_the_cpu_cannot_read_the_memory_of_a_gpu() -> None:
    weight = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
        weight.numpy()
    child = os.fork()
    if child == 0:
        import ctypes

        ctypes.string_at(weight.data_ptr(), 12)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_memory_runs_out_and_is_counted() -> None:
    half = torch.empty(simulated_gpus.MEMORY // 2 + 1, dtype=torch.uint8, device="cuda:2")
    assert simulated_gpus.used() == [0, 0, len(half), 0]
    with pytest.raises(torch.OutOfMemoryError, match="GPU 2 has a total capacity"):
        torch.empty_like(half)
    torch.empty_like(half, device="cuda:3")
    assert torch.cuda.max_memory_allocated(3) >= len(half)


def test_what_a_gpu_does_is_counted() -> None:
    before = simulated_gpus.counters()
    there = torch.ones(256).to("cuda:0").to("cuda:1") * 2
    assert there[:10].sum().item() == 20
    after = simulated_gpus.counters()
    done = {name: after[name] - before[name] for name in after}
    assert done == {
        "kernels": 5,  # two copies, the product, the sum, the number
        "waits": 1,
        "bytes_up": 1024,
        "bytes_down": 0,
        "bytes_across": 1024,
    }


def test_views_gradients_and_random_numbers_are_torchs() -> None:
    weight = torch.nn.Linear(4, 6).cuda(1)
    output = weight(torch.ones(2, 4, device="cuda:1"))
    output[:, ::2].sum().backward()
    assert weight.weight.grad is not None
    assert weight.weight.grad.tolist() == [[2.0] * 4, [0.0] * 4] * 3
    with torch.inference_mode():
        assert weight.weight[1:].T.is_cuda
    torch.manual_seed(0)
    first, other = (torch.rand(3, device=f"cuda:{number}") for number in range(2))
    assert torch.equal(first.cpu(), other.cpu())
    assert not torch.equal(first, torch.rand(3, device="cuda:0"))


# ---- models


def on_four(source: Path) -> str:
    """A map with the first block on GPU 1, the second on GPU 2, the last norm on GPU 3, and the
    rest, which some models tie, on GPU 0.
    """
    places = json.loads(block_map(source))
    blocks = {name: int(name[-1]) + 1 for name in places if name[-1].isdigit()}
    norms = {name: 3 for name in places if name in ("model.norm", "transformer.ln_f")}
    return json.dumps(dict.fromkeys(places, 0) | norms | blocks)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_moe"])
def test_a_model_over_four_gpus_and_cpu_and_disk(tmp_path: Path, family: str) -> None:
    """A fit of weights and its masks are those of one GPU."""
    source = tiny.make_model(tmp_path / "model", family, torch.float32)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The {i}th lamp is lit at {i % 24}.\n" for i in range(90)))
    maps = {
        "one": "cuda:0",
        "four": on_four(source),
        "gpu-disk": spread(source, "gpu-disk"),
    }
    for name, device_map in maps.items():
        prune(
            source,
            output=tmp_path / name,
            method="emp-admm",
            sparsity=0.5,
            calibration=str(text),
            device_map=device_map,
            batch_size=4,
            **TEXT,
        )
        assert verify(tmp_path / name, source=str(source)).differences == []
        assert oracle.shards(tmp_path / name) == oracle.shards(tmp_path / "one")


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_strategies_over_four_gpus(models: Models, device_map: str) -> None:
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
    model = load_model(models("llama"), device_map)
    places = {str(weight.device) for weight in model.parameters()}
    assert "cpu" not in places
    assert (len(places) > 1) == (device_map != "sequential")
    masks = prune_model(model, recipe_of("emp-wanda"), ids).masks
    whole = load_model(models("llama"), "cuda:3")
    expected = prune_model(whole, recipe_of("emp-wanda"), ids).masks
    assert masks.keys() == expected.keys()
    for name, mask in masks.items():
        assert torch.equal(mask.cpu(), expected[name].cpu()), name


@pytest.mark.parametrize(
    "options",
    [
        {"method": "wanda", "refit": True},
        {"method": "sparsegpt", "pattern": "2:4"},
        {"method": "emp-relative", "propagate": "pruned"},
        {"method": "emp-taylor", "sparsity": 0.3, "structure": "both", "width_multiple": 8},
    ],
    ids=str,
)
def test_methods_on_a_gpu_give_its_memory_back(
    models: Models, text: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """`_no_leaks` looks."""
    out = tmp_path / "out"
    where = {"calibration": str(text), "device_map": "cuda:1", "batch_size": 4}
    prune(models("llama"), output=out, **where, **options, **TEXT)
    assert verify(out, source=str(models("llama"))).differences == []


# ---- a device without float64, as on Apple silicon


class _NoFloat64(TorchDispatchMode):
    """Refuses what Apple's GPUs refuse."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.dtype == torch.double:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.fixture
def no_float64() -> Callable[[], AbstractContextManager[None]]:
    """Inside this context, GPUs have no float64."""

    @contextmanager
    def refused() -> Iterator[None]:
        has_float64.cache_clear()
        try:
            with _NoFloat64():
                yield
        finally:
            has_float64.cache_clear()

    return refused


NO_FLOAT64 = [
    ("llama", {"method": "emp-wanda"}),
    ("llama", {"method": "relative", "refit": True}),
    ("llama", {"method": "emp-admm", "heal": True, "heal_steps": 1}),
    ("llama", {"method": "sparsegpt", "refit": True}),
    ("llama", {"method": "wanda", "structure": "both", "sparsity": 0.3, "refit": True}),
    ("llama", {"method": "taylor", "structure": "neurons", "sparsity": 0.3}),
    ("llama", {"structure": "layers", "sparsity": 0.5}),
    ("mixtral", {"structure": "experts", "sparsity": 0.25, "refit": True}),
    ("mixtral", {"method": "relative", "propagate": "pruned"}),
]


@pytest.mark.parametrize(("family", "options"), NO_FLOAT64, ids=str)
def test_a_device_without_float64(
    models: Models,
    text: Path,
    tmp_path: Path,
    no_float64: Callable[[], AbstractContextManager[None]],
    family: str,
    options: dict[str, Any],
) -> None:
    """The same bytes as with it: totals are added up, and systems solved, on the CPU. Those of
    SparseGPT and ADMM have other bits there than on a simulated GPU.
    """
    how = {"calibration": str(text), "device_map": "cuda:1", "batch_size": 4} | TEXT | options
    with no_float64():
        prune(models(family), output=tmp_path / "without", **how)
    assert verify(tmp_path / "without", source=str(models(family))).differences == []
    if options.get("method") not in ("sparsegpt", "emp-admm"):
        prune(models(family), output=tmp_path / "with", **how)
        assert oracle.shards(tmp_path / "without") == oracle.shards(tmp_path / "with")


def test_what_python_calls_on_a_device_without_float64(
    models: Models, no_float64: Callable[[], AbstractContextManager[None]]
) -> None:
    scores = torch.rand(5, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(3, 250, (4, 32), generator=torch.Generator().manual_seed(0))
    model = load_model(models("llama"), "cuda:0")
    with no_float64():
        there = scores.to("cuda:0")
        mask = effective_mask(there)
        assert mask.is_cuda
        assert torch.equal(mask.cpu(), effective_mask(scores))
        assert torch.equal(effective_number(there), effective_number(scores))
        assert torch.equal(effective_mass(there), effective_mass(scores))
        bound = effective_mass_bound(there.sum(1), 64)
        assert torch.equal(bound, effective_mass_bound(scores.sum(1), 64))
        assert prune_model(model, recipe_of("ria"), ids).masks
