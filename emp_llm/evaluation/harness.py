"""lm-eval, unmodified: its tasks, and its Hugging Face wrapper around a loaded model.

The numbers equal those of its command line, run for one task at a time (it mixes the questions of several tasks in a batch):

    lm_eval run --model hf --model_args pretrained=DIR --tasks NAME --batch_size N
"""

import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from functools import partial
from io import StringIO
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError, reason
from emp_llm.common.progress import progress_bar, shows_bars
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.suites import Task
from emp_llm.models.modules import reads_twice
from emp_llm.models.offload import input_device
from emp_llm.records.evaluation import AnswersRecord, TaskRecord, packed_answers

logger = logging.getLogger(__name__)


def parse_batch_size(text: str) -> int | str:
    """A `--batch-size`: a number of at least 1, or "auto", which lets lm-eval choose; UserError for anything else."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--batch-size {text!r}: expected a number of at least 1, or auto.")
    return int(text)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UserError for a tokenizer without a token to begin a text with."""
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has neither a bos_token nor an eos_token, and lm-eval begins every text "
            "with one of them. Name one in tokenizer_config.json."
        )


def check_chat_template(tokenizer: Any, tasks: tuple[Task, ...]) -> None:
    """Raise UserError if a task needs a chat template and the tokenizer has none."""
    if any(task.chat_template for task in tasks) and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template. Leave out --apply-chat-template, and "
            "chat_template in the suite, or add chat_template.jinja to the model's folder."
        )


class _LoadError(Exception):
    """A task that cannot be loaded: the part that is missing, and the reason."""

    def __init__(self, missing: str, why: str) -> None:
        super().__init__(missing, why)
        self.missing = missing
        self.why = why


class Harness:
    """The tasks of a suite with their data.

    Raises:
        UserError: lm-eval is not installed or has no such task, or the data of a task cannot be loaded.
    """

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError(
                f"The tasks of a suite need lm-eval ({reason(error)}). Install it: pip install 'emp-llm[eval]'"
            ) from error
        folders = [str(folder) for folder in dict.fromkeys(task.folder for task in tasks) if folder is not None]
        # Reading lm-eval's 14,000 task files takes seconds. They are read only if a task is not in the user's folders.
        with _quiet():
            self._manager = TaskManager(include_path=folders, include_defaults=False)
            if not all(task.name in self._manager.all_subtasks for task in tasks):
                self._manager = TaskManager(include_path=folders)
        self._tasks = {task.name: task for task in tasks}
        for name in self._tasks:
            if name not in self._manager.all_tasks:
                nearest = get_close_matches(name, self._manager.all_tasks, 3)
                hint = f" The nearest names: {', '.join(nearest)}." if nearest else ""
                raise UserError(f"there is no task {name!r} in lm-eval{_or_folders(folders)}.{hint}")
        self._loaded: dict[str, dict[str, Any]] = {}
        lost: dict[str, str] = {}  # missing part -> reason
        for name in self._tasks:
            try:
                self._loaded[name] = self._load(name)
            except _LoadError as error:
                lost[f"task {name}: {error.missing}"] = error.why
        if lost:
            raise UserError(f"{', '.join(lost)} cannot be loaded ({next(iter(lost.values()))}).{_how_to_prepare()}")

    def _load(self, name: str) -> dict[str, Any]:
        try:
            with _quiet():
                loaded: dict[str, Any] = dict(self._manager.load([name]))
        except Exception as error:  # data sets, their readers and the network raise dozens of kinds
            data = (self._manager.task_index[name].cfg or {}).get("dataset_path")
            raise _LoadError(f"its data set {data}" if data else "it", reason(error)) from error
        wanted = self._tasks[name].num_fewshot
        for task in loaded["tasks"].values():
            if wanted and task.get_config("num_fewshot") == 0:
                logger.warning("warning: task %s fixes num_fewshot at 0; the suite's %d has no effect.", task.task_name, wanted)
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(
                    f"task {name}: it runs code that the model writes, and emp-llm has no sandbox. Run it with lm_eval in one."
                )
        return loaded

    def examples(self) -> dict[str, int]:
        """Number of examples by task; a group is listed by its members."""
        return {name: len(task.eval_docs) for loaded in self._loaded.values() for name, task in loaded["tasks"].items()}

    def model(self, model: PreTrainedModel, tokenizer: Any, batch_size: int | str) -> Any:
        """lm-eval's wrapper around a loaded model. It takes the batch size: `simple_evaluate` ignores its own argument."""
        from lm_eval.models.huggingface import HFLM

        with _quiet():
            backend = "seq2seq" if reads_twice(model) else "causal"
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend=backend)
        wrapped._device = input_device(model)  # the `device` of an offloaded model is not that of its inputs
        if ranks().count > 1:
            # lm-eval divides the questions among ranks by these attributes. It sets them only for models that it loads on GPUs.
            from accelerate import Accelerator

            wrapped.accelerator = Accelerator()
            wrapped._rank, wrapped._world_size = ranks().index, ranks().count
        return wrapped

    def run(self, name: str, wrapped: Any) -> TaskRecord:
        """Run one task of the suite. Under several ranks, each answers a share of the questions.

        Args:
            name: of the task.
            wrapped: the model, from `model`.

        Returns:
            lm-eval's report, with lm-eval's names.
        """
        from lm_eval import simple_evaluate

        task, loaded = self._tasks[name], self._loaded[name]
        chosen = list(loaded.get("groups", {}).values())
        inside = {child.task_name for group in chosen for child in group.get_all_tasks()}
        chosen += [single for single in loaded["tasks"].values() if single.task_name not in inside]
        # Its warnings, such as for inputs longer than the model's context, are for the user; its remarks on options are not.
        with _quiet(logging.WARNING), task_progress(name):
            found = simple_evaluate(
                model=wrapped,
                tasks=chosen,
                num_fewshot=task.num_fewshot,
                limit=task.limit,
                apply_chat_template=task.chat_template,
                fewshot_as_multiturn=task.chat_template,  # as lm-eval's command line does
                log_samples=all(_has_targets(each) for each in loaded["tasks"].values()),
                task_manager=self._manager,
            )
        report: dict[str, Any] = ranks().share(found and _kept(found))  # only the first rank has a report
        return msgspec.convert(report, TaskRecord)


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    """The parts of lm-eval's report that a results file keeps."""
    kept: dict[str, Any] = {key: found[key] for key in ("results", "versions", "n-shot", "n-samples", "higher_is_better")}
    kept = json.loads(json.dumps(kept | {"groups": sorted(found.get("groups", {}))}, default=str))
    for metrics in kept["results"].values():
        for key, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
                metrics[key] = "N/A" if math.isnan(value) else None
    for name, samples in found.get("samples", {}).items():
        answers = _answers(samples, found["results"][name])
        if answers is not None:
            kept.setdefault("answers", {})[name] = msgspec.to_builtins(answers)
    return kept


