"""Targets: the weights chosen for pruning, and the share of the model that they cover."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from emp_llm.architecture.layers import Kind, Layer
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError, shortened_list

logger = logging.getLogger(__name__)

_SCOPES: dict[str, tuple[Kind, ...]] = {
    "mlp": ("mlp",),
    "attention": ("attention",),
    "all-linear": ("mlp", "attention", "other"),
}
_NAMES_ONLY = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")


@dataclass(frozen=True)
class Target:
    """A layer to prune, and its stored weight."""

    layer: Layer
    matrix: Matrix

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True)
class Coverage:
    """The share of a model that the targets cover.

    Attributes:
        targets: number of target matrices; targets_outside: of these, outside the decoder blocks.
        matrices: number of matrices in decoder blocks; the matrix of each expert counts as one.
        target_parameters, parameters: weights of the targets; parameters of the checkpoint.
        targets_in_blocks: weights of the targets in decoder blocks.
        block_parameters: weights of all matrices in decoder blocks.
        unreachable: parameters in blocks whose matrices cannot be targets; without routers, which are never pruned.
        unreachable_parameters: number of their weights.
        dense_towers: name of a part of a multimodal model that stays dense as a whole -> number of its parameters.
    """

    targets: int
    targets_outside: int
    matrices: int
    target_parameters: int
    targets_in_blocks: int
    parameters: int
    block_parameters: int
    unreachable: tuple[str, ...]
    unreachable_parameters: int
    dense_towers: dict[str, int] = field(default_factory=dict)

    @property
    def share_of_blocks(self) -> float | None:
        """The targets' share of the weights in decoder blocks; None without such weights."""
        return self.targets_in_blocks / self.block_parameters if self.block_parameters else None

    @property
    def unreachable_share(self) -> float:
        """The unreachable share of the weights in decoder blocks."""
        return self.unreachable_parameters / self.block_parameters if self.block_parameters else 0.0

    @property
    def dense_shares(self) -> dict[str, float]:
        """The share of each dense tower in the parameters of the checkpoint, the largest first."""
        largest_first = sorted(self.dense_towers.items(), key=lambda item: -item[1])
        return {name: number / (self.parameters or 1) for name, number in largest_first}

    def check(self, targets: str | list[str], allow_partial: bool) -> None:
        """Warn if layers in the scope cannot be pruned.

        Raises:
            UserError: they hold more than half of the weights in blocks, and `allow_partial` is false.
        """
        if targets not in ("mlp", "all-linear") or self.unreachable_share < 0.01:
            return
        problem = (
            f"{100 * self.unreachable_share:.0f} % of the weights in decoder blocks cannot be pruned "
            f"({shortened_list(self.unreachable)})"
        )
        if self.unreachable_share > 0.5 and not allow_partial:
            raise UserError(f"{problem}. To prune only the others, add --allow-partial.")
        logger.warning("warning: %s; they stay dense.", problem)


def in_scope(layer: Layer, targets: str | list[str]) -> bool:
    """Whether a specification matches a layer. Heads, embeddings and routers match only if their name is written out."""
    if isinstance(targets, str) and targets in _SCOPES:
        return layer.kind in _SCOPES[targets]
    if not is_named(layer, targets):
        return False
    written = targets if isinstance(targets, str) else ",".join(targets)
    written_out = re.search(rf"(?<!\w){re.escape(layer.leaf)}(?!\w)", written) is not None
    return layer.kind not in ("head", "embedding", "router") or written_out


def is_named(layer: Layer, names: str | list[str]) -> bool:
    """PEFT's rule: a list holds name suffixes; a string is such a list with commas, or a regex for the whole name."""
    if isinstance(names, str) and not _NAMES_ONLY.fullmatch(names):
        try:
            return re.fullmatch(names, layer.name) is not None
        except re.error as error:
            raise UserError(f"--targets or --ignore {names!r} is not a valid regular expression ({error}).") from error
    suffixes = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    return any(layer.name == suffix or layer.name.endswith(f".{suffix}") for suffix in suffixes)


def check_calibrated(layers: Iterable[Layer], with_images: bool = False) -> None:
    """Raise UserError if a layer is in a tower that the calibration data does not reach.

    Args:
        with_images: the data holds images besides text, and so reaches the vision tower.
    """
    reached = ("language", "vision") if with_images else ("language",)
    beside = next((layer for layer in layers if layer.tower not in reached), None)
    if beside is None:
        return
    remedy = "Use a magnitude method, which needs none."
    if beside.tower == "vision":
        remedy = (
            "Calibrate on images too, by --calibration DATA,image=COLUMN, or use a magnitude method, which needs none; or in "
            "Python, give batches with images to prune_model."
        )
    raise UserError(
        f"{beside.name} is in the {beside.tower} tower. Calibration runs on text{' and images' if with_images else ''}, "
        f"so this tower has no input activations. {remedy}"
    )
