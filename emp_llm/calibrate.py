"""`python -m emp_llm.calibrate`: text -> activations.safetensors."""

import logging
from pathlib import Path
from typing import Annotated

from typer import Option

from emp_llm.cli import run
from emp_llm.models.activations import Activations
from emp_llm.models.calibration import Calibration, calibration_corpus
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.errors import UserError
from emp_llm.models.loading import check_options, load_model, load_tokenizer, max_context, quantization_of
from emp_llm.models.norms import NormsDifference, compare_norms
from emp_llm.models.output import OutputFile
from emp_llm.models.propagation import Execution
from emp_llm.models.ranks import ranks
from emp_llm.models.targets import Architecture, build_skeleton
from emp_llm.services.hub import find_model
from emp_llm.services.options import (
    AllowPartial,
    Blocks,
    CalibrationText,
    DeviceMap,
    ExecutionMode,
    HiddenStatesPlace,
    Revision,
    Seed,
    Seqlen,
    TrustRemoteCode,
)
from emp_llm.services.terminal import show_difference

logger = logging.getLogger(__name__)


def calibrate(
    model: Annotated[str | None, Option(help="Model folder or Hub id.")] = None,
    output: Annotated[Path, Option(help="Activations file to write.")] = Path("activations.safetensors"),
    calibration: CalibrationText = "wikitext2",
    samples: Annotated[int | None, Option(help="Sequences; default: the recipe's.")] = None,
    seqlen: Seqlen = None,
    targets: Annotated[str, Option(help="Layers, as for prune; the default serves any later choice.")] = "all-linear",
    ignore: Annotated[str | None, Option(help="Layers to leave out, as for prune.")] = None,
    batch_size: Annotated[int, Option(help="Sequences to a forward pass.", min=1)] = 4,
    device_map: DeviceMap = "auto",
    dtype: Annotated[str, Option(help="Of the forward pass: auto, bfloat16, float16 or float32.")] = "auto",
    execution: ExecutionMode = "auto",
    hidden_states: HiddenStatesPlace = "auto",
    blocks: Blocks = None,
    load_in_8bit: Annotated[bool, Option("--load-in-8bit", help="Quantise for the forward pass (bitsandbytes).")] = False,
    load_in_4bit: Annotated[bool, Option("--load-in-4bit", help="Quantise for the forward pass (bitsandbytes).")] = False,
    allow_partial: AllowPartial = False,
    seed: Seed = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing output.")] = False,
    compare: Annotated[tuple[Path, Path] | None, Option(help="Only say by how much two activations files differ.")] = None,
) -> Activations | NormsDifference:
    """Run a text through a model and keep the 2-norm of every input feature of its linear layers.

    One pass through the dense model; the file serves any number of prune runs (--activations). Started by torchrun or
    accelerate launch, every process runs its share of the text, and the first writes the file.

    Returns what was collected; with `compare`, how two files differ, and nothing is run or written.
    """
    if compare is not None:
        if model is not None:
            raise UserError("--compare looks at two files and runs no model; leave out --model.")
        return compare_norms(*compare)
    if model is None:
        raise UserError("--model is missing: the folder or Hub id of the model to run.")
    output = Path(output)
    check_options(device_map, dtype)
    quantization = quantization_of(load_in_8bit, load_in_4bit)
    how = Execution(execution, "dense", hidden_states, blocks)
    how.check()
    if output.is_dir() or next(folder for folder in output.absolute().parents if folder.exists()).is_file():
        raise UserError(f"--output {output}: a file cannot be written there; name a file in a folder.")
    if output.exists() and not overwrite:
        raise UserError(f"--output {output}: it exists; name another file, or add --overwrite.")
    source = find_model(model, revision, trust_remote_code)
    checkpoint = Checkpoint(source.folder)
    architecture = Architecture(checkpoint, build_skeleton(source.folder, trust_remote_code), blocks)
    chosen = [target for target in architecture.select(targets, ignore) if target.layer.kind != "embedding"]
    architecture.coverage(chosen).check(targets, allow_partial)
    layers = [target.layer for target in chosen]
    tokenizer = load_tokenizer(source.folder, trust_remote_code)
    corpus = calibration_corpus(calibration, samples, seqlen, max_context(checkpoint.config))
    text = Calibration(checkpoint, tokenizer, corpus, seed)
    about = {"model": source.name, "revision": source.revision}
    with OutputFile(output) as out:
        loaded = load_model(source.folder, device_map, dtype, trust_remote_code, quantization)
        activations = text.run(loaded, layers, batch_size, about, how, resume=out.progress, quantization=quantization)
        if ranks().main:
            activations.save(output)
            out.publish()
    logger.info(
        "%s: norms of %d inputs of %d layers over %d tokens of %s.",
        output,
        len(activations.norms),
        len(activations.input_of),
        text.tokens.numel(),
        corpus.source,
    )
    return activations


def show(result: Activations | NormsDifference) -> None:
    """Print how two files differ; of a calibration there is nothing to print."""
    if isinstance(result, NormsDifference):
        show_difference(result)


if __name__ == "__main__":
    run(calibrate, show)
