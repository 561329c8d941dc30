"""Runs that end in the middle, as a kill or a signal ends them."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from emp_llm.calibration import passes


class Killed(BaseException):
    """No error that a run expects."""


@contextmanager
def stopped(
    owner: Any,
    name: str,
    replacement: Callable[..., Any] | None = None,
    error: type[BaseException] = Killed,
) -> Iterator[None]:
    """A run within ends by the error that `replacement` raises in the place of a function; without
    one, by its first call.
    """

    def stop(*_: Any, **__: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement or stop)
        with pytest.raises(error):
            yield


def stopped_when(
    owner: Any, name: str, when: Callable[..., bool], error: type[BaseException] = Killed
) -> AbstractContextManager[None]:
    """A run within ends as a function is called with arguments that `when` accepts."""
    call = getattr(owner, name)

    def watched(*given: Any, **how: Any) -> Any:
        if when(*given):
            raise error
        return call(*given, **how)

    return stopped(owner, name, watched, error)


def stopped_in_call(
    owner: Any, name: str, number: int, error: type[BaseException] = Killed
) -> AbstractContextManager[None]:
    """A run within ends as a function is called for the `number`-th time, from 1."""
    calls = itertools.count(1)
    return stopped_when(owner, name, lambda *_: next(calls) == number, error)


def save_each_block(patch: pytest.MonkeyPatch) -> None:
    """From now on, a calibration by blocks saves its state after each block."""
    patch.setattr(passes, "_SECONDS", 0.0)
    patch.setattr(passes, "_RATIO", 0)
