"""Suites: what a model is judged by, as files in `eval/`.

A suite file has a [perplexity] table (a text, as in a calibration recipe; `seqlen` is the longest block), [[tasks]] tables
(names of lm-eval tasks, and how to run them), or both:

    [[tasks]]
    names = ["arc_easy", "my_task"]
    num_fewshot = 0          # default: the task's own
    limit = 100              # default: all examples
    folder = "my_tasks"      # lm-eval task files of your own, beside the suite file
"""

import hashlib
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from emp_llm.models.corpora import Corpus, corpus_of, corpus_record, data_folder, read_toml, with_changes
from emp_llm.models.errors import UserError

_TASK_FIELDS = {"names": list, "num_fewshot": int, "limit": int, "folder": str}


@dataclass(frozen=True)
class Task:
    """One lm-eval task.

    Attributes:
        name: as lm-eval knows it: a task, a tag or a group.
        num_fewshot: examples shown before each question; None: the task's own.
        limit: of examples; None: all.
        folder: a folder with lm-eval task files, searched before lm-eval's own.
    """

    name: str
    num_fewshot: int | None = None
    limit: int | None = None
    folder: Path | None = None

    def record(self) -> dict[str, Any]:
        """The fields that are set; of the folder its name and content, so that a moved suite is the same suite."""
        values: dict[str, Any] = {"name": self.name, "num_fewshot": self.num_fewshot, "limit": self.limit}
        if self.folder is not None:
            values |= {"folder": self.folder.name, "sha256": _digest(self.folder)}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class Suite:
    """What a model is judged by.

    Attributes:
        name: as the user gave it.
        corpus: the text of the perplexity; `corpus.seqlen` is the longest block. None: no perplexity.
        tasks: in the order in which they run.
        limit: at most so many examples of every task, and blocks of the text. None: all of them.
    """

    name: str
    corpus: Corpus | None
    tasks: tuple[Task, ...]
    limit: int | None = None

    def limited(self, limit: int | None) -> "Suite":
        """The same suite with at most `limit` examples of every task and `limit` blocks of its text."""
        if limit is None:
            return self
        if limit < 1:
            raise UserError(f"--limit must be at least 1, got {limit}.")
        tasks = tuple(replace(task, limit=min(limit, task.limit or limit)) for task in self.tasks)
        return replace(self, tasks=tasks, limit=limit)

    def record(self) -> dict[str, Any]:
        """What defines the suite, for results."""
        record: dict[str, Any] = {"suite": self.name, "limit": self.limit}
        if self.corpus is not None:
            record["text"] = corpus_record(self.corpus)
            if self.corpus.file is not None and Path(self.corpus.file).is_file():
                file = Path(self.corpus.file)
                record["text"] |= {"file": file.name, "sha256": _digest(file)}
        if self.tasks:
            record["tasks"] = [task.record() for task in self.tasks]
        return record


def find_suite(name: str) -> Suite:
    """A suite of `eval/` by its name, or a suite file of the user's own by its path; then ",field=value" to change fields of
    its text ("perplexity,seqlen=512").

    Raises:
        UserError: there is none, or the file is not a suite.
    """
    base, _, changes = name.partition(",")
    known = {path.stem: path for path in sorted(data_folder("eval").glob("*.toml"))}
    path = known.get(base, Path(base))
    if path.suffix != ".toml":
        nearest = get_close_matches(base, known, 1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise UserError(f"{base!r} is not a suite ({', '.join(known)}) or a .toml file of your own.{hint}")
    values = read_toml(path)
    for key in values:
        if key not in ("perplexity", "tasks"):
            raise UserError(f"{path}: unknown table {key!r}; a suite has [perplexity], [[tasks]] or both.")
    corpus = None
    if "perplexity" in values:
        if not isinstance(values["perplexity"], dict):
            raise UserError(f"{path}: perplexity must be a table: [perplexity].")
        corpus = with_changes(corpus_of(values["perplexity"], path), changes)
    elif changes:
        raise UserError(f"{name!r}: the suite has no text whose fields could be changed.")
    tasks = _tasks_of(values.get("tasks", []), path)
    if corpus is None and not tasks:
        raise UserError(f"{path}: nothing in it; a suite has [perplexity], [[tasks]] or both.")
    return Suite(name, corpus, tasks)


def _digest(path: Path) -> str:
    """sha256 of a file, or of the files in a folder."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _tasks_of(tables: Any, path: Path) -> tuple[Task, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{path}: tasks must be tables: [[tasks]].")
    tasks = [task for table in tables for task in _tasks_of_table(table, path)]
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: task {name!r} is named twice; results are kept by name.")
    return tuple(tasks)


def _tasks_of_table(table: dict[str, Any], path: Path) -> list[Task]:
    for key, value in table.items():
        if key not in _TASK_FIELDS:
            raise UserError(f"{path}: unknown field {key!r}; [[tasks]] has {', '.join(_TASK_FIELDS)}.")
        if type(value) is not _TASK_FIELDS[key]:
            raise UserError(f"{path}: {key} must be {_TASK_FIELDS[key].__name__}, got {value!r}.")
    names = table.get("names")
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: [[tasks]] needs names, a list of lm-eval tasks.")
    if table.get("limit", 1) < 1 or table.get("num_fewshot", 0) < 0:
        raise UserError(f"{path}: limit must be at least 1, num_fewshot at least 0.")
    folder = path.parent / table["folder"] if "folder" in table else None
    if folder is not None and not folder.is_dir():
        raise UserError(f"{path}: folder {table['folder']!r}: {folder} is not a folder.")
    return [Task(name, table.get("num_fewshot"), table.get("limit"), folder) for name in names]
