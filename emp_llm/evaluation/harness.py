"""lm-eval, unmodified: its tasks, and its Hugging Face wrapper around a loaded model.

The numbers equal those of its command line, run for one task at a time (it mixes the questions of
several tasks in a batch):

    lm_eval run --model hf --model_args pretrained=DIR --tasks NAME --batch_size N
"""

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager, redirect_stderr
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import StringIO
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from emp_llm.calibration.hub_data import cache_alone, hub_answers
from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.common.progress import progress_bar, shows_bars
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.suites import Task
from emp_llm.models.modules import is_encoder_decoder
from emp_llm.models.offload import input_device
from emp_llm.records.evaluation import AnswersRecord, TaskRecord, packed_answers

logger = logging.getLogger(__name__)


def parse_batch_size(given: str | int) -> int | str:
    """A `--batch-size`: a number of at least 1, or "auto", which lets lm-eval choose; UserError
    for anything else.
    """
    text = str(given)
    if text == "auto":
        return text
    if re.fullmatch("0*[1-9][0-9]{0,8}", text) is None:
        raise UserError(
            f"--batch-size {quotable(text)!r}: expected a number of at least 1, or auto."
        )
    return int(text)


def check_tokenizer(tokenizer: Any, tasks: tuple[Task, ...]) -> None:
    """Raise UserError for a tokenizer without a token to begin a text with, or without the chat
    template that a task needs.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has neither a bos_token nor an eos_token; "
            "name one in its config."
        )
    if any(task.chat_template for task in tasks) and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template. Leave out "
            "--apply-chat-template, and chat_template in the suite, or add chat_template.jinja to "
            "the model's folder."
        )


class Harness:
    """The tasks of a suite with their data.

    Raises:
        UserError: lm-eval is not installed or has no such task, or the data of a task cannot be
            loaded.
    """

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError(
                f"The tasks of a suite need lm-eval ({reason(error)}): pip install lm-eval"
            ) from error
        folders = [
            str(folder)
            for folder in dict.fromkeys(task.folder for task in tasks)
            if folder is not None
        ]
        # Reading lm-eval's 14,000 task files takes seconds. They are read only if a task is not in
        # the user's folders.
        with _quiet():
            self._manager = TaskManager(include_path=folders, include_defaults=False)
            if not all(task.name in self._manager.all_subtasks for task in tasks):
                self._manager = TaskManager(include_path=folders)
        self._tasks = {task.name: task for task in tasks}
        for name in self._tasks:
            if name not in self._manager.all_tasks:
                nearest = get_close_matches(name, self._manager.all_tasks, 3)
                hint = f" The nearest names: {', '.join(nearest)}." if nearest else ""
                others = f" or {', '.join(folders)}" if folders else ""
                raise UserError(f"there is no task {name!r} in lm-eval{others}.{hint}")
        self._loaded: dict[str, dict[str, Any]] = {}
        lost: dict[str, str] = {}  # missing part -> reason
        alone = not hub_answers()
        for name, task in self._tasks.items():
            try:
                with _quiet(), cache_alone(alone):
                    self._loaded[name] = dict(self._manager.load([name]))
            except ModuleNotFoundError as error:
                raise UserError(
                    f"task {name} needs the package {error.name}: pip install {error.name}, or the "
                    "extra of lm-eval for this task, such as 'lm-eval[ifeval]'."
                ) from error
            # Data sets, their readers and the network raise dozens of kinds.
            except Exception as error:
                data = (self._manager.task_index[name].cfg or {}).get("dataset_path")
                lost[f"task {name}{f': its data set {data}' if data else ''}"] = reason(error)
                continue
            for subtask in self._loaded[name]["tasks"].values():
                if task.num_fewshot and subtask.get_config("num_fewshot") == 0:
                    message = (
                        "warning: task %s fixes num_fewshot at 0; the suite's %d has no effect."
                    )
                    logger.warning(message, subtask.task_name, task.num_fewshot)
                if getattr(subtask, "UNSAFE_CODE", False):
                    raise UserError(
                        f"task {name}: it runs code that the model writes. Run it with "
                        "lm_eval, in a sandbox."
                    )
        if lost:
            remedy = (
                " The Hub cannot be reached: fetch them (emp-llm fetch) where there is a network."
                if alone
                else ""
            )
            raise UserError(
                f"{', '.join(lost)} cannot be loaded ({next(iter(lost.values()))}).{remedy}"
            )

    def examples(self) -> dict[str, int]:
        """Number of examples by task; a group is listed by its members."""
        return {
            name: len(task.eval_docs)
            for loaded in self._loaded.values()
            for name, task in loaded["tasks"].items()
        }

    def model(self, model: PreTrainedModel, tokenizer: Any, batch_size: int | str) -> Any:
        """lm-eval's wrapper around a loaded model. It takes the batch size: `simple_evaluate`
        ignores its own argument.

        Raises:
            UserError: a task generates more tokens than the model's context holds.
        """
        from lm_eval.models.huggingface import HFLM

        with _quiet():
            backend = "seq2seq" if is_encoder_decoder(model) else "causal"
            wrapped = HFLM(
                pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend=backend
            )
        for loaded in self._loaded.values():
            for name, task in loaded["tasks"].items():
                length = _generated(task.config, wrapped.max_gen_toks)
                if length >= wrapped.max_length:
                    raise UserError(
                        f"task {name} generates up to {length:,} tokens, and the model's context "
                        f"holds {wrapped.max_length:,}. Leave it out."
                    )
        # The `device` of an offloaded model is not that of its inputs.
        wrapped._device = input_device(model)
        if ranks().count > 1:
            # lm-eval divides the questions among ranks by these attributes. It sets them only for
            # models that it loads on GPUs.
            wrapped._rank = ranks().index
            wrapped._world_size = ranks().count
            wrapped.accelerator = SimpleNamespace(
                gather=lambda counts: torch.cat(ranks().gather(counts.cpu().view(-1))),
                wait_for_everyone=lambda: ranks().gather(None),
                unwrap_model=lambda model: model,
            )
            wrapped.gather_object = lambda value, dst: ranks().gather(value)
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

        task = self._tasks[name]
        loaded = self._loaded[name]
        start = time.perf_counter()
        chosen = list(loaded.get("groups", {}).values())
        inside = {child.task_name for group in chosen for child in group.get_all_tasks()}
        chosen += [single for single in loaded["tasks"].values() if single.task_name not in inside]
        # Its warnings, such as for inputs longer than the model's context, are for the user; its
        # remarks on options are not.
        with _quiet(logging.WARNING), _run_by_us(name):
            evaluated = simple_evaluate(
                model=wrapped,
                tasks=chosen,
                num_fewshot=task.num_fewshot,
                limit=task.limit,
                apply_chat_template=task.chat_template,
                fewshot_as_multiturn=task.chat_template,  # as lm-eval's command line does
                # It logs the targets of examples, and fails where a task defines none.
                log_samples=all(
                    getattr(subtask.config, "doc_to_target", None) is not None
                    for subtask in loaded["tasks"].values()
                ),
                task_manager=self._manager,
            )
        # Only the first rank has a report.
        report: dict[str, Any] = ranks().broadcast(evaluated and _kept(evaluated))
        return msgspec.convert(
            report | {"seconds": round(time.perf_counter() - start, 3)}, TaskRecord
        )


def _generated(config: Any, default: int) -> int:
    """How many tokens lm-eval lets a task generate; 0 for a task that compares probabilities."""
    if config.output_type != "generate_until":
        return 0
    return int((config.generation_kwargs or {}).get("max_gen_toks", default))


def _kept(report: dict[str, Any]) -> dict[str, Any]:
    """The parts of lm-eval's report that a results file keeps."""
    kept: dict[str, Any] = {
        key: report[key]
        for key in ("results", "versions", "n-shot", "n-samples", "higher_is_better")
    }
    kept = json.loads(json.dumps(kept | {"groups": sorted(report.get("groups", {}))}, default=str))
    for metrics in kept["results"].values():
        for key, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
                metrics[key] = "N/A" if math.isnan(value) else None
    for name, samples in report.get("samples", {}).items():
        answers = _answers(samples, report["results"][name])
        if answers is not None:
            kept.setdefault("answers", {})[name] = msgspec.to_builtins(answers)
    return kept


