"""The evaluate command: lm-eval's own numbers, resumption, tables, and the identity of models."""

import base64
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from conftest import Run
from suites import TASKS, Models, few_task_files

from emp_llm import evaluate, prune
from emp_llm.common.errors import UserError
from emp_llm.common.paths import data_folder
from emp_llm.evaluation import evaluate as evaluation
from emp_llm.records.run_report import Results

DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"


def measure(model: Path, suite: Path, output: Path, **options: Any) -> Results:
    return evaluate(model, suite=suite, output=output, device_map="cpu", **options).results


def table(**options: Any) -> str:
    return evaluate(**options).table


def metrics(results: Results) -> dict[str, Any]:
    return {name: task.results for name, task in results.tasks.items()}


@pytest.fixture(scope="module")
def whole(
    evaluable_llama: Path, task_suite: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The results file of the tiny Llama by the whole suite. Copy it before changing it."""
    path = tmp_path_factory.mktemp("whole") / "whole.json"
    measure(evaluable_llama, task_suite, path)
    return path


def lm_eval(model: Path, task: str, folder: Path | None, **options: Any) -> Any:
    """The results of a task by lm-eval alone, which loads the model itself, and the log of the
    task's examples.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=[] if folder is None else [str(folder)], include_defaults=folder is None
    )
    model_options = {"model": "hf", "model_args": f"pretrained={model}", "device": "cpu"}
    found = simple_evaluate(**model_options, tasks=[task], task_manager=manager, **options)
    return json.loads(json.dumps(found["results"], default=str)), found["samples"][task]


def unpacked(answers: dict[str, Any], metric: str) -> list[int]:
    """The answers of a task as 0 and 1."""
    bits = "".join(f"{byte:08b}" for byte in base64.b64decode(answers["correct"][metric]))
    assert len(bits) - answers["examples"] < 8
    assert "1" not in bits[answers["examples"] :]
    return [int(bit) for bit in bits[: answers["examples"]]]


def test_demo_model_on_its_own_suite(command: Run, tmp_path: Path) -> None:
    """From another folder the tasks find their questions. Well above chance, in time, and equal
    to lm-eval's numbers.
    """
    before = time.process_time()
    done = command(f"evaluate --suite demo --limit 16 --model {DEMO}")
    assert time.process_time() - before < 30
    assert re.search(r"mean acc of 3 +\d\d\.\d\d ± \d\.\d\d \*$", done.stdout, re.M), done.stdout
    assert "suite demo: 8,192 tokens, 48 examples by lm-eval" in done.stdout
    assert done.stderr.splitlines()[-1] == "results in model-demo.json"
    record = json.loads((tmp_path / "model-demo.json").read_text())
    assert record["complete"]
    assert record["command"].startswith("emp-llm evaluate --suite demo --limit 16 --model")
    assert "lm-eval" in record["made_by"]["versions"]
    folder = data_folder("eval") / "demo"
    assert list(record["tasks"]) == ["demo_facts", "demo_inference", "demo_stories"]
    for name, entry in record["tasks"].items():
        lines = (folder / f"{name.removeprefix('demo_')}.jsonl").read_text().splitlines()
        chance = sum(1 / len(json.loads(line)["choices"]) for line in lines) / len(lines)
        assert entry["results"][name]["acc,none"] >= chance + 0.1
        assert entry["n-samples"][name] == {"original": 240, "effective": 16}
    theirs, samples = lm_eval(DEMO, "demo_stories", folder, batch_size=8, limit=16)
    ours = record["tasks"]["demo_stories"]
    assert theirs == ours["results"]
    assert unpacked(ours["answers"]["demo_stories"], "acc,none") == [
        each["acc"] for each in samples
    ]


