"""Activations files: the record of their origin, and the differences between two files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from emp_llm.calibrate import calibrate, show
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.input_norms import InputSums
from emp_llm.common.errors import UserError
from emp_llm.prune import prune
from emp_llm.records.corpus import Corpus
from emp_llm.records.source import CalibrationRecord, TextRecord


def test_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ones, input_of = torch.ones(4), {"q": "q", "k": "q", "up": "up", "down": "down", "odd": "odd"}
    a = {"q": ones, "up": torch.tensor([0.0, 2.0]), "down": ones.clone(), "odd": ones.clone()}
    b = {"q": ones, "up": torch.tensor([0.0, 2.5]), "down": ones * 1.01, "odd": torch.ones(3)}
    Activations(a, input_of, CalibrationRecord(dtype="bfloat16", batch_size=4)).save(one)
    Activations(b, input_of | {"new": "q"}, CalibrationRecord(dtype="float32", batch_size=4)).save(two)
    found = calibrate(compare=(one, two))
    assert list(found.layers) == ["up", "down", "k", "q"], "the worst first"
    assert found.layers["up"] == pytest.approx((0.2, 0.1))
    assert found.layers["down"] == pytest.approx((0.01 / 1.01, 0.01 / 1.01), rel=1e-5)
    assert found.layers["q"] == (0, 0)
    assert found.only == ["new", "odd"]
    assert found.about == [("dtype", "bfloat16", "float32")]
    show(found)
    printed = capsys.readouterr().out
    assert "4 layers: 0.2 at most" in printed
    assert "dtype: bfloat16 | float32" in printed
    same = calibrate(compare=(one, one))
    assert {*same.layers.values()} == {(0, 0)}
    assert (same.relative, same.only, same.about) == ({}, [], [])


def test_relative_norms_of_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ones, input_of = torch.ones(4), {"q": "q", "k": "q"}
    one = Activations({"q": ones}, input_of, relative={"q": ones.clone(), "k": ones * 2})
    two = Activations({"q": ones}, input_of, relative={"q": ones * 1.25, "k": ones * 2})
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    Activations({"q": ones}, input_of).save(tmp_path / "old")
    found = calibrate(compare=(tmp_path / "one", tmp_path / "two"))
    assert found.relative == {"q": pytest.approx((0.2, 0.2)), "k": (0, 0)}
    assert (found.layers, found.only) == ({"k": (0, 0), "q": (0, 0)}, [])
    show(found)
    assert "of the norms relative to the outputs of 2 layers: 0.2 at most, 0.1 on average" in capsys.readouterr().out
    assert calibrate(compare=(tmp_path / "one", tmp_path / "old")).relative == {}
    assert Activations.load(tmp_path / "one").digest == one.digest != two.digest, "the digest covers them"


def test_tokens_without_output_do_not_count() -> None:
    """Neither do they make a norm infinite; small outputs are used."""
    sums = InputSums()
    inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sums.observe("layer", inputs, torch.tensor([[0.0, 0.0], [3e-15, 4e-15], [0.0, 5e-15]]))
    torch.testing.assert_close(sums.norm("layer"), inputs.square().sum(0).sqrt())
    torch.testing.assert_close(sums.norm("layer.relative"), torch.tensor([34.0, 52.0]).sqrt() / 5e-15)
    sums.observe("zero", inputs, torch.zeros(3, 2))
    sums.observe("broken", inputs, torch.tensor([[1.0], [torch.inf], [torch.nan]]))
    assert torch.equal(sums.norm("zero.relative"), torch.zeros(2))
    assert torch.equal(sums.norm("broken.relative"), inputs[0]), "the next layer's input or the weights are to blame"


def test_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one: no such activations file"):
        calibrate(compare=(tmp_path / "one", tmp_path / "two"))
    with pytest.raises(UserError, match=r"--compare reads two files .*leave out --model"):
        calibrate(model="x", compare=(tmp_path / "one", tmp_path / "two"))
    with pytest.raises(UserError, match=r"--model is missing"):
        calibrate()


def test_activations_name_no_folders(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """Files of norms are shared: they hold the names of the model and the text, and no paths of a machine."""
    dense, matched = tmp_path / "dense", tmp_path / "matched"
    shutil.copytree(models("llama"), dense)
    prune(dense, output=matched, method="magnitude", sparsity=0.3)
    prune(
        dense, output=tmp_path / "out", method="wanda", match=matched, propagate="pruned", calibration=str(text), samples=2,
        seqlen=32, device_map="cpu",
    )  # fmt: skip
    file = tmp_path / "out" / "emp_llm" / "activations.safetensors"
    assert str(tmp_path).encode() not in file.read_bytes()
    assert str(text.parent).encode() not in file.read_bytes()
    about = Activations.load(file).about
    assert about.text is not None
    assert about.pruned_by is not None
    assert (about.model, about.text.file, about.pruned_by.match) == ("dense", "text.txt", "matched")
    assert json.loads((tmp_path / "out" / "emp_report.json").read_text())["calibration"] == about.as_dict()


def test_older_files_with_folders(
    norms: Callable[[str], Path], models: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are read as before, and a file for other weights is noticed by its identity, regardless of names."""
    found = Activations.load(norms("llama"))
    text = TextRecord(file="/home/someone/text.txt")
    for identity, warned in ((found.about.identity, False), ("another", True)):
        caplog.clear()
        about = msgspec.structs.replace(found.about, model="/home/someone/llama", text=text, identity=identity)
        replace(found, about=about).save(tmp_path / "old")
        assert Activations.load(tmp_path / "old").about == about
        prune(models("llama"), output=tmp_path / f"out-{warned}", activations=tmp_path / "old")
        assert any("come from other weights" in message for message in caplog.messages) == warned


def test_names_of_a_corpus() -> None:
    assert Corpus(file="/data/prose.txt").record().file == "prose.txt"
    assert Corpus(dataset="/data/prose").record().dataset == "prose"
    assert Corpus(dataset="someone/prose").record().dataset == "someone/prose"
