"""`emp-llm prune`: checkpoint (+ activations) -> pruned checkpoint, and a report."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from emp_llm.cli import callable_module, run
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import ACTIVATIONS_NAME, REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.options.base import Opt, Options, takes
from emp_llm.options.calibration import NormOptions, Propagate
from emp_llm.options.evaluation import EvaluationStageOptions
from emp_llm.options.model import LoadingOptions, ModelOptions, QuantizationOptions
from emp_llm.options.output import MaskDevice, PushOptions
from emp_llm.options.recipe import Recipe, check_choice
from emp_llm.options.structure import StructureOptions

if TYPE_CHECKING:
    from emp_llm.pruning.chosen import Chosen
    from emp_llm.pruning.dry_run import DryRun
    from emp_llm.pruning.scores import Scores
    from emp_llm.records.run_report import RunReport

logger = logging.getLogger(__name__)
_WARNINGS = 6  # that are logged; the report has all


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """The output of `prune`, and how it is made."""

    output: Annotated[Path | None, Opt("Folder to write; default: MODEL-METHOD in the current folder.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing checkpoint at the output, and on the Hub.")] = False
    dry_run: Annotated[bool, Opt("Print the plan of the run, and write nothing.")] = False
    propagate: Annotated[Propagate, Opt("Calibrate each block on the outputs of dense or of pruned blocks.")] = "dense"
    mask_device: Annotated[MaskDevice, Opt("Device that computes the masks: cpu or cuda. They are the same on both.")] = "cpu"


@takes(
    ModelOptions,
    Recipe,
    StructureOptions,
    NormOptions,
    LoadingOptions,
    QuantizationOptions,
    EvaluationStageOptions,
    PushOptions,
    OutputOptions,
)
def prune(
    model: ModelOptions,
    recipe: Recipe,
    structure: StructureOptions,
    text: NormOptions,
    loading: LoadingOptions,
    quantized: QuantizationOptions,
    evaluation: EvaluationStageOptions,
    push: PushOptions,
    output: OutputOptions,
) -> "RunReport | DryRun":
    """Prune a causal language model after training and write the pruned checkpoint.

    Under torchrun or accelerate launch, every process runs its share of the calibration and of the evaluation, and the first
    writes the checkpoint. Quantisation is for the calibration pass; the masks are applied to the original weights.

    Returns the report that is also written as emp_report.json, with the result of a push as `push`; for a dry run, the plan
    and its need of memory and disk.
    """
    if structure.structure is not None:
        from emp_llm.structure.prune_structure import prune_structure

        return prune_structure(model, recipe, structure, text, loading, quantized, evaluation, push, output)
    _check(recipe, structure, text, loading, quantized, evaluation, push, output)
    from emp_llm.calibration.given_norms import given_norms, may_reach_images, warn_if_foreign
    from emp_llm.checkpoint.shards import write_manifest, write_shards
    from emp_llm.common.stages import stage
    from emp_llm.common.timing import Stopwatch
    from emp_llm.hub.local_model import find_model
    from emp_llm.models.one_model import OneModel
    from emp_llm.pruning.chosen import targets_of_folder
    from emp_llm.pruning.counts import counts_of, matched, read_report
    from emp_llm.pruning.masks import Pruner, check_device
    from emp_llm.pruning.outcome import recipe_in_force, report_of
    from emp_llm.pruning.scores import Scores, input_norms
    from emp_llm.records.source import ModelSource, stage_records
    from emp_llm.storage.output.output_folder import OutputFolder

    check_device(output.mask_device)
    norms, stopwatch = given_norms(text, recipe), Stopwatch()
    destination, suite = _destination(push, output.overwrite), _suite(evaluation)
    source = find_model(model.model, model.revision, model.trust_remote_code)
    if (source.folder / REPORT_NAME).is_file():
        logger.warning(
            "warning: %s is already pruned. Its zeros count as weights of the rows, with the lowest scores.", source.name
        )

    # Which weights, by which scores.
    images = recipe.needs_activations and may_reach_images(text)
    chosen = targets_of_folder(source.folder, source.name, recipe, model.trust_remote_code, images)
    targets, checkpoint = chosen.targets, chosen.checkpoint
    recipe = matched(recipe, targets)
    update, scores = recipe.update, Scores(checkpoint, targets, recipe)
    if norms is not None:
        scores = scores.with_norms(input_norms(norms, targets, recipe.relative, str(text.activations)))
    if update is not None:
        _check_updatable(recipe, chosen)
    path = output.output or Path(f"{source.short_name}-{recipe.method}")
    if output.dry_run:
        from emp_llm.pruning.dry_run import dry_run

        return dry_run(chosen, scores, text, output.propagate, path, output.overwrite, push.push_to_hub)

    # What is needed later is checked now: the login, the text, the suite.
    if destination is not None and ranks().main:
        from emp_llm.hub.push import check_login

        check_login(destination)
    models = OneModel(loading.device_map, loading.dtype, model.trust_remote_code, stopwatch)
    quantization, data = _quantization(quantized), None
    if update is not None or (recipe.needs_activations and norms is None):
        data = _data(text, chosen, recipe, output.propagate, model.trust_remote_code)
    signature = _signature(chosen, recipe, norms, data, text, output.propagate, quantization, loading)
    prepared = _prepared(suite, source, model.trust_remote_code)
    if prepared is not None and _resumes_evaluation(path, signature):
        report = read_report(path)
    else:
        moved_bytes = sum(target.matrix.numel * target.matrix.itemsize for target in targets) if update is not None else 0
        out = OutputFolder(path, [source.folder], checkpoint.output_bytes + moved_bytes, output.overwrite)
        ranks().share(None)  # a barrier: all ranks check the output before the first rank creates it
        with out if ranks().main else nullcontext():
            if ranks().main:
                out.begin(signature)

            # Norms of the inputs. With pruned propagation, the masks of a block are decided before the next is calibrated.
            about = None if norms is None else norms.about
            masker = Pruner(scores, counts_of(scores), output.mask_device) if output.propagate == "pruned" else None
            if recipe.needs_activations and norms is None:
                with stage("calibrate"):
                    norms = _calibrated(models, source, chosen, data, text, recipe, quantization, masker, out, stopwatch)
                about = norms.about
                scores = scores.with_norms(input_norms(norms, targets, recipe.relative))

            # How many weights of each group stay, and which.
            counts = masker.counts if masker is not None else counts_of(scores)
            pruner, moved = Pruner(scores, counts, output.mask_device), None
            if update is not None:
                with stage("refit"):
                    moved, origin = _moved(models, source, pruner, update, data, text, recipe, out, stopwatch)
                about = about or origin
            if prepared is None:
                models.free()  # the dense model is no longer needed

            # The first rank writes.
            report = None
            if ranks().main:
                with stage("prune"), stopwatch("prune"):
                    outcomes, identity, hashes = write_shards(pruner, out, moved)
                if text.activations is not None and norms is not None:
                    warn_if_foreign(norms, identity, source.folder)
                origin_of = ModelSource(model=source.name, revision=source.revision, identity=identity)
                report = report_of(origin_of, recipe, pruner, outcomes, chosen.coverage, about)
                report.dtype, report.device_map = loading.dtype, loading.device_map
                report.stages = stage_records(stopwatch.record)
                if moved is not None:
                    report.fits = moved.records()
                    report.warnings = [*update_warnings(report.fits, targets, update), *report.warnings]
                report.save(out.files / REPORT_NAME)
                digest = None if norms is None else norms.digest
                write_manifest(out.files, checkpoint, identity, recipe_in_force(recipe, pruner), digest, hashes)
                if prepared is not None:
                    mark_pending(out.files, signature)
                out.put_in_place()
            report = ranks().share(report)
        _log_warnings(report.warnings)

    if prepared is not None:
        from emp_llm.evaluation.evaluate import evaluate_checkpoint

        report = evaluate_checkpoint(path, source, report, prepared, models, loading, stopwatch, evaluation.baseline)
    if destination is not None and ranks().main:
        from emp_llm.hub.push import push_finished

        with stage("push"):
            report.push = push_finished(path, destination)
    times = ", ".join(f"{name} {entry.seconds:.1f} s" for name, entry in report.stages.items())
    logger.info("written to %s (%s)", path, times)
    return report
