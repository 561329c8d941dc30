"""Fixtures: tiny models made once, the folder with real models and data, and a way to run commands as a user does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which other packages do as well

from tiny import make_model

from emp_llm.calibrate import calibrate
from emp_llm.prune import prune

SHARED = Path(__file__).parents[2] / "shared"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor fill the user's cache."""
    os.environ["EMP_LLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by family name; made when first asked for. Read-only: copy it before changing it."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text of about 20,000 bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"The {i}th lamp on {('quiet', 'loud', 'narrow')[i % 3]} street is lit at {i % 24}.\n" for i in range(450))
    )
    return path


@pytest.fixture(scope="session")
def norms(models: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Activations file of a tiny model by family name; made when first asked for."""
    folder = tmp_path_factory.mktemp("norms")

    def file(family: str) -> Path:
        path = folder / f"{family}.safetensors"
        if not path.exists():
            calibrate(str(models(family)), path, str(text), samples=4, seqlen=64, device_map="cpu")
        return path

    return file


@pytest.fixture(scope="session")
def pruned(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's tiny model, pruned by magnitude; made when first asked for. Read-only."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("pruned") / family
            prune(str(models(family)), made[family], method="emp-magnitude")
        return made[family]

    return folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real models and data, where they are at hand."""
    if not SHARED.is_dir():
        pytest.skip("the folder with real models and data is not beside this checkout")
    return SHARED


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command as a subprocess in an empty folder: run("prune", "--model", ...) -> CompletedProcess."""

    def call(command: str, *arguments: object, cwd: Path = tmp_path) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", f"emp_llm.{command}", *map(str, arguments)]
        environment = os.environ | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)

    return call
