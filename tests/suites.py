"""A suite with a text and three small tasks, and a tokenizer for it, for the tests of evaluations."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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
CHOICE = "doc_to_choice: options\nmetric_list:\n  - {metric: acc}\n  - {metric: acc_norm}\nmetadata: {version: 2.0}"
TASKS = ("sums", "sums_text", "sums_shown")


@cache
def _task_manager(folders: tuple[str, ...], defaults: bool) -> Any:
    from lm_eval.tasks.manager import TaskManager

    return TaskManager(include_path=list(folders), include_defaults=defaults)


def task_manager(include_path: Sequence[str] = (), include_defaults: bool = True) -> Any:
    """lm-eval's TaskManager, made once for the same arguments: to read all of its task files takes 13 seconds."""
    return _task_manager(tuple(include_path), include_defaults)


def make_evaluable_model(folder: Path, family: str) -> Path:
    """A tiny model whose tokenizer names tokens for the beginning and the end of a text, which lm-eval needs."""
    make_model(folder, family)
    tokenizer = make_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([1, 2])
    tokenizer.save_pretrained(folder)
    return folder


def make_suite(folder: Path) -> Path:
    """A short text; two multiple-choice tasks, one of them with few-shot examples; and a task of word perplexity."""
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
    (folder / "short.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 64\n')
    (folder / "mine.toml").write_text(
        '[perplexity]\nfile = "text.txt"\nseqlen = 64\n\n'
        '[[tasks]]\nnames = ["sums", "sums_text"]\nfolder = "tasks"\n\n'
        '[[tasks]]\nnames = ["sums_shown"]\nnum_fewshot = 2\nfolder = "tasks"\n'
    )
    return folder / "mine.toml"