def _answers(samples: list[dict[str, Any]], metrics: dict[str, Any]) -> AnswersRecord | None:
    """The answers of a task, for every metric that is the share of correct ones; None if there is
    no such metric.

    Args:
        samples: lm-eval's log of the task: an entry for each example and filter, in the order of
            the ranks.
        metrics: its results.
    """
    ordered = sorted(
        {(sample["doc_id"], sample["doc_hash"], sample["target_hash"]) for sample in samples}
    )
    correct = {}
    for key, value in metrics.items():
        metric, _, chosen = key.partition(",")
        given = {
            sample["doc_id"]: sample[metric]
            for sample in samples
            if sample["filter"] == chosen and metric in sample
        }
        answers = [given.get(number) for number, *_ in ordered]
        if not answers or not all(np.isscalar(answer) and answer in (0, 1) for answer in answers):
            continue
        bits = [bool(answer) for answer in answers]
        if math.isclose(sum(bits) / len(bits), value):
            correct[key] = packed_answers(bits)
    digest = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    return AnswersRecord(examples=len(ordered), sha256=digest, correct=correct) if correct else None


class _TaskBar:
    """Stands in for tqdm inside lm-eval: progress of ours under the name of the task, as lines
    where there is no terminal.
    """

    def __init__(
        self,
        task: str,
        items: Iterable[Any] = (),
        total: int | None = None,
        desc: str = "",
        **_: Any,
    ) -> None:
        asks = desc.startswith("Running")
        count = total or (len(items) if isinstance(items, Sized) else 0)
        bar = progress_bar(count, task if asks else f"{task}: preparing", "req", leave=asks)
        self._items = items
        self.update = bar.update
        self.close = bar.close

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update(1)
        self.close()


