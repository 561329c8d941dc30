"""Custom criteria: found by name when a recipe is used, and described for records."""

import hashlib
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from emp_llm.common.errors import UserError, reason
from emp_llm.common.paths import file_state
from emp_llm.selection.criteria import GIVEN, Criterion, own_criterion

_PREFIX = "emp_llm_criterion_"


def custom_name(criterion: str | Callable[..., Any] | None, scores: Any = None) -> str | None:
    """The name of a custom criterion, or of given scores, in methods; None without one, and for a
    module or file without a function.
    """
    if scores is not None:
        return GIVEN.name
    if criterion is None or isinstance(criterion, str):
        return criterion.rpartition(":")[2] if criterion is not None and ":" in criterion else None
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def find_criterion(name: str, criterion: str | Callable[..., Any]) -> Criterion:
    """The custom criterion of a method.

    Args:
        name: the method without "emp-".
        criterion: the function; MODULE:FUNCTION or FILE.py:FUNCTION; or MODULE or FILE.py, whose
            function is `name`.

    Raises:
        UserError: there is no such module or function, or the function takes other arguments than a
            criterion.
    """
    function: Any = criterion
    function_name = None
    shown = custom_name(criterion)
    if isinstance(criterion, str):
        shown = criterion
        function_name = custom_name(criterion) or name
        module = criterion.removesuffix(f":{function_name}")
        function = _names_in(module, criterion).get(function_name)
        if not callable(function):
            raise UserError(f"--criterion {criterion}: {module} has no function {function_name}.")
    try:
        return own_criterion(function, function_name)
    except ValueError as error:
        raise UserError(f"--criterion {shown}: {error}.") from error


def criterion_origin(criterion: Criterion) -> tuple[str, str]:
    """(module and function, `source_hash`) of a criterion, for records. No path is included."""
    function = criterion.score
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", type(function).__qualname__)
    file = source_file(function)
    if module == "__main__" and file is not None:  # a script
        module = file.name
    return f"{module.removeprefix(_PREFIX)}:{name}", source_hash(function)


def source_file(thing: Any) -> Path | None:
    """The source file of a function, of a class, or of the class of another object; None if it has
    none that can be read.
    """
    while isinstance(thing, partial):
        thing = thing.func
    thing = inspect.unwrap(thing)
    if not inspect.isroutine(thing) and not inspect.isclass(thing):
        thing = type(thing).__call__ if callable(thing) else type(thing)
    try:
        source = inspect.getsourcefile(thing)
    except (TypeError, OSError):  # a built-in, or a class of a shell
        return None
    # What is typed into a shell or a notebook has the name of a file that is not there.
    is_there = source is not None and os.path.isfile(source) and os.access(source, os.R_OK)
    return Path(source) if source is not None and is_there else None


def source_hash(thing: Any) -> str:
    """The SHA-256 of the source file of a function or an object, or of it and the files that its
    attribute `reads` names; "" without any. UserError if one of these is missing.
    """
    reads = getattr(thing, "reads", ())
    files = [source_file(thing)]
    for name in [reads] if isinstance(reads, str | Path) else reads:
        if not Path(name).is_file():
            shown = getattr(thing, "__name__", type(thing).__name__)
            raise UserError(f"{shown} reads {name}: no such file. Correct its attribute reads.")
        files.append(Path(name))
    hashes = [_hash_of(file, file_state(file)) for file in files if file is not None]
    if len(hashes) > 1:
        hashes = [hashlib.sha256(b"".join(hashes)).digest()]
    return hashes[0].hex() if hashes else ""


@cache
def _hash_of(file: Path, state: tuple[int, ...] | None) -> bytes:
    """The SHA-256 of a file in this state, computed once."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


def _names_in(module: str, criterion: str) -> dict[str, Any]:
    """The names in a module that Python or the current folder holds, or in a file."""
    if module.endswith(".py") or os.sep in module:
        path = Path(module)
        if not path.is_file():
            raise UserError(f"--criterion {criterion}: no file {path}.")
        if path.suffix != ".py":
            raise UserError(
                f"--criterion {criterion}: {path} is no Python file; its name must end in .py."
            )
        return _run_file(path.resolve(), file_state(path))
    # The console script does not search the current folder. Searched last, it shadows no module.
    sys.path.append(os.getcwd())
    try:
        return vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            raise UserError(
                f"--criterion {criterion}: no module {module}. Give MODULE:FUNCTION for a module "
                "that Python finds, or FILE.py:FUNCTION."
            ) from error
        raise UserError(
            f"--criterion {criterion}: {module} needs the module {error.name}, which is "
            "not installed."
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--criterion {criterion}: {module!r} is not the name of a module ({reason(error)})."
        ) from error
    finally:
        sys.path.pop()


@cache
def _run_file(path: Path, state: tuple[int, ...] | None) -> dict[str, Any]:
    """The names in a file in this state, run once."""
    return runpy.run_path(str(path), run_name=f"{_PREFIX}{path.stem}")
