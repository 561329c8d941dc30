"""Norms collected block by block: those of an ordinary pass, or those of pruned blocks, for every family."""

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

from emp_llm.calibrate import calibrate
from emp_llm.calibration import passes
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.passes import calibrate_blocks, calibrate_model
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.layers import Layer
from emp_llm.models.loading import build_skeleton, load_model
from emp_llm.options.calibration import Place
from emp_llm.options.recipe import Recipe
from emp_llm.prune import prune
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner
from emp_llm.pruning.scores import Scores, input_norms
from emp_llm.pruning.writing import write_checkpoint

Models = Callable[[str], Path]
BATCH = 2
WHERE = ("cpu", "disk", "mixed")


def linears(model: PreTrainedModel, head: bool = False) -> list[Layer]:
    kinds = ("embedding",) if head else ("embedding", "head")
    architecture = Architecture.of_model(Checkpoint(Path(model.name_or_path)), model)
    return [layer for layer in architecture.layers if layer.kind not in kinds]


def device_map(source: Path, name: str) -> str:
    return block_map(source) if name == "mixed" else name


def assert_same(one: Activations, other: Activations) -> None:
    assert one.input_of == other.input_of
    assert one.tokens == other.tokens
    assert one.norms.keys() == other.norms.keys()
    for name, norm in one.norms.items():
        assert torch.equal(norm, other.norms[name]), name
    assert one.relative.keys() == other.relative.keys()
    for name, norm in one.relative.items():
        assert torch.equal(norm, other.relative[name]), name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dense_norms_are_those_of_one_pass(models: Models, family: str) -> None:
    """Bit for bit: the same products in the same order, and the same sums."""
    whole = load_model(models(family), "cpu")
    expected = calibrate_model(whole, linears(whole), tokens(), BATCH)
    places: list[Place] = ["cpu", "disk"]
    for where in WHERE:
        model = load_model(models(family), device_map(models(family), where))
        for place in places:
            assert_same(calibrate_blocks(BlockwiseModel(model, None, place), linears(model), tokens(), BATCH), expected)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_layers_before_and_after_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Every batch passes each of them once: OPT's projections of the embeddings, and the head."""
    name, values = tiny.FAMILIES["opt"]
    monkeypatch.setitem(tiny.FAMILIES, "opt-350m", (name, values | {"word_embed_proj_dim": 16}))
    source = tiny.make_model(tmp_path / "model", "opt-350m")
    whole, model = load_model(source, "cpu"), load_model(source, where)
    for head in (False, True):
        expected = calibrate_model(whole, linears(whole, head), tokens(), BATCH)
        assert {"model.decoder.project_in", "model.decoder.project_out"} <= expected.norms.keys()
        assert_same(calibrate_blocks(BlockwiseModel(model), linears(model, head), tokens(), BATCH), expected)


def calibrated(mode: str, model: PreTrainedModel, ids: Tensor) -> Activations:
    """The norms of a model that runs as a whole or block by block."""
    if mode == "model":
        return calibrate_model(model, linears(model), ids, BATCH)
    return calibrate_blocks(BlockwiseModel(model), linears(model), ids, BATCH)


def plan(source: Path, method: Any, **options: Any) -> Pruner:
    checkpoint = Checkpoint(source)
    architecture = Architecture.of_model(checkpoint, build_skeleton(source))
    recipe = Recipe(method=method, targets="all-linear", **options)
    targets = architecture.select(recipe.targets)
    scores = Scores(checkpoint, targets, recipe)
    return Pruner(scores, counts_of(scores))


def written(pruner: Pruner, norms: Activations, folder: Path) -> None:
    """Write the checkpoint that a pruner decides with these norms."""
    scores = pruner.scores.with_norms(input_norms(norms, pruner.targets, pruner.relative))
    folder.mkdir(exist_ok=True)
    write_checkpoint(Pruner(scores, pruner.counts), folder)


def check_slowly(source: Path, pruner: Pruner, norms: Activations, adaptive: bool, batches: list[Tensor]) -> PreTrainedModel:
    """The slow reference: for every block, one pass of a whole model whose earlier blocks are masked. Returns that model."""
    model = mixtures.load(source)
    for block in range(model.config.num_hidden_layers):
        sums: dict[str, Tensor] = {}
        targets = [target for target in pruner.targets if target.layer.block == block]
        assert targets
        handles = mixtures.watch(model, [target.name for target in targets], sums)
        with torch.no_grad():
            for batch in batches:
                model(batch, use_cache=False)
        for handle in handles:
            handle.remove()
        for target in targets:
            norm = norms.norm(target.name)
            assert norm is not None
            # Squares are summed in float32 within a batch there, in float64 here.
            np.testing.assert_allclose(norm.numpy(), sums[target.name].sqrt().numpy(), rtol=1e-6, err_msg=target.name)
            matrix = oracle.weight(source, target.matrix.stored.name, target.matrix.transposed)
            mask = torch.from_numpy(oracle.row_masks(oracle.scores(matrix, norm.numpy()), adaptive))
            mixtures.weight(model, target.name, target.matrix.transposed).masked_fill_(~mask, 0)
    return model


@pytest.mark.parametrize(("family", "method"), [*((family, "emp-wanda") for family in tiny.FAMILIES), ("llama", "wanda")])
def test_pruned_propagation_is_that_of_the_slow_reference(models: Models, tmp_path: Path, family: str, method: str) -> None:
    """Norms and logits are those of whole models with masked weights, for any place of the weights."""
    source, batches = models(family), list(tokens().split(BATCH))
    found = [propagated_from(source, method, where) for where in WHERE]
    norms, in_memory = found[0]
    for other, logits in found[1:]:
        assert_same(other, norms)
        assert all(torch.equal(one, two) for one, two in zip(logits, in_memory, strict=True))
    pruner = plan(source, method)
    reference = check_slowly(source, pruner, norms, method == "emp-wanda", batches)
    written(pruner, norms, tmp_path)
    reloaded = mixtures.load(tmp_path)
    with torch.no_grad():
        for batch, logits in zip(batches, in_memory, strict=True):
            assert torch.equal(reloaded(batch, use_cache=False).logits, logits)
            assert torch.equal(reference(batch, use_cache=False).logits, logits)


