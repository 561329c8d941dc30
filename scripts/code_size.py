"""How large emp_llm is, and how much of it a run enters.

    python scripts/code_size.py            # tokens and statements of each room
    python scripts/code_size.py --runs     # and how many files and functions four runs enter (a
    minute)

Tokens are Python's own, without comments, docstrings, line breaks and indentation: where lines
break makes no difference. A run enters a file if it calls one of its functions. Functions are those
with a `def`: bodies of modules and classes, lambdas and generator expressions are not counted.
They are for a reader to judge; nothing fails for them.
"""

import argparse
import ast
import multiprocessing
import os
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "emp_llm"
DEMO = ROOT / "scripts" / "demo" / "model"
_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Python programs; {out} is an empty folder, {model} the demo model.
RUNS = {
    "prune": "from emp_llm import prune; prune(model={model!r}, calibration='demo', "
    "samples=8, seqlen=64, output={out!r} + '/p', quiet=True)",
    "data-free prune": "from emp_llm import prune; prune(model={model!r}, "
    "method='emp-magnitude', output={out!r} + '/p', quiet=True)",
    "prune_model": "from transformers import AutoModelForCausalLM; from emp_llm import Recipe, "
    "prune_model; prune_model(AutoModelForCausalLM.from_pretrained({model!r}, dtype='auto'), "
    "Recipe(), ['Once upon a time. ' * 600] * 8, {model!r}, samples=8, seqlen=64)",
    "perplexity": "from emp_llm import evaluate; evaluate(model={model!r}, "
    "suite='perplexity-of-demo.toml', limit=4, output={out!r} + '/r.json', quiet=True)",
}
_SUITE = '[perplexity]\nfile = "{text}"\njoin = "\\n"\nseqlen = 512\n'


def size_of(path: Path) -> tuple[int, int]:
    """The number of tokens and of statements of a file, docstrings left out of the tokens."""
    statements = 0
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        if isinstance(node, ast.stmt):
            statements += 1
    tokens = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in _LAYOUT and token.start[0] not in docstrings:
                tokens += 1
    return tokens, statements


def sizes() -> dict[str, tuple[int, int, int]]:
    """Room -> (tokens, statements, files); with the commands, the files beside the rooms."""
    tokens: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "commands"
        size = size_of(path)
        tokens[room] += size[0]
        statements[room] += size[1]
        files[room] += 1
    return {room: (tokens[room], statements[room], files[room]) for room in sorted(tokens)}


def folders() -> int:
    """The number of folders with code in the package, itself included."""
    return len({path.parent for path in PACKAGE.rglob("*.py")})


def entered(name: str) -> tuple[int, int]:
    """The number of our files and functions that a run enters, in any thread of a fork of this
    process.
    """
    fork = multiprocessing.get_context("fork")
    found: multiprocessing.SimpleQueue[tuple[int, int]] = fork.SimpleQueue()
    child = fork.Process(target=_count, args=(name, found))
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"{name} ended with {child.exitcode}")
    return found.get()


def _count(name: str, found: "multiprocessing.SimpleQueue[tuple[int, int]]") -> None:
    """Run a program, with our package imported anew. Flag 1 of a code object: a function, not a
    module or a class.
    """
    import torch

    # Torch makes a new pool in a fork; if several threads ask for it at once, one finds none.
    torch.set_num_threads(1)
    for module in [module for module in sys.modules if module.partition(".")[0] == PACKAGE.name]:
        del sys.modules[module]
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_flags & 1
            and code.co_name[0] != "<"
            and code.co_filename.startswith(str(PACKAGE))
        ):
            seen.add((code.co_filename, code.co_firstlineno))

    with tempfile.TemporaryDirectory() as out:
        os.chdir(out)
        Path("perplexity-of-demo.toml").write_text(
            _SUITE.format(text=ROOT / "calibration" / "demo.txt")
        )
        sys.setprofile(note)
        threading.setprofile(note)
        exec(RUNS[name].format(model=str(DEMO), out=out))
        sys.setprofile(None)
    found.put((len({file for file, _ in seen}), len(seen)))


def main(line: list[str] | None = None) -> None:
    """Print the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", action="store_true", help="also count what four runs enter")
    asked = parser.parse_args(line)
    rooms = sizes()
    print(f"{'room':<14} {'tokens':>8} {'statements':>11} {'files':>6}")
    for room, (tokens, statements, files) in rooms.items():
        print(f"{room:<14} {tokens:>8} {statements:>11} {files:>6}")
    tokens, statements, files = (sum(figures) for figures in zip(*rooms.values(), strict=True))
    print(f"{'emp_llm':<14} {tokens:>8} {statements:>11} {files:>6}  in {folders()} folders")
    if asked.runs:
        print(f"\n{'a run enters':<16} {'files':>6} {'functions':>10}")
        for name in RUNS:
            files, functions = entered(name)
            print(f"{name:<16} {files:>6} {functions:>10}")


if __name__ == "__main__":
    main()
