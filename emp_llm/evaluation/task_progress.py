"""lm-eval's progress as ours: under the name of the task, with a unit, and as lines in the log where there is no terminal."""

import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

from emp_llm.common.progress import progress_bar

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
