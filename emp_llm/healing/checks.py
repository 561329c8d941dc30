"""What is known of a healing before it: whether it is possible, its memory and its disk."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError, count_of
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import MOST_STEPS, Heal
from emp_llm.records.corpus import Corpus
from emp_llm.walk.checks import check_update, held_out

SEQUENCES = 4  # of a step
SET_ASIDE = 16  # sequences that choose the step, at most
POSITIONS = 32  # of a sequence whose probabilities are in memory in float32 at a time
# Of a weight on disk, at most: the best, the last and the next checkpoint, each with its value and
# two moments in bfloat16.
HEALING_BYTES = 3 * 8


def check_healable(config: Any, targets: Sequence[Target] | None = None) -> None:
    """Raise UserError if weights cannot be trained: because of the model's config, or of how
    targets are stored.
    """
    from emp_llm.models.loading import headless_class

    if targets is not None:
        check_update(targets, "--heal", "Leave out --heal")
    if config.get("is_encoder_decoder"):
        raise UserError(
            "--heal is for decoders, and this model has an encoder too. Leave out --heal."
        )
    if (name := headless_class(config)) is not None:
        raise UserError(
            f"--heal learns the probabilities of tokens, and {name} has no head for "
            "them. Leave out --heal."
        )


def check_trains(samples: int, length: int) -> None:
    """Raise UserError for a text of too few sequences for a step, or of a single token each."""
    if length < 2:
        raise UserError(
            "--heal: a sequence of 1 token has no next token to predict. Give a higher --seqlen."
        )
    if samples <= SEQUENCES:
        raise UserError(
            f"--heal: the text has {count_of(samples, 'sequence')}, and {SEQUENCES + 1} are "
            f"needed: {SEQUENCES} for a step, and one that is held out. Give more --samples, or a "
            "lower --seqlen."
        )


def set_aside(sequences: int) -> int:
    """How many sequences of a text choose the step, and are not trained on: one of sixteen, and at
    most 16.
    """
    return min(SET_ASIDE, held_out(sequences))


def sequences_for(steps: int) -> int:
    """How many sequences `steps` steps read if none is read twice."""
    return SEQUENCES * steps + SET_ASIDE


def in_steps(heal: Heal, corpora: Sequence[Corpus]) -> Heal:
    """The same healing with the steps that read its tokens.

    Args:
        corpora: its text; all have the same seqlen.

    Raises:
        UserError: the tokens are too few for a step, or too many.
    """
    if heal.tokens is None:
        return heal
    length = corpora[0].seqlen or 0
    of_step = SEQUENCES * length
    if not of_step <= heal.tokens <= MOST_STEPS * of_step:
        raise UserError(
            f"--heal-tokens {heal.tokens:g}: a step reads {SEQUENCES} sequences of {length:,} "
            f"tokens. Give {of_step:,} to {MOST_STEPS * of_step:,}."
        )
    return replace(heal, steps=int(heal.tokens // of_step), tokens=None)


def healing_weights(checkpoint: Checkpoint, targets: Sequence[Target], heal: Heal) -> int:
    """An upper bound on the number of weights that healing moves."""
    return (
        checkpoint.parameters
        if heal.weights == "all"
        else sum(target.matrix.numel for target in targets)
    )


def healing_bytes(
    checkpoint: Checkpoint, targets: Sequence[Target], heal: Heal, by_blocks: bool
) -> int:
    """An upper bound on the disk that healing takes beside the output."""
    if by_blocks:  # the weights of finished blocks are kept
        return sum(target.matrix.numel * target.matrix.itemsize for target in targets)
    return HEALING_BYTES * healing_weights(checkpoint, targets, heal)
