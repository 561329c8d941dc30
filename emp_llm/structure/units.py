"""Units: what goes as a whole, and the config.json of the model that is left."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import write_json
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.layers import Shape
from emp_llm.models.loading import take_own_widths

Indices = NDArray[np.int64]
# The names of a field of config.json and of the parts around it -> its new value.
Changes = dict[tuple[str, ...], Any]


@dataclass(frozen=True, eq=False)
class Units:
    """The heads of one attention, the neurons of one MLP or expert, the experts of one block, or
    all decoder layers.

    Attributes:
        kind: what they are.
        name: of the layer that reads heads or neurons; of the module of all experts; of the list of
            layers.
        role: the name within the block, shared by the units of all blocks.
        block: number of their block.
        places: number of the group to which each belongs, shape (units,). Where units are removed,
            as many stay in every group. All 0 if units are taken from all.
        least: how many stay at least in every group.
        targets: all matrices of which a part goes with a unit. Of heads and neurons, the layer that
            reads them is the last.
        multiple_of: the role of the units whose number divides theirs: config.json has the width of
            a shared expert as a number of routed ones. Empty for all others.
    """

    kind: Literal["heads", "neurons", "experts", "layers"]
    name: str
    role: str
    block: int
    places: Indices
    least: int
    targets: list[Target]
    multiple_of: str = field(default="", kw_only=True)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, eq=False)
class UnitModel:
    """A checkpoint and its units.

    Attributes:
        skeleton: its model without weights.
        units: in the model's order.
        width_by_block: whether each block may have a number of neurons or heads of its own.
        per_layer: config.json gets them as `per_layer_config`.
    """

    skeleton: PreTrainedModel
    architecture: Architecture
    units: list[Units]
    width_by_block: bool = False
    per_layer: bool = False

    @property
    def checkpoint(self) -> Checkpoint:
        return self.architecture.checkpoint

    @property
    def targets(self) -> list[Target]:
        """All matrices of which a part goes with a unit."""
        return list(dict.fromkeys(target for units in self.units for target in units.targets))


def sums_of_ranks(sums: dict[str, Tensor], what: str, dtypes: str = "float32") -> dict[str, Tensor]:
    """The sums of all ranks, by name. A collective call.

    Args:
        sums: of this rank.
        what: the subject of the error.
        dtypes: that the error recommends.

    Raises:
        UserError: a sum is not finite.
    """
    shares = ranks().gather(sums)
    total: dict[str, Tensor] = {name: sum(share[name] for share in shares) for name in shares[0]}
    for name, each in total.items():
        if not bool(torch.isfinite(each).all()):
            raise UserError(f"{name}: {what} are not finite. Load the model with --dtype {dtypes}.")
    return total


def field_path(skeleton: PreTrainedModel, config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The path of a field of the text model in a config.json."""
    name = getattr(skeleton.config.get_text_config(), "attribute_map", {}).get(name, name)
    return ("text_config", name) if isinstance(config.get("text_config"), dict) else (name,)


def smaller_model(
    skeleton: PreTrainedModel, config: Mapping[str, Any], changes: Changes
) -> dict[str, Shape] | None:
    """The shapes of the tensors of a changed config.json's model; None if its numbers do not fit
    together.
    """
    with TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", changed_config(config, changes))
        take_own_widths(type(skeleton))
        try:
            with torch.device("meta"):
                smaller: Any = type(skeleton)(type(skeleton.config).from_pretrained(folder))
        except Exception:  # of the model's own code
            return None
    return shapes_of(smaller)


def shapes_of(model: PreTrainedModel) -> dict[str, Shape]:
    """The shapes of all stored parameters and buffers of a model, tied ones under each of their
    names.
    """
    return {name: tuple(each.shape) for name, each in model.state_dict().items()}


def changed_config(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of a configuration with some values replaced or added."""
    changed = copy.deepcopy(dict(config))
    for (*parts, name), value in changes.items():
        part = changed
        for outer in parts:
            part = part[outer]
        part[name] = value
    return changed
