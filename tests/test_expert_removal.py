"""Experts and whole layers removed: the smaller checkpoint has the dense model's tensors, and
computes what it should.
"""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import tiny
import torch
import transformers
from launch import launch
from safetensors.torch import load_file, save_file
from stops import stopped_when
from torch import Tensor

from emp_llm import prune, verify
from emp_llm.calibration.data import token_ids
from emp_llm.calibration.texts import find_corpus
from emp_llm.common.errors import UserError
from emp_llm.options.recipe import Structure
from emp_llm.records.run_report import StructureRecord
from emp_llm.structure import experts
from emp_llm.structure.choice import unit_scores
from emp_llm.structure.prune_structure import unit_model
from emp_llm.walk import update

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "num_hidden_layers": 3,
}
COUNTS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPED = LATENT | {
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "qwen3_moe": {},
    "olmoe": {"num_key_value_heads": 4},
    "deepseek_v2": GROUPED | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": GROUPED,
    "glm4_moe": GROUPED | {"n_group": 1, "topk_group": 1},
    "granitemoe": {},
    "gpt_oss": {},
    "llama4_text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
    "nemotron_h": {"hybrid_override_pattern": "E*E"},
}
CLOSED = ("deepseek_v3", "glm4_moe", "gpt_oss")  # routers with a bias
SHORT: dict[str, Any] = {
    "calibration": "demo",
    "samples": 4,
    "seqlen": 32,
    "dtype": "float32",
    "quiet": True,
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def call(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            family, **SIZES | COUNTS | EXPERTS | FAMILIES[family]
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(0, 0.01)
        model.save_pretrained(folder)
        tiny.make_tokenizer().save_pretrained(folder)
        return folder

    return call


def loaded(folder: Path) -> Any:
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(
        about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), about
    return model.eval()


def structure_of(report: Any) -> StructureRecord:
    assert report.structure is not None
    return report.structure  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_smaller_mixture_has_the_tensors_of_its_experts(
    family: str, make: Any, tmp_path: Path
) -> None:
    """Every tensor of the loaded smaller model is the dense model's, but for the experts that
    went.
    """
    out = tmp_path / "out"
    report = prune(
        make(family), output=out, structure="experts", method="mass", sparsity=0.5, **SHORT
    )
    record = structure_of(report)
    assert json.loads((out / "emp_llm/experts.json").read_text())["num_experts"] == 8
    kept = load_file(out / "emp_llm" / "structure.safetensors")
    dense = loaded(make(family)).state_dict()
    small = loaded(out).state_dict()
    assert dense.keys() == small.keys()
    changed = set()
    for name, before in dense.items():
        after = small[name]
        module = next(
            (module for module in record.layers if name.startswith(module.rpartition(".")[0])), None
        )
        if before.shape != after.shape:
            dimension = next(
                d for d, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b
            )
            before = before.index_select(dimension, kept[f"{module}.kept"])
            changed.add(name)
        assert torch.equal(before, after), name
    assert {mixture.kept for mixture in record.layers.values()} == {4}
    assert len(changed) >= 3 * len(record.layers) - (family == "nemotron_h")
    assert record.difference is not None
    assert record.difference < 1e-4
    assert not verify(out, source=str(make(family)), quiet=True).differences


@pytest.mark.parametrize("family", CLOSED)
def test_closed_routers(family: str, make: Any, tmp_path: Path) -> None:
    """Each layer keeps its own number of experts in the same shapes, and computes what a model
    without the others does.
    """
    out = tmp_path / "out"
    report = prune(
        make(family),
        output=out,
        structure="experts",
        method="emp-mass",
        beta=0.6,
        keep_shapes=True,
        **SHORT,
    )
    record = structure_of(report)
    assert record.config == {}
    sizes = [(cost.parameters, cost.active_parameters) for cost in (record.dense, record.pruned)]
    assert sizes[0] == sizes[1]  # a token reaches as many experts as before
    assert record.difference is not None
    assert record.difference < 1e-4
    assert not verify(out, source=str(make(family)), quiet=True).differences
    used = {}

    def see(module: Any, args: Any, kwargs: Any, name: str) -> None:
        chosen = next(
            tensor for tensor in (*args, *kwargs.values()) if not tensor.is_floating_point()
        )
        used.setdefault(name, set()).update(chosen.unique().tolist())

    model = loaded(out)
    for name in record.layers:
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, a, k, n=name: see(m, a, k, n), with_kwargs=True
        )
    with torch.no_grad():
        model(torch.arange(256).reshape(4, 64))
    kept = load_file(out / "emp_llm" / "structure.safetensors")
    for name, numbers in used.items():
        assert numbers <= set(kept[f"{name}.kept"].tolist()), name


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_scores_are_those_of_their_equations(family: str, make: Any, tmp_path: Path) -> None:
    """Each expert is called alone for its tokens, in float64."""
    out = tmp_path / "out"
    prune(make(family), output=out, structure="experts", sparsity=0.5, **SHORT)
    found = load_file(out / "emp_llm" / "structure.safetensors")
    model = mixtures.load(make(family)).double()
    sums = dict[str, Tensor]()

    def see(module: Any, args: Any, kwargs: Any, name: str) -> None:
        hidden, chosen, gates = (*args, *kwargs.values())[:3]
        for token in range(len(hidden)):
            for place in range(chosen.shape[1]):
                expert = chosen[token, place].reshape(1, 1)
                norm = module.forward(
                    hidden[token][None], expert, torch.ones_like(gates[:1, :1])
                ).norm()
                own = sums.setdefault(name, torch.zeros(3, 8, dtype=torch.float64))[
                    :, expert.item()
                ]
                own += torch.stack([torch.ones_like(norm), gates[token, place] * norm, norm])

    plan = {
        units.name: units for units in unit_model(make(family), Structure(units="experts")).units
    }
    for name in plan:
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, a, k, n=name: see(m, a, k, n), with_kwargs=True
        )
    with torch.no_grad():
        model(token_ids(find_corpus("demo,samples=4,seqlen=32"), tiny.make_tokenizer()))
    noted = load_file(out / "emp_llm" / "sums.safetensors")
    by_weights = unit_scores([*plan.values()], "magnitude")
    for (name, units), magnitude in zip(plan.items(), by_weights, strict=True):
        tokens, weighted, plain = sums[name]
        wanted = {
            "frequency": tokens,
            "mass": weighted,
            "reap": weighted / tokens,
            "man": plain / tokens,
        }
        for method, expected in wanted.items():
            (scores,) = unit_scores([units], method, noted.get)
            np.testing.assert_allclose(scores, expected.nan_to_num().numpy(), rtol=2e-4)
        np.testing.assert_allclose(
            found[f"{name}.scores"].numpy(), wanted["reap"].nan_to_num().numpy(), rtol=2e-4
        )
        stacks = [
            stack for _, stack in model.get_submodule(name).named_parameters() if stack.dim() == 3
        ]
        squares = torch.stack([stack.detach().flatten(1).square().sum(1) for stack in stacks]).sum(
            0
        )
        np.testing.assert_allclose(magnitude, squares.sqrt().numpy(), rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_whole_layers(family: str, models: Any, tmp_path: Path) -> None:
    """The layers that change their inputs least go; the others have the dense model's tensors."""
    out = tmp_path / "out"
    report = prune(
        models(family), output=out, structure="layers", method="cosine", sparsity=0.5, **SHORT
    )
    record = structure_of(report)
    (only,) = record.layers.values()
    assert (only.units, only.kept) == (2, 1)
    assert record.difference is not None
    assert record.difference < 1e-4
    loaded(out)
    assert not verify(out, source=str(models(family)), quiet=True).differences


@pytest.mark.parametrize(
    ("family", "shared"), [("qwen3_moe", 0), ("qwen2_moe", 0), ("deepseek_v3", 2), ("gpt_oss", 0)]
)
def test_refit_makes_up_for_removed_experts(
    family: str, shared: int, make: Any, tmp_path: Path
) -> None:
    """The error of the blocks' outputs falls on the calibration text. A shared expert with a
    gate of its own stays.
    """
    report = prune(
        make(family),
        output=tmp_path / "out",
        structure="experts",
        sparsity=0.5,
        refit=True,
        **SHORT,
    )
    assert sum("shared" in name for name in report.fits) == shared
    difference = structure_of(report).difference
    assert difference is not None
    assert difference < 1e-4
    assert report.recipe.method == "emp-reap"
    assert report.fits
    assert all(
        fit.error_after <= fit.error_before for fit in report.fits.values() if fit.error_before
    )
    assert not verify(tmp_path / "out", source=str(make(family)), quiet=True).differences


@pytest.mark.parametrize("moments", [experts.MOMENT_BYTES, 1])
def test_every_sweep_of_a_refit_is_drawn_to_the_dense_weights(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: int
) -> None:
    """In float32 too, where a sweep changes the very weights that are read; with all experts at
    a time, and with one.
    """
    dense = load_file(make("qwen3_moe") / "model.safetensors")
    drawn = list[Tensor]()
    run = update.solve_target
    monkeypatch.setattr(experts, "MOMENT_BYTES", moments)
    monkeypatch.setattr(
        update,
        "solve_target",
        lambda target, by, weight, *rest: (
            drawn.append(weight.clone()) or run(target, by, weight, *rest)
        ),
    )
    options = SHORT | {
        "structure": "experts",
        "sparsity": 0.5,
        "refit": True,
        "min_expert_tokens": 1,
    }
    prune(make("qwen3_moe"), output=tmp_path / "out", **options)
    wanted = [
        tensor
        for name, tensor in dense.items()
        if name.endswith("experts.down_proj") or "down_proj.weight" in name
    ]
    assert len(drawn) > 12
    matrices = [
        matrix for tensor in wanted for matrix in (tensor if tensor.dim() == 3 else tensor[None])
    ]
    assert all(any(torch.equal(weight, matrix) for matrix in matrices) for weight in drawn)


def test_the_report_holds_the_scores_of_each_layer(make: Any, tmp_path: Path) -> None:
    record = structure_of(
        prune(make("mixtral"), output=tmp_path / "out", structure="experts", sparsity=0.5, **SHORT)
    )
    kept = load_file(tmp_path / "out" / "emp_llm" / "structure.safetensors")
    for name, mixture in record.layers.items():
        assert mixture.kept_units == kept[f"{name}.kept"].tolist()
        np.testing.assert_allclose(mixture.scores, kept[f"{name}.scores"].numpy(), rtol=1e-5)


def test_experts_that_no_token_reached_are_named(make: Any, tmp_path: Path) -> None:
    """Two tokens reach at most four of the eight experts of a layer."""
    text = SHORT | {"samples": 1, "seqlen": 2}
    report = prune(
        make("mixtral"), output=tmp_path / "out", structure="experts", sparsity=0.5, **text
    )
    assert any("No token of the calibration reached" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.1}, "its router needs at least 2. Raise --beta"),
        (
            {"method": "wanda", "sparsity": 0.5},
            "--method wanda does not score experts. Use one of emp-reap, reap, emp-man",
        ),
        ({"pattern": "2:4", "method": "reap"}, "--pattern does not go with --structure"),
        ({"keep_shapes": True, "beta": 0.5}, "has no bias, so that no expert can be closed in it"),
        (
            {},
            "--structure experts: say how much goes, by --sparsity, --parameters, --memory or "
            "--loss 2%, or by --beta 1",
        ),
        ({"structure": "layers", "method": "cosine"}, "--structure layers: say how much goes"),
        ({"memory": "10kB"}, "--memory 10kB: what cannot be removed has"),
        ({"memory": "1GB"}, "--memory 1GB: the dense model has"),
        ({"memory": "50%"}, "'50%' is not a size such as 24GB or 20GiB. A share is --sparsity 50%"),
        ({"memory": "24"}, "--memory 24 has no unit. Did you mean 24GB?"),
        ({"parameters": "6"}, "--parameters 6 has no unit. Did you mean 6B?"),
        ({"memory": "many"}, "--memory 'many' is not a size such as 24GB"),
        (
            {"memory": "100kB", "sparsity": 0.5},
            "--parameters and --memory set the sparsity; leave out --sparsity",
        ),
        ({"memory": "100kB", "parameters": "6e9"}, "--parameters and --memory both set the size"),
        ({"structure": "layers", "keep_shapes": True}, "--keep-shapes keeps them"),
        ({"structure": "experts", "width_multiple": 8}, "--width-multiple is for neurons"),
        ({"method": "taylor"}, "--method taylor does not score experts"),
        (
            {"structure": "neurons", "method": "magnitude", "width_multiple": 2, "sparsity": 0.1},
            "--width-multiple 2: the products of all experts at once need a width that is a "
            "multiple of 4 in this dtype",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, make: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        prune(
            make("mixtral"),
            **{"output": tmp_path / "out", "structure": "experts"} | SHORT | options,
        )


def test_a_size_in_place_of_a_sparsity(make: Any, tiny_llama: Path, tmp_path: Path) -> None:
    """The largest model within the budget: one expert more in each layer would be too much."""
    record = structure_of(
        prune(make("mixtral"), output=tmp_path / "a", structure="experts", memory="250kB", **SHORT)
    )
    of_an_expert = (record.dense.bytes - record.pruned.bytes) // (
        8 - next(iter(record.layers.values())).kept
    )
    assert record.pruned.bytes <= 250_000 < record.pruned.bytes + of_an_expert
    source = tiny_llama
    for method in ("magnitude", "emp-magnitude"):
        report = prune(source, output=tmp_path / method, method=method, memory="60kB", quiet=True)
        assert 0.8 * 60_000 < report.sizes.packed <= 60_000
        report = prune(
            source, output=tmp_path / f"{method} p", method=method, parameters=30_000, quiet=True
        )
        kept = report.targets.parameters - report.targets.zeros
        assert 0.97 * 30_000 < kept <= 30_000
    report = prune(source, output=tmp_path / "60", method="magnitude", memory=60_000, quiet=True)
    assert 0.8 * 60_000 < report.sizes.packed <= 60_000
    with pytest.raises(UserError, match="--parameters must be a number or text, got True"):
        prune(source, method="magnitude", parameters=True)
    with pytest.raises(UserError, match=r"--parameters 0\.5 has no unit"):
        prune(source, method="magnitude", parameters=0.5)


