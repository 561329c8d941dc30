"""Mixtures of experts of many structures: their matrices are found where they are stored, and
their inputs are observed.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import oracle
import pytest
import tiny
import torch
import transformers
from runs import check_verified
from torch import Tensor, nn

from emp_llm import calibrate, prune
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.passes import calibrate_blocks, calibrate_model, norms_of_batches
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import FileReader
from emp_llm.checkpoint.matrices import Matrix, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model
from emp_llm.models.model_weights import ModelWeights, architecture_of
from emp_llm.models.modules import weight_of
from emp_llm.pruning.masks import Pruner

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
COUNTS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Family: changes to its configuration, and the names of an expert's stored matrices.
STRUCTURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "mixtral": ({}, {"w1", "w2", "w3"}),
    "qwen2_moe": ({"shared_expert_intermediate_size": 24}, {"gate_proj", "up_proj", "down_proj"}),
    "deepseek_v3": (
        LATENT
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        {"gate_proj", "up_proj", "down_proj"},
    ),
    "granitemoe": ({}, {"gate_up_proj", "down_proj"}),  # stored as one tensor
    # Also with the inputs first; gate and up alternate.
    "gpt_oss": ({}, {"gate_up_proj", "down_proj"}),
    # computed for all experts at once
    "llama4_text": (
        {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
        {"gate_up_proj", "down_proj"},
    ),
    "nemotron_h": ({"hybrid_override_pattern": "E*"}, {"up_proj", "down_proj"}),  # without a gate
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def call(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        sizes = SIZES | COUNTS | EXPERTS | {"pad_token_id": 0} | STRUCTURES[family][0]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in (parameter for parameter in model.parameters() if parameter.dim() > 1):
            parameter.data.normal_(0, 0.1)
        model.save_pretrained(folder)
        tiny.make_tokenizer().save_pretrained(folder)
        return folder

    return call


def tokens() -> Tensor:
    return torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", STRUCTURES)
def test_every_matrix_of_every_expert_is_found(make: Make, family: str) -> None:
    """Each matrix, read from the file at its offset, equals its part of the parameter that
    transformers loads.
    """
    folder = make(family)
    model = load_model(folder, "cpu")
    architecture = Architecture.of_model(Checkpoint(folder), model)
    chosen = architecture.select("all-linear")
    coverage = architecture.coverage(chosen)
    assert coverage.unreachable == []
    assert coverage.matrices_in_blocks - coverage.matrices <= 2, "all but the routers"
    experts = [target for target in chosen if target.layer.expert is not None]
    assert {target.layer.leaf for target in experts} == STRUCTURES[family][1]
    stacks = [
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 3 and min(parameter.shape) > 1
    ]
    assert sum(target.matrix.numel for target in experts) == sum(stack.numel() for stack in stacks)
    seen = set()
    for target in chosen:
        with FileReader(target.matrix.stored.shard) as file:
            read = as_tensor(
                target.matrix.read(file, 0, target.matrix.rows), target.matrix.stored.dtype
            )
        assert torch.equal(read, weight_of(model, target.layer)), target.name
        seen.add((target.matrix.stored.shard, target.matrix.start))
    assert len(seen) == len(chosen)


@pytest.mark.parametrize("family", STRUCTURES)
def test_inputs_of_experts(make: Make, family: str) -> None:
    """The norms are those of the tokens routed to each expert, and of its gate's outputs,
    computed from the module's inputs.
    """
    folder = make(family)
    model = mixtures.load(folder)
    layers = [
        target.layer
        for target in Architecture.of_model(Checkpoint(folder), model).select("all-linear")
    ]
    experts = [(layer, layer.expert) for layer in layers if layer.expert is not None]
    sums = {}
    relative = {}

    def watch(module: Any, given: tuple[Tensor, ...]) -> None:
        hidden = given[0]
        chosen = given[1] if len(given) > 1 else None
        turned = chosen is None or module.is_transposed
        count = module.down_proj.shape[0]
        for expert in range(count):
            # Llama 4 gives each expert all tokens, with zeros for those of other experts.
            if chosen is None:
                mine = hidden.view(count, -1, hidden.shape[-1])[expert]
            else:
                mine = hidden[(chosen == expert).any(-1)]
            first = (
                module.up_proj[expert]
                if hasattr(module, "up_proj")
                else module.gate_up_proj[expert]
            )
            last = module.down_proj[expert]
            bias = getattr(module, "has_bias", False)
            between = mine @ (first if turned else first.T) + (
                module.gate_up_proj_bias[expert] if bias else 0
            )
            if chosen is None:
                gate, up = between.chunk(2, -1)
                middle = up * module.act_fn(gate)
            else:
                middle = module._apply_gate(between) if module.has_gate else module.act_fn(between)
            end = middle @ (last if turned else last.T) + (
                module.down_proj_bias[expert] if bias else 0
            )
            for layer, place in experts:
                if (place.parameter.rpartition(".")[0], place.expert) == (names[module], expert):
                    inputs, outputs = (
                        (middle, end) if layer.leaf in ("down_proj", "w2") else (mine, between)
                    )
                    routed = inputs.any(-1)  # not the zeros of Llama 4
                    outputs = outputs[routed, place.first : place.last]
                    mixtures.add_squares((sums, relative), layer.name, inputs[routed], outputs)

    names = {module: name for name, module in model.named_modules() if name.endswith(".experts")}
    handles = [module.register_forward_pre_hook(watch) for module in names]
    with torch.no_grad():
        for batch in tokens().split(2):
            model(batch, use_cache=False)
    for handle in handles:
        handle.remove()
    norms = calibrate_model(model, layers, tokens(), 2, ["relative"])
    for layer, _ in experts:
        assert norms.input_of[layer.name] in norms.tokens
        for norm, wanted in (
            (norms.of(layer.name), sums),
            (norms.of(layer.name, "relative"), relative),
        ):
            np.testing.assert_allclose(
                norm.numpy(), wanted[layer.name].sqrt().numpy(), rtol=1e-5, err_msg=layer.name
            )
    for module in names.values():
        routed = {
            place.expert: norms.tokens_of(x.name) or 0
            for x, place in experts
            if x.name.startswith(f"{module}.")
        }
        assert sum(routed.values()) == 2 * tokens().numel()  # each token goes to two


@pytest.mark.parametrize(
    ("family", "propagate"),
    [
        ("granitemoe", "dense"),
        ("gpt_oss", "pruned"),
        ("llama4_text", "dense"),
        ("nemotron_h", "pruned"),
    ],
)
def test_pruned_from_disk_as_from_memory(
    make: Make, text: Path, tmp_path: Path, family: str, propagate: Any
) -> None:
    options = {
        "targets": "all-linear",
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
    }
    for place in ("cpu", "disk"):
        prune(
            make(family), output=tmp_path / place, device_map=place, propagate=propagate, **options
        )
    for shard in (tmp_path / "cpu").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "disk" / shard.name).read_bytes()
        assert oracle.header(shard) == oracle.header(make(family) / shard.name)
    model = mixtures.load(tmp_path / "cpu")
    for target in Architecture.of_model(Checkpoint(tmp_path / "cpu"), model).select("all-linear"):
        assert 0.02 < float((weight_of(model, target.layer) == 0).double().mean()) < 0.98, (
            target.name
        )
    check_verified(tmp_path / "cpu", make(family))


def test_stopped_between_experts_of_one_tensor(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is written again, with all experts of the tensor; finished shards are not."""
    source = tmp_path / "source"
    load_model(make("gpt_oss"), "cpu").save_pretrained(source, max_shard_size="20KB")
    tiny.make_tokenizer().save_pretrained(source)
    row_chunks = Matrix.row_chunks
    monkeypatch.setattr(
        Matrix, "row_chunks", lambda self, weights: row_chunks(self, min(weights, 500))
    )
    options = {
        "model": str(source),
        "method": "emp-magnitude",
        "targets": "all-linear",
    }
    prune(output=tmp_path / "whole", **options)
    pruned = Pruner.prune_target
    written = list[tuple[str, int | None]]()
    stacks = [tensor for tensor in Checkpoint(source).tensors.values() if len(tensor.shape) == 3]
    last = max(tensor.shard for tensor in stacks)

    def watched(pruner: Any, target: Any, *arguments: Any) -> Any:
        for chunk in pruned(pruner, target, *arguments):
            written.append((target.matrix.stored.shard.name, target.matrix.expert))
            yield chunk
            if stop and written[-1] == (last.name, 2) and chunk.first:
                raise KeyboardInterrupt

    monkeypatch.setattr(Pruner, "prune_target", watched)
    stop = True
    with pytest.raises(KeyboardInterrupt):
        prune(output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    done = {shard for shard, _ in written} - {last.name}
    stop = False
    written.clear()
    prune(output=tmp_path / "out", **options)
    assert done
    assert not done & {shard for shard, _ in written}
    assert {(last.name, expert) for expert in range(4)} <= set(written)
    for path in (tmp_path / "whole").glob("*"):
        if path.suffix == ".safetensors" or path.name == "emp_manifest.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    check_verified(tmp_path / "out", options["model"])


@pytest.mark.parametrize("propagate", ["dense", "pruned"])
def test_experts_without_tokens_are_scored_by_magnitude(
    models: Make, text: Path, tmp_path: Path, propagate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four experts of each layer, two get none."""
    source = models("mixtral")
    out = tmp_path / "out"
    options = {
        "min_expert_tokens": 1,
        "calibration": str(text),
        "samples": 1,
        "seqlen": 1,
    }
    report = prune(source, output=out, propagate=propagate, device_map="cpu", **options)
    by_magnitude = report["targets"]["scored_by_magnitude"]
    assert list(by_magnitude.values()) == 2 * 2 * 3 * [0]
    assert any(
        "12 of 24 matrices belong to experts that saw fewer than 1 " in message
        for message in caplog.messages
    )
    norms = oracle.load_norms(out / "emp_llm" / "activations.safetensors")
    for layer, entry in report["matrices"].items():
        matrix = oracle.weight(source, entry["tensor"])
        scores = (
            oracle.scores(matrix) if layer in by_magnitude else oracle.scores(matrix, norms[layer])
        )
        kept = oracle.weight(out, entry["tensor"]) != 0
        np.testing.assert_array_equal(
            kept, oracle.row_masks(scores, True) & (matrix != 0), err_msg=layer
        )
        assert (not norms[layer].any()) == (layer in by_magnitude)
    check_verified(out, source)


def test_the_least_number_of_tokens(models: Make, text: Path, tmp_path: Path) -> None:
    """An activations file records the number of tokens of each expert, so that a later run can
    set another minimum.
    """
    file = tmp_path / "norms.safetensors"
    calibrate(
        models("mixtral"),
        output=file,
        calibration=str(text),
        samples=4,
        seqlen=64,
        device_map="cpu",
    )
    norms = Activations.load(file)
    counts = {
        name: tokens
        for name in norms.input_of
        if ".experts." in name and (tokens := norms.tokens_of(name)) is not None
    }
    assert len(counts) == 24
    line = sorted(counts.values())[9]
    report = prune(
        models("mixtral"),
        output=tmp_path / "out",
        activations=file,
        min_expert_tokens=line,
        device_map="cpu",
    )
    assert report["targets"]["scored_by_magnitude"] == {
        name: count for name, count in counts.items() if count < line
    }
    assert report["recipe"].targets.min_expert_tokens == line
    with pytest.raises(
        UserError,
        match=r"group all: .*experts\.\d\.w\d saw \d+ calibration tokens.*--samples.*--ignore",
    ):
        prune(
            models("mixtral"),
            output=tmp_path / "all",
            activations=file,
            min_expert_tokens=line,
            group="all",
        )
    with pytest.raises(UserError, match=r"^--min-expert-tokens must be at least 0, got -1"):
        prune(models("mixtral"), output=tmp_path / "all", min_expert_tokens=-1)


def test_experts_that_cannot_be_pruned(
    models: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("emp_llm.models.modules.find_stacks", lambda model, towers: {})
    source = str(models("mixtral"))
    out = tmp_path / "out"
    with pytest.raises(
        UserError,
        match=r"^91 % of the weights in decoder blocks cannot be pruned "
        r".*experts.*--allow-partial",
    ):
        prune(source, output=out, method="magnitude", targets="all-linear")
    with pytest.raises(UserError, match=r"91 % of the weights"):
        calibrate(source, output=tmp_path / "norms.safetensors")
    message = r"matches no layer.*no layer: model\.layers\.0\.mlp\.experts"
    with pytest.raises(UserError, match=message):
        prune(source, output=out, method="magnitude", targets="mlp")
    assert not out.exists()
    report = prune(source, output=out, method="magnitude", targets="all-linear", allow_partial=True)
    assert any(
        "% of the weights in decoder blocks" in message and "stay dense" in message
        for message in caplog.messages
    )
    assert {name.rpartition(".")[2] for name in report["matrices"]} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert report["targets"]["unreachable_share_of_blocks"] > 0.8
    assert len(report["targets"]["unreachable"]) == 4
    caplog.set_level(logging.WARNING)
    caplog.clear()
    # All named layers can be pruned.
    prune(source, output=tmp_path / "attention", method="magnitude", targets="attention")
    assert caplog.messages == []


def test_an_unknown_use_of_experts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are copied before a product cannot be recognised; this is an error."""
    model = load_model(make("mixtral"), "cpu")
    layers = [
        target.layer
        for target in Architecture.of_model(Checkpoint(make("mixtral")), model).select("mlp")
    ]
    linear = nn.functional.linear
    monkeypatch.setattr(
        nn.functional,
        "linear",
        lambda inputs, weight, bias=None: linear(inputs, weight.clone(), bias),
    )
    with pytest.raises(
        UserError,
        match=r"experts\.gate_up_proj: no product of its experts was recognised.*--ignore",
    ):
        calibrate_model(model, layers, tokens(), 2)
    with pytest.raises(UserError, match="no product of its experts"):
        calibrate_blocks(BlockwiseModel(model), layers, tokens(), 2)
    assert model.config._experts_implementation != "eager", "as it was before"


PADDED: dict[str, dict[str, Any]] = {family: sizes for family, (sizes, _) in STRUCTURES.items()} | {
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jetmoe": {"kv_channels": 8},  # experts in the attention too
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
}


@pytest.mark.parametrize("family", PADDED)
def test_no_module_counts_the_padding_of_a_batch(family: str) -> None:
    """Experts, shared experts and all others see what they see of each sequence alone."""
    sizes = SIZES | COUNTS | EXPERTS | {"pad_token_id": 0} | PADDED[family]
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = tiny.random_model(transformers.AutoModelForCausalLM, config, torch.float32).eval()
    for parameter in (parameter for parameter in model.parameters() if parameter.dim() > 1):
        parameter.data.normal_(0, 0.1)
    chosen = architecture_of(model, ModelWeights(model)).select("all-linear")
    layers = [target.layer for target in chosen]
    rows = [ids[:length] for ids, length in zip(tokens(), (24, 9, 17, 13), strict=True)]
    alone, count = norms_of_batches(
        model, layers, [{"input_ids": row[None]} for row in rows], statistics=["relative"]
    )
    assert count == 63
    for left in (False, True):
        batches = []
        for pair in (rows[:2], rows[2:]):
            ids, mask = torch.zeros(2, 2, 24, dtype=torch.int64)
            for number, row in enumerate(pair):
                place = slice(24 - len(row), 24) if left else slice(len(row))
                ids[number, place] = row
                mask[number, place] = 1
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
        padded, count = norms_of_batches(model, layers, batches, statistics=["relative"])
        assert count == 63
        assert padded.tokens == alone.tokens
        for statistic, values in alone.statistics.items():
            for layer, value in values.items():
                found = padded.statistics[statistic][layer]
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


def test_padding_of_a_decoder_and_of_batches_that_cannot_be_divided() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    layers = [
        target.layer for target in architecture_of(model, ModelWeights(model)).select("all-linear")
    ]
    ids, answers = torch.randint(1, 64, (2, 2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    of_answers = torch.tensor([[1] * 3 + [0] * 3, [1] * 6])
    batch = {"input_ids": ids, "attention_mask": mask}
    batch |= {"decoder_input_ids": answers, "decoder_attention_mask": of_answers}
    found, _ = norms_of_batches(model, layers, [batch])
    alone = [
        {"input_ids": ids[:1], "decoder_input_ids": answers[:1, :3]},
        {"input_ids": ids[1:, :4], "decoder_input_ids": answers[1:]},
    ]
    wanted, _ = norms_of_batches(model, layers, alone)
    assert found.tokens == wanted.tokens
    for layer, value in wanted.statistics["norm"].items():
        torch.testing.assert_close(found.statistics["norm"][layer], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        UserError, match=r"padding, and its pixel_values of shape \[5, 3\].*batches"
    ):
        norms_of_batches(model, layers, [batch | {"pixel_values": torch.zeros(5, 3)}])
