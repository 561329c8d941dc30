"""Models that are trained after they were pruned: from the pruned folder, or the model in memory,
to `verify` and `push`.
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
from peft import LoraConfig, get_peft_model
from runs import check_verified
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from emp_llm import (
    Heal,
    Masks,
    ModelReport,
    Refit,
    SparsityCallback,
    heal_model,
    pack,
    prune,
    prune_model,
    push,
    reapply_mask,
    recipe_of,
    verify,
)
from emp_llm import report as page
from emp_llm.common.errors import UserError, format_bytes
from emp_llm.models.masks import masks_in
from emp_llm.records.run_report import read_report

Models = Callable[[str], Path]
TOKENS = torch.arange(64).repeat(4, 1) % 50
TRAINED = "its kept weights were trained after it was pruned"


def load(folder: Path, dtype: Any = "auto") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def tuned_by_lora(folder: Path, *modules: str) -> PreTrainedModel:
    """The model of a folder after two steps of LoRA, merged."""
    lora = get_peft_model(load(folder), LoraConfig(r=2, target_modules=list(modules)))
    optimizer = torch.optim.SGD(lora.parameters(), lr=1.0)
    for _ in range(2):
        lora(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    return lora.merge_and_unload()


def save(model: PreTrainedModel, source: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def card_of(folder: Path) -> str:
    card = push(folder, "me/name", dry_run=True).card
    assert card is not None
    return card


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_from_prune_by_lora_to_push(
    models: Models, pruned: Callable[[str], Path], command: Run, tmp_path: Path, family: str
) -> None:
    source = models(family)
    folder = pruned(family)
    out = tmp_path / "out"
    modules = ("c_fc", "c_attn") if family == "gpt2" else ("q_proj", "v_proj")
    if family == "llama":
        modules = ("up_proj", "q_proj")
    model = tuned_by_lora(folder, *modules)
    assert (reapply_mask(model, folder) > 0) == (family != "mixtral")  # its experts are no modules
    save(model, source, out)
    refused = command(f"push --dry-run {out} me/name", code=2)
    assert "ModelReport.load(PRUNED).save(FOLDER)" in refused.stderr
    done = command(f"verify {out} --masks {folder}")
    assert re.fullmatch(r"0 differences; checked \d+ tensors, \d+ targets\.\n", done.stdout)

    ModelReport.load(folder).save(out)
    done = command(f"verify {out} --source {source}")
    assert TRAINED in done.stderr
    assert re.search(r"0 differences; checked .* \d+ targets", done.stdout)
    assert command(f"verify {out} --masks {folder}").stdout.startswith("0 differences")
    report = read_report(out)
    before = read_report(folder)
    assert (report.trained, report.matrices.keys()) == (True, before.matrices.keys())
    shown = command(f"push --dry-run {out} me/name").stdout
    assert card_of(out) in shown
    assert "Then it was fine-tuned. The removed weights are still zero." in shown
    assert "Its other weights may differ from those of the base model" in shown
    assert "retraining" not in shown
    assert "are those of the base model" not in shown
    assert reapply_mask(load(source), out) == before.targets.zeros
    page([out], output=tmp_path / "page", no_plots=True)
    assert "trained since" in (tmp_path / "page" / "report.md").read_text()
    with pytest.raises(UserError, match="its kept weights were fitted, healed or trained"):
        pack(out, tmp_path / "mask", mask_only=True)


def test_a_broken_zero_is_found(
    tiny_llama: Path, pruned_llama: Path, command: Run, tmp_path: Path
) -> None:
    folder = pruned_llama
    out = tmp_path / "out"
    save(tuned_by_lora(folder, "up_proj"), folder, out)
    done = command(f"verify {out} --masks {folder}", code=1)
    assert re.search(r"layers\.1\.mlp\.up_proj: [\d,]+ removed weights are not zero", done.stdout)
    with pytest.raises(UserError, match="reapply_mask sets its removed weights to zero again"):
        ModelReport.load(folder).save(out)
    assert not (out / "emp_report.json").exists()
    model = tuned_by_lora(folder, "up_proj")
    reapply_mask(model, folder)
    save(model, folder, out)
    ModelReport.load(folder).save(out)
    name = "model.layers.0.mlp.up_proj.weight"
    place = oracle.tensors(out)[name]
    tensors = load_file(place.shard)
    at = tuple(np.argwhere(tensors[name].float().numpy() == 0)[0])
    for value, words in ((-0.0, "is -0.0, whose bits are not zero"), (1.0, "is not zero")):
        tensors[name][at] = value
        save_file(tensors, place.shard, {"format": "pt"})
        found = verify(out, masks=folder).differences
        assert found[-1] == f"model.layers.0.mlp.up_proj: 1 removed weight {words}."
    found = verify(out, source=str(tiny_llama)).differences
    assert "model.layers.0.mlp.up_proj: 1 weight not as the recipe decides." in found


def test_masks_of_another_model_and_no_masks(
    tiny_llama: Path, pruned: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = pruned("llama")
    assert verify(folder, masks=folder).differences == []
    pack(folder, tmp_path / "packed")
    assert verify(folder, masks=tmp_path / "packed").differences == []
    assert verify(tiny_llama, masks=folder).checked["targets"] == 6
    assert len(verify(tiny_llama, masks=folder).differences) == 6
    assert verify(pruned("gpt2"), masks=folder).differences != []
    with pytest.raises(UserError, match=r"no emp_report\.json in it"):
        verify(folder, masks=tiny_llama)
    with pytest.raises(UserError, match=r"no emp_manifest\.json in it"):
        verify(tiny_llama, masks=folder, source=str(tiny_llama))


def tune(model: PreTrainedModel, callback: SparsityCallback, folder: Path) -> None:
    """Two steps of transformers' Trainer."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    examples = [{"input_ids": row, "labels": row} for row in TOKENS]
    Trainer(model, arguments, train_dataset=examples, callbacks=[callback]).train()