def _has_targets(task: Any) -> bool:
    """Whether lm-eval can log the examples of a task: it asks for their targets, and fails where a task defines none."""
    return getattr(task.config, "doc_to_target", None) is not None


def _answers(samples: list[dict[str, Any]], metrics: dict[str, Any]) -> AnswersRecord | None:
    """The answers of a task, for every metric that is the share of correct ones; None if there is no such metric.

    Args:
        samples: lm-eval's log of the task: an entry for each example and filter, in the order of the ranks.
        metrics: its results.
    """
    examples = {(each["doc_id"], each["doc_hash"], each["target_hash"]) for each in samples}
    ordered = sorted(examples)
    correct = {}
    for key, value in metrics.items():
        metric, _, chosen = key.partition(",")
        given = {each["doc_id"]: each[metric] for each in samples if each["filter"] == chosen and metric in each}
        answers = [given.get(number) for number, *_ in ordered]
        if not answers or not all(np.isscalar(answer) and answer in (0, 1) for answer in answers):
            continue
        bits = [bool(answer) for answer in answers]
        if math.isclose(sum(bits) / len(bits), value):
            correct[key] = packed_answers(bits)
    digest = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    return AnswersRecord(examples=len(ordered), sha256=digest, correct=correct) if correct else None


class _Overflowing:
    """`math` with an `exp` that is infinite where it overflows: the perplexity of a ruined model must not end a run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)

    @staticmethod
    def exp(number: float) -> float:
        try:
            return math.exp(number)
        except OverflowError:
            return math.inf


def _how_to_prepare() -> str:
    from huggingface_hub import constants

    return " HF_HUB_OFFLINE is set: fetch them with --prepare on a node with a network." if constants.HF_HUB_OFFLINE else ""


def _or_folders(folders: list[str]) -> str:
    return f" or {', '.join(folders)}" if folders else ""


@contextmanager
def _quiet(level: int = logging.ERROR) -> Iterator[None]:
    """lm-eval without the remarks meant for its own command line, and without its progress bars where we draw none.

    Perplexities too large for a float are infinite, in place of an OverflowError."""
    from lm_eval import evaluator
    from lm_eval.api import metrics

    loggers = {logging.getLogger("lm_eval"): level, logging.getLogger("lm_eval.evaluator"): logging.ERROR}
    before = {each: each.level for each in loggers}
    # For its own log, lm-eval asks git and the machine for facts after every task. git complains outside of a repository, and
    # the facts about the machine take most of a second.
    asked_git, asked_machine = evaluator.get_git_commit_hash, evaluator.add_env_info
    evaluator.get_git_commit_hash = lambda: None
    evaluator.add_env_info = lambda results: None
    metrics.math = _Overflowing()
    for each, wanted in loggers.items():
        each.setLevel(wanted)
    try:
        with nullcontext() if shows_bars() else redirect_stderr(StringIO()):
            yield
    finally:
        evaluator.get_git_commit_hash, evaluator.add_env_info, metrics.math = asked_git, asked_machine, math
        for each, wanted in before.items():
            each.setLevel(wanted)


# lm-eval's progress as ours: under the name of the task, with a unit, and as lines in the log where there is no terminal.


# The modules of lm-eval that draw bars while a task is prepared and run.
_MODULES = ("lm_eval.models.huggingface", "lm_eval.api.model", "lm_eval.api.task")


class _TaskBar:
    """Stands in for tqdm inside lm-eval."""

    def __init__(self, task: str, items: Iterable[Any] | None = None, **options: Any) -> None:
        self._items = items
        total = options.get("total")
        if total is None:
            total = len(items) if isinstance(items, Sized) else 0
        asks = str(options.get("desc") or "").startswith("Running")
        title = task if asks else f"{task}: preparing"
        self._bar = progress_bar(total, title, "req", leave=asks)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items or ():
            yield item
            self._bar.update(1)
        self._bar.close()

    def update(self, n: float = 1) -> None:
        self._bar.update(n)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def task_progress(task: str) -> Iterator[None]:
    """Inside this context, lm-eval's bars have the name of this task."""
    modules = [module for name in _MODULES if (module := sys.modules.get(name)) is not None and hasattr(module, "tqdm")]
    before: list[Any] = [vars(module)["tqdm"] for module in modules]
    for module in modules:
        vars(module)["tqdm"] = partial(_TaskBar, task)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module)["tqdm"] = own
