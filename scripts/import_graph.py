"""The rooms of emp_llm, lowest first, each with the rooms that it imports.

    python scripts/import_graph.py

A room may import only rooms above it in this list, the order of docs/design.md. An import that
breaks the rule is marked, and the exit code is 1. `tests/test_architecture.py` enforces the same
rule.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "emp_llm"
ROOMS = (
    "common",
    "selection",
    "update",
    "options",
    "checkpoint",
    "records",
    "models",
    "calibration",
    "walk",
    "healing",
    "pruning",
    "evaluation",
    "runs",
    "reporting",
    "structure",
    "study",
    "runtime",
)
COMMANDS = "commands"  # with the files beside the rooms, through which they start


def main(line: list[str] | None = None) -> None:
    """Print the graph."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(line)
    graph = import_graph()
    wrong = 0
    for number, room in enumerate((*ROOMS, COMMANDS)):
        imported = sorted(graph.get(room, {}), key=order_of)
        late = [name for name in imported if order_of(name) > number]
        wrong += len(late)
        print(
            f"{number + 1:>2}  {room:<22} "
            f"{' '.join(name + ('  <-- not allowed' if name in late else '') for name in imported)}"
        )
    sys.exit(1 if wrong else 0)


def import_graph() -> dict[str, dict[str, list[str]]]:
    """Room -> imported room -> the imports, as "file -> module"."""
    graph: dict[str, dict[str, list[str]]] = {}
    for path in python_files():
        room = room_of(path)
        for target in imported_files(path):
            other = room_of(target)
            if other != room:
                line = f"{path.relative_to(PACKAGE)} -> {target.relative_to(PACKAGE)}"
                graph.setdefault(room, {}).setdefault(other, []).append(line)
    return graph


def python_files() -> list[Path]:
    """All modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room of a module: its folder, relative to the package. The files beside the rooms count
    as commands.
    """
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return COMMANDS if folder == "." else folder


def order_of(room: str) -> int:
    """The place of a room in the list; commands come last."""
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


@cache
def imported_files(path: Path, for_types: bool = True) -> tuple[Path, ...]:
    """The modules of the package that a module imports anywhere, also within functions.

    Args:
        path: of the module.
        for_types: with those that only a type checker imports.
    """
    return tuple(_imported_files(path, for_types))


def _imported_files(path: Path, for_types: bool) -> Iterator[Path]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree) if not for_types else ():
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            left_out.update(node.body)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "emp_llm":
                module = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
                package = PACKAGE.joinpath(*parts[1:], "__init__.py")
                found = module if module.is_file() and len(parts) > 1 else package
                if found.is_file():
                    yield found


if __name__ == "__main__":
    main()
