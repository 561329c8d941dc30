"""The architecture of a checkpoint's model: its layers, their names in the checkpoint, and the choice of targets."""

import logging
import math
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from emp_llm.architecture.conventional import conventional_structure
from emp_llm.architecture.layers import Layer, Tower, is_router, tower_of
from emp_llm.architecture.structure import Structure, structure_of_model, structure_of_names
from emp_llm.architecture.targets import Coverage, Target, in_scope, is_named
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import FP8_DTYPE, PRUNABLE_DTYPES, Matrix, block_scales
from emp_llm.common.errors import UserError, shortened_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class Architecture:
    """The layers of a checkpoint's model, and their weights in the checkpoint.

    Args:
        checkpoint: the model.
        structure: of the model.
    """

    def __init__(self, checkpoint: Checkpoint, structure: Structure) -> None:
        self.checkpoint = checkpoint
        self.layers = structure.layers
        self._structure = structure

    @classmethod
    def of_model(cls, checkpoint: Checkpoint, model: "PreTrainedModel", blocks: str | None = None) -> "Architecture":
        """The architecture of a loaded model and its checkpoint; `blocks` as for `of_checkpoint`."""
        return cls(checkpoint, structure_of_model(model, checkpoint, blocks))

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, blocks: str | None = None, trust_remote_code: bool = False, names_suffice: bool = False
    ) -> "Architecture":
        """The architecture of a checkpoint.

        Args:
            checkpoint: the model.
            blocks: name of the list of decoder blocks; None: detected.
            trust_remote_code: run code from the model's folder.
            names_suffice: for a model without a known class, derive the layers from the names in the checkpoint.

        Raises:
            UserError: transformers has no class for the model, or the checkpoint lacks some of its weights.
        """
        conventional = conventional_structure(checkpoint, blocks)
        if conventional is not None:
            return cls(checkpoint, conventional)
        from emp_llm.architecture.skeleton import NoModelClassError, build_skeleton

        try:
            return cls.of_model(checkpoint, build_skeleton(checkpoint.folder, trust_remote_code), blocks)
        except NoModelClassError as error:
            if not names_suffice:
                raise
            logger.warning("%s Its layers are derived from the names of its tensors.", error)
            return cls(checkpoint, structure_of_names(checkpoint, error.reads_text))

    def select(self, targets: str | list[str], ignore: str | list[str] | None = None, tower: str = "language") -> list[Target]:
        """The targets that match a specification, in the model's order.

        Args:
            targets: "mlp", "attention", "all-linear"; name suffixes, as a list or separated by commas; or a regular
                expression for the whole module name. Heads and embeddings match only if their name is written out.
            ignore: name suffixes or a regular expression of modules to leave out.
            tower: the part of a multimodal model, "language", "vision" or "all".

        Raises:
            UserError: nothing matches, the model has no such tower, a regular expression is invalid, or a weight is not stored
                as a 16-, 32- or 64-bit floating-point matrix.
        """
        self._check_tower(tower)
        matching = [layer for layer in self.layers if in_scope(layer, targets)]
        if ignore:
            matching = [layer for layer in matching if not is_named(layer, ignore)]
        chosen = [layer for layer in matching if self._in(tower, layer.tower)]
        target_at: dict[tuple[str, int | None], Target] = {}
        for layer in chosen:
            matrix = self._matrix(layer)
            if matrix is None:
                continue
            place = matrix.stored.name, matrix.expert
            if place in target_at:
                logger.warning("%s shares its weight with %s; it is pruned once.", layer.name, target_at[place].name)
                continue
            if layer.kind == "head" and matrix.stored.name in self._stored_embeddings:
                logger.warning("warning: %s is tied to the embeddings (%s); both change.", layer.name, matrix.stored.name)
            target_at[place] = Target(layer, matrix)
        if not target_at:
            self._refuse_no_match(targets, ignore, tower, [layer.name for layer in matching])
        return list(target_at.values())

    def coverage(self, targets: list[Target], tower: str = "language") -> Coverage:
        """The share of the model that these targets cover; `tower` as for `select`."""
        in_blocks = [target for target in targets if target.layer.block is not None]
        blocks = {name: sizes for name, sizes in self._in_blocks.items() if self._in(tower, self._tower_of(name))}
        unreachable = tuple(name for name in self._unreachable if name in blocks)
        return Coverage(
            targets=len(targets),
            targets_outside=len(targets) - len(in_blocks),
            matrices=sum(number for number, _ in blocks.values()),
            target_parameters=sum(target.matrix.numel for target in targets),
            targets_in_blocks=sum(target.matrix.numel for target in in_blocks),
            parameters=self.checkpoint.parameters,
            block_parameters=sum(weights for _, weights in blocks.values()),
            unreachable=unreachable,
            unreachable_parameters=sum(blocks[name][1] for name in unreachable),
            dense_towers=self._dense_towers(tower),
        )

    @property
    def stored_names(self) -> dict[str, str]:
        """Parameter -> stored tensor, for parameters stored one to one."""
        return self._structure.stored_names

    @property
    def reads_images(self) -> bool:
        """Whether the model has a tower for images."""
        return any(layer.tower == "vision" for layer in self.layers)

    def _in(self, choice: str, tower: Tower) -> bool:
        """Whether a choice of towers includes a tower. "language" means the tower of --blocks, if that names another."""
        return choice == "all" or tower == (self._structure.main if choice == "language" else choice)

    def _tower_of(self, name: str) -> Tower:
        return tower_of(self._structure.towers, name)

    def _dense_towers(self, tower: str) -> dict[str, int]:
        """Name -> number of parameters of each part outside the chosen tower."""
        roots = self._structure.towers
        sizes = dict.fromkeys(roots, 0)
        for name, shape in self._structure.shapes.items():
            root = next((root for root in roots if name == root or name.startswith(f"{root}.")), None)
            if root is not None:
                sizes[root] += math.prod(shape)
        dense = {root: size for root, size in sizes.items() if not self._in(tower, roots[root])}
        if roots and not self._in(tower, "language"):
            dense[self._structure.language or "language model"] = self.checkpoint.parameters - sum(sizes.values())
        return dense

    def _check_tower(self, tower: str) -> None:
        """Raise UserError if the model has no layers in a tower."""
        if any(self._in(tower, layer.tower) for layer in self.layers if layer.kind != "embedding"):
            return
        own = sorted({layer.tower for layer in self.layers})
        if own == ["language"]:
            raise UserError(
                f"--tower {tower}: {self.checkpoint.folder} reads only text and has no {tower} tower. Leave it out."
            )
        if own:
            raise UserError(
                f"--tower {tower}: {self.checkpoint.folder} has no {tower} tower; its layers belong to: {', '.join(own)}. To "
                "prune them by a magnitude method, add --tower all."
            )

    def _refuse_no_match(
        self, targets: str | list[str], ignore: str | list[str] | None, tower: str, elsewhere: list[str]
    ) -> NoReturn:
        asked = f"--targets {targets!r}{f' without {ignore!r}' if ignore else ''}"
        if elsewhere:
            raise UserError(f"{asked} match no layer of the {tower} tower, only {shortened_list(elsewhere)}. Add --tower all.")
        roles = sorted({layer.role for layer in self.layers if layer.block is not None})
        raise UserError(
            f"{asked} match nothing in {self.checkpoint.folder}. The layers of its blocks are: {', '.join(roles) or 'none'}."
            + (f" These weights belong to no layer: {shortened_list(self._unreachable)}." if self._unreachable else "")
        )

    def _matrix(self, layer: Layer) -> Matrix | None:
        if layer.expert is not None:
            matrix = self._structure.experts[layer.name]
        else:
            stored_name = self._structure.stored_names.get(f"{layer.name}.weight")
            if stored_name is None:
                logger.warning("%s: its weight is not a separate tensor in the checkpoint; it stays dense.", layer.name)
                return None
            matrix = Matrix(self.checkpoint.tensors[stored_name], layer.transposed)
        stored = matrix.stored
        if stored.dtype == FP8_DTYPE and len(stored.shape) == 2:
            matrix = replace(matrix, scales=block_scales(stored, self.checkpoint.tensors, self.checkpoint.config))
        elif stored.dtype not in PRUNABLE_DTYPES or len(stored.shape) != (2 if matrix.expert is None else 3):
            raise UserError(
                f"{stored.shard}: {stored.name} is stored as {stored.dtype} {list(stored.shape)}; only 16-, 32- and 64-bit "
                "floating-point matrices can be pruned. Prune the original model and quantise the result."
            )
        shape = stored.shape if layer.expert else self._structure.shapes.get(f"{layer.name}.weight", stored.shape)
        if shape != stored.shape:
            raise UserError(
                f"{self.checkpoint.folder}: {layer.name} has the shape {list(shape)} by config.json, and {list(stored.shape)} "
                "in the checkpoint; they do not belong together. Download the model again."
            )
        return matrix

    @cached_property
    def _stored_embeddings(self) -> set[str | None]:
        return {self._structure.stored_names.get(f"{layer.name}.weight") for layer in self.layers if layer.kind == "embedding"}

    @cached_property
    def _in_blocks(self) -> dict[str, tuple[int, int]]:
        """Name -> numbers of matrices and of weights, for each parameter of the decoder blocks that holds matrices."""
        layers = Counter(layer.parameter for layer in self.layers if layer.block is not None)
        tables = {layer.parameter for layer in self.layers if layer.kind == "embedding"}
        return {
            name: (layers[name] or math.prod(shape[:-2]), math.prod(shape))
            for name, shape in self._structure.block_shapes.items()
            if len(shape) >= 2 and min(shape) > 1 and "bias" not in name.rpartition(".")[2] and name not in tables
        }

    @cached_property
    def _unreachable(self) -> tuple[str, ...]:
        reached = {
            layer.parameter for layer in self.layers if layer.expert or f"{layer.name}.weight" in self._structure.stored_names
        }
        return tuple(name for name in self._in_blocks if name not in reached and not is_router(name))
