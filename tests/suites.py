"""A suite with a text and three small tasks, and a tokenizer for it, for the tests of
evaluations.
"""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import make_model, make_tokenizer

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
CHOICE = (
    "doc_to_choice: options\nmetric_list:\n  - {metric: acc}\n  - {metric: "
    "acc_norm}\nmetadata: {version: 2.0}"
)
TASKS = ("sums", "sums_text", "sums_shown")


def few_task_files(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Leave lm-eval these folders of its own task files. To read all 14,000 takes 13 seconds."""
    manager = importlib.import_module("lm_eval.tasks.manager")
    for name in names:
        shutil.copytree(Path(str(manager.__file__)).with_name(name), folder / name)
    monkeypatch.setattr(manager, "__file__", str(folder / "manager.py"))


def make_evaluable_model(folder: Path, family: str) -> Path:
    """A tiny model whose tokenizer names tokens for the beginning and the end of a text, which
    lm-eval needs.
    """
    make_model(folder, family)
    tokenizer = make_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([1, 2])
    tokenizer.save_pretrained(folder)
    return folder


def make_suite(folder: Path) -> Path:
    """A short text; two multiple-choice tasks, one of them with few-shot examples; and a task of
    word perplexity.
    """
    (folder / "tasks").mkdir()
    (folder / "text.txt").write_text("A short walk in the long grass, then home. " * 20)
    rows = [
        {
            "question": f"{i} and {i} is",
            "options": [str(2 * i), str(i * i + 1), "none"],
            "answer": i % 3,
        }
        for i in range(1, 13)
    ]
    data = folder / "tasks" / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, target, more in (
        ("sums", "multiple_choice", "answer", CHOICE),
        ("sums_shown", "multiple_choice", "answer", CHOICE),
        (
            "sums_text",
            "loglikelihood_rolling",
            "question",
            "metric_list:\n  - {metric: word_perplexity}",
        ),
    ):
        text = TASK.format(name=name, data=data, kind=kind, target=target, more=more)
        if kind != "multiple_choice":
            text = text.replace("fewshot_split: train\n", "").replace(
                "doc_to_text: question", 'doc_to_text: ""'
            )
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    (folder / "short.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 64\n')
    (folder / "mine.toml").write_text(
        '[perplexity]\nfile = "text.txt"\nseqlen = 64\n\n'
        '[[tasks]]\nnames = ["sums", "sums_text"]\nfolder = "tasks"\n\n'
        '[[tasks]]\nnames = ["sums_shown"]\nnum_fewshot = 2\nfolder = "tasks"\n'
    )
    return folder / "mine.toml"
