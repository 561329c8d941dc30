"""`emp-llm pack MODEL OUTPUT`: a pruned checkpoint is packed without its zeros, or its mask
alone, for shipping.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import count_of, format_bytes

if TYPE_CHECKING:
    from emp_llm.checkpoint.packed import PackedSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """Result of packing.

    Attributes:
        output: the packed folder.
        sizes: before and after.
        seconds: time taken.
    """

    output: str
    sizes: "PackedSizes"
    seconds: float


@command
def pack(
    folder: Annotated[
        Path, Flag("Pruned checkpoint.", argument=True, metavar="MODEL", flag="--model")
    ],
    output: Annotated[Path, Flag("Folder to write.", argument=True, flag="--output")],
    *,
    zstd: Annotated[bool, Flag("Also compress values and masks (zstandard).")] = False,
    mask_only: Annotated[
        bool, Flag("Pack the mask without weights, for users who have the dense model.")
    ] = False,
    overwrite: Annotated[bool, Flag("Replace an existing folder at the output.")] = False,
) -> Packed:
    """Pack a pruned checkpoint into safetensors with one bit for every weight and the weights that
    are not zero.

    Packing is lossless: emp-llm unpack restores every file bit for bit. To unpack a folder that was
    packed with --mask-only, it needs the dense model (--base). Hidden files are left out.

    Returns the sizes before and after, and the time taken.

    Raises:
        UserError: the folder is no checkpoint, the output exists or cannot be written, zstandard is
            missing, or there are no zeros to mask.
    """
    from emp_llm.checkpoint.checkpoint import Checkpoint
    from emp_llm.checkpoint.matrices import need_zstandard
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.checkpoint.packed import PackLayout, most_bytes, other_files, pack_checkpoint

    started = time.monotonic()
    if zstd:
        need_zstandard("--zstd")
    checkpoint = Checkpoint(folder)
    layout = PackLayout(mask_only, zstd)
    files = other_files(checkpoint, layout)
    needed = most_bytes(checkpoint, layout, files)
    with OutputFolder(output, [folder], needed, overwrite) as out:
        out.begin({"packs": str(folder)})
        sizes = pack_checkpoint(checkpoint, layout, files, out.files)
        out.complete()
    if sizes.sparse == 0:
        logger.warning(
            "warning: %s has too few zeros to save space; pack is for pruned checkpoints.", folder
        )
    return Packed(str(output), sizes, round(time.monotonic() - started, 3))


def show(packed: Packed) -> None:
    """Print one line: the size before and after."""
    sizes = packed.sizes
    share = 100 * sizes.packed_bytes / sizes.dense_bytes
    print(
        f"{packed.output}: {format_bytes(sizes.dense_bytes)} of weights in "
        f"{format_bytes(sizes.packed_bytes)} ({share:.1f} %), {sizes.sparse} of "
        f"{count_of(sizes.tensors, 'tensor')} sparse; {format_bytes(sizes.file_bytes)} of other "
        f"files; {packed.seconds:.1f} s"
    )
