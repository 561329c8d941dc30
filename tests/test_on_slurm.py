"""A study on a real Slurm, by Snakemake's plugin."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from slurm_service import Slurm
from slurm_service import slurm as slurm  # a fixture
from test_study import edited, needs_snakemake, planned, run_here, snakemake, tables_of

# A stand-in for a job that the node kills: the first prune ends so, and Snakemake starts it again.
KILLED = """#!/bin/sh
if [ "$1" = prune ] && mkdir "{note}" 2> /dev/null; then kill -9 $$; fi
exec {python} -m emp_llm "$@"
"""
PROFILE = """
executor: slurm
jobs: 4
slurm-no-account: true
slurm-status-command: squeue
slurm-init-seconds-before-status-checks: 2
retries: 2
"""


@needs_snakemake
def test_a_study(
    slurm: Slurm, evaluable: Callable[[str], Path], task_suite: Path, tmp_path: Path
) -> None:
    """A job is killed: it starts again, and the tables are those of the commands alone."""
    study = tmp_path / "slurm" / "study"
    how = {"methods": "magnitude", "calibration": "demo", "limit": 4}
    planned(evaluable, study, suite=str(task_suite), **how)
    need = {"gpus": 0, "memory_gb": 2, "hours": 1, "cores": 1}
    program = tmp_path / "program"
    note = tmp_path / "note"
    program.write_text(KILLED.format(note=note, python=sys.executable))
    program.chmod(0o755)
    needs = dict.fromkeys(("calibrate", "prune", "evaluate"), need)
    edited(study, command=str(program), needs=needs)
    local = Path(shutil.copytree(study, tmp_path / "local" / "study"))
    (study / "profiles" / "default" / "config.yaml").write_text(PROFILE)
    own = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
    done = snakemake(study, "--quiet", "rules", **own)
    assert done.returncode == 0, done.stderr
    assert note.exists()
    assert "Trying to restart job" in done.stderr
    run_here(local)
    made = (study / "tables" / "tables.md").read_text()
    assert made == tables_of(local)
    assert "dense" in made
    names = {path.name for path in (study / "tables").iterdir()} - {"figures"}
    for name in names - {"report.md", "report.json"}:
        assert (study / "tables" / name).read_bytes() == (local / "tables" / name).read_bytes()
    assert os.listdir(study / "runs") == ["llama.magnitude-0.5"]
