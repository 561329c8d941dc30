"""Memory does not grow with the checkpoint."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_model

from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.pruning import Pruner
from emp_llm.models.targets import Architecture, build_skeleton
from emp_llm.selection.budgets import EffectiveBudget
from emp_llm.selection.scheme import Scheme


def test_peak_of_a_data_free_prune(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "measure_memory.py"
    line = [sys.executable, str(script), "--gigabytes", "1", "--folder", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    peak = re.search(r"peak resident memory (\d+) MB", done.stdout)
    assert peak is not None
    assert int(peak[1]) < 1000, done.stdout


@pytest.mark.parametrize("group", ["row", "matrix"])
def test_outcomes_hold_their_rows_and_nothing_else(tmp_path: Path, group: str) -> None:
    """A view of a block's mask, kept to the end of a matrix, once held the whole mask."""
    checkpoint = Checkpoint(make_model(tmp_path / "model"))
    targets = Architecture(checkpoint, build_skeleton(checkpoint.folder)).select("mlp")
    scheme = Scheme("magnitude", EffectiveBudget(), group)  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    for outcome in Pruner(checkpoint, targets, scheme, block_weights=100).write(tmp_path / "out"):
        held = [outcome.kept, outcome.kept_mass, outcome.mass, outcome.n_eff, outcome.s_eff]
        for values in held:
            assert values is not None
            assert values.untyped_storage().nbytes() == 8 * values.numel() <= 8 * outcome.target.matrix.rows
