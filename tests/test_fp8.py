"""FP8 checkpoints with a scale for each block: pruned by the dequantised weights, in place, and
still FP8.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import Run
from oracle import Array
from runs import check_verified
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from emp_llm import calibrate, pack, prune, reapply_mask, unpack
from emp_llm.models.loading import load_model

Models = Callable[[str], Path]
UP = "model.layers.0.mlp.up_proj"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"
Edit = Callable[[dict[str, Tensor]], object]


def make_fp8(
    source: Path,
    folder: Path,
    block: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    edit: Edit | None = None,
) -> Path:
    """A model with its blocks' linear layers in FP8; only the sizes of the tiny Llama that
    transformers can divide by 16.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {}
    for shard in source.glob("*.safetensors"):
        for name, weight in load_file(shard).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = weight
                continue
            rows, columns = (
                -(-size // length) for size, length in zip(weight.shape, block, strict=True)
            )
            padded = torch.zeros(rows * block[0], columns * block[1])
            padded[: weight.shape[0], : weight.shape[1]] = weight
            blocks = padded.reshape(rows, block[0], columns, block[1])
            scales = (blocks.abs().amax((1, 3)) / 256).to(dtype)
            bits = (
                (blocks / scales.float()[:, None, :, None])
                .reshape(padded.shape)
                .to(torch.float8_e4m3fn)
            )
            tensors[name] = bits[: weight.shape[0], : weight.shape[1]].contiguous()
            tensors[f"{name}_scale_inv"] = scales
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {
        "quant_method": "fp8",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


@pytest.fixture(scope="module")
def fp8(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in FP8. Read-only."""
    return make_fp8(tiny_llama, tmp_path_factory.mktemp("fp8") / "model")


def decoded(bits: Array) -> Array:
    """The values of float8_e4m3fn: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent = (bits >> 3 & 15).astype(int)
    mantissa = (bits & 7).astype(np.float64)
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return np.where(bits >> 7, -size, size)


def stored(folder: Path, name: str) -> Array:
    """The bits of a matrix in FP8."""
    tensor = oracle.tensors(folder)[name]
    return np.frombuffer(tensor.shard.read_bytes()[tensor.start : tensor.end], np.uint8).reshape(
        tensor.shape
    )


def values_of(folder: Path, name: str, block: tuple[int, int] = (16, 16)) -> Array:
    """The dequantised matrix, with one rounding to float32."""
    bits = stored(folder, name)
    scales = load_file(folder / "model.safetensors")[f"{name}_scale_inv"].float().numpy()
    grid = (
        np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: bits.shape[0], : bits.shape[1]]
        if scales.ndim
        else scales
    )
    return (decoded(bits).astype(np.float32) * grid).astype(np.float64)


def check_bits(source: Path, out: Path, name: str, mask: Array) -> None:
    np.testing.assert_array_equal(stored(out, name), np.where(mask, stored(source, name), 0), name)


def check_masks(
    source: Path,
    out: Path,
    adaptive: bool,
    block: tuple[int, int] = (16, 16),
    norms: Any = None,
    number: int = 6,
) -> None:
    report = json.loads((out / "emp_report.json").read_text())
    assert len(report["matrices"]) == number
    targets = {entry["tensor"] for entry in report["matrices"].values()}
    for layer, entry in report["matrices"].items():
        scores = oracle.scores(
            values_of(source, entry["tensor"], block), None if norms is None else norms[layer]
        )
        mask = oracle.row_masks(scores, adaptive)
        check_bits(source, out, entry["tensor"], mask)
        assert entry["kept"] == mask.sum()
        assert entry["s_eff_mean"] == pytest.approx(np.mean([oracle.mass(row) for row in scores]))
    before, after = (
        bytearray((folder / "model.safetensors").read_bytes()) for folder in (source, out)
    )
    for name in targets:
        tensor = oracle.tensors(source)[name]
        before[tensor.start : tensor.end] = after[tensor.start : tensor.end] = bytes(
            tensor.end - tensor.start
        )
    assert before == after, "scales and all other bytes stay"
    check_verified(out, source)


def single(tensors: dict[str, Tensor]) -> None:
    """One scale for each matrix."""
    tensors |= {name: torch.tensor(0.01) for name in tensors if name.endswith("_scale_inv")}


@pytest.mark.parametrize(
    ("method", "dtype", "block", "edit"),
    [
        (method, dtype, (16, 16), None)
        for method in ("emp-magnitude", "magnitude")
        for dtype in DTYPES
    ]
    # Not divisors of the matrix.
    + [("emp-magnitude", torch.float32, block, None) for block in ((24, 20), (128, 128), (1, 32))]
    + [("magnitude", torch.float32, (16, 16), single)],
)
def test_masks_are_those_of_the_dequantised_weights(
    tiny_llama: Path,
    tmp_path: Path,
    method: str,
    dtype: torch.dtype,
    block: tuple[int, int],
    edit: Edit | None,
) -> None:
    source = make_fp8(tiny_llama, tmp_path / "model", block, dtype, edit)
    assert oracle.tensors(source)[f"{UP}.weight_scale_inv"].dtype == DTYPES[dtype]
    prune(source, output=tmp_path / "out", method=method)
    check_masks(source, tmp_path / "out", method.startswith("emp-"), block)


def test_experts(models: Models, tmp_path: Path) -> None:
    """As DeepSeek-V3 stores them: each expert's matrices with scales of their own."""
    source = make_fp8(models("qwen3_moe"), tmp_path / "model", (8, 8))
    prune(source, output=tmp_path / "out", method="emp-magnitude")
    check_masks(source, tmp_path / "out", True, (8, 8), number=24)


def test_zeros_ties_and_zero_scales(tiny_llama: Path, tmp_path: Path) -> None:
    """Negative zeros are kept where their row is; a block whose scale is zero keeps its bits'
    order.
    """

    def plant(tensors: dict[str, Tensor]) -> None:
        bits = tensors[f"{UP}.weight"].view(torch.uint8)
        bits[0] = torch.tensor([0x80, 0x00] * 16)
        bits[1] = torch.tensor([0x38, 0xB8] * 16)  # 1 and -1
        tensors[f"{UP}.weight_scale_inv"][0] = 0.01
        tensors[f"{UP}.weight_scale_inv"][1] = 0.0

    source = make_fp8(tiny_llama, tmp_path / "model", edit=plant)
    out = tmp_path / "out"
    prune(source, output=out, method="emp-magnitude", targets=UP)
    bits = stored(out, f"{UP}.weight")
    assert list(bits[0]) == [0x80, 0x00] * 16
    assert list(bits[1]) == [0x38, 0xB8] * 16
    check_verified(out, source)


@pytest.mark.parametrize(
    "options", [{"group": "matrix"}, {"group": "all"}, {"order": 1.0, "method": "emp-magnitude"}]
)
def test_other_groups_and_orders(fp8: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    report = prune(fp8, output=tmp_path / "out", **{"method": "magnitude"} | options)
    if "group" in options:
        layers = report["matrices"]
        scores = {layer: np.abs(values_of(fp8, entry["tensor"])) for layer, entry in layers.items()}
        groups = [list(layers)] if options["group"] == "all" else [[layer] for layer in layers]
        for group in groups:
            flat = np.concatenate([scores[layer].reshape(-1) for layer in group])
            mask = oracle.keep(flat, flat.size - flat.size // 2)
            for layer in group:
                own = mask[: scores[layer].size].reshape(scores[layer].shape)
                mask = mask[scores[layer].size :]
                check_bits(fp8, tmp_path / "out", layers[layer]["tensor"], own)
    check_verified(tmp_path / "out", fp8)


def test_the_result_loads_as_fp8_with_its_zeros(fp8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = prune(fp8, output=out, method="emp-magnitude")
    dense, sparse = (
        AutoModelForCausalLM.from_pretrained(folder, device_map="cpu") for folder in (fp8, out)
    )
    removed = 0
    for name, weight in sparse.named_parameters():
        zero = (weight == 0) & (dense.get_parameter(name) != 0)
        removed += int(zero.sum())
        assert torch.equal(weight[~zero], dense.get_parameter(name)[~zero])
    assert 0 < removed <= report["targets"]["zeros"]
    assert reapply_mask(dense, out) == removed
    pack(out, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        out / "model.safetensors"
    ).read_bytes()


def test_a_loaded_model_has_its_scales(fp8: Path) -> None:
    """Without a GPU, transformers dequantises; the scales must not be left out."""
    loaded = load_model(fp8, "cpu").get_parameter(f"{UP}.weight").detach().float().numpy()
    np.testing.assert_allclose(loaded, values_of(fp8, f"{UP}.weight"), rtol=2**-7)


def test_norms_of_the_dequantised_model(fp8: Path, text: Path, tmp_path: Path) -> None:
    how = {
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
        "device_map": "cpu",
    }
    prune(fp8, output=tmp_path / "out", method="wanda", **how)
    norms = oracle.load_norms(tmp_path / "out/emp_llm/activations.safetensors")
    check_masks(fp8, tmp_path / "out", False, norms=norms)
    on_disk = calibrate(fp8, output=tmp_path / "disk.safetensors", **how | {"device_map": "disk"})
    for layer, norm in norms.items():
        other = on_disk.of(layer)
        np.testing.assert_allclose(other.numpy(), norm, rtol=1e-3)


def test_pruned_propagation(fp8: Path, text: Path, tmp_path: Path, places: list[str]) -> None:
    """The dequantised model stays in memory: transformers would write it to disk."""
    how = {"calibration": str(text), "samples": 4, "seqlen": 64, "check": False}
    for place in ("auto", "disk"):
        out = tmp_path / place
        prune(fp8, output=out, method="wanda", propagate="pruned", device_map=place, **how)
    assert places == ["auto", "disk"]
    one, other = (
        oracle.load_norms(tmp_path / place / "emp_llm/activations.safetensors") for place in places
    )
    for layer, norm in one.items():
        np.testing.assert_allclose(norm, other[layer], rtol=1e-3)


def _scale_of(shape: tuple[int, ...] | None, value: float = 1.0) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{UP}.weight_scale_inv"]
        if shape is not None:
            tensors[f"{UP}.weight_scale_inv"] = torch.full(shape, value)

    return edit


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 4] = 0x7F


BROKEN: dict[str, tuple[Edit, str]] = {
    "no scales": (
        _scale_of(None),
        r"up_proj\.weight is stored as FP8 without its scales "
        r".*weight_scale_inv.*original model",
    ),
    "scales of another shape": (
        _scale_of((2, 2)),
        r"weight_scale_inv is F32 \[2, 2\], which does not fit .*\[80, 32\]",
    ),
    "a scale that is NaN": (
        _scale_of((5, 2), float("nan")),
        r"weight_scale_inv holds NaN, infinity or a scale below zero",
    ),
    "a weight that is NaN": (_nan, r"up_proj\.weight holds NaN or infinity \(rows"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(tiny_llama: Path, tmp_path: Path, command: Run, case: str) -> None:
    edit, sentence = BROKEN[case]
    source = make_fp8(tiny_llama, tmp_path / "model", edit=edit)
    done = command(f"prune --method magnitude --model {source} --output {tmp_path}/out", code=2)
    assert re.search(sentence, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()
