"""What a disk or a network answers when it fails, said in a sentence that tells how to go on."""

import errno
from collections.abc import Sequence
from pathlib import Path

from emp_llm.models.errors import UserError, reason

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What disks, networks and permissions answer; other errors of the system are mistakes of the program.
_FAULTS = {
    *_FULL,
    *(errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENXIO, errno.ENODEV, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ECONNRESET, errno.ENOLCK),
}


def way_on(kept: Sequence[Path]) -> str:
    """How to go on with what is kept in some folders; nothing where there are none."""
    folders = " and ".join(str(path) for path in kept if path.is_dir())
    return f"What is finished is kept in {folders}; the same command goes on from there." if folders else ""


def explained(error: BaseException | None, output: Path, kept: Sequence[Path], option: str = "--output") -> UserError | None:
    """The UserError to raise for a failure of the system; None where it is something else.

    Args:
        output: what was being written.
        kept: folders that may hold finished work.
        option: what the output is called.
    """
    if not isinstance(error, OSError) or error.errno not in _FAULTS:
        return None
    what = f"{error.filename or 'a file'} cannot be read or written ({reason(error)})."
    if error.errno in _FULL:
        what = f"the disk is full. Free some space, or name an {option} elsewhere."
    return UserError(f"{option} {output}: {what} {way_on(kept)}".rstrip())
