"""Studies on a real Slurm: submitted, stopped, requeued, drained, and the controller killed."""

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from slurm_service import NODES, Slurm
from slurm_service import slurm as slurm  # a fixture
from studies import TOKEN, job, study_of

ROOT = Path(__file__).parents[1]

OPTIONS = "--methods emp-wanda --calibration demo --samples 8 --seqlen 64 --suite {suite} --limit 4"
# A sitecustomize.py: if there is the note, the dense evaluation takes it, and waits in the middle
# of its work for a signal.
HOLD = """
import os, signal, sys, threading, time

def watch():
    while not os.path.exists(sys.orig_argv[-1]):
        time.sleep(0.001)
    os.unlink({note!r})
    os.kill(os.getpid(), signal.SIGUSR1)

if sys.orig_argv[-1] == "results/llama.dense.json" and os.path.exists({note!r}):
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(300))
    threading.Thread(target=watch, daemon=True).start()
"""
# A stand-in for emp-llm on the nodes: it notes when a job begins and what is around it, and then
# makes the job's output, unless the job is to fail, or to end as after SIGTERM for the first time.
STAND_IN = """#!/bin/bash
job="$4"
[ "$job" != after-fails ] || [ -e activations/fails ] || exit 2  # as emp-llm refuses it
env > "around/$job"
echo "$job" >> order
case "$job" in
fails) [ -e mended ] || exit 1 ;;
stops) [ -e "around/stopped" ] || { touch around/stopped; exit 143; } ;;
loses) [ -e "around/lost" ] || { touch around/lost; exit 75; } ;;
esac
mkdir -p activations
touch "activations/$job"
"""


