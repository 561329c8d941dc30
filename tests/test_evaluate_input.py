"""Wrong input of `evaluate`: every error is one sentence that names the option, and comes before
any model is loaded.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from suites import CHOICE, TASK, few_task_files
from tiny import make_model

from emp_llm import evaluate
from emp_llm.common.errors import UserError


def refused(says: str, /, **options: Any) -> None:
    with pytest.raises(UserError, match=says) as caught:
        evaluate(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("says", "options"),
    [
        (r"'demmo' is neither a suite .*Did you mean demo", {"suite": "demmo"}),
        (r"--limit must be at least 1", {"limit": 0}),
        (r"--tasks and --suite both", {"tasks": "arc_easy"}),
        (r"--num-fewshot needs --tasks", {"num_fewshot": 5}),
        (
            r"--apply-chat-template is for tasks",
            {"suite": "perplexity", "apply_chat_template": True},
        ),
        (r"has no chat template\. Leave out --apply-chat-template", {"apply_chat_template": True}),
        (r"a,b,a: task 'a' is named twice", {"suite": None, "tasks": ["a", "b", "a"]}),
        (r"--tasks names no task", {"suite": None, "tasks": " , "}),
        (
            r"--num-fewshot must be at least 0, got -1",
            {"suite": None, "tasks": "a", "num_fewshot": -1},
        ),
        (r"--batch-size 'many': expected a number", {"batch_size": "many"}),
        (r"--format 'latex' is not one of terminal", {"form": "latex"}),
        (r"--dtype 'int8' is not one of auto", {"dtype": "int8"}),
        (r"--output .*: a file cannot be written there", {"output": Path()}),
        (r"nothing: no such model folder", {"baseline": "/nothing"}),
        (r"--baseline nothing.json: cannot be read", {"baseline": "nothing.json"}),
        (r"--model must be text, got None", {"model": None}),
        (r"--baseline list.json: expected a JSON object", {"baseline": "list.json"}),
        (r"--output list.json: expected a JSON object", {"output": Path("list.json")}),
        (r"--beside sweep.json: this is not a results file", {"beside": [Path("sweep.json")]}),
        (
            r"wrong\.json: tasks\[\.\.\.\]\.answers\[\.\.\.\]: correct: acc,none must be one bit "
            r"for each of the 12 examples",
            {"beside": [Path("wrong.json")]},
        ),
        (r"bare: no tokenizer that transformers can load", {"model": "bare"}),
    ],
)
def test_wrong_options(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emp_llm.models.loading.load_model", None)
    answers = {"sums": {"examples": 12, "sha256": "", "correct": {"acc,none": "AAAA"}}}
    held = {
        "model": "m",
        "made_by": {"model": {}},
        "tasks": {"sums": {"results": {}, "answers": answers}},
    }
    Path("wrong.json").write_text(json.dumps(held | {"format": "emp-llm results 4"}))
    Path("sweep.json").write_text('{"format": "emp-llm sweep 3"}')
    Path("list.json").write_text("[]")
    shutil.copytree(evaluable_llama, "bare", ignore=shutil.ignore_patterns("*token*"))
    refused(says, **{"model": evaluable_llama, "suite": task_suite} | options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bare",
        "list.json",
        "sweep.json",
        "wrong.json",
    ]


def test_wrong_tasks(
    evaluable_llama: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emp_llm.models.loading.load_model", None)
    model = evaluable_llama
    with monkeypatch.context() as patch:
        few_task_files(patch, tmp_path_factory.mktemp("of_lm_eval"), "arc")
        Path("a.toml").write_text('[[tasks]]\nnames = ["arc_eazy"]\n')
        refused(
            r"no task 'arc_eazy' in lm-eval\. The nearest names: arc_easy",
            model=model,
            suite="a.toml",
        )
        refused(
            r"no task 'arc_eazy' in lm-eval\. The nearest names: arc_easy",
            model=model,
            tasks="arc_eazy",
        )
    Path("tasks").mkdir()
    Path("tasks/lost.yaml").write_text(
        TASK.format(
            name="lost", data="lost.jsonl", kind="multiple_choice", target="answer", more=CHOICE
        )
    )
    Path("b.toml").write_text('[[tasks]]\nnames = ["lost"]\nfolder = "tasks"\n')
    Path("tasks/gone.yaml").write_text(Path("tasks/lost.yaml").read_text().replace("lost", "gone"))
    Path("c.toml").write_text('[[tasks]]\nnames = ["gone", "lost"]\nfolder = "tasks"\n')
    says = (
        r"task gone: its data set json, task lost: its data set json cannot be loaded "
        r"\(.*gone.jsonl"
    )
    refused(says, model=model, suite="c.toml")
    refused(
        r"task lost: its data set json cannot be loaded \(.*lost.jsonl",
        model=model,
        suite="b.toml",
    )
    assert not list(tmp_path.glob("*.json"))


def test_a_task_that_needs_a_package_or_a_longer_context(
    evaluable_llama: Path, tmp_path: Path
) -> None:
    model = evaluable_llama
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "answers.jsonl").write_text('{"question": "One and one?", "answer": "two"}\n')
    (folder / "own.py").write_text(
        "import no_such_package\n\n\ndef first(items):\n    return items\n"
    )
    more = {
        "needy": "process_results: !function own.first",
        "long": "generation_kwargs: {until: [], max_gen_toks: 1280}",
    }
    for name, lines in more.items():
        (folder / f"{name}.yaml").write_text(
            TASK.format(
                name=name,
                data=folder / "answers.jsonl",
                kind="generate_until",
                target="answer",
                more=f"{lines}\nmetric_list:\n  - {{metric: exact_match}}",
            )
        )
        (tmp_path / f"{name}.toml").write_text(f'[[tasks]]\nnames = ["{name}"]\nfolder = "tasks"\n')
    needs = r"task needy needs the package no_such_package: pip install"
    refused(needs, model=model, suite=str(tmp_path / "needy.toml"))
    says = r"task long generates up to 1,280 tokens, .* holds [0-9]+\. Leave it out"
    refused(says, model=model, suite=str(tmp_path / "long.toml"))


def test_a_tokenizer_without_a_token_to_begin_with(task_suite: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    says = r"model: the tokenizer has neither a bos_token nor an eos_token"
    refused(says, model=model, suite=task_suite, device_map="cpu", output=tmp_path / "a.json")


def test_results_of_another_suite(evaluable_llama: Path, task_suite: Path, tmp_path: Path) -> None:
    short = task_suite.with_name("short.toml")
    common = {"model": evaluable_llama, "device_map": "cpu", "suite": short}
    evaluate(**common, output=tmp_path / "a.json")
    refused(
        r"--baseline .*another suite or limit \(limit",
        **common,
        baseline=str(tmp_path / "a.json"),
        limit=2,
    )
    refused(
        r"--baseline .*another suite .*seqlen",
        **common | {"suite": f"{short},seqlen=32"},
        baseline=str(tmp_path / "a.json"),
    )
    stopped = json.loads((tmp_path / "a.json").read_text()) | {"complete": False}
    (tmp_path / "a.json").write_text(json.dumps(stopped))
    refused(
        r"--beside .*has not finished",
        **common,
        beside=[tmp_path / "a.json"],
        output=tmp_path / "b.json",
    )


def test_without_lm_eval(
    evaluable_llama: Path, task_suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the package; a suite without tasks needs none."""
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    output = tmp_path / "results.json"
    refused(
        "pip install lm-eval",
        model=evaluable_llama,
        suite=task_suite,
        output=output,
    )
    short = task_suite.with_name("short.toml")
    assert evaluate(evaluable_llama, suite=short, output=output, device_map="cpu").results.complete
