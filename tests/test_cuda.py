"""Calibration, masks and sweeps on one GPU and on several. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from bench_refit import exact_rows
from kernel_cases import (
    BUDGETS,
    DTYPES,
    EDGES,
    FIELDS,
    KINDS,
    bits,
    norms_of,
    prune_plainly,
    prune_rows,
    weights,
)
from runs import check_verified
from safetensors.torch import load_file
from test_blockwise import block_map, tokens
from test_propagation import assert_same, linears
from test_solvers import inputs_of, layer, moments, objective

from emp_llm import calibrate, effective_mask, prune, prune_model, recipe_of
from emp_llm.calibration.passes import calibrate_blocks, calibrate_model
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model
from emp_llm.pruning.masks import Pruner
from emp_llm.records.run_report import read_report
from emp_llm.runtime import SparseLinear, load
from emp_llm.runtime.packed_rows import pack_rows
from emp_llm.update.least_squares import output_error, refit_rows
from emp_llm.update.update import admm, sparsegpt

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
    return json.dumps(
        {
            name: first if place == "cpu" else second
            for name, place in json.loads(block_map(source)).items()
        }
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["gpu-cpu", "gpu-disk", "two-gpus", "disk-gpu"])
def test_norms_on_several_devices_equal_those_on_one(
    models: Models, family: str, kinds: str
) -> None:
    """Offloaded weights are used on the GPU, so the same kernels add the same numbers."""
    if kinds == "two-gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    whole = load_model(models(family), "cuda:0")
    expected = calibrate_model(whole, linears(whole), tokens(), 2)
    model = load_model(models(family), spread(models(family), kinds))
    for place in ("device", "cpu", "disk"):
        assert_same(
            calibrate_blocks(BlockwiseModel(model, None, place), linears(model), tokens(), 2),
            expected,
        )
    assert_same(calibrate_model(model, linears(model), tokens(), 2), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_on_the_gpu_equal_those_on_the_cpu_up_to_rounding(
    tmp_path: Path, family: str
) -> None:
    source = tiny.make_model(tmp_path / "model", family, torch.float32)
    models = [load_model(source, device) for device in ("cpu", "cuda:0")]
    norms = [calibrate_model(model, linears(model), tokens(), 2, ("relative",)) for model in models]
    assert norms[0].input_of == norms[1].input_of
    assert (
        norms[0].statistics["relative"].keys()
        == norms[1].statistics["relative"].keys()
        == norms[0].input_of.keys()
    )
    for here, there in (
        (each.statistics["norm"] for each in norms),
        (each.statistics["relative"] for each in norms),
    ):
        for name, norm in here.items():
            np.testing.assert_allclose(there[name].numpy(), norm.numpy(), rtol=2e-2, err_msg=name)


@pytest.mark.parametrize("propagate", ["dense", "pruned"])
def test_pruning_on_the_gpu_equals_pruning_from_its_activations_file(
    models: Models, text: Path, tmp_path: Path, propagate: Any
) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    common = {"calibration": str(text), "samples": 4, "seqlen": 64}
    prune(models("mixtral"), output=one, device_map="cuda:0", propagate=propagate, **common)
    prune(
        models("mixtral"),
        output=two,
        activations=one / "emp_llm" / "activations.safetensors",
        mask_device="cpu",
    )
    assert oracle.shards(one) == oracle.shards(two)


@pytest.mark.parametrize("group", ["row", "matrix"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"method": "emp-relative", "sparsity": 0.5},
        {"method": "emp-ria"},
        {"method": "relative"},
    ],
    ids=str,
)
def test_pruning_a_model_in_gpu_memory_equals_pruning_it_on_the_cpu(
    models: Models, norms: Callable[[str], Path], recipe: dict[str, Any], family: str, group: Any
) -> None:
    here, there = (load_model(models(family), device) for device in ("cpu", "cuda:0"))
    for model in (here, there):
        prune_model(
            model, recipe_of(group=group, min_expert_tokens=0, **recipe), activations=norms(family)
        )
    for (name, a), (_, b) in zip(here.named_parameters(), there.named_parameters(), strict=True):
        assert b.device.type == "cuda"
        assert torch.equal(a, b.cpu()), name


@pytest.mark.parametrize("method", ["emp-taylor", "wanda"])
def test_heads_and_neurons_scored_on_the_gpu(tiny_llama: Path, method: str, tmp_path: Path) -> None:
    """The scores are those of the CPU up to rounding, with weights on the GPU or offloaded."""
    stored = {}
    for device_map in ("cpu", "cuda:0", spread(tiny_llama, "gpu-cpu")):
        out = tmp_path / str(len(stored))
        options = {
            "structure": "both",
            "method": method,
            "sparsity": 0.3,
            "width_multiple": 8,
        }
        text = {"calibration": "demo", "samples": 4, "seqlen": 64}
        prune(
            str(tiny_llama),
            output=out,
            dtype="float32",
            device_map=device_map,
            **options,
            **text,
        )
        stored[device_map] = load_file(out / "emp_llm" / "structure.safetensors")
        check_verified(out, tiny_llama)
    first, *others = stored.values()
    for other in others:
        for name in (name for name in first if name.endswith(".scores")):
            torch.testing.assert_close(other[name], first[name], rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
def test_masks_of_rows(dtype: torch.dtype, with_norms: bool) -> None:
    """The reference on the GPU gives the bits of the compiled kernel on the CPU."""
    for kind, shape, budget in (
        *((kind, (7, 520), budget) for kind in KINDS for budget in BUDGETS),
        *EDGES,
    ):
        here = weights(kind, shape, dtype, 0)
        rule = budget(shape)
        there = here.cuda()
        norms = norms_of(kind, shape[1]) if with_norms else None
        wanted = prune_rows(here, norms, rule)
        found = prune_plainly(there, None if norms is None else norms.cuda(), rule)
        assert torch.equal(bits(there), bits(here)), (kind, rule)
        for field in FIELDS:
            assert torch.equal(getattr(found, field).cpu(), getattr(wanted, field)), (
                kind,
                rule,
                field,
            )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "heavy"])
def test_effective_masks_on_the_gpu_equal_those_on_the_cpu(dtype: torch.dtype, kind: str) -> None:
    """Those on the CPU come from the compiled kernel (more than a million scores in rows) and
    from the reference.
    """
    small = weights(kind, (24, 600), dtype, 0)
    large = weights(kind, (300, 4096), dtype, 1)
    cases = [
        (large, {}),
        (large, {"beta": 0.6}),
        (large, {"order": 1.0}),
        (large.view(300, 64, 64), {"dim": (1, 2)}),
        (small, {}),
        (small, {"dim": 0}),
        (small, {"dim": None}),
    ]
    for scores, options in cases:
        mask = effective_mask(scores.cuda(), **options)
        assert mask.is_cuda
        assert torch.equal(mask.cpu(), effective_mask(scores, **options)), options


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "emp-wanda", "beta": 0.7},
        {"method": "wanda", "sparsity": 0.4},
        {"method": "wanda", "pattern": "2:4"},
        {"method": "emp-magnitude", "group": "all"},
        {"method": "magnitude", "sparsity": 0.4, "group": "matrix"},
    ],
    ids=str,
)
def test_checkpoints_masked_on_the_gpu_equal_those_masked_on_the_cpu(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    """Matrices of several chunks."""
    init = Pruner.__init__
    monkeypatch.setattr(
        Pruner, "__init__", lambda *given, **more: init(*given, **{"chunk_weights": 7 * 96} | more)
    )
    with monkeypatch.context() as patch:
        sizes = {"hidden_size": 96, "intermediate_size": 264, "num_hidden_layers": 3}
        patch.setitem(tiny.FAMILIES, "wider", ("LlamaConfig", tiny.GLU | sizes))
        source = tiny.make_model(tmp_path / "model", "wider", dtype)
    given = {"model": source, "targets": "all-linear"} | options
    if "wanda" in options["method"]:
        given["activations"] = tmp_path / "norms.safetensors"
        calibrate(
            model=source,
            output=given["activations"],
            calibration=str(text),
            samples=2,
            seqlen=32,
            device_map="cpu",
        )
    reports = {
        device: prune(output=tmp_path / device, mask_device=device, **given)
        for device in ("cpu", "cuda")
    }
    assert reports["cuda"].matrices == reports["cpu"].matrices
    assert oracle.shards(tmp_path / "cpu") == oracle.shards(tmp_path / "cuda")


@pytest.mark.parametrize("two_streams", [False, True])
def test_refit_on_the_gpu_agrees_with_exact_rows(two_streams: bool) -> None:
    """To 1e-3 of the remaining error, with inputs of very different sizes; also where the user
    allows TF32.
    """
    x = inputs_of("correlated", 640)
    x[:, :3] *= 100
    xhat = (
        x + 0.1 * x.std(0) * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        if two_streams
        else x
    )
    weight, mask = layer(64, 640)
    damping = 1e-4
    energy = (x @ weight.double().T).square().sum(0)
    right = moments(x @ weight.double().T, xhat).cuda() if two_streams else None
    torch.set_float32_matmul_precision("high")
    try:
        found = refit_rows(
            weight.cuda(),
            mask.cuda(),
            moments(xhat).cuda(),
            right,
            damping=damping,
            energy=energy.float().cuda(),
        )
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found.weight.is_cuda
    assert not bool(found.weight[~mask.cuda()].any())
    exact = exact_rows(weight.double(), mask, xhat.T @ xhat, xhat.T @ x, damping)
    best, reached = (
        objective(v, weight, mask, xhat, x, damping) for v in (exact, found.weight.cpu())
    )
    assert float(((reached - best) / best).max()) < 1e-3
    assert found.damping == damping
    again = refit_rows(
        weight.cuda(),
        mask.cuda(),
        moments(xhat).cuda(),
        right,
        damping=damping,
        energy=energy.float().cuda(),
    )
    assert torch.equal(found.weight, again.weight)


@pytest.mark.parametrize(
    ("search", "options"),
    [(sparsegpt, {"count": 32 * 384}), (admm, {"counts": torch.arange(64) * 6})]
    + [(search, {"pattern": (2, 4)}) for search in (sparsegpt, admm)],
)
def test_searches_on_the_gpu_agree_with_those_on_the_cpu(
    search: Any, options: dict[str, Any]
) -> None:
    """Masks can differ where two costs are equal up to rounding."""
    weight = layer(64, 384)[0]
    gram = moments(inputs_of("plain", 384))
    moved = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    here = search(weight, gram, **options)
    there = search(weight.cuda(), gram.cuda(), **moved)
    assert int(there.mask.sum()) == int(here.mask.sum())
    assert search is admm or float((here.mask != there.mask.cpu()).double().mean()) < 1e-3
    errors = [
        float(output_error(found.weight.cpu(), weight, gram).sum()) for found in (here, there)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "emp-admm", "sparsity": 0.5},
        {"method": "wanda"},
        {"method": "sparsegpt"},
        {"method": "emp-relative", "targets": "all-linear", "refit_weighting": "relative"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_refit_on_the_gpu_restores_as_much_as_one_on_the_cpu(
    tmp_path: Path, text: Path, family: str, options: dict[str, Any]
) -> None:
    source = tiny.make_model(tmp_path / "model", family, torch.float32)
    errors = []
    for device in ("cpu", "cuda:0"):
        out = tmp_path / device.replace(":", "")
        prune(
            model=source,
            output=out,
            calibration=str(text),
            samples=16,
            seqlen=32,
            refit=True,
            device_map=device,
            **options,
        )
        check_verified(out, source)
        errors.append([fit.error_after for fit in read_report(out).fits.values()])
    assert errors[1] == pytest.approx(errors[0], rel=0.05, abs=1e-4)


def sparse_layer(dtype: torch.dtype, rows: int = 300, columns: int = 1000) -> SparseLinear:
    """A layer with half of its weights, and a bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * (
        torch.rand(rows, columns, generator=generator) < 0.5
    )
    return SparseLinear(
        pack_rows(weight.to(dtype)),
        torch.nn.Parameter(torch.ones(rows, dtype=dtype), requires_grad=False),
    )


