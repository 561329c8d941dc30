"""The memory of a healing: arithmetic on the sizes of models that people have, and plans."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.healing import planning
from emp_llm.healing.planning import HealingPlan, Sizes, plan_healing
from emp_llm.models.architecture import Architecture
from emp_llm.models.loading import build_skeleton
from emp_llm.options.recipe import Heal, Recipe, Wanda

Models = Callable[[str], Path]
# Free bytes of cards with 80 and 24 GB, beside a context.
GB80 = int(0.92 * 84.4e9)
GB24 = int(0.92 * 24.9e9)
_SHAPES: dict[str, dict[str, Any]] = {
    "LLaMA-3.2-1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "tie_word_embeddings": True},
    "LLaMA-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32},
    "LLaMA-3-70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64},
}


def sizes_of(name: str, samples: int = 128) -> Sizes:
    """Of all linear layers of a model of that shape, by its class and no weights; 2048 tokens."""
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, **_SHAPES[name])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    block = model.model.layers[0]
    linear = [p.numel() for p in block.parameters() if p.dim() == 2]
    moving = config.num_hidden_layers * sum(linear)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Sizes(
        config.to_dict(),
        config.num_hidden_layers,
        moving,
        total - moving,
        max(linear),
        2 * sum(parameter.numel() for parameter in block.parameters()),
        sum(linear),
        2048,
        samples,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("name", "room", "expected"),
    [
        ("LLaMA-3.2-1B", GB24, (1, False)),
        ("LLaMA-3.2-1B", GB80, (4, False)),
        ("LLaMA-3-8B", GB80, (4, True)),
        ("LLaMA-3-8B", GB24, None),
        ("LLaMA-3-70B", GB80, None),
    ],
)
def test_what_heals_whole(name: str, room: int, expected: tuple[int, bool] | None) -> None:
    plan = planning._whole(sizes_of(name), "auto", {"cuda:0": room}, [4, 2, 1], "auto")
    assert (plan and (plan.at_once, plan.checkpointing)) == expected


def test_a_model_of_70_billion_weights_is_spread_over_eight_cards() -> None:
    free = {f"cuda:{number}": GB80 for number in range(8)}
    plan = planning._whole(sizes_of("LLaMA-3-70B"), "auto", free, [4, 2, 1], "auto")
    assert isinstance(plan, HealingPlan)
    assert plan.device_map == "balanced"


@pytest.mark.parametrize(("name", "room"), [("LLaMA-3-8B", GB24), ("LLaMA-3-70B", GB80)])
def test_what_heals_by_blocks(name: str, room: int) -> None:
    sizes = sizes_of(name)
    assert sum(sizes.by_blocks(4).values()) + sizes.both_hidden_states < room


def test_the_sizes_of_a_checkpoint(models: Models) -> None:
    """Every weight is counted once, and experts of a layer are one parameter."""
    for family in ("llama", "gpt2", "mixtral"):
        checkpoint = Checkpoint(models(family))
        architecture = Architecture.of_checkpoint(checkpoint, None, False)
        targets = architecture.select("all-linear")
        sizes = Sizes.of(checkpoint, targets, Heal(), 32, 10, True)
        assert sizes.moving == sum(target.matrix.numel for target in targets)
        assert sizes.moving + sizes.others == checkpoint.elements
        parameters = dict(build_skeleton(models(family)).named_parameters())
        moving = {target.layer.parameter for target in targets}
        assert sizes.largest == max(parameters[name].numel() for name in moving)
        assert sizes.layers * sizes.of_block == sizes.moving
        config = transformers.AutoConfig.from_pretrained(models(family))
        assert (sizes.layers, sizes.width) == (config.num_hidden_layers, config.hidden_size)


def test_soft_capped_scores_are_kept() -> None:
    """As torch keeps them for gradients: each key of a sequence takes bytes of each token."""
    shape = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma2Config(num_hidden_layers=1, **shape)
    )
    measured = []
    planned = []
    for length in (128, 256):
        kept = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            held = model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        measured.append(sum(kept.values()) / length)
        planned.append(
            Sizes(model.config.to_dict(), 1, 1, 1, 1, 1, 1, length, 1, True, False).token
        )
        del held
    assert planned[1] - planned[0] == pytest.approx(measured[1] - measured[0], rel=0.1)


def plan(model: Path, heal: Heal | None = None, **how: Any) -> HealingPlan:
    """For all linear layers, 32 tokens."""
    checkpoint = Checkpoint(model)
    targets = Architecture.of_checkpoint(checkpoint, None, False).select("all-linear")
    options = {"device_map": "cpu", "length": 32, "samples": 10}
    return plan_healing(checkpoint, targets, Recipe(score=Wanda()), heal or Heal(), **options | how)


def test_a_plan_by_the_free_memory(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10**12
    monkeypatch.setattr(planning, "available_memory", lambda: free)
    whole = plan(models("llama"))
    assert (whole.by, whole.device_map, whole.at_once, whole.checkpointing) == (
        "model",
        "cpu",
        1,
        False,
    )
    free = whole.needed - 1
    twice = plan(models("llama"))
    assert (twice.by, twice.checkpointing) == ("model", True)
    assert twice.needed < whole.needed
    free = twice.needed - 1
    by_blocks = plan(models("llama"))
    assert (by_blocks.by, by_blocks.device_map, by_blocks.device) == ("blocks", "disk", "cpu")
    for match, how in {
        "--heal-weights all needs the whole model": {"heal": Heal(weights="all")},
        r"takes .* and cpu has .*; block by block it takes .*Lower --seqlen": {"length": 2048},
    }.items():
        with pytest.raises(UserError, match=match):
            plan(models("llama"), **how)  # type: ignore[arg-type]
    # What has begun goes on as it began, or not at all.
    with pytest.raises(UserError, match=r"whole model takes .* has begun .*--overwrite"):
        plan(models("llama"), kept=replace(whole, at_once=1))
    kept = replace(by_blocks, at_once=2)
    free = 10**12
    assert plan(models("llama"), kept=kept).at_once == 2
    assert plan(models("llama"), kept=kept).by == "blocks"
    on_disk = plan(models("llama"), device_map="disk")
    assert (on_disk.by, on_disk.at_once) == ("blocks", 4)
    assert plan(models("llama"), device_map="disk", batch_size=2).at_once == 2
