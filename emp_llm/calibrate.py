"""`emp-llm calibrate`: text -> activations.safetensors."""

import logging
from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.common.errors import count_of
from emp_llm.options.base import takes
from emp_llm.options.commands import CalibrateOptions

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations, NormsDifference
    from emp_llm.models.architecture import Architecture
    from emp_llm.models.layers import Layer

logger = logging.getLogger(__name__)


@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> "Activations | NormsDifference":
    """Run a text through a model and write the 2-norm of every input feature of its linear layers.

    The text passes through the model once; the file serves any number of prune runs (--activations). Under torchrun or
    accelerate launch, every process runs its share of the text, and the first writes the file.

    Returns the norms; with `compare`, the differences of two files, and no model is run.
    """
    from emp_llm.calibration.activations import compare_norms
    from emp_llm.calibration.data import calibration_data
    from emp_llm.calibration.passes import calibrated, model_origin
    from emp_llm.checkpoint.checkpoint import Checkpoint
    from emp_llm.checkpoint.output import OutputFile, check_output_file
    from emp_llm.common.progress import progress_of
    from emp_llm.common.ranks import ranks
    from emp_llm.hub.local_model import find_model
    from emp_llm.models.architecture import Architecture
    from emp_llm.models.loading import load_model
    from emp_llm.models.placement import parse_device_map, quantization_of

    options.check()
    if options.compare is not None:
        return compare_norms(*options.compare)
    parse_device_map(options.device_map)
    quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
    check_output_file(options.output, options.overwrite)
    source = find_model(options.model, options.revision, options.trust_remote_code)
    checkpoint = Checkpoint(source.folder)
    architecture = Architecture.of_checkpoint(checkpoint, options.blocks, options.trust_remote_code)
    layers = _layers(options, architecture)
    data = calibration_data(options, architecture, options.trust_remote_code)
    with OutputFile(options.output) as output, progress_of("calibrate"):
        about = model_origin(source.name, source.revision, checkpoint, quantization)
        model = load_model(source.folder, options.device_map, options.dtype, options.trust_remote_code, quantization)
        norms = calibrated(model, data, layers, options, about, blocks=options.blocks, resume=output.progress)
        if ranks().main:
            norms.save(options.output)
            output.complete()
    told = [f"{text.file or text.dataset}" for text in norms.about.all_texts]
    counts = f"{count_of(len(norms.norms), 'input')} of {count_of(len(norms.input_of), 'layer')}"
    logger.info("%s: norms of %s over %s tokens of %s.", options.output, counts, f"{data.number:,}", " and ".join(told))
    return norms


def _layers(options: CalibrateOptions, architecture: "Architecture") -> "list[Layer]":
    """The layers of the options; with images, all linear layers include those of the vision tower."""
    from emp_llm.calibration.data import check_images
    from emp_llm.calibration.texts import has_images
    from emp_llm.models.architecture import check_calibrated

    selected = architecture.select(options.targets, options.ignore, options.tower)
    chosen = [target for target in selected if target.layer.kind != "embedding"]
    architecture.coverage(chosen, options.tower).check(options.targets, options.allow_partial)
    with_images = has_images(options.text_name)
    if with_images:
        check_images(architecture, options)
        if (options.targets, options.tower) == ("all-linear", "language"):
            chosen += architecture.select("all-linear", options.ignore, "vision")
    layers = [target.layer for target in chosen]
    check_calibrated(layers, with_images)
    return layers


def show(result: "Activations | NormsDifference") -> None:
    """Print the differences of two files. A calibration prints nothing."""
    from emp_llm.calibration.activations import NormsDifference, difference_table

    if isinstance(result, NormsDifference):
        print(difference_table(result))


callable_module(__name__)

if __name__ == "__main__":
    run(calibrate, show)
