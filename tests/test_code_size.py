"""The budget: the package's tokens, and how much of it a run enters.

Tokens, not lines: nothing is gained by packing two things on one line. The numbers leave room for a
patch of usual size; a commit that raises one says what it pays for.
"""

import ast

import code_size
import pytest

from emp_llm.prune import prune

TOKENS = 250_000
FILES = 177
FOLDERS = 20
ENTERED = {
    "prune": (57, 482),
    "data-free prune": (40, 328),
    "prune_model": (43, 312),
    "perplexity": (36, 188),
}


def test_the_package() -> None:
    rooms = code_size.sizes()
    assert sum(tokens for tokens, _, _ in rooms.values()) <= TOKENS
    assert sum(files for _, _, files in rooms.values()) <= FILES
    assert code_size.folders() <= FOLDERS


def test_one_thing_a_line() -> None:
    """No tuple of names is assigned a tuple of other values, no conditional expression is inside
    another, and nothing is assigned inside a comprehension.
    """
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    found = []
    for path in sorted(code_size.PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            inside = list(ast.walk(node))[1:]
            packed = isinstance(node, ast.Assign) and _is_packed(node)
            nested = isinstance(node, ast.IfExp) and any(isinstance(n, ast.IfExp) for n in inside)
            walrus = isinstance(node, comprehensions)
            walrus = walrus and any(isinstance(each, ast.NamedExpr) for each in inside)
            if packed or nested or walrus:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []


def _is_packed(node: ast.Assign) -> bool:
    """Whether names, but not parts of arrays, are assigned a tuple that does not swap them."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {each.id for each in target.elts if isinstance(each, ast.Name)}
    used = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
    return len(names) == len(target.elts) and not names & used


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The compiler would be slow while calls are counted."""
    output = tmp_path_factory.mktemp("compiled") / "out"
    prune(code_size.DEMO, output=output, calibration="demo", samples=1, seqlen=16, device_map="cpu")


@pytest.mark.parametrize("name", code_size.RUNS)
def test_what_a_run_enters(name: str) -> None:
    files, functions = code_size.entered(name)
    assert files <= ENTERED[name][0]
    assert functions <= ENTERED[name][1]
