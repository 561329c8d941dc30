"""Studies of many jobs: the plan file, the plan of options, the run on one machine, its state,
and the collected tables.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run

from emp_llm import cli, collect, plan, status
from emp_llm.checkpoint.locks import FileLock
from emp_llm.cluster import jobs as cluster_jobs
from emp_llm.cluster.jobs import (
    Attempt,
    Job,
    JobFiles,
    JobState,
    Needs,
    launch_of,
    read_plan,
    write_plan,
)
from emp_llm.commands.run import run as run_study
from emp_llm.commands.run import show as show_run
from emp_llm.commands.status import show as show_status
from emp_llm.common.errors import UserError

Models = Callable[[str], Path]


def job(name: str, after: tuple[str, ...] = (), **more: Any) -> Job:
    values = {
        "kind": "prune",
        "command": f"emp-llm prune --output runs/{name}",
        "output": f"runs/{name}",
    }
    return Job(id=name, after=list(after), **values | more)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Programs of jobs by id, in place of their commands; a job without one writes an output
    that emp-llm would take.
    """
    programs: dict[str, str] = {}

    def launch_of(job: Job, **_: Any) -> tuple[list[str], dict[str, str]]:
        report = json.dumps({"command": job.command})
        write = (
            f"import os; os.makedirs({job.output!r}); open({job.output!r} + "
            f"'/emp_report.json', 'w').write({report!r})"
        )
        program = programs.get(job.id, "WRITE").replace("WRITE", write)
        return [sys.executable, "-S", "-c", program], dict(os.environ)

    monkeypatch.setattr(cluster_jobs, "launch_of", launch_of)
    return programs


def study_of(folder: Path, *jobs: Job) -> Path:
    write_plan(folder, jobs)
    return folder


