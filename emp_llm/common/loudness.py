"""How much a command tells while it works: quiet, as usual, or verbose."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from emp_llm.common.memory import available_memory
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import memory_words
from emp_llm.common.wording import format_bytes

logger = logging.getLogger(__name__)


class _Loudness:
    """The current setting."""

    quiet = False


def is_quiet() -> bool:
    """Whether progress is hidden."""
    return _Loudness.quiet


@contextmanager
def loudness(name: str, verbose: bool, quiet: bool) -> Iterator[None]:
    """Inside this context, emp-llm logs more or less than usual; if neither is asked for, nothing changes.

    Args:
        name: of the command, for the log.
        verbose: log at level DEBUG, on the first rank.
        quiet: log warnings only, and show no progress.
    """
    package = logging.getLogger("emp_llm")
    level, was_quiet = package.level, _Loudness.quiet
    if quiet:
        package.setLevel(logging.WARNING)
        _Loudness.quiet = True
    if verbose and ranks().main:
        package.setLevel(logging.DEBUG)
    start = time.perf_counter()
    try:
        if verbose:
            memory = available_memory()
            left = "" if memory is None else f", {format_bytes(memory)} of memory available"
            logger.debug("emp-llm %s: %s CPU cores%s.", name, os.cpu_count(), left)
        yield
        if verbose:
            logger.debug("emp-llm %s: finished in %.1f s, %s.", name, time.perf_counter() - start, memory_words())
    finally:
        package.setLevel(level)
        _Loudness.quiet = was_quiet
