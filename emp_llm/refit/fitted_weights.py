"""Fitted weights, kept until the checkpoint is written: in files, one for each block, or in memory."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.common.errors import UserError, reason
from emp_llm.refit.fitted_rows import FittedFileRows, FittedRows
from emp_llm.refit.fitters import Fitted
from emp_llm.storage.atomic import write_bytes

_KEY = "emp_llm"


class FittedWeights(Protocol):
    """The fitted weights of a run's targets."""

    def has(self, block: int) -> bool:
        """Whether a block is finished."""

    def put(self, block: int, fitted: dict[str, Fitted]) -> None:
        """Keep the outcome of a block."""

    def block(self, block: int) -> dict[str, Fitted]:
        """The outcome of a finished block, by target."""

    def figures(self) -> dict[str, Fitted]:
        """The outcomes of all targets without their weights."""


class FittedInMemory:
    """Fitted weights in memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, Fitted]] = {}

    def has(self, block: int) -> bool:
        return block in self._blocks

    def put(self, block: int, fitted: dict[str, Fitted]) -> None:
        self._blocks[block] = fitted

    def block(self, block: int) -> dict[str, Fitted]:
        return self._blocks[block]

    def figures(self) -> dict[str, Fitted]:
        return {name: Fitted(None, **_figures(each)) for block in self._blocks.values() for name, each in block.items()}

    def weights(self) -> dict[str, Tensor]:
        """The weights of all fitted targets."""
        fitted = [(name, each.weight) for block in self._blocks.values() for name, each in block.items()]
        return {name: weight for name, weight in fitted if weight is not None}

    def rows(self, chosen: bool) -> FittedRows:
        """The fitted weights, for reading by rows; `chosen`: the fit chose the masks."""
        return FittedRows(self.weights(), _kept_mass(self.figures()) if chosen else None)


class FittedFiles:
    """Fitted weights in a folder, one safetensors file for each block. A file appears when it is complete.

    Args:
        folder: created by the first `put`.
        on_put: called with the number of a block when its file is complete.
    """

    def __init__(self, folder: Path, on_put: Callable[[int], None] | None = None) -> None:
        self.folder = folder
        self._on_put = on_put

    def has(self, block: int) -> bool:
        return self._path(block).is_file()

    def put(self, block: int, fitted: dict[str, Fitted]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = {name: each.weight.contiguous() for name, each in fitted.items() if each.weight is not None}
        metadata = {_KEY: json.dumps({name: _figures(each) for name, each in fitted.items()})}
        write_bytes(self._path(block), save(weights, metadata))
        if self._on_put is not None:
            self._on_put(block)

    def block(self, block: int) -> dict[str, Fitted]:
        with self._open(self._path(block)) as file:
            held = set(file.keys())
            return {n: Fitted(file.get_tensor(n) if n in held else None, **f) for n, f in _metadata(file).items()}

    def figures(self) -> dict[str, Fitted]:
        found: dict[str, Fitted] = {}
        for path in self._paths():
            with self._open(path) as file:
                found |= {name: Fitted(None, **figures) for name, figures in _metadata(file).items()}
        return found

    def rows(self, chosen: bool) -> FittedFileRows:
        """The fitted weights, for reading by rows; `chosen`: the fit chose the masks."""
        return FittedFileRows(self._paths(), _kept_mass(self.figures()) if chosen else None)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("block-*.safetensors"))

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:05d}.safetensors"

    @contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: the fitted weights cannot be read ({reason(error)}). Delete {self.folder.parent}."
            ) from error


def _kept_mass(figures: dict[str, Fitted]) -> dict[str, float]:
    return {name: fitted.kept_mass for name, fitted in figures.items()}


def _metadata(file: Any) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((file.metadata() or {})[_KEY])
    return figures


def _figures(fitted: Fitted) -> dict[str, Any]:
    return {name: value for name, value in vars(fitted).items() if name != "weight"}
