"""Units: what goes as a whole. A kind of unit is a class that says what is found, scored, cut,
fitted and compared; `prune_structure.py` has the table of them.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor
from emp_llm.checkpoint.files import write_json
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.layers import Shape
from emp_llm.options.recipe import Recipe, Structure
from emp_llm.update.update import Update
from emp_llm.walk.updated import UpdatedWeights

Indices = NDArray[np.int64]
Scores = NDArray[np.float64]
# The names of a field of config.json and of the objects around it -> its new value.
Changes = dict[tuple[str, ...], Any]
# Stored tensor -> expert (None: the tensor as a whole, or a bias) -> for each dimension, which of
# its indices stay: bool.
Kept = dict[str, dict[int | None, list[Tensor]]]
# (matrix, axis) -> sums of squared weights of its columns (axis 0) or rows (axis 1), float64.
Squares = Callable[[Matrix, int], Scores]


@dataclass
class Cuts:
    """What goes with the units that do not stay.

    Attributes:
        remove: what does not stay is removed; else other values take its place.
        kept: what stays of those of which a part goes.
        names: the new name of those that get one; None: the tensor goes.
        fills: tensor -> the value in the place of what does not stay, where shapes stay; others
            have 0.
        files: further files beside the checkpoint: path -> content, for JSON.
        shapes: of all parameters and buffers of the smaller model, where units are removed.
        configs: changes of config.json that may give them; the first that does is taken.
    """

    remove: bool
    kept: Kept = field(default_factory=dict)
    names: dict[str, str | None] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)
    files: dict[Path, dict[str, Any]] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    configs: list[Changes] = field(default_factory=list)

    def leave_out(
        self, name: str, expert: int | None, shape: Shape, dimension: int, gone: Any
    ) -> None:
        """Some indices of a dimension go; `shape` is that of the expert's matrix, or of the
        tensor.
        """
        whole = [torch.ones(size, dtype=torch.bool) for size in shape]
        self.kept.setdefault(name, {}).setdefault(expert, whole)[dimension][gone] = False

    def shorten(self, parameter: str, dimension: int, by: int) -> None:
        """A dimension of a parameter of the smaller model has fewer elements."""
        shape = list(self.shapes[parameter])
        shape[dimension] -= by
        self.shapes[parameter] = tuple(shape)

    def new_name(self, name: str) -> str | None:
        """The name of a stored tensor in the smaller checkpoint; None if it goes."""
        return self.names.get(name, name)

    def new_shape(self, tensor: StoredTensor) -> Shape:
        """The shape of a stored tensor in the smaller checkpoint. All experts of a tensor have the
        same.
        """
        if not self.remove or tensor.name not in self.kept:
            return tensor.shape
        sizes = [int(stays.sum()) for stays in next(iter(self.kept[tensor.name].values()))]
        return (*tensor.shape[: len(tensor.shape) - len(sizes)], *sizes)

    def elements(self, tensor: StoredTensor) -> int:
        """How many elements of a stored tensor stay. Its experts may have different numbers of
        neurons, where shapes stay.
        """
        if self.new_name(tensor.name) is None:
            return 0
        if tensor.name not in self.kept:
            return tensor.numel
        return sum(
            math.prod(int(stays.sum()) for stays in masks)
            for masks in self.kept[tensor.name].values()
        )

    def matrices(self, name: str, stored: Tensor) -> Iterator[Tensor]:
        """A stored tensor without what does not stay: as a whole, or the matrix of each of its
        experts.
        """
        masks = self.kept.get(name, {None: []})
        for expert in sorted(masks, key=lambda number: number or 0):
            matrix = stored if expert is None else stored[expert]
            for dimension, stays in enumerate(masks[expert]):
                if bool(stays.all()):
                    continue
                if self.remove:
                    matrix = matrix.index_select(dimension, stays.nonzero()[:, 0])
                else:
                    gone = (~stays).nonzero()[:, 0]
                    matrix = matrix.index_fill(dimension, gone, self.fills.get(name, 0.0))
            yield matrix


@dataclass(frozen=True, eq=False)
class Units(ABC):
    """The heads of one attention, the neurons of one MLP or expert, the experts of one block, or
    all decoder layers.

    Attributes:
        kind: the plural noun, as in --structure.
        comparable: whether scores of different blocks are on one scale.
        listed: the report has the score of each unit, and the numbers of those that stay.
        rounded: where they are removed, --width-multiple divides the number that stays.
        remedy: what to do if the written model computes something else than the dense one.
        remedy_of_zeros: the same where shapes stay.
        refusal: what to say if no change of config.json gives the smaller model, a template.
        required: whether the fewest must stay even where the others are set to zero.
        name: of the layer that reads heads or neurons; of the module of all experts; of the list of
            layers.
        role: the name within the block, shared by the units of all blocks.
        block: number of their block.
        places: number of the group to which each belongs, shape (units,). Where units are removed,
            as many stay in every group. All 0 if units are taken from all.
        fewest: how many stay at least, of all groups.
        targets: all matrices of which a part goes with a unit. Of heads and neurons, the layer that
            reads them is the last.
        collected_shape: the shape of what a calibration collects for these units.
        noun: what is counted, if it is not the kind.
        by_block: whether config.json has a number of these units for each block.
        multiple_of: the role of the units whose number divides theirs: config.json has the width of
            a shared expert as a number of routed ones. Empty for all others.
    """

    kind: ClassVar[str]
    comparable: ClassVar[bool] = True
    listed: ClassVar[bool] = False
    rounded: ClassVar[bool] = False
    remedy: ClassVar[str]
    remedy_of_zeros: ClassVar[str] = ""
    refusal: ClassVar[str]
    required: ClassVar[bool] = False

    name: str
    role: str
    block: int
    places: Indices
    fewest: int
    targets: list[Target]
    collected_shape: tuple[int, ...]
    noun: str = field(default="", kw_only=True)
    by_block: bool = field(default=False, kw_only=True)
    multiple_of: str = field(default="", kw_only=True)

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def among(cls, units: Iterable["Units"]) -> list[Self]:
        """Those of this kind."""
        return [candidate for candidate in units if isinstance(candidate, cls)]

    # Found.

    @classmethod
    @abstractmethod
    def find(cls, model: "UnitModel", blocks: str | None) -> list[Self]:
        """The units of a model, in its order.

        Args:
            model: without its units.
            blocks: name of the list of decoder blocks; None: detected.

        Raises:
            UserError: it has none, or they are stored in a form that cannot be pruned.
        """

    # Scored.

    @abstractmethod
    def score_of_weights(self, squares: Squares, norms: Scores | None) -> Scores:
        """The score of each unit by its weights; with `norms`, those of the inputs of its last
        layer.

        Raises:
            UserError: these units have none. The options refuse such a criterion before.
        """

    @classmethod
    @abstractmethod
    def sums(
        cls,
        runner: BlockwiseModel,
        units: Sequence["Units"],
        tokens: Tensor,
        batch_size: int,
        recipe: Recipe,
    ) -> dict[str, Tensor]:
        """What a pass of the text collects, by the name of the units. A collective call.

        Args:
            runner: the dense model.
            units: all of the model.
            tokens: int64, shape (samples, length).
            batch_size: sequences per forward pass.
            recipe: its score, and the refit.
        """

    @abstractmethod
    def score_of_sums(self, criterion: str, sums: Scores) -> Scores:
        """The score of each unit by its element of `sums`."""

    def collected(self, feature: Callable[[str], Tensor | None]) -> Scores:
        """What a calibration has collected for these units, float64, of `collected_shape`.

        Raises:
            UserError: it has collected nothing for them, or for other units.
        """
        values = feature(self.name)
        if values is None:
            raise UserError(
                f"{self.name}: the calibration did not reach it, so its {self.kind} have no scores."
            )
        if values.shape != self.collected_shape or not values.is_floating_point():
            raise UserError(
                f"{self.name}: what a calibration collected for its {self.kind} is of another "
                "shape or dtype, so it is of another model. Calibrate this one."
            )
        return values.double().numpy(force=True)

    # Cut.

    def gone(self, kept: Indices) -> Indices:
        """The numbers of the units that do not stay, ascending."""
        return np.setdiff1d(np.arange(len(self)), kept)

    @classmethod
    @abstractmethod
    def cut(cls, model: "UnitModel", kept: Mapping["Units", Indices], remove: bool) -> Cuts:
        """What goes if only some units stay.

        Args:
            model: dense.
            kept: the numbers of the units that stay.
            remove: the others are removed; else they are set to zero, and experts are closed in
                their router.

        Raises:
            UserError: a unit cannot be left out while all shapes stay, or config.json has no
                number for such units.
        """

    # Fitted.

    @abstractmethod
    def fitted(self, kept: Indices) -> dict[Target, Indices]:
        """The matrices whose weights a refit moves, and the inputs of each that belong to the
        other units.
        """

    @classmethod
    @abstractmethod
    def refit(
        cls,
        kept: Mapping["Units", Indices],
        model: PreTrainedModel,
        tokens: Tensor,
        update: Update,
        updated: UpdatedWeights,
        **options: Any,
    ) -> None:
        """Move the fitted matrices of all units of a model; `options` are those of `update_model`.
        A collective call.
        """

    # Compared with the dense model.

    @abstractmethod
    def without(self, model: PreTrainedModel, kept: Indices) -> AbstractContextManager[Any]:
        """A context in which the dense model runs without the other units, apart from the inputs
        of `fitted`.
        """


@dataclass(frozen=True, eq=False)
class UnitModel:
    """A checkpoint and its units.

    Attributes:
        skeleton: its model without weights.
        structure: which units, and how they go.
        units: in the model's order.
    """

    skeleton: PreTrainedModel
    architecture: Architecture
    structure: Structure
    units: list[Units] = field(default_factory=list)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.architecture.checkpoint

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.skeleton.config.get_text_config()

    @property
    def targets(self) -> list[Target]:
        """All matrices of which a part goes with a unit."""
        return list(dict.fromkeys(target for units in self.units for target in units.targets))

    def path(self, name: str) -> tuple[str, ...]:
        """The path of a field of the text model in config.json."""
        name = getattr(self.config, "attribute_map", {}).get(name, name)
        nested = isinstance(self.checkpoint.config.get("text_config"), dict)
        return ("text_config", name) if nested else (name,)

    def shapes(self) -> dict[str, Shape]:
        """The shapes of all stored parameters and buffers of the dense model."""
        return _shapes_of(self.skeleton)

    def shapes_with(self, changes: Changes) -> dict[str, Shape] | None:
        """The shapes of the model of a changed config.json; None if its numbers do not fit
        together.
        """
        with TemporaryDirectory() as folder:
            write_json(
                Path(folder) / "config.json", changed_config(self.checkpoint.config, changes)
            )
            try:
                with torch.device("meta"):
                    config = type(self.skeleton.config).from_pretrained(folder)
                    return _shapes_of(type(self.skeleton)(config))
            except Exception:  # of the model's own code
                return None

    def config_of(self, cuts: Cuts) -> Changes | None:
        """The fields of config.json that change with the units that are removed; None if no change
        gives the smaller model.
        """
        return next((each for each in cuts.configs if self.shapes_with(each) == cuts.shapes), None)


def _shapes_of(model: PreTrainedModel) -> dict[str, Shape]:
    """Of all parameters and buffers in the state of a model, tied ones under each of their
    names.
    """
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def finite_sums_of_ranks(
    sums: dict[str, Tensor], what: str, dtypes: str = "float32"
) -> dict[str, Tensor]:
    """The sums of all ranks, by name. A collective call.

    Args:
        sums: of this rank.
        what: the subject of the error.
        dtypes: that the error recommends.

    Raises:
        UserError: a sum is not finite.
    """
    by_rank = ranks().gather(sums)
    total: dict[str, Tensor] = {
        name: sum(of_rank[name] for of_rank in by_rank) for name in by_rank[0]
    }
    for name, values in total.items():
        if not bool(torch.isfinite(values).all()):
            raise UserError(f"{name}: {what} are not finite. Load the model with --dtype {dtypes}.")
    return total


def changed_config(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of a configuration with some values replaced or added."""
    changed = copy.deepcopy(dict(config))
    for (*around, name), value in changes.items():
        holder = changed
        for outer in around:
            holder = holder[outer]
        holder[name] = value
    return changed
