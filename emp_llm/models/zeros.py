"""The zeros of a pruned checkpoint: which of its weights stay."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.bits import booleans
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import FileReader
from emp_llm.checkpoint.headers import StoredTensor
from emp_llm.checkpoint.matrices import read_words, words_in
from emp_llm.checkpoint.packed_format import PackedCheckpoint, PackedFolder
from emp_llm.common.errors import UserError
from emp_llm.common.paths import PACK_NAME, REPORT_NAME
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.modules import rows_in
from emp_llm.options.recipe import Targets
from emp_llm.records.run_report import read_report


def read_kept(
    folder: Path, targets: str | list[str] | None = None, blocks: str | None = None
) -> dict[str, NDArray[np.bool_]]:
    """Parameter name -> bool array of its shape, true where a weight stays: the masks of a pruned
    checkpoint, for the class of its config.json. Arguments and errors are those of `masks_in`.
    """
    checkpoint, packed, scope = open_folder(folder, targets, blocks)
    architecture = Architecture.of_checkpoint(checkpoint, scope.blocks, names_suffice=True)
    chosen = architecture.targets_of(scope)
    shapes = {
        target.layer.parameter: architecture.shapes.get(
            target.layer.parameter, target.matrix.stored.shape
        )
        for target in chosen
    }
    return find_kept(checkpoint, chosen, shapes, packed)


def find_kept(
    checkpoint: Checkpoint,
    targets: list[Target],
    shapes: Mapping[str, tuple[int, ...]],
    packed: PackedFolder | None,
) -> dict[str, NDArray[np.bool_]]:
    """Parameter name -> bool array of its shape, true where a weight stays. A weight is removed if
    no bit of it is set.

    Args:
        checkpoint, packed: as of `open_folder`.
        targets: of the checkpoint; shapes: of their parameters, by name.
    """
    by_tensor: dict[str, list[Target]] = defaultdict(list)
    for target in targets:
        by_tensor[target.matrix.stored.name].append(target)
    parameters = {name: np.ones(shape, dtype=np.bool_) for name, shape in shapes.items()}
    for name, of_tensor in by_tensor.items():
        stored = checkpoint.tensors[name]
        kept = _stored_mask(packed, stored).reshape(stored.shape)
        for target in of_tensor:
            matrix = kept if target.matrix.expert is None else kept[target.matrix.expert]
            rows_in(parameters[target.layer.parameter], target.layer)[:] = (
                matrix.T if target.matrix.transposed else matrix
            )
    return parameters


def open_folder(
    folder: Path, targets: str | list[str] | None, blocks: str | None
) -> tuple[Checkpoint, PackedFolder | None, Targets]:
    """A pruned checkpoint, its packed folder if it is one, and its targets."""
    packed = PackedFolder(folder) if (folder / PACK_NAME).is_file() else None
    checkpoint = Checkpoint(folder) if packed is None else PackedCheckpoint(packed)
    return checkpoint, packed, _scope(folder, targets, blocks)


def _scope(folder: Path, targets: str | list[str] | None, blocks: str | None) -> Targets:
    """The targets and blocks: those given, or else those of the run."""
    if (folder / REPORT_NAME).is_file():
        scope = read_report(folder).recipe.targets
    elif targets is None:
        raise UserError(
            f"{folder}: without {REPORT_NAME} its targets are unknown. Name them, for "
            "example targets='mlp'."
        )
    else:
        scope = Targets()
    if targets is not None:
        scope = replace(scope, layers=targets, ignore=None)
    return scope if blocks is None else replace(scope, blocks=blocks)


def _stored_mask(packed: PackedFolder | None, stored: StoredTensor) -> NDArray[np.bool_]:
    """The mask of all words of a stored tensor, in one dimension."""
    if packed is not None:
        shard = next(shard for shard in packed.shards.values() if shard.path == stored.shard)
        return booleans(shard.mask(stored), words_in(stored))
    with FileReader(stored.shard) as file:
        kept: NDArray[np.bool_] = read_words(file, stored, 0, words_in(stored)) != 0
    return kept
