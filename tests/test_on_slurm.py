"""Studies on a real Slurm: submitted, stopped, requeued, drained, and the controller killed."""

import os
import re
from pathlib import Path

import pytest
from conftest import Run
from slurm_service import NODES, Slurm
from slurm_service import slurm as slurm  # a fixture
from test_slurm import TOKEN, job, study_of

ROOT = Path(__file__).parents[1]

# A stand-in for emp-llm on the nodes: it notes when a job begins and what is around it, and then makes the job's output, unless
# the job is to fail, or to end as after SIGTERM for the first time.
STAND_IN = """#!/bin/bash
job="$4"
env > "around/$job-$SLURM_NODEID"
echo "$job" >> order
case "$job" in
fails) [ -e mended ] || exit 1 ;;
stops) [ -e "around/stopped" ] || { touch around/stopped; exit 143; } ;;
esac
mkdir -p activations
[ "$SLURM_NODEID" != 0 ] || touch "activations/$job"
"""


@pytest.fixture
def login(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """This process is on the login node, with a token in its environment."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return slurm


def test_arrays_of_a_stand_in(login: Slurm, command: Run, tmp_path: Path) -> None:
    """Dependencies, the environment, requeueing, failures, and submitting again: with a shell script in place of emp-llm."""
    jobs = [job("a"), job("stops"), job("fails")]
    jobs += [job(f"after-{name}", name, memory_gb=2.0) for name in ("a", "stops", "fails")]
    jobs += [job("two-nodes", "a", "after-stops", nodes=2)]
    program = tmp_path / "program"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    site = (
        f'command = "{program}"\noffline = true\ncpus = 1\nscratch = "$PWD/scratch/$SLURM_JOB_ID"\nprolog = ["export MINE=1"]'
    )
    study = study_of(tmp_path / "study", jobs, site)
    (study / "around").mkdir()

    def submit(words: str) -> None:
        done = command("submit", study, "--site", study / "site.toml")
        assert done.returncode == 0, done.stderr
        assert words in done.stdout

    def settle() -> None:
        login.wait(lambda: not login.queue(), 60, "the jobs did not end")

    for node in NODES:
        login.drain(node)
    submit("7 jobs submitted")
    submit("nothing to submit: 7 already queued")
    notes = study / "slurm" / "submitted.jsonl"
    notes.rename(study / "noted")  # as if each submission had been killed before its note
    submit("nothing to submit: 7 already queued")
    (study / "noted").rename(notes)
    for node in NODES:
        login.resume(node)
    settle()
    assert {path.name for path in (study / "activations").iterdir()} == {"a", "stops", "after-a", "after-stops", "two-nodes"}
    order = (study / "order").read_text().split()
    assert order.count("stops") == 2
    assert "after-fails" not in order
    for each in jobs:
        for before in each.after:
            if each.id in order:
                assert order.index(each.id) > max(i for i, name in enumerate(order) if name == before), order
    submit("2 jobs submitted; 5 done")
    (study / "mended").touch()
    settle()
    submit("nothing to submit: 7 done")
    assert login.about(task_of(study, "stops"))["Restarts"] == "1"
    around = {path.name: dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE)) for path in study.glob("around/*-*")}
    for number in "01":
        assert re.fullmatch(r"node1:2\d{4}", around[f"two-nodes-{number}"]["EMP_LLM_RENDEZVOUS"])
    alone = around["a-0"]
    assert (alone["HF_HUB_OFFLINE"], alone["MINE"], alone["OMP_NUM_THREADS"]) == ("1", "1", "1")
    assert alone["TMPDIR"] == f"{study}/scratch/{alone['SLURM_JOB_ID']}"
    assert "EMP_LLM_RENDEZVOUS" not in alone
    refuse_secrets(login, study)


def task_of(study: Path, name: str) -> str:
    """The first task that a job was."""
    found = re.search(rf'"job":"{name}",.*"task":"(\w+)"', (study / "slurm" / "submitted.jsonl").read_text())
    assert found is not None
    return found[1]


def refuse_secrets(login: Slurm, study: Path) -> None:
    """The token of the login node is in no file of the study or of Slurm, and in nothing that Slurm tells."""
    assert os.environ["HF_TOKEN"] == TOKEN
    assert TOKEN not in login.call("scontrol", "show", "job", "--details").stdout
    files = [path for folder in (study, login.folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
