"""`prune --evaluate`: the checkpoint comes first, its evaluation resumes, and earlier dense
results are taken over.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import check_verified, report_of, save_run
from suites import TASKS, Models

from emp_llm import evaluate, prune
from emp_llm.checkpoint.files import FileLock
from emp_llm.common.errors import UserError
from emp_llm.models.one_model import OneModel
from emp_llm.records.run_report import Results

Values = dict[str, Any]


def numbers(measures: Values) -> Values:
    """Everything measured, without times."""
    tasks = {name: task["results"] for name, task in measures["tasks"].items()}
    return tasks | {
        "perplexity": measures["perplexity"]["perplexity"],
        "losses": measures["perplexity"]["block_losses"],
    }


def weights(folder: Path) -> dict[str, tuple[int, str]]:
    """Time of change and hash of each shard."""
    shards = sorted(folder.glob("*.safetensors"))
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in shards
    }


def terminate_when(
    condition: Callable[[Results, Path], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send SIGTERM to this process when results for which the condition holds have been saved."""
    save = Results.save

    def save_and_terminate(self: Results, path: Path) -> None:
        save(self, path)
        if condition(self, path):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Results, "save", save_and_terminate)


@pytest.fixture(scope="module")
def line(evaluable_llama: Path, task_suite: Path) -> list[object]:
    options = ("--method", "emp-magnitude", "--evaluate", task_suite, "--device-map", "cpu")
    return ["prune --model", evaluable_llama, *options]


@pytest.fixture(scope="module")
def whole(
    evaluable_llama: Path, task_suite: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The output of an uninterrupted run. Read-only."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    prune(
        evaluable_llama,
        output=folder,
        method="emp-magnitude",
        evaluate=task_suite,
        device_map="cpu",
    )
    return folder


def test_an_evaluated_run(whole: Path, evaluable_llama: Path) -> None:
    report = report_of(whole)
    assert (
        list(report["evaluation"]["dense"]["tasks"])
        == list(report["evaluation"]["pruned"]["tasks"])
        == list(TASKS)
    )
    assert (
        report["evaluation"]["dense"]["perplexity"] != report["evaluation"]["pruned"]["perplexity"]
    )
    assert list(report["stages"]) == ["prune", "load", "evaluate dense", "evaluate pruned"]
    assert not (whole / "emp_llm" / "evaluation").exists()
    check_verified(whole, evaluable_llama)


