"""The stock lm-eval: its tasks and its Hugging Face model, around a model that is loaded already.

Nothing that a number depends on is changed, so they are those of its command line, for one task at a time (it would mix the
questions of several into one batch):

    lm_eval run --model hf --model_args pretrained=DIR --tasks NAME --batch_size N
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from io import StringIO
from typing import Any

from transformers import PreTrainedModel

from emp_llm.models.errors import UserError, reason
from emp_llm.models.loading import input_device
from emp_llm.models.ranks import ranks
from emp_llm.services.suites import Task

logger = logging.getLogger(__name__)


def parse_batch_size(text: str) -> int | str:
    """A `--batch-size`: a number, or "auto" for what lm-eval finds to fit; UserError for anything else."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--batch-size {text!r}: expected a number of at least 1, or auto.")
    return int(text)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UserError for a tokenizer without a token that a text could begin with."""
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has neither a bos_token nor an eos_token, and lm-eval begins texts with "
            "one of them. Name one in tokenizer_config.json."
        )


class _Unloadable(Exception):
    """What of a task cannot be loaded, and why."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why


class Harness:
    """The tasks of a suite, with their data, ready to be asked of models.

    Raises:
        UserError: lm-eval is not installed, it has no such task, or the data of a task cannot be loaded.
    """

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError(
                f"the tasks of a suite need lm-eval ({reason(error)}). Install it: pip install 'emp-llm[eval]'"
            ) from error
        folders = [str(folder) for folder in dict.fromkeys(task.folder for task in tasks) if folder is not None]
        # Reading lm-eval's 14,000 task files takes seconds, so only where they are needed: a group may name any of them.
        with _quiet():
            self._manager = TaskManager(include_path=folders, include_defaults=False)
            if not all(task.name in self._manager.all_subtasks for task in tasks):
                self._manager = TaskManager(include_path=folders)
        self._tasks = {task.name: task for task in tasks}
        for name in self._tasks:
            if name not in self._manager.all_tasks:
                nearest = get_close_matches(name, self._manager.all_tasks, 3)
                hint = f" The nearest names: {', '.join(nearest)}." if nearest else ""
                raise UserError(f"there is no task {name!r} in lm-eval{_beside(folders)}.{hint}")
        self._loaded: dict[str, dict[str, Any]] = {}
        lost: dict[str, str] = {}
        for name in self._tasks:
            try:
                self._loaded[name] = self._load(name)
            except _Unloadable as error:
                lost[f"task {name}: {error.what}"] = error.why
        if lost:
            raise UserError(f"{', '.join(lost)} cannot be loaded ({next(iter(lost.values()))}).{_how_to_prepare()}")

    def _load(self, name: str) -> dict[str, Any]:
        try:
            with _quiet():
                loaded: dict[str, Any] = dict(self._manager.load([name]))
        except Exception as error:  # data sets, their readers and the network raise dozens of kinds
            data = (self._manager.task_index[name].cfg or {}).get("dataset_path")
            raise _Unloadable(f"its data set {data}" if data else "it", reason(error)) from error
        wanted = self._tasks[name].num_fewshot
        for task in loaded["tasks"].values():
            if wanted and task.get_config("num_fewshot") == 0:
                logger.warning("warning: task %s fixes num_fewshot at 0; the suite's %d has no effect.", task.task_name, wanted)
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"task {name}: it runs code that the model writes; run it with lm_eval in a sandbox.")
        return loaded

    def examples(self) -> dict[str, int]:
        """How many examples each task (of a group, each member) asks."""
        return {name: len(task.eval_docs) for loaded in self._loaded.values() for name, task in loaded["tasks"].items()}

    def model(self, model: PreTrainedModel, tokenizer: Any, batch_size: int | str) -> Any:
        """lm-eval's own model around a loaded one; `simple_evaluate` ignores a batch size given beside it."""
        from lm_eval.models.huggingface import HFLM

        with _quiet():
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        wrapped._device = input_device(model)  # of an offloaded model, `model.device` is no place to put tokens
        if ranks().count > 1:
            # lm-eval divides questions over ranks by these three, but sets them only where it loads a model itself, on GPUs.
            from accelerate import Accelerator

            wrapped.accelerator = Accelerator()
            wrapped._rank, wrapped._world_size = ranks().index, ranks().count
        return wrapped

    def run(self, name: str, wrapped: Any) -> dict[str, Any]:
        """One task of the suite: what lm-eval reports of it, by its own names; under several ranks, each answers its share.

        Args:
            name: of the task.
            wrapped: of `model`.

        Returns:
            "results": by task (for a group or tag several), "acc,none" and the like as fractions with their "_stderr";
            "versions", "n-shot", "n-samples": by task; "groups": the names in "results" that sum up others.
        """
        from lm_eval import simple_evaluate

        task, loaded = self._tasks[name], self._loaded[name]
        chosen = list(loaded.get("groups", {}).values())
        inside = {child.task_name for group in chosen for child in group.get_all_tasks()}
        chosen += [single for single in loaded["tasks"].values() if single.task_name not in inside]
        # Its warnings, of inputs longer than the model's context for one, are the user's; what it says of its options is not.
        with _quiet(logging.WARNING):
            found = simple_evaluate(
                model=wrapped,
                tasks=chosen,
                num_fewshot=task.num_fewshot,
                limit=task.limit,
                log_samples=False,
                task_manager=self._manager,
            )
        report: dict[str, Any] = ranks().share(found and _kept(found))  # only the first rank has found anything
        return report


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    kept = {key: found[key] for key in ("results", "versions", "n-shot", "n-samples")}
    return kept | {"groups": sorted(found.get("groups", {}))}


def _how_to_prepare() -> str:
    from huggingface_hub import constants

    return " HF_HUB_OFFLINE is set: fetch them on a node with a network, with --prepare." if constants.HF_HUB_OFFLINE else ""


def _beside(folders: list[str]) -> str:
    return f" or {', '.join(folders)}" if folders else ""


@contextmanager
def _quiet(level: int = logging.ERROR) -> Iterator[None]:
    """lm-eval without what it says to users of its own command line, and without progress bars where nobody looks."""
    from lm_eval import evaluator

    loggers = {logging.getLogger("lm_eval"): level, logging.getLogger("lm_eval.evaluator"): logging.ERROR}
    before = {each: each.level for each in loggers}
    # What it asks of git and of the machine after every task is for its own log; git complains on stderr where the current
    # folder is no repository, and the machine takes most of a second.
    asked_git, asked_machine = evaluator.get_git_commit_hash, evaluator.add_env_info
    evaluator.get_git_commit_hash = lambda: None
    evaluator.add_env_info = lambda results: None
    for each, wanted in loggers.items():
        each.setLevel(wanted)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
            yield
    finally:
        evaluator.get_git_commit_hash, evaluator.add_env_info = asked_git, asked_machine
        for each, wanted in before.items():
            each.setLevel(wanted)
