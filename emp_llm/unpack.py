"""`emp-llm unpack OUT DIR`: a packed checkpoint is restored bit for bit, or a mask is applied to its base model."""

import time
from dataclasses import dataclass

from emp_llm.cli import callable_module, run
from emp_llm.common.errors import count_of, format_bytes
from emp_llm.options.base import takes
from emp_llm.options.commands import UnpackOptions


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


@takes(UnpackOptions)
def unpack(options: UnpackOptions) -> Unpacked:
    """Restore a packed checkpoint: every file bit for bit, checked by its hash.

    Returns the folder, its size, and the time taken.

    Raises:
        UserError: a packed file is damaged, the base of a mask is missing or is another model, DIR exists or cannot be written,
            or zstandard is missing.
    """
    from emp_llm.checkpoint.checkpoint import Checkpoint
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.checkpoint.packed_format import PackedFolder
    from emp_llm.checkpoint.packing import check_base, unpack_folder
    from emp_llm.hub.local_model import find_model

    started = time.monotonic()
    packed = PackedFolder(options.packed)
    base = Checkpoint(find_model(options.base, options.revision).folder) if options.base is not None else None
    check_base(packed, base)
    sources = [packed.folder] if base is None else [packed.folder, base.folder]
    with OutputFolder(options.folder, sources, packed.bytes, options.overwrite, "DIR") as out:
        out.begin({"unpacks": str(options.packed)})
        files = unpack_folder(packed, base, out.files)
        out.complete()
    return Unpacked(str(options.folder), packed.bytes, files, round(time.monotonic() - started, 3))


def show(unpacked: Unpacked) -> None:
    """Print one line: the folder and its size."""
    written = f"{count_of(unpacked.files, 'file')}, {format_bytes(unpacked.bytes)}"
    print(f"{unpacked.folder}: {written}; {unpacked.seconds:.1f} s")


callable_module(__name__)

if __name__ == "__main__":
    run(unpack, show)
