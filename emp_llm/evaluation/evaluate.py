"""Perplexity of a causal language model on a text."""

import hashlib
import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.data import begin_token, sequences, token_ids
from emp_llm.calibration.texts import cache_alone, hub_answers
from emp_llm.checkpoint.files import lock, read_json, write_json
from emp_llm.common.errors import UserError, count_of, is_of_disk, quotable, reason
from emp_llm.common.machine import OutOfMemory, Stopwatch
from emp_llm.common.paths import EXTRAS, REPORT_NAME
from emp_llm.common.progress import progress_bar, shows_bars, stage
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.results import (
    Suite,
    Task,
    dense_measures,
    new_results,
    open_results,
    save_results,
)
from emp_llm.models.blockwise import BlockwiseModel, run_on_text
from emp_llm.models.loading import check_head, headless_class, input_device, is_offloaded
from emp_llm.models.local_model import LocalModel
from emp_llm.models.modules import is_encoder_decoder, mean_losses
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import check_ids, max_context
from emp_llm.records.base import Corpus, stage_records
from emp_llm.records.evaluation import (
    AnswersRecord,
    EvaluationRecord,
    Measures,
    PerplexityRecord,
    TaskRecord,
    packed_answers,
)
from emp_llm.records.run_report import Results, RunReport

logger = logging.getLogger(__name__)


DEFAULT_BLOCK = 2048
_LOGITS_AT_A_TIME = 1 << 28
_LARGEST_LOSS = 709  # exp of more overflows a float


def text_tokens(corpus: Corpus, tokenizer: Any) -> Tensor:
    """All of a suite's text as token ids: int64, shape (tokens,)."""
    return token_ids(msgspec.structs.replace(corpus, samples=None, seqlen=None), tokenizer)


def block_length(corpus: Corpus, model_config: Any) -> int:
    """Tokens in a block: `corpus.seqlen` (default 2048), at most the model's context."""
    wanted = corpus.seqlen or DEFAULT_BLOCK
    return min(wanted, max_context(model_config) or wanted)


