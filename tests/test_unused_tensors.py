"""Tensors of a checkpoint that transformers does not load: layers that predict a second token,
value and score heads.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from runs import check_verified
from safetensors.torch import load_file, save_file

from emp_llm import bench, evaluate, generate, heal, prune, verify
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture


def with_more(model: Path, folder: Path, place: str) -> Path:
    """A model whose first layer is stored once more, under another name; or with a head for
    scores.
    """
    shutil.copytree(model, folder)
    tensors = {
        name: each
        for path in folder.glob("*.safetensors")
        for name, each in load_file(path).items()
    }
    first = {name: each for name, each in tensors.items() if name.startswith("model.layers.0.")}
    more = {name.replace("model.layers.0.", place): each.clone() for name, each in first.items()}
    if place.endswith("inv_freq"):
        more = {place: torch.ones(8)}
    if place == "score.weight":
        more = {place: torch.ones(2, tensors["model.norm.weight"].numel())}
    save_file(more, folder / "second.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(more, "second.safetensors")
    index.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("structure", ["heads", "neurons", "both"])
@pytest.mark.parametrize(
    "place",
    ["model.layers.2.", "mtp.layers.0.", "model.mtp.layers.0.transformer_layer.", "mtp.block."],
)
def test_a_layer_that_predicts_a_second_token_is_not_cut(
    tiny_llama: Path, tmp_path: Path, place: str, structure: str
) -> None:
    """It would not fit the new config. With all shapes kept, it fits."""
    source = with_more(tiny_llama, tmp_path / "model", place)
    how = {"method": "magnitude", "sparsity": 0.5, "device_map": "cpu", "structure": structure}
    with pytest.raises(
        UserError,
        match=rf"transformers does not load {place}.*Add --keep-shapes, "
        r"or remove them first",
    ):
        prune(source, output=tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
    prune(source, output=tmp_path / "out", keep_shapes=True, **how)
    check_verified(tmp_path / "out", source)


def test_verify_compares_shapes_with_the_config(tiny_llama: Path, tmp_path: Path) -> None:
    """As an earlier version wrote it: the config is smaller, and a layer that transformers does
    not load is not.
    """
    prune(
        tiny_llama,
        output=tmp_path / "out",
        structure="neurons",
        method="magnitude",
        sparsity=0.5,
        width_multiple=8,
    )
    source = with_more(tiny_llama, tmp_path / "model", "mtp.layers.0.")
    more = load_file(source / "second.safetensors")
    path = next((tmp_path / "out").glob("*.safetensors"))
    save_file(load_file(path) | more, path, {"format": "pt"})
    index = tmp_path / "out" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(more, path.name)
    index.write_text(json.dumps(content))
    report = verify(tmp_path / "out", source=str(tiny_llama))
    assert any(
        line.startswith("mtp.layers.0.mlp.up_proj.weight: its shape")
        and "of no decoder block any more" in line
        for line in report.differences
    )


def test_a_model_without_a_head_for_tokens(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """A tied one would be judged by its embeddings."""
    source = with_more(tiny_llama, tmp_path / "model", "score.weight")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]})
    )
    says = "LlamaForSequenceClassification has no head for tokens, so it predicts none"
    with pytest.raises(UserError, match=says):
        evaluate(source, suite="demo", output=tmp_path / "results.json")
    with pytest.raises(UserError, match=says):
        generate(source, prompt="Once")
    with pytest.raises(UserError, match=says):
        bench(source, output=tmp_path / "bench.json")
    prune(source, output=tmp_path / "out", method="magnitude")
    check_verified(tmp_path / "out", source)
    with pytest.raises(
        UserError,
        match="learns the probabilities of tokens, and LlamaForSequenceClassification has no head",
    ):
        heal(
            tmp_path / "out",
            dense=str(source),
            calibration=str(text),
            samples=10,
            seqlen=32,
            output=tmp_path / "healed",
        )


def test_an_untied_reward_model_is_pruned(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """Its checkpoint has no head for tokens, and is complete."""
    source = tmp_path / "model"
    model = transformers.LlamaForSequenceClassification.from_pretrained(tiny_llama, num_labels=1)
    model.config.tie_word_embeddings = False
    model.save_pretrained(source)
    transformers.AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(source)
    for method in ("magnitude", "wanda", "sparsegpt"):
        how = (
            {} if method == "magnitude" else {"calibration": str(text), "samples": 4, "seqlen": 32}
        )
        prune(source, output=tmp_path / method, method=method, **how)
        check_verified(tmp_path / method, source)
    pruned = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "wanda")
    assert torch.equal(pruned.score.weight, model.score.weight)
    # Hidden states are compared, because the head for tokens would be random numbers.
    for structure in ("neurons", "heads", "layers"):
        method = "cosine" if structure == "layers" else "wanda"
        report = prune(
            source,
            output=tmp_path / structure,
            method=method,
            structure=structure,
            sparsity=0.5,
            **how_to_read(text),
        )
        assert 0 <= (report.structure.difference or 0) < 1e-4
    with pytest.raises(
        UserError,
        match=r"no head for tokens, so it predicts none. Use --method wanda",
    ):
        prune(
            source,
            output=tmp_path / "taylor",
            method="taylor",
            structure="heads",
            sparsity=0.5,
            **how_to_read(text),
        )
    with pytest.raises(
        UserError,
        match=r"no head for tokens, so it predicts none. Give a text that was written",
    ):
        prune(
            source,
            output=tmp_path / "self",
            method="wanda",
            calibration="self",
            samples=4,
            seqlen=32,
        )
    with pytest.raises(UserError, match="no head for tokens"):
        prune(source, output=tmp_path / "evaluated", method="magnitude", evaluate="demo")
    assert not any((tmp_path / name).exists() for name in ("taylor", "self", "evaluated"))


def how_to_read(text: Path) -> dict[str, object]:
    return {"calibration": str(text), "samples": 10, "seqlen": 32}


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "weights.safetensors"])
def test_a_model_with_an_adapter_is_refused(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    """Its shards can have any name."""
    source = with_more(tiny_llama, tmp_path / "model", "mtp.layers.0.")
    (source / "second.safetensors").rename(source / name)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("second.safetensors", name))
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="it holds a model and a PEFT adapter"):
        prune(source, output=tmp_path / "out", method="magnitude")


@pytest.mark.parametrize("family", ["gpt2", "llama-tied", "gemma2"])
def test_parameters_are_those_of_the_model(
    models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """Masks of old versions, and a tied head that is stored a second time, are not counted."""
    source = tmp_path / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(models(family))
    model.save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    if family == "gpt2":
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128) for layer in range(2)}
        tensors = {name.removeprefix("transformer."): each for name, each in tensors.items()}
        tensors |= masks
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if family == "gemma2":  # as published: its class ties them
        config = json.loads((source / "config.json").read_text())
        assert config.pop("tie_word_embeddings") is True
        (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    tied = Architecture.of_checkpoint(Checkpoint(source))
    assert tied.parameters == model.num_parameters() < tied.checkpoint.elements

    def parameters_of(out: Path) -> int:
        small = transformers.AutoModelForCausalLM.from_pretrained(out)
        return small.num_parameters()

    most = model.num_parameters() - 1000
    by = {"method": "magnitude", "parameters": most}
    report = prune(source, output=tmp_path / "neurons", structure="neurons", **by)
    assert report.structure.dense.parameters == model.num_parameters()
    assert report.structure.pruned.parameters == parameters_of(tmp_path / "neurons") <= most
    check_verified(tmp_path / "neurons", source)
    report = prune(source, output=tmp_path / "zeros", **by)
    assert report.targets.parameters == model.num_parameters()
    assert report.targets.parameters - report.targets.zeros <= most
    for structure in (None, "neurons"):
        with pytest.raises(UserError, match=f"the dense model has {most + 1000:,} parameters"):
            prune(
                source,
                output=tmp_path / "out",
                method="magnitude",
                structure=structure,
                parameters=most + 1000,
            )
