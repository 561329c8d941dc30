"""`emp-llm calibrate`: text -> activations.safetensors."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.paths import SELF_NAME
from emp_llm.common.progress import load_packages
from emp_llm.options.recipe import Recipe, Targets
from emp_llm.options.shared import (
    CalibrationOptions,
    LoadingOptions,
    ModelOptions,
    QuantizationOptions,
    Some,
    parse_list,
)
from emp_llm.selection.criteria import RELATIVE, STATISTICS

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations

logger = logging.getLogger(__name__)


@command
def calibrate(
    model: ModelOptions,
    text: CalibrationOptions,
    layers: Annotated[Targets, Some("ignore", "tower", "blocks", "allow_partial")],
    loading: LoadingOptions,
    quantized: QuantizationOptions,
    *,
    targets: Annotated[
        str | list[str], Flag("Layers, as for prune; the default covers any later choice.")
    ] = "all-linear",
    statistics: Annotated[
        str | None,
        Flag(
            "Further statistics, for criteria of your own: mean, variance, maximum, separated by "
            "commas."
        ),
    ] = None,
    output: Annotated[Path, Flag("Activations file to write.")] = Path("activations.safetensors"),
    overwrite: Annotated[bool, Flag("Replace an existing output.")] = False,
) -> "Activations":
    """Run a text through a model and write the 2-norm of every input feature of its linear layers.

    The text passes through the model once; the file serves any number of prune runs
    (--activations). Under torchrun or accelerate launch, every process runs its share of the text,
    and the first writes the file.

    Returns the norms.
    """
    load_packages()
    from emp_llm.calibration.data import calibration_data, keep_generated
    from emp_llm.calibration.passes import calibration_signature
    from emp_llm.checkpoint.checkpoint import Checkpoint, check_agreement
    from emp_llm.checkpoint.output import OutputFile, check_output_file
    from emp_llm.common.machine import Stopwatch
    from emp_llm.common.ranks import ranks
    from emp_llm.models.architecture import Architecture, check_calibrated, check_coverage
    from emp_llm.models.local_model import find_model
    from emp_llm.models.one_model import OneModel
    from emp_llm.models.placement import parse_device_map, quantization_of
    from emp_llm.pruning.counts import Chosen
    from emp_llm.runs import run as runs

    scope = Targets(
        targets, layers.ignore, layers.tower, layers.blocks, allow_partial=layers.allow_partial
    )
    parse_device_map(loading.device_map)
    quantization = quantization_of(quantized.load_in_8bit, quantized.load_in_4bit)
    further = [] if statistics is None else parse_list(statistics, "--statistics")
    unknown = next((name for name in further if name not in STATISTICS), None)
    if unknown is not None:
        raise UserError(f"--statistics: {unknown!r} is not one of {', '.join(STATISTICS)}.")
    check_output_file(output, overwrite)
    source = find_model(model.model, model.revision, model.trust_remote_code)
    trust = model.trust_remote_code
    checkpoint = Checkpoint(source.folder)
    architecture = Architecture.of_checkpoint(checkpoint, layers.blocks, trust)
    selected = architecture.targets_of(scope)
    chosen = [target for target in selected if target.layer.purpose != "embedding"]
    coverage = architecture.coverage(chosen, layers.tower)
    check_coverage(coverage, targets, layers.allow_partial)
    calibrated_layers = [target.layer for target in chosen]
    check_calibrated(calibrated_layers)
    models = OneModel(loading.device_map, loading.dtype, trust)
    run = runs.Run(
        source=source,
        recipe=Recipe(targets=scope),
        chosen=Chosen(architecture, chosen, coverage),
        options=text,
        text=calibration_data(text, architecture, models, quantization=quantization),
        path=output,
        models=models,
        stopwatch=Stopwatch(),
        quantization=quantization,
    )
    signature = calibration_signature(run.data, text, quantization=quantization)
    check_agreement(signature, model=checkpoint)
    with OutputFile(output) as out:
        collected = [RELATIVE.name, *further]
        norms = runs.calibrate(run, calibrated_layers, collected, out.progress)
        if ranks().main:
            norms.save(output)
        keep_generated(output.with_suffix(f".{SELF_NAME.name}"), run.text)
        out.complete()
    texts = [record.name for record in norms.about.all_texts]
    logger.info(
        "%s: norms of %s of %s over %s tokens of %s.",
        output,
        count_of(len({*norms.input_of.values()}), "input"),
        count_of(len(norms.input_of), "layer"),
        f"{run.data.number:,}",
        " and ".join(texts),
    )
    return norms
