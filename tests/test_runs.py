"""Runs: complete when they are made, and never changed."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from import_graph import PACKAGE

from emp_llm import prune
from emp_llm.runs import prune_run
from emp_llm.runs.prune_run import PruneRun
from emp_llm.runs.run import Run
from emp_llm.structure import prune_structure

Models = Callable[[str], Path]


def test_every_run_is_frozen() -> None:
    found = []
    for path in (PACKAGE / "runs").glob("*.py"):
        for name, each in inspect.getmembers(import_module(f"emp_llm.runs.{path.stem}")):
            if inspect.isclass(each) and is_dataclass(each) and each.__module__.endswith(path.stem):
                assert each.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
                found.append(name)
    assert {"Run", "PruneRun", "SweepRun"} <= set(found)


@pytest.mark.parametrize(
    "how",
    [
        {"method": "emp-wanda"},
        {"method": "magnitude", "memory": "60KB"},
        {"structure": "neurons", "parameters": "38000"},
        {"method": "wanda", "heal": True, "heal_steps": 2, "samples": 6},
    ],
    ids=["weights", "budget", "units", "heal"],
)
def test_a_run_is_complete_when_it_is_made(
    how: dict[str, Any], models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signature is the same before the first step and after the last one."""
    make: Any = prune_run.make_run
    made: list[PruneRun] = []
    signatures: list[Any] = []

    def keep(*given: Any) -> PruneRun:
        made.append(make(*given))
        signatures.append(deepcopy(made[0].signature))
        return made[0]

    monkeypatch.setattr(prune_run, "make_run", keep)
    monkeypatch.setattr(prune_structure, "make_run", keep)
    text = {"calibration": "demo", "samples": 2, "seqlen": 32}
    prune(models("llama"), output=tmp_path / "out", **text | how)
    (run,) = made
    assert run.signature == signatures[0]
    for field in fields(run):
        with pytest.raises(FrozenInstanceError):
            setattr(run, field.name, None)
    assert isinstance(run, Run)
    assert prune_run.awaits_evaluation(run) is False
