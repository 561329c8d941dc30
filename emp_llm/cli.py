"""Commands: functions whose options are generated from their parameters, for Python and for the
shell; and exit codes.
"""

import codecs
import errno
import inspect
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

import emp_llm
from emp_llm import COMMANDS as COMMANDS
from emp_llm import __version__
from emp_llm.common.declared import Flag, Node, Option, build, check_words, options_of
from emp_llm.common.errors import UserError, did_you_mean, disk_sentence, quotable, reason, visible
from emp_llm.common.machine import default_modes
from emp_llm.common.progress import loudness, progress_of
from emp_llm.common.ranks import RankLost, rank_losses, start_job, tell_ranks
from emp_llm.options.shared import GivenOptions, options_in

if TYPE_CHECKING:
    import click

R = TypeVar("R")
_SHORT = {"--model": "-m", "--output": "-o", "--verbose": "-v", "--quiet": "-q"}
# Of a command with many options, --help shows these.
_FIRST = (
    "model",
    "output",
    "method",
    "methods",
    "criteria",
    "refit",
    "heal",
    "sparsity",
    "sparsities",
    "emp_sparsities",
    "pattern",
    "patterns",
    "loss",
    "memory",
    "parameters",
    "beta",
    "betas",
    "orders",
    "matched_baselines",
    "targets",
    "structure",
    "calibration",
    "check",
    "evaluate",
    "suite",
    "dry_run",
    "overwrite",
    "verbose",
    "quiet",
)
_MANY = 30
# The groups of --help all, by the options with which they begin.
_GROUPS = {
    "model": "Model",
    "method": "Method and number of weights",
    "score": "Scores",
    "beta": "Method and number of weights",
    "refit": "Refit",
    "penalty": "SparseGPT and ADMM",
    "heal": "Healing",
    "targets": "Which layers",
    "structure": "Heads, neurons, experts and layers",
    "calibration": "Calibration text and passes",
    "device_map": "Devices and precision",
    "parameters": "Method and number of weights",
    "check": "Evaluation",
    "suite": "Evaluation",
    "evaluate": "Evaluation",
    "methods": "Points of the sweep",
    "mask_device": "Devices and precision",
    "criteria": "What is measured",
    "output": "Output",
    "verbose": "Messages",
}
# The last lines of each --help. The model, text and suite are those of the repository.
_DEMO = "scripts/demo/model --calibration demo"
EXAMPLES = {
    "bench": ("bench packed", "bench pruned --batch-sizes 1,4 --new-tokens 16"),
    "calibrate": (
        f"calibrate {_DEMO} --output norms.safetensors",
        "calibrate meta-llama/Llama-2-7b-hf --device-map disk --output norms.safetensors",
    ),
    "env": ("env", "env > env.txt"),
    "evaluate": (
        "evaluate pruned --baseline scripts/demo/model --suite demo",
        "evaluate pruned --tasks arc_easy,hellaswag --output tasks.json",
    ),
    "fetch": (
        "fetch meta-llama/Llama-2-7b-hf --suite paper --calibration wikitext2",
        "fetch --suite demo",
    ),
    "generate": (
        'generate pruned --prompt "The market of Hazelbridge"',
        "generate packed --prompt - < question.txt",
    ),
    "heal": (
        "heal pruned --dense scripts/demo/model --calibration demo --output healed",
        "heal pruned --dense scripts/demo/model --calibration demo --heal-steps 60",
    ),
    "measure": (f"measure {_DEMO}", f"measure {_DEMO} --loss 1%,2%,5% --output losses.json"),
    "pack": ("pack pruned packed", "pack pruned smaller --zstd"),
    "plan": (
        "plan --models scripts/demo/model --calibration demo --suite demo --output study",
        "plan scripts/paper/board.toml --output board",
    ),
    "prune": (
        f"prune {_DEMO} --method emp-admm --refit --sparsity 0.5 --output pruned",
        f"prune {_DEMO} --method wanda --loss 2% --output within",
    ),
    "push": ("push pruned USER/NAME --dry-run", "push pruned USER/NAME --private"),
    "report": ("report pruned", "report study"),
    "sweep": (
        f"sweep {_DEMO} --suite demo --betas 0.75,1,1.25 --output betas",
        f"sweep {_DEMO} --suite demo --methods wanda --sparsities 0.3,0.5 --output points",
    ),
    "unpack": ("unpack packed back", "unpack mask model --base scripts/demo/model"),
    "verify": ("verify pruned", "verify pruned --source scripts/demo/model"),
}
# What a shell reads to complete command lines; bash and zsh set COMP_LINE.
_COMPLETION = {
    "bash": "complete -o default -C 'emp-llm --complete' emp-llm",
    "zsh": "autoload -Uz compinit bashcompinit; compinit; bashcompinit; complete -o default -C "
    "'emp-llm --complete' emp-llm",
    "fish": "complete -c emp-llm -a '(COMP_LINE=(commandline -cp) emp-llm --complete)'",
}
_NOISY = (
    "httpx",
    "httpcore",
    "httpx2",
    "httpcore2",
    "filelock",
    "fsspec",
    "urllib3",
    "datasets",
    "accelerate",
    "absl",
    "matplotlib",
)


