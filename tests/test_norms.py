"""By how much two activations files differ."""

from pathlib import Path

import pytest
import torch

from emp_llm.calibrate import calibrate, show
from emp_llm.models.activations import Activations
from emp_llm.models.errors import UserError


def test_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ones, input_of = torch.ones(4), {"q": "q", "k": "q", "up": "up", "down": "down", "odd": "odd"}
    a = {"q": ones, "up": torch.tensor([0.0, 2.0]), "down": ones.clone(), "odd": ones.clone()}
    b = {"q": ones, "up": torch.tensor([0.0, 2.5]), "down": ones * 1.01, "odd": torch.ones(3)}
    Activations(a, input_of, {"dtype": "bfloat16", "batch_size": 4}).save(one)
    Activations(b, input_of | {"new": "q"}, {"dtype": "float32", "batch_size": 4}).save(two)
    found = calibrate(compare=(one, two))
    assert list(found.layers) == ["up", "down", "k", "q"], "the worst first"
    assert found.layers["up"] == pytest.approx((0.2, 0.1))
    assert found.layers["down"] == pytest.approx((0.01 / 1.01, 0.01 / 1.01), rel=1e-5)
    assert found.layers["q"] == (0, 0)
    assert found.largest == pytest.approx(0.2)
    assert found.only == ["new", "odd"]
    assert found.about == [("dtype", "bfloat16", "float32")]
    show(found)
    printed = capsys.readouterr().out
    assert "4 layers: 0.2 at most" in printed
    assert "dtype: bfloat16 | float32" in printed
    same = calibrate(compare=(one, one))
    assert (same.largest, same.mean, same.only, same.about) == (0, 0, [], [])


def test_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one: no such activations file"):
        calibrate(compare=(tmp_path / "one", tmp_path / "two"))
    with pytest.raises(UserError, match=r"--compare looks at two files .*leave out --model"):
        calibrate(model="x", compare=(tmp_path / "one", tmp_path / "two"))
    with pytest.raises(UserError, match=r"--model is missing"):
        calibrate()
