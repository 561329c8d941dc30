"""Verification of a structured checkpoint: scores, choice and bytes, by slower and simpler code than that which wrote it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, reason
from emp_llm.common.paths import INDEX_NAME, STRUCTURE_NAME
from emp_llm.models.layers import Layer
from emp_llm.options.recipe import Recipe
from emp_llm.structure.units import UnitModel, Units, changed_config

Say = Callable[[str], None]


class UnitVerification:
    """The verification of one checkpoint.

    Args:
        model: the dense one.
        pruned: the checkpoint.
        recipe: of its run.
        say: takes a difference, a sentence.

    Raises:
        UserError: the file of kept units is missing or unreadable.
    """

    def __init__(self, model: UnitModel, pruned: Checkpoint, recipe: Recipe, say: Say) -> None:
        self._model = model
        self._pruned = pruned
        self._recipe = recipe
        self._say = say
        self._stored = read_tensors(pruned.folder / STRUCTURE_NAME)
        for units in model.units:
            if not {f"{units.name}.kept", f"{units.name}.scores"} <= self._stored.keys():
                raise UserError(f"{pruned.folder / STRUCTURE_NAME}: it does not name {units.name}. Download it again.")
        self._kept = {units.name: self._stored[f"{units.name}.kept"].numpy() for units in model.units}
        assert recipe.structure is not None
        self._structure = recipe.structure

    def check_scores(self, features: Callable[[str], Tensor | None]) -> int:
        """Compute all scores again; returns their number. `features` as for `unit_scores`, by layer; None if it has none."""
        for units in self._model.units:
            wanted, stored = self._score(units, features(units.name)), self._stored[f"{units.name}.scores"]
            if not torch.allclose(wanted, stored, rtol=1e-9, atol=0):
                self._say(f"{units.name}: its scores are not those of {self._recipe.method}.")
        return sum(len(units) for units in self._model.units)

    def check_choice(self) -> int:
        """Choose again by the scores, where the number of each layer follows from them; returns the number of layers."""
        for units in self._model.units:
            scores, kept = self._stored[f"{units.name}.scores"].numpy(), self._kept[units.name]
            for place in np.unique(units.places) if not self._structure.keep_shapes else [None]:
                members = np.arange(len(units)) if place is None else np.flatnonzero(units.places == place)
                own = np.intersect1d(kept, members)
                best = sorted(members, key=lambda unit: (-scores[unit], unit))[: len(own)]
                if self._structure.structure_group == "layer" and sorted(best) != own.tolist():
                    self._say(f"{units.name}: the kept units are not those with the highest scores.")
            count = self._count(scores)
            if self._structure.keep_shapes and count is not None and count != len(kept):
                self._say(f"{units.name}: it keeps {len(kept)} units; the rule keeps {count}.")
        return len(self._model.units)

    def check_tensors(self, fitted: bool) -> int:
        """Compare every tensor with the dense model's rows and columns; returns their number.

        Args:
            fitted: the last layer of each unit was refitted, so its kept weights may differ.
        """
        dense, masks = self._model.checkpoint, self._masks()
        outputs = {self._model.matrices[units.output].stored.name for units in self._model.units} if fitted else set()
        for name, tensor in dense.tensors.items():
            theirs = self._pruned.tensors.get(name)
            if theirs is None or theirs.dtype != tensor.dtype:
                self._say(f"{name}: it is missing, or has another dtype.")
                continue
            wanted = self._cut(_tensor(tensor.shard, name), {key[1]: mask for key, mask in masks.items() if key[0] == name})
            got = _tensor(theirs.shard, name)
            if wanted.shape != got.shape:
                self._say(f"{name}: it has the shape {list(got.shape)}; {list(wanted.shape)} are kept.")
            elif name in outputs:
                if bool((got[wanted == 0] != 0).any()) and self._structure.keep_shapes:
                    self._say(f"{name}: weights of removed units are not zero.")
            elif not torch.equal(_bits(wanted), _bits(got)):
                self._say(f"{name}: its values are not those of the source.")
        for name in self._pruned.tensors.keys() - dense.tensors.keys():
            self._say(f"{name}: the source has no such tensor.")
        return len(dense.tensors)

    def check_side_files(self, changes: dict[str, Any]) -> int:
        """Compare the other files; `changes` are those of config.json, by the names of the report. Returns their number."""
        dense = self._model.checkpoint
        for relative in dense.side_files():
            ours, theirs = self._pruned.folder / relative, dense.folder / relative
            if not ours.is_file():
                self._say(f"{relative}: it is missing.")
            elif str(relative) == "config.json" and changes:
                if read_json(ours) != changed_config(
                    read_json(theirs), {tuple(name.split(".")): value for name, value in changes.items()}
                ):
                    self._say(f"{relative}: it has other changes than the numbers of heads and neurons.")
            elif str(relative) != INDEX_NAME and ours.read_bytes() != theirs.read_bytes():
                self._say(f"{relative}: differs from the source.")
        return len(dense.side_files())

    def _count(self, scores: Any) -> int | None:
        """The number that the rule keeps of a layer; None if it depends on other layers."""
        recipe = self._recipe
        if self._structure.structure_group != "layer":
            return None
        if recipe.method.startswith("emp-"):
            if recipe.beta is None or recipe.order != 2.0:
                return None
            total = math.fsum(scores)
            n_eff = total**2 / math.fsum(score**2 for score in scores) if total else len(scores)
            return min(len(scores), max(1, math.floor(recipe.beta * n_eff * (1 + 1e-12)))) if total else len(scores)
        return None if recipe.sparsity is None else len(scores) - math.floor(recipe.sparsity * len(scores) * (1 + 1e-12))

    def _score(self, units: Units, feature: Tensor | None) -> Tensor:
        """The scores of units, from whole matrices in float64."""
        numbers = torch.ones(self._model.matrices[units.output].columns) if feature is None else feature
        numbers = numbers.double()
        columns = torch.from_numpy(units.columns)
        if self._recipe.method.removeprefix("emp-") == "taylor":
            return torch.stack([numbers[each].sum() for each in columns])
        output = self._matrix(units.output) * numbers
        scores = torch.stack([output[:, each].norm() for each in columns])
        if units.kind == "neurons":
            for layer, rows in units.rows.items():
                weight = self._matrix(layer)
                scores = scores * torch.stack([weight[each].norm(dim=1).prod() for each in torch.from_numpy(rows)])
        return scores

    def _matrix(self, layer: Layer) -> Tensor:
        """A layer's weight, float64, shape (outputs, inputs)."""
        matrix = self._model.matrices[layer]
        weight = _tensor(matrix.stored.shard, matrix.stored.name)
        weight = weight if matrix.expert is None else weight[matrix.expert]
        return (weight.T if matrix.transposed else weight).double()

    def _masks(self) -> dict[tuple[str, int | None], list[Tensor]]:
        """Stored tensor and expert -> the kept rows and columns, as stored; for a bias the kept elements alone."""
        masks: dict[tuple[str, int | None], list[Tensor]] = {}
        for units in self._model.units:
            kept = self._kept[units.name]
            gone = np.setdiff1d(np.arange(len(units)), kept)
            self._clear(masks, units.output, 1, units.columns, kept, gone)
            for layer, rows in units.rows.items():
                self._clear(masks, layer, 0, rows, kept, gone)
        return masks

    def _clear(self, masks: Any, layer: Layer, axis: int, table: Any, kept: Any, gone: Any) -> None:
        matrix = self._model.matrices[layer]
        sizes = (matrix.columns, matrix.rows) if matrix.transposed else (matrix.rows, matrix.columns)
        own = masks.setdefault((matrix.stored.name, matrix.expert), [torch.ones(size, dtype=torch.bool) for size in sizes])
        removed = np.setdiff1d(table[gone], table[kept])
        own[1 - axis if matrix.transposed else axis][removed] = False
        bias = self._model.architecture.stored_names.get(f"{layer.name}.bias")
        if axis == 0 and bias in self._model.checkpoint.tensors and layer.expert is None:
            place = masks.setdefault((bias, None), [torch.ones(matrix.rows, dtype=torch.bool)])
            place[0][removed] = False

    def _cut(self, tensor: Tensor, masks: dict[int | None, list[Tensor]]) -> Tensor:
        """What is expected of a dense tensor."""
        if not masks:
            return tensor
        parts = []
        for expert, own in masks.items():
            part = (tensor if expert is None else tensor[expert]).clone()
            for axis, mask in enumerate(own):
                if self._structure.keep_shapes:
                    part.movedim(axis, 0)[~mask] = 0
                else:
                    part = part.movedim(axis, 0)[mask].movedim(0, axis)
            parts.append(part)
        return parts[0] if None in masks else torch.stack(parts)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that the run wrote beside the checkpoint; UserError if it is missing or damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: it decided which units stay, and cannot be read ({reason(error)}). Download it.") from error


def _tensor(shard: Path, name: str) -> Tensor:
    with safe_open(shard, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
