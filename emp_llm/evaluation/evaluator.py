"""Measures a suite on a model: the perplexity of its text, then each of its tasks."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

from emp_llm.evaluation.harness import Harness, check_chat_template, check_tokenizer
from emp_llm.evaluation.perplexity import block_length, perplexity, text_tokens
from emp_llm.evaluation.suites import Suite
from emp_llm.records.evaluation import Measures

logger = logging.getLogger(__name__)
BATCH_SIZE = 8  # default: examples per forward pass of a task


class Evaluator:
    """A suite with its text and its tasks' data. All are read at once, so that missing data is reported before a model runs.

    Args:
        suite: the text and the tasks to measure.
        tokenizer: of the models.
        batch_size: examples per forward pass of a task, or "auto"; perplexity chooses its own.
        harness: holds the suite's tasks, if they are loaded already.

    Raises:
        UserError: a text, task or data set is missing, lm-eval is not installed, or lm-eval cannot use the tokenizer.
    """

    def __init__(
        self, suite: Suite, tokenizer: Any, batch_size: int | str = BATCH_SIZE, harness: Harness | None = None
    ) -> None:
        self.suite = suite
        self.batch_size = batch_size
        self._tokenizer = tokenizer
        if suite.tasks:
            check_tokenizer(tokenizer)
            check_chat_template(tokenizer, suite.tasks)
        self._tokens = text_tokens(suite.corpus, tokenizer) if suite.corpus is not None else None
        self._harness = harness or Harness(suite.tasks) if suite.tasks else None

    def measure(
        self,
        model: PreTrainedModel,
        measures: Measures | None = None,
        after_each: Callable[[Measures], None] | None = None,
    ) -> Measures:
        """Measure the parts of the suite that `measures` does not hold yet.

        Args:
            model: in evaluation mode.
            measures: earlier measurements; new ones are added in place.
            after_each: called with `measures` after the perplexity and after every task.

        Returns:
            `measures`.
        """
        measures = Measures() if measures is None else measures
        wrapped = None
        for part in missing(self.suite, measures):
            start = time.perf_counter()
            if part is None:
                assert self.suite.corpus is not None
                assert self._tokens is not None
                length = block_length(self.suite.corpus, model.config)
                measures.perplexity = perplexity(model, self._tokens, length, limit=self.suite.limit)
            else:
                assert self._harness is not None
                wrapped = wrapped or self._harness.model(model, self._tokenizer, self.batch_size)
                start = time.perf_counter()
                record = self._harness.run(part, wrapped)
                record.seconds = round(time.perf_counter() - start, 3)
                measures.tasks[part] = record
            logger.debug("%s: measured in %.1f s.", part or "perplexity", time.perf_counter() - start)
            if after_each is not None:
                after_each(measures)
        return measures


def missing(suite: Suite, measures: Measures) -> Iterator[str | None]:
    """Yield the parts of a suite that are not measured yet: None for the perplexity, then the names of tasks."""
    if suite.corpus is not None and measures.perplexity is None:
        yield None
    for task in suite.tasks:
        if task.name not in measures.tasks:
            yield task.name


def is_complete(suite: Suite, measures: Measures) -> bool:
    """Whether every part of a suite is measured."""
    return next(missing(suite, measures), "complete") == "complete"
