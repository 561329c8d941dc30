"""Progress bars, shown only on a terminal and only by the first rank."""

import sys
from types import TracebackType
from typing import Any, Protocol

from emp_llm.common.ranks import ranks


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


def progress_bar(total: float, title: str, unit: str) -> Bar:
    """A bar with rate and remaining time.

    Args:
        total: number of units.
        title: name of the activity.
        unit: "B" (bytes), "W" (weights), "tok" (tokens); large numbers are shown in thousands, millions and so on.
    """
    if not sys.stderr.isatty() or not ranks().main:
        return _Silent()
    from tqdm import tqdm

    bar: Bar = tqdm(total=total, desc=title, unit=unit, unit_scale=True)
    return bar