def perplexity(
    model: PreTrainedModel,
    tokens: Tensor,
    block_length: int,
    batch_size: int | None = None,
    limit: int | None = None,
    begin: int | None = None,
) -> PerplexityRecord:
    """Perplexity: exp of the mean next-token loss over consecutive blocks; the last block may be
    shorter.

    Each block's mean loss is weighted by its number of tokens. Under several ranks each measures a
    share of the batches; all ranks return the same record, and its numbers equal those of a single
    rank to the last bit.

    Args:
        model: a causal language model in evaluation mode.
        tokens: int64, shape (tokens,).
        block_length: tokens in a block; no block sees another.
        batch_size: blocks per forward pass; None: as many as keep the logits below 2^28 numbers, at
            most 16.
        limit: number of blocks to measure, from the first; None: all.
        begin: the token at the beginning of each block, of whose length it is a part; it is given,
            not predicted. None: blocks begin with the text.

    Returns:
        The perplexity and its parts: log-softmax in float32, sums in float64. A last block of a
        single token predicts nothing and is left out. A mean loss above 709, too large for exp, is
        an infinite perplexity (None in the record).

    Raises:
        UserError: there are fewer than two tokens, or the loss is not finite.
    """
    if is_encoder_decoder(model):
        raise UserError(
            f"{type(model).__name__}: perplexity is for models that continue a text. Evaluate an "
            "encoder-decoder on --tasks."
        )
    every = list(sequences(tokens, block_length, begin))
    blocks = [block for block in every[:limit] if block.numel() > 1]
    if not blocks:
        raise UserError(
            f"perplexity needs a text of at least 2 tokens, got {tokens.numel()} in "
            f"blocks of {block_length}."
        )
    if batch_size is None:
        vocabulary = max(1, int(getattr(model.config.get_text_config(), "vocab_size", 1) or 1))
        batch_size = max(1, min(16, _LOGITS_AT_A_TIME // (block_length * vocabulary)))
    full = [block for block in blocks if block.numel() == block_length]
    batches = [
        torch.stack(full[first : first + batch_size]) for first in range(0, len(full), batch_size)
    ]
    batches += [block[None] for block in blocks[len(full) :]]
    start = time.perf_counter()
    losses = _losses(model, batches)
    weight = sum(batch.numel() for batch in batches)
    mean = (
        sum(float(loss.sum()) * batch.shape[1] for loss, batch in zip(losses, batches, strict=True))
        / weight
    )
    if not math.isfinite(mean):
        raise UserError("the model's loss is not finite; try --dtype float32 or bfloat16.")
    seconds = round(time.perf_counter() - start, 3)
    return PerplexityRecord(
        perplexity=math.exp(mean) if mean < _LARGEST_LOSS else None,
        loss=mean,
        tokens=weight,
        blocks=len(blocks),
        block_length=block_length,
        seconds=seconds,
        partial=limit is not None and limit < len(every),
        block_losses=[round(loss, 7) for of_batch in losses for loss in of_batch.tolist()],
    )


def _losses(model: PreTrainedModel, batches: list[Tensor]) -> list[Tensor]:
    """The mean loss of each block, batch by batch; each rank computes its share of the batches,
    and all ranks return all.
    """
    assigned = ranks().assigned(range(len(batches)))
    logits = _logits(model, [batches[number] for number in assigned])
    # No name keeps the logits of a batch while the next ones are computed.
    losses = {number: mean_losses(next(logits), batches[number]) for number in assigned}
    assert next(logits, None) is None
    for share in ranks().gather(losses):
        losses |= share
    return [losses[number] for number in range(len(batches))]


def _logits(model: PreTrainedModel, batches: list[Tensor]) -> Iterator[Tensor]:
    """Yield the logits of each batch. An offloaded model runs block by block over all batches:
    its weights are read once.
    """
    if batches and is_offloaded(model):
        runner = BlockwiseModel(model)
        try:
            runner.prepare(batches[0])
        except OutOfMemory:
            raise
        except UserError as error:
            logger.info("%s Perplexity reads all weights for every batch.", error)
        else:
            yield from runner.forward(batches)
            return
    with (
        torch.no_grad(),
        progress_bar(sum(batch.numel() for batch in batches), "perplexity", "tok") as bar,
    ):
        for batch in batches:
            yield run_on_text(model, model, batch).logits
            bar.update(batch.numel())


def measure_held_out(
    load: Callable[[], PreTrainedModel], config: dict[str, Any], tokens: Tensor
) -> PerplexityRecord | None:
    """The perplexity of held-out sequences, shape (sequences, length), by a model that is loaded.

    None if the model has none, or it fails, which is logged and ends no run. A failing disk does. A
    collective call.
    """
    if config.get("is_encoder_decoder") or headless_class(config) is not None:
        return None
    try:
        record = perplexity(load(), tokens.flatten(), tokens.shape[1], batch_size=1)
    except UserError as error:
        if is_of_disk(error):  # the same command, run again, measures it
            raise
        logger.warning("warning: the perplexity of held-out text was not measured: %s", error)
        return None
    # The stage has the time; equal runs have equal reports.
    return msgspec.structs.replace(record, seconds=0.0)


# lm-eval, unmodified: its tasks, and its Hugging Face wrapper around a loaded model.
#
# The numbers equal those of its command line, run for one task at a time (it mixes the questions of
# several tasks in a batch):
#
#     lm_eval run --model hf --model_args pretrained=DIR --tasks NAME --batch_size N


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


# Measures a suite on a model: the perplexity of its text, then each of its tasks. One evaluation
# for all commands.
#
# The unfinished evaluation of a finished checkpoint lies in its folder:
#
#     OUT/emp_llm/evaluation/pending.json   the signature of the run
#     OUT/emp_llm/evaluation/dense.json     results of the dense model so far
#     OUT/emp_llm/evaluation/pruned.json    results of the pruned model so far
#
# When both models are measured, the report holds their results and the folder is deleted.


BATCH_SIZE = 8  # default: examples per forward pass of a task
EVALUATION_FOLDER = f"{EXTRAS}/evaluation"
_PENDING = "pending.json"


@dataclass(frozen=True)
class PreparedSuite:
    """A suite with its text and its tasks' data, as `prepare_suite` reads them.

    Attributes:
        batch_size: examples per forward pass of a task, or "auto"; perplexity chooses its own.
        tokens: of the text, int64, shape (tokens,); None without a text.
        begin: the token to put at the beginning of each block; None: none.
    """

    suite: Suite
    tokenizer: Any
    batch_size: int | str
    tokens: "Tensor | None"
    begin: int | None
    harness: Harness | None


def prepare_suite(
    suite: Suite,
    folder: Path,
    tokenizer: Any,
    batch_size: int | str = BATCH_SIZE,
    harness: Harness | None = None,
) -> PreparedSuite:
    """Read all data of a suite, so that what is missing is said before a model runs.

    Args:
        suite: the text and the tasks to measure.
        folder: of the model; it says what its blocks begin with.
        tokenizer: of the model.
        batch_size: examples per forward pass of a task, or "auto".
        harness: holds the suite's tasks, if they are loaded already.

    Raises:
        UserError: the model has no head for tokens; a text, task or data set is missing; lm-eval is
            not installed, or cannot use the tokenizer.
    """
    check_head(folder)
    if suite.tasks:
        check_tokenizer(tokenizer, suite.tasks)
    suite = suite.of_model(folder, tokenizer)
    begin = None if suite.corpus is None else begin_token(suite.corpus.bos, tokenizer)
    tokens = None if suite.corpus is None else text_tokens(suite.corpus, tokenizer)
    if tokens is not None and (folder / "config.json").is_file():
        check_ids(
            tokens,
            read_json(folder / "config.json"),
            f"suite {suite.name}, by the tokenizer of {folder}",
        )
    harness = harness or Harness(suite.tasks) if suite.tasks else None
    return PreparedSuite(suite, tokenizer, batch_size, tokens, begin, harness)


def missing(suite: Suite, measures: Measures) -> list[str | None]:
    """The parts of a suite that are not measured yet: None for the perplexity, then the names of
    tasks.
    """
    text: list[str | None] = (
        [None] if suite.corpus is not None and measures.perplexity is None else []
    )
    return text + [task.name for task in suite.tasks if task.name not in measures.tasks]


def measure(
    model: "PreTrainedModel",
    prepared: PreparedSuite,
    measures: Measures | None = None,
    after_each: Callable[[Measures], None] | None = None,
) -> Measures:
    """Measure the parts of a suite that `measures` does not hold yet.

    Args:
        model: in evaluation mode.
        measures: earlier measurements; new ones are added in place.
        after_each: called with `measures` after the perplexity and after every task.

    Returns:
        `measures`.
    """
    measures = measures or Measures()
    suite = prepared.suite
    wrapped = None
    for part in missing(suite, measures):
        if part is not None and prepared.harness is not None:
            wrapped = wrapped or prepared.harness.model(
                model, prepared.tokenizer, prepared.batch_size
            )
            measures.tasks[part] = record = prepared.harness.run(part, wrapped)
            logger.debug("%s: measured in %.1f s.", part, record.seconds)
        elif suite.corpus is not None and prepared.tokens is not None:
            length = block_length(suite.corpus, model.config)
            measures.perplexity = perplexity(
                model, prepared.tokens, length, limit=suite.limit, begin=prepared.begin
            )
            logger.debug("perplexity: measured in %.1f s.", measures.perplexity.seconds)
        if after_each is not None:
            after_each(measures)
    return measures


def evaluate_model(
    model: "PreTrainedModel", prepared: PreparedSuite, results: Results, path: Path
) -> None:
    """Measure what results lack of a suite, and save them after every part.

    Args:
        results: of this model and suite, from `open_results`.
        path: their file.
    """

    def save(measures: Measures, complete: bool = False) -> None:
        results.take(measures)
        results.complete = complete
        save_results(results, path)

    measures = results.measures
    if measures.parts:
        logger.info(
            "%s: resuming after %s of the suite.", path, count_of(measures.parts, "finished part")
        )
    save(measure(model, prepared, measures, save), complete=True)


def evaluation_record(
    prepared: PreparedSuite, dense: Measures | None, pruned: Measures | None
) -> EvaluationRecord:
    """The record of an evaluation in a report."""
    definition = msgspec.structs.asdict(prepared.suite.record())
    return EvaluationRecord(
        **definition, batch_size=prepared.batch_size, dense=dense, pruned=pruned
    )


def mark_pending(files: Path, signature: dict[str, Any]) -> None:
    """Mark the files of a checkpoint, before they are put in place, as not evaluated yet."""
    folder = files / EVALUATION_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _PENDING, signature)


def pending_signature(output: Path) -> dict[str, Any]:
    """The signature of the run whose checkpoint is finished and not yet evaluated; empty if there
    is none.
    """
    path = output / EVALUATION_FOLDER / _PENDING
    with suppress(UserError):
        return read_json(path) if path.is_file() else {}
    return {}  # damaged


def measures_of_baseline(
    baseline: Path | None,
    source: LocalModel,
    prepared: PreparedSuite,
    dtype: str,
    device_map: str,
) -> Measures | None:
    """Earlier results of the dense model; None without a baseline. UserError if they are of
    another model, suite or dtype.
    """
    if baseline is None:
        return None
    wanted = new_results(source, prepared.suite, prepared.batch_size, dtype, device_map)
    return dense_measures(baseline, wanted.made_by)


def evaluate_checkpoint(
    output: Path,
    source: LocalModel,
    report: RunReport,
    prepared: PreparedSuite,
    models: OneModel,
    stopwatch: Stopwatch,
    dense: Measures | None = None,
) -> RunReport:
    """Evaluate the dense and the pruned model of a finished checkpoint, and add the results to its
    report.

    Args:
        output: folder of the checkpoint.
        source: the dense model.
        report: of the checkpoint; it is saved again.
        dense: earlier results of the dense model, from `measures_of_baseline`, used instead of
            measuring it.

    Raises:
        UserError: another run evaluates the checkpoint.
    """
    folder = output / EVALUATION_FOLDER
    try:
        with lock(folder / "results", f"--output {output}"):
            measured = [] if dense is None else [dense]
            models_of = {"dense": source, "pruned": LocalModel(str(output), output, None)}
            for name in ("dense", "pruned")[len(measured) :]:
                model = models_of[name]
                results = new_results(
                    model, prepared.suite, prepared.batch_size, models.dtype, models.device_map
                )
                path = folder / f"{name}.json"
                try:
                    results = open_results(path, results)
                except UserError as error:
                    logger.info("%s Measuring again.", error)
                    results = open_results(path, results, overwrite=True)
                if missing(prepared.suite, results.measures):
                    with stage(f"evaluate {name}"):
                        loaded = models.get(model.folder)
                        with stopwatch(f"evaluate {name}"):
                            evaluate_model(loaded, prepared, results, path)
                        del loaded
                measured.append(results.measures)
            report.evaluation = evaluation_record(prepared, *measured)
            report.stages |= stage_records(stopwatch.record)
            if ranks().main:
                report.save(output / REPORT_NAME)
                shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        if ranks().main:
            logger.warning(
                "the checkpoint in %s is complete, but not its evaluation; the same "
                "command resumes it.",
                output,
            )
        raise
    return report
