"""Rotation: the function of a model stays, its weights matter less evenly, and pruning costs
less.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from emp_llm import heal, measure, prune, prune_model, recipe_of, rotate, rotate_model, verify
from emp_llm.common.errors import UserError
from emp_llm.records.rotation import RotationRecord
from emp_llm.rotation import rotation

Models = Callable[[str], Path]
Run = Callable[..., "CompletedProcess[str]"]
GLU = tiny.GLU
# With biases, gates, fused matrices, norms of heads, multipliers, mixtures, latent heads, and a
# hybrid.
KEPT = {
    name: tiny.FAMILIES[name]
    for name in ("llama-tied", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")
} | {
    "gemma": ("GemmaConfig", GLU | {"head_dim": 8}),
    "granite": ("GraniteConfig", GLU | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        GLU
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        GLU
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        }
        | {
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "qk_nope_head_dim": 4,
        }
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        GLU
        | {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        }
        | {
            "shared_expert_intermediate_size": 24,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
}
REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "gpt2": (tiny.FAMILIES["gpt2"], "LayerNorm is no RMSNorm"),
    "opt": (tiny.FAMILIES["opt"], "LayerNorm is no RMSNorm"),
    "gemma2": (
        tiny.FAMILIES["gemma2"],
        "has 4 norms, and not one in front of the attention and one in front of the MLP",
    ),
    "olmo": (("OlmoConfig", GLU), "OlmoLayerNorm has no weights"),
    "olmo2": (("Olmo2Config", GLU), "its logits differ by"),  # norms behind the layers
    "gpt_oss": (
        ("GptOssConfig", GLU | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "mlp.experts.down_proj_bias is not the weight of a linear layer",
    ),
    "bloom": (
        ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256}),
        "one norm in front of its head",
    ),
}


def model_of(family: tuple[str, dict[str, Any]], dtype: torch.dtype = torch.float32) -> Any:
    """A random model whose norms and biases are not one and zero."""
    config = getattr(transformers, family[0])(
        **(family[1] | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    )
    model = tiny.random_model(AutoModelForCausalLM, config, dtype).eval()
    made = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "bias" in name:
            parameter.data += (0.3 * torch.randn(parameter.shape, generator=made)).to(dtype)
        else:
            parameter.data *= 3
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 250, (6, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def given(text: Path) -> dict[str, Any]:
    return {"calibration": str(text), "samples": 10, "seqlen": 32, "device_map": "cpu"}


@pytest.mark.parametrize("family", KEPT)
@torch.no_grad()
def test_the_function_stays(family: str, ids: torch.Tensor) -> None:
    """With the order of the columns for 2:4, which moves neurons too; the logits of all tokens
    agree to rounding.
    """
    model = model_of(KEPT[family])
    before = model(ids).logits
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    record = rotate_model(model, ids, steps=3, pattern="2:4")
    after = model(ids).logits
    assert ((after - before).norm() / before.norm()).item() < 1e-4
    assert record.difference < 1e-4
    moved = [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, weights.get(name, parameter))
    ]
    assert len(moved) > len(weights) / 2
    assert 0 < record.n_eff_before < 1
    assert record.n_eff_after != record.n_eff_before


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused(family: str, ids: torch.Tensor) -> None:
    """And a model that its structure refuses is as it was."""
    made_of, says = REFUSED[family]
    model = model_of(made_of, torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match="this model cannot be rotated: ") as refused:
        rotate_model(model, ids, steps=0)
    assert says in str(refused.value)
    after = dict(model.named_parameters())
    assert {parameter.dtype for parameter in after.values()} == {torch.bfloat16}
    assert "logits" in says or all(
        torch.equal(after[name], parameter) for name, parameter in before.items()
    )


def _large(model: Any) -> None:
    """A turn can make a weight of the sum of others."""
    model.model.layers[0].mlp.down_proj.weight.data.fill_(60000)


def _infinite(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = float("inf")


def _huge(model: Any) -> None:
    """Its logits are finite, for the norm in front of the head divides; the squares of its
    inputs are not.
    """
    model.model.layers[0].mlp.down_proj.weight.data.fill_(1e25)


@pytest.mark.parametrize(
    ("dtype", "damage", "says"),
    [
        (torch.float16, _large, "is beyond the range of torch.float16. Save it in bfloat16 first"),
        (torch.float32, _infinite, "up_proj.weight holds NaN or infinite values"),
        (torch.bfloat16, _huge, "infinite|not finite|logits differ"),
    ],
)
def test_what_is_written_is_finite(
    ids: torch.Tensor, dtype: torch.dtype, damage: Callable[[Any], None], says: str
) -> None:
    model = model_of(KEPT["mistral"], dtype)
    damage(model)
    with pytest.raises(UserError, match=f"this model cannot be rotated: .*({says})"):
        rotate_model(model, ids, steps=1)


def test_quantised_models_are_refused(models: Models, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(models("llama"))
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match="its weights are quantised"):
        rotate_model(model, ids)


@pytest.fixture(scope="module")
def rotated(
    models: Models, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RotationRecord]:
    """A tied model of several shards in bfloat16, turned by the command."""
    folder = tmp_path_factory.mktemp("rotated") / "model"
    return folder, rotate(models("llama-tied"), output=folder, steps=40, **given).record


def test_the_folder_is_a_checkpoint_of_the_same_class(
    models: Models, rotated: tuple[Path, RotationRecord], ids: torch.Tensor
) -> None:
    source, (folder, record) = models("llama-tied"), rotated
    assert {path.name for path in source.glob("*.json")} - {"model.safetensors.index.json"} <= {
        path.name for path in folder.iterdir()
    }
    config, before = (json.loads((model / "config.json").read_text()) for model in (folder, source))
    assert not config.pop("tie_word_embeddings")
    assert config == {
        name: value for name, value in before.items() if name != "tie_word_embeddings"
    }
    stored = load_file(folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    dense, turned = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (source, folder)
    )
    assert record.parameters_after - record.parameters_before == 256 * 32
    assert turned.num_parameters() == record.parameters_after
    with torch.no_grad():
        one, other = (model(ids).logits.log_softmax(-1) for model in (dense, turned))
    # of bfloat16.
    assert (
        torch.nn.functional.kl_div(other, one, log_target=True, reduction="none").sum(-1).mean()
        < 1e-3
    )
    assert json.loads((folder / "emp_llm" / "rotation.json").read_text())["source"]["tokens"] == 320


def test_n_eff_is_that_of_measure(
    models: Models, rotated: tuple[Path, RotationRecord], given: dict[str, Any], tmp_path: Path
) -> None:
    """Measured by the command from the folders, a mean over all rows; and a turn lowers it."""
    for folder, claimed in (
        (models("llama-tied"), rotated[1].n_eff_before),
        (rotated[0], rotated[1].n_eff_after),
    ):
        measured = measure(
            folder,
            targets="all-linear",
            criteria="wanda",
            output=tmp_path / f"{folder.name}.json",
            **given,
        )
        entries = measured.measures[0].matrices.values()
        mean = sum(entry.rows * entry.n_eff_mean / entry.columns for entry in entries) / sum(
            entry.rows for entry in entries
        )
        assert math.isclose(mean, claimed, rel_tol=5e-3)
    assert rotated[1].n_eff_after < 0.95 * rotated[1].n_eff_before


def test_it_is_pruned_healed_and_verified_like_any_other(
    rotated: tuple[Path, RotationRecord], given: dict[str, Any], tmp_path: Path
) -> None:
    prune(
        rotated[0],
        method="wanda",
        sparsity=0.5,
        targets="all-linear",
        output=tmp_path / "pruned",
        **given,
    )
    assert not verify(tmp_path / "pruned", source=str(rotated[0])).differences
    heal(
        tmp_path / "pruned",
        dense=str(rotated[0]),
        heal_steps=2,
        output=tmp_path / "healed",
        **given,
    )
    assert not verify(tmp_path / "healed", source=str(rotated[0])).differences


def test_a_turn_that_gains_nothing_warns(
    rotated: tuple[Path, RotationRecord],
    given: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The eigenvectors are worse than what a search has found."""
    again = rotate(str(rotated[0]), output=tmp_path / "again", steps=0, **given).record
    assert again.n_eff_after > again.n_eff_before
    assert f"N_eff/N is not lower than before; prune {rotated[0]} as it is" in caplog.text


