"""Suites: the text and the tasks that a model is evaluated on, as files in `eval/`.

A suite file has a [perplexity] table (a text, as in a calibration recipe; `seqlen` is the length of
a block), [[tasks]] tables (names of lm-eval tasks with their settings), or both:

    [[tasks]]
    names = ["arc_easy", "my_task"]
    num_fewshot = 0          # default: the task's own
    limit = 100              # default: all examples
    folder = "my_tasks"      # your own lm-eval task files; relative to the suite file
    chat_template = true     # ask through the tokenizer's chat template; default: false
"""

import hashlib
import logging
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emp_llm.calibration.texts import corpus_of, for_model, read_toml, with_changes, with_path
from emp_llm.checkpoint.checkpoint import Checkpoint, check_agreement, identity_of
from emp_llm.checkpoint.files import INDEX_LIMIT, read_json
from emp_llm.checkpoint.output import describe_difference
from emp_llm.checkpoint.packed import PackedFolder
from emp_llm.common.errors import ReadError, UserError, did_you_mean
from emp_llm.common.machine import command_line, versions
from emp_llm.common.paths import PACK_NAME, REPORT_NAME, data_folder
from emp_llm.common.ranks import ranks
from emp_llm.models.local_model import LocalModel
from emp_llm.models.placement import Quantization, device_name, quantization_record
from emp_llm.options.shared import SuiteOptions
from emp_llm.pruning.writing import report_of_weights
from emp_llm.records.base import Corpus, ModelIdentity, converted, read_record
from emp_llm.records.evaluation import Measures, SuiteRecord, SuiteTask
from emp_llm.records.run_report import MadeBy, Results, RunReport, pruned_by, read_report

logger = logging.getLogger(__name__)


_LIMIT = re.compile(r",\s*limit\s*=\s*([0-9]{1,18})\s*(?=,|$)")


@dataclass(frozen=True)
class Task:
    """One lm-eval task.

    Attributes:
        name: of a task, tag or group of lm-eval.
        num_fewshot: examples shown before each question; None: the task's own number.
        limit: number of examples; None: all.
        folder: a folder with lm-eval task files, searched before lm-eval's own.
        chat_template: ask through the tokenizer's chat template, each example before the question a
            turn of its own.
    """

    name: str
    num_fewshot: int | None = None
    limit: int | None = None
    folder: Path | None = None
    chat_template: bool = False

    def record(self) -> SuiteTask:
        """For a results file: a folder is recorded by its name and content, so that a moved
        suite is the same suite.
        """
        return SuiteTask(
            name=self.name,
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            folder=None if self.folder is None else self.folder.name,
            sha256=None if self.folder is None else _digest(self.folder),
            chat_template=self.chat_template or None,
        )


@dataclass(frozen=True)
class Suite:
    """A text for the perplexity, tasks, or both.

    Attributes:
        name: as the user gave it, without the folders of files.
        corpus: the text of the perplexity; `corpus.seqlen` is the length of a block. None: no
            perplexity.
        tasks: in the order in which they run.
        limit: largest number of examples of a task, and of blocks of the text; None: all.
    """

    name: str
    corpus: Corpus | None
    tasks: tuple[Task, ...]
    limit: int | None = None

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(
                f"{self.name}: task {twice!r} is named twice; results are kept by "
                "name, so name it once."
            )

    def limited(self, limit: int | None) -> "Suite":
        """The same suite with at most `limit` examples of every task and `limit` blocks of its
        text.
        """
        if limit is None:
            return self
        if limit < 1:
            raise UserError(f"--limit must be at least 1, got {limit}.")
        tasks = tuple(replace(task, limit=min(limit, task.limit or limit)) for task in self.tasks)
        return replace(self, tasks=tasks, limit=limit)

    def of_model(self, folder: Path, tokenizer: Any) -> "Suite":
        """The same suite, whose text begins as the model in a folder needs it."""
        if self.corpus is None:
            return self
        return replace(
            self, corpus=for_model(self.corpus, read_json(folder / "config.json"), tokenizer)
        )

    def record(self) -> SuiteRecord:
        """The definition of the suite, for a results file."""
        text = None
        if self.corpus is not None:
            text = self.corpus.record()
            path = Path(self.corpus.file or self.corpus.dataset or "")
            if path.is_file() or (self.corpus.file is None and path.is_dir()):
                text.sha256 = _digest(path)
        return SuiteRecord(
            suite=self.name,
            limit=self.limit,
            text=text,
            tasks=[task.record() for task in self.tasks],
        )


class TaskTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A [[tasks]] table of a suite file."""

    names: Annotated[list[str], Meta(min_length=1)]
    num_fewshot: Annotated[int, Meta(ge=0)] | None = None
    limit: Annotated[int, Meta(ge=1)] | None = None
    folder: str | None = None
    chat_template: bool = False


class SuiteFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A suite file."""

    about: str = ""
    perplexity: dict[str, Any] | None = None
    tasks: list[TaskTable] = []


def find_suite(name: str) -> Suite:
    """A suite of `eval/` by name, or the user's own suite file by path.

    Args:
        name: of the suite; ",field=value" after it changes a field of its text
            ("perplexity,seqlen=512"), and ",limit=N" is as `limited`.

    Raises:
        UserError: there is no such suite, or the file is not a suite.
    """
    limit = _LIMIT.search(name)
    if limit is not None:
        name = name.replace(limit[0], "", 1)
    base, rest = with_path(name.split(","))
    changes = ",".join(rest)
    known = {path.stem: path for path in sorted(data_folder("eval").glob("*.toml"))}
    path = known.get(base, Path(base))
    if path.suffix != ".toml":
        hint = did_you_mean(base, known)
        raise UserError(
            f"{base!r} is neither a suite ({', '.join(known)}) nor a .toml file of your own.{hint}"
        )
    file = converted(read_toml(path), SuiteFile, str(path))
    corpus = None
    if file.perplexity is not None:
        corpus = with_changes(corpus_of(file.perplexity, path), changes)
        if corpus.samples is not None or corpus.generate:
            field = "generate" if corpus.generate else "samples"
            raise UserError(
                f"{name!r}: {field} has no effect on a text that is evaluated. Leave it out; "
                ",limit=N shortens the text."
            )
    elif changes:
        raise UserError(
            f"{name!r}: the suite has no text, so no field of one can be changed; "
            f"leave out {changes!r}."
        )
    tasks: list[Task] = []
    for table in file.tasks:
        folder = None if table.folder is None else path.parent / table.folder
        if folder is not None and not folder.is_dir():
            raise UserError(
                f"{path}: folder {table.folder!r}: {folder} is not a folder; name the "
                "folder with the task files."
            )
        tasks += [
            Task(task, table.num_fewshot, table.limit, folder, table.chat_template)
            for task in table.names
        ]
    if corpus is None and not tasks:
        raise UserError(f"{path}: it is empty; a suite has [perplexity], [[tasks]] or both.")
    suite = Suite(name, corpus, tuple(tasks)).limited(None if limit is None else int(limit[1]))
    shown = [base if base in known else path.name, *map(_without_folders, rest)]
    return replace(suite, name=",".join(shown))


def _without_folders(change: str) -> str:
    """ "file=V.txt" of "file=/a/b/V.txt"."""
    field, equals, value = change.partition("=")
    return f"{field}{equals}{PurePath(value).name if field == 'file' else value}"


