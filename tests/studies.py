"""Small studies with a site file, and stand-ins for Slurm's commands."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from emp_llm.cluster.jobs import Job, Needs, write_plan

TOKEN = "hf_" + "Qx7" * 11


def job(name: str, *after: str, **needs: Any) -> Job:
    """A job whose output is a file, so that it is done as soon as there is one."""
    output = f"activations/{name}"
    command = f"emp-llm calibrate --model /models/m --calibration demo --output {output}"
    return Job(
        id=name,
        kind="calibrate",
        command=command,
        after=list(after),
        output=output,
        needs=Needs(**needs),
    )


def study_of(folder: Path, jobs: list[Job], site: str = "") -> Path:
    """A planned study with a site file beside its plan."""
    folder.mkdir()
    write_plan(folder, jobs)
    (folder / "site.toml").write_text(site)
    return folder


def command_job(name: str, kind: Any, line: str, *after: str) -> Job:
    output = f"results/{name}.json" if kind == "evaluate" else f"runs/{name}"
    return msgspec.structs.replace(
        job(name, *after),
        kind=kind,
        command=f"emp-llm {kind} {line} --output {output}",
        output=output,
    )


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Programs of Slurm as shell scripts, before all others on PATH."""
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