def test_a_chat_template_is_applied_as_by_lm_eval(tmp_path: Path, command: Run) -> None:
    model = Path(shutil.copytree(DEMO, tmp_path / "chat"))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    folder = data_folder("eval") / "demo"
    (tmp_path / "s.toml").write_text(
        f'[[tasks]]\nnames = ["demo_stories"]\nfolder = "{folder}"\nnum_fewshot = 1\n'
    )
    line = f"evaluate --limit 8 --model {model} --suite {tmp_path}/s.toml"
    command(line, "--apply-chat-template", "--output", tmp_path / "chat.json")
    record = json.loads((tmp_path / "chat.json").read_text())
    assert [task["chat_template"] for task in record["made_by"]["tasks"]] == [True]
    theirs, samples = lm_eval(
        model,
        "demo_stories",
        folder,
        batch_size=8,
        limit=8,
        num_fewshot=1,
        apply_chat_template=True,
    )
    assert record["tasks"]["demo_stories"]["results"] == theirs
    assert samples[0]["arguments"][0][0].startswith("user: ")


def test_a_real_task_equals_lm_eval(
    shared: Path, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few-shot examples, from lm-eval's own task files and an unmodified data set."""
    few_task_files(monkeypatch, tmp_path / "of_lm_eval", "openbookqa")
    model = shared / "models" / "wiki-llama-5m"
    (tmp_path / "mine.toml").write_text('[[tasks]]\nnames = ["openbookqa"]\nnum_fewshot = 1\n')
    options = ("--limit", 20, "--batch-size", 4, "--output", tmp_path / "ours.json")
    done = command(
        f"evaluate --model {model} --suite {tmp_path}/mine.toml",
        *options,
        cwd=shared / "datasets",
    )
    record = json.loads((tmp_path / "ours.json").read_text())
    theirs, _ = lm_eval(model, "openbookqa", None, batch_size=4, limit=20, num_fewshot=1)
    assert record["tasks"]["openbookqa"]["results"] == theirs
    assert record["tasks"]["openbookqa"]["n-shot"] == {"openbookqa": 1}
    assert done.stdout.count(" *\n") == 2  # both metrics
    assert "* partial: only some of the examples" in done.stdout


def test_baseline_pruned_and_difference(
    evaluable_llama: Path, task_suite: Path, tmp_path: Path, whole: Path
) -> None:
    model = evaluable_llama
    options = {
        "method": "magnitude",
        "sparsity": 0.5,
        "evaluate": task_suite,
        "device_map": "cpu",
    }
    report = prune(model, output=tmp_path / "pruned", **options)
    results = measure(tmp_path / "pruned", task_suite, tmp_path / "results.json", baseline=model)
    baseline = json.loads((tmp_path / "results-baseline.json").read_text())
    assert (
        baseline["tasks"]["sums"]["results"]
        == json.loads(whole.read_text())["tasks"]["sums"]["results"]
    )
    # Prune and evaluate measure the same.
    for name, single in (("dense", baseline), ("pruned", results)):
        measured = report["evaluation"][name]
        assert measured["perplexity"]["perplexity"] == single["perplexity"]["perplexity"]
        for task in TASKS:
            assert measured["tasks"][task]["results"] == single["tasks"][task]["results"]
    assert results.pruned is not None
    pruned = results.pruned
    assert (pruned.of, pruned.recipe.method, pruned.sparsity_of_targets) == (
        str(model),
        "magnitude",
        0.5,
    )
    assert results.tasks["sums_shown"].n_shot == {"sums_shown": 2}
    assert results.tasks["sums"].versions == {"sums": 2.0}

    again = {"model": tmp_path / "pruned", "suite": task_suite, "device_map": "cpu"}
    again |= {"output": tmp_path / "results.json", "baseline": tmp_path / "results-baseline.json"}
    lines = table(**again).splitlines()
    assert lines[0].split() == ["llama", "pruned", "change"]
    assert [line.split("  ")[0] for line in lines[2:9]] == [
        *("perplexity, blocks of 64", "sums acc", "sums acc_norm", "sums_text word_perplexity"),
        *("sums_shown acc", "sums_shown acc_norm", "mean acc of 2"),
    ]
    assert table(**again | {"baseline": model}).splitlines() == lines
    sums = [baseline["tasks"][task]["results"][task]["acc,none"] for task in ("sums", "sums_shown")]
    assert lines[2].split()[4] == f"{baseline['perplexity']['perplexity']:.3f}"
    assert lines[8].split()[4] == f"{50 * sum(sums):.2f}"
    markdown = table(
        **again, form="markdown", beside=[tmp_path / "results-baseline.json"]
    ).splitlines()
    assert markdown[1] == "|---|" + "---:|" * 5
    assert {line.count("|") for line in markdown[:9]} == {7}
    assert "changes ± paired standard error" in "".join(lines)
    assert "‡" not in "".join(lines)


def test_a_second_run_with_the_same_output_is_refused(
    evaluable: Models,
    task_suite: Path,
    tmp_path: Path,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the first is measuring: it would replace the results of the first, or resume from
    half of them.
    """
    line = (
        "evaluate --device-map cpu --model",
        evaluable("llama"),
        "--suite",
        task_suite.with_name("short.toml"),
    )
    line += ("--baseline", evaluable("gpt2"), "--output")
    refused = []
    measure_first = evaluation.measure

    def measure_beside(*arguments: Any) -> Any:
        if not refused:
            refused.extend(
                command(*line, tmp_path / name, code=2)
                for name in ("out.json", "out-baseline.json")
            )
        return measure_first(*arguments)

    monkeypatch.setattr(evaluation, "measure", measure_beside)
    command(*line, tmp_path / "out.json")
    assert all("another run is working on it (process " in done.stderr for done in refused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-baseline.json", "out.json"]


def test_a_terminated_run_resumes(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    whole: Path,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the last finished task; with nothing left to do, no model is loaded."""
    output = tmp_path / "results.json"
    save = Results.save

    def save_and_terminate(self: Results, path: Path) -> None:
        save(self, path)
        if self.tasks:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "save", save_and_terminate)
        line = (
            f"evaluate --device-map cpu --model {evaluable_llama} --suite {task_suite} "
            f"--output {output}",
        )
        command(*line, code=128 + signal.SIGTERM)
    half = json.loads(output.read_text())
    assert (list(half["tasks"]), half["complete"]) == (["sums"], False)
    assert list(tmp_path.iterdir()) == [output]

    # A second measurement would change it.
    half["tasks"]["sums"]["seconds"] = half["perplexity"]["seconds"] = 12345
    output.write_text(json.dumps(half))
    done = command(*line)
    assert "resuming after 2 finished parts of the suite" in done.stderr
    record, expected = (json.loads(path.read_text()) for path in (output, whole))
    assert list(record["tasks"]) == list(TASKS)
    assert record["complete"]
    assert record["tasks"]["sums"]["seconds"] == record["perplexity"]["seconds"] == 12345
    for task, entry in expected["tasks"].items():
        assert entry["results"] == record["tasks"][task]["results"]

    monkeypatch.setattr("emp_llm.models.loading.load_model", None)
    before = record["command"], record["tasks"]
    results = measure(evaluable_llama, task_suite, output)
    assert (results.command, results.as_dict()["tasks"]) == before


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit": 3}, "limit not given, this one has 3"),
        ({"batch_size": "4"}, "batch_size 8, this one has 4"),
        ({"dtype": "float32"}, "dtype"),
        ({"suite": "perplexity"}, "text"),
    ],
)
def test_other_results_are_not_overwritten(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    whole: Path,
    options: dict[str, Any],
    field: str,
) -> None:
    output = Path(shutil.copy(whole, tmp_path / "results.json"))
    with pytest.raises(UserError, match=rf"{re.escape(field)}.*--overwrite"):
        measure(**{"model": evaluable_llama, "suite": task_suite, "output": output} | options)
    assert output.read_bytes() == whole.read_bytes()