def suite_of(options: SuiteOptions) -> Suite:
    """The suite of a command: that of --suite, or one of --tasks alone; the default is
    "perplexity".

    Raises:
        UserError: the suite is invalid, or the options conflict.
    """
    if options.tasks is None:
        if options.num_fewshot is not None:
            raise UserError(
                "--num-fewshot needs --tasks; in a suite file, num_fewshot belongs to [[tasks]]."
            )
        suite = find_suite(options.suite or "perplexity")
    else:
        if options.suite is not None:
            raise UserError("--tasks and --suite both choose what is measured; give one of them.")
        if options.num_fewshot is not None and options.num_fewshot < 0:
            raise UserError(f"--num-fewshot must be 0 or more, got {options.num_fewshot}.")
        given = options.tasks.split(",") if isinstance(options.tasks, str) else options.tasks
        names = [name.strip() for name in given if name.strip()]
        if not names:
            raise UserError(
                "--tasks names no task; give names of lm-eval tasks, separated by commas."
            )
        shots = [] if options.num_fewshot is None else [f"num_fewshot={options.num_fewshot}"]
        suite = Suite(
            ",".join([*names, *shots]),
            None,
            tuple(Task(name, options.num_fewshot) for name in names),
        )
    suite = suite.limited(options.limit)
    if options.apply_chat_template:
        if not suite.tasks:
            raise UserError(
                "--apply-chat-template is for tasks, and this suite has none; leave it out."
            )
        suite = replace(
            suite, tasks=tuple(replace(task, chat_template=True) for task in suite.tasks)
        )
    return suite


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of the files in a folder."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# Results of a suite on a model: the file that is written after every task, and results that are
# read again.
#
# Earlier results resume an evaluation, stand in a table, or take the place of a new measurement;
# they must be of the same suite.


def new_results(
    source: LocalModel,
    suite: Suite,
    batch_size: int | str,
    dtype: str,
    device_map: str,
    quantization: Quantization | None = None,
    runtime: str = "dense",
) -> Results:
    """Results of a suite and a model with nothing measured yet; UserError if the folder is not a
    checkpoint.
    """
    record = suite.record()
    # `Checkpoint` refuses a packed folder, which only the sparse runtime runs.
    read = folder_identity if runtime == "sparse" else _identity_of_checkpoint
    made_of = {"suite": msgspec.to_builtins(record)}
    made_of |= ModelIdentity.of(source.folder, None).as_dict()
    if (source.folder / PACK_NAME).is_file():
        check_agreement(made_of | {"weights": folder_identity(source.folder)})
    else:
        check_agreement(made_of, model=Checkpoint(source.folder))
    identity = ranks().first(partial(read, source.folder))
    try:
        packed = (source.folder / PACK_NAME).is_file()
        read_it = read_report if packed else partial(report_of_weights, identity=identity)
        report = read_it(source.folder)
    except ReadError:
        raise
    except UserError:  # it has no report that can be read
        report = None
    pruned = None if report is None else pruned_by(report)
    made_by = MadeBy(
        model=ModelIdentity.of(source.folder, identity),
        limit=record.limit,
        text=record.text,
        tasks=record.tasks,
        batch_size=batch_size,
        dtype=dtype,
        quantization=quantization_record(quantization),
        device_map=device_map,
        runtime=None if runtime == "dense" else runtime,
        ranks=ranks().count,
        device=device_name(device_map),
        versions=versions(),
    )
    return Results(
        model=source.name,
        revision=source.revision,
        pruned=pruned,
        suite=suite.name,
        made_by=made_by,
        command=command_line(),
    )


def _identity_of_checkpoint(folder: Path) -> str:
    return identity_of(Checkpoint(folder))


def folder_identity(folder: Path) -> str | None:
    """The identity of a model folder; of a packed one, that of its original."""
    return (
        PackedFolder(folder).identity
        if (folder / PACK_NAME).is_file()
        else identity_of(Checkpoint(folder))
    )


def save_results(results: Results, path: Path) -> None:
    """Save results, on the first rank. UserError if the file cannot be written."""
    if not ranks().main:
        return
    try:
        results.save(path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror}).") from error


