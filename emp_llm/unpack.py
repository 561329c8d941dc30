"""`python -m emp_llm.unpack OUT DIR`: the checkpoint that was packed, bit for bit, or a mask put on its base model."""

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from emp_llm.cli import run
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.output import OutputFolder
from emp_llm.models.packed import PackedFolder
from emp_llm.models.unpacking import Unpacker
from emp_llm.services.hub import find_model
from emp_llm.services.terminal import size


def unpack(
    packed: Annotated[Path, Argument(metavar="OUT", help="Folder that emp_llm.pack wrote.")],
    folder: Annotated[Path, Argument(metavar="DIR", help="Model folder to write.")],
    base: Annotated[str | None, Option(help="For a mask: folder or Hub id of the model that was pruned.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a base from the Hub.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older model folder at DIR.")] = False,
) -> dict[str, Any]:
    """Unpack a packed checkpoint: every file as it was, bit for bit, checked by its hash.

    Returns "bytes" and "files" written, and "seconds".

    Raises:
        UserError: a packed file is damaged, a mask comes without its base or with another model, DIR exists or cannot be
            written, or zstandard is missing.
    """
    started = time.monotonic()
    source = PackedFolder(Path(packed))
    dense = Checkpoint(find_model(base, revision).folder) if base is not None else None
    unpacker = Unpacker(source, dense)
    sources = [source.folder] if dense is None else [source.folder, dense.folder]
    with OutputFolder(folder, sources, source.bytes, overwrite, "DIR") as out:
        out.begin({"unpacks": str(packed)})
        written = unpacker.write(out.files)
        out.publish()
    return written | {"folder": str(folder), "seconds": round(time.monotonic() - started, 3)}


def show(written: dict[str, Any]) -> None:
    """One line: what was written."""
    print(f"{written['folder']}: {written['files']} files, {size(written['bytes'])}; {written['seconds']:.1f} s")


if __name__ == "__main__":
    run(unpack, show)
