"""Neurons and filters of any torch model: counts, masks, removal, scores, what is left alone,
and bad input.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from prune_units import (
    magnitude_scores,
    prune_units,
    remove_units,
    saliency_scores,
    taylor_scores,
    zero_units,
)
from run_docs import blocks_of
from torch import Tensor, nn

from emp_llm.common.errors import UserError


class Block(nn.Module):
    """A residual block; its shortcut pads channels (A) or is a convolution (B)."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.more = outputs - inputs
        project = shortcut == "B" and self.more
        self.short = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            if project
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.short is not None:
            x = self.short(x)
        elif self.more:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(out + x)


class ResNet(nn.Module):
    def __init__(self, shortcut: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(
            Block(8, 8, 1, shortcut), Block(8, 16, 2, shortcut), Block(16, 16, 1, shortcut)
        )
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.blocks(F.relu(self.bn(self.conv(x)))).mean((2, 3)))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 20), nn.Sigmoid(), nn.Linear(20, 16, bias=False), nn.Tanh(), nn.Linear(16, 4)
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)
    )


PICTURES = (2, 3, 12, 12)
SERIES = (2, 7, 16)
FEATURES = (5, 12)
# model -> (how it is made, shape of its input, the pruned groups with their layers, the layers left
# alone)
MODELS: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, list[str]], set[str]]
] = {
    "mlp": (mlp, FEATURES, {"0": [], "2": []}, {"4"}),
    "resnet-A": (
        lambda: ResNet("A"),
        PICTURES,
        {f"blocks.{i}.conv1": [] for i in range(3)},
        {"fc", "conv", "blocks.0.conv2", "blocks.1.conv2", "blocks.2.conv2"},
    ),
    "resnet-B": (
        lambda: ResNet("B"),
        PICTURES,
        {
            "conv": ["blocks.0.conv2"],
            "blocks.0.conv1": [],
            "blocks.1.conv1": [],
            "blocks.1.conv2": ["blocks.1.short.0", "blocks.2.conv2"],
            "blocks.2.conv1": [],
        },
        {"fc"},
    ),
    "transformer": (
        transformer,
        SERIES,
        {"0.layers.0.linear1": [], "0.layers.1.linear1": []},
        {
            "1",
            *(
                f"0.layers.{i}.{name}"
                for i in range(2)
                for name in ("linear2", "self_attn.out_proj")
            ),
        },
    ),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A model whose normalisations are not trivial, in evaluation mode, and its input."""
    torch.manual_seed(seed)
    model = MODELS[name][0]().eval()
    shape = MODELS[name][1]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.InstanceNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    return model, torch.randn(shape)


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_model_computes_what_zeroed_units_leave(name: str) -> None:
    dense, x = make(name)
    _, _, groups, left = MODELS[name]
    for group in ("layer", "all"):
        zeroed = make(name)[0]
        smaller = make(name)[0]
        report, removed = (
            prune_units(model, x, sparsity=0.4, group=group, remove=model is smaller)  # type: ignore[arg-type]
            for model in (zeroed, smaller)
        )
        assert removed.cuts == report.cuts
        torch.testing.assert_close(outputs(smaller, x), outputs(zeroed, x), rtol=1e-5, atol=1e-5)
        # The pruning changes something.
        assert float((outputs(dense, x) - outputs(zeroed, x)).abs().max()) > 1e-3
        assert removed.difference is not None
        assert removed.difference < 1e-5
        sizes = [sum(values.numel() for values in model.parameters()) for model in (dense, smaller)]
        assert report.parameters == removed.parameters == tuple(sizes)
        assert sizes[1] < sizes[0]
        assert report.flops == removed.flops
        assert removed.flops[1] is not None
        assert removed.flops[1] < removed.flops[0]
        for layer, mask in removed.masks.items():
            assert smaller.get_submodule(layer).weight.shape[0] == int(mask.sum())  # type: ignore[union-attr, index]
            assert not zeroed.get_parameter(f"{layer}.weight")[~mask].any()
        assert set(report.left) == left
        group_of = {layer: units.group for layer, units in report.layers.items()}
        assert group_of == {
            layer: first for first, more in groups.items() for layer in (first, *more)
        }
        assert all(
            torch.equal(report.masks[layer], report.masks[first])
            for layer, first in group_of.items()
        )
        if group == "layer":
            assert all(
                units.units - units.kept == int(0.4 * units.units)
                for units in report.layers.values()
            )
    other, _ = make(name, seed=1)
    remove_units(other, json.loads(json.dumps(removed.cuts)))
    other.load_state_dict(smaller.state_dict())
    assert torch.equal(outputs(other, x), outputs(smaller, x))
    other.train()(x).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape
        for parameter in other.parameters()
    )


def reference_count(scores: list[float], beta: float) -> int:
    """clip(floor(beta * N_eff), 1, N) in float64, by another way; N for zeros."""
    array = np.array(scores, dtype=np.float64)
    if not array.any():
        return len(array)
    omega = array / array.sum()
    return int(np.clip(np.floor(beta / (omega**2).sum() * (1 + 1e-12)), 1, len(array)))


SCORES = st.lists(st.floats(0.0625, 64, width=32), min_size=20, max_size=20)
HALF = st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=16, max_size=16)


@settings(max_examples=25, deadline=None)
@given(
    first=SCORES,
    second=HALF,
    beta=st.sampled_from([0.5, 0.8, 1.0, 1.2, 2.0]),
    scope=st.sampled_from(["layer", "all"]),
)
def test_counts_are_those_of_algorithm_1(
    first: list[float], second: list[float], beta: float, scope: Any
) -> None:
    model, x = make("mlp")
    given = {"0": torch.tensor(first), "2": torch.tensor(second)}
    report = prune_units(model, x, score=given, beta=beta, group=scope, coupled="alone")
    groups = [["0"], ["2"]] if scope == "layer" else [["0", "2"]]
    for names in groups:
        values = torch.cat([given[name].double() for name in names])
        mask = torch.cat([report.masks[name] for name in names])
        count = reference_count(values.tolist(), beta)
        assert int(mask.sum()) - len(report.saved) <= count <= int(mask.sum())
        order = torch.argsort(values, descending=True, stable=True)
        assert set(order[:count].tolist()) <= set(mask.nonzero()[:, 0].tolist())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, 12, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(3)
    ]


def test_scores_are_those_of_their_equations() -> None:
    model, _ = make("mlp")
    model.requires_grad_(False)
    model.train()
    loss = nn.CrossEntropyLoss()
    reference = make("mlp")[0].double()
    taylor = {
        name: torch.zeros(len(reference.get_parameter(f"{name}.weight")), dtype=torch.float64)
        for name in "024"
    }
    saliency = {name: torch.zeros_like(value) for name, value in taylor.items()}
    for x, y in batches():
        reference.zero_grad()
        loss(reference(x.double()), y).backward()
        for name in "024":
            weight = reference.get_parameter(f"{name}.weight")
            bias = getattr(reference.get_submodule(name), "bias", None)
            assert weight.grad is not None
            change = (weight.grad * weight.detach()).sum(1) + (
                0 if bias is None else bias.grad * bias.detach()
            )
            taylor[name] += change.abs() / 3
            saliency[name] += weight.grad.norm(dim=1) / 3
    for scores, wanted in (
        (taylor_scores(model, batches(), loss), taylor),
        (saliency_scores(model, batches(), loss), saliency),
        (
            magnitude_scores(model),
            {
                name: reference.get_parameter(f"{name}.weight").detach().norm(dim=1)
                for name in "024"
            },
        ),
    ):
        assert scores.keys() == wanted.keys()
        for name, values in wanted.items():
            torch.testing.assert_close(scores[name], values, rtol=1e-4, atol=1e-7)
    assert model.training
    assert not any(
        parameter.requires_grad or parameter.grad is not None for parameter in model.parameters()
    )


def test_coupled_units_can_be_left_alone() -> None:
    model, x = make("resnet-B")
    report = prune_units(model, x, coupled="skip", sparsity=0.4, remove=True)
    assert set(report.layers) == {f"blocks.{i}.conv1" for i in range(3)}
    assert report.left["blocks.1.short.0"] == "coupled with 2 other layers"
    report = prune_units(*make("resnet-B"), sparsity=0.4, ignore=["blocks.0.conv2"])
    assert (
        report.left["conv"]
        == report.left["blocks.0.conv2"]
        == "coupled with blocks.0.conv2, which is left out"
    )


def test_each_layer_alone_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter of a ResNet with padded shortcuts can be zeroed, with the shift that would
    make it constant.
    """
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    model, x = make("resnet-A")
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    report = prune_units(model, x, coupled="alone", sparsity=0.5)
    assert report.left == {"fc": "its outputs are those of the model"}
    # The batch statistics of a zeroed filter are zero, and so is its shift.
    model(x).square().sum().backward()
    optimizer.step()
    zero_units(model, report.cuts)
    model(x)
    for layer, mask in report.masks.items():
        assert not seen[layer.replace("conv", "bn")][:, ~mask].any()
        assert int(mask.sum()) == len(mask) // 2
    assert report.parameters[1] is report.flops[1] is report.difference is None
    assert "unchanged: units are zero" in str(report)
    with pytest.raises(UserError, match=r"pip install torch-pruning.*coupled='alone'"):
        prune_units(model, x)


class Broken(nn.Module):
    """A parameter of its own, a repeated layer, a layer that is not called, and a normalisation
    of parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 6)
        self.second = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(6))
        self.third = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.second(F.relu(self.first(x)) * self.scale))
        out: Tensor = self.head(F.relu(self.third(hidden)))
        return out


def test_what_cannot_be_pruned_is_named() -> None:
    torch.manual_seed(0)
    model = Broken()
    with pytest.raises(
        UserError,
        match=r"Broken has no units to prune\. first: .*; second: .*; "
        r"unused: not called",
    ):
        prune_units(model, torch.rand(4, 12))
    report = prune_units(model, torch.rand(4, 12), coupled="alone")
    assert report.left == {
        "unused": "not called for the example",
        "third": "the weight of third is computed from other parameters",
        "head": "its outputs are those of the model",
    }


def test_wrong_input_is_named_and_changes_nothing() -> None:
    model, x = make("mlp")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spoilt, _ = make("mlp")
    spoilt.get_parameter("0.weight").data[3, 1] = torch.nan
    loss = nn.CrossEntropyLoss()
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: prune_units(nn.Sequential(nn.Linear(3, 2)), torch.rand(1, 3)),
            "Sequential has no units to prune. 0: its out",
        ),
        (
            lambda: prune_units(model, x, score="norm"),
            "score 'norm' is not one of magnitude, taylor, saliency",
        ),
        (lambda: prune_units(model, x, score="taylor"), "score taylor needs data: give batches"),
        (
            lambda: prune_units(model, x, score="saliency", data=batches()),
            "score saliency needs loss",
        ),
        (
            lambda: prune_units(model, x, score="taylor", data=[x], loss=loss),
            "a batch is a pair .*, not Tensor",
        ),
        (
            lambda: prune_units(model, x, score="taylor", data=batches(), loss=lambda a, b: a),
            "must return a scalar",
        ),
        (lambda: prune_units(model, x, beta=0), "beta must be a number above 0"),
        (lambda: prune_units(model, x, sparsity=0.5, beta=1), "give only one kind"),
        (lambda: prune_units(model, x, coupled="no"), "coupled 'no' is not one of together, skip"),  # type: ignore[arg-type]
        (lambda: prune_units(model, x, coupled="alone", remove=True), "it cannot remove them"),
        (
            lambda: prune_units(model, x, ignore=["9"]),
            "ignore: Sequential has no linear layer or convolution '9'",
        ),
        (
            lambda: prune_units(model, x, score={"0": x}),
            r"scores of 0: give a tensor of shape "
            r"\(20,\)",
        ),
        (lambda: prune_units(model, x, score={"0": -torch.ones(20)}), "some are below zero"),
        (
            lambda: prune_units(spoilt, x, coupled="alone"),
            "0: scores hold NaN or infinity. Its weights",
        ),
        (lambda: zero_units(model, {"7": {"outputs": [0]}}), "Sequential has no module 7"),
        (lambda: zero_units(model, {"0": {"outputs": [20]}}), "0 has 20 outputs, not 21"),
        (
            lambda: remove_units(model, {"0": {"outputs": list(range(20))}}),
            "they leave 0 without units",
        ),
    ]
    for call, match in cases:
        with pytest.raises(UserError, match=match):
            call()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    resnet, pictures = make("resnet-B")
    with pytest.raises(
        UserError,
        match=r"scores: blocks\.0\.conv2 has none, but its units belong "
        r"to those of conv",
    ):
        prune_units(resnet, pictures, score={"conv": torch.ones(8)})


def test_the_page_runs_and_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "paper.md").read_text(encoding="utf-8")
    page = page.partition("## Neurons and filters of any torch model")[2]
    space: dict[str, Any] = {}
    for block in blocks_of(page):
        exec(block.text, space)
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 1
    printed = capsys.readouterr().out
    assert shown[0] in printed
    assert 0 < float(printed.splitlines()[-1]) < 1
