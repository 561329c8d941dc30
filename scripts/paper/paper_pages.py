"""Pages with our numbers beside the published ones, and the options that all scripts of this
folder share.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from training import seconds_of_training
from vision_data import DATA

from emp_llm.common.errors import UserError
from emp_llm.common.machine import available_cores, processor_name
from emp_llm.common.paths import cache_folder
from emp_llm.reporting.page import Drawing

PAGES = Path(__file__).parents[2] / "docs" / "paper"


@dataclass(frozen=True)
class Beside:
    """A row of a table: our numbers and the published ones.

    Attributes:
        name: the cells before the numbers.
        ours, published: one number for each measure; None: not there.
    """

    name: tuple[str, ...]
    ours: tuple[float | None, ...]
    published: tuple[float | None, ...] = ()


def beside_table(
    heads: Sequence[str], measures: Sequence[str], rows: Sequence[Beside], decimals: Sequence[int]
) -> str:
    """Markdown: for each measure our number, and if one is published, in brackets that number and
    the difference.

    Args:
        heads: of the cells before the numbers.
        measures: names of the numbers.
        decimals: of each measure.
    """
    known = [
        any(_at(row.published, place) is not None for row in rows) for place in range(len(measures))
    ]
    titles = [
        f"{name}: ours (published, difference)" if each else name
        for name, each in zip(measures, known, strict=True)
    ]
    lines = [[*heads, *titles]]
    for row in rows:
        numbers = [
            _cell(row.ours[place], _at(row.published, place), digits)
            for place, digits in enumerate(decimals)
        ]
        lines.append([*row.name, *numbers])
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    text.insert(1, "|" + "---|" * len(heads) + "---:|" * len(measures))
    return "\n".join(text)


def _at(values: tuple[float | None, ...], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _cell(ours: float | None, published: float | None, digits: int) -> str:
    if ours is None:
        return "-" if published is None else f"- ({published:.{digits}f})"
    if published is None:
        return f"{round(ours, digits) + 0.0:.{digits}f}"
    # Of the numbers shown.
    difference = round(round(ours, digits) - round(published, digits), digits) + 0.0
    return f"{ours:.{digits}f} ({published:.{digits}f}, {difference:+.{digits}f})"


@dataclass
class Page:
    """A page of results in Markdown, with its command, machine and seconds.

    Attributes:
        name: of its file, without extension.
        title: in a few words.
    """

    name: str
    title: str
    parts: list[str] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add a paragraph, a heading or a table."""
        self.parts.append(text.strip())

    def explain(self, reasons: Mapping[str, str]) -> None:
        """Add the reasons of the differences, each with the measure or row that it is about."""
        self.add("Why the numbers differ:")
        self.add("\n".join(f"- **{name}**: {sentence}" for name, sentence in reasons.items()))

    def figure(self, drawing: Drawing) -> None:
        """Add a figure, with its caption below."""
        self.drawings.append(drawing)
        self.add(f"![{drawing.title}]({drawing.name}.svg)\n\n*{drawing.caption}*")

    def save(self, folder: Path, head: str) -> str:
        """Write the page and its figures to a folder; returns its text."""
        text = "\n\n".join([f"# {self.title}", head, *self.parts]) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in self.drawings:
            (folder / f"{drawing.name}.svg").write_bytes(drawing.svg)
        (folder / f"{self.name}.md").write_text(text, encoding="utf-8")
        return text


def options_of(doc: str | None, images: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that all scripts of this folder share; without `images`, only
    those of the page.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=PAGES, help="folder of the page and its figures"
    )
    parser.add_argument("--threads", type=int, default=available_cores(), help="of the processor")
    if images:
        parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
        parser.add_argument(
            "--cache",
            type=Path,
            default=cache_folder() / "paper",
            help="folder of the trained weights",
        )
        parser.add_argument(
            "--train-images", type=int, help="use only the first training images, for a quick try"
        )
        parser.add_argument(
            "--test-images", type=int, help="use only the first test images, for a quick try"
        )
        parser.add_argument(
            "--epochs", type=int, help="passes through the training images, for a quick try"
        )
    return parser


@contextmanager
def written_page(
    name: str, title: str, options: argparse.Namespace, line: list[str] | None
) -> Iterator[Page]:
    """A page to fill, which is written, and printed, at the end. A UserError is printed, and the
    exit code is 2.
    """
    page = Page(name, title)
    start = time.perf_counter()
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        yield page
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        torch.set_num_threads(before)
    arguments = _without_folders(sys.argv[1:] if line is None else line)
    command = " ".join(["python", f"scripts/paper/{name}.py", shlex.join(arguments)]).strip()
    threads = f"{options.threads} thread{'s' if options.threads != 1 else ''}"
    spent = sum(seconds_of_training)
    seconds_of_training.clear()
    training = f", and {spent:.0f} s of training" if spent else ""
    taken = f"{time.perf_counter() - start - spent:.0f} s{training}"
    print(
        page.save(
            options.output,
            f"`{command}`: {processor_name()}, {threads}, torch {torch.__version__}, {taken}.",
        )
    )


def _without_folders(arguments: list[str]) -> list[str]:
    """The arguments without folders, which say nothing about the results."""
    found = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith(("--data=", "--cache=", "--output=")):
            skip = False
        elif argument in ("--data", "--cache", "--output"):
            skip = True
        else:
            found.append(shown_argument(argument))
    return found


def shown_argument(argument: str) -> str:
    """An argument as a page shows it: a path within the repository from its root, any other
    absolute path by its name.
    """
    path = Path(argument)
    if not path.is_absolute():
        return argument
    root = PAGES.parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name
