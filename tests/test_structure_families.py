"""Structured pruning of families whose configs say widths and layers in ways of their own."""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from emp_llm import prune, verify
from emp_llm.common.errors import UserError
from emp_llm.records.run_report import RunReport

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
TWO_KINDS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": MIXTURE | LATENT,
    "glm4_moe": MIXTURE,
    "lfm2": {"block_auto_adjust_ff_dim": True, "layer_types": ["conv", "full_attention"] * 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "recurrent_gemma": {
        "lru_width": 32,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "attention_window_size": 16,
    },
    "gemma4_text": {
        "global_head_dim": 8,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "layer_types": TWO_KINDS,
        "sliding_window": 16,
    },
}
FAMILIES["zamba2"] = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
}
FAMILIES["zamba2"] |= {
    "mamba_d_state": 8,
    "mamba_headdim": 16,
    "n_mamba_heads": 4,
    "attention_head_dim": 16,
}
FAMILIES["zamba2"] |= {"attention_hidden_size": 64, "use_mamba_kernels": False}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns the folder of a family's tiny model in float32, made at the first call."""

    @cache
    def call(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        config = transformers.AutoConfig.for_model(family, **COMMON | FAMILIES[family])
        model = tiny.random_model(transformers.AutoModelForCausalLM, config, torch.float32)
        model.save_pretrained(folder)
        tiny.make_tokenizer().save_pretrained(folder)
        return folder

    return call


def pruned(source: Path, output: Path, **how: Any) -> RunReport:
    report = prune(str(source), output=output, dtype="float32", device_map="cpu", quiet=True, **how)
    assert isinstance(report, RunReport)
    assert verify(output, source=str(source), quiet=True).differences == []
    return report


@pytest.mark.parametrize(
    ("family", "share", "changes"),
    [
        (
            "deepseek_v3",
            0.5,
            {"moe_intermediate_size": 32, "n_shared_experts": 4, "intermediate_size": 48},
        ),
        ("glm4_moe", 0.25, {"moe_intermediate_size": 48, "intermediate_size": 80}),
        ("lfm2", 0.5, {"intermediate_size": 128, "block_auto_adjust_ff_dim": False}),
        ("nemotron_h", 0.5, {"intermediate_size": 48}),
    ],
)
def test_neurons(
    make: Make, tmp_path: Path, family: str, share: float, changes: dict[str, Any]
) -> None:
    """The width of a shared expert is a number of routed ones, so it keeps as many neurons as
    that allows.
    """
    report = pruned(
        make(family),
        tmp_path / "out",
        structure="neurons",
        method="magnitude",
        sparsity=share,
        width_multiple=16,
    )
    assert report.structure is not None
    assert report.structure.difference is not None
    assert report.structure.difference < 1e-5
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (make(family), tmp_path / "out")
    )
    assert {name: after[name] for name in after if after[name] != before.get(name)} == changes


@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h"])
def test_layers(make: Make, tmp_path: Path, text: Path, family: str) -> None:
    """Where sparse layers are every second one, a list of the dense ones takes the place of the
    step.
    """
    how = {
        "calibration": str(text),
        "samples": 8,
        "seqlen": 32,
        "structure": "layers",
        "sparsity": 0.5,
    }
    report = pruned(make(family), tmp_path / "out", **how)
    assert report.structure is not None
    assert report.structure.difference == 0


def test_layers_by_a_pattern_are_refused_before_the_calibration(
    make: Make, tmp_path: Path, text: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"gives the kinds of its layers by a pattern.*Use "
        r"--structure neurons",
    ):
        prune(
            str(make("jamba")),
            output=tmp_path / "out",
            structure="layers",
            sparsity=0.5,
            calibration=str(text),
            samples=8,
            seqlen=32,
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("structure", ["layers", "neurons", "heads"])
def test_blocks_that_share_weights_are_refused_with_advice_that_helps(
    make: Make, tmp_path: Path, text: Path, structure: str
) -> None:
    how: dict[str, Any] = {"method": "magnitude", "sparsity": 0.5}
    if structure == "layers":
        how = {"sparsity": 0.5, "calibration": str(text), "samples": 8, "seqlen": 32}
    with pytest.raises(UserError, match=r"share it, so .*Leave out --structure to prune weights"):
        prune(str(make("zamba2")), output=tmp_path / "out", structure=structure, **how)
    assert os.listdir(tmp_path) == []
    pruned(make("zamba2"), tmp_path / "out", method="magnitude")


@pytest.mark.parametrize(
    ("family", "roles"),
    [("nemotron_h", {"up", "down"}), ("recurrent_gemma", {"gate", "up", "down"})],
)
def test_default_targets(make: Make, tmp_path: Path, family: str, roles: set[str]) -> None:
    """An MLP in a module named mixer, or in a class whose name begins with Recurrent, is an MLP."""
    report = pruned(make(family), tmp_path / "out", method="magnitude")
    assert {name.rpartition(".")[2].removesuffix("_proj") for name in report.matrices} == roles


def test_a_model_on_disk_whose_blocks_cannot_run_apart(
    make: Make, tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 4 is calibrated as a whole, and updates of its weights are refused."""
    how: dict[str, Any] = {
        "calibration": str(text),
        "samples": 8,
        "seqlen": 32,
        "method": "wanda",
        "dtype": "float32",
    }
    source = str(make("gemma4_text"))
    prune(source, output=tmp_path / "disk", device_map="disk", **how)
    assert "cannot be run one at a time: the model changes the hidden states" in caplog.text
    assert "It runs as a whole, and reads its weights for each batch" in caplog.text
    prune(source, output=tmp_path / "cpu", device_map="cpu", **how)
    for name in ("model.safetensors", "emp_llm/activations.safetensors"):
        assert (tmp_path / "disk" / name).read_bytes() == (
            tmp_path / "cpu" / name
        ).read_bytes() or name.startswith("emp")
    with pytest.raises(
        UserError,
        match=r"read the keys and values of earlier ones.*Leave out "
        r"--refit",
    ):
        prune(source, output=tmp_path / "refit", refit=True, **how)
