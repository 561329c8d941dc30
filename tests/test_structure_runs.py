"""Heads and neurons removed from language models: one contract for every family, and the
commands for such checkpoints.
"""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import weights_of
from transformers import AutoModelForCausalLM

from emp_llm import prune, report, verify
from emp_llm.calibration.data import token_ids
from emp_llm.calibration.texts import find_corpus
from emp_llm.checkpoint.checkpoint import StoredTensor
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.models.layers import Layer
from emp_llm.options.recipe import Structure
from emp_llm.options.words import recipe_of
from emp_llm.records.run_report import RunReport, StructureRecord
from emp_llm.structure import writing
from emp_llm.structure.choice import choose_units
from emp_llm.structure.parts import Neurons, Parts
from emp_llm.structure.prune_structure import unit_model

# What cannot be removed: config.json has no number of heads apart from the width, or the heads
# share a norm.
ZERO_ONLY = {"gpt2", "opt", "gpt_neox"}
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": (
        "FalconConfig",
        tiny._COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256}),
    "olmo2": ("Olmo2Config", tiny.GLU),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        tiny.GLU
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4},
    ),
}
GEMMA_3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
GEMMA_3N |= {
    "head_dim": 8,
    "num_kv_shared_layers": 0,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": None,
}
GEMMA_3N |= {
    "intermediate_size": [80, 80, 96, 96],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Queries, keys and values in one matrix, in another order than in thirds.
OTHER_ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "codegen": (
        "CodeGenConfig",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
            "n_positions": 128,
            "n_ctx": 128,
            "vocab_size": 256,
        },
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": 256,
            "multi_query": False,
        },
    ),
}
MORE_FAMILIES["gemma3n"] = ("Gemma3nTextConfig", tiny.GLU | GEMMA_3N)
QUIET: dict[str, Any] = {"quiet": True, "dtype": "float32"}
SHORT: dict[str, Any] = {"calibration": "demo", "samples": 4, "seqlen": 32}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a family's tiny model in float32, made at the first call."""

    @cache
    def folder(family: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "FAMILIES", tiny.FAMILIES | MORE_FAMILIES | OTHER_ORDERS)
            return tiny.make_model(tmp_path_factory.mktemp(family) / "model", family, torch.float32)

    return folder


def logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


def removed(source: Path, out: Path, **options: Any) -> tuple[RunReport, StructureRecord]:
    """Prune units; the report, and its part on units."""
    run = prune(str(source), output=out, **QUIET | options)
    assert isinstance(run, RunReport)
    assert run.structure is not None
    return run, run.structure


def differences(out: Path, source: Path) -> list[str]:
    return verify(out, source=str(source), quiet=True).differences


