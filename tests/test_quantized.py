"""Quantised models: pruned, quantised, and both."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from emp_llm import calibrate, evaluate, prune
from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError
from emp_llm.models.loading import load_model
from emp_llm.models.placement import Quantization

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "scripts" / "demo" / "model"


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "pruned"
    prune(DEMO, output=folder, method="emp-magnitude")
    return folder


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that the demo model knows."""
    path = tmp_path_factory.mktemp("prose") / "text.txt"
    path.write_text((ROOT / "calibration" / "demo.txt").read_text()[:30_000])
    return path


def test_pruned_quantized_and_both(pruned: Path, prose: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    (tmp_path / "judge.txt").write_text(prose.read_text()[:5000])
    suite.write_text('[perplexity]\nfile = "judge.txt"\nseqlen = 128\n')
    output = tmp_path / "both.json"
    record = evaluate(
        pruned, suite=str(suite), baseline=str(DEMO), load_in_4bit=True, output=output
    )
    head = record.table.splitlines()[0]
    assert head.split("  ")[-1].strip() == "change"
    assert [word for word in head.split() if word != "change"] == [
        "model",
        "pruned",
        "model",
        "4bit",
        "pruned",
        "4bit",
    ]
    suffixes = ("-baseline", "-unquantised", "-baseline-4bit", "")
    files = [json.loads(output.with_name(f"both{suffix}.json").read_text()) for suffix in suffixes]
    bits = [
        file["made_by"]["quantization"] and file["made_by"]["quantization"]["bits"]
        for file in files
    ]
    assert bits == [None, None, "4bit", "4bit"]
    assert len({file["perplexity"]["perplexity"] for file in files}) == 4
    dense = files[0]["perplexity"]["perplexity"]
    for file in files[1:]:
        assert dense < file["perplexity"]["perplexity"] < 1.1 * dense
    again = evaluate(pruned, suite=str(suite), baseline=str(DEMO), load_in_4bit=True, output=output)
    assert again.table == record.table


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_quantizing_keeps_zeros(pruned: Path, bits: Quantization) -> None:
    from bitsandbytes.functional import dequantize_4bit

    plain = load_model(pruned, "cpu")
    quantized = load_model(pruned, "cpu", quantization=bits)
    for name, module in quantized.named_modules():
        if name.endswith("down_proj"):
            weight = module.weight
            values = (
                dequantize_4bit(weight.data, weight.quant_state) if bits == "4bit" else weight.data
            )
            zero = plain.get_submodule(name).weight == 0
            assert 0.2 < zero.double().mean() < 0.6
            assert torch.equal(values[zero], torch.zeros_like(values[zero]))
    assert quantized.lm_head.weight.dtype == torch.bfloat16


def test_wrong_quantization(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="--device-map disk: a model quantised to 4bit cannot lie on disk"
    ):
        evaluate(DEMO, suite="demo", load_in_4bit=True, device_map="disk")
    with pytest.raises(UserError, match="exclude each other"):
        evaluate(DEMO, suite="demo", load_in_8bit=True, load_in_4bit=True)
    with pytest.raises(UserError, match="--propagate pruned cannot set quantised weights to zero"):
        prune(DEMO, output=tmp_path / "other", load_in_4bit=True, propagate="pruned")
    monkeypatch.setattr("emp_llm.models.placement.find_spec", lambda _: None)
    with pytest.raises(
        UserError,
        match=r"need bitsandbytes. Install it: pip install bitsandbytes",
    ):
        evaluate(DEMO, suite="demo", load_in_8bit=True)


def test_quantized_calibration_prunes_the_original_weights(prose: Path, tmp_path: Path) -> None:
    how = {
        "calibration": str(prose),
        "samples": 4,
        "seqlen": 64,
        "device_map": "cpu",
    }
    report = prune(DEMO, output=tmp_path / "out", load_in_8bit=True, **how)
    assert report["calibration"]["quantization"]["format"] == "LLM.int8"
    norms = Activations.load(tmp_path / "out" / "emp_llm" / "activations.safetensors")
    plain = calibrate(DEMO, output=tmp_path / "plain.safetensors", **how)
    assert norms.statistics["norm"].keys() == plain.statistics["norm"].keys()
    close = [
        torch.allclose(norm, plain.statistics["norm"][name], rtol=0.2)
        for name, norm in norms.statistics["norm"].items()
    ]
    assert sum(close) > 0.8 * len(close)
    assert not all(
        torch.equal(norm, plain.statistics["norm"][name])
        for name, norm in norms.statistics["norm"].items()
    )
    dense = load_model(DEMO, "cpu")
    sparse = load_model(tmp_path / "out", "cpu")
    for name, weight in sparse.named_parameters():
        kept = weight != 0
        assert torch.equal(weight[kept], dense.get_parameter(name)[kept])


def test_quantized_calibration_of_experts(
    models: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """bitsandbytes leaves parameters of three dimensions as they are; their inputs come from
    quantised layers.
    """
    source = str(models("mixtral"))
    how = {
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
        "device_map": "cpu",
    }
    plain = calibrate(source, output=tmp_path / "plain.safetensors", **how)
    norms = calibrate(source, output=tmp_path / "norms.safetensors", load_in_8bit=True, **how)
    assert norms.about["quantization"]["bits"] == "8bit"
    assert norms.statistics["norm"].keys() == plain.statistics["norm"].keys()
    down = [norms.of(f"model.layers.1.mlp.experts.{expert}.w2") for expert in range(4)]
    assert all(norm is not None and norm.any() for norm in down)
    assert not all(
        torch.equal(norm, plain.statistics["norm"][name])
        for name, norm in norms.statistics["norm"].items()
    )
