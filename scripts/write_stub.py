"""Write emp_llm/__init__.pyi: the public functions with their signatures, for mypy and editors.

    python scripts/write_stub.py [--check]

The commands' options are declared in groups, and their functions are made from them; the stub says
what they take and return. --check writes nothing; the exit code is 1 if the stub is another.
"""

import argparse
import ast
import builtins
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import emp_llm
from emp_llm.common.declared import Option

PACKAGE = Path(emp_llm.__file__).parent
STUB = PACKAGE / "__init__.pyi"
# Options of text that may be a path too.
_PATHS = ("model", "folder", "dense", "baseline", "source", "match", "calibration", "suite")
_HEAD = '''"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

Written by scripts/write_stub.py.
"""
'''


def stub_text() -> str:
    """The content of the stub."""
    functions = []
    imports = {
        f"from emp_llm.{module} import {name} as {name}"
        for module, names in vars(emp_llm)["_MODULES"].items()
        for name in names
    }
    imports.add("from emp_llm import runtime as runtime")
    for name in emp_llm.COMMANDS:
        text, needed = command_stub(name)
        functions.append(text)
        imports |= needed
    lines = [
        _HEAD,
        "from pathlib import Path",
        "from typing import Any, Literal, overload",
        "",
        *sorted(imports),
        "",
        "COMMANDS: dict[str, str]",
        "__version__: str",
        "",
        *functions,
    ]
    text = "\n".join(lines)
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def command_stub(name: str) -> tuple[str, set[str]]:
    """The stub of a command, and the imports that its result needs."""
    function = getattr(emp_llm, name)
    results, imports = results_of(name)
    options: dict[str, Option] = function.options()
    parameters: list[str] = []
    keywords = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and not keywords:
            parameters.append("*")
            keywords = True
        default = "" if parameter.default is parameter.empty else " = ..."
        kind = type_text(options[parameter.name])
        parameters.append(f"{parameter.name}: {kind}{default}")
    about = textwrap.indent(f'"""{inspect.getdoc(function)}\n"""', "    ")
    if len(results) == 1 or "dry_run" not in options:
        return f"{_signature(name, parameters, ' | '.join(results))}\n{about}\n", imports
    # The result of a dry run is another.
    parts: list[str] = []
    for dry, result in (("Literal[False] = ...", results[0]), ("Literal[True]", results[1])):
        own = [f"dry_run: {dry}" if each.startswith("dry_run:") else each for each in parameters]
        body = " ..." if parts else f"\n{about}"  # described once
        parts.append(f"@overload\n{_signature(name, own, result)}{body}\n")
    return "".join(parts), imports


def _signature(name: str, parameters: list[str], result: str) -> str:
    inside = "".join(f"    {each},\n" for each in parameters)
    return f"def {name}(\n{inside}) -> {result}:"


def type_text(option: Option) -> str:
    """The type of an option's values, as Python takes them: a path may be text."""
    types = list(option.types)
    if Path in types and str not in types:
        types.append(str)
    if str in types and option.parameter.name in _PATHS and Path not in types:
        types.append(Path)
    if option.parameter.default is None and NoneType not in types:
        types.append(NoneType)
    texts = dict.fromkeys(map(_text, types))
    return " | ".join(sorted(texts, key=lambda text: text == "None"))


def _text(kind: Any) -> str:
    if kind is NoneType:
        return "None"
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(repr(each) for each in get_args(kind))}]"
    if get_origin(kind) is list:
        return f"list[{_text(get_args(kind)[0])}]"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(_text(each) for each in get_args(kind))
    return "Any" if kind is Any else str(kind.__name__)


def results_of(name: str) -> tuple[list[str], set[str]]:
    """The types that a command returns, and the lines that import them."""
    tree = ast.parse((PACKAGE / "commands" / f"{name}.py").read_text(encoding="utf-8"))
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert function.returns is not None
    text = ast.unparse(function.returns).strip("'\"")
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    imports = set()
    for word in ast.walk(ast.parse(text)):
        if isinstance(word, ast.Name) and word.id not in dir(builtins):
            module = modules.get(word.id, f"emp_llm.commands.{name}")
            imports.add(f"from {module} import {word.id} as {word.id}")
    return text.split(" | "), imports


def main(line: list[str] | None = None) -> None:
    """Write the stub, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(line).check
    text = stub_text()
    if check:
        sys.exit(0 if STUB.is_file() and STUB.read_text(encoding="utf-8") == text else 1)
    STUB.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
