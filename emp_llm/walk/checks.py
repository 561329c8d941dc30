"""What is known of a walk before and after it: its targets, memory and warnings."""

from collections.abc import Mapping, Sequence
from typing import Any

from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.records.run_report import FitRecord
from emp_llm.update.update import Update

MOMENT_BYTES = 2 << 30  # of the moments in memory at a time, unless a single input needs more


def held_out(sequences: int) -> int:
    """How many calibration sequences only measure: one of sixteen, and none of a single one."""
    return 0 if sequences < 2 else max(1, sequences // 16)


def updatable(targets: Sequence[Target]) -> list[Target]:
    """The targets whose kept weights can move: those in decoder blocks of the language model."""
    return [
        target
        for target in targets
        if target.layer.block is not None and target.layer.tower == "language"
    ]


def check_update(targets: Sequence[Target], option: str, instead: str) -> None:
    """Raise UserError if no target can be updated, or one is stored in a form that allows no other
    values.

    Args:
        targets: of the run.
        option: what asked for the update, such as "--refit".
        instead: what to do for a run without it, as the beginning of a sentence.
    """
    if not updatable(targets):
        raise UserError(
            f"{option} moves weights of the language model's decoder blocks, and no "
            f"target is in one. {instead}."
        )
    scaled = next((target for target in targets if target.matrix.scales is not None), None)
    if scaled is not None:
        raise UserError(
            f"{scaled.name} is stored in FP8, whose scales {option} would change. Use "
            "the unquantised model."
        )


def check_blocks_separable(config: Mapping[str, Any], option: str, instead: str) -> None:
    """Raise UserError if a model's blocks do not run apart: it has an encoder, or blocks that read
    the keys and values of earlier ones, as in Gemma 3n and Gemma 4.

    A walk runs each block several times, on dense and on pruned inputs, and does not keep what it
    left for later ones.

    Args:
        config: the content of config.json.
        option, instead: of `check_update`.
    """
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{option} runs block by block, which an encoder-decoder model cannot. {instead}."
        )
    shared = (config.get("text_config") or config).get("num_kv_shared_layers") or 0
    if shared:
        raise UserError(
            f"{option} runs block by block, and the model's last blocks read the keys and values "
            f"of earlier ones (num_kv_shared_layers is {shared}). {instead}."
        )


def update_bytes(targets: Sequence[Target], update: Update) -> int:
    """An upper bound on the memory of an update beside the model and the hidden states, in bytes.

    It holds the second moments of one level and the work memory of one solver; and of each weight
    of a block's targets its pruned and its moved version, its mask, and its dense value in float32.
    """
    by_block: dict[int | None, list[Target]] = {}
    for target in targets:
        by_block.setdefault(target.layer.block, []).append(target)
    most = 0
    for members in by_block.values():
        matrices = [target.matrix for target in members]
        # Moments with the outputs of a block have the shape of the matrix, in place of (inputs,
        # inputs).
        single = max(
            4 * matrix.columns * (matrix.columns + max(matrix.rows, matrix.columns))
            for matrix in matrices
        )
        several = (
            update.relative
            or not update.restores_dense  # all inputs of a block at a time
            or any(target.layer.routed for target in members)
        )
        together = sum(8 * matrix.columns**2 for matrix in matrices) if several else single
        work = max(update.workspace_bytes(matrix.rows, matrix.columns) for matrix in matrices)
        weights = sum(matrix.numel * (2 * matrix.itemsize + 1 + 4) for matrix in matrices)
        most = max(most, max(single, min(MOMENT_BYTES, together)) + work + weights)
    return most


def update_warnings(
    records: Mapping[str, FitRecord], targets: Sequence[Target], update: Update
) -> list[str]:
    """Sentences about targets that moved on weak grounds: left out, on few tokens, or with a higher
    damping than asked for.

    Args:
        records: of the updated targets, by name.
        targets: all of the run.
        update: of the run.
    """
    inputs = {target.name: target.matrix.columns for target in targets}
    total = len(records)
    left = [name for name, fit in records.items() if fit.damping is None]
    few = [name for name, fit in records.items() if name not in left and fit.tokens < inputs[name]]
    raised = {
        name: fit.damping
        for name, fit in records.items()
        if fit.damping is not None and fit.damping > update.damping_of(inputs[name], fit.tokens)
    }
    outside = [name for name in inputs if name not in records]
    warnings = []
    if outside:
        warnings.append(
            f"{len(outside)} of {len(inputs)} matrices lie outside the decoder blocks and were not "
            f"fitted, such as {outside[0]}."
        )
    if left:
        warnings.append(
            f"{len(left)} of {total} matrices saw too few tokens for a fit and keep their "
            f"weights, such as {left[0]}."
        )
    if few:
        warnings.append(
            f"{len(few)} of {total} matrices were fitted on fewer tokens than they have inputs, "
            f"such as {few[0]} ({records[few[0]].tokens} tokens, {inputs[few[0]]} inputs). Give "
            "more --samples."
        )
    if raised:
        warnings.append(
            f"the damping of {len(raised)} of {total} matrices was raised, up to "
            f"{max(raised.values()):g}, because their second moments are singular, such as "
            f"{next(iter(raised))}. Give more --samples, or a higher --refit-damping."
        )
    return warnings
