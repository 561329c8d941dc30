"""The options for a score of one's own: a criterion as a function, or scores from a file."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from emp_llm.common.errors import UserError, reason
from emp_llm.options.base import Opt, Options
from emp_llm.selection.criteria import CRITERIA, register_criterion
from emp_llm.selection.scheme import CountBy, ScoreMap

GIVEN = "scores"  # the name of the criterion whose scores are given
ScoreNorms = Literal["wanda", "relative"]


@dataclass(frozen=True, kw_only=True)
class CriterionOptions(Options):
    """A score of one's own.

    Attributes:
        criterion: MODULE:FUNCTION or FILE.py:FUNCTION; in Python also the function itself. `register_criterion` describes it.
        scores: a safetensors file, or a folder of such files, with a tensor for each target weight, of its name and shape; in
            Python also a mapping from names to tensors.
        score_map: how signed scores become non-negative; None: they must not be negative.
    """

    criterion: Annotated[
        str | Callable[..., Any] | None, Opt("A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION.")
    ] = None
    scores: Annotated[
        Path | Mapping[str, Any] | None, Opt("Scores of your own: a safetensors file with a score for each weight.")
    ] = None
    score_map: Annotated[
        ScoreMap | None, Opt("Make your scores non-negative: abs, shift (s - min s), or exp.", flag="--map")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion is not None:
            load_criterion(self.criterion)

    @property
    def own_name(self) -> str | None:
        """The name of the user's criterion in methods; None without one, and for a module without a function."""
        if self.scores is not None:
            return GIVEN
        if self.criterion is None:
            return None
        return criterion_name(self.criterion)

    def check_criterion(self) -> None:
        """Raise UserError if the options conflict."""
        if self.criterion is not None and self.scores is not None:
            raise UserError("--criterion and --scores both define the scores; give only one.")
        self.check_choice("score_map", ScoreMap, flag="map")
        if isinstance(self.scores, Path) and not self.scores.exists():
            raise UserError(f"--scores {self.scores}: no such file. Give a safetensors file with a tensor for each weight.")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Options):
    """The norms in a score, and the scores whose effective number sets the counts.

    Attributes:
        score: the norms that a criterion is given; None: wanda, the plain norms.
        count_by: for emp methods; None: own, but magnitude for emp-relative.
    """

    score: Annotated[
        ScoreNorms | None, Opt("Norms in the scores: wanda, or relative to each token's output; default: wanda.")
    ] = None
    count_by: Annotated[
        CountBy | None, Opt("N_eff of the method's own scores, or of the weight magnitudes (emp methods); default: own.")
    ] = None

    def check_score(self) -> None:
        """Raise UserError for an unknown value."""
        for name, choices in (("score", ScoreNorms), ("count_by", CountBy)):
            self.check_choice(name, choices)


def criterion_name(criterion: str | Callable[..., Any]) -> str | None:
    """The name in methods of a criterion given as an option; None for a module without a function."""
    if not isinstance(criterion, str):
        return str(getattr(criterion, "__name__", type(criterion).__name__))
    return criterion.rpartition(":")[2] if ":" in criterion else None


def load_criterion(criterion: str | Callable[..., Any]) -> None:
    """Register a criterion given as an option.

    Args:
        criterion: the function; or MODULE:FUNCTION or FILE.py:FUNCTION; or MODULE or FILE.py, which registers criteria itself.

    Raises:
        UserError: there is no such module or function, or the function takes other arguments than a criterion.
    """
    try:
        if not isinstance(criterion, str):
            register_criterion(criterion)
            return
        where, _, name = criterion.rpartition(":") if ":" in criterion else (criterion, "", "")
        module = _module(where, criterion)
        if not name:
            return
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"--criterion {criterion}: {where} has no function {name}.")
        register_criterion(function, name)
    except UserError:
        raise
    except ValueError as error:
        shown = criterion if isinstance(criterion, str) else criterion_name(criterion)
        raise UserError(f"--criterion {shown}: {error}.") from error


def criterion_origin(name: str) -> tuple[str, str | None]:
    """(module and function, SHA-256 of the source file) of a registered criterion, for records. No path is included."""
    function = CRITERIA[name].score
    module = getattr(function, "__module__", None) or type(function).__module__
    label = f"{module.removeprefix(_PREFIX)}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else None
    except (TypeError, OSError):  # a built-in, or typed into a shell
        digest = None
    return label, digest


_PREFIX = "emp_llm_criterion_"


def _module(where: str, criterion: str) -> ModuleType:
    """The module, found as Python finds it, or in the current folder; or loaded from a file."""
    if where.endswith(".py") or os.sep in where:
        return _module_of_file(Path(where), criterion)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the console script does not look there
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and where.split(".")[0] == error.name.split(".")[0]:
            raise UserError(
                f"--criterion {criterion}: no module {where}. Give MODULE:FUNCTION for a module that Python finds, or "
                "FILE.py:FUNCTION."
            ) from error
        raise UserError(f"--criterion {criterion}: {where} needs the module {error.name}, which is not installed.") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"--criterion {criterion}: {where!r} is not the name of a module ({reason(error)}).") from error


def _module_of_file(path: Path, criterion: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"--criterion {criterion}: no file {path}.")
    if path.suffix != ".py":
        raise UserError(f"--criterion {criterion}: {path} is no Python file; its name must end in .py.")
    status = path.stat()
    return _loaded_file(path.resolve(), status.st_mtime_ns, status.st_size)


@cache
def _loaded_file(path: Path, modified: int, size: int) -> ModuleType:
    """The module of a file in this state, run once."""
    name = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
