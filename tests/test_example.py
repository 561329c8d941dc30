"""The method on one page makes the masks of the package."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import Recipe, prune_model

ROOT = Path(__file__).parents[1]
MODEL, TEXT = ROOT / "scripts" / "demo" / "model", ROOT / "calibration" / "demo.txt"


def test_the_method_on_one_page(tmp_path: Path) -> None:
    page = ROOT / "examples" / "emp.py"
    assert len(page.read_text().splitlines()) <= 70
    done = subprocess.run(
        [sys.executable, page, MODEL, TEXT, tmp_path / "pruned"], capture_output=True, text=True, check=True, timeout=300
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    tokens = AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text(), return_tensors="pt")["input_ids"]
    report = prune_model(model, Recipe(method="emp-wanda", targets="mlp"), list(tokens[0, : 32 * 512].reshape(-1, 4, 512)))
    assert f"sparsity of the MLP: {report.targets.sparsity_of_targets:.2%}" in done.stdout
    page_weights = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype="auto").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, page_weights[name]), name
