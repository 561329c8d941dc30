"""Families whose layers or blocks do more than most: block-diagonal weights, several streams of
hidden states, blocks that hand on more than these.
"""

import json
import logging
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from stops import save_each_block, stopped_when
from tiny import make_tokenizer, random_model
from transformers import AutoModelForCausalLM

from emp_llm import calibrate, prune, prune_model, verify
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.healing.planning import Sizes, hidden_width
from emp_llm.models.architecture import Architecture, by_names
from emp_llm.models.blockwise import BlockwiseModel, Step
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import is_router
from emp_llm.models.loading import load_model
from emp_llm.models.modules import find_blocks, model_layers
from emp_llm.options.shared import Place
from emp_llm.selection.criteria import NORM

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV4Config": COMMON
    | {
        "num_local_experts": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "hc_mult": 2,
    },
    "GlmMoeDsaConfig": COMMON
    | {
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "intermediate_size": 96,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "ZayaConfig": COMMON
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
    "LongcatFlashConfig": {
        "vocab_size": 256,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_layers": 1,
        "num_attention_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
    },
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a random model, by the name of its config."""
    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("families") / name
            config = getattr(transformers, name)(**FAMILIES[name])
            model = random_model(AutoModelForCausalLM, config, torch.float32)
            model.save_pretrained(made[name])
            make_tokenizer().save_pretrained(made[name])
        return made[name]

    return folder


def test_block_diagonal_layers_stay_dense(
    folder_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = folder_of("DeepseekV4Config")
    architecture = Architecture.of_checkpoint(Checkpoint(source))
    with caplog.at_level(logging.WARNING):
        targets = architecture.select("attention")
    assert "o_a_proj" in caplog.text
    leaves = {target.layer.leaf for target in targets}
    assert {"q_a_proj", "o_b_proj"} <= leaves
    assert "o_a_proj" not in leaves
    in_blocks = {f"model.layers.{block}.self_attn.o_a_proj.weight" for block in range(2)}
    assert in_blocks <= set(architecture.coverage(targets).unreachable)
    for named in ("o_a_proj,q_a_proj", ["o_a_proj"], r".*_proj"):
        with pytest.raises(UserError, match=r"o_a_proj is block-diagonal.*--ignore o_a_proj"):
            architecture.select(named)
    assert architecture.select(r".*_proj", "o_a_proj")
    with pytest.raises(UserError, match="o_a_proj is block-diagonal"):
        prune(source, method="magnitude", structure="heads", sparsity=0.5, output=tmp_path / "out")


def test_layer_of_an_unknown_kind_is_refused_when_it_runs() -> None:
    class Halves(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return super().forward(given).unflatten(-1, (2, -1))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Halves(4, 6)])

    model = Model()
    with (
        layer_hooks(model, model_layers(model), lambda *_: None),
        pytest.raises(UserError, match=r"layers\.0: .* --ignore 0"),
    ):
        model.layers[0](torch.ones(1, 4))


def test_neurons_of_experts_whose_layers_have_other_names_than_the_shared_ones(
    folder_of: Any, tmp_path: Path
) -> None:
    source = folder_of("DeepseekV4Config")
    output = tmp_path / "pruned"
    options = {"method": "magnitude", "structure": "neurons", "width_multiple": 8}
    prune(source, sparsity=0.25, output=output, **options)
    model = AutoModelForCausalLM.from_pretrained(output)
    mlp = model.model.layers[1].mlp
    assert mlp.experts.down_proj.shape == (4, 64, 24)
    assert mlp.shared_experts.down_proj.weight.shape == (64, 24)
    assert verify(output, source=str(source), quiet=True).differences == []


def test_ids_of_the_check_are_read_where_the_run_begins(folder_of: Any, tmp_path: Path) -> None:
    source = folder_of("DeepseekV4Config")
    text = tmp_path / "ids.jsonl"
    rows = [[1] * 8] * 4 + [[999] * 8] * 4
    text.write_text("".join(f'{{"input_ids": {row}}}\n' for row in rows))
    options = {"calibration": str(text), "samples": 4, "seqlen": 8}
    with pytest.raises(UserError, match=r"ids.jsonl: token id 999 is beyond the model's 256"):
        prune(source, method="wanda", output=tmp_path / "pruned", **options)
    for wrong, says in (
        (-3, r"token id -3 is beyond the model's 256"),
        (1 << 70, "a token id has more than 63 bits"),
    ):
        text.write_text(f'{{"input_ids": {[1, wrong] * 32}}}\n')
        with pytest.raises(UserError, match=rf"ids.jsonl: {says}"):
            prune(source, method="wanda", output=tmp_path / "pruned", **options)
    model = AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(UserError, match=r"data: token id 999 is beyond"):
        prune_model(model, "wanda", data=torch.tensor(rows))


def test_layers_for_a_second_token_are_no_mlp_by_names_either(
    folder_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {
        f"{block}.{leaf}.weight": torch.randn(16, 16)
        for block in ("model.layers.0", "model.layers.1", "model.layers.2", "mtp.layers.0")
        for leaf in ("self_attn.q_proj", "mlp.up_proj")
    }
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(16, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"architectures": ["Unknown"], "model_type": "unknown", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture = by_names(Checkpoint(tmp_path))
    assert "eh_proj" in caplog.text
    names = [target.name for target in architecture.select("all-linear")]
    assert names == [
        f"model.layers.{block}.{leaf}"
        for block in range(2)
        for leaf in ("mlp.up_proj", "self_attn.q_proj")
    ]


def test_routers_inside_a_module_stay_dense_and_stacks_with_idle_experts_keep_their_width(
    folder_of: Any, tmp_path: Path
) -> None:
    source = folder_of("LongcatFlashConfig")
    architecture = Architecture.of_checkpoint(Checkpoint(source))
    leaves = {target.layer.leaf for target in architecture.select("all-linear")}
    assert "down_proj" in leaves
    assert "classifier" not in leaves
    with pytest.raises(UserError, match=r"only 4 of its 6 experts .* --keep-shapes"):
        prune(source, method="magnitude", structure="neurons", sparsity=0.5, output=tmp_path / "a")


HANDS_ON = ["GlmMoeDsaConfig", "ZayaConfig"]


@pytest.mark.parametrize("name", HANDS_ON)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_blocks_that_hand_on_more_than_hidden_states(
    folder_of: Any, name: str, place: Place
) -> None:
    """Each stream keeps what its own blocks handed on."""
    tokens = torch.randint(3, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    batches = [*tokens.split(2), tokens[:1, :17]]
    dense = load_model(folder_of(name), "cpu")
    other = deepcopy(dense)
    with torch.no_grad():
        for block in find_blocks(other)[1]:
            for parameter in block.parameters():
                parameter.mul_(1.5)
        wanted = [[m(ids, use_cache=False).logits for ids in batches] for m in (dense, other)]
    changed = list(find_blocks(other)[1])
    runner = BlockwiseModel(dense, None, place)
    with runner.walk(batches) as walk, closing(walk.second()) as second, torch.no_grad():
        for step in walk.steps():
            step.run(advance=False)
            step.run()
            step.block = changed[step.index]
            for number in range(len(batches)):
                step.output(number, second)
                second.put(number, step.output(number, second))
        for number in range(len(batches)):
            assert torch.equal(walk.tail(number).logits, wanted[0][number])
            final = second.get(number, walk.device)
            assert torch.equal(walk.tail(number, final=final).logits, wanted[1][number])
    assert not torch.equal(wanted[0][0], wanted[1][0])


@pytest.mark.parametrize("name", HANDS_ON)
def test_a_calibration_of_such_blocks_resumes_with_what_they_handed_on(
    folder_of: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save_each_block(monkeypatch)
    source = folder_of(name)
    options = {"calibration": text, "samples": 4, "seqlen": 24}
    whole = calibrate(source, output=tmp_path / "whole", execution="model", **options)
    again = partial(calibrate, source, output=tmp_path / "blocks", execution="blocks", **options)
    with stopped_when(Step, "run", lambda step: step.index == 2):
        again()
    blocks = again()
    norms = blocks.statistics[NORM.name]
    assert norms.keys() == whole.statistics[NORM.name].keys()
    assert all(torch.equal(norms[name], of) for name, of in whole.statistics[NORM.name].items())


def test_layers_that_cannot_go_leave_no_work(folder_of: Any, text: Path, tmp_path: Path) -> None:
    """Which layers go is known after the calibration; the same command is refused again."""
    with pytest.raises(UserError, match=r"these 2 of its 3 layers.* --sparsity"):
        prune(
            folder_of("ZayaConfig"),
            structure="layers",
            method="cosine",
            sparsity=0.34,
            calibration=text,
            samples=4,
            seqlen=24,
            output=tmp_path / "out",
        )
    assert not any(tmp_path.iterdir())


def test_memory_of_several_streams_and_widths() -> None:
    config = {"hidden_size": 64, "altup_num_inputs": 4, "intermediate_size": [128, 512]}
    assert hidden_width(config) == 4 * 64
    assert hidden_width({"text_config": {"hidden_size": 64}}) == 64
    sizes = Sizes(config, 2, 1, 1, 1, 1, 1, 8, 1, False, False)
    assert sizes.token == 24 * 64 + 8 * 512
    assert sizes.both_hidden_states == 2 * 8 * 4 * 64 * 4


@pytest.mark.parametrize(
    ("name", "outputs", "chooses"),
    [
        ("mlp.gate", 4, True),
        ("mlp.gate", 64, False),  # of a gated MLP
        ("mlp.gate.wg", 4, True),
        ("mlp.router.classifier", 4, True),
        ("router.router_mlp.fc1", 64, True),
        ("mlp.classifier", 4, False),
        ("router_norm.up_proj", 4, False),
    ],
)
def test_routers_by_their_names(name: str, outputs: int, chooses: bool) -> None:
    assert is_router(name, outputs, 64) == chooses
