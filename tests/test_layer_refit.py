"""Layers removed with a refit: the weights are those of a float64 reference, for every family and
every place of the layers; resume, ranks, and what cannot be fitted.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny
import torch
from launch import launch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from emp_llm import prune, verify
from emp_llm.calibration.data import token_ids
from emp_llm.calibration.texts import find_corpus
from emp_llm.common.errors import UserError
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.modules import find_blocks
from emp_llm.records.run_report import RunReport
from emp_llm.runs import prune_run
from emp_llm.structure import layers
from emp_llm.structure.layers import Layers

COUNT = 5
# Family -> (field of the number of layers, the last matrix of a block).
FAMILIES = {
    "llama": ("num_hidden_layers", "mlp.down_proj"),
    "qwen3": ("num_hidden_layers", "mlp.down_proj"),
    "phi3": ("num_hidden_layers", "mlp.down_proj"),
    "gpt2": ("n_layer", "mlp.c_proj"),
    "opt": ("num_hidden_layers", "fc2"),
    "gpt_neox": ("num_hidden_layers", "mlp.dense_4h_to_h"),
}
# A norm comes after the last matrix; all last matrices are experts'.
NOT_ADDED = ("gemma2", "gemma3", "mixtral", "qwen3_moe")
SHORT: dict[str, Any] = {
    "calibration": "demo",
    "samples": 1,
    "seqlen": 128,
    "structure": "layers",
    "method": "cosine",
    "refit": True,
    "dtype": "float32",
    "device_map": "cpu",
    "quiet": True,
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a family's tiny model of five layers, made at the first call."""

    @cache
    def call(family: str) -> Path:
        name, values = tiny.FAMILIES[family]
        field = FAMILIES.get(family, ("num_hidden_layers", ""))[0]
        values = values | {field: COUNT}
        if "layer_types" in values:
            values["layer_types"] = (3 * values["layer_types"])[:COUNT]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "FAMILIES", {family: (name, values)})
            folder = tmp_path_factory.mktemp(family) / "model"
            return tiny.make_model(folder, family, torch.float32)

    return call


@contextmanager
def going(numbers: list[int], count: int = COUNT) -> Iterator[None]:
    """Inside this context, these layers have the lowest scores."""
    scores = np.ones(count)
    scores[numbers] = 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "score_of_sums", lambda *_: scores)
        yield


def removed(source: Path, out: Path, numbers: list[int], **options: Any) -> RunReport:
    with going(numbers):
        report = prune(
            str(source), output=out, **SHORT | {"sparsity": len(numbers) / COUNT} | options
        )
        assert isinstance(report, RunReport)
        assert verify(out, source=str(source), quiet=True).differences == []
    assert report.structure is not None
    assert report.structure.difference is not None
    assert report.structure.difference < 1e-5
    kept = load_file(out / "emp_llm" / "structure.safetensors")
    (stays,) = (numbers.tolist() for name, numbers in kept.items() if name.endswith(".kept"))
    assert stays == [number for number in range(COUNT) if number not in numbers]
    return report


