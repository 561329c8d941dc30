"""Calibration and pruning on one GPU and on several. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from test_blockwise import block_map, tokens
from test_propagation import assert_same, linears

from emp_llm.calibration.block_pass import calibrate_blocks
from emp_llm.calibration.whole_pass import calibrate_model
from emp_llm.execution.blockwise import BlockwiseModel
from emp_llm.execution.loading import load_model
from emp_llm.prune import prune

Models = Callable[[str], Path]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAMILIES = ("llama", "gemma3", "gpt2", "mixtral", "qwen3_moe")


def spread(source: Path, kinds: str) -> str:
    """A device map as `block_map`, with its blocks on the CPU and on disk moved to other places."""
    first, second = {
        "gpu-cpu": (0, "cpu"),
        "gpu-disk": (0, "disk"),
        "two-gpus": (0, 1),
        "disk-gpu": ("disk", 0),
    }[kinds]
    return json.dumps({name: first if place == "cpu" else second for name, place in json.loads(block_map(source)).items()})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["gpu-cpu", "gpu-disk", "two-gpus", "disk-gpu"])
def test_norms_on_several_devices_equal_those_on_one(models: Models, family: str, kinds: str) -> None:
    """Offloaded weights are used on the GPU, so the same kernels add the same numbers."""
    if kinds == "two-gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    whole = load_model(models(family), "cuda:0")
    expected = calibrate_model(whole, linears(whole), tokens(), 2)
    model = load_model(models(family), spread(models(family), kinds))
    for place in ("device", "cpu", "disk"):
        assert_same(calibrate_blocks(BlockwiseModel(model, None, place), linears(model), tokens(), 2), expected)  # type: ignore[arg-type]
    assert_same(calibrate_model(model, linears(model), tokens(), 2), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_on_the_gpu_equal_those_on_the_cpu_up_to_rounding(tmp_path: Path, family: str) -> None:
    source = tiny.make_model(tmp_path / "model", family, torch.float32)
    here, there = (load_model(source, device) for device in ("cpu", "cuda:0"))
    norms = [calibrate_model(model, linears(model), tokens(), 2) for model in (here, there)]
    assert norms[0].input_of == norms[1].input_of
    for name, norm in norms[0].norms.items():
        np.testing.assert_allclose(norms[1].norms[name].numpy(), norm.numpy(), rtol=2e-2, err_msg=name)


@pytest.mark.parametrize("propagate", ["dense", "pruned"])
def test_pruning_on_the_gpu_equals_pruning_from_its_activations_file(
    models: Models, text: Path, tmp_path: Path, propagate: str
) -> None:
    source = models("mixtral")
    common = {"calibration": str(text), "samples": 4, "seqlen": 64, "propagate": propagate}
    prune(model=source, output=tmp_path / "one", device_map="cuda:0", **common)  # type: ignore[arg-type]
    activations = tmp_path / "one" / "emp_llm" / "activations.safetensors"
    prune(model=source, output=tmp_path / "two", activations=activations, mask_device="cpu")
    for shard in (tmp_path / "one").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "two" / shard.name).read_bytes()