def propagated_from(source: Path, method: str, where: str) -> tuple[Activations, list[Tensor]]:
    """The norms of a pruned propagation and the logits at its end; the model is left as it was."""
    pruner, model = plan(source, method), load_model(source, device_map(source, where))
    before = {name: p.clone() for name, p in model.named_parameters() if not p.is_meta}
    logits: list[Tensor] = []

    def end(_: Any, walk: Walk, *others: Any) -> None:
        logits.extend(walk.tail(number).logits for number in range(len(walk.batches)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_run_tail", end)
        norms = calibrate_blocks(BlockwiseModel(model), linears(model), tokens(), BATCH, pruner)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta if name not in before else torch.equal(parameter, before[name]), "the dense weights are back"
    return norms, logits


def test_pruned_norms_differ_from_dense_ones_after_the_first_block(models: Models) -> None:
    source = models("llama")
    model = load_model(source, "cpu")
    dense = calibrate_blocks(BlockwiseModel(model), linears(model), tokens(), BATCH)
    pruned = calibrate_blocks(BlockwiseModel(model), linears(model), tokens(), BATCH, plan(source, "wanda"))
    for name, norm in dense.norms.items():
        assert torch.equal(norm, pruned.norms[name]) == name.startswith("model.layers.0."), name


def test_larger_groups_and_matched_totals_decide_as_they_write(models: Models, tmp_path: Path) -> None:
    source = models("llama")
    model = load_model(source, "cpu")
    for number, options in enumerate(({"group": "matrix"}, {"pattern": "2:4"}, {"sparsity": 0.3})):
        pruner = plan(source, "wanda", **options)
        norms = calibrate_blocks(BlockwiseModel(model), linears(model), tokens(), BATCH, pruner)
        masks = {target.name: pruner.mask(target, norms.norm(target.name)) for target in pruner.targets}
        written(pruner, norms, tmp_path / str(number))
        for target in pruner.targets:
            kept = oracle.weight(tmp_path / str(number), target.matrix.stored.name) != 0
            np.testing.assert_array_equal(kept, masks[target.name].numpy())


def test_commands_say_how_they_ran(models: Models, text: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": str(models("llama")), "calibration": str(text), "samples": 4, "seqlen": 64}
    for where, execution, ran in (("cpu", "auto", "model"), ("disk", "auto", "blocks"), ("cpu", "blocks", "blocks")):
        about = calibrate(
            output=tmp_path / f"{where}-{execution}", device_map=where, execution=execution, hidden_states="disk", **common
        ).about
        assert (about["execution"], about["propagate"]) == (ran, "dense")
        assert about["hidden_states"] == ("disk" if ran == "blocks" else None)
    files = [Activations.load(tmp_path / name) for name in ("cpu-auto", "disk-auto", "cpu-blocks")]
    assert_same(files[0], files[1])
    assert_same(files[0], files[2])
    for where in ("cpu", "disk"):
        report = prune(output=tmp_path / where, propagate="pruned", device_map=where, evaluate=None, **common)
        assert report["calibration"]["execution"] == "blocks"
        assert report["calibration"]["propagate"] == "pruned"
        assert report["calibration"]["pruned_by"].method == "emp-wanda"
    for shard in (tmp_path / "cpu").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "disk" / shard.name).read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"propagate": "pruned", "method": "magnitude"}, "methods that need activations; magnitude needs none"),
        ({"propagate": "pruned", "group": "all"}, "--group all needs the scores of all; leave one out"),
        ({"propagate": "pruned", "activations": "norms"}, "leave out --activations"),
        ({"propagate": "pruned", "execution": "model"}, "leave out --execution model"),
        ({"propagate": "both"}, "--propagate 'both' is not one of dense, pruned"),
        ({"execution": "graph"}, "--execution 'graph' is not one of auto, model, blocks"),
        ({"hidden_states": "ram"}, "--hidden-states 'ram' is not one of auto, device, cpu, disk"),
        ({"blocks": "model.norm"}, r"--blocks 'model.norm' is not a list of modules .*are: model\.layers\."),
    ],
)
def test_wrong_options(models: Models, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prune(model=str(models("llama")), output=tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_activations_that_are_not_finite(models: Models, mode: Any) -> None:
    model = load_model(models("llama"), "cpu")
    ids = tokens() % 255
    ids[3, 0] = 255  # in the second batch
    with torch.no_grad():
        model.model.embed_tokens.weight[255] = float("inf")
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj: .*NaN or infinity\. Try --dtype"):
        calibrated(mode, model, ids)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize(
    ("mode", "part", "said"),
    [
        ("model", "model.layers.1.mlp", "LlamaForCausalLM"),
        ("blocks", "model.layers.1.mlp", r"model\.layers\.1"),
        ("blocks", "model.embed_tokens", "LlamaForCausalLM before its first block"),
    ],
)
def test_memory_that_runs_out(
    models: Models, monkeypatch: pytest.MonkeyPatch, mode: Any, part: str, said: str, error: Exception
) -> None:
    model = load_model(models("llama"), "cpu")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(model.get_submodule(part), "forward", fail)
    with pytest.raises(UserError, match=rf"^{said}: out of memory on cpu with 2 sequences of 40 .*Lower --batch-size, then"):
        calibrated(mode, model, tokens())
