"""Norms collected block by block: those of an ordinary pass, or those of pruned blocks, for
every family.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import oracle
import pytest
import tiny
import torch
from test_blockwise import block_map, tokens
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm import calibrate, prune
from emp_llm.calibration import passes
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.passes import calibrate_blocks, calibrate_model
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.layers import Layer
from emp_llm.models.loading import build_skeleton, load_model
from emp_llm.options.shared import Place
from emp_llm.options.words import recipe_of
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.pruning.writing import write_checkpoint

Models = Callable[[str], Path]
BATCH = 2


def calibrated(
    model: PreTrainedModel,
    mode: str = "blocks",
    pruner: Pruner | None = None,
    place: Place = "auto",
) -> Activations:
    """The norms of a model that runs as a whole or block by block."""
    if mode == "model":
        return calibrate_model(model, linears(model), tokens(), BATCH)
    return calibrate_blocks(
        BlockwiseModel(model, None, place), linears(model), tokens(), BATCH, pruner
    )


def linears(model: PreTrainedModel, head: bool = False) -> list[Layer]:
    kinds = ("embedding",) if head else ("embedding", "head")
    architecture = Architecture.of_model(Checkpoint(Path(model.name_or_path)), model)
    return [layer for layer in architecture.layers if layer.purpose not in kinds]


def assert_same(one: Activations, other: Activations) -> None:
    assert (one.input_of, one.tokens) == (other.input_of, other.tokens)
    assert one.statistics.keys() == other.statistics.keys()
    for statistic, mine in one.statistics.items():
        theirs = other.statistics[statistic]
        assert mine.keys() == theirs.keys()
        assert [name for name, norm in mine.items() if not torch.equal(norm, theirs[name])] == []


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dense_norms_are_those_of_one_pass(models: Models, family: str) -> None:
    """Bit for bit: the same products in the same order, and the same sums."""
    expected = calibrated(load_model(models(family), "cpu"), "model")
    where = [
        ("cpu", "disk"),
        ("disk", "cpu"),
        (block_map(models(family)), "cpu"),
    ]
    for device_map, place in where:
        assert_same(calibrated(load_model(models(family), device_map), place=place), expected)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_layers_before_and_after_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Every batch passes each of them once: OPT's projections of the embeddings, and the head."""
    name, values = tiny.FAMILIES["opt"]
    monkeypatch.setitem(tiny.FAMILIES, "opt-350m", (name, values | {"word_embed_proj_dim": 16}))
    source = tiny.make_model(tmp_path / "model", "opt-350m")
    whole = load_model(source, "cpu")
    model = load_model(source, where)
    for head in (False, True):
        expected = calibrate_model(whole, linears(whole, head), tokens(), BATCH)
        assert {"model.decoder.project_in", "model.decoder.project_out"} <= expected.input_of.keys()
        assert_same(
            calibrate_blocks(BlockwiseModel(model), linears(model, head), tokens(), BATCH), expected
        )


def plan(source: Path, method: Any, **options: Any) -> Pruner:
    checkpoint = Checkpoint(source)
    recipe = recipe_of(method=method, targets="all-linear", **options)
    targets = Architecture.of_model(checkpoint, build_skeleton(source)).targets_of(recipe.targets)
    scores = Scores(checkpoint, targets, recipe)
    return Pruner(scores, counts_of(scores))


def written(pruner: Pruner, norms: Activations, folder: Path) -> None:
    """Write the checkpoint that a pruner decides with these norms."""
    scores = pruner.scores.with_activations(norms)
    folder.mkdir(exist_ok=True)
    write_checkpoint(Pruner(scores, pruner.counts), folder)


def check_slowly(
    source: Path, pruner: Pruner, norms: Activations, adaptive: bool, batches: list[Tensor]
) -> PreTrainedModel:
    """The slow reference: for every block, one pass of a whole model whose earlier blocks are
    masked. Returns that model.
    """
    model = mixtures.load(source)
    for block in range(model.config.num_hidden_layers):
        sums = {}
        targets = [target for target in pruner.targets if target.layer.block == block]
        assert targets
        handles = mixtures.watch(model, [target.name for target in targets], sums)
        with torch.no_grad():
            for batch in batches:
                model(batch, use_cache=False)
        for handle in handles:
            handle.remove()
        for target in targets:
            norm = norms.of(target.name)
            # Squares are summed in float32 within a batch there, in float64 here.
            np.testing.assert_allclose(
                norm.numpy(), sums[target.name].sqrt().numpy(), rtol=1e-6, err_msg=target.name
            )
            matrix = oracle.weight(source, target.matrix.stored.name, target.matrix.transposed)
            mask = torch.from_numpy(oracle.row_masks(oracle.scores(matrix, norm.numpy()), adaptive))
            mixtures.weight(model, target.name, target.matrix.transposed).masked_fill_(~mask, 0)
    return model


