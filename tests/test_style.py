"""One statement per line, in the whole package."""

import ast

import code_size


def test_one_statement_per_line() -> None:
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
