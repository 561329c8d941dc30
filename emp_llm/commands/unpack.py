"""`emp-llm unpack MODEL OUTPUT`: a packed checkpoint is restored bit for bit, or a mask is
applied to its base model.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, count_of, format_bytes


@dataclass(frozen=True)
class Unpacked:
    """Result of unpacking.

    Attributes:
        folder: the model folder.
        bytes, files: total size and number of its files.
        seconds: time taken.
    """

    folder: str
    bytes: int
    files: int
    seconds: float


@command
def unpack(
    packed: Annotated[
        Path,
        Flag("Folder written by emp-llm pack.", argument=True, metavar="MODEL", flag="--model"),
    ],
    folder: Annotated[
        Path, Flag("Model folder to write.", argument=True, metavar="OUTPUT", flag="--output")
    ],
    *,
    base: Annotated[str | None, Flag("For a mask: folder or Hub id of the dense model.")] = None,
    revision: Annotated[
        str | None, Flag("Branch, tag or commit of a dense model from the Hub.")
    ] = None,
    overwrite: Annotated[bool, Flag("Replace an existing model folder at the output.")] = False,
) -> Unpacked:
    """Restore a packed checkpoint: every file bit for bit, checked by its hash.

    Returns the folder, its size, and the time taken.

    Raises:
        UserError: a packed file is damaged, the base of a mask is missing or is another model, the
            output exists or cannot be written, or zstandard is missing.
    """
    from emp_llm.checkpoint.checkpoint import Checkpoint
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.checkpoint.packed import PackedFolder, check_base, unpack_folder
    from emp_llm.models.local_model import find_model

    if revision is not None and base is None:
        raise UserError(
            f"--revision {revision} is of the dense model; name that with --base, or leave it out."
        )
    started = time.monotonic()
    source = PackedFolder(packed)
    dense = None if base is None else Checkpoint(find_model(base, revision).folder)
    check_base(source, dense)
    sources = [packed] if dense is None else [packed, dense.folder]
    with OutputFolder(
        folder, sources, source.bytes, overwrite, known=[*source.shards, *source.files]
    ) as out:
        out.begin({"unpacks": str(packed)})
        files = unpack_folder(source, dense, out.files)
        out.complete()
    return Unpacked(str(folder), source.bytes, files, round(time.monotonic() - started, 3))


def show(unpacked: Unpacked) -> None:
    """Print one line: the folder and its size."""
    written = f"{count_of(unpacked.files, 'file')}, {format_bytes(unpacked.bytes)}"
    print(f"{unpacked.folder}: {written}; {unpacked.seconds:.1f} s")
