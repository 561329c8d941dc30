"""`emp-llm export MODEL`: a checkpoint as one file for another program."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.cli import command
from emp_llm.common.declared import Opt
from emp_llm.common.errors import UserError, count_of, format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        output: the file.
        bytes: its size.
        dense_bytes: the size of the checkpoint's shards.
        tensors: their number in the file.
        seconds: time taken.
    """

    output: str
    bytes: int
    dense_bytes: int
    tensors: int
    seconds: float


@command
def export(
    model: Annotated[
        str,
        Opt("Folder or Hub id of a pruned or dense model.", argument=True, flag="--model"),
    ],
    *,
    to: Annotated[Literal["gguf"], Opt("Format of the file: gguf, of llama.cpp.")] = "gguf",
    type: Annotated[
        Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] | None,
        Opt("Type of the matrices. Default: that of the checkpoint."),
    ] = None,
    output: Annotated[
        Path | None, Opt("File to write. Default: NAME-TYPE.gguf in the working folder.")
    ] = None,
    revision: Annotated[str | None, Opt("Branch, tag or commit of a model from the Hub.")] = None,
    overwrite: Annotated[bool, Opt("Replace an existing file at the output.")] = False,
) -> Exported:
    """Write a checkpoint as one GGUF file, for llama.cpp and programs built on it.

    The file holds the weights, tokenizer, chat template and the report of the pruning. A model with
    fewer heads, neurons, experts or layers is smaller and faster there; zeros are stored as other
    weights are.

    Returns the file, its size, and the time taken.

    Raises:
        UserError: no such model, another family, quantised or packed weights, a tokenizer that
            llama.cpp has no name for, the output exists or cannot be written, or gguf is missing.
    """
    from emp_llm.checkpoint.checkpoint import Checkpoint
    from emp_llm.checkpoint.output import OutputFile, check_output_file, check_space
    from emp_llm.hub.local_model import find_model

    try:
        from emp_llm.runtime.gguf_file import GGUFFile, partials
    except ImportError as error:
        raise UserError("--to gguf needs the package gguf. Install it: pip install gguf") from error
    started = time.monotonic()
    source = find_model(model, revision)
    checkpoint = Checkpoint(source.folder)
    file = GGUFFile(checkpoint, type, source.short_name)
    path = Path(f"{source.short_name}-{file.type}.gguf") if output is None else output
    check_output_file(path, overwrite)
    check_space(path, file.nbytes - sum(partial.stat().st_size for partial in partials(path)))
    if zeros := file.zeros:
        logger.warning(
            "warning: %.0f %% of the pruned layers are zeros, and GGUF stores them: the file is as "
            "large as the dense model's, and no faster. emp-llm pack leaves them out.",
            100 * zeros,
        )
    if file.unquantised:
        logger.warning(
            "warning: the rows of %s do not fill blocks of 32 and are stored in float16, such as "
            "%s. Prune with --width-multiple 32.",
            count_of(len(file.unquantised), "matrix", "matrices"),
            file.unquantised[0],
        )
    with OutputFile(path) as out:
        file.write(path)
        out.complete()
    return Exported(
        str(path),
        path.stat().st_size,
        sum(shard.stat().st_size for shard in checkpoint.shards),
        len(file.tensors),
        round(time.monotonic() - started, 3),
    )


def show(exported: Exported) -> None:
    """Print one line: the file and its size."""
    size = f"{format_bytes(exported.bytes)}, {exported.bytes / exported.dense_bytes:.1%}"
    print(f"{exported.output}: {size} of the checkpoint; {exported.seconds:.1f} s")