@pytest.mark.parametrize("device_map", ["cuda:0", "disk"])
def test_healing_on_the_gpu(tiny_llama: Path, text: Path, tmp_path: Path, device_map: str) -> None:
    """Of the whole model, and of one block at a time."""
    how = {
        "calibration": str(text),
        "samples": 10,
        "seqlen": 32,
        "method": "wanda",
        "device_map": device_map,
    }
    report = prune(tiny_llama, output=tmp_path / "out", heal=True, heal_steps=4, **how)
    assert report.healing.by == ("blocks" if device_map == "disk" else "model")
    losses = {int(step): loss for step, loss in report.healing.curve}
    assert losses[report.healing.best] < losses[0]
    check_verified(tmp_path / "out", tiny_llama)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 17, 300])
def test_a_sparse_layer_on_the_gpu_equals_that_on_the_cpu(dtype: torch.dtype, tokens: int) -> None:
    layer = sparse_layer(dtype)
    x = torch.randn(tokens, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = x.double() @ layer.weight.double().T + 1
    there = layer.to("cuda")
    assert type(there._products).__name__ == "CudaProducts"
    found = there(x.cuda())
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert float((found.cpu().double() - wanted).norm() / wanted.norm()) < tolerance
    assert torch.equal(there(x.cuda()), found)


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_a_sparse_layer_is_compiled_without_a_break_and_runs_in_a_cuda_graph(tokens: int) -> None:
    """The compiler may add the bias within the product, and round once less."""
    layer = sparse_layer(torch.bfloat16).to("cuda")
    x = torch.randn(1, tokens, 1000, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ layer.weight.double().T + 1
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for found in (compiled(x), layer(x)):
            assert float((found.double() - exact).norm() / exact.norm()) < 5e-3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for seed in range(2):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, layer(x))


def test_a_sparse_model_on_the_gpu_writes_the_words_of_the_cpu(tmp_path: Path) -> None:
    source = tiny.make_model(tmp_path / "model", "llama", torch.float32)
    prune(model=source, output=tmp_path / "pruned", method="magnitude", sparsity=0.5)
    prompt = torch.tensor([[1, 5, 9, 4]])
    written = []
    for device in ("cpu", "cuda"):
        model = load(tmp_path / "pruned", device=device)
        written.append(model.generate(prompt.to(device), max_new_tokens=20, do_sample=False).cpu())
    assert torch.equal(*written)
