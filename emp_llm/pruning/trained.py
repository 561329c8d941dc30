"""A model that may have been trained after it was pruned: whether its removed weights are zero, and
whether others have changed.
"""

from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import PIECE
from emp_llm.checkpoint.matrices import PRUNABLE_DTYPES, WORD, Words, as_tensor, word_bytes
from emp_llm.common.errors import count_of
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.masks import Masks
from emp_llm.models.modules import rows_in
from emp_llm.pruning.verification import Findings


def digests(architecture: Architecture) -> dict[str, str]:
    """Parameter, or stored tensor of experts -> BLAKE3 of its values, rounded to bfloat16: a
    conversion to another dtype does not count as a change.
    """
    stored = dict(architecture.stored_names)
    stored |= {name: name for name in {m.stored.name for m in architecture.experts.values()}}
    tensors = architecture.checkpoint.tensors
    found: dict[str, str] = {}
    with architecture.checkpoint.open_files() as files:
        for name in set(stored.values()):
            tensor = tensors[name]
            reader = files.reader(tensor.shard)
            digest = blake3()
            for first in range(tensor.start, tensor.end, PIECE):
                piece: Words = reader.take(first, min(PIECE, tensor.end - first))
                if tensor.dtype in PRUNABLE_DTYPES and tensor.dtype != "BF16":
                    values = as_tensor(piece.view(WORD[word_bytes(tensor)]), tensor.dtype)
                    piece = values.bfloat16().view(torch.uint8).numpy()
                digest.update(piece.data)
            found[name] = digest.hexdigest()
    return {name: found[place] for name, place in stored.items()}


def check_zeros(
    checkpoint: Checkpoint, targets: list[Target], masks: Masks, findings: Findings
) -> None:
    """Check that every weight that masks remove is zero in a checkpoint.

    Args:
        targets: of the checkpoint; masks: by parameter name.
    """
    kept_in: dict[str, NDArray[Any]] = {}
    with checkpoint.open_files() as files:
        for target in targets:
            findings.checked["targets"] += 1
            name = target.layer.parameter
            matrix = target.matrix
            if name not in masks:
                findings.differences.append(f"{target.name}: it was not pruned.")
                continue
            if name not in kept_in:
                kept_in = {name: masks[name].numpy()}  # one at a time
            kept = rows_in(kept_in[name], target.layer)
            if kept.shape != (matrix.rows, matrix.columns):
                findings.differences.append(f"{target.name}: it has another shape.")
                continue
            words = matrix.read(files.reader(matrix.stored.shard), 0, matrix.rows)
            wrong = words[~kept]
            number = int(np.count_nonzero(wrong))
            if number:
                value = "not zero" if np.any(wrong << 1) else "-0.0, whose bits are not zero"
                findings.differences.append(
                    f"{target.name}: {count_of(number, 'removed weight')} "
                    f"{'is' if number == 1 else 'are'} {value}."
                )
