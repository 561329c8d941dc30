"""Memory that runs out in a forward pass, said with where it was and which option to lower."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from emp_llm.models.errors import UserError


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a device or on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


@contextmanager
def enough_memory(where: Callable[[], tuple[str, torch.device]], batch: Tensor, or_else: str = "") -> Iterator[None]:
    """While this lasts, a UserError where memory runs out.

    Args:
        where: says what is running, and where.
        batch: token ids, int64, shape (sequences, length), that pass through it.
        or_else: what helps besides smaller batches (", or ...").
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        name, device = where()
        raise UserError(
            f"{name}: out of memory on {device} with {batch.shape[0]} sequences of {batch.shape[1]} tokens at a time. "
            f"Lower --batch-size, then --seqlen{or_else}."
        ) from error