def reference(
    source: Path, end: str, numbers: list[int], fitted: dict[int, float], relative: bool
) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Number of a fitted layer -> its weight by the normal equations, the inputs of its last
    matrix, and what that shall return without its bias, both times the root of the token's weight:
    float64.

    Args:
        fitted: number of each fitted layer -> its damping.
        relative: a token's weight is 1 / ||y||^2; else 1.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    _, blocks = find_blocks(model)
    tokens = token_ids(find_corpus("demo,samples=1,seqlen=128"), tiny.make_tokenizer())

    def outputs(gone: list[int]) -> dict[int, Tensor]:
        """What enters each layer, and leaves the last."""
        states: dict[int, Tensor] = {}

        def note(number: int, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            states[number] = args[0]
            states[number + 1] = args[0] if number in gone else first
            if number in gone:
                return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
            return output

        with ExitStack() as hooks, torch.no_grad():
            for number, block in enumerate(blocks):
                hooks.enter_context(
                    block.register_forward_hook(
                        lambda _, args, output, number=number: note(number, args, output)
                    )
                )
            model(tokens, use_cache=False)
        return {number: state.flatten(0, -2) for number, state in states.items()}

    dense = outputs([])
    found = {}
    for number, damping in sorted(fitted.items()):
        layer: Any = blocks[number].get_submodule(end)
        seen: list[Tensor] = []
        with layer.register_forward_hook(
            lambda _, args, output, seen=seen: seen.extend((args[0], output))
        ):
            small = outputs(numbers)
        x, given = (tensor.flatten(0, -2) for tensor in seen)
        behind = next(n for n in range(number + 1, COUNT + 1) if n not in numbers)
        bias = 0 if layer.bias is None else layer.bias.detach()
        y = dense[behind] - (small[number + 1] - given) - bias
        if relative:
            roots = y.norm(dim=1, keepdim=True).reciprocal()
            x, y = x * roots, y * roots
        transposed = not isinstance(layer, nn.Linear)
        weight = layer.weight.detach()
        weight = weight.T if transposed else weight
        gram = x.T @ x
        pull = damping * gram.diagonal().mean()
        system = gram + pull * torch.eye(len(gram), dtype=torch.float64)
        new = torch.linalg.solve(system, (y.T @ x + pull * weight).T).T
        layer.weight.data.copy_(new.T if transposed else new)
        found[number] = (new.contiguous(), x, y)
    return found


def check(
    source: Path, out: Path, family: str, numbers: list[int], fitted: set[int], **how: Any
) -> None:
    """Compare the fitted weights of a checkpoint with the reference, and the others with the
    dense ones.
    """
    report = removed(source, out, numbers, **how)
    fits = {int(re.findall(r"\.(\d+)\.", name)[0]): fit for name, fit in report.fits.items()}
    assert fits.keys() == fitted
    end = FAMILIES[family][1]
    dampings = {number: fit.damping or 0.0 for number, fit in fits.items()}
    wanted = reference(source, end, numbers, dampings, how.get("refit_weighting") != "equal")
    dense = tiny.weights_of(source)
    small = tiny.weights_of(out)
    new_number = {old: new for new, old in enumerate(n for n in range(COUNT) if n not in numbers)}
    for name, tensor in dense.items():
        place = re.search(r"\.(\d+)\.", name)
        if place is None:
            assert torch.equal(small[name], tensor)
            continue
        old = int(place[1])
        if old in numbers:
            continue
        renamed = f"{name[: place.start(1)]}{new_number[old]}{name[place.end(1) :]}"
        if old not in wanted or not name.endswith(f"{end}.weight"):
            assert torch.equal(small[renamed], tensor), name
            continue
        new, x, y = wanted[old]
        written = small[renamed].double()
        written = written.T if family == "gpt2" else written
        assert not torch.allclose(small[renamed], tensor, rtol=1e-3)
        torch.testing.assert_close(x @ written.T, x @ new.T, rtol=0.02, atol=0.005 * float(y.std()))
        error = float((x @ written.T - y).square().sum() / y.square().sum())
        assert fits[old].error_after == pytest.approx(error, rel=0.02, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_reference(family: str, make: Any, tmp_path: Path) -> None:
    check(make(family), tmp_path / "out", family, [2, 3], {1})


def rise_of(out: Path, source: Path) -> float:
    """The rise of the loss on the text of `SHORT`."""
    tokens = token_ids(find_corpus("demo,samples=1,seqlen=128"), load_tokenizer(source))
    losses = []
    for folder in (out, source):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            losses.append(float(model(input_ids=tokens, labels=tokens).loss))
    return losses[0] - losses[1]


def scored(source: Path, out: Path, **options: Any) -> tuple[list[float], set[int]]:
    """The scores by the loss, and the layers that went."""
    prune(str(source), output=out, **options | {"method": "perplexity"})
    assert verify(out, source=str(source), quiet=True).differences == []
    stored = load_file(out / "emp_llm" / "structure.safetensors")
    (scores,) = (values for name, values in stored.items() if name.endswith(".scores"))
    (kept,) = (values.tolist() for name, values in stored.items() if name.endswith(".kept"))
    return scores.tolist(), set(range(len(scores))) - set(kept)


@pytest.mark.parametrize(
    ("family", "refit"), [("llama", True), ("gpt2", True), ("llama", False), ("gemma2", False)]
)
def test_perplexity_is_what_the_model_loses_without_each_layer(
    family: str, refit: bool, make: Any, tmp_path: Path
) -> None:
    """The score of a layer is the rise of the loss of the model that is written without it. Only
    the first layer is scored without a refit.
    """
    source = make(family)
    options = SHORT | {"refit": refit, "check": False, "sparsity": 0.2}
    wanted = []
    for number in range(COUNT):
        out = tmp_path / f"{number}"
        with going([number]):
            prune(str(source), output=out, **options | {"refit": refit and number > 0})
        wanted.append(rise_of(out, source))
    wanted = [rise - min(0, *wanted) for rise in wanted]
    assert max(wanted) > 1e-3
    scores, gone = scored(source, tmp_path / "scored", **options)
    assert scores == pytest.approx(wanted, abs=2e-5)
    assert max(wanted[number] for number in gone) <= min(wanted) + 1e-4


@pytest.mark.parametrize("refit", [True, False])
def test_layers_are_scored_again_without_those_that_went(refit: bool, tmp_path: Path) -> None:
    """With a refit, the score of a pair is not quite the rise of the written model: what makes up
    for the first layer is not fitted again.
    """
    source = Path(__file__).parents[1] / "scripts" / "demo" / "model"
    options = SHORT | {"refit": refit, "check": False}
    alone, gone = scored(source, tmp_path / "alone", sparsity=1 / 6, **options)
    (first,) = gone
    assert alone[first] == min(alone)
    scores, pair = scored(source, tmp_path / "pair", sparsity=2 / 6, **options)
    assert first in pair
    assert scores[first] == alone[first]
    rest = [number for number in range(6) if number != first]
    (second,) = pair - gone
    near = {"rel": 0.2, "abs": 0.005} if refit else {"rel": 1e-4}
    assert scores[second] == min(scores[number] for number in rest)
    for number in {second, *rest[1::3]}:
        out = tmp_path / f"{number}"
        with going([first, number], 6):
            prune(str(source), output=out, sparsity=2 / 6, **options)
        wanted = rise_of(out, source)
        assert scores[number] == pytest.approx(wanted, **near)


def test_a_dry_run_counts_the_turns(make: Any, tmp_path: Path) -> None:
    """In each turn a model without each layer runs through half of the layers on average."""
    text = {"samples": 512}  # twice as much as the turns read
    passes = {}
    for method, sparsity in (("cosine", 0.4), ("perplexity", 0.2), ("perplexity", 0.4)):
        options = SHORT | text | {"method": method, "sparsity": sparsity, "dry_run": True}
        with patch.object(prune_run, "needs_of", wraps=prune_run.needs_of) as needs:
            prune(str(make("llama")), output=tmp_path / "out", **options)
        passes[method, sparsity] = needs.call_args.kwargs["passes"]
    of_cosine = passes["cosine", 0.4] - 3
    assert passes["perplexity", 0.2] == of_cosine + math.ceil((COUNT / 2 + 3) / 2)
    assert passes["perplexity", 0.4] == of_cosine + math.ceil(COUNT / 2 + 3)


def test_half_of_the_text_fits_and_half_measures(make: Any, tmp_path: Path) -> None:
    """The sizes of batches, and where the model is, change the scores by rounding alone."""

    def scores(name: str, **options: Any) -> Tensor:
        options = SHORT | {"method": "perplexity", "samples": 8, "check": False} | options
        prune(str(make("llama")), output=tmp_path / name, sparsity=0.2, **options)
        stored = load_file(tmp_path / name / "emp_llm" / "structure.safetensors")
        (values,) = (values for key, values in stored.items() if key.endswith(".scores"))
        return values

    whole = scores("whole", batch_size=4)
    for name, options in {
        "one": {"batch_size": 1},
        "disk": {"device_map": "disk"},
        "kept on disk": {"hidden_states": "disk"},
    }.items():
        assert torch.allclose(whole, scores(name, **options), atol=2e-5)
    assert not torch.allclose(whole, scores("more", samples=9), atol=2e-5)


def test_tokens_may_have_equal_weights(make: Any, tmp_path: Path) -> None:
    check(make("llama"), tmp_path / "out", "llama", [2, 3], {1}, refit_weighting="equal")


@pytest.mark.parametrize(
    ("numbers", "fitted"),
    [
        ([3, 4], {2}),  # up to the end of the model
        ([0, 1], {2}),  # no layer comes before: the first that stays makes up for them
        ([0, 2], {1}),
        ([1, 3], {0, 2}),
        ([0, 1, 3, 4], {2}),
        ([1, 2, 3, 4], {0}),
        ([0, 1, 2, 3], {4}),
    ],
)
def test_every_place(numbers: list[int], fitted: set[int], make: Any, tmp_path: Path) -> None:
    check(make("llama"), tmp_path / "out", "llama", numbers, fitted)


@pytest.mark.parametrize("family", NOT_ADDED)
def test_what_cannot_be_fitted_is_named(family: str, make: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"--refit: model\.layers\.1 has no last matrix whose outputs are added .*Leave out",
    ):
        removed(make(family), tmp_path / "out", [2])
    assert not (tmp_path / "out").exists()


def test_one_sequence_measures_the_error(make: Any, tmp_path: Path) -> None:
    report = removed(make("llama"), tmp_path / "out", [2], samples=4, seqlen=64)
    (fit,) = report.fits.values()
    assert fit.tokens == 3 * 64
    assert fit.held_out_after is not None
    assert fit.held_out_before is not None
    assert fit.held_out_after < fit.held_out_before


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_an_interrupted_run_resumes(
    where: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished layer is not fitted again, and the bytes are those of an undisturbed run; also of
    a model on disk, whose weights are gone when a fit begins.
    """
    source = make("opt")
    removed(source, tmp_path / "whole", [1, 3])
    run = layers.refit_target

    def killed(target: Any, *args: Any) -> Any:
        if target.layer.block == 2:
            raise RuntimeError("killed")
        return run(target, *args)

    with monkeypatch.context() as patch:
        patch.setattr(layers, "refit_target", killed)
        with pytest.raises(RuntimeError, match="killed"):
            removed(source, tmp_path / "out", [1, 3], device_map=where)
    fitted: list[int] = []
    monkeypatch.setattr(Layers, "sums", None)
    monkeypatch.setattr(
        layers,
        "refit_target",
        lambda target, *args: fitted.append(target.layer.block) or run(target, *args),
    )
    removed(source, tmp_path / "out", [1, 3], device_map=where)
    assert fitted == [2]
    whole, out = (tiny.weights_of(tmp_path / name) for name in ("whole", "out"))
    assert whole.keys() == out.keys()
    assert all(torch.equal(whole[name], out[name]) for name in whole)


def test_blocks_that_return_lists(tmp_path: Path) -> None:
    """Those of GPT-1 do."""
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    tiny.make_tokenizer().save_pretrained(tmp_path / "model")
    options = SHORT | {"refit": False, "seqlen": 64}
    report = prune(str(tmp_path / "model"), output=tmp_path / "out", sparsity=0.34, **options)
    assert report.structure is not None
    assert report.structure.difference == 0


def test_two_ranks(make: Any, tmp_path: Path) -> None:
    """The same layers; their weights differ by the order of sums alone."""
    source = make("llama")
    text = ["--calibration", "demo", "--samples", 8, "--seqlen", 32, "--batch-size", 2]
    line = ["prune", source, "--structure", "layers", "--refit", "--sparsity", 0.4, *text]
    (tmp_path / "logs").mkdir()
    arguments = [str(word) for word in [*line, "--dtype", "float32", "--output", "two"]]
    done = launch(2, tmp_path, tmp_path / "logs", *arguments)
    assert done.codes == [0, 0], done.error
    options = SHORT | {"samples": 8, "seqlen": 32, "batch_size": 2, "method": "emp-perplexity"}
    prune(str(source), output=tmp_path / "one", sparsity=0.4, **options)
    one, two = (tiny.weights_of(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm()) < 0.01 * float(tensor.norm()), name
