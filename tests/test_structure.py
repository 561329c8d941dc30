"""The structure of models, from conventional names or from the model's class; incomplete
checkpoints; tables in blocks.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from conftest import Run
from oracle import tensors
from safetensors.torch import load_file, save_file

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture, conventional
from emp_llm.models.loading import build_skeleton
from emp_llm.models.modules import model_layers

CONVENTIONAL = {"llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"}
Models = Callable[[str], Path]


def edited(
    source: Path, folder: Path, config: dict[str, object] | None = None, without: str | None = None
) -> Path:
    """A copy of a model with other values in its config, or without a weight."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    if without is not None:
        stored = tensors(folder)[without]
        weights = load_file(stored.shard)
        del weights[without]
        save_file(weights, stored.shard, {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        del content["weight_map"][without]
        index.write_text(json.dumps(content))
    return folder


def by_class(folder: Path) -> Architecture:
    return Architecture.of_model(Checkpoint(folder), build_skeleton(folder))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_conventional_names_give_the_structure_of_the_class(models: Models, family: str) -> None:
    """The same layers in the same order, the same places, the same coverage."""
    checkpoint = Checkpoint(models(family))
    by_name = conventional(checkpoint)
    assert (by_name is not None) == (family in CONVENTIONAL)
    if by_name is None:
        return
    exact = by_class(models(family))
    assert by_name.layers == exact.layers
    weights = [layer.parameter for layer in exact.layers]
    assert [by_name.stored_names[name] for name in weights] == [
        exact.stored_names[name] for name in weights
    ]
    assert by_name.block_shapes == exact.block_shapes
    for targets in ("mlp", "attention", "all-linear"):
        assert by_name.select(targets) == exact.select(targets)
        assert by_name.coverage(by_name.select(targets)) == exact.coverage(exact.select(targets))


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64},
        {"intermediate_size": 40},
        {"num_hidden_layers": 3},
        {"vocab_size": None},
        {"auto_map": {"AutoModelForCausalLM": "model.Model"}},
        {"architectures": ["LlamaModel"]},
    ],
)
def test_a_config_that_does_not_fit_leaves_it_to_the_class(
    models: Models, tmp_path: Path, config: dict[str, object]
) -> None:
    assert conventional(Checkpoint(edited(models("llama"), tmp_path / "model", config))) is None


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "lm_head.weight"),
        ("gpt2", "transformer.h.0.ln_1.weight"),
    ],
)
def test_a_missing_weight_is_named(
    models: Models, tmp_path: Path, command: Run, family: str, name: str
) -> None:
    folder = edited(models(family), tmp_path / "model", without=name)
    done = command(
        "prune", "--model", folder, "--method", "magnitude", "--output", tmp_path / "out", code=2
    )
    assert name in done.stderr
    assert "1 weight of the model is missing" in done.stderr
    assert not (tmp_path / "out").exists()


def test_attention_of_half_a_t5_is_pruned_without_its_position_bias(
    tmp_path: Path, command: Run
) -> None:
    """transformers has no generating class for an encoder alone, so its layers are those of its
    names.
    """
    folder = tmp_path / "model"
    sizes = {
        "vocab_size": 256,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 4,
    }
    transformers.T5EncoderModel(transformers.T5Config(**sizes)).save_pretrained(folder)
    done = command(
        "prune",
        "--model",
        folder,
        "--method",
        "magnitude",
        "--targets",
        "attention",
        "--output",
        tmp_path / "out",
    )
    assert (
        "encoder-decoder class for T5EncoderModel. Its layers are derived from the names"
    ) in done.stderr
    after = load_file(tmp_path / "out" / "model.safetensors")
    zeros = {
        name.split(".")[-2]: int((tensor == 0).sum())
        for name, tensor in after.items()
        if "SelfAttention" in name
    }
    assert zeros == {"q": 512, "k": 512, "v": 512, "o": 512, "relative_attention_bias": 0}
    assert "targets: 4 of 6 matrices" in done.stdout


def test_an_mlp_is_no_state_space_model() -> None:
    """The class of Seed-OSS's MLP, SeedOssMLP, holds the letters of "ssm"."""
    config = transformers.SeedOssConfig(**tiny.GLU)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    kinds = {layer.leaf: layer.purpose for layer in model_layers(model)}
    assert (kinds["gate_proj"], kinds["down_proj"], kinds["q_proj"]) == ("mlp", "mlp", "attention")


def test_coverage_stays_within_the_blocks(models: Models, command: Run, tmp_path: Path) -> None:
    """Targets outside the decoder blocks are counted separately."""
    line = (
        "prune",
        "--model",
        models("llama"),
        "--method",
        "magnitude",
        "--targets",
        "lm_head",
        "--dry-run",
    )
    done = command(*line, "--output", tmp_path / "out")
    assert "0 of 14 matrices in blocks" in done.stdout
    assert "1 outside" in done.stdout


def test_weights_without_a_class_are_refused_where_a_forward_pass_is_needed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"layers.0.mlp.weight": torch.randn(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UserError, match=r"unheard-of|causal"):
        Architecture.of_checkpoint(Checkpoint(folder))
    assert (
        len(Architecture.of_checkpoint(Checkpoint(folder), names_suffice=True).select("mlp")) == 1
    )
    with pytest.raises(UserError, match=r"--blocks layers has no effect\. Leave it out"):
        Architecture.of_checkpoint(Checkpoint(folder), "layers", names_suffice=True)


def test_lists_of_targets_are_unions(models: Models) -> None:
    """Words for parts of a model stand in lists, beside names."""
    architecture = Architecture.of_checkpoint(Checkpoint(models("llama")))

    def names(*scope: Any) -> list[str]:
        return [target.name for target in architecture.select(*scope)]

    everything = names("all-linear")
    assert names("mlp,attention") == names(["attention", "mlp"]) == everything
    assert names("attention,up_proj", "q_proj") == [
        name for name in everything if name.endswith(("k_proj", "v_proj", "o_proj", "up_proj"))
    ]
    assert names("all-linear", "attention") == names("mlp")
    assert names("mlp,lm_head") == [*names("mlp"), "lm_head"]
