"""The numbers of a training, sent to a tracker while it runs."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from emp_llm.common.errors import UserError, reason
from emp_llm.common.ranks import ranks

logger = logging.getLogger(__name__)
PROJECT = "emp-llm"  # of the run, in a tracker that has projects
FOLDER = "runs"  # of TensorBoard's files, in the current folder
Log = Callable[[Mapping[str, float], int], None]


def check_tracker(name: str) -> None:
    """Raise UserError for a tracker that is not installed."""
    if name == "none":
        return
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder, such as the one that wandb writes
        raise UserError(f"--report-to {name} needs the package {name}: pip install {name}")


@contextmanager
def tracking(name: str, run: str, settings: Mapping[str, Any]) -> Iterator[Log | None]:
    """A function that sends the numbers of a step, by name; None without a tracker, and on all
    ranks but the first. A failure to send, or to finish, ends no run.

    Args:
        name: "none", "trackio", "tensorboard" or "wandb".
        run: its name in the tracker.
        settings: of the training.

    Raises:
        UserError: the tracker is not installed, or does not start.
    """
    if name == "none" or not ranks().main:
        yield None
        return
    check_tracker(name)
    shown = threading.excepthook
    threading.excepthook = partial(_in_thread, shown)
    try:
        send, end = _tensorboard(run) if name == "tensorboard" else _service(name, run, settings)
    # A folder that cannot be written, a missing login, a network: kinds of their own.
    except (Exception, SystemExit) as error:
        threading.excepthook = shown
        raise UserError(f"--report-to {name}: it does not start ({reason(error)}).") from error
    failed = False

    def attempt(work: Callable[[], Any]) -> None:
        nonlocal failed
        try:
            work()
        except (Exception, SystemExit) as error:
            if not failed:
                logger.warning(
                    "warning: --report-to %s: numbers are lost (%s). The run goes on.",
                    name,
                    reason(error),
                )
            failed = True

    try:
        yield lambda numbers, step: attempt(partial(send, numbers, step))
    finally:
        attempt(end)
        threading.excepthook = shown


def _in_thread(shown: Callable[[threading.ExceptHookArgs], Any], about: Any) -> None:
    """Show what ends a thread, unless it is TensorBoard's, whose next call raises it again."""
    if not type(about.thread).__module__.startswith("tensorboard."):
        shown(about)


def _tensorboard(run: str) -> tuple[Log, Callable[[], Any]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{FOLDER}/{run}")

    def send(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _service(name: str, run: str, settings: Mapping[str, Any]) -> tuple[Log, Callable[[], Any]]:
    """trackio and wandb have the same functions."""
    module = import_module(name)
    started = module.init(project=PROJECT, name=run, config=dict(settings))
    return lambda numbers, step: started.log(dict(numbers), step=step), started.finish