# What a stream that knows only ASCII shows in place of our own characters.
_IN_ASCII = {"±": "+-", "β": "beta", "π": "pi", "…": "...", "→": "->", "−": "-", "�": "?"}


class _Terminated(BaseException):
    """Raised on SIGTERM, as KeyboardInterrupt is on SIGINT."""


@dataclass(frozen=True, kw_only=True)
class Loudness:
    """What a command tells while it works. Warnings and errors are always shown."""

    verbose: Annotated[bool, Flag("Also log each step with its size, time and memory.")] = False
    quiet: Annotated[bool, Flag("No progress and no log: only result, warnings and errors.")] = (
        False
    )


def command(function: Callable[..., R]) -> Callable[..., R]:
    """Turn a function into a command. Its options are keyword arguments in Python, and flags in the
    shell.

    Each parameter of the function is an option, annotated with a `Flag`; a group of options (a
    class with such fields, or `Some` of them); or `GivenOptions`. The options of `Loudness` are
    added. They are read when they are needed: a new method brings its own.
    """
    taken = inspect.signature(function).parameters

    def options() -> dict[str, Option]:
        """The options, by name."""
        found: dict[str, Option] = {}
        for parameter in taken.values():
            found |= options_in(parameter)[1]
        return found | options_of(Loudness)

    def signature() -> inspect.Signature:
        plain = (each.parameter.replace(annotation=each.annotation) for each in options().values())
        parameters = sorted(plain, key=lambda parameter: parameter.kind)
        return inspect.signature(function).replace(parameters=parameters)

    def grouped(given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the function, made of values of the options."""
        arguments: dict[str, Any] = {}
        for parameter, (group, members) in (
            (name, options_in(each)) for name, each in taken.items()
        ):
            values = {name: given[name] for name in members if name in given}
            if group is GivenOptions:
                arguments[parameter] = GivenOptions(given)
            elif group is None:
                arguments |= values
            elif issubclass(group, Node):
                arguments[parameter] = build(group, values)
            else:
                arguments[parameter] = group(**values)
        return arguments

    @wraps(function)
    def flat(*arguments: Any, **keywords: Any) -> R:
        known = options()
        check_words(function.__name__, keywords, known)
        given = {
            name: known[name].checked(value)
            for name, value in signature().bind(*arguments, **keywords).arguments.items()
            if value is not None or known[name].required
        }
        verbose = given.get("verbose", False)
        quiet = given.get("quiet", False)
        if verbose and quiet:
            raise UserError("--verbose and --quiet exclude each other; give one of them.")
        name = function.__name__
        with loudness(name, verbose, quiet), progress_of(name), default_modes():
            return function(**grouped(given))

    flat.__signature__ = signature()  # type: ignore[attr-defined]
    flat.__doc__ = _documented(function, options())
    flat.options = options  # type: ignore[attr-defined]
    flat.grouped = grouped  # type: ignore[attr-defined]
    return flat


def _documented(function: Callable[..., Any], options: Mapping[str, Option]) -> str:
    """The docstring of a command, with its options as arguments."""
    lines = [inspect.getdoc(function) or "", "", "Args:"]
    for name, option in options.items():
        about = f"{name}: {option.declared.help}"
        lines.append(fill(about, 96, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(lines)


def run(name: str, arguments: list[str]) -> None:
    """Run a command with arguments of the shell, show its result, and exit.

    The command itself prints nothing, so that it is an ordinary function in Python.

    Exit codes: 0 success; 2 wrong input, reported in a sentence; 75 another rank of the job is
    gone; 130 interrupted; 143 terminated. Any other failure keeps its traceback.
    """

    def work(rank: int) -> None:
        module = import_module(f"emp_llm.commands.{name}")
        command = getattr(module, name)
        show = getattr(module, "show", None)
        options = parse(command, arguments, f"emp-llm {name}")
        if options.get("quiet"):
            logging.getLogger().setLevel(logging.WARNING)
            _hide_bars_of_libraries()
        try:
            result = command(**options)
        except SystemExit as error:  # of other code: the command is not done
            raise RuntimeError(f"another package or own code called sys.exit({error})") from error
        if show is not None and rank == 0:
            with _may_be_cut_off():
                show(result)

    _with_exit_codes(work)


def _with_exit_codes(work: Callable[[int], None]) -> None:
    """Do the work of this rank; a UserError, a lost rank or a signal ends the process without a
    traceback.
    """
    UserError.in_shell = True
    ready_streams()
    # torch, not imported yet, then asks Linux for large pages: fewer system seconds.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mark = ""
    try:
        # Only rank 0 prints results; errors of other ranks name their rank.
        rank = start_job().index
        mark = f"rank {rank}: " if rank else ""
        # On a scheduler's SIGTERM, incomplete files are deleted as on Ctrl-C.
        signal.signal(signal.SIGTERM, _terminate)
        _set_up_logging(mark, rank)
        with rank_losses():
            work(rank)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to clean up
        _end_messages()
        return
    except UserError as error:
        code = 2
        message = f"error: {error}"
    except RankLost as loss:
        code = loss.code
        message = f"error: {loss}"
    except KeyboardInterrupt:
        code = 130
        message = "interrupted."
    except _Terminated:
        code = 143
        message = "terminated by SIGTERM."
    except BaseException as error:
        sentence = disk_sentence(error)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            sentence = f"{quotable(str(error.filename))}: {reason(error)}."
        if sentence is None:
            tell_ranks(1, f"{type(error).__name__}: {error}")
            raise
        code = 2
        message = f"error: {sentence}"
    with suppress(OSError):  # nobody reads it
        # In one piece, because the ranks share a log.
        sys.stderr.write(f"{mark}{visible(message)}\n")
    _end_messages()
    tell_ranks(code, message.removeprefix("error: "))
    sys.exit(code)


def _end_messages() -> None:
    """Write what is left in the buffer of messages. If that fails, as on a full disk, Python's last
    flush must not change the exit code.
    """
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def ready_streams() -> None:
    """Make the three streams of this process fit to use, whatever they were started with.

    A closed stream (`>&-`) becomes the null device: otherwise the next file that is opened takes
    its number, and is written to by whatever prints. A character that a stream's encoding lacks
    is written in ASCII.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            how = "w" if number else "r"
            setattr(sys, name, open(os.devnull, how, encoding="utf-8"))  # noqa: SIM115
    codecs.register_error("emp_llm", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="emp_llm")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Characters that a stream cannot write: ours in ASCII, others as their escapes."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    escaped = (letter.encode("ascii", "backslashreplace").decode("ascii") for letter in text)
    return "".join(map(_IN_ASCII.get, text, escaped)), error.end


@contextmanager
def _may_be_cut_off() -> Iterator[None]:
    """Inside this context, the reader of the output may close it, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # So that Python's last flush succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UserError(
                f"standard output: {reason(error)}. The work is done; its result was not printed."
            ) from error


def parse(command: Callable[..., Any], arguments: list[str], name: str) -> dict[str, Any]:
    """The options that a command line gives, by field; exits after --help.

    Words without a flag are the arguments of the command, in their order. One that also has a flag,
    such as the model, may be given by either.

    Raises:
        UserError: an option is unknown, lacks its value or has a wrong one; or one is missing.
    """
    import click

    options: dict[str, Option] = command.options()  # type: ignore[attr-defined]
    metavars = {
        key: option.declared.metavar or key.upper()
        for key, option in options.items()
        if option.declared.argument
    }
    shown = (text if options[key].required else f"[{text}]" for key, text in metavars.items())
    usage = " ".join([*shown, "[OPTIONS]"])
    everything = arguments[-1:] == ["all"]  # after --help
    shortened = len(options) > _MANY and not everything

    class Grouped(click.Command):
        """Its help shows the options in groups."""

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            lines = {
                key: (metavar, options[key].declared.help) for key, metavar in metavars.items()
            }
            for parameter in self.params:
                key = parameter.name or ""
                flags, text = parameter.get_help_record(ctx) or ("", "")
                lines[key] = f"{metavars[key]}, {flags}" if key in metavars else flags, text
            for title, names in help_groups(options, everything).items():
                with formatter.section(title):
                    formatter.write_dl([lines[key] for key in names], col_max=24)
            if shortened:
                formatter.write_paragraph()
                formatter.write_text(f"{name} --help all shows all {len(options)} options.")

        def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            examples = EXAMPLES.get(command.__name__, ())
            if examples:
                with formatter.section("Examples"):
                    for line in examples:
                        formatter.write(f"{_continued(f'  emp-llm {line}')}\n")

    about = help_of(command)
    parser = Grouped(
        name,
        params=[
            click.Option(["-h", "--help"], is_flag=True, hidden=True),
            *(
                _parameter(key, option)
                for key, option in options.items()
                if key not in metavars or option.declared.flag
            ),
        ],
        help=about.partition("\n\n")[0] if shortened else about,
        options_metavar=usage,
        add_help_option=False,
    )
    try:
        context = parser.make_context(
            name, list(arguments), max_content_width=100, allow_extra_args=True
        )
    except click.UsageError as error:
        # "No such option '--x'. (Did you mean one of: '--y', '--z'?)."
        message = re.sub(r"\((Did you mean .*\?)\)", r"\1", error.format_message()).rstrip(".")
        end = "" if message.endswith("?") else "."
        raise UserError(f"{message}{end} {name} --help shows the options.") from error
    values = {key: value for key, value in context.params.items() if value not in (None, ())}
    words = context.args
    if values.pop("help"):
        with _may_be_cut_off():
            print(parser.get_help(context))
        sys.exit(0)
    for key, option in options.items():
        if words and key in metavars and key not in values:
            takes_all = metavars[key].endswith("...")
            values[key] = words if takes_all else words[0]
            words = [] if takes_all else words[1:]
        if option.required and key not in values:
            raise UserError(f"{metavars.get(key, option.flag)} is missing. Usage: {name} {usage}")
    if words:
        raise UserError(f"unexpected {words[0]!r}. Usage: {name} {usage}")
    return {key: options[key].in_shell(value) for key, value in values.items()}


def _continued(line: str) -> str:
    """A command that can be copied, on lines of at most 80 columns."""
    return fill(
        line, 78, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    ).replace("\n", " \\\n")


def _parameter(key: str, option: Option) -> "click.Option":
    """An option for click. `Option.in_shell` reads its value: the messages are ours."""
    import click

    text = option.declared.help
    default = option.parameter.default
    if option.required and not option.declared.argument:
        text += "  [required]"
    elif not option.declared.argument and default not in (None, "") and default is not False:
        shown = option.flag.partition("/")[0].removeprefix("--") if default is True else default
        text += f"  [default: {shown}]"
    known = (int, str, float, Path)
    kinds = [kind for kind in known if kind in option.types or list[kind] in option.types]  # type: ignore[valid-type]
    kind = "|".join(option.choices) or (kinds or [str])[0].__name__.lower()
    on_off = bool in option.types
    return click.Option(
        [key, *filter(None, (_SHORT.get(option.flag), option.flag))],
        help=text,
        default=None,
        is_flag=on_off,
        metavar=None if on_off else f"<{kind}>",
        multiple=str not in option.types and any(get_origin(each) is list for each in option.types),
    )


def options_from(name: str, words: list[str]) -> SimpleNamespace:
    """The options of a command by its name, parsed from the words of a command line; conflicts are
    not checked yet.

    Returns all its options as attributes, and `groups`: the values that its function takes, by
    name.
    """
    command = getattr(emp_llm, name)
    values = parse(command, words, f"emp-llm {name}")
    defaults = {key: option.parameter.default for key, option in command.options().items()}
    return SimpleNamespace(**defaults | values, groups=command.grouped(values))


def help_groups(options: dict[str, Option], everything: bool) -> dict[str, list[str]]:
    """The options that help shows, by title: those that people need first, or all; all in one
    group if they are few.
    """
    if len(options) > _MANY and not everything:
        return {"Options": [name for name in _FIRST if name in options]}
    groups: dict[str, list[str]] = {"Arguments": []}
    title = "Options"
    for name, option in options.items():
        title = _GROUPS.get(name, title) if len(options) > _MANY else title
        groups.setdefault("Arguments" if option.declared.argument else title, []).append(name)
    return {title: names for title, names in groups.items() if names}


def help_of(command: Callable[..., Any]) -> str:
    """A command's docstring without the paragraphs for Python users."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(
        takewhile(lambda paragraph: not paragraph.startswith(("Returns", "Raises")), paragraphs)
    )


