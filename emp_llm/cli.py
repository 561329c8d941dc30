"""The command line: options generated from the dataclasses of the commands, and exit codes."""

import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from emp_llm.options.base import Opt

COMMANDS = {
    "bench": "Measure speed and memory of a pruned model against the dense one.",
    "calibrate": "Collect the input norms of a model's linear layers on a text.",
    "collect": "Collect the results of a study as tables and a report.",
    "evaluate": "Measure perplexity and lm-eval tasks of a model, compared with a baseline.",
    "generate": "Continue a text with a pruned model, computed from its packed weights.",
    "measure": "Measure the redundancy of a model; no weights are written.",
    "pack": "Compress a pruned checkpoint without loss, or only its mask, for shipping.",
    "plan": "Plan a study of models x methods as a file of jobs.",
    "prune": "Prune a model and write the pruned checkpoint.",
    "push": "Push a pruned checkpoint to the Hub, with a model card.",
    "report": "Write tables, figures and a web page from runs, sweeps, measures and results.",
    "run": "Run the jobs of a plan on this machine.",
    "status": "Show what is done, running, failed and missing of a study.",
    "submit": "Submit the jobs of a plan to a Slurm cluster.",
    "sweep": "Prune a model by many recipes, and evaluate each.",
    "unpack": "Restore a packed checkpoint, bit for bit; or apply a mask to its base model.",
    "verify": "Check a pruned checkpoint: files, bytes and masks.",
}
_NOISY = ("httpx", "httpcore", "httpx2", "httpcore2", "filelock", "fsspec", "urllib3", "datasets", "accelerate", "absl")


class _Terminated(BaseException):
    """Raised on SIGTERM, as KeyboardInterrupt is on SIGINT."""


class CommandModule(ModuleType):
    """A command's module that can be called like its function: `from emp_llm import prune; prune(...)`."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._command(*arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._command)

    @property
    def _command(self) -> Callable[..., Any]:
        command: Callable[..., Any] = vars(self)[self.__name__.rpartition(".")[2]]
        return command


def callable_module(name: str) -> None:
    """Make a command's module callable; `name` is its `__name__`."""
    if name != "__main__":
        sys.modules[name].__class__ = CommandModule


def run(
    command: Callable[..., Any],
    show: Callable[[Any], None] | None = None,
    arguments: list[str] | None = None,
    name: str | None = None,
) -> None:
    """Run a command with arguments of the shell, show its result, and exit.

    The command itself prints nothing, so that it is an ordinary function in Python.

    Exit codes: 0 success; 2 wrong input, reported in a sentence; 75 another rank of the job is gone; 130 interrupted; 143
    terminated. Any other failure keeps its traceback.
    """

    def work(rank: int) -> None:
        options = parse(command, sys.argv[1:] if arguments is None else arguments, name or f"emp-llm {command.__name__}")
        if options["quiet"]:
            _set_up_quiet()
        result = command(**options)
        if show is not None and rank == 0:
            show(result)

    _with_exit_codes(work)


def _with_exit_codes(work: Callable[[int], None]) -> None:
    """Do the work of this rank; a UserError, a lost rank or a signal ends the process without a traceback."""
    from emp_llm.common.errors import UserError
    from emp_llm.common.ranks import RankLost, rank_losses, tell_ranks

    rank = int(os.environ.get("RANK", "0"))  # only rank 0 prints results; errors of other ranks name their rank
    mark = f"rank {rank}: " if rank else ""
    try:
        # On a scheduler's SIGTERM, incomplete files are deleted as on Ctrl-C.
        signal.signal(signal.SIGTERM, _terminate)
        _set_up_logging(mark, rank)
        with rank_losses():
            work(rank)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to clean up
    except UserError as error:
        _fail(2, mark, f"error: {error}")
    except RankLost as loss:
        _fail(loss.code, mark, f"error: {loss}")
    except KeyboardInterrupt:
        _fail(130, mark, "interrupted; no incomplete output is left.")
    except _Terminated:
        _fail(143, mark, "terminated by SIGTERM; no incomplete output is left.")
    except BaseException as error:
        tell_ranks(1, f"{type(error).__name__}: {error}")
        raise