def open_results(path: Path, results: Results, overwrite: bool = False) -> Results:
    """Results with the earlier measures of their file. Under several ranks, all hold the same.

    Args:
        path: the file; it need not exist.
        results: from `new_results`. If the file holds results of the same model and suite, their
            measurements are added.
        overwrite: measure everything again, whatever the file holds.

    Raises:
        UserError: the file holds other results (the first field that differs is named), or cannot
            be written.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"--output {path}: a file cannot be written there; name a file in a folder."
        )
    if path.exists() and not overwrite:
        older = read_results(path, "--output")
        field = describe_difference(older.made_by.as_dict(), results.made_by.as_dict())
        if field is not None:
            raise UserError(
                f"--output {path}: it holds other results ({field}). Name another "
                "file, or add --overwrite."
            )
        results.command = older.command
        results.take(older.measures)
        results.complete = older.complete
    shared: Results = ranks().broadcast(results)
    return shared


def read_results(path: Path, option: str) -> Results:
    """The results in a file; UserError, naming the option, if it is not a results file."""
    try:
        return read_record(path, Results, INDEX_LIMIT)
    except UserError as error:
        raise UserError(f"{option} {error}") from error


def results_of_report(report: RunReport) -> list[Results]:
    """The results of the dense and of the pruned model of a run that evaluated them; one that is
    not measured is left out.
    """
    evaluation = report.evaluation
    if evaluation is None:
        return []
    made_by = MadeBy(
        model=msgspec.convert(report.source, ModelIdentity, from_attributes=True),
        limit=evaluation.limit,
        text=evaluation.text,
        tasks=evaluation.tasks,
        batch_size=evaluation.batch_size,
        dtype=report.dtype,
        device_map=report.device_map,
        versions=report.versions,
    )
    results = []
    for pruned, measures in ((None, evaluation.dense), (pruned_by(report), evaluation.pruned)):
        if measures is not None:
            results.append(
                Results(
                    model=report.source.model,
                    pruned=pruned,
                    suite=evaluation.suite,
                    made_by=made_by,
                )
            )
            results[-1].take(measures)
    return results


# Earlier results in place of new ones.


def results_to_compare(path: Path, option: str, wanted: MadeBy) -> Results:
    """Earlier results for a table. Differences that can change the last digits are logged as a
    warning.

    Args:
        path: a results file.
        option: the option that names it, for errors.
        wanted: the suite that the table is of.

    Raises:
        UserError: it is not a results file, its results are of another suite or limit, or they are
            not complete.
    """
    results = complete_results(path, option)
    difference = _difference(results.made_by, wanted, "text", "tasks", "limit")
    if difference is not None:
        raise UserError(
            f"{option} {path}: its results are of another suite or limit ({difference}); "
            "use the same ones."
        )
    difference = _difference(results.made_by, wanted, "batch_size", "dtype", "device", "versions")
    if difference is not None:
        logger.warning(
            "warning: %s was measured differently (%s), so the last digits may differ.",
            path,
            difference,
        )
    return results


def dense_measures(baseline: Path, wanted: MadeBy) -> Measures:
    """Earlier measurements of a dense model, used instead of measuring it.

    Args:
        baseline: a results file of `evaluate`, or the output folder of a prune that evaluated the
            dense model.
        wanted: everything that a new measurement would depend on.

    Raises:
        UserError: they are of another model, suite, dtype or quantisation, or not complete.
    """
    if baseline.is_dir():
        dense = [
            results
            for results in results_of_report(read_report(baseline))
            if results.pruned is None
        ]
        if not dense:
            raise UserError(
                f"--baseline {baseline}: its {REPORT_NAME} holds no evaluation of the "
                "dense model; name another."
            )
        results = dense[0]
    else:
        results = complete_results(baseline, "--baseline")
    made_by = results.made_by
    other = None
    remedy = "Leave out --baseline to measure the dense model now."
    differs = _difference(made_by, wanted, "text", "tasks", "limit", "dtype", "quantization")
    if differs is not None:
        other = f"another suite, dtype or quantisation ({differs})"
    elif (words := made_by.model.difference(wanted.model)) is not None:
        other = f"{words} --model"
    if other is not None:
        raise UserError(f"--baseline {baseline}: its results are of {other}. {remedy}")
    return results.measures


def complete_results(path: Path, option: str) -> Results:
    """The results in a file; UserError if the suite is not measured to its end."""
    results = read_results(path, option)
    if not results.complete:
        raise UserError(
            f"{option} {path}: that run has not finished; run its command again to resume it."
        )
    return results


def _difference(held: MadeBy, wanted: MadeBy, *fields: str) -> str | None:
    """The first of some fields that differs, in words; None if all are equal."""
    before = held.as_dict()
    now = wanted.as_dict()
    return describe_difference(
        {field: before[field] for field in fields}, {field: now[field] for field in fields}
    )
