"""The options of `prune` that no other command has, and the conflicts between its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options
from emp_llm.options.calibration import NormOptions, Propagate
from emp_llm.options.evaluation import EvaluationStageOptions
from emp_llm.options.model import LoadingOptions, QuantizationOptions
from emp_llm.options.output import MaskDevice, PushOptions
from emp_llm.options.recipe import SEARCHES, Recipe, check_choice
from emp_llm.options.structure import StructureOptions, check_structured


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """The output of `prune`, and how it is made."""

    output: Annotated[Path | None, Opt("Folder to write; default: MODEL-METHOD in the current folder.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing checkpoint at the output, and on the Hub.")] = False
    dry_run: Annotated[bool, Opt("Print the plan of the run, and write nothing.")] = False
    propagate: Annotated[Propagate, Opt("Calibrate each block on the outputs of dense or of pruned blocks.")] = "dense"
    mask_device: Annotated[MaskDevice, Opt("Device that computes the masks: cpu or cuda. They are the same on both.")] = "cpu"


def check_options(
    recipe: Recipe,
    structure: StructureOptions,
    text: NormOptions,
    loading: LoadingOptions,
    quantized: QuantizationOptions,
    evaluation: EvaluationStageOptions,
    push: PushOptions,
    output: OutputOptions,
) -> None:
    """Raise UserError for invalid or conflicting options."""
    structure.check_structure()
    if structure.structure is not None:
        check_structured(recipe, structure, text, output.propagate, quantized.load_in_8bit or quantized.load_in_4bit)
        loading.check_loading()
        text.check_calibration()
        evaluation.check_evaluation()
        push.check_push()
        return
    if recipe.name == "taylor":
        raise UserError(f"--method {recipe.method} scores heads and neurons, not weights. Add --structure, or use emp-wanda.")
    recipe.check()
    loading.check_loading()
    text.check_calibration()
    evaluation.check_evaluation()
    push.check_push()
    check_choice(output.propagate, Propagate, "propagate")
    check_choice(output.mask_device, MaskDevice, "mask_device")
    by_bitsandbytes = quantized.load_in_8bit or quantized.load_in_4bit
    leave_out = "leave out --load-in-8bit and --load-in-4bit."
    if output.propagate == "pruned":
        if text.execution == "model":
            raise UserError("--propagate pruned works block by block; leave out --execution model.")
        if text.activations is not None:
            raise UserError("--propagate pruned collects its norms itself; leave out --activations.")
        if by_bitsandbytes:
            raise UserError(f"--propagate pruned cannot set quantised weights to zero; {leave_out}")
        recipe.check_propagated()
    if recipe.updates:
        searches = recipe.name in SEARCHES
        if by_bitsandbytes:
            raise UserError(f"{recipe.update_flag} cannot change quantised weights; {leave_out}")
        if text.calibration is None and text.activations is not None:
            raise UserError(
                f"{recipe.update_flag} fits weights to the calibration text, and --activations holds only its norms. Leave out "
                f"--activations{'' if searches else ', or --refit'}; or name the text with --calibration."
            )
        if text.calibration is None and not searches and not recipe.needs_activations:
            raise UserError(
                f"--refit fits weights to a calibration text, and method {recipe.method} needs none. Leave out --refit, or "
                "name the text with --calibration."
            )