def test_an_interrupted_run_resumes(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums and the fitted blocks are not made again, and the weights are those of an
    undisturbed run.
    """
    options = SHORT | {
        "structure": "experts",
        "sparsity": 0.5,
        "refit": True,
        "min_expert_tokens": 1,
    }
    prune(make("mixtral"), output=tmp_path / "whole", **options)
    fits = experts._refit_block

    with stopped_when(experts, "_refit_block", lambda block, *_: block.step.index == 2):
        prune(make("mixtral"), output=tmp_path / "out", **options)
    fitted = []
    monkeypatch.setattr(experts.Experts, "sums", None)
    monkeypatch.setattr(
        experts, "_refit_block", lambda *args: fitted.append(args[0].step.index) or fits(*args)
    )
    prune(make("mixtral"), output=tmp_path / "out", **options)
    assert fitted == [2]
    whole, out = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(whole[name], out[name]) for name in whole)


def test_two_ranks_choose_the_same_experts(make: Any, tmp_path: Path) -> None:
    text = [
        "--calibration",
        "demo",
        "--samples",
        "4",
        "--seqlen",
        "32",
        "--batch-size",
        "2",
        "--dtype",
        "float32",
    ]
    line = [
        "prune --structure experts --beta 1 --output two --model",
        str(make("mixtral")),
        *text,
    ]
    (tmp_path / "logs").mkdir()
    done = launch(2, tmp_path, tmp_path / "logs", *line)
    assert done.codes == [0, 0], done.error
    prune(make("mixtral"), output=tmp_path / "alone", structure="experts", beta=1, **SHORT)
    one, two = (
        load_file(tmp_path / name / "emp_llm" / "structure.safetensors")
        for name in ("two", "alone")
    )
    assert all(torch.equal(one[name], two[name]) for name in one if name.endswith(".kept"))


@pytest.mark.parametrize("place", ["model.layers.3.", "mtp.layers.0."])
def test_a_layer_that_predicts_several_tokens(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """It follows the blocks, is not loaded by transformers, and loses the experts that the last
    block loses.
    """
    source = tmp_path / "model"
    out = tmp_path / "out"
    shutil.copytree(make("deepseek_v3"), source)
    tensors = load_file(source / "model.safetensors")
    more = {
        name.replace("model.layers.2.", place, 1): tensor.clone() + 1
        for name, tensor in tensors.items()
        if name.startswith("model.layers.2.")
    }
    save_file(tensors | more, source / "model.safetensors", {"format": "pt"})
    prune(
        source,
        output=out,
        structure="experts",
        method="magnitude",
        sparsity=0.5,
        dtype="float32",
        quiet=True,
    )
    assert f"{place[:-1]}, which transformers does not load, was not scored" in caplog.text
    small = load_file(out / "model.safetensors")
    assert not verify(out, source=str(source), quiet=True).differences
    last = {name: tensor for name, tensor in small.items() if name.startswith("model.layers.2.")}
    assert all(
        torch.equal(small[name.replace("model.layers.2.", place, 1)], tensor + 1)
        for name, tensor in last.items()
    )
    assert sum(name.startswith(place) for name in small) == len(last)