@pytest.mark.parametrize(
    ("family", "method"), [*((family, "emp-wanda") for family in tiny.FAMILIES), ("llama", "wanda")]
)
def test_pruned_propagation_is_that_of_the_slow_reference(
    models: Models, tmp_path: Path, family: str, method: str
) -> None:
    """Norms and logits are those of whole models with masked weights, for any place of the
    weights.
    """
    source = models(family)
    batches = list(tokens().split(BATCH))
    norms, in_memory = propagated_from(source, method, "cpu")
    other, from_disk = propagated_from(source, method, block_map(source))
    assert_same(other, norms)
    pruner = plan(source, method)
    reference = check_slowly(source, pruner, norms, method == "emp-wanda", batches)
    written(pruner, norms, tmp_path)
    reloaded = mixtures.load(tmp_path)
    with torch.no_grad():
        for batch, logits, too in zip(batches, in_memory, from_disk, strict=True):
            assert torch.equal(too, logits)
            assert torch.equal(reloaded(batch, use_cache=False).logits, logits)
            assert torch.equal(reference(batch, use_cache=False).logits, logits)


def propagated_from(source: Path, method: str, device_map: str) -> tuple[Activations, list[Tensor]]:
    """The norms of a pruned propagation and the logits at its end; the model is left as it was."""
    pruner = plan(source, method)
    model = load_model(source, device_map)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.is_meta}
    places = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    logits = []

    def end(_: Any, walk: Walk, *others: Any) -> None:
        logits.extend(walk.tail(number).logits for number in range(len(walk.batches)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_run_tail", end)
        norms = calibrated(model, pruner=pruner)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta if name not in before else torch.equal(parameter, before[name]), (
            "the dense weights are back"
        )
        if name in before:  # they may lie in a mapped file
            assert (parameter.data_ptr(), parameter._version) == places[name], "nobody wrote there"
    return norms, logits


@pytest.mark.parametrize("options", [{"group": "matrix"}, {"pattern": "2:4"}, {"sparsity": 0.3}])
def test_larger_groups_and_patterns_decide_as_they_write(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = load_model(tiny_llama, "cpu")
    pruner = plan(tiny_llama, "wanda", **options)
    norms = calibrated(model, pruner=pruner)
    written(pruner, norms, tmp_path)
    for target in pruner.targets:
        kept = oracle.weight(tmp_path, target.matrix.stored.name) != 0
        np.testing.assert_array_equal(kept, pruner.mask(target, norms).numpy())


def test_commands_say_how_they_ran(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    common = {
        "model": str(tiny_llama),
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
    }
    files = []
    for where, execution, ran in (
        ("cpu", "auto", "model"),
        ("disk", "auto", "blocks"),
        ("cpu", "blocks", "blocks"),
    ):
        file = tmp_path / f"{where}-{execution}"
        about = calibrate(
            output=file, device_map=where, execution=execution, hidden_states="disk", **common
        ).about
        states = "disk" if ran == "blocks" else None
        assert (about["execution"], about["propagate"], about["hidden_states"]) == (
            ran,
            "dense",
            states,
        )
        files.append(Activations.load(file))
    assert_same(files[0], files[1])
    assert_same(files[0], files[2])
    for where in ("cpu", "disk"):
        found = prune(output=tmp_path / where, propagate="pruned", device_map=where, **common)[
            "calibration"
        ]
        assert (found["execution"], found["propagate"], found["pruned_by"].method) == (
            "blocks",
            "pruned",
            "emp-wanda",
        )
    assert oracle.shards(tmp_path / "cpu") == oracle.shards(tmp_path / "disk")


def test_a_search_always_sees_pruned_blocks(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """`--propagate pruned` changes nothing."""
    common = {
        "model": tiny_llama,
        "calibration": str(text),
        "samples": 4,
        "seqlen": 16,
        "device_map": "cpu",
    }
    for where in ("dense", "pruned"):
        prune(output=tmp_path / where, method="sparsegpt", sparsity=0.5, propagate=where, **common)
    assert oracle.shards(tmp_path / "dense") == oracle.shards(tmp_path / "pruned")


@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_activations_that_are_not_finite(tiny_llama: Path, mode: str) -> None:
    model = load_model(tiny_llama, "cpu")
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens()[-1, 0]] = float("inf")  # not in the first batch
    with pytest.raises(
        UserError,
        match=r"model\.layers\.0\.self_attn\.q_proj: .*NaN or infinity\. Try --dtype",
    ):
        calibrated(model, mode)


@pytest.mark.parametrize(
    ("mode", "part", "said", "error"),
    [
        (
            "model",
            "model.layers.1.mlp",
            "LlamaForCausalLM",
            torch.OutOfMemoryError("CUDA out of memory"),
        ),
        (
            "blocks",
            "model.layers.1.mlp",
            r"model\.layers\.1",
            RuntimeError("can't allocate memory"),
        ),
        (
            "blocks",
            "model.embed_tokens",
            "LlamaForCausalLM before its first block",
            RuntimeError("can't allocate memory"),
        ),
    ],
)
def test_memory_that_runs_out(
    tiny_llama: Path, monkeypatch: Any, mode: str, part: str, said: str, error: Exception
) -> None:
    model = load_model(tiny_llama, "cpu")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(model.get_submodule(part), "forward", fail)
    with pytest.raises(
        UserError,
        match=rf"^{said}: out of memory on cpu with 2 sequences of 40 "
        r".*Lower --batch-size, then",
    ):
        calibrated(model, mode)