def test_a_prune_by_beta_warns(
    models: Models,
    rotated: tuple[Path, RotationRecord],
    given: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = []
    for number, (model, how) in enumerate(
        [(rotated[0], {}), (rotated[0], {"sparsity": 0.5}), (models("llama-tied"), {})]
    ):
        caplog.clear()
        prune(model, output=tmp_path / str(number), **given | how)
        said.append(
            any(
                "is rotated, where beta = 1 removes too much" in record.getMessage()
                for record in caplog.records
            )
        )
    assert said == [True, False, False]


def test_the_same_seed_gives_the_same_bytes(
    models: Models, given: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        rotate(models("llama"), output=tmp_path / name, steps=2, pattern="2:4", **given)
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_the_search_lowers_n_eff(ids: torch.Tensor) -> None:
    """From the eigenvectors on, more steps find less."""
    means = [
        rotate_model(model_of(KEPT["mistral"]), ids, steps=steps).n_eff_after
        for steps in (0, 20, 80)
    ]
    assert means[0] > means[1] > means[2]


@torch.no_grad()
def test_unusual_blocks(ids: torch.Tensor) -> None:
    """Heads that the config does not describe are not turned; a parameter of the block itself is
    refused.
    """
    model = model_of(KEPT["mistral"])
    before = model(ids).logits
    model.config.num_attention_heads = 1  # some configs have another number for each layer
    rotate_model(model, ids, steps=2)
    assert ((model(ids).logits - before).norm() / before.norm()).item() < 1e-4
    model.model.layers[0].memory = torch.nn.Parameter(torch.ones(32, 32))
    with pytest.raises(
        UserError,
        match=r"model\.layers\.0\.memory is not the weight of a linear "
        r"layer",
    ):
        rotate_model(model, ids)


def test_blocks_that_write_by_other_names_are_refused(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "WRITERS", ("writes",))
    with pytest.raises(
        UserError,
        match=r"model\.layers\.0 has no linear layer with a known name "
        r"that writes",
    ):
        rotate_model(model_of(KEPT["mistral"]), ids)


@torch.no_grad()
def test_rows_and_inputs_of_zeros(ids: torch.Tensor) -> None:
    """A neuron and a head that do nothing have no N_eff; the others are turned all the same."""
    model = model_of(KEPT["mistral"])
    for block in model.model.layers:
        for layer in (block.mlp.gate_proj, block.mlp.up_proj, block.self_attn.v_proj):
            layer.weight[:8] = 0
        block.self_attn.o_proj.weight[3] = 0
    before = model(ids).logits
    record = rotate_model(model, ids, steps=5, pattern="2:4")
    assert ((model(ids).logits - before).norm() / before.norm()).item() < 1e-4
    assert 0 < record.n_eff_after < record.n_eff_before < 1


def test_an_order_for_a_pattern_spreads_the_large_columns() -> None:
    """Of the best order, each group takes its two large columns; found by swaps from a deal that
    fails.
    """
    made = torch.Generator().manual_seed(0)
    rows = torch.rand(64, 16, generator=made)
    rows[:, :8] *= 100
    rows /= rows.sum(1, keepdim=True)
    order = rotation._column_order(rows, 2, 4, made)
    assert sorted(order.tolist()) == list(range(16))
    assert ((order.view(4, 4) < 8).sum(1) == 2).all()
    lost, before = (
        groups.sort(2).values[..., :2].sum()
        for groups in (rows[:, order].view(64, 4, 4), rows.view(64, 4, 4))
    )
    assert lost < before


def test_less_is_lost_of_a_real_model(shared: Path) -> None:
    from transformers import AutoTokenizer

    from emp_llm.evaluation.perplexity import perplexity

    folder = shared / "models" / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        (shared / "text" / f"tinystories_{name}.txt").read_text()[:15000]
        for name in ("train", "valid")
    ]
    seen, judged = (torch.tensor(tokenizer(text)["input_ids"]) for text in texts)
    seen = seen[: len(seen) // 512 * 512].view(-1, 512)
    damage = []
    for turns in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        dense = perplexity(model, judged, 512).value
        if turns:
            rotate_model(model, seen, steps=60)
            assert math.isclose(perplexity(model, judged, 512).value, dense, rel_tol=1e-4)
        prune_model(model, recipe_of(method="wanda", targets="all-linear"), seen)
        damage.append(perplexity(model, judged, 512).value / dense - 1)
    assert damage[1] < 0.7 * damage[0]


def test_bad_input(
    models: Models,
    pruned: Models,
    rotated: tuple[Path, RotationRecord],
    text: Path,
    command: Run,
    tmp_path: Path,
) -> None:
    how = ("--calibration", text, "--samples", 10, "--seqlen", 32)
    refused = command("rotate", models("gemma2"), *how, "--output", tmp_path / "out", code=2)
    assert "error: this model cannot be rotated: model.layers.0 has 4 norms" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    for arguments, says in (
        ({"model": pruned("llama")}, "it is pruned, and a rotation would fill its zeros"),
        ({"pattern": "2-4"}, "--pattern must be N:M"),
        ({"steps": -1}, "--steps must be"),
        ({"output": rotated[0]}, "it exists"),
        ({"device_map": "disk"}, "whole in memory"),
        ({"samples": 10**6}, "too short"),
    ):
        given = {
            "model": models("llama"),
            "calibration": str(text),
            "samples": 10,
            "seqlen": 32,
            "output": tmp_path / "out",
        }
        with pytest.raises(UserError, match=says):
            rotate(**given | arguments)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="--steps must be a whole number of at least 0, got -1"):
        rotate_model(
            AutoModelForCausalLM.from_pretrained(models("llama")),
            torch.ones(4, 8, dtype=torch.long),
            steps=-1,
        )
    for wrong in ({"samples": 0}, {"batch_size": 1.5}, {"seed": "one"}):
        with pytest.raises(
            UserError,
            match=r"samples must be at least 1|batch.size must be a "
            r"whole|seed must be a whole",
        ):
            rotate_model(
                AutoModelForCausalLM.from_pretrained(models("llama")),
                torch.ones(4, 8, dtype=torch.long),
                **wrong,
            )


def test_a_full_disk(
    models: Models, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says it in words of its own."""

    def save(*_: Any, **__: Any) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save)
    with pytest.raises(UserError, match="out: the disk is full"):
        rotate(
            models("llama"),
            calibration=str(text),
            samples=10,
            seqlen=32,
            steps=0,
            output=tmp_path / "out",
            device_map="cpu",
        )
