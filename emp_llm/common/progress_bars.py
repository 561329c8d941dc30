"""Progress of long work: a bar on a terminal; elsewhere, a line in the log every 30 seconds. Only the first rank shows it."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from emp_llm.common.loudness import is_quiet
from emp_llm.common.ranks import ranks

logger = logging.getLogger(__name__)
_SECONDS = 30.0  # between two lines


class Bar(Protocol):
    """The part of a tqdm bar's interface that the package uses."""

    def update(self, n: float = 1) -> Any: ...
    def close(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class _Silent:
    """A bar that shows nothing."""

    def update(self, n: float = 1) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Lines(_Silent):
    """A bar that logs a line from time to time: the share that is done, the rate since the last line, the remaining time."""

    def __init__(self, total: float, title: str, unit: str) -> None:
        self._total, self._title, self._unit = total, title, unit
        self._done = self._last_done = 0.0
        self._start = self._last_time = time.monotonic()

    def __exit__(self, kind: object = None, *_: object) -> None:
        if kind is None:
            from tqdm import tqdm

            seconds = time.monotonic() - self._start
            logger.debug("%s: %s%s in %.1f s.", self._title, tqdm.format_sizeof(self._total), self._unit, seconds)

    def update(self, n: float = 1) -> None:
        self._done += n
        now = time.monotonic()
        seconds = now - self._last_time
        if seconds < _SECONDS:
            return
        from tqdm import tqdm

        rate = (self._done - self._last_done) / seconds
        left = f", {tqdm.format_interval((self._total - self._done) / rate)} left" if rate > 0 else ""
        logger.info(
            "%s: %d %% of %s%s, %s%s/s%s",
            self._title,
            100 * self._done / self._total if self._total else 100,
            tqdm.format_sizeof(self._total),
            self._unit,
            tqdm.format_sizeof(rate),
            self._unit,
            left,
        )
        self._last_time, self._last_done = now, self._done


class _Stage:
    """The stage whose progress is shown."""

    name = ""


@contextmanager
def progress_of(stage: str) -> Iterator[None]:
    """Put the name of a stage in front of the titles of all progress in this context."""
    before, _Stage.name = _Stage.name, stage
    try:
        yield
    finally:
        _Stage.name = before


def shows_bars() -> bool:
    """Whether this process draws bars: on the first rank, on a terminal, and unless it is quiet."""
    return ranks().main and sys.stderr.isatty() and not is_quiet()


def progress_bar(total: float, title: str, unit: str, leave: bool = True) -> Bar:
    """A bar with rate and remaining time; without a terminal, lines in the log.

    Args:
        total: number of units.
        title: name of the activity.
        unit: "B" (bytes), "W" (weights), "tok" (tokens), "req" (requests); large numbers are shown in thousands, millions and
            so on.
        leave: the finished bar stays on the terminal.
    """
    if not ranks().main or is_quiet():
        return _Silent()
    title = title if _Stage.name in ("", title) else f"{_Stage.name}: {title}"
    if not sys.stderr.isatty():
        return _Lines(total, title, unit)
    from tqdm import tqdm

    bar: Bar = tqdm(total=total, desc=title, unit=unit, unit_scale=True, leave=leave)
    return bar
