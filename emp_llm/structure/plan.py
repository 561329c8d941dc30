"""The plan of a structured run: the units of a checkpoint's model, their stored weights, and the shapes of smaller models."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.layers import Layer
from emp_llm.models.loading import read_config
from emp_llm.options.structure import HeadUnit
from emp_llm.structure.choice import Choice, Widths
from emp_llm.structure.smaller_config import Changes, Shapes, has_width_list, smaller_config, wanted_shapes
from emp_llm.structure.tensor_edits import TensorEdit, tensor_edits
from emp_llm.structure.units import UnitKind, Units, grouped, of_kinds, queries
from emp_llm.structure.wiring import find_units, hollow_model


class UnitPlan:
    """The heads and neurons of a model, found from its configuration. Nothing is written, and no weight is read.

    Args:
        folder: of the model.
        kinds: "heads", "neurons", or both.
        head_unit: "group": query heads with the keys and values that they share; "query": single query heads.
        blocks: name of the list of decoder blocks; None: detected.
        trust_remote_code: run code from the model's folder.

    Attributes:
        checkpoint, architecture: of the model.
        units: in the model's order.
        matrices: layer -> stored weight, for all their layers.

    Raises:
        UserError: the model has no such units, or they are stored in a form that cannot be pruned.
    """

    def __init__(
        self,
        folder: Path,
        kinds: Sequence[UnitKind],
        head_unit: HeadUnit = "group",
        blocks: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.checkpoint = Checkpoint(folder)
        if self.checkpoint.config.get("quantization_config") is not None:
            raise UserError(f"{folder}: it is quantised, and --structure needs plain weights. Prune the original model.")
        self._config, self._auto = read_config(folder, trust_remote_code)
        self._trust = trust_remote_code
        model = hollow_model(lambda: self._build(self._config))
        if getattr(self._config, "is_encoder_decoder", False):
            raise UserError(f"{folder}: --structure is for decoder-only models, and this one has an encoder.")
        self.architecture = Architecture.of_model(self.checkpoint, model, blocks)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
        found = of_kinds(find_units(self.architecture, model, blocks), kinds)
        self.units = [each if each.kind == "neurons" else self._heads(each, head_unit) for each in found]
        self._check(kinds, model)
        self.matrices = self._matrices()

    @property
    def parameters(self) -> int:
        """The number of weights in the matrices of all units."""
        return sum(matrix.numel for matrix in self.matrices.values())

    @cached_property
    def width_list(self) -> bool:
        """Whether config.json has a width for each layer."""
        return has_width_list(self._config.to_dict())

    def widths(self, multiple: int) -> Widths:
        """How removed units must leave the layers."""
        return Widths(multiple, self.width_list)

    def changes(self, choices: Sequence[Choice]) -> Changes:
        """The fields of config.json that change if units are removed; UserError if it has none for them."""
        wanted = wanted_shapes(self._shapes, choices)
        return smaller_config(self._config.to_dict(), choices, wanted, self._shapes_of)

    def edits(self, choices: Sequence[Choice]) -> dict[str, TensorEdit]:
        """The changes of the stored tensors, by name."""
        return tensor_edits(choices, self.matrices, self.architecture.stored_names, self.checkpoint.tensors)

    def _build(self, config: Any) -> Any:
        return self._auto.from_config(config, trust_remote_code=self._trust)

    def _shapes_of(self, values: dict[str, Any]) -> Shapes:
        """The shapes of the model that a configuration describes."""
        said = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # about configurations that do not fit, of which most are tried in vain
        try:
            with torch.device("meta"):
                model = self._build(type(self._config).from_dict(values))
        finally:
            transformers.logging.set_verbosity(said)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}

    def _heads(self, heads: Units, unit: HeadUnit) -> Units:
        try:
            return grouped(heads) if unit == "group" else queries(heads)
        except ValueError as error:
            raise UserError(f"{heads.name}: {error}; use --head-unit query.") from error

    def _check(self, kinds: Sequence[UnitKind], model: Any) -> None:
        """Raise UserError if units of a kind are missing."""
        words = {
            "heads": "no attention whose heads can be told apart (each head must read outputs of its own)",
            "neurons": "no MLP whose neurons can be told apart (a layer that reads one activation for each neuron)",
        }
        for kind in kinds:
            if not any(units.kind == kind for units in self.units):
                raise UserError(f"--structure {kind}: {type(model).__name__} has {words[kind]}.")

    def _matrices(self) -> dict[Layer, Matrix]:
        wanted = {layer for units in self.units for layer in units.layers}
        chosen = {t.layer: t.matrix for t in self.architecture.select("all-linear", tower="all") if t.layer in wanted}
        missing = next((layer for layer in wanted if layer not in chosen), None)
        if missing is not None:
            raise UserError(f"{missing.name}: its weight is not stored by itself, so its units cannot be pruned.")
        scaled = next((layer for layer, matrix in chosen.items() if matrix.scales is not None), None)
        if scaled is not None:
            raise UserError(f"{scaled.name} is stored in FP8, and --structure needs plain weights. Use the unquantised model.")
        return chosen