def test_results_are_never_taken_over_for_other_weights(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One matrix pruned at 1 % is another model: as an output, and as a baseline that must be
    measured itself.
    """
    dense = evaluable_llama
    up = "model.layers.1.mlp.up_proj.weight"
    other = oracle.edited_copy(
        dense, tmp_path / "other", up, lambda bits: np.put(bits, range(25), 0)
    )
    output = Path(shutil.copy(whole, tmp_path / "results.json"))
    with pytest.raises(UserError, match=r"model\.identity"):
        measure(other, task_suite, output)
    with pytest.raises(UserError, match="other weights than those of --model"):
        prune(
            other,
            output=tmp_path / "pruned",
            method="magnitude",
            evaluate=task_suite,
            baseline=whole,
            device_map="cpu",
        )
    short = task_suite.with_name("short.toml")
    measure(other, short, tmp_path / "a.json", baseline=dense)
    loaded = []

    def load(folder: Path, *rest: Any) -> Any:
        loaded.append(folder)
        return load_model(folder, *rest)

    from emp_llm.models.loading import load_model

    monkeypatch.setattr("emp_llm.models.loading.load_model", load)
    shutil.copy(tmp_path / "a-baseline.json", tmp_path / "b-baseline.json")
    with pytest.raises(
        UserError,
        match=r"b-baseline\.json: it holds other results \(model\.identity",
    ):
        measure(dense, short, tmp_path / "b.json", baseline=other)
    (tmp_path / "b-baseline.json").unlink()
    measure(dense, short, tmp_path / "b.json", baseline=other)
    assert loaded == [other, dense]
    losses = [
        json.loads((tmp_path / name).read_text())["perplexity"]["loss"]
        for name in ("a.json", "b-baseline.json")
    ]
    assert (
        losses[0]
        == losses[1]
        != json.loads((tmp_path / "b.json").read_text())["perplexity"]["loss"]
    )


def test_overwrite_and_limit(evaluable_llama: Path, task_suite: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    output.write_text('{"model": "m", "made_by": {}}')
    options = {
        "model": evaluable_llama,
        "suite": task_suite,
        "output": output,
        "device_map": "cpu",
    }
    rows = table(**options, limit=3, overwrite=True).splitlines()
    assert all(row.endswith(" *") for row in rows[2:9]), rows
    assert json.loads(output.read_text())["made_by"]["limit"] == 3


def test_an_offloaded_model_measures_the_same(
    evaluable_llama: Path, task_suite: Path, tmp_path: Path, whole: Path
) -> None:
    offloaded = evaluate(
        evaluable_llama, suite=task_suite, output=tmp_path / "disk.json", device_map="disk"
    )
    expected = json.loads(whole.read_text())
    assert (
        offloaded.results.as_dict()["perplexity"]["perplexity"]
        == expected["perplexity"]["perplexity"]
    )
    assert metrics(offloaded.results) == {
        name: task["results"] for name, task in expected["tasks"].items()
    }


def test_infinite_perplexities_do_not_end_an_evaluation(
    evaluable_llama: Path, task_suite: Path, tmp_path: Path
) -> None:
    """That of the text and that of lm-eval: null in JSON, a word in the table, and the same
    after a resumption.
    """
    # added to the exponent
    head = "lm_head.weight"
    times_32768 = 15 << 7
    model = oracle.edited_copy(
        evaluable_llama,
        tmp_path / "ruined",
        head,
        lambda bits: np.add(bits, times_32768, out=bits),
    )
    options = {
        "suite": task_suite,
        "output": tmp_path / "results.json",
        "device_map": "cpu",
    }
    options |= {"model": model, "baseline": evaluable_llama}
    first = table(**options)
    for row in ("perplexity, blocks of 64", "sums_text word_perplexity"):
        (line,) = (line for line in first.splitlines() if line.startswith(row))
        assert line.split()[-3:] == ["infinite", "+inf", "%"], line
    record = json.loads(
        (tmp_path / "results.json").read_text(),
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )
    assert record["complete"]
    assert record["perplexity"]["perplexity"] is None
    assert record["perplexity"]["loss"] > 709
    assert record["tasks"]["sums_text"]["results"]["sums_text"]["word_perplexity,none"] is None
    assert table(**options) == first
    assert 0 <= record["tasks"]["sums"]["results"]["sums"]["acc,none"] <= 1
