"""The shell's way in: a command is a typed function, and its options are generated from the signature."""

import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from itertools import takewhile
from typing import Any

import typer

COMMANDS = {
    "calibrate": "Collect the input norms of a model's linear layers on a text.",
    "evaluate": "Measure perplexity and lm-eval tasks of a model, beside a baseline's.",
    "measure": "Tell how many weights of a model matter, and write no weights.",
    "pack": "Make a pruned checkpoint smaller to ship, without loss; or its mask alone.",
    "prune": "Prune a model and write the pruned checkpoint.",
    "push": "Push a pruned checkpoint to the Hub, with a model card.",
    "report": "Tables, figures and a page of runs, sweeps, measures and results.",
    "sweep": "Prune by many recipes, and measure each.",
    "unpack": "Give a packed checkpoint back, bit for bit; or put a mask on its base model.",
    "verify": "Look again at a pruned checkpoint: files, bytes and masks.",
}
_NOISY = ("httpx", "httpcore", "httpx2", "httpcore2", "filelock", "fsspec", "urllib3", "datasets", "accelerate", "absl")


class _Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


def _terminate(*_: object) -> None:
    raise _Terminated


def run(
    command: Callable[..., Any],
    show: Callable[[Any], None] | None = None,
    arguments: list[str] | None = None,
    name: str | None = None,
) -> None:
    """Run a command function with the shell's arguments, show its result, and exit.

    The function itself prints nothing, so that from Python it is an ordinary function.

    Exit codes: 0 done; 2 wrong input, answered with a sentence; 130 interrupted; 143 ended by SIGTERM. Anything else keeps
    its traceback.
    """
    from transformers.utils import logging as transformers_logging

    from emp_llm.models.errors import UserError

    rank = int(os.environ.get("RANK", "0"))  # of several processes, the first speaks; errors say whose they are
    mark = f"rank {rank}: " if rank else ""
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, format=f"{mark}%(message)s", stream=sys.stderr)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("datasets").propagate = False  # it has a handler of its own
    if not sys.stderr.isatty():  # the libraries' progress bars, like ours, are for people
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        transformers_logging.disable_progress_bar()
    # As for Ctrl-C, so that what was half done is cleared away when a scheduler ends the job.
    signal.signal(signal.SIGTERM, _terminate)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @wraps(command)
    def shown(**options: Any) -> None:
        try:
            result = command(**options)
            if show is not None and rank == 0:
                show(result)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all is done; what Python does at its end needs no clearing away
        except UserError as error:
            print(f"{mark}error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print(f"{mark}interrupted; no half of an output was left.", file=sys.stderr)
            sys.exit(130)
        except _Terminated:
            print(f"{mark}ended by SIGTERM; no half of an output was left.", file=sys.stderr)
            sys.exit(143)

    app.command(help=_help(command))(shown)
    app(args=arguments, prog_name=name or f"python -m emp_llm.{command.__name__}")


def _help(command: Callable[..., Any]) -> str:
    """What a command's docstring says to those who do not call it from Python."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(takewhile(lambda paragraph: not paragraph.startswith(("Returns", "Raises")), paragraphs))


def main() -> None:
    """The console script: `emp-llm COMMAND ...` is `python -m emp_llm.COMMAND ...`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        module = import_module(f"emp_llm.{name}")
        run(getattr(module, name), getattr(module, "show", None), sys.argv[2:], f"emp-llm {name}")
    if name == "--version":
        from emp_llm import __version__

        print(__version__)
        return
    usage = "usage: emp-llm COMMAND [OPTIONS], or emp-llm COMMAND --help\n\n"
    usage += "\n".join(f"  {command:<10} {what}" for command, what in COMMANDS.items())
    if name in ("--help", "-h"):
        print(usage)
        return
    print(f"error: {name!r} is not a command.\n\n{usage}", file=sys.stderr)
    sys.exit(2)
