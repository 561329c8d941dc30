"""The method on one page makes the masks of the package."""

import runpy
import sys
from pathlib import Path

import code_size
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import prune_model, recipe_of

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "scripts" / "demo" / "model"
TEXT = ROOT / "calibration" / "demo.txt"


def test_the_method_on_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 8 sequences of 128 tokens in place of 32 of 512."""
    page = ROOT / "examples" / "emp.py"
    tokens, _ = code_size.size_of(page)
    assert tokens <= 800
    main = runpy.run_path(str(page))["main"]
    monkeypatch.setitem(main.__globals__, "LENGTH", 128)
    monkeypatch.setitem(main.__globals__, "SEQUENCES", 8)
    main(str(MODEL), str(TEXT), str(tmp_path / "pruned"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    tokens = AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text(), return_tensors="pt")[
        "input_ids"
    ]
    report = prune_model(
        model,
        recipe_of(method="emp-wanda", targets="mlp"),
        list(tokens[0, : 8 * 128].reshape(-1, 4, 128)),
    )
    assert (
        f"sparsity of the MLP: {report.targets.sparsity_of_targets:.2%}"
    ) in capsys.readouterr().out
    page_weights = AutoModelForCausalLM.from_pretrained(
        tmp_path / "pruned", dtype="auto"
    ).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, page_weights[name]), name


def test_without_arguments_it_shows_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "examples" / "emp.py"
    monkeypatch.setattr(sys, "argv", [str(page)])
    with pytest.raises(SystemExit, match=r"usage: python examples/emp\.py MODEL TEXT OUTPUT"):
        runpy.run_path(str(page), run_name="__main__")