def _fail(code: int, mark: str, message: str) -> NoReturn:
    """Print why this rank ends, tell the others, and exit."""
    from emp_llm.common.ranks import tell_ranks

    sys.stderr.write(f"{mark}{message}\n")  # in one piece, because the ranks share a log
    tell_ranks(code, message.removeprefix("error: "))
    sys.exit(code)


def parse(command: Callable[..., Any], arguments: list[str], name: str) -> dict[str, Any]:
    """A command's options by field, parsed from arguments; exits after --help or on invalid arguments."""
    import typer

    values: dict[str, Any] = {}

    def take(**options: Any) -> None:
        values.update(options)

    parameters = [_parameter(*each) for each in _fields(command)]
    take.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    take.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=help_of(command))(take)
    try:
        app(args=arguments, prog_name=name)
    except SystemExit as end:
        if end.code:
            raise
    if not values:  # --help was shown
        sys.exit(0)
    return values


def options_of(name: str, words: list[str]) -> SimpleNamespace:
    """The options of a command by its name, parsed from the words of a command line, and not checked yet.

    Returns all its options as attributes, and `groups`: the values that its function takes.
    """
    command = getattr(import_module(f"emp_llm.{name}"), name)
    values = parse(command, words, f"emp-llm {name}")
    return SimpleNamespace(**values, groups=command.grouped(values))


def help_of(command: Callable[..., Any]) -> str:
    """A command's docstring without the paragraphs for Python users."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(takewhile(lambda paragraph: not paragraph.startswith(("Returns", "Raises")), paragraphs))


def main(arguments: list[str] | None = None) -> None:
    """The console script: `emp-llm COMMAND ...`, equivalent to `python -m emp_llm.COMMAND ...`.

    Args:
        arguments: of the command line; None: those of the shell.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        module = import_module(f"emp_llm.{name}")
        run(getattr(module, name), getattr(module, "show", None), rest)
        return
    if name == "--version":
        from emp_llm import __version__

        print(__version__)
        return
    usage = "usage: emp-llm COMMAND [OPTIONS], or emp-llm COMMAND --help\n\n"
    usage += "\n".join(f"  {command:<10} {summary}" for command, summary in COMMANDS.items())
    if name in ("--help", "-h"):
        print(usage)
        return
    print(f"error: {name!r} is not a command.\n\n{usage}", file=sys.stderr)
    sys.exit(2)


def _fields(command: Callable[..., Any]) -> list[tuple[str, Any, Opt, Any]]:
    """(name, type, option, default) of each option of a command; arguments first."""
    declared = []
    for name, each in command.options.items():  # type: ignore[attr-defined]
        hint, *marks = get_args(each.hint)
        option = next(mark for mark in marks if isinstance(mark, Opt))
        declared.append((name, hint, option, each.default))
    return sorted(declared, key=lambda each: not each[2].argument)


def _parameter(name: str, hint: Any, option: Opt, default: Any) -> inspect.Parameter:
    """A field as a parameter for typer."""
    import typer

    about: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "min": option.minimum}
    about = {key: value for key, value in about.items() if value is not None}
    flag = option.flag or f"--{name.replace('_', '-')}"
    flags = [flag, option.short] if option.short else [flag]
    declaration = typer.Argument(**about) if option.argument else typer.Option(*flags, **about)
    annotation: Any = Annotated[_shell_type(hint), declaration]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shell_type(hint: Any) -> Any:
    """The type of a field in the shell: text or a path where Python also takes objects; lists of names are text with commas."""
    if hint is Any:
        return str | None
    if get_origin(hint) in (Union, UnionType):
        for kind in (str, Path):
            if kind in get_args(hint):
                return kind | None if type(None) in get_args(hint) else kind
    return hint


def _set_up_logging(mark: str, rank: int) -> None:
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, format=f"{mark}%(message)s", stream=sys.stderr)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for own in ("datasets", "huggingface_hub"):  # they have handlers of their own, and would print each line twice
        logging.getLogger(own).propagate = False
    if not sys.stderr.isatty():  # the libraries' progress bars, like ours, are for terminals only
        _hide_bars_of_libraries()


def _set_up_quiet() -> None:
    """The part of --quiet that concerns other packages. They are not imported yet."""
    logging.getLogger().setLevel(logging.WARNING)
    _hide_bars_of_libraries()


def _hide_bars_of_libraries() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def _terminate(*_: object) -> None:
    """End in good order, on the first SIGTERM: a scheduler and torchrun may both send it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated
