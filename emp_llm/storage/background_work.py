"""Work in background threads: reading ahead, and writing behind."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_WAITING = 3  # finished or pending jobs of a thread; bounds the memory of their results


def prefetch(jobs: Iterable[Callable[[], T]], threads: int = 1) -> Iterator[T]:
    """The results of jobs, in order. Threads run the next few jobs while the caller uses a result."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-read") as thread:
        try:
            for job in jobs:
                waiting.append(thread.submit(job))
                if len(waiting) >= _WAITING + threads - 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


class BackgroundQueue:
    """A thread that runs queued jobs in order while the caller continues. Use it as a context.

    The error of a job is raised by a later `do`, or at the end of the context. Jobs after a failed one are skipped.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-write")
        self._waiting: deque[Future[Any]] = deque()
        self._failed = False

    def do(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Queue a job; wait while too many are queued."""
        self._waiting.append(self._thread.submit(self._run, job, *arguments))
        while len(self._waiting) > _WAITING:
            self._waiting.popleft().result()

    def _run(self, job: Callable[..., Any], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            job(*arguments)
        except BaseException:
            self._failed = True
            raise

    def __enter__(self) -> "BackgroundQueue":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            while self._waiting and kind is None:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)
