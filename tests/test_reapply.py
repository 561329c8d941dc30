"""Masks that are applied to a model again after merging adapters, and kept through training,
however weights are stored.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import finetune_sparse
import pytest
import torch
from runs import check_verified
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from emp_llm import SparsityCallback, pack, prune, reapply_mask
from emp_llm.common.errors import UserError
from emp_llm.models.masks import masks_in

Models = Callable[[str], Path]
FAMILIES = ("llama", "gpt2", "mixtral", "gpt_neox")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def shifted(folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model whose parameters have all changed, as by an optimizer; and their old values."""
    model = load(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model, before


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "checkpoint") for family in FAMILIES),
        ("gpt2", "mask"),
        ("mixtral", "packed, zstd"),
    ],
)
def test_exactly_the_removed_weights_are_zero_again(
    pruned: Callable[[str], Path], tmp_path: Path, family: str, kind: str
) -> None:
    folder = pruned(family)
    if kind != "checkpoint":
        folder = tmp_path / "packed"
        pack(pruned(family), folder, zstd="zstd" in kind, mask_only="mask" in kind)
    model, before = shifted(pruned(family))
    removed = json.loads((pruned(family) / "emp_report.json").read_text())["targets"]["zeros"]
    assert reapply_mask(model, folder) == removed > 0
    zeros = 0
    for name, parameter in model.named_parameters():
        expected = before[name] + 1
        if (
            re.search(r"mlp", name)
            and parameter.dim() > 1
            and "router" not in name
            and not name.endswith("mlp.gate.weight")
        ):
            expected[before[name] == 0] = 0
            zeros += int((before[name] == 0).sum())
        assert torch.equal(parameter, expected), name
    assert zeros == removed
    assert reapply_mask(model, folder) == 0


def test_targets_may_be_named_and_must_be_without_a_report(
    pruned_llama: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(pruned_llama, tmp_path / "bare")
    (bare / "emp_report.json").unlink()
    model, _ = shifted(bare)
    with pytest.raises(UserError, match=r"emp_report\.json"):
        reapply_mask(model, bare)
    assert list(masks_in(bare, model, targets="up_proj")) == [
        f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)
    ]
    assert reapply_mask(model, bare, targets="up_proj") > 0


def test_models_that_cannot_be_masked_are_refused(
    pruned: Callable[[str], Path], models: Models, tmp_path: Path
) -> None:
    model = load(pruned("llama"))
    with pytest.raises(UserError, match="no such model folder"):
        reapply_mask(model, tmp_path / "none")
    with pytest.raises(UserError):
        reapply_mask(model, pruned("gpt2"))
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(UserError, match=r"on meta.*without quantisation, offloading"):
        reapply_mask(meta, pruned("llama"))
    wrapped = load(pruned("llama"))
    wrapped.model.layers[0].mlp.up_proj = Adapted(wrapped.model.layers[0].mlp.up_proj)
    with pytest.raises(
        UserError,
        match=r"Merge them first: reapply_mask\(model.merge_and_unload\(\), DIR\)",
    ):
        reapply_mask(wrapped, pruned("llama"))
    whole = wrapped.model.layers[0].mlp.up_proj
    wrapped.model.layers[0].mlp.up_proj = whole.merged()
    assert reapply_mask(wrapped, pruned("llama")) > 0
    assert torch.equal(
        wrapped.model.layers[0].mlp.up_proj.weight == 0,
        model.model.layers[0].mlp.up_proj.weight == 0,
    )


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, as PEFT wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base_layer.out_features, bias=False)

    def merged(self) -> nn.Linear:
        self.base_layer.weight.data += self.lora_b.weight.data @ self.lora_a.weight.data
        return self.base_layer


def test_training_keeps_zeros_and_changes_everything_else(
    pruned: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of a mixture, and in the checkpoints of the training too."""
    folder = pruned("qwen3_moe")
    tokens = torch.arange(64).repeat(8, 1) % 50
    start = load(folder)
    model = load(folder)
    how = {
        "max_steps": 4,
        "learning_rate": 3e-3,
        "save_strategy": "steps",
        "save_steps": 2,
        "use_cpu": True,
    }
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), report_to=[], disable_tqdm=True, **how
    )
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(model, arguments, train_dataset=examples, callbacks=[SparsityCallback(folder)]).train()
    masks = masks_in(folder, start)
    assert masks.broken(model) == masks.broken(load(tmp_path / "run" / "checkpoint-2")) == 0
    updated = [
        (a != b).float().mean() for a, b in zip(model.parameters(), start.parameters(), strict=True)
    ]
    assert sum(share > 0.5 for share in updated) > len(updated) / 2


def test_the_example_script_works_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part.txt").write_text(
        (finetune_sparse.ROOT / "calibration" / "demo.txt").read_text()[:30_000]
    )
    finetune_sparse.main(
        ["--steps", "6", "--text", str(tmp_path / "part.txt"), "--output", str(tmp_path / "tuned")]
    )
    rows = {
        line[:26].strip(): line[26:].split() for line in capsys.readouterr().out.splitlines()[2:]
    }
    assert rows["pruned"][1] == rows["tuned, with the callback"][1] == "0"
    assert rows["tuned, without"][1] != "0"
    assert float(rows["tuned, with the callback"][0]) < float(rows["pruned"][0]) - 0.05
    demo = finetune_sparse.ROOT / "scripts" / "demo" / "model"
    prune(model=demo, output=tmp_path / "pruned", method="emp-magnitude", beta=0.6)
    assert reapply_mask(load(tmp_path / "tuned", torch.bfloat16), tmp_path / "pruned") == 0
    check_verified(tmp_path / "tuned", demo)
    assert {
        weight.dtype for weight in load_file(tmp_path / "tuned" / "model.safetensors").values()
    } == {torch.bfloat16}