@pytest.mark.parametrize(
    ("name", "parts"), [("dense.json", 2), ("dense.json", 4), ("pruned.json", 3)]
)
def test_an_interrupted_evaluation_resumes(
    line: list[object],
    whole: Path,
    evaluable_llama: Path,
    tmp_path: Path,
    command: Run,
    name: str,
    parts: int,
) -> None:
    """Within the dense suite, between the models, and within the other suite. Neither the
    checkpoint nor a finished part is done again."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        terminate_when(
            lambda results, path: path.name == name and results.measures.parts == parts, patch
        )
        done = command(*line, "--output", out, code=143)
    assert f"the checkpoint in {out} is complete" in done.stderr
    assert "evaluation" not in report_of(out)
    check_verified(out, evaluable_llama)
    kept = out / "emp_llm" / "evaluation" / name
    held = json.loads(kept.read_text())
    assert (held["perplexity"] is not None) + len(held["tasks"]) == parts
    held["perplexity"]["seconds"] = 12345  # a second measurement would change it
    kept.write_text(json.dumps(held))
    before = weights(out)
    done = command(*line, "--output", out)
    assert (
        weights(out)
        == before
        == {key: (before[key][0], value[1]) for key, value in weights(whole).items()}
    )
    report = report_of(out)
    expected = report_of(whole)
    assert report["evaluation"][name.removesuffix(".json")]["perplexity"]["seconds"] == 12345
    for which in ("dense", "pruned"):
        assert numbers(report["evaluation"][which]) == numbers(expected["evaluation"][which])
    assert report["matrices"] == expected["matrices"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in whole.iterdir()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_run_does_not_continue_it(
    line: list[object], task_suite: Path, tmp_path: Path, command: Run
) -> None:
    """A run at the same time or of a different recipe is refused; another suite is measured
    anew; --overwrite replaces all.
    """
    out = tmp_path / "out"
    short = task_suite.with_name("short.toml")
    with pytest.MonkeyPatch.context() as patch:
        terminate_when(lambda results, _: results.complete, patch)
        command(*line, "--output", out, code=143)
    before = weights(out)
    other = FileLock(out / "emp_llm" / "evaluation" / ".results.lock", "the evaluation")
    other.acquire()
    for more, said in (((), "another run is working on it"), (("--beta", 0.5), "it exists")):
        done = command(*line, *more, "--output", out, code=2)
        assert said in done.stderr
    other.release()
    assert (out / "emp_llm" / "evaluation" / "dense.json").is_file()
    line = [short if word == task_suite else word for word in line]
    done = command(*line, "--output", out)
    assert "Measuring again" in done.stderr
    held = report_of(out)["evaluation"]
    assert held["suite"] == short.name
    assert all("tasks" not in held[which] for which in ("dense", "pruned"))
    assert weights(out) == before
    assert "it exists" in command(*line, "--output", out, code=2).stderr
    with pytest.MonkeyPatch.context() as patch:
        terminate_when(lambda results, _: results.complete, patch)
        command(*line, "--output", out, "--overwrite", code=143)
    done = command(*line, "--beta", 0.5, "--output", out, "--overwrite")
    assert report_of(out)["recipe"]["counts"]["effective"]["beta"] == 0.5
    assert report_of(out)["evaluation"]["pruned"]
    assert not (out / "emp_llm" / "evaluation").exists()


def test_a_calibrated_run_resumes_without_calibrating(
    evaluable_llama: Path,
    task_suite: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {
        "method": "emp-wanda",
        "calibration": text,
        "samples": 4,
        "seqlen": 64,
        "device_map": "cpu",
    }
    options |= {
        "output": tmp_path / "out",
        "evaluate": task_suite.with_name("short.toml"),
        "propagate": "pruned",
    }
    with monkeypatch.context() as patch:
        patch.setattr("emp_llm.evaluation.evaluate.evaluation_record", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prune(evaluable_llama, **options)
    monkeypatch.setattr("emp_llm.calibration.passes.collect_norms", None)
    monkeypatch.setattr(OneModel, "get", None)  # both models are measured already
    report = prune(evaluable_llama, **options)
    assert report.evaluation.dense != report.evaluation.pruned


@pytest.fixture(scope="module")
def dense_results(
    evaluable_llama: Path, task_suite: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The results of `evaluate` on the dense model. Copy it before changing it."""
    path = tmp_path_factory.mktemp("dense") / "dense.json"
    evaluate(evaluable_llama, suite=task_suite, output=path, device_map="cpu")
    return path


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_baseline_replaces_the_dense_evaluation(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    dense_results: Path,
    whole: Path,
    kind: str,
) -> None:
    baseline = dense_results if kind == "file" else whole
    held = (
        json.loads(baseline.read_text())
        if kind == "file"
        else report_of(whole)["evaluation"]["dense"]
    )
    options = {
        "method": "magnitude",
        "evaluate": task_suite,
        "device_map": "cpu",
        "baseline": baseline,
    }
    prune(evaluable_llama, output=tmp_path / "out", **options)
    report = report_of(tmp_path / "out")
    assert report["evaluation"]["dense"] == {key: held[key] for key in ("perplexity", "tasks")}
    assert "evaluate dense" not in report["stages"]
    assert report["evaluation"]["pruned"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "gpt2"}, "of other weights than those of --model"),
        ({"suite": "short.toml"}, r"another suite, dtype or quantisation \(tasks"),
        ({"dtype": "float32"}, r"or quantisation \(dtype auto, this one has float32"),
        ({"change": {"complete": False}}, "has not finished; run its command again"),
        (
            {"change": {"format": "emp-llm results 99"}},
            "it has format version 99 of a results file",
        ),
        ({"change": {"format": "emp-llm sweep 3"}}, "this is not a results file"),
        ({"model_change": {"sha256_of_config": "0"}}, "another config than that of --model"),
        ({"model_change": {"sha256_of_tokenizer": "0"}}, "another tokenizer than that of --model"),
        ({"baseline": "nope.json"}, "cannot be read"),
        ({"baseline": "run"}, "holds no evaluation of the dense model"),
        ({"suite": "perplexty"}, "Did you mean perplexity"),
        ({"suite": "lost.toml"}, "lost.txt: no such file"),
        ({"suite": None}, "--baseline needs an evaluation; add --evaluate"),
    ],
)
def test_a_baseline_of_something_else_is_refused(
    evaluable: Models,
    task_suite: Path,
    tmp_path: Path,
    dense_results: Path,
    whole: Path,
    options: Values,
    says: str,
) -> None:
    """Before anything is written."""
    held = json.loads(dense_results.read_text()) | options.get("change", {})
    held["made_by"]["model"] |= options.get("model_change", {})
    (tmp_path / "dense.json").write_text(json.dumps(held))
    report = report_of(whole)
    del report["evaluation"]
    save_run(tmp_path / "run", report)
    (tmp_path / "lost.toml").write_text('[perplexity]\nfile = "lost.txt"\n')
    suites = {"short.toml": task_suite.with_name("short.toml"), "lost.toml": tmp_path / "lost.toml"}
    suite = suites.get(options["suite"], options["suite"]) if "suite" in options else task_suite
    model = evaluable(options.get("model", "llama"))
    given = {
        "method": "magnitude",
        "device_map": "cpu",
        "dtype": options.get("dtype", "auto"),
    }
    given |= {"baseline": tmp_path / options.get("baseline", "dense.json")}
    with pytest.raises(UserError, match=says) as caught:
        prune(model, output=tmp_path / "out", evaluate=suite, **given)
    assert "--baseline" in str(caught.value) or suite in ("perplexty", tmp_path / "lost.toml")
    assert {path.name for path in tmp_path.iterdir()} == {"dense.json", "lost.toml", "run"}