@pytest.mark.parametrize("way", ["trainer", "heal_model"])
def test_a_model_in_memory_that_is_trained(
    tiny_llama: Path, text: Path, command: Run, tmp_path: Path, way: str
) -> None:
    source = tiny_llama
    out = tmp_path / "out"
    model = load(source, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    report = prune_model(model, recipe_of(), str(text), tokenizer, samples=4, seqlen=64)
    assert report.record.check.text == text.name
    if way == "trainer":
        tune(model, SparsityCallback(report.masks), tmp_path / "run")
    else:
        dense = load(source, torch.float32)
        heal_model(
            model, dense, str(text), tokenizer, masks=report.masks, steps=2, samples=32, seqlen=32
        )
    save(model.to(torch.bfloat16), source, out)
    report.save(out)
    stored = read_report(out)
    assert (stored.trained, stored.check) == (True, None)
    assert stored.unchecked == "it was trained since; use emp-llm evaluate"
    done = command(f"verify {out} --source {source}")
    assert TRAINED in done.stderr
    card = card_of(out)
    assert "Then it was fine-tuned." in card
    assert "has not been evaluated on a text or benchmark since it was fine-tuned" in card
    assert json.loads((out / "emp_report.json").read_text())["trained"] is True


def test_healed_in_memory(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """Healing belongs to the run: what is saved is as it was made."""
    source = tiny_llama
    model = load(source)
    recipe = recipe_of("emp-magnitude").but(heal=Heal(steps=2))
    report = prune_model(model, recipe, str(text), source, samples=32, seqlen=32)
    save(model, source, tmp_path / "out")
    report.save(tmp_path / "out")
    assert not read_report(tmp_path / "out").trained
    check_verified(tmp_path / "out", source)
    card = card_of(tmp_path / "out")
    assert "Then it was trained: healed by self-distillation from the dense model, 2 steps" in card
    assert "- healed: 2 steps, 256 tokens; divergence" in card
    page([tmp_path / "out"], output=tmp_path / "page", no_plots=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("refit", [False, True])
def test_a_model_in_memory_that_is_not_trained(
    tiny_llama: Path, text: Path, tmp_path: Path, dtype: torch.dtype, refit: bool
) -> None:
    """Also if it was converted to another dtype."""
    source = tiny_llama
    model = load(source, torch.float32 if not refit else "auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    recipe = recipe_of().but(update=Refit()) if refit else recipe_of()
    report = prune_model(model, recipe, str(text), tokenizer, samples=4, seqlen=64)
    save(model.to(dtype), source, tmp_path / "out")
    report.save(tmp_path / "out")
    stored = read_report(tmp_path / "out")
    assert not stored.trained
    size = sum(tensor.end - tensor.start for tensor in oracle.tensors(tmp_path / "out").values())
    if dtype == (torch.bfloat16 if refit else torch.float32):
        assert stored.sizes is not None
        assert stored.sizes.dense == size
    else:
        assert stored.sizes is None  # those of another dtype would be untrue
    card = card_of(tmp_path / "out")
    assert "All other weights are those of the base model." in card
    assert f"Perplexity on text of {text.name} that was held out" in card.replace("\\", "")
    assert "as `save_pretrained` writes them" in card


@pytest.mark.parametrize("options", [{}, {"keep_shapes": True}])
def test_without_neurons(
    tiny_llama: Path, command: Run, tmp_path: Path, options: dict[str, Any]
) -> None:
    source = tiny_llama
    folder = tmp_path / "pruned"
    prune(
        model=source,
        output=folder,
        structure="neurons",
        method="magnitude",
        sparsity=0.3,
        **options,
    )
    model = tuned_by_lora(folder, "q_proj", "down_proj")
    if options:
        assert reapply_mask(model, folder) > 0
    save(model.float(), source, tmp_path / "out")
    ModelReport.load(folder).save(tmp_path / "out")
    done = command(f"verify {tmp_path}/out --source {source}")
    assert TRAINED in done.stderr
    assert "a comparison checks what was removed." in done.stderr
    assert done.stdout.startswith("0 differences")
    card = card_of(tmp_path / "out")
    assert "Then it was fine-tuned." in card
    if not options:
        size = sum(
            tensor.end - tensor.start for tensor in oracle.tensors(tmp_path / "out").values()
        )
        assert re.search(rf"- weights: [^>]*-\\?> {re.escape(format_bytes(size))} \(", card)
    if options:
        assert verify(tmp_path / "out", masks=folder).differences == []
    else:
        with pytest.raises(UserError, match="lacks whole neurons, and has no zeros"):
            verify(tmp_path / "out", masks=folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["intermediate_size"] += 1
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    found = verify(tmp_path / "out", source=str(source)).differences
    assert len(found) > 1


def test_the_folder_that_it_was_pruned_to_must_be_as_it_was(
    pruned_llama: Path, tmp_path: Path
) -> None:
    """Nobody takes trained weights for the pruned ones."""
    folder = Path(shutil.copytree(pruned_llama, tmp_path / "pruned"))
    model = tuned_by_lora(folder, "q_proj")
    model.save_pretrained(folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="its weights are not those of its emp_manifest"):
        ModelReport.load(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_neox", "qwen3_moe"])
def test_masks_of_a_folder(pruned: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    folder = pruned(family)
    model = load(folder)
    masks = Masks.load(folder)
    expected = masks_in(folder, model)
    assert masks.keys() == expected.keys()
    assert all(torch.equal(masks[name], expected[name]) for name in masks)
    assert masks.broken(model) == 0
    pack(folder, tmp_path / "packed", mask_only=True)
    packed = Masks.load(str(tmp_path / "packed"))
    assert all(torch.equal(packed[name], masks[name]) for name in masks)


def test_masks_of_a_folder_without_a_report(
    tiny_llama: Path, pruned: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"its targets are unknown. Name them"):
        Masks.load(tiny_llama)
    assert len(Masks.load(tiny_llama, targets="up_proj")) == 2
    with pytest.raises(UserError, match="no such file of masks, and no pruned folder"):
        Masks.load(tmp_path / "none")
