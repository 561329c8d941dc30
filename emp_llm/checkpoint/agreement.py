"""Ranks on machines with disks of their own: whether all of them read the same inputs."""

import json
import socket
from collections.abc import Mapping
from typing import Any

from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.output import first_difference
from emp_llm.common.errors import UserError, quotable
from emp_llm.common.machine import versions
from emp_llm.common.ranks import ranks

_LONGEST = 40  # letters of a value


def check_agreement(made_of: Mapping[str, Any], **checkpoints: Checkpoint) -> None:
    """Check that all ranks read the same inputs, before a model runs. A collective call.

    Weights are compared by size, inode and change time, which one disk gives all ranks; where
    these differ, by their hashes. One rank of each machine computes and caches them.

    Args:
        made_of: what the results of this rank depend on beside weights and versions, as JSON.
        checkpoints: of the models that it reads, by their names in the message.

    Raises:
        UserError: on all ranks; a rank reads something else than the first.
    """
    if ranks().count == 1:
        return
    mine = {
        "weights": _weights(checkpoints),
        "config": {name: checkpoint.config for name, checkpoint in checkpoints.items()},
        **made_of,
        "versions": versions(),
    }
    host = socket.gethostname()
    found = ranks().gather((host, json.loads(json.dumps(mine))))
    first_host, first = found[0]
    for number, (other_host, other) in enumerate(found):
        difference = first_difference(first, other)
        if difference is not None:
            field, before, now = difference
            field = "text (its token ids)" if field in ("ids", "training") else field
            raise UserError(
                f"{field}: rank {number} on {other_host} has {_shown(now)}, and rank 0 on "
                f"{first_host} has {_shown(before)}. All ranks must read the same. Copy the files "
                "of rank 0 to every machine, or let all machines share one folder."
            )


def _weights(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """What tells the weights of this rank from those of the others."""
    states = {name: checkpoint.states for name, checkpoint in checkpoints.items()}
    folders = [str(checkpoint.folder.resolve()) for checkpoint in checkpoints.values()]
    found = ranks().gather((states, socket.gethostname(), folders))
    if all(other == states for other, *_ in found):
        return states
    # Of the ranks of one machine that read the same files, the first hashes them.
    first = found.index(found[ranks().index])
    hashes = None
    if first == ranks().index:
        hashes = {name: identity_of(checkpoint) for name, checkpoint in checkpoints.items()}
    result: dict[str, Any] = ranks().gather(hashes)[first]
    return result


def _shown(value: Any) -> str:
    text = quotable(str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