@contextmanager
def _quiet(level: int = logging.ERROR) -> Iterator[None]:
    """lm-eval without the remarks meant for its own command line, and without its progress bars
    where we draw none.
    """
    with ExitStack() as stack:
        for name, wanted in (("lm_eval", level), ("lm_eval.evaluator", logging.ERROR)):
            log = logging.getLogger(name)
            stack.callback(log.setLevel, log.level)
            log.setLevel(wanted)
        if not shows_bars():
            stack.enter_context(redirect_stderr(StringIO()))
        yield


@contextmanager
def _run_by_us(task: str) -> Iterator[None]:
    """lm-eval while it runs a task, with our progress.

    For its own log, it asks git and the machine for facts after every task; git complains outside
    of a repository, and the facts about the machine take most of a second.
    """
    # Of a ruined model.
    own_math = vars(math) | {"exp": lambda loss: math.inf if loss > 709 else math.exp(loss)}
    replaced: list[tuple[str, str, Any]] = [
        ("lm_eval.evaluator", "get_git_commit_hash", lambda: None),
        ("lm_eval.evaluator", "add_env_info", lambda results: None),
        # The perplexity of a ruined model is infinite, and must not end a run.
        ("lm_eval.api.metrics", "math", SimpleNamespace(**own_math)),
        ("lm_eval.models.huggingface", "tqdm", partial(_TaskBar, task)),
        ("lm_eval.api.model", "tqdm", partial(_TaskBar, task)),
        ("lm_eval.api.task", "tqdm", partial(_TaskBar, task)),
    ]
    with ExitStack() as stack:
        for path, name, value in replaced:
            module = import_module(path)
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
