"""`python -m emp_llm.pack DIR OUT`: a pruned checkpoint without its zeros, or its mask alone, to ship."""

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from emp_llm.cli import run
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.output import OutputFolder
from emp_llm.models.packed import Manner
from emp_llm.models.packing import Packer
from emp_llm.services.terminal import size


def pack(
    folder: Annotated[Path, Argument(metavar="DIR", help="Pruned checkpoint.")],
    output: Annotated[Path, Argument(metavar="OUT", help="Folder to write.")],
    zstd: Annotated[bool, Option("--zstd", help="Compress values and masks too (zstandard).")] = False,
    mask_only: Annotated[
        bool, Option("--mask-only", help="Which weights are zero, and no weights: for those who have the model itself.")
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older folder at OUT.")] = False,
) -> dict[str, Any]:
    """Pack a pruned checkpoint into safetensors that hold a bit for every weight and the weights that are not zero.

    Nothing is lost: python -m emp_llm.unpack gives every file back, bit for bit. With --mask-only it needs the model that was
    pruned beside it (--base). Hidden files are left out. The format is described in emp_llm/models/packed.py.

    Returns the sizes: "dense_bytes" and "packed_bytes" of the weights' files, "file_bytes" of the others, "tensors", how many
    of them are "sparse", and "seconds".

    Raises:
        UserError: DIR is no checkpoint, OUT exists or cannot be written, zstandard is missing, or there is nothing to mask.
    """
    started = time.monotonic()
    packer = Packer(Checkpoint(Path(folder)), Manner("mask" if mask_only else "weights", "zstd" if zstd else "raw"))
    with OutputFolder(output, [folder], packer.largest, overwrite, "OUT") as out:
        out.begin({"packs": str(folder)})
        sizes = packer.write(out.files)
        out.publish()
    return sizes | {"output": str(output), "seconds": round(time.monotonic() - started, 3)}


def show(sizes: dict[str, Any]) -> None:
    """One line: how large before, and after."""
    dense, packed = sizes["dense_bytes"], sizes["packed_bytes"]
    print(
        f"{sizes['output']}: {size(dense)} of weights in {size(packed)} ({100 * packed / dense:.1f} %), {sizes['sparse']} of "
        f"{sizes['tensors']} tensors sparse; {size(sizes['file_bytes'])} of other files; {sizes['seconds']:.1f} s"
    )


if __name__ == "__main__":
    run(pack, show)
