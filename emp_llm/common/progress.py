"""The log of a command, quiet, normal or verbose, and the progress of long work, both of the first
rank only.

Progress is a bar on a terminal; elsewhere, a line in the log every 30 seconds.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from emp_llm.common.errors import format_bytes
from emp_llm.common.machine import available_cores, available_memory, peak_memory_text
from emp_llm.common.ranks import ranks_of_job

logger = logging.getLogger(__name__)
_SECONDS = 30.0  # between two lines
_PACKAGES = ("torch", "transformers.modeling_utils")


class _Shown:
    """The current settings: whether progress is hidden, and the stage whose progress is shown."""

    quiet = False
    stage = ""


@contextmanager
def loudness(name: str, verbose: bool, quiet: bool) -> Iterator[None]:
    """Inside this context, emp-llm logs more or less than usual; if neither is asked for, nothing
    changes.

    Args:
        name: the name of the command.
        verbose: log at level DEBUG, on the first rank.
        quiet: log warnings only, and show no progress.
    """
    package = logging.getLogger("emp_llm")
    level = package.level
    was_quiet = _Shown.quiet
    if quiet:
        package.setLevel(logging.WARNING)
        _Shown.quiet = True
    if verbose and ranks_of_job().main:
        package.setLevel(logging.DEBUG)
    start = time.perf_counter()
    try:
        if verbose:
            memory = format_bytes(available_memory())
            logger.debug(
                "emp-llm %s: %s CPU cores, %s of memory available.", name, available_cores(), memory
            )
        yield
        if verbose:
            logger.debug(
                "emp-llm %s: finished in %.1f s, %s.",
                name,
                time.perf_counter() - start,
                peak_memory_text(),
            )
    finally:
        package.setLevel(level)
        _Shown.quiet = was_quiet


class Bar:
    """A hidden bar, with the methods of tqdm's bars that the package uses."""

    def update(self, n: float = 1) -> Any:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any = None, *_: object) -> None:
        pass


class _Lines(Bar):
    """A bar that logs a line from time to time: the share that is done, the rate since the last
    line, the remaining time.
    """

    def __init__(self, total: float, title: str, unit: str) -> None:
        self._total = total
        self._title = title
        self._unit = unit
        self._done = self._last_done = 0.0
        self._start = self._last_time = time.monotonic()

    def __exit__(self, kind: Any = None, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self._start
            logger.debug(
                "%s: %s%s in %.1f s.", self._title, _size(self._total), self._unit, seconds
            )

    def update(self, n: float = 1) -> None:
        self._done += n
        now = time.monotonic()
        seconds = now - self._last_time
        if seconds < _SECONDS:
            return
        from tqdm import tqdm

        rate = (self._done - self._last_done) / seconds
        speed = f"{tqdm.format_sizeof(rate)}{self._unit}/s"
        left = (
            f", {tqdm.format_interval((self._total - self._done) / rate)} left" if rate > 0 else ""
        )
        percent = 100 * self._done / (self._total or 1)
        logger.info(
            "%s: %d %% of %s%s, %s%s",
            self._title,
            percent,
            _size(self._total),
            self._unit,
            speed,
            left,
        )
        self._last_time = now
        self._last_done = self._done


def _size(number: float) -> str:
    """A number of units: in thousands, millions and so on if it is large."""
    from tqdm import tqdm

    return f"{number:g}" if number < 1000 else str(tqdm.format_sizeof(number))


@contextmanager
def progress_of(stage: str) -> Iterator[None]:
    """Put the name of a stage in front of the titles of all progress in this context."""
    before = _Shown.stage
    _Shown.stage = stage
    try:
        yield
    finally:
        _Shown.stage = before


def load_packages() -> None:
    """Import torch and transformers, which takes seconds, and show it."""
    missing = [name for name in _PACKAGES if name not in sys.modules]
    if missing:
        with progress_bar(
            len(missing), "load torch and transformers", "package", leave=False
        ) as bar:
            for name in missing:
                import_module(name)
                bar.update(1)


def shows_bars() -> bool:
    """Whether this process draws bars: on the first rank, on a terminal, and unless it is quiet."""
    return ranks_of_job().main and sys.stderr.isatty() and not _Shown.quiet


def progress_bar(total: float, title: str, unit: str, leave: bool = True) -> Bar:
    """A bar with rate and remaining time; without a terminal, lines in the log.

    Args:
        total: number of units.
        title: name of the activity.
        unit: "B" (bytes), "W" (weights), "tok" (tokens), "req" (requests), " blocks"; large numbers
            are shown in thousands, millions and so on.
        leave: the finished bar stays on the terminal.
    """
    if not ranks_of_job().main or _Shown.quiet:
        return Bar()
    title = title if _Shown.stage in ("", title) else f"{_Shown.stage}: {title}"
    if not sys.stderr.isatty():
        return _Lines(total, title, unit)
    from tqdm import tqdm

    bar: Any = tqdm(
        total=total,
        desc=title,
        unit=unit,
        unit_scale=total >= 1000 or unit == " blocks",
        leave=leave,
    )
    return bar  # type: ignore[no-any-return]


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage of a run: its name in the progress, and a line with its time and memory for
    --verbose.
    """
    start = time.perf_counter()
    logger.debug("%s: begins.", name)
    with progress_of(name):
        yield
    logger.debug(
        "%s: finished in %.1f s, %s.", name, time.perf_counter() - start, peak_memory_text()
    )
