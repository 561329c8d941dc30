"""Commands and models on simulated GPUs, in processes of their own: tests/simulated_gpus."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "simulated_gpus"
ROOT = FOLDER.parents[1]
# The cases of tests/test_cuda.py that take seconds; the others are for a GPU.
CASES = "simulated_gpus or several_devices or up_to_rounding or activations_file"


def cannot_simulate() -> str | None:
    """Why GPUs cannot be simulated here; None if they can."""
    if shutil.which("g++") is None:
        return "needs g++, which compiles the simulation"
    if not torch.__version__.startswith("2.13."):
        return f"GPUs are simulated for torch 2.13, not {torch.__version__}"
    if torch.cuda._is_compiled():
        return "this torch has CUDA of its own"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "GPUs are simulated on Linux and x86-64"
    return None


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (2, [FOLDER / "roads.py"]),
        (4, [FOLDER / "cases.py", ROOT / "tests" / "test_cuda.py", "-k", CASES]),
    ],
    ids=["roads", "cases"],
)
def test_on_simulated_gpus(tmp_path: Path, gpus: int, words: list[object]) -> None:
    reason = cannot_simulate()
    if reason is not None:
        pytest.skip(reason)
    line = [sys.executable, "-m", "pytest", "-p", "simulated_gpus", "-p", "no:cacheprovider"]
    line += [f"--basetemp={tmp_path / 'pytest'}", *map(str, words)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "TRITON_INTERPRET", "CUDA_", "SIMULATED_"))
    } | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}",
        "SIMULATED_GPUS": str(gpus),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_it_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "g++" in str(cannot_simulate())
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    assert "not 2.6.0" in str(cannot_simulate())