@pytest.fixture
def login(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """This process is on the login node, with a token in its environment."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return slurm


def test_arrays_of_a_stand_in(login: Slurm, command: Run, tmp_path: Path) -> None:
    """Dependencies, the environment, requeueing, failures, and submitting again: with a shell
    script in place of emp-llm.
    """
    jobs = [job("a"), job("stops"), job("fails"), job("loses")]
    jobs += [job(f"after-{name}", name, memory_gb=2.0) for name in ("a", "stops", "fails")]
    jobs += [job("last", "a", "after-stops")]
    program = tmp_path / "program"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    site = (
        f'command = "{program}"\noffline = true\ncpus = 1\nscratch = '
        '"$PWD/scratch/$SLURM_JOB_ID"\nprolog = ["export MINE=1"]'
    )
    study = study_of(tmp_path / "my study", jobs, site)
    (study / "around").mkdir()

    def submit(words: str) -> None:
        done = command("submit", study, "--site", study / "site.toml", "--no-prepare")
        assert words in done.stdout

    def settle() -> None:
        login.wait(lambda: not login.queue(), 60, "the jobs did not end")

    for node in NODES:
        login.drain(node)
    submit("8 jobs submitted")
    submit("nothing to submit: 8 already queued")
    for node in NODES:
        login.resume(node)
    settle()
    assert {path.name for path in (study / "activations").iterdir()} == {
        each.id for each in jobs
    } - {"fails", "after-fails"}
    order = (study / "order").read_text().split()
    assert (order.count("stops"), order.count("loses"), order.count("a")) == (2, 2, 1)
    assert "after-fails" not in order
    for each in jobs:
        for before in each.after:
            if each.id in order:
                assert order.index(each.id) > max(
                    i for i, name in enumerate(order) if name == before
                ), order
    submit("2 jobs submitted; 6 done")
    (study / "mended").touch()
    settle()
    submit("nothing to submit: 8 done")
    around = {
        path.name: dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))
        for path in study.glob("around/*")
        if path.name in {each.id for each in jobs}
    }
    for name, restarts in (("a", "0"), ("stops", "1"), ("loses", "1")):
        task = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**around[name])
        assert login.about(task)["Restarts"] == restarts
    alone = around["a"]
    assert (alone["HF_HUB_OFFLINE"], alone["MINE"], alone["OMP_NUM_THREADS"]) == ("1", "1", "1")
    assert alone["TMPDIR"] == f"{study}/scratch/{alone['SLURM_JOB_ID']}"
    refuse_secrets(login, study)


def plan_of(study: Path, command: Run, model: Path, suite: Path) -> list[str]:
    """Plan a study of a recipe and a suite. Returns the commands of the jobs."""
    command("plan", "--models", model, "--output", study, *OPTIONS.format(suite=suite).split())
    jobs = [json.loads(line) for line in (study / "plan.jsonl").read_text().splitlines()]
    for each in jobs:
        short = each["id"] == "llama.dense.evaluate"
        each["needs"] = {"hours": 0.16 if short else 0.25}
    (study / "plan.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in jobs))
    return [each["command"] for each in jobs]


def test_a_study(
    login: Slurm, command: Run, evaluable: Callable[[str], Path], task_suite: Path, tmp_path: Path
) -> None:
    """A job reaches its time limit, a node is drained, the controller is killed: the tables are
    those of the commands alone.
    """
    study = tmp_path / "slurm" / "study"
    local = tmp_path / "local" / "study"
    note = tmp_path / "note"
    lines = plan_of(study, command, evaluable("llama"), task_suite)
    shutil.copytree(study, local)
    note.touch()
    (tmp_path / "sitecustomize.py").write_text(HOLD.format(note=str(note)))
    site = f'prolog = ["export PYTHONPATH={tmp_path}:{ROOT}"]\ncpus = 1\nsignal_seconds = 170\n'
    (tmp_path / "site.toml").write_text(site)
    submit = ("submit", study, "--site", tmp_path / "site.toml")
    done = command(*submit, "--dry-run")
    assert (done.returncode, (study / "slurm").exists()) == (0, False)
    assert "4 jobs to submit" in done.stdout
    assert "4 jobs submitted" in command(*submit, "--no-prepare").stdout
    assert "0 jobs of 4 done" in command("status", study).stdout
    login.wait(
        lambda: (study / "jobs" / "llama.dense.evaluate.json").exists(),
        200,
        "no evaluation has begun",
    )
    held_task = json.loads((study / "jobs" / "llama.dense.evaluate.json").read_text())[
        "scheduler_job"
    ]
    login.wait(lambda: not note.exists(), 200, "the dense evaluation has not come to its middle")
    # Less than 170 seconds are left.
    login.call("scontrol", "update", f"jobid={held_task}", "timelimit=3")
    login.drain(NODES[1])
    for line in lines:
        command(*shlex.split(line)[1:], cwd=local)
    # The controller, killed just when it requeues a task, forgets that.
    login.wait(lambda: login.about(held_task)["Restarts"] != "0", 120, "no time limit was reached")
    login.call("scontrol", "update", f"jobid={held_task}", "timelimit=60")
    login.kill_controller()
    time.sleep(1)
    login.start_controller()
    assert login.node_states()[NODES[1]].startswith("drain")
    login.wait(lambda: not login.queue(), 200, "the jobs did not end")
    states = {path.stem: json.loads(path.read_text()) for path in study.glob("jobs/*.json")}
    assert "4 jobs of 4 done" in command("status", study).stdout, login.logs()
    assert {state["status"] for state in states.values()} == {"done"}, login.logs()
    held = states.pop("llama.dense.evaluate")
    assert held["attempts"] >= 2  # the time limit may come again
    assert [state["attempts"] for state in states.values()] == [1, 1, 1]
    # SIGTERM may come before an attempt begins.
    assert int(login.about(held_task)["Restarts"]) >= held["attempts"] - 1
    log = (study / "logs" / "llama.dense.evaluate.log").read_text()
    assert log.count("--- attempt ") == held["attempts"]
    assert "terminated by SIGTERM." in log
    assert "resuming after 1 finished part of the suite" in log
    tables = []
    for folder in (study, local):
        command("collect", folder, "--no-plots")
        tables.append(
            {
                p.relative_to(folder): p.read_bytes()
                for p in folder.rglob("tables/**/*")
                if p.is_file()
            }
        )
    assert len(tables[0]) >= 3
    assert tables[0] == tables[1]
    assert "4 done" in command(*submit).stdout
    refuse_secrets(login, study)


def refuse_secrets(login: Slurm, study: Path) -> None:
    """The token of the login node is in no file of the study or of Slurm, and in nothing that
    Slurm tells.
    """
    assert os.environ["HF_TOKEN"] == TOKEN
    assert TOKEN not in login.call("scontrol", "show", "job", "--details").stdout
    files = [
        path for folder in (study, login.folder) for path in folder.rglob("*") if path.is_file()
    ]
    assert len(files) > 20
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