def main(arguments: list[str] | None = None) -> None:
    """The console script: `emp-llm COMMAND ...`.

    Args:
        arguments: the words after `emp-llm`; None: those of the shell.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        run(name, rest)
        return
    usage = "usage: emp-llm COMMAND [OPTIONS], or emp-llm COMMAND --help\n\n"
    usage += "\n".join(f"  {command:<10} {summary}" for command, summary in COMMANDS.items())
    first = (EXAMPLES["prune"][0], EXAMPLES["evaluate"][0])
    usage += "\n\nExamples:\n" + "\n".join(_continued(f"  emp-llm {line}") for line in first)
    usage += (
        "\n\nemp-llm --completion bash (or zsh, fish) prints a line for ~/.bashrc that "
        "completes commands and options."
    )
    texts = {"--version": __version__, "--help": usage, "-h": usage}
    texts |= {f"--completion {shell}": line for shell, line in _COMPLETION.items()}
    name = " ".join([name, *rest[:1]]) if name == "--completion" else name

    def answer(rank: int) -> None:
        if name not in texts and name != "--complete":
            raise UserError(f"{name!r} is not a command.{did_you_mean(name, COMMANDS)}\n\n{usage}")
        with _may_be_cut_off():
            print(texts.get(name) or "\n".join(_completions(os.environ.get("COMP_LINE", ""))))

    _with_exit_codes(answer)


def _completions(line: str) -> list[str]:
    """The completions of the last word of a command line: commands, flags, or the choices of the
    flag before it.
    """
    line = line[: int(os.environ.get("COMP_POINT", len(line)))]
    words = line.split() + [""] * line.endswith(" ")
    candidates: list[Any] = []
    if len(words) == 2:
        candidates = [*COMMANDS, "--help", "--version", "--completion"]
    elif len(words) > 2 and words[1] in COMMANDS:
        options = getattr(emp_llm, words[1]).options().values()
        flags = {
            flag: option
            for option in options
            if option.declared.flag or not option.declared.argument
            for flag in option.flag.split("/")
        }
        option = flags.get(words[-2])
        if option is None or option.annotation is bool:
            candidates = [*flags, "--help"]
        elif option.parameter.name == "method":
            from emp_llm.options.words import method_names

            names = method_names()
            candidates = ["best", *(f"emp-{name}" for name in names), *names]
        else:
            candidates = option.choices
    return [
        candidate
        for candidate in candidates
        if candidate.startswith(words[-1]) and (words[-1] or not candidate.startswith("-"))
    ]


class _Visible(logging.Formatter):
    """Lines for a terminal: what other packages and files say may hold control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _set_up_logging(mark: str, rank: int) -> None:
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Visible(f"{mark}%(message)s"))
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # They have their own handlers, and would print each line twice.
    for package in ("datasets", "huggingface_hub"):
        logging.getLogger(package).propagate = False
    if not sys.stderr.isatty():  # the libraries' progress bars, like ours, are for terminals only
        _hide_bars_of_libraries()


def _hide_bars_of_libraries() -> None:
    """Hide the progress of other packages, which are not imported yet."""
    for package in ("HF_HUB", "HF_DATASETS"):
        os.environ.setdefault(f"{package}_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def _terminate(*_: object) -> None:
    """End in good order, on the first SIGTERM: a scheduler and torchrun may both send it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated
