"""The evaluate command: stock numbers, results that go on where they stopped, tables, and wrong input."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from tiny import make_model, make_tokenizer

from emp_llm.evaluate import evaluate
from emp_llm.models.corpora import data_folder
from emp_llm.models.errors import UserError
from emp_llm.prune import prune

DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"
Models = Callable[[str], Path]

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: {kind}
test_split: train
fewshot_split: train
doc_to_text: question
doc_to_target: {target}
{more}
"""
CHOICE = "doc_to_choice: options\nmetric_list:\n  - {metric: acc}\n  - {metric: acc_norm}\nmetadata: {version: 2.0}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """As everybody's, with a tokenizer that lm-eval can begin a text with."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp("models") / family, family)
            tokenizer = make_tokenizer()
            tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([1, 2])
            tokenizer.save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short text, two multiple-choice tasks, one of them with few-shot examples, and one of perplexity."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tasks").mkdir()
    (folder / "text.txt").write_text("A short walk in the long grass, then home. " * 20)
    rows = [
        {"question": f"{i} and {i} is", "options": [str(2 * i), str(i * i + 1), "none"], "answer": i % 3} for i in range(1, 13)
    ]
    data = folder / "tasks" / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, target, more in (
        ("sums", "multiple_choice", "answer", CHOICE),
        ("sums_shown", "multiple_choice", "answer", CHOICE),
        ("sums_text", "loglikelihood_rolling", "question", "metric_list:\n  - {metric: word_perplexity}"),
    ):
        text = TASK.format(name=name, data=data, kind=kind, target=target, more=more)
        if kind != "multiple_choice":
            text = text.replace("fewshot_split: train\n", "").replace("doc_to_text: question", 'doc_to_text: ""')
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    (folder / "mine.toml").write_text(
        '[perplexity]\nfile = "text.txt"\nseqlen = 64\n\n'
        '[[tasks]]\nnames = ["sums", "sums_text"]\nfolder = "tasks"\n\n'
        '[[tasks]]\nnames = ["sums_shown"]\nnum_fewshot = 2\nfolder = "tasks"\n'
    )
    return str(folder / "mine.toml")


def lm_eval(cwd: Path, output: Path, *arguments: object) -> dict[str, Any]:
    """The results of the lm_eval command line."""
    line = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--output_path", output, *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, line)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = output.parent.glob(f"{output.stem}*.json")
    return dict(json.loads(file.read_text())["results"])


def test_demo_model_on_its_own_suite(run: Run, tmp_path: Path) -> None:
    """From another folder: the tasks find their questions. Well above chance, in time, as the lm_eval command has it."""
    before = os.times()
    done = run("evaluate", "--model", DEMO, "--suite", "demo")
    assert done.returncode == 0, done.stderr
    assert os.times().children_user - before.children_user < 90  # of one processor, whatever else the machine does
    assert re.search(r"mean acc of 3 +\d\d\.\d\d$", done.stdout, re.M), done.stdout
    assert "suite demo: 77,416 tokens, 720 examples by lm-eval" in done.stdout
    assert done.stderr == "results in model-demo.json\n"
    record = json.loads((tmp_path / "model-demo.json").read_text())
    assert record["complete"]
    assert record["command"].startswith("python -m emp_llm.evaluate --model")
    assert "lm-eval" in record["made_by"]["versions"]
    ours = {}
    for name, entry in record["tasks"].items():
        ours |= entry["results"]
        lines = (data_folder("eval") / "demo" / f"{name.removeprefix('demo_')}.jsonl").read_text().splitlines()
        chance = sum(1 / len(json.loads(line)["choices"]) for line in lines) / len(lines)
        assert entry["results"][name]["acc,none"] >= chance + 0.1
        assert entry["n-samples"][name] == {"original": 240, "effective": 240}
    folder = data_folder("eval") / "demo"
    names = ",".join(ours)
    for name in ("demo_facts", "demo_stories"):
        theirs = lm_eval(
            *(tmp_path, tmp_path / f"theirs-{name}.json", "--model_args", f"pretrained={DEMO}", "--tasks", name),
            *("--include_path", folder, "--batch_size", 8),
        )
        assert theirs[name] == ours[name]
    assert names == "demo_facts,demo_inference,demo_stories"


def test_real_task_as_the_lm_eval_command_has_it(shared: Path, tmp_path: Path, run: Run) -> None:
    model = shared / "models" / "wiki-llama-5m"
    (tmp_path / "mine.toml").write_text('[[tasks]]\nnames = ["openbookqa"]\nnum_fewshot = 1\n')
    results = tmp_path / "ours.json"
    done = run(
        *("evaluate", "--model", model, "--suite", tmp_path / "mine.toml", "--limit", 20, "--batch-size", 4),
        *("--output", results),
        cwd=shared / "datasets",
    )
    assert done.returncode == 0, done.stderr
    theirs = lm_eval(
        *(shared / "datasets", tmp_path / "theirs.json", "--model_args", f"pretrained={model}", "--tasks", "openbookqa"),
        *("--limit", 20, "--batch_size", 4, "--num_fewshot", 1),
    )
    record = json.loads(results.read_text())
    assert record["tasks"]["openbookqa"]["results"] == theirs
    assert record["tasks"]["openbookqa"]["n-shot"] == {"openbookqa": 1}
    assert done.stdout.count(" *\n") == 2  # both metrics
    assert "* partial: not all examples" in done.stdout


def test_baseline_pruned_and_difference(models: Models, suite: str, tmp_path: Path) -> None:
    pruned = prune(str(models("llama")), tmp_path / "pruned", "magnitude", sparsity=0.5, evaluate=suite, device_map="cpu")
    record = evaluate(
        str(tmp_path / "pruned"), suite, baseline=str(models("llama")), device_map="cpu", output=tmp_path / "results.json"
    )
    baseline = json.loads((tmp_path / "results-baseline.json").read_text())
    for name, single in (("dense", baseline), ("pruned", record)):  # the same by either road
        measured = pruned["evaluation"][name]
        assert measured["perplexity"]["perplexity"] == single["perplexity"]["perplexity"]
        for task in ("sums", "sums_text", "sums_shown"):
            assert measured["tasks"][task]["results"] == single["tasks"][task]["results"]
    assert record["pruned"]["of"] == str(models("llama"))
    assert (record["pruned"]["method"], record["pruned"]["sparsity_of_targets"]) == ("magnitude", 0.5)
    assert record["tasks"]["sums_shown"]["n-shot"] == {"sums_shown": 2}
    assert record["tasks"]["sums"]["versions"] == {"sums": 2.0}

    again: dict[str, Any] = {"model": str(tmp_path / "pruned"), "suite": suite, "device_map": "cpu"}
    again |= {"output": tmp_path / "results.json", "baseline": str(tmp_path / "results-baseline.json")}
    assert evaluate(**again)["table"] == record["table"]
    lines = record["table"].splitlines()
    assert lines[0].split() == ["llama", "pruned", "change"]
    assert [line.split("  ")[0] for line in lines[2:9]] == [
        *("perplexity, blocks of 64", "sums acc", "sums acc_norm", "sums_text word_perplexity"),
        *("sums_shown acc", "sums_shown acc_norm", "mean acc of 2"),
    ]
    rows = list(csv.reader(evaluate(**again, form="csv")["table"].splitlines()))
    assert rows[0][:4] == ["measure", "llama", "llama stderr", "llama partial"]
    values = {row[0]: row[1:] for row in rows[1:]}
    assert float(values["perplexity, blocks of 64"][0]) == baseline["perplexity"]["perplexity"]
    sums = [baseline["tasks"][task]["results"][task]["acc,none"] for task in ("sums", "sums_shown")]
    assert float(values["mean acc of 2"][0]) == pytest.approx(50 * sum(sums))
    markdown = evaluate(**again, form="markdown", beside=[tmp_path / "results-baseline.json"])["table"].splitlines()
    assert markdown[1] == "|---|" + "---:|" * 5
    assert {line.count("|") for line in markdown[:9]} == {7}


# Ends the process, as a scheduler would, when the first task has been written.
STOPPED = """
import os, signal, sys
from emp_llm.cli import run
from emp_llm.evaluate import evaluate, show
from emp_llm.services.results import ResultsFile
whole = ResultsFile.save
def then_stop(self, complete=False):
    whole(self, complete)
    if "tasks" in self.record:
        os.kill(os.getpid(), signal.SIGTERM)
ResultsFile.save = then_stop
run(evaluate, show, sys.argv[1:])
"""


def test_a_stopped_run_goes_on(models: Models, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "results.json"
    arguments = ["--model", models("llama"), "--suite", suite, "--output", output, "--device-map", "cpu"]
    line = [sys.executable, "-c", STOPPED, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    half = json.loads(output.read_text())
    assert (list(half["tasks"]), half["complete"]) == (["sums"], False)
    assert list(tmp_path.iterdir()) == [output]

    half["tasks"]["sums"]["seconds"] = half["perplexity"]["seconds"] = 12345  # to see that they are not measured again
    output.write_text(json.dumps(half))
    record = evaluate(str(models("llama")), suite, output=output, device_map="cpu")
    assert list(record["tasks"]) == ["sums", "sums_text", "sums_shown"]
    assert record["complete"]
    assert record["tasks"]["sums"]["seconds"] == record["perplexity"]["seconds"] == 12345
    whole = evaluate(str(models("llama")), suite, output=tmp_path / "whole.json", device_map="cpu")
    for task, entry in whole["tasks"].items():
        assert entry["results"] == record["tasks"][task]["results"]

    monkeypatch.setattr("emp_llm.evaluate.load_model", None)  # with nothing left to do, no model is loaded
    evaluate(str(models("llama")), suite, output=output, device_map="cpu")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit": 3}, "limit: null there, 3 now"),
        ({"batch_size": "4"}, "batch_size: 8 there, 4 now"),
        ({"dtype": "float32"}, "dtype"),
        ({"suite": "perplexity"}, "text"),
        ({"model": "gpt2"}, "model.sha256_of_samples"),
    ],
)
def test_results_of_something_else_are_not_overwritten(
    models: Models, suite: str, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    output = tmp_path / "results.json"
    made = {"model": str(models("llama")), "suite": suite, "output": output, "device_map": "cpu"}
    if not options.get("seen"):
        evaluate(**made)
    before = output.read_bytes()
    if "model" in options:
        options = {"model": str(models(options["model"]))}
    with pytest.raises(UserError, match=re.escape(field)) as caught:
        evaluate(**made | options)
    assert "--overwrite" in str(caught.value)
    assert output.read_bytes() == before


def test_overwrite_and_limit(models: Models, suite: str, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    output.write_text('{"model": "m", "made_by": {}}')
    record = evaluate(str(models("llama")), suite, output=output, device_map="cpu", limit=3, overwrite=True)
    assert record["made_by"]["limit"] == 3
    rows = record["table"].splitlines()[2:9]
    assert all(row.endswith(" *") for row in rows), record["table"]


def test_disk_offload(models: Models, suite: str, tmp_path: Path) -> None:
    there = evaluate(str(models("llama")), suite, output=tmp_path / "a.json", device_map="disk")
    here = evaluate(str(models("llama")), suite, output=tmp_path / "b.json", device_map="cpu")
    assert there["table"] == here["table"]


def refused(says: str, /, **options: Any) -> None:
    with pytest.raises(UserError, match=says) as caught:
        evaluate(**options)
    assert "\n" not in str(caught.value)


def test_wrong_input(models: Models, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(models("llama"))
    refused(r"'demmo' is not a suite.*Did you mean demo", model=model, suite="demmo")
    refused(r"--limit must be at least 1", model=model, suite=suite, limit=0)
    refused(r"--batch-size 'many': expected a number", model=model, suite=suite, batch_size="many")
    refused(r"--format 'latex' is none of terminal", model=model, suite=suite, form="latex")
    refused(r"--output .*: a file cannot be written there", model=model, suite=suite, output=tmp_path)
    refused(r"nothing: no such model folder", model=model, suite=suite, baseline="/nothing")
    refused(r"--baseline nothing.json: cannot be read", model=model, suite=suite, baseline="nothing.json")
    Path("list.json").write_text("[]")
    refused(r"--baseline list.json: not a results file", model=model, suite=suite, baseline="list.json")
    refused(r"--output list.json: not a results file", model=model, suite=suite, output=Path("list.json"))
    bare = Path(shutil.copytree(model, "bare"))
    for file in bare.glob("*token*"):
        file.unlink()
    refused(r"bare: no tokenizer that transformers can load", model="bare", suite=suite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "list.json"]


def test_wrong_tasks(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emp_llm.evaluate.load_model", None)  # said before any model is loaded
    model = str(models("llama"))
    Path("a.toml").write_text('[[tasks]]\nnames = ["arc_eazy"]\n')
    refused(r"no task 'arc_eazy' in lm-eval\. The nearest names: arc_easy", model=model, suite="a.toml")
    Path("tasks").mkdir()
    Path("tasks/lost.yaml").write_text(
        TASK.format(name="lost", data="lost.jsonl", kind="multiple_choice", target="answer", more=CHOICE)
    )
    Path("b.toml").write_text('[[tasks]]\nnames = ["lost"]\nfolder = "tasks"\n')
    Path("tasks/gone.yaml").write_text(Path("tasks/lost.yaml").read_text().replace("lost", "gone"))
    Path("c.toml").write_text('[[tasks]]\nnames = ["gone", "lost"]\nfolder = "tasks"\n')
    says = r"task gone: its data set json, task lost: its data set json cannot be loaded \(.*gone.jsonl"
    refused(says, model=model, suite="c.toml")
    refused(r"task lost: its data set json cannot be loaded \(.*lost.jsonl", model=model, suite="b.toml")
    assert not list(tmp_path.glob("*.json"))


def test_a_tokenizer_without_a_beginning(suite: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    says = r"model: the tokenizer has neither a bos_token nor an eos_token"
    refused(says, model=str(model), suite=suite, device_map="cpu", output=tmp_path / "a.json")


def test_baseline_of_another_suite(models: Models, suite: str, tmp_path: Path) -> None:
    model = str(models("llama"))
    short = Path(suite).with_name("short.toml")
    short.write_text('[perplexity]\nfile = "text.txt"\nseqlen = 64\n')
    common: dict[str, Any] = {"model": model, "device_map": "cpu", "suite": str(short)}
    evaluate(**common, output=tmp_path / "a.json")
    refused(r"--baseline .*another suite or limit \(limit", **common, baseline=str(tmp_path / "a.json"), limit=2)
    refused(
        r"--baseline .*another suite .*seqlen", **common | {"suite": f"{short},seqlen=32"}, baseline=str(tmp_path / "a.json")
    )
    stopped = json.loads((tmp_path / "a.json").read_text()) | {"complete": False}
    (tmp_path / "a.json").write_text(json.dumps(stopped))
    refused(r"--beside .*has not finished", **common, beside=[tmp_path / "a.json"], output=tmp_path / "b.json")


def test_without_lm_eval(models: Models, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    output = tmp_path / "results.json"
    refused(r"pip install 'emp-llm\[eval\]'", model=str(models("llama")), suite=suite, output=output)
    short = Path(suite).with_name("alone.toml")
    short.write_text('[perplexity]\nfile = "text.txt"\nseqlen = 64\n')
    assert evaluate(str(models("llama")), str(short), output=output, device_map="cpu")["complete"]
