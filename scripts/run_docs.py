"""Every command of README.md and docs/, run as written; the output of console blocks is compared
with the real one.

    python scripts/run_docs.py [PAGE ...] [--update] [--list]

A page is one session: its blocks run from top to bottom in an empty folder with links to the
checkout's folders. Hub commands talk to a loopback server, on which the demo model stands in for
large models. A block after a line `<!-- not run: REASON -->` is not run; the reasons are printed.
After `<!-- run with: OPTIONS -->`, the last command of the block is run with more options, if it
takes hours without them. In expected output a line `...` stands for any lines, and times are not
compared. Processors round differently. So a number with a decimal point may differ by 1 % or by 10
in its last digit, an accuracy, its error and its change by two questions; such differences are
printed. Words and whole numbers must be equal. `--update` puts the real output into the pages. The
exit code is 1 if a command fails or an output differs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

_FENCE = re.compile(r"^( *)```(bash|console|python)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: ([^>]*) -->\s*$")
_RUN_WITH = re.compile(r"<!-- run with: ([^>]*) -->\s*$")
_TIMES = re.compile(r"\d+(\.\d+)? (s|ms|min|GB/s)\b")
_NUMBER = re.compile(
    r"(?<![\w.-])[+-]?\d+\.\d+(?![\w.])"
)  # with a decimal point, and not in a name
_RULE = re.compile(r"-+(?: +-+)+")  # below the heads of a table's columns
_QUESTIONS = 240  # of each task of the demo suite
_LINKED = ("scripts", "calibration", "eval", "docs")
_LARGE = ("meta-llama/Llama-2-7b-hf", "OWNER/DENSE")  # the demo model is served under these names


@dataclass
class Block:
    """A fenced block of a page.

    Attributes:
        start, end: of its text in the page.
        reason: why it is not run, if it is not.
        options: added to its last command when it is run.
    """

    kind: str
    text: str
    start: int
    end: int
    reason: str | None
    options: str = ""


@dataclass
class Command:
    """A command of a block; `expected` and `lines` only in console blocks."""

    line: str
    expected: list[str] | None = None
    source: list[str] = field(default_factory=list)


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page's text that hold commands."""
    found = []
    for match in _FENCE.finditer(page):
        skipped, options = (kind.search(page[: match.start()]) for kind in (_NOT_RUN, _RUN_WITH))
        reason = skipped and skipped[1]
        found.append(
            Block(
                match[2],
                match[3],
                match.start(3),
                match.end(3),
                reason,
                options[1] if options else "",
            )
        )
    return found


def commands_of(block: Block) -> list[Command]:
    """The commands of a bash or console block, continued lines joined."""
    found: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        start = line.removeprefix("$ ") if block.kind == "console" else line
        if block.kind == "console" and not line.startswith("$ "):
            if found and found[-1].expected is not None:
                found[-1].expected.append(line)
            continue
        source = [line]
        while start.endswith("\\"):
            source.append(next(lines))
            start = start[:-1].rstrip() + " " + source[-1].strip()
        if start.strip() and not start.lstrip().startswith("#"):
            found.append(Command(start.strip(), [] if block.kind == "console" else None, source))
    if found and block.options:
        found[-1].line += f" {block.options}"
    return found


def pages() -> list[Path]:
    """README.md and the pages of docs/; studies made by `emp-llm report` have no commands."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Run the pages, and print what does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--update", action="store_true", help="put the real output into the pages")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    arguments = parser.parse_args()
    wrong = 0
    for page in arguments.pages or pages():
        if arguments.list:
            for block in blocks_of(page.read_text(encoding="utf-8")):
                for command in commands_of(block) if block.kind != "python" else []:
                    print(
                        f"{page.name}: "
                        f"{command.line}{f'  [not run: {block.reason}]' if block.reason else ''}"
                    )
            continue
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            environment = stack.enter_context(_Services(Path(folder)))
            wrong += _run_page(page, Path(folder) / "work", environment, arguments.update)
    sys.exit(1 if wrong else 0)


class _Services:
    """The environment of a page: a loopback Hub, a cache, and the checkout's folders by links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> dict[str, str]:
        server = import_module("hub_server")

        work = self._folder / "work"
        work.mkdir()
        for name in _LINKED:
            (work / name).symlink_to(ROOT / name)
        shared = ROOT.parent / "shared"
        served = dict.fromkeys(_LARGE, ROOT / "scripts" / "demo" / "model")
        if shared.is_dir():
            served |= {
                "/".join(path.parts[-2:]): path for path in (shared / "datasets").glob("*/*")
            }
            (work / "models").symlink_to(shared / "models")
        hub = self._stack.enter_context(
            server.hub_server(served, users={server.TOKEN: server.User("USER")})
        )
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON"))
        }
        return environment | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(self._folder / "cache"),
            "HF_TOKEN": server.TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "EMP_LLM_CACHE": str(self._folder / "emp-cache"),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts"))),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "COLUMNS": "200",
        }

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _run_page(page: Path, work: Path, environment: dict[str, str], update: bool) -> int:
    """Run one page; returns the number of commands that failed or printed something else."""
    text = page.read_text(encoding="utf-8")
    wrong = 0
    replaced: list[tuple[Block, str]] = []
    questions = _QUESTIONS
    for block in blocks_of(text):
        if block.reason is not None:
            print(f"{page.name}: not run ({block.reason}): {block.text.strip().splitlines()[0]}")
            continue
        if block.kind == "python":
            wrong += not _ok(
                page,
                Command(block.text.strip()),
                [sys.executable, "-c", block.text],
                work,
                environment,
            )[0]
            continue
        new: list[str] = []
        for command in commands_of(block):
            questions = min(
                [questions, *map(int, re.findall(r"\blimit[ =](\d+)", command.line))]
            )  # later reports show them
            line = ["bash", "-o", "pipefail", "-c", command.line]
            fine, output = _ok(page, command, line, work, environment, 100 / questions)
            wrong += not fine
            new += command.source + (
                _shortened(output, command.expected, fine) if command.expected is not None else []
            )
        if block.kind == "console":
            replaced.append((block, "\n".join(new) + "\n"))
    if update:
        for block, outputs in reversed(replaced):
            text = text[: block.start] + outputs + text[block.end :]
        page.write_text(text, encoding="utf-8")
    return wrong


