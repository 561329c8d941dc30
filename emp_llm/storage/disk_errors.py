"""Disk and network errors as sentences that say how to resume."""

import errno
from collections.abc import Sequence
from pathlib import Path

from emp_llm.common.errors import UserError, reason

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of disks, networks and permissions. Other system errors are defects of the program.
_FAULTS = {
    *_FULL,
    *(errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENXIO, errno.ENODEV, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ECONNRESET, errno.ENOLCK),
}


def how_to_resume(kept: Sequence[Path]) -> str:
    """A sentence on resuming from the work in these folders; empty if none of them exists."""
    folders = " and ".join(str(path) for path in kept if path.is_dir())
    return f"Finished work is kept in {folders}; the same command resumes from there." if folders else ""


def explain_disk_error(
    error: BaseException | None, output: Path, kept: Sequence[Path], option: str = "--output"
) -> UserError | None:
    """The UserError for an error of the disk or network; None for any other error.

    Args:
        output: the path that was being written.
        kept: folders that may hold finished work.
        option: the option that names the output.
    """
    if not isinstance(error, OSError) or error.errno not in _FAULTS:
        return None
    problem = f"{error.filename or 'a file'} cannot be read or written ({reason(error)})."
    if error.errno in _FULL:
        problem = f"the disk is full. Free some space, or choose another {option}."
    return UserError(f"{option} {output}: {problem} {how_to_resume(kept)}".rstrip())
