"""Fixtures: tiny models created once, the folder with real models and data, and a way to run
commands as a user does.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, which other packages do as well.
    os.environ["TRITON_INTERPRET"] = "1"

from launch import run_here, words_of
from runs import make_runs
from suites import make_evaluable_model, make_suite
from tiny import first_blocks, make_model

from emp_llm import calibrate, prune
from emp_llm.common.errors import UserError

pytest_plugins = ["hub_client"]
SHARED = Path(__file__).parents[2] / "shared"
DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
# Modules with slow tests start first, so that no worker ends long after the other. Those with a
# client of the Hub are neighbours, so that one worker runs them with one client.
FIRST = (
    "test_on_slurm",
    "test_simulated_gpus",
    "test_ranks",
    "test_triton",
    "test_shared",
    "test_evaluate",
    "test_resume",
    "test_hub",
    "test_card",
    "test_push",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST)
    )


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor fill the user's cache."""
    os.environ["EMP_LLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    # Messages are those of commands, with flags; test_bad_input has those of Python.
    UserError.in_shell = True
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits


@pytest.fixture(scope="session", autouse=True)
def _no_flushes() -> Iterator[None]:
    """Nothing is flushed to the disk within this process, which takes milliseconds a call: no
    test cuts the power.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # as fsync, it refuses a file that is not open
        yield


_FROZEN: set[int] = set()  # the numbers of imported modules at which objects were frozen


@pytest.fixture(autouse=True)
def _freeze_imported_objects() -> None:
    """Exclude the objects of imported libraries from garbage collections, which runs do to free
    their models: those of transformers take a tenth of a second, several times a run.
    """
    if len(sys.modules) not in _FROZEN:
        _FROZEN.add(len(sys.modules))
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by family name; created on first use. Read-only: copy it before
    changing it.
    """
    return cache(lambda family: make_model(tmp_path_factory.mktemp("models") / family, family))


@pytest.fixture(scope="session")
def tiny_llama(models: Callable[[str], Path]) -> Path:
    """Folder of the tiny Llama of `models`. Read-only."""
    return models("llama")


@pytest.fixture(scope="session")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first three of the six blocks of the demo model: trained weights at half the time.
    Read-only.
    """
    return first_blocks(DEMO, tmp_path_factory.mktemp("demo") / "model", 3)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text of about 20,000 bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(
            f"The {i}th lamp on {('quiet', 'loud', 'narrow')[i % 3]} street is lit at {i % 24}.\n"
            for i in range(450)
        )
    )
    return path


@pytest.fixture(scope="session")
def norms(
    models: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Activations file of a tiny model by family name; created on first use."""
    folder = tmp_path_factory.mktemp("norms")

    @cache
    def file(family: str) -> Path:
        path = folder / f"{family}.safetensors"
        calibrate(
            model=models(family),
            output=path,
            calibration=str(text),
            samples=4,
            seqlen=64,
            device_map="cpu",
        )
        return path

    return file


@pytest.fixture(scope="session")
def pruned(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Folder of a family's tiny model, pruned by magnitude; created on first use. Read-only."""

    @cache
    def folder(family: str) -> Path:
        output = tmp_path_factory.mktemp("pruned") / family
        prune(model=models(family), output=output, method="emp-magnitude")
        return output

    return folder


@pytest.fixture(scope="session")
def evaluable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As `models`, with a tokenizer for lm-eval."""
    return cache(
        lambda family: make_evaluable_model(tmp_path_factory.mktemp("evaluable") / family, family)
    )


@pytest.fixture(scope="session")
def llama_norms(norms: Callable[[str], Path]) -> Path:
    return norms("llama")


@pytest.fixture(scope="session")
def pruned_llama(pruned: Callable[[str], Path]) -> Path:
    return pruned("llama")


@pytest.fixture(scope="session")
def evaluable_llama(evaluable: Callable[[str], Path]) -> Path:
    return evaluable("llama")


@pytest.fixture(scope="session")
def task_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite file with a short text and three small tasks; `short.toml` beside it has the text
    alone.
    """
    return make_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="session")
def runs(
    models: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of evaluated runs of the tiny Llama, by the names `runs.NAMES`. Read-only."""
    return make_runs(models, text, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real models and data, if present."""
    if not SHARED.is_dir():
        pytest.skip("the folder with real models and data is not beside this checkout")
    return SHARED


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command as a subprocess in an empty folder: run("prune --model", model). Slow:
    prefer `command`.
    """

    def call(*line: object, cwd: Path = tmp_path) -> "subprocess.CompletedProcess[str]":
        line = (sys.executable, "-m", "emp_llm", *words_of(*line))
        environment = os.environ | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return call


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line within this process, in an empty folder: command("prune --model", model).

    Exit code, output and messages are those of the process that `run` would start. The Hub is as
    the test left it. The exit code must be `code`; None: any.
    """
    monkeypatch.setenv("COLUMNS", "200")

    def call(
        *arguments: object, cwd: Path = tmp_path, code: int | None = 0
    ) -> "subprocess.CompletedProcess[str]":
        line = words_of(*arguments)
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["emp-llm", *line])
        done = run_here(line)
        assert code in (None, done.returncode), done.stderr
        return done

    return call


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device maps with which models are loaded from now on."""
    from emp_llm.models import loading

    found = []
    load = loading.load_model

    def noted(folder: Path, place: str, *rest: Any) -> Any:
        found.append(place)
        return load(folder, place, *rest)

    monkeypatch.setattr(loading, "load_model", noted)
    return found
