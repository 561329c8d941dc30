"""A suite asked of a model: the perplexity of its text, then its tasks, one after the other."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from emp_llm.services.harness import Harness, check_tokenizer
from emp_llm.services.perplexity import block_length, perplexity, text_tokens
from emp_llm.services.suites import Suite

Measures = dict[str, Any]
BATCH_SIZE = 8  # examples to a forward pass of a task, where nothing else is asked for


class Evaluation:
    """A suite with its text and its tasks' data at hand; what is missing is named here, before any model is loaded.

    Args:
        suite: what is measured.
        tokenizer: of the models.
        batch_size: examples to a forward pass of a task, or "auto"; perplexity chooses its own.
        harness: with the suite's tasks, where one was made already.

    Raises:
        UserError: a text, task or data set is missing, or lm-eval is, or the tokenizer cannot serve it.
    """

    def __init__(self, suite: Suite, tokenizer: Any, batch_size: int | str, harness: Harness | None = None) -> None:
        self.suite = suite
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        if suite.tasks:
            check_tokenizer(tokenizer)
        self._tokens = text_tokens(suite.corpus, tokenizer) if suite.corpus is not None else None
        self._harness = harness or Harness(suite.tasks) if suite.tasks else None

    def measure(
        self, model: PreTrainedModel, measures: Measures | None = None, after_each: Callable[[Measures], None] | None = None
    ) -> Measures:
        """Everything in the suite that `measures` does not hold yet.

        Args:
            model: in evaluation mode.
            measures: what was measured before, added to in place.
            after_each: called with it after the perplexity and after every task.

        Returns:
            `measures`: "perplexity" (the fields of Perplexity) and "tasks" (by name, as of Harness.run, and "seconds"), where
            the suite has them.
        """
        measures = {} if measures is None else measures
        wrapped = None
        for part in missing(self.suite, measures):
            if part is None:
                assert self.suite.corpus is not None
                assert self._tokens is not None
                length = block_length(self.suite.corpus, model.config)
                measures["perplexity"] = asdict(perplexity(model, self._tokens, length, limit=self.suite.limit))
            else:
                assert self._harness is not None
                wrapped = wrapped or self._harness.model(model, self._tokenizer, self._batch_size)
                start = time.perf_counter()
                found = self._harness.run(part, wrapped)
                measures.setdefault("tasks", {})[part] = found | {"seconds": round(time.perf_counter() - start, 3)}
            if after_each is not None:
                after_each(measures)
        return measures


def missing(suite: Suite, measures: Measures) -> Iterator[str | None]:
    """What of a suite has not been measured: None for the perplexity, then the names of tasks."""
    if suite.corpus is not None and "perplexity" not in measures:
        yield None
    for task in suite.tasks:
        if task.name not in measures.get("tasks", {}):
            yield task.name