@pytest.mark.parametrize(
    "family",
    sorted((tiny.FAMILIES | MORE_FAMILIES).keys() - {"llama", "mistral", "qwen2", "gemma3n"}),
)
def test_the_smaller_model_computes_what_the_zeroed_one_does(
    family: str, models: Any, tmp_path: Path
) -> None:
    """Heads and neurons, at a fixed share, removed and set to zero: the same logits, and other
    ones than the dense model's.
    """
    source = models(family)
    heads_go = family not in ZERO_ONLY | {"falcon", "bloom", "olmo2"}
    kinds = ["neurons"] * (family != "bloom") + ["heads"] * heads_go
    dense = logits(source)
    for structure in kinds:
        outs = [tmp_path / f"{structure}-{how}" for how in ("small", "zero")]
        options: dict[str, Any] = {"structure": structure, "method": "magnitude", "sparsity": 0.5}
        _, small = removed(
            source, outs[0], **options, width_multiple=8 if structure == "neurons" else None
        )
        removed(source, outs[1], keep_shapes=True, **options)
        assert small.difference is not None
        assert small.difference < 1e-5
        assert small.pruned.parameters < small.dense.parameters
        computed = [logits(out) for out in outs]
        same_width = all(units.kept == units.rule for units in small.layers.values())
        # Else the rule's exact counts were zeroed, and one width for all was removed.
        if same_width:
            torch.testing.assert_close(computed[0], computed[1], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(computed[0], dense, rtol=1e-3, atol=1e-4)
        assert [differences(out, source) for out in outs] == [[], []]


@pytest.mark.parametrize("family", OTHER_ORDERS)
@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_heads_in_an_unknown_order_are_refused(
    family: str, device_map: str, models: Any, tmp_path: Path
) -> None:
    """The logits are compared, block by block where the model does not fit in memory. The advice
    is not what was given.
    """
    options: dict[str, Any] = {
        "structure": "heads",
        "method": "magnitude",
        "sparsity": 0.5,
        "device_map": device_map,
    }
    with pytest.raises(
        UserError,
        match=r"the logits differ by .*another order than is known here, "
        r"so its heads cannot be",
    ):
        removed(models(family), tmp_path / "out", keep_shapes=True, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", OTHER_ORDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_an_unknown_order_is_refused_in_short_dtypes(
    family: str, dtype: str, device_map: str, models: Any, tmp_path: Path
) -> None:
    """The logits differ by less than bfloat16 may round them to, so that each head is compared."""
    options: dict[str, Any] = {
        "structure": "heads",
        "method": "magnitude",
        "sparsity": 0.5,
        "keep_shapes": True,
    }
    with pytest.raises(
        UserError,
        match=r"another order than is known here, so its heads cannot "
        r"be",
    ):
        removed(models(family), tmp_path / "out", dtype=dtype, device_map=device_map, **options)
    assert not (tmp_path / "out").exists()


def test_rounding_is_told_from_a_wrong_order(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may be so unstable that the rounding of bfloat16 alone changes its logits by more
    than the limit, which is 0 here. An order that is wrong changes them by more than that.
    """
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setitem(writing._LIMITS, dtype, 0.0)
    wide = str(Path(__file__).parents[1] / "scripts/demo/model")
    options: dict[str, Any] = {"method": "magnitude", "sparsity": 0.5}
    _, record = removed(
        Path(wide), tmp_path / "narrow", structure="neurons", dtype="bfloat16", **options
    )
    assert record.difference is not None
    assert record.difference > 0
    with pytest.raises(UserError, match="the logits differ by"):
        removed(Path(wide), tmp_path / "float32", structure="neurons", **options)
    with pytest.raises(UserError, match="the logits differ by"):
        removed(
            models("codegen"),
            tmp_path / "heads",
            structure="heads",
            keep_shapes=True,
            dtype="bfloat16",
            **options,
        )


@pytest.mark.parametrize("options", [{}, {"refit": True}, {"keep_shapes": True, "refit": True}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_offloaded_model_is_compared(
    family: str, options: dict[str, Any], models: Any, tmp_path: Path
) -> None:
    how: dict[str, Any] = (
        {"structure": "neurons", "sparsity": 0.5, "device_map": "disk"} | SHORT | options
    )
    how |= {} if "keep_shapes" in options else {"width_multiple": 8}
    _, record = removed(models(family), tmp_path / "out", method="wanda", **how)
    assert record.difference is not None
    assert record.difference < 1e-5


def test_what_stays_has_the_bits_of_the_dense_model(models: Any, tmp_path: Path) -> None:
    """The rows and columns of the kept heads and neurons; all other tensors as they were."""
    source = models("llama")
    out = tmp_path / "out"
    removed(source, out, structure="both", method="magnitude", sparsity=0.5, width_multiple=8)
    kept = load_file(out / "emp_llm" / "structure.safetensors")
    dense = weights_of(source)
    written = weights_of(out)
    assert dense.keys() == written.keys()
    for name, weight in dense.items():
        part = re.fullmatch(r"(.*)\.(self_attn|mlp)\.(\w+_proj)\.weight", name)
        if part is not None:
            # 2 groups of heads, 80 neurons.
            output, number = {"self_attn": ("o_proj", 2), "mlp": ("down_proj", 80)}[part[2]]
            dimension = int(part[3] == output)
            units = weight.unflatten(dimension, (number, -1))
            stay = kept[f"{part[1]}.{part[2]}.{output}.kept"]
            weight = units.index_select(dimension, stay).flatten(dimension, dimension + 1)
        assert torch.equal(written[name], weight), name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "falcon", "olmo2"])
def test_heads_set_to_zero(family: str, models: Any, tmp_path: Path) -> None:
    """Where config.json has no number of heads, removal is refused with the option that works;
    that one is exact.
    """
    source = models(family)
    options = {"structure": "heads", "method": "magnitude", "sparsity": 0.5}
    if family == "olmo2":
        with pytest.raises(
            UserError, match="Olmo2ForCausalLM has no attention whose heads can be told apart"
        ):
            removed(source, tmp_path / "out", **options)
        return
    if family in ZERO_ONLY | {"falcon"}:
        says = r"config.json cannot say these numbers of heads of .*\. Use --structure neurons, .*"
        with pytest.raises(UserError, match=f"{says}--keep-shapes"):
            removed(source, tmp_path / "out", **options)
        for method in ("wanda", "taylor"):  # before the scores, which take long
            with pytest.raises(UserError, match=says):
                prune(source, output="out", dry_run=True, **options | {"method": method})
    assert removed(source, tmp_path / "zero", keep_shapes=True, **options)[1].config == {}
    dense, zeroed = (weights_of(folder) for folder in (source, tmp_path / "zero"))
    assert {name: tensor.shape for name, tensor in dense.items()} == {
        name: tensor.shape for name, tensor in zeroed.items()
    }
    changed = {name for name in dense if not torch.equal(dense[name], zeroed[name])}
    assert changed
    assert all(re.search(r"attn|attention", name) for name in changed)
    assert differences(tmp_path / "zero", source) == []
    if family == "gpt_neox":
        (rows,) = unit_model(source, Structure(units="heads")).units[0].rows.values()
        assert rows[1].tolist() == list(range(24, 48))  # q, k and v of one head beside each other


def test_a_config_without_head_dim(models: Any, tmp_path: Path) -> None:
    """The configs of LLaMA-2 have no head_dim: it is written where heads are removed, or their
    width would change with them.

    Of 4 heads and 2 of keys, one group stays.
    """
    source = Path(shutil.copytree(models("llama"), tmp_path / "llama-2"))
    out = tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    del config["head_dim"]
    (source / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {
        "structure": "both",
        "method": "magnitude",
        "sparsity": 0.5,
    }
    removed(source, out, **options)
    written = json.loads((out / "config.json").read_text())
    assert (
        written["num_attention_heads"],
        written["num_key_value_heads"],
        written["head_dim"],
    ) == (2, 1, 8)
    logits(out)
    assert differences(out, source) == []


def test_a_width_for_each_layer(models: Any, tmp_path: Path) -> None:
    """Gemma 3n has a list of widths: each layer's count is rounded up by itself. Its low-rank
    connections are no MLPs.
    """
    source = models("gemma3n")
    out = tmp_path / "out"
    _, structure = removed(
        source, out, structure="neurons", method="emp-magnitude", beta=0.6, width_multiple=4
    )
    layers = list(structure.layers.values())
    assert [units.units for units in layers] == [80, 80, 96, 96]
    assert [units.kept for units in layers] == [-(-units.rule // 4) * 4 for units in layers]
    assert structure.config == {"intermediate_size": [units.kept for units in layers]}
    assert differences(out, source) == []


@pytest.mark.parametrize(("family", "method"), [("gpt2", "wanda"), ("mixtral", "emp-wanda")])
def test_scores_with_activations(family: str, method: str, models: Any, tmp_path: Path) -> None:
    """Norms of activations are collected in the run, and verified from its own files; both kinds
    in one run.
    """
    structure = "neurons" if family == "gpt2" else "both"
    source = models(family)
    out = tmp_path / "out"
    run, _ = removed(
        source, out, structure=structure, method=method, sparsity=0.4, width_multiple=8, **SHORT
    )
    assert run.calibration is not None
    assert differences(out, source) == []


@pytest.mark.parametrize("method", ["emp-taylor", "emp-fisher"])
def test_gradients_are_those_of_the_whole_model(method: str, models: Any, tmp_path: Path) -> None:
    """Block by block as in a backward pass of the whole model: sum over tokens of |dL/dY * Y|, or
    of its square, for the inputs of o and down.
    """
    source = models("gemma2")
    out = tmp_path / "out"
    options: dict[str, Any] = {"calibration": "demo", "samples": 6, "seqlen": 40, "batch_size": 4}
    removed(source, out, structure="both", method=method, beta=0.5, width_multiple=8, **options)
    sums = load_file(out / "emp_llm" / "sums.safetensors")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = token_ids(find_corpus("demo,samples=6,seqlen=40"), tiny.make_tokenizer())
    seen: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            args[0].retain_grad()
            seen[name] = args[0]

        return hook

    for name in sums:
        model.get_submodule(name).register_forward_pre_hook(note(name))
    wanted = {name: torch.zeros(values.shape, dtype=torch.float64) for name, values in sums.items()}
    for row in tokens:
        logits_ = model(row[None], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits_.float(), row[1:], reduction="sum").backward()
        for name, value in seen.items():
            assert value.grad is not None
            effects = (value.grad.double() * value.detach().double()).abs()
            wanted[name] += (effects if method == "emp-taylor" else effects**2).sum((0, 1))
    assert set(sums) == {
        f"model.layers.{i}.{leaf}" for i in (0, 1) for leaf in ("self_attn.o_proj", "mlp.down_proj")
    }
    for name, values in sums.items():
        torch.testing.assert_close(values, wanted[name], rtol=2e-4, atol=1e-9)
    assert differences(out, source) == []


def test_refit_makes_up_for_removed_units(models: Any, tmp_path: Path) -> None:
    """The output layer is fitted on the calibration text; the report says how well, and nothing
    else changes.
    """
    source = models("llama")
    options: dict[str, Any] = {
        "structure": "both",
        "method": "wanda",
        "refit": True,
        "width_multiple": 8,
        "sparsity": 0.5,
    }
    out = tmp_path / "fitted"
    run, structure = removed(source, out, calibration="demo", samples=16, seqlen=64, **options)
    assert set(run.fits) == {
        f"model.layers.{i}.{leaf}" for i in (0, 1) for leaf in ("self_attn.o_proj", "mlp.down_proj")
    }
    for fit in run.fits.values():
        assert fit.error_before is not None
        assert fit.error_after is not None
        assert fit.error_after < fit.error_before
    assert structure.difference is not None
    assert structure.difference < 1e-5
    assert differences(out, source) == []
    assert run.warnings == []
    short, _ = removed(source, tmp_path / "short", **options | SHORT | {"samples": 2})
    (said,) = short.warnings
    assert said.startswith("2 of 4 matrices were fitted on fewer tokens than they have inputs")


def test_emp_counts_over_all_layers(models: Any, tmp_path: Path) -> None:
    """Zeroed neurons: floor(N_eff) of all layers together, by a float64 reference."""
    source = models("llama")
    out = tmp_path / "out"
    scores = []
    weights = weights_of(source)
    for layer in (0, 1):
        gate, up, down = (
            weights[f"model.layers.{layer}.mlp.{name}_proj.weight"].double()
            for name in ("gate", "up", "down")
        )
        scores.append(gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0))
    together = torch.cat(scores).numpy()
    number = together.sum() ** 2 / (together**2).sum()
    mask = np.zeros(len(together), dtype=bool)
    mask[np.argsort(-together, kind="stable")[: int(number)]] = True
    options = {
        "structure": "neurons",
        "structure_group": "all",
        "method": "emp-magnitude",
        "beta": 1,
        "keep_shapes": True,
    }
    _, structure = removed(source, out, **options)
    for (name, entry), kept in zip(structure.layers.items(), np.split(mask, 2), strict=True):
        assert (entry.kept, entry.n_eff_together) == (kept.sum(), pytest.approx(number))
        assert ((weights_of(out)[f"{name}.weight"] == 0).all(0).numpy() == ~kept).all()


def test_matched_uniform_baseline(models: Any, tmp_path: Path) -> None:
    """--match removes as many neurons as an earlier structured run; a run of weights is refused."""
    source = models("llama")
    first = tmp_path / "first"
    options: dict[str, Any] = {"structure": "neurons", "keep_shapes": True}
    runs = [removed(source, first, method="emp-magnitude", sparsity=0.25, **options)]
    runs += [removed(source, tmp_path / "second", method="magnitude", match=first, **options)]
    counts = [[units.kept for units in structure.layers.values()] for _, structure in runs]
    assert runs[0][0].recipe.counts.in_force is not None
    assert sum(counts[0]) == sum(counts[1]) == 120  # of 160
    assert max(counts[1]) - min(counts[1]) <= 1
    prune(str(source), output=tmp_path / "weights", method="magnitude", quiet=True)
    with pytest.raises(UserError, match="that run removed weights, not heads or neurons"):
        removed(
            source, tmp_path / "third", method="magnitude", match=tmp_path / "weights", **options
        )
    assert differences(tmp_path / "second", source) == []


def test_damage_is_found(models: Any, tmp_path: Path) -> None:
    """A changed weight, a changed choice and a changed config are differences."""
    source = models("llama")
    out = tmp_path / "out"
    how: dict[str, Any] = {"method": "magnitude", "sparsity": 0.5, "width_multiple": 8}
    prune(str(source), output=out, structure="neurons", **how, **QUIET)
    name = "model.layers.0.self_attn.q_proj.weight"
    shard = oracle.tensors(out)[name].shard
    tensors = load_file(shard)
    tensors[name][0, 0] += 1
    save_file(tensors, shard, {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    kept = load_file(out / "emp_llm" / "structure.safetensors")
    first = next(key for key in kept if key.endswith(".kept"))
    gone = next(number for number in range(80) if number not in kept[first].tolist())
    kept[first][-1] = gone
    save_file(kept, out / "emp_llm" / "structure.safetensors")
    found = "\n".join(differences(out, source))
    for part in (
        name,
        "config.json: it has other changes",
        "the kept units are not those that the recipe chooses",
        "BLAKE3",
    ):
        assert part in found
    (out / "emp_llm" / "structure.safetensors").unlink()
    with pytest.raises(
        UserError,
        match=r"structure.safetensors: it decided which units stay, and "
        r"cannot be read",
    ):
        differences(out, source)


def test_an_interrupted_run_resumes(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error between two shards, the same command resumes and gives the same bytes."""
    source = models("llama")
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    options: dict[str, Any] = (
        {"structure": "both", "method": "taylor", "sparsity": 0.5, "width_multiple": 8}
        | SHORT
        | QUIET
    )
    prune(str(source), output=whole, **options)
    real = writing.write_shard
    calls = []

    def fails(shard: Path, *arguments: Any) -> str:
        calls.append(shard.name)
        if len(calls) == 2:
            raise OSError("the machine stops")
        return real(shard, *arguments)

    monkeypatch.setattr(writing, "write_shard", fails)
    with pytest.raises(OSError, match="the machine stops"):
        prune(str(source), output=broken, **options)
    assert not broken.exists()
    with pytest.raises(
        UserError,
        match=r"unfinished run with activations\.dtype float32, this one "
        r"has bfloat16",
    ):
        prune(str(source), output=broken, **options | {"dtype": "bfloat16"})
    monkeypatch.setattr(Parts, "sums", None)  # the sums are not collected again
    prune(str(source), output=broken, **options)
    assert calls.count(calls[0]) == 1
    assert oracle.shards(whole) == oracle.shards(broken)
    assert (whole / "config.json").read_bytes() == (broken / "config.json").read_bytes()


def test_report_and_dry_run(models: Any, tmp_path: Path) -> None:
    source = models("llama")
    out = tmp_path / "out"
    options: dict[str, Any] = {
        "structure": "both",
        "method": "magnitude",
        "sparsity": 0.5,
        "width_multiple": 8,
    } | QUIET
    planned = prune(str(source), output=out, dry_run=True, **options)
    assert not isinstance(planned, RunReport)
    assert planned.notes == [
        "found: 2 layers with 2 groups of 2 heads (self_attn.o_proj); 2 layers with 80 neurons "
        "(mlp.down_proj)",
        "groups of 2 heads: 2 of 4 stay (the rule keeps 2)",
        "neurons: 80 of 160 stay (the rule keeps 80)",
        "config.json: intermediate_size 40, num_attention_heads 2, num_key_value_heads 1",
    ]
    del options["sparsity"]  # sizes alone, as the refusal of a run promises
    sized = prune(str(source), output=out, dry_run=True, **options | {"method": "wanda"} | SHORT)
    unasked = prune(str(source), output=out, dry_run=True, **options)
    found = prune(str(source), output=out, dry_run=True, loss="2%", **options | SHORT)
    for plan in (sized, unasked, found):
        assert not isinstance(plan, RunReport)
        assert plan.notes[1].startswith("with 2 of 2 groups of 2 heads and 64 of 80 neurons: ")
        assert not any("stay" in note or "--sparsity" in note for note in plan.notes)
    fisher = options | {"method": "fisher", "dry_run": True} | SHORT
    with pytest.raises(UserError, match="what cannot be removed has"):  # before any score
        prune(str(source), output=out, parameters=9000, **fisher)
    assert not out.exists()
    fewer = prune(str(source), output=tmp_path / "fewer", parameters=30_000, **options)
    assert not any("--sparsity" in warning for warning in fewer.warnings)
    prune(str(source), output=out, sparsity=0.5, **options)
    report([out], output=tmp_path / "page", no_plots=True, quiet=True)
    page = (tmp_path / "page" / "report.md").read_text()
    assert "| out | magnitude, structure both |" in page


@pytest.mark.parametrize("method", ["emp-wanda", "emp-magnitude", "magnitude"])
def test_sizes_of_both_kinds(method: str, models: Any, tmp_path: Path) -> None:
    """Also where a layer has so few heads that a high sparsity is of neurons alone."""
    how = {"structure": "both", "method": method, "width_multiple": 1}
    how |= SHORT if "wanda" in method else {}
    for most in (30_000, 27_000):
        out = tmp_path / str(most)
        report = prune(str(models("llama")), output=out, parameters=most, **how)
        small = AutoModelForCausalLM.from_pretrained(out)
        assert report.structure.pruned.parameters == small.num_parameters() <= most
        assert small.num_parameters() > most - 4000


BAD: list[tuple[dict[str, Any], str]] = [
    ({"pattern": "2:4", "method": "magnitude"}, "--pattern does not go with --structure"),
    ({"group": "all"}, "--group does not go with --structure. Use --structure-group"),
    (
        {"method": "sparsegpt"},
        "--method sparsegpt does not score heads or neurons. Use one of emp-magnitude",
    ),
    ({"structure": "heads", "width_multiple": 8}, "--width-multiple is for neurons"),
    (
        {"structure": "layers", "method": "cosine", "structure_group": "all"},
        "--structure-group has no effect with --structure layers. Leave it out",
    ),
    (
        {"structure": "layers", "method": "cosine", "refit": True, "refit_target": "layer"},
        "--refit-target has no effect with --structure layers. Leave it out",
    ),
    (
        {"structure": "experts", "method": "reap", "refit": True, "refit_weighting": "relative"},
        "--refit-weighting has no effect with --structure experts. Leave it out",
    ),
    ({"keep_shapes": True, "width_multiple": 8}, "--keep-shapes keeps the width"),
    (
        {"method": "magnitude", "beta": 0.5},
        "--beta does not go with method magnitude: its sparsity is fixed",
    ),
    ({"method": "taylor", "activations": "x.safetensors"}, "--method taylor needs gradients"),
    ({"method": "fisher", "activations": "x.safetensors"}, "--method fisher needs gradients"),
    ({"load_in_8bit": True}, "--structure needs the original weights"),
    (
        {"sparsity": 0.001, "method": "magnitude"},
        "--sparsity 0.001 removes none of the 160 neurons. Give a higher one",
    ),
    ({"beta": 10.0, "method": "emp-magnitude"}, "the rule keeps all 160 neurons"),
    (
        {"sparsity": 0.001, "method": "emp-magnitude"},
        "--sparsity 0.001 removes none of the 160 neurons. Give a higher one",
    ),
    (
        {"method": "emp-magnitude", "beta": 1},
        "rounded up to one width for all layers nothing is removed",
    ),
    (
        {},
        "--structure neurons: say how much goes, by --sparsity, --parameters, --memory or "
        "--loss 2%, or by --beta 1, the rule of the effective number",
    ),
    (
        {"structure": "heads", "method": "magnitude"},
        "--structure heads: say how much goes, by --sparsity, --parameters, --memory or "
        "--loss 2%. There is no default, because a model can lose few of its units",
    ),
    ({"structure": "both", "method": "emp-taylor"}, "--structure both: say how much goes"),
    (
        {"structure": None, "method": "taylor"},
        "scores heads and neurons, not weights. Add --structure",
    ),
    ({"structure": None, "keep_shapes": True}, "--keep-shapes has no effect without --structure"),
    ({"allow_partial": True, "sparsity": 0.5}, "--allow-partial does not go with --structure"),
    (
        {"method": "fisher", "sparsity": 0.5, "min_expert_tokens": 5},
        "--min-expert-tokens with --structure neurons is for a refit. Add --refit",
    ),
    ({"parameters": 0, "method": "magnitude"}, "--parameters 0: give more than 0, such as 6e9"),
    ({"memory": "1KB", "method": "magnitude"}, " kB ("),
    (
        {"method": "magnitude", "sparsity": 0.5, "seed": 2**32},
        "--seed must be at least 0 and at most 4294967295, got 4294967296",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input(options: dict[str, Any], message: str, models: Any, tmp_path: Path) -> None:
    given_ = {"structure": "neurons"} | options
    with pytest.raises(UserError, match=re.escape(message)):
        prune(str(models("llama")), output=tmp_path / "out", quiet=True, **given_)
    assert not (tmp_path / "out").exists()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 100), min_size=4, max_size=12), min_size=1, max_size=4),
    st.floats(0.2, 1.5),
)
def test_choice_against_a_float64_reference(scores: list[list[float]], beta: float) -> None:
    """Exact counts and the best units; with widths, one width that is a multiple and not below
    the mean count.
    """
    size = min(len(of_layer) for of_layer in scores)
    values = [np.array(of_layer[:size]) for of_layer in scores]
    every = [_plain_units(size, block) for block in range(len(values))]
    zeroed = Structure(units="neurons", keep_shapes=True)
    rule = recipe_of("emp-magnitude", beta=beta).but(structure=zeroed)
    choices, in_force = choose_units(every, values, rule)
    assert in_force == beta
    for choice, own in zip(choices, values, strict=True):
        number = min(
            size, max(1, int(np.floor(beta * own.sum() ** 2 / (own**2).sum() * (1 + 1e-12))))
        )
        best = sorted(range(size), key=lambda unit, own=own: (-own[unit], unit))[:number]  # type: ignore[misc]
        assert choice.kept.tolist() == sorted(best)
    even, _ = choose_units(
        every,
        values,
        rule.but(structure=Structure(units="neurons", width_multiple=4)),
    )
    mean = -(-sum(choice.record.rule for choice in choices) // len(choices))
    assert {len(choice.kept) for choice in even} == {min(size, -(-mean // 4) * 4)}
    half = recipe_of("magnitude", sparsity=0.5).but(structure=zeroed)
    ratio, _ = choose_units(every, values, half)
    assert {len(choice.kept) for choice in ratio} == {size - size // 2}


def _plain_units(size: int, block: int) -> Neurons:
    columns = np.arange(size)[:, None]
    layer = Layer(f"model.layers.{block}.mlp.down_proj", "mlp", block)
    stored = StoredTensor(f"{layer.name}.weight", Path("x"), "F32", (1, size), 0, 4 * size)
    output = Target(layer, Matrix(stored))
    return Neurons.of(output, columns, {})


def test_neurons_that_rounding_keeps_are_told(
    models: Any, text: Path, tmp_path: Path, command: Any
) -> None:
    """In the warnings of a run, and in the plan of one."""
    source = models("llama")
    line = ["prune", source, "--structure", "neurons", "--output", tmp_path / "out"]
    magnitude = ["--method", "magnitude", "--sparsity"]
    width = json.loads((source / "config.json").read_text())["intermediate_size"]
    multiple = ["--width-multiple", width // 2 + 8]
    planned = command(*line, *magnitude, 0.25, "--width-multiple", width // 8, "--dry-run").stdout
    assert "go in place of" not in planned
    wanda = ["--method", "wanda", "--calibration", text, "--samples", 4, "--seqlen", 32]
    nothing = command(*line, *wanda, "--sparsity", 0.25, *multiple, code=2).stderr
    assert "nothing is removed" in nothing
    assert "resumes" not in nothing
    assert not list(tmp_path.iterdir()), "what other options would have to discard"
    planned = command(*line, *magnitude, 0.6, *multiple, "--dry-run").stdout
    report = prune(
        source,
        structure="neurons",
        method="magnitude",
        sparsity=0.6,
        width_multiple=multiple[1],
        output=tmp_path / "out",
    )
    assert isinstance(report, RunReport)
    (told,) = report.warnings
    assert f"a multiple of {multiple[1]} in each layer, by --width-multiple" in told
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"]
    assert kept == multiple[1]
    assert f"So {2 * (width - multiple[1])} go in place of " in told
    assert told in planned


def test_a_share_of_few_layers_is_told(tmp_path: Path, command: Any) -> None:
    """What it rounds down to, and in a dry run the size with each number of layers."""
    model = Path(__file__).parents[1] / "scripts" / "demo" / "model"
    line = ["prune", model, "--structure", "layers", "--output", tmp_path / "out"]
    told = "--sparsity 0.3 asks for 1.8 of 6 layers, rounded down to 1 (16.67 %)."
    planned = command(*line, "--sparsity", 0.3, "--dry-run").stdout.splitlines()
    sizes = [words.split(":")[0] for words in planned if words.startswith("with ")]
    assert sizes == [
        "with 5 of 6 layers (--sparsity 0.3)",
        *(f"with {kept} of 6 layers" for kept in (4, 3, 2, 1)),
    ]
    assert planned[-1] == told
    planned = command(*line, "--sparsity", 0.34, "--method", "cosine", "--dry-run").stdout
    assert "with 4 of 6 layers (--sparsity 0.34)" in planned
    assert "rounded" not in planned
    for method in ([], ["--method", "cosine"]):
        planned = command(*line, "--parameters", "1.9e6", *method, "--dry-run").stdout
        assert "with 3 of 6 layers (--parameters 1.9e6): " in planned
        assert "rounded" not in planned
        wrong = command(*line, "--parameters", "7e5", *method, "--dry-run", code=2).stderr
        assert "--parameters 7e5: what cannot be removed has 700,992 parameters" in wrong
    text = ["--calibration", "demo", "--samples", 2, "--seqlen", 32]
    assert f"warning: {told}" in command(*line, "--sparsity", 0.3, *text).stderr