def _ok(
    page: Path,
    command: Command,
    line: list[str],
    work: Path,
    environment: dict[str, str],
    question: float = 0.0,
) -> tuple[bool, list[str]]:
    """Run a command; whether it succeeded with the expected output, and its output."""
    start = time.perf_counter()
    done = subprocess.run(
        line, cwd=work, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    output = done.stdout.rstrip("\n").splitlines()
    different = [] if command.expected is None else tolerated(command.expected, output, question)
    fine = done.returncode == 0 and different is not None
    first = command.line.splitlines()[0]
    print(
        f"{page.name}: {'ok' if fine else 'WRONG'} {time.perf_counter() - start:.1f} s: {first}",
        flush=True,
    )
    if done.returncode:
        print(
            f"  exit code {done.returncode}\n  "
            + "\n  ".join(done.stderr.rstrip().splitlines()[-12:])
        )
    elif different:
        print(f"  tolerated: {', '.join(different)}")
    elif not fine:
        print("  printed:\n    " + "\n    ".join(output))
    return fine, output


def tolerated(expected: list[str], output: list[str], question: float = 0.0) -> list[str] | None:
    """The numbers of an output that differ within their tolerance, or None if the output is not the
    expected one.

    A line `...` stands for any lines, and times differ. `question` is what one question weighs in
    an accuracy, in points.
    """
    pattern = ""
    numbers = []
    lines = list(_without_times(expected))
    for line, accuracies in zip(lines, _accuracies(lines), strict=True):
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
            continue
        words = re.escape(_NUMBER.sub("\0", line)).replace("\0", r"([+-]?\d+\.\d+)")
        pattern += (
            re.sub(r"(?:\\ )+", " +", re.sub(r"(?:\\-)+", "-+", words)) + r"\n"
        )  # columns may be wider
        for found in _NUMBER.finditer(line):
            numbers.append(
                (found[0], any(start <= found.start() < end for start, end in accuracies))
            )
    match = re.fullmatch(pattern, "".join(f"{line}\n" for line in _without_times(output)))
    if match is None:
        return None
    different = []
    for (number, accuracy), real in zip(numbers, match.groups(), strict=True):
        last_digit = 10.0 ** -len(number.partition(".")[2])
        allowed = max(abs(float(number)) / 100, 10 * last_digit, 2 * question if accuracy else 0)
        if abs(float(real) - float(number)) > allowed + 1e-9:
            return None
        if real != number:
            different.append(f"{real} for {number}")
    return different


def _accuracies(lines: list[str]) -> Iterator[list[tuple[int, int]]]:
    """Where accuracies and their changes are in each line: in columns of a table, or in the
    whole line if it names one.
    """
    columns: list[tuple[int, int]] = []
    for above, line in zip(["", *lines], lines, strict=False):
        if _RULE.fullmatch(line):
            columns = []
            head = ""
            for column in re.finditer("-+", line):
                own = above[slice(*column.span())].strip()
                head = head if own == "change" else own
                columns += [column.span()] if " acc" in head else []
        yield [(0, len(line))] if " acc" in line else columns


def _shortened(output: list[str], expected: list[str], fine: bool) -> list[str]:
    """An output for the page: unchanged if it is as expected, and shortened where the expected
    one is.
    """
    if fine:
        return expected
    parts = _parts(expected)
    if len(parts) == 1:
        return output
    first = len(parts[0])
    last = len(parts[-1])
    return [*output[:first], "...", *(output[-last:] if last else [])]


def _parts(lines: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _without_times(lines: list[str]) -> Iterator[str]:
    return (_TIMES.sub(r"# \2", line).rstrip() for line in lines)


if __name__ == "__main__":
    main()
