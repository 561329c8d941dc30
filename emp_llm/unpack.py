"""`python -m emp_llm.unpack OUT DIR`: the checkpoint that was packed, bit for bit, or a mask put on its base model."""

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from emp_llm.cli import run
from emp_llm.models.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from emp_llm.models.packed import MANIFEST_NAME, PackedFolder
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.models.staging import Staging, check_space
from emp_llm.models.unpacking import Unpacker
from emp_llm.services.hub import find_model
from emp_llm.services.terminal import size


def unpack(
    packed: Annotated[Path, Argument(metavar="OUT", help="Folder that emp_llm.pack wrote.")],
    folder: Annotated[Path, Argument(metavar="DIR", help="Model folder to write.")],
    base: Annotated[str | None, Option(help="For a mask: folder or Hub id of the model that was pruned.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a base from the Hub.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older model folder.")] = False,
) -> dict[str, Any]:
    """Unpack a packed checkpoint: every file as it was, bit for bit, each tensor checked by its digest.

    Returns "bytes" and "files" written, and "seconds".
    """
    started = time.monotonic()
    source = PackedFolder(packed)
    dense = Checkpoint(find_model(base, revision).folder) if base is not None else None
    unpacker = Unpacker(source, dense)
    sources = [packed] if dense is None else [packed, dense.folder]
    known = (MANIFEST_NAME, INDEX_NAME, SINGLE_NAME, REPORT_NAME)
    with Staging(folder, sources, overwrite, known) as staging:
        check_space(folder, source.bytes)
        written = unpacker.write(staging.partial)
        staging.publish()
    return written | {"folder": str(folder), "seconds": round(time.monotonic() - started, 3)}


def show(written: dict[str, Any]) -> None:
    """One line: what was written."""
    print(f"{written['folder']}: {written['files']} files, {size(written['bytes'])}; {written['seconds']:.1f} s")


if __name__ == "__main__":
    run(unpack, show)
