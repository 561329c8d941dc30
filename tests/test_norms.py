"""Activations files: the norms, and the record of their origin."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from emp_llm import prune
from emp_llm.calibration.activations import Activations, InputSums
from emp_llm.records.base import Corpus, TextRecord
from emp_llm.selection.criteria import NORM, RELATIVE


def test_the_digest_covers_norms_relative_to_the_outputs() -> None:
    ones = {"q": torch.ones(4)}
    norms = Activations({"norm": ones}, {"q": "q"})
    assert replace(norms, statistics={"norm": ones, "relative": ones}).digest != norms.digest


def test_tokens_without_output_do_not_count() -> None:
    """Neither do they make a norm infinite; small outputs are used."""
    sums = InputSums(["relative"])
    inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sums.observe("layer", inputs, torch.tensor([[0.0, 0.0], [3e-15, 4e-15], [0.0, 5e-15]]))
    plain = sums.value(NORM, "layer")
    relative = sums.value(RELATIVE, "layer")
    torch.testing.assert_close(plain, inputs.square().sum(0).sqrt())
    torch.testing.assert_close(relative, torch.tensor([34.0, 52.0]).sqrt() / 5e-15)
    sums.observe("zero", inputs, torch.zeros(3, 2))
    assert torch.equal(sums.value(RELATIVE, "zero"), torch.zeros(2))
    sums.observe("broken", inputs, torch.tensor([[1.0], [torch.inf], [torch.nan]]))
    assert torch.equal(sums.value(RELATIVE, "broken"), inputs[0]), (
        "the next layer's input or the weights are to blame"
    )


def test_totals_lie_side_by_side() -> None:
    """A small tensor for each layer, between the large ones of a pass, would break up the heap."""
    sums = InputSums()
    generator = torch.Generator().manual_seed(0)
    seen = [torch.randn(3, 2 + layer, generator=generator) for layer in range(40)]
    for _ in range(2):
        for layer, inputs in enumerate(seen):
            sums.observe(f"layer{layer}", inputs, torch.ones(3, 5))
    assert len({total.untyped_storage().data_ptr() for total in sums.totals.values()}) == 1
    for layer, inputs in enumerate(seen):
        norm = (2 * inputs.square().sum(0)).sqrt()
        torch.testing.assert_close(sums.value(NORM, f"layer{layer}"), norm)
    sums.observe("large", torch.ones(1, 300_000), torch.ones(1, 5))
    assert torch.equal(sums.value(NORM, "large"), torch.ones(300_000))


def test_activations_name_no_folders(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """Files of norms are shared: they hold the names of the model and the text, and no paths of
    a machine.
    """
    dense = tmp_path / "dense"
    matched = tmp_path / "matched"
    shutil.copytree(tiny_llama, dense)
    prune(dense, output=matched, method="magnitude", sparsity=0.3)
    prune(
        dense,
        output=tmp_path / "out",
        method="wanda",
        match=matched,
        propagate="pruned",
        calibration=str(text),
        samples=2,
        seqlen=32,
        device_map="cpu",
    )
    file = tmp_path / "out" / "emp_llm" / "activations.safetensors"
    assert str(tmp_path).encode() not in file.read_bytes()
    assert str(text.parent).encode() not in file.read_bytes()
    about = Activations.load(file).about
    assert (about.model, about.text.file, about.pruned_by.counts.run) == (
        "dense",
        "text.txt",
        "matched",
    )
    assert (
        json.loads((tmp_path / "out" / "emp_report.json").read_text())["calibration"]
        == about.as_dict()
    )
    assert [Corpus(dataset=name).record().dataset for name in ("/data/prose", "someone/prose")] == [
        "prose",
        "someone/prose",
    ]


def test_older_files_with_folders(
    llama_norms: Path,
    tiny_llama: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are read as before, and a file for other weights is noticed by its identity,
    regardless of names.
    """
    found = Activations.load(llama_norms)
    text = TextRecord(file="/home/someone/text.txt")
    for identity, warned in ((found.about.identity, False), ("another", True)):
        caplog.clear()
        about = msgspec.structs.replace(
            found.about, model="/home/someone/llama", text=text, identity=identity
        )
        replace(found, about=about).save(tmp_path / "old")
        assert Activations.load(tmp_path / "old").about == about
        prune(tiny_llama, output=tmp_path / f"out-{warned}", activations=tmp_path / "old")
        assert any("come from other weights" in message for message in caplog.messages) == warned
