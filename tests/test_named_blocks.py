"""A model whose blocks must be named with --blocks: verify, masks and packed folders take the
name from the run's files.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tiny import FAMILIES, make_tokenizer, random_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from emp_llm import pack, prune, reapply_mask, verify
from emp_llm.common.errors import UserError
from emp_llm.models.masks import masks_in

BLOCKS = "model.language_model.layers"
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 whose vision tower has larger blocks than its language model."""
    folder = tmp_path_factory.mktemp("towers") / "gemma3"
    tokens = {
        "image_token_index": 250,
        "boi_token_index": 251,
        "eoi_token_index": 252,
        "mm_tokens_per_image": 4,
    }
    vision = VISION | {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=FAMILIES["gemma3"][1], vision_config=vision, **tokens
    )
    random_model(AutoModelForCausalLM, config, torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pruned(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "pruned"
    prune(model=source, output=folder, method="magnitude", blocks=BLOCKS)
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_the_manifest_records_the_name_and_verify_uses_it(source: Path, pruned: Path) -> None:
    assert (
        json.loads((pruned / "emp_manifest.json").read_text())["recipe"]["targets"]["blocks"]
        == BLOCKS
    )
    matrices = json.loads((pruned / "emp_report.json").read_text())["matrices"]
    assert {name.rpartition(".mlp")[0] for name in matrices} == {f"{BLOCKS}.0", f"{BLOCKS}.1"}

    found = verify(pruned, source=source)
    assert (found.differences, found.checked["targets"]) == ([], 6)
    tower = verify(pruned, source=source, blocks="model.vision_tower.encoder.layers")
    assert tower.differences, "other blocks were not pruned"
    with pytest.raises(UserError, match=r"--blocks 'layers' is not a list"):
        verify(pruned, source=source, blocks="layers")


@pytest.mark.parametrize("kind", ["checkpoint", "packed", "mask"])
def test_masks_use_it(source: Path, pruned: Path, tmp_path: Path, kind: str) -> None:
    folder = pruned if kind == "checkpoint" else tmp_path / kind
    if folder != pruned:
        pack(pruned, folder, mask_only=kind == "mask")
    model = load(source)
    wanted = load(pruned).state_dict()
    removed = json.loads((pruned / "emp_report.json").read_text())["targets"]["zeros"]
    assert reapply_mask(model, folder) == removed > 0
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert reapply_mask(load(source), folder, blocks=BLOCKS) == removed
    vision = masks_in(folder, model, targets="mlp", blocks="model.vision_tower.encoder.layers")
    assert len(vision) == 8
    assert vision.broken(model) == 0