# The plan file.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", r"plan\.jsonl:2: this line is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"colour": 1, "id": "x"}', "not a job file"),
        ({"id": "../x"}, "must be of letters"),
        ({"id": "first"}, "two jobs have the id first"),
        ({"output": "runs/first"}, "two jobs have the output runs/first"),
        ({"after": ["other"]}, "second waits for other, which is not in the plan"),
        ({"after": ["second"]}, "these jobs wait for each other: second -> second"),
        ({"command": "rm -rf x"}, 'must begin with "emp-llm prune"'),
        ({"command": "emp-llm prune 'x"}, "a quotation mark must be closed"),
        ({"output": "a/../../b"}, "within the study's folder"),
        ({"needs": {"memory_gb": -1}}, "needs.memory_gb"),
        ({"needs": {"gpu": 1}}, "needs: unknown field gpu; .* Did you mean gpus"),
        ({"aftr": ["first"]}, "unknown field aftr; .* Did you mean after"),
        ({"format": "emp-llm job 9"}, "Update emp-llm"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: Any, message: str) -> None:
    study_of(tmp_path, job("first"), job("second"))
    first, second = (tmp_path / "plan.jsonl").read_text().splitlines()
    line = change if isinstance(change, str) else json.dumps(json.loads(second) | change)
    (tmp_path / "plan.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(UserError, match=message):
        read_plan(tmp_path)


def test_the_order_of_jobs(tmp_path: Path) -> None:
    """Those that come first stand before the others; a circle is named."""
    study_of(tmp_path, job("c", ("b",)), job("b", ("a",)), job("a"))
    assert [each.id for each in read_plan(tmp_path)] == ["a", "b", "c"]
    study_of(tmp_path, job("a", ("c",)), job("b", ("a",)), job("c", ("b",)), job("free"))
    with pytest.raises(
        UserError,
        match=r"wait for each other: a -> c -> b -> a\. Take one out of "
        r"after",
    ):
        status(tmp_path)
    (tmp_path / "plan.jsonl").write_text("\n")
    with pytest.raises(UserError, match="the plan has no jobs"):
        run_study(tmp_path)
    (tmp_path / "plan.jsonl").unlink()
    with pytest.raises(UserError, match="there is no plan; write one with emp-llm plan"):
        run_study(tmp_path)


# From options to jobs.


def planned(made: Models, folder: Path, **options: Any) -> list[Job]:
    values = {"models": str(made("llama")), "suite": "demo", "quiet": True}
    return plan(output=folder, **values | options).jobs


def test_each_recipe_has_its_jobs(models: Models, tmp_path: Path) -> None:
    names = f"{models('llama')},{models('opt')}"
    jobs = planned(
        models,
        tmp_path,
        models=names,
        methods="emp-wanda,magnitude",
        betas="0.5,1",
        sparsities="0.4",
        samples=4,
    )
    assert jobs == read_plan(tmp_path)
    kinds = [(each.id, each.kind, each.after) for each in jobs[:8]]
    assert kinds == [
        ("llama.dense.evaluate", "evaluate", []),
        ("llama.calibrate", "calibrate", []),
        ("llama.emp-wanda-beta-0.5.prune", "prune", ["llama.calibrate"]),
        ("llama.emp-wanda-beta-0.5.evaluate", "evaluate", ["llama.emp-wanda-beta-0.5.prune"]),
        ("llama.emp-wanda-beta-1.prune", "prune", ["llama.calibrate"]),
        ("llama.emp-wanda-beta-1.evaluate", "evaluate", ["llama.emp-wanda-beta-1.prune"]),
        ("llama.magnitude-0.4.prune", "prune", []),
        ("llama.magnitude-0.4.evaluate", "evaluate", ["llama.magnitude-0.4.prune"]),
    ]
    assert {each.id.partition(".")[0] for each in jobs[8:]} == {"opt"}
    words = shlex.split(jobs[4].command)
    assert words[:3] == ["emp-llm", "prune", "--model"]
    assert Path(words[3]).is_absolute()
    assert words[4:] == [
        *("--method", "emp-wanda", "--beta", "1", "--activations", "activations/llama.safetensors"),
        *("--output", "runs/llama.emp-wanda-beta-1"),
    ]
    assert "--samples 4" in jobs[1].command


def test_methods_that_move_weights(models: Models, tmp_path: Path) -> None:
    """They are planned as prunes; a sweep refuses them."""
    how = {"patterns": "2:4", "calibration": "demo", "prune_options": "--propagate pruned"}
    jobs = planned(models, tmp_path, methods="sparsegpt,admm", **how)
    prunes = {each.id: each for each in jobs if each.kind == "prune"}
    assert list(prunes) == ["llama.sparsegpt-2of4.prune", "llama.admm-2of4.prune"]
    assert all("--calibration demo" in each.command and not each.after for each in prunes.values())
    how |= {"patterns": None, "sparsities": "0.5", "prune_options": "--heal"}
    (healed,) = (
        each
        for each in planned(models, tmp_path, methods="wanda", overwrite=True, **how)
        if each.kind == "prune"
    )
    assert "--calibration demo" in healed.command
    assert "--heal" in healed.command
    assert not healed.after  # it reads the text itself
    how["prune_options"] = "--propagate pruned"
    how["prune_options"] = None
    (swept,) = (
        each
        for each in planned(
            models, tmp_path, methods="sparsegpt", per="model", overwrite=True, **how
        )
        if each.kind == "sweep"
    )
    assert "--methods sparsegpt" in swept.command


def test_a_table(models: Models, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(
        f"models = ['{models('llama')}']\nmethods = ['magnitude']\nsparsities = [0.25, 0.5]\nsuite "
        "= 'demo'\n"
    )
    jobs = plan(table, output=tmp_path / "a", quiet=True).jobs
    assert [each.id for each in jobs if each.kind == "prune"] == [
        "llama.magnitude-0.25.prune",
        "llama.magnitude-0.5.prune",
    ]
    fewer = plan(table, output=tmp_path / "b", sparsities="0.75", quiet=True).jobs
    assert [each.id for each in fewer if each.kind == "prune"] == ["llama.magnitude-0.75.prune"]
    table.write_text("modles = ['x']")
    with pytest.raises(UserError, match=r"table\.toml: .*modles"):
        plan(table, output=tmp_path / "c")
    table.write_text("models = 'x\n")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        plan(table, output=tmp_path / "c")
    with pytest.raises(UserError, match=r"is a folder.*--models"):
        plan(models("llama"), output=tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": None}, "--models is missing"),
        ({"methods": "wandaa"}, "'wandaa' is not one of"),
        ({"betas": "x", "methods": "emp-wanda"}, "--betas 'x': expected numbers"),
        ({"betas": "1", "methods": "wanda"}, "--betas is for emp methods"),
        ({"methods": "wanda", "prune_options": "--beta 1"}, "--beta does not go with method wanda"),
        ({"evaluate_options": "--suite 'demo"}, "--evaluate-options .*No closing quotation"),
        ({"suite": "none-such"}, "none-such"),
        ({"models": "no/such/folder"}, "no/such/folder"),
        ({"calibration": "nowhere"}, "nowhere"),
        ({"calibration": "nowhere.txt:5,demo:5"}, r"nowhere\.txt: no such file"),
        ({"suite": "perplexity,file=nowhere.txt"}, r"nowhere\.txt: no such file"),
        ({"per": "models"}, "--per 'models' is not one of recipe, model"),
    ],
)
def test_wrong_options_of_a_plan(
    models: Models, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        planned(models, tmp_path, **options)
    assert not (tmp_path / "plan.jsonl").exists()


def test_paths_of_texts_become_absolute(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: jobs run in the study's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a, b.txt", "c.txt", "V.txt"):
        (tmp_path / name).write_text("Text.")
    jobs = plan(
        models=[str(models("llama"))],
        methods="wanda",
        sparsities="0.5",
        calibration="a, b.txt:6,self:c.txt:2,demo:1",
        suite="perplexity,file=V.txt,seqlen=64",
        output="study",
    ).jobs
    (calibrate,) = [each for each in jobs if each.kind == "calibrate"]
    given = cluster_jobs.option_of(calibrate, "--calibration")
    mix = f"{tmp_path}/a, b.txt,samples=6,self:{tmp_path}/c.txt,samples=2,demo,samples=1"
    assert given == mix
    assert {
        cluster_jobs.option_of(each, "--suite") for each in jobs if each.kind == "evaluate"
    } == {f"perplexity,file={tmp_path}/V.txt,seqlen=64"}


def test_files_in_further_options(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are checked by the plan, and become absolute, as jobs run in the study's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("old.json", "my norms.safetensors", "V.txt"):
        (tmp_path / name).write_text("Text.")
    written = "results/llama.dense.json"
    further = {
        "prune_options": "--activations 'my norms.safetensors'",
        "evaluate_options": f"--beside=old.json --baseline {written}",
    }
    jobs = planned(models, tmp_path / "study", methods="wanda", **further)
    (prune,) = [each for each in jobs if each.kind == "prune"]
    given = cluster_jobs.option_of(prune, "--activations")
    assert given == f"{tmp_path}/my norms.safetensors"
    evaluate = jobs[-1]
    assert cluster_jobs.option_of(evaluate, "--beside") == f"{tmp_path}/old.json"
    assert cluster_jobs.option_of(evaluate, "--baseline") == written
    further = {"prune_options": "--calibration V.txt,samples=2"}
    (sweep,) = planned(models, tmp_path / "sweep", methods="wanda", per="model", **further)
    given = cluster_jobs.option_of(sweep, "--calibration")
    assert given == f"{tmp_path}/V.txt,samples=2"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("prune_options", "--activations nowhere.safetensors"),
        ("prune_options", "--evaluate perplexity --baseline=nowhere.json"),
        ("prune_options", "--refit --calibration nowhere.txt"),
        ("prune_options", "--evaluate perplexity,file=nowhere.txt"),
        ("evaluate_options", "--beside nowhere.json"),
        ("evaluate_options", "--baseline /nowhere"),
        ("evaluate_options", "--suite nowhere.toml"),
    ],
)
def test_missing_files_in_further_options(
    models: Models, tmp_path: Path, option: str, words: str
) -> None:
    with pytest.raises(UserError, match="nowhere"):
        planned(models, tmp_path, methods="wanda", **{option: words})
    assert not (tmp_path / "plan.jsonl").exists()


def test_another_plan_is_kept(models: Models, tmp_path: Path) -> None:

    planned(models, tmp_path, methods="magnitude")
    planned(models, tmp_path, methods="magnitude")  # the same
    with pytest.raises(
        UserError,
        match=r"it holds another plan; 5 jobs would change\. Name "
        r"another --output, or --overwrite",
    ):
        planned(models, tmp_path, methods="wanda")
    planned(models, tmp_path, methods="wanda", overwrite=True)


# Running.


def test_the_process_of_a_job() -> None:
    norms = job("norms", kind="calibrate", command="emp-llm calibrate --model 'my model'")
    words, environment = launch_of(norms, environment={"PATH": "/bin"})
    assert words == [sys.executable, "-m", "emp_llm", "calibrate", "--model", "my model"]
    assert environment == {"PATH": "/bin"}
    shown = {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
    _, environment = launch_of(norms, gpus=[1], threads=3, environment=shown)
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-7", "OMP_NUM_THREADS": "3"}
    _, environment = launch_of(job("a", needs=Needs(gpus=0)), environment=shown)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_jobs_run_in_order(
    scripted: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_of(tmp_path, job("c", ("a", "b")), job("a"), job("b", ("a",)))
    summary = run_study(tmp_path, workers=3)
    assert summary.done == ["a", "b", "c"]
    show_run(summary)
    assert capsys.readouterr().out == "3 jobs done\n"
    state = JobFiles(tmp_path, read_plan(tmp_path)[0]).state()
    assert state is not None
    assert (state.status, state.attempts, state.exit_code) == ("done", 1, 0)
    again = run_study(tmp_path)
    assert len(again.done) == 3
    files = JobFiles(tmp_path, job("a"))
    assert files.state() == state
    files.state_path.write_text('{"format": "emp-llm job sta')
    # A damaged state is none; the output says so.
    assert (files.state(), files.status()) == (None, "done")


def test_a_failed_job_stops_those_that_wait_for_it(
    scripted: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted["a"] = "print('one'); print('error: no such model', flush=True); raise SystemExit(2)"
    study_of(tmp_path, job("a"), job("b", ("a",)), job("c", ("b",)), job("free"))
    summary = run_study(tmp_path)
    assert (summary.done, summary.waiting) == (["free"], ["b", "c"])
    with pytest.raises(SystemExit, match="1"):
        show_run(summary)
    assert capsys.readouterr().out == "1 job done, 1 failed, 2 not run\n"
    show_status(status(tmp_path, lines=1))
    shown = capsys.readouterr().out
    assert "failed with exit code 2: a" in shown
    assert "    error: no such model\n" in shown
    assert f"to run it again: emp-llm run {tmp_path} --only a" in shown
    assert "waiting for jobs that failed: b, c" in shown
    assert "    one" not in shown
    for program, message in (
        ("pass", "the command ended well, but did not write runs/a"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "was ended by SIGKILL; the machine may have too little memory.",
        ),
    ):
        scripted["a"] = program
        (failed,) = run_study(tmp_path).failed
        assert message in failed.message
    del scripted["a"]  # the cause is gone
    assert run_study(tmp_path).complete
    show_status(status(tmp_path))
    assert "4 jobs of 4 done" in capsys.readouterr().out


def test_a_reason_that_jobs_of_a_kind_share_stops_the_rest(
    scripted: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = "print('error: V.txt: no such file.', flush=True); raise SystemExit(2)"
    scripted |= dict.fromkeys(["e1", "e2", "e3", "e4"], fails)
    others = {"kind": "evaluate"}
    jobs = [
        job(name, **others, command=f"emp-llm evaluate --output {name}")
        for name in ("e1", "e2", "e3", "e4")
    ]
    study_of(tmp_path, *jobs, job("a"), job("b"))
    summary = run_study(tmp_path)
    assert [state.id for state in summary.failed] == ["e1", "e2"]
    assert (summary.done, summary.waiting) == (["a", "b"], ["e3", "e4"])
    assert "2 evaluate jobs not started" in caplog.text
    # Each for a reason of its own.
    scripted |= {name: fails.replace("V.txt", name) for name in ("e1", "e2", "e3", "e4")}
    assert len(run_study(tmp_path).failed) == 4


def test_the_seconds_of_a_job_are_those_of_its_last_attempt(
    scripted: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scripted["a"] = "import time; time.sleep(0.5); raise SystemExit(1)"
    study_of(tmp_path, job("a"))
    run_study(tmp_path)
    del scripted["a"]
    caplog.set_level("INFO", "emp_llm")
    began = time.monotonic()
    run_study(tmp_path)
    state = JobFiles(tmp_path, job("a")).state()
    assert state is not None
    assert 0 < state.last_seconds <= time.monotonic() - began
    assert state.seconds >= 0.49 + state.last_seconds
    told = f"a: done in {state.last_seconds:.1f} s ({state.seconds:.1f} s in 2 attempts)."
    assert told in caplog.text


def test_only_some_jobs(scripted: dict[str, str], tmp_path: Path) -> None:
    study_of(tmp_path, job("a"), job("b", ("a",)))
    with pytest.raises(UserError, match="b waits for a, which is not done"):
        run_study(tmp_path, only="b")
    with pytest.raises(UserError, match="the plan has no job 'x'; emp-llm status lists its jobs"):
        run_study(tmp_path, only="a,x")
    assert run_study(tmp_path, only="b,a").done == ["a", "b"]


@pytest.mark.parametrize(
    ("handler", "signals", "code"),
    [("lambda *_: sys.exit(143)", 1, 143), ("signal.SIG_IGN", 2, 137)],
)
def test_a_signal_stops_the_commands(
    scripted: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handler: str,
    signals: int,
    code: int,
) -> None:
    """They end where they can go on, and the next run goes on with them; a second signal kills
    them.
    """
    scripted["a"] = (
        f"import signal, sys, time; signal.signal(signal.SIGTERM, {handler}); "
        "open('up', 'w'); time.sleep(60)"
    )
    study_of(tmp_path, job("a"), job("b", ("a",)))
    sleep = time.sleep
    left = list(range(signals))

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if left and (tmp_path / "up").exists():
            left.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path)
    assert time.monotonic() - began < 30
    files = JobFiles(tmp_path, job("a"))
    assert files.status() == "stopped"
    assert not files.lock_path.exists()
    assert (files.state() or pytest.fail("no state")).exit_code == code
    del scripted["a"]
    assert run_study(tmp_path).complete
    assert (files.state() or pytest.fail("no state")).attempts == 2


def in_fork(call: Callable[..., Any], study: Path, **options: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(
        target=call, args=(study,), kwargs=options
    )
    process.start()
    return process


def until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it does not happen")


def test_a_killed_run_loses_nothing(
    scripted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command goes on alone and holds the lock; the next run waits for it and does not start
    it twice.
    """
    monkeypatch.setattr(sys.modules["emp_llm.commands.run"], "_LOOK", 0.1)
    scripted["a"] = (
        "import time\nwhile not __import__('os').path.exists('go'): time.sleep(0.02)\nopen('ran', "
        "'a').write('x'); WRITE"
    )
    study_of(tmp_path, job("a"), job("b", ("a",)))
    process = in_fork(run_study, tmp_path, quiet=True)
    files = JobFiles(tmp_path, job("a"))
    until(lambda: files.state() is not None and files.runner() is not None)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert files.status() == "running"
    assert run_study(tmp_path, only="a").elsewhere == ["a"]
    threading.Timer(0.5, (tmp_path / "go").touch).start()
    assert run_study(tmp_path).done == ["a", "b"]
    assert (tmp_path / "ran").read_text() == "x"


def test_looking_at_a_lock_does_no_harm(scripted: dict[str, str], tmp_path: Path) -> None:
    """One who asks for the holder shares the lock for a moment, while a job starts."""
    files = JobFiles(study_of(tmp_path, job("a")), job("a"))
    files.lock_path.parent.mkdir()
    with files.lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        attempt = Attempt(tmp_path, job("a"))
        timer.join()
    until(lambda: attempt.poll() is not None)
    assert files.status() == "done"


def test_a_job_that_another_process_has_just_finished(
    scripted: dict[str, str], tmp_path: Path
) -> None:
    """Between the look at its state and its lock, another process finished it: it does not run
    again.
    """
    study_of(tmp_path, job("a"))
    lock = FileLock(tmp_path / "jobs" / "a.lock", "a")
    lock.path.parent.mkdir()
    lock.acquire()

    def finish() -> None:
        (tmp_path / "runs" / "a").mkdir(parents=True)
        (tmp_path / "runs" / "a" / "emp_report.json").write_text(
            json.dumps({"command": job("a").command})
        )
        lock.release()

    threading.Timer(0.2, finish).start()
    state = Attempt(tmp_path, job("a")).poll()
    assert state is not None
    assert state.status == "done"
    assert not (tmp_path / "logs" / "a.log").exists()
    assert not lock.path.exists()


def test_two_runs_share_the_jobs(
    scripted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["emp_llm.commands.run"], "_LOOK", 0.1)
    jobs = [job(f"j{number}") for number in range(8)]
    for each in jobs:
        scripted[each.id] = (
            f"import time; time.sleep(0.1); open('ran', 'a').write('{each.id} '); WRITE"
        )
    study_of(tmp_path, *jobs)
    process = in_fork(run_study, tmp_path, quiet=True)
    assert run_study(tmp_path, quiet=True).complete
    process.join()
    assert process.exitcode == 0
    assert sorted((tmp_path / "ran").read_text().split()) == [each.id for each in jobs]


def test_threads_are_the_schedulers(
    scripted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of a scheduler keeps its number of threads, and so does a run with OMP_NUM_THREADS;
    else workers share the cores.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given: list[int | None] = []
    launch_of = cluster_jobs.launch_of
    monkeypatch.setattr(
        cluster_jobs, "launch_of", lambda job, **how: given.append(how["threads"]) or launch_of(job)
    )
    study_of(tmp_path, job("a"), job("b"))
    assert run_study(tmp_path, only="a").complete
    assert run_study(tmp_path, workers=1).complete
    assert given == [None, len(os.sched_getaffinity(0))]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study_of(tmp_path / "limited", job("a"))
    assert run_study(tmp_path / "limited", workers=1).complete
    assert given[2:] == [None]


def test_a_full_disk(
    scripted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with a sentence, stops the other jobs, and goes on when there is room."""
    ends = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
    )
    scripted["b"] = f"{ends}; time.sleep(60)"
    scripted["c"] = (
        f"{ends.replace('sys.exit', '(time.sleep(0.5), pathlib.Path(str(1)).touch(), sys.exit')}); "
        "time.sleep(60)"
    )
    scripted["a"] = "import time; time.sleep(0.5); WRITE"
    study_of(tmp_path, job("a"), job("b"), job("c"))
    save = JobState.save

    def full(self: JobState, path: Path) -> None:
        if self.status != "running":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path)

    monkeypatch.setattr(JobState, "save", full)
    with pytest.raises(
        UserError,
        match=r"jobs/a\.json: cannot be written \(No space left on "
        r"device\)",
    ):
        run_study(tmp_path, workers=3)
    assert (tmp_path / "1").exists()  # the slower one was not killed while it cleaned up
    monkeypatch.setattr(JobState, "save", save)
    assert [JobFiles(tmp_path, each).status() for each in read_plan(tmp_path)] == [
        "done",
        "stopped",
        "stopped",
    ]
    scripted.clear()
    assert run_study(tmp_path).complete


# States.


def test_a_job_of_a_machine_that_is_gone(tmp_path: Path) -> None:
    files = JobFiles(tmp_path, job("a"))
    JobState(id="a", command=files.job.command, status="running", host="node7").save(
        files.state_path
    )
    assert files.status() == "stopped"


def test_an_output_of_another_plan(
    scripted: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(study_of(tmp_path, job("a")))
    study_of(tmp_path, job("a", command="emp-llm prune --beta 2 --output runs/a"))
    message = (
        r"runs/a: it was made by another command than this plan's \(emp-llm prune --output "
        r"runs/a\)\. Move it away"
    )
    for command in (run_study, collect):
        with pytest.raises(UserError, match=message):
            command(tmp_path)
    show_status(status(tmp_path))
    assert "of another plan: a" in capsys.readouterr().out
    (tmp_path / "jobs" / "a.json").unlink()  # the output itself still says so
    with pytest.raises(UserError, match=message):
        run_study(tmp_path)
    (tmp_path / "jobs" / "a.json").mkdir()
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(UserError, match="cannot be written"):
        run_study(tmp_path)


# Real jobs, and their collected tables.


@pytest.fixture(scope="module")
def study(models: Models, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A study whose jobs ran in this process. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("study")
    make_study(models, text, folder)
    for each in read_plan(folder):
        run_here(folder, each)
    return folder


def make_study(models: Models, text: Path, folder: Path, **more: Any) -> None:
    (folder / "suite.txt").write_text(text.read_text()[:1500])
    (folder / "suite.toml").write_text(
        'about = "A text."\n[perplexity]\nfile = "suite.txt"\nseqlen = 64\n'
    )
    given = {"methods": "emp-wanda,magnitude", "calibration": str(text), "samples": 4, "seqlen": 32}
    planned(models, folder, suite=str(folder / "suite.toml"), **given, **more)


def run_here(folder: Path, each: Job) -> None:
    """Run a job as its process would, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / each.output).parent.mkdir(exist_ok=True)
        patch.setattr(sys, "argv", ["emp-llm", *each.arguments])
        cli.main([*each.arguments, "--quiet"])


def rows_of(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]


def test_tables_of_a_study(study: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    summary = collect(folder, no_plots=True)
    page = (folder / "tables" / "tables.md").read_text()
    assert page == summary.page
    assert "All 6 jobs are done." in page
    rows = rows_of(page)
    assert rows[0] == ["", "zeros, %", "perplexity, blocks of 64"]
    assert [row[0] for row in rows[2:]] == ["dense", "emp-wanda-beta-1", "magnitude-0.5"]
    result = json.loads((folder / "results" / "llama.magnitude-0.5.json").read_text())
    dense = json.loads((folder / "results" / "llama.dense.json").read_text())
    change = 100 * (result["perplexity"]["perplexity"] / dense["perplexity"]["perplexity"] - 1)
    assert rows[-1][1] == "50.00"
    assert "the rows differ in their zeros too; plan --emp-sparsities" in page
    assert rows[-1][2].startswith(f"{result['perplexity']['perplexity']:.3f} ({change:+.2f} ± ")
    lines = (folder / "tables" / "report" / "points.csv").read_text().splitlines()
    assert len(lines) == 4
    assert repr(result["perplexity"]["perplexity"]) in lines[-1]
    assert {"report.md", "points.csv"} <= {
        path.name for path in (folder / "tables" / "report").iterdir()
    }


def test_tables_of_a_sweep(models: Models, text: Path, tmp_path: Path) -> None:
    """A row for each point, beside the dense model; before it has run, a row that says so."""
    make_study(models, text, tmp_path, per="model")
    (sweep,) = read_plan(tmp_path)
    assert "| llama.sweep | missing |" in collect(tmp_path).page
    run_here(tmp_path, sweep)
    JobState(id=sweep.id, command=sweep.command, status="done").save(
        tmp_path / "jobs" / f"{sweep.id}.json"
    )
    page = collect(tmp_path, no_plots=True).page
    rows = rows_of(page)
    assert [row[:2] for row in rows[2:]] == [
        ["dense", "-"],
        ["emp-wanda-beta-1", rows[3][1]],
        ["magnitude-0.5", "50.00"],
    ]
    assert all("%)" in row[2] for row in rows[3:])


def test_a_partial_study_says_so(study: Path, tmp_path: Path) -> None:
    """Missing, unfinished and damaged results are left out and named; two collectors at once do
    no harm.
    """
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    dense = folder / "results" / "llama.dense.json"
    dense.write_text(dense.read_text().replace('"complete": true', '"complete": false'))
    damaged = folder / "results" / "llama.magnitude-0.5.json"
    JobState(
        id="llama.magnitude-0.5.evaluate", command=read_plan(folder)[-1].command, status="done"
    ).save(folder / "jobs" / "llama.magnitude-0.5.evaluate.json")
    damaged.write_bytes(damaged.read_bytes()[:200])
    forks = [in_fork(collect, folder, no_plots=True) for _ in range(2)]
    for fork in forks:
        fork.join()
    assert [fork.exitcode for fork in forks] == [0, 0]
    page = (folder / "tables" / "tables.md").read_text()
    assert "Partial: 5 of 6 jobs are done. Missing:\n\n- llama.dense.evaluate: missing" in page
    assert "| dense | missing | - |" in page
    assert "no changes: the dense model is missing" in page
    assert "| magnitude-0.5 | unreadable | - |" in page
    assert "Unreadable:" in page
    assert not list(folder.glob(".tables*"))
    for name in ("runs", "results", "activations", "jobs"):
        shutil.rmtree(folder / name)
    assert "Partial: 0 of 6 jobs are done" in collect(folder).page
    with pytest.raises(UserError, match=r"it exists and holds no collected\.json"):
        collect(folder, output=folder)


def test_beside_the_papers_values(study: Path, tmp_path: Path) -> None:
    """A model and a recipe of the paper: its values stand below ours, with its own change."""
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    name = "meta-llama/Llama-2-7b-hf"
    old = json.loads((folder / "results" / "llama.dense.json").read_text())["model"]
    text = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}
    for path in (folder / "results").iterdir():
        result = json.loads(
            path.read_text().replace(old, name).replace("blocks of 64", "blocks of 2048")
        )
        result["made_by"]["text"] = text
        result["perplexity"] |= {"block_length": 2048, "block_losses": []}
        path.write_text(json.dumps(result))
    jobs = read_plan(folder)
    for each in jobs:
        each.command = each.command.replace(old, name)
    write_plan(folder, jobs)
    shutil.rmtree(folder / "runs")
    rows = rows_of(collect(folder, no_plots=True).page)[2:]
    assert [row[0] for row in rows] == [
        "dense",
        "paper",
        "emp-wanda-beta-1",
        "paper",
        "magnitude-0.5",
        "paper",
    ]
    paper = rows[3]
    published = json.loads(
        (Path(__file__).parents[1] / "eval" / "published" / "llama.json").read_text()
    )["results"][name]
    dense, pruned = (published[key]["wikitext2_perplexity"] for key in ("dense", "emp-wanda"))
    assert paper[2] == f"{pruned:.3f} ({100 * (pruned / dense - 1):+.2f} %)"


def test_processes_of_their_own(run: Run, study: Path, tmp_path: Path) -> None:
    """The command runs what is missing, with processes; the tables are the same, byte for byte."""
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    shutil.rmtree(folder / "runs" / "llama.magnitude-0.5")
    done = run("run", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 jobs done\n"
    assert "5 jobs of 6 done before." in done.stderr
    assert "llama.magnitude-0.5.prune: done in " in done.stderr
    here = Path(shutil.copytree(study, tmp_path / "here"))
    for each in (folder, here):
        collect(each, no_plots=True)
    for name in ("tables.md", "report/points.csv"):
        assert (folder / "tables" / name).read_bytes() == (here / "tables" / name).read_bytes()


def test_a_refit_of_every_method_gets_the_text(models: Models, tmp_path: Path) -> None:
    """Also methods that need no calibration, and beside norms from a file."""
    norms = tmp_path / "norms.safetensors"
    norms.touch()
    for number, further in enumerate(("--refit", f"--refit --activations {norms}")):
        options = {"methods": "wanda,magnitude", "calibration": "demo", "prune_options": further}
        prunes = [
            each
            for each in planned(models, tmp_path / str(number), **options)
            if each.kind == "prune"
        ]
        assert len(prunes) == 2
        assert all(
            "--calibration demo" in each.command and each.command.endswith(further)
            for each in prunes
        )
    with pytest.raises(
        UserError,
        match="--refit fits weights to a calibration text, and method magnitude needs none",
    ):
        planned(models, tmp_path / "none", methods="magnitude", prune_options="--refit")


@pytest.mark.parametrize(
    ("there", "given"),
    [
        (0, {"one": [], "four": [], "any": []}),
        (2, {"one": [0], "four": [0, 1], "any": [0, 1]}),
        (8, {"one": [0], "four": [0, 1, 2, 3], "none": []}),
    ],
)
def test_a_plan_for_more_gpus_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    there: int,
    given: dict[str, list[int]],
) -> None:
    """It is no reason to refuse: a job gets the GPUs that are there, or computes on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    seen: dict[str, Any] = {}

    def launch(job: Job, gpus: list[int], **_: Any) -> tuple[list[str], dict[str, str]]:
        seen[job.id] = gpus
        environment = launch_of(job, gpus=gpus, environment={})[1]
        assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, gpus))
        program = f"import os; os.makedirs({job.output!r})"
        return [sys.executable, "-S", "-c", program], dict(os.environ)

    monkeypatch.setattr(cluster_jobs, "launch_of", launch)
    needs: dict[str, Any] = {
        "one": {"gpus": 1},
        "four": {"gpus": 4},
        "any": {},
        "none": {"gpus": 0},
    }
    jobs = [
        job(name, kind="calibrate", command=f"emp-llm calibrate --output runs/{name}")
        for name in needs
    ]
    for each in jobs:
        each.needs = Needs(**needs[each.id])
    assert run_study(study_of(tmp_path, *jobs), workers=1).complete
    assert {name: seen[name] for name in given} == given
    assert ("planned for more GPUs than this machine has" in caplog.text) == (there < 4)
