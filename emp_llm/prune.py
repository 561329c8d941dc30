"""`emp-llm prune`: checkpoint (+ activations) -> pruned checkpoint, and a report."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.cli import command, run
from emp_llm.common.errors import UserError
from emp_llm.common.machine import Stopwatch, machine_name
from emp_llm.common.paths import REPORT_NAME, ROTATION_NAME, SELF_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import ranks
from emp_llm.options.base import Given
from emp_llm.options.prune import PruneOptions, check_options, check_wanted, structured
from emp_llm.options.recipe import ByCost, Effective, Recipe, Share, StructureRecipe
from emp_llm.options.words import RecipeOptions
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource, stage_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emp_llm.evaluation.loss_budget import Judged
    from emp_llm.pruning.dry_run import DryRun
    from emp_llm.reporting.push import Destination
    from emp_llm.walk.moved import MovedWeights

logger = logging.getLogger(__name__)


@command
def prune(
    recipe: RecipeOptions, structure: StructureRecipe, options: PruneOptions, given: Given
) -> "RunReport | DryRun":
    """Prune a causal language model after training and write the pruned checkpoint.

    Under torchrun or accelerate launch, every process runs its share of the calibration and of the
    evaluation, and the first writes the checkpoint. Quantisation is for the calibration pass; the
    masks are applied to the original weights.

    Returns the report that is also written as emp_report.json, with the result of a push as `push`;
    for a dry run, the plan and its need of memory and disk.
    """
    check_options(recipe, structure, options, given)
    asked = recipe if structure.structure is None else structured(recipe, structure)
    if options.loss is None:
        return _pruned(asked.tree, options, given)
    if ranks().count > 1:
        raise UserError(
            "--loss runs in one process. Start it without torchrun; --device-map spreads a large "
            "model over devices."
        )
    load_packages()
    from emp_llm.evaluation.loss_budget import prune_to_loss

    def to(chosen: Recipe, how: PruneOptions, judged: "Judged") -> RunReport:
        report = _pruned(chosen, how, given, judged)
        assert isinstance(report, RunReport)
        return report

    return prune_to_loss(asked.tree, options, given, to)


def _pruned(
    recipe: Recipe,
    options: PruneOptions,
    given: Given,
    judged: "Judged | None" = None,
) -> "RunReport | DryRun":
    """Prune by options that are checked.

    Args:
        judged: of a run whose sparsity --loss has found.
    """
    from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.hub.local_model import find_model
    from emp_llm.models.one_model import OneModel
    from emp_llm.models.placement import parse_device_map, quantization_of
    from emp_llm.pruning.budget import Budget, with_budget
    from emp_llm.pruning.chosen import targets_of_folder
    from emp_llm.pruning.counts import check_groups, counts_of, matched, read_report
    from emp_llm.pruning.dry_run import DryRun, dry_run
    from emp_llm.pruning.masks import Pruner, check_device
    from emp_llm.pruning.outcome import log_warnings, pruned_before, report_of
    from emp_llm.pruning.scores import Scores, recorded
    from emp_llm.pruning.starving import starving_rows
    from emp_llm.pruning.writing import run_signature, write_checkpoint, write_manifest
    from emp_llm.walk.checks import check_apart, check_update, update_warnings

    budget = Budget.of(options.parameters, options.memory)
    check_device(options.mask_device)
    if options.device_map != "auto":
        parse_device_map(options.device_map)
    destination = None
    suite = None
    if options.push_to_hub is not None:
        from emp_llm.reporting.push import Destination, check_login

        destination = Destination(
            options.push_to_hub, options.push_revision, options.private, options.overwrite
        )
        destination.check_name()
        if ranks().main and not options.dry_run:
            check_login(destination)
    if recipe.structure is not None:
        load_packages()
        from emp_llm.structure.prune_structure import prune_structure

        of_units, path = prune_structure(recipe, options, given, judged)
        return of_units if isinstance(of_units, DryRun) else _pushed(of_units, path, destination)
    norms = given_norms(options, recipe, given) if judged is None else judged.norms
    stopwatch = Stopwatch()
    if options.evaluate is not None:
        from emp_llm.evaluation.suites import find_suite

        suite = find_suite(options.evaluate)
    source = find_model(
        options.model, options.revision, options.trust_remote_code, headers_suffice=options.dry_run
    )
    if (source.folder / REPORT_NAME).is_file():
        logger.warning("%s", pruned_before(source.name, recipe))
    if (
        (source.folder / ROTATION_NAME).is_file()
        and isinstance(recipe.counts, Effective)
        and recipe.counts.beta is not None
        and recipe.needs_activations
        and budget is None
    ):
        logger.warning(
            "warning: %s is rotated, and beta removes more there than it can lose; give "
            "--sparsity.",
            source.name,
        )

    # Which weights, by which scores.
    chosen = targets_of_folder(
        source.folder, source.name, recipe, options.trust_remote_code, calibrates=norms is None
    )
    targets = chosen.targets
    checkpoint = chosen.checkpoint
    if budget is not None:
        recipe = with_budget(recipe, budget, checkpoint, targets)
        logger.info("%s is a sparsity of %.4f of the targets.", budget.flag, recipe.counts.sparsity)
    recipe = matched(recipe, targets)
    check_groups(recipe, targets)
    update = recipe.update
    if update is not None:
        check_update(targets, recipe.update_flag, recipe.without_update)
        check_apart(checkpoint.config, recipe.update_flag, recipe.without_update)
    scores = Scores(checkpoint, targets, recipe)
    if norms is not None:
        scores = scores.with_activations(norms, str(options.activations))
    path = options.output or Path(f"{source.short_name}-{recipe.method}")
    if options.dry_run:
        # Is only checked.
        OutputFolder(path, [source.folder], checkpoint.output_bytes, overwrite=True)
        return dry_run(chosen, scores, options, path, source.hollow)

    # What is needed later is checked now: the output, the text, the suite.
    if suite is None or not path.exists():  # else `pending_matches` decides
        out = OutputFolder(path, [source.folder], checkpoint.output_bytes, options.overwrite)
        out.check_leftover(run_signature(checkpoint, recipe, None))
    quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
    calibrates = norms is None
    models = OneModel(options.device_map, options.dtype, options.trust_remote_code, stopwatch)
    data = None
    by_cost = isinstance(recipe.counts, Share) and isinstance(recipe.counts.shares, ByCost)
    scored = recipe.needs_activations or by_cost  # costs are those of Wanda's masks
    if recipe.moves or by_cost or (scored and calibrates):
        load_packages()
        from emp_llm.calibration.activations import keep_norms, kept_norms
        from emp_llm.calibration.data import FURTHER, calibration_data, keep_generated
        from emp_llm.calibration.passes import (
            calibrated,
            calibration_signature,
            delete_progress,
            fit_origin,
            model_origin,
        )
        from emp_llm.evaluation.loss_budget import HELD_OUT

        data = calibration_data(
            options,
            chosen.architecture,
            options.trust_remote_code,
            options.propagate,
            models,
            quantization,
            further=HELD_OUT if by_cost else FURTHER,
        )
    further = getattr(data, "further", None) if judged is None else judged.tokens
    if by_cost:
        from emp_llm.evaluation.block_shares import removed_by_cost, with_removed
        from emp_llm.evaluation.loss_budget import LossCurve, deciding

        to_decide = deciding(further, options.text_name, "--shares cost")
        assert further is not None
        further = further[2::3]
    if judged is None:
        check_wanted(options, given, data)
    if update is not None:
        from emp_llm.pruning.updates import check_updatable, move_weights, moved_weights

        check_updatable(recipe, chosen)
    if recipe.heal is not None:
        from emp_llm.in_memory.healing import check_healable, heal_folder, healing_warnings

        assert data is not None
        check_healable(checkpoint.config, data, targets)
    origin_of_norms = None if norms is None else {"norms": norms.digest}
    if data is not None:
        how = calibration_signature(data, options, options.propagate, quantization)
        origin_of_norms = (
            (origin_of_norms or {})
            | how
            | {"dtype": options.dtype, "device_map": options.device_map}
        )
    signature = run_signature(checkpoint, recipe, origin_of_norms)
    prepared = measured = None
    if suite is not None:
        load_packages()
        from emp_llm.evaluation.evaluate import (
            evaluate_checkpoint,
            mark_pending,
            measures_of_baseline,
            pending_matches,
            prepare_suite,
        )
        from emp_llm.models.loading import load_tokenizer

        prepared = prepare_suite(
            suite, source.folder, load_tokenizer(source.folder, options.trust_remote_code)
        )
        measured = measures_of_baseline(options.baseline, source, prepared, options)
    starving = None
    if prepared is not None and pending_matches(path, signature):
        report: RunReport | None = read_report(path)
    else:
        moved_bytes = (
            sum(target.matrix.numel * target.matrix.itemsize for target in targets)
            if update is not None
            else 0
        )
        out = OutputFolder(
            path, [source.folder], checkpoint.output_bytes + moved_bytes, options.overwrite
        )
        with out:
            out.begin(signature, "" if data is None else machine_name())
            if data is not None and any(corpus.generate for corpus in data.corpora):
                keep_generated(out.files / SELF_NAME, data)
            if judged is not None and norms is not None and options.activations is None:
                from emp_llm.calibration.activations import keep_norms

                keep_norms(out, norms, stopwatch)  # what decided the masks lies beside them

            # Norms of the inputs. With pruned propagation, the masks of a block are decided before
            # the next is calibrated.
            propagated = (
                Pruner(scores, counts_of(scores), options.mask_device)
                if options.propagate == "pruned"
                else None
            )
            if scored and calibrates:
                assert data is not None
                with stage("calibrate"):
                    # Of an interrupted run.
                    norms = kept_norms(out, stopwatch)
                    if norms is None:
                        pruned_by = None if propagated is None else recorded(recipe)
                        origin = model_origin(
                            source.name, source.revision, checkpoint, quantization, pruned_by
                        )
                        dense = models.get(source.folder, quantization)
                        with stopwatch("calibrate"):
                            norms = calibrated(
                                dense,
                                data,
                                chosen.layers_to_calibrate(),
                                options,
                                origin,
                                statistics=recipe.statistics,
                                masker=propagated,
                                blocks=recipe.targets.blocks,
                                resume=out.calibration,
                            )
                        del dense
                        if quantization is not None:
                            models.free()
                        keep_norms(out, norms, stopwatch)
                    delete_progress(out.calibration)
                if recipe.needs_activations:
                    scores = scores.with_activations(norms)
            if by_cost:
                removed = out.get("shares")
                if removed is None:
                    with stage("shares"), stopwatch("shares"):
                        curve = LossCurve(
                            models,
                            source.folder,
                            checkpoint,
                            targets,
                            to_decide,
                            options.mask_device,
                            out.work / "curve",
                        )
                        removed = removed_by_cost(recipe, curve, targets, norms)
                    out.note(shares=removed)
                recipe = with_removed(recipe, removed)
                scores = Scores(checkpoint, targets, recipe, scores.inputs)
            about = None if norms is None else norms.about

            # How many weights of each group stay, which ones, and their values.
            counts = counts_of(scores) if propagated is None else propagated.counts
            pruner = Pruner(scores, counts, options.mask_device)
            moved = None
            if update is not None:
                assert data is not None
                tokens = data.tokens

                def move(dense: "PreTrainedModel", moved: "MovedWeights") -> None:
                    move_weights(
                        dense,
                        pruner,
                        update,
                        tokens,
                        moved,
                        options.batch_size,
                        options.hidden_states,
                    )

                moved = moved_weights(source.folder, models, out, stopwatch, update.name, move)
                about = about or fit_origin(
                    data, options, model_origin(source.name, source.revision, checkpoint)
                )
            check = None
            if options.check and prepared is None and further is not None:
                from emp_llm.evaluation.check import Check

                check = Check(further, checkpoint.config, models, quantization)
                with stopwatch("check"):
                    check.measure_dense(source.folder)
            if prepared is None or recipe.heal is not None:
                models.free()  # the dense model is no longer needed

            # The first rank writes. Healing trains what was written.
            report = None
            healing = None
            checked = None
            if ranks().main:
                with stage("prune"), stopwatch("prune"):
                    written = write_checkpoint(pruner, out.files, out, moved)
                    starving = starving_rows(pruner, written.outcomes)
                if starving is not None:  # said at once: healing may take hours
                    logger.warning("warning: %s", starving)
            if recipe.heal is not None:
                assert data is not None
                ranks().share(None)
                origin = model_origin(source.name, source.revision, checkpoint)
                with stopwatch("heal"):
                    healing = heal_folder(out, source.folder, recipe, data, options, origin)
                about = about or fit_origin(data, options, origin)
            if check is not None:
                ranks().share(None)  # the first rank has written
                with stopwatch("check"):
                    checked = check.record(out.files)
                models.free()
            if ranks().main:
                if norms is not None and not calibrates:
                    warn_if_foreign(norms, written.identity, source.folder)
                made_of = ModelSource(
                    model=source.name, revision=source.revision, identity=written.identity
                )
                report = report_of(
                    made_of, recipe, pruner, written.outcomes, chosen.coverage, about
                )
                report.dtype = options.dtype
                report.device_map = options.device_map
                if moved is not None and update is not None:
                    report.fits = moved.records()
                    report.warnings = [
                        *update_warnings(report.fits, targets, update),
                        *report.warnings,
                    ]
                if healing is not None:
                    report.healing = healing
                    report.warnings += healing_warnings(healing)
                if starving is not None:
                    report.warnings.insert(0, starving)
                report.check = checked
                report.loss = None if judged is None else judged.record
                report.stages = stage_records(stopwatch.record)
                report.save(out.files / REPORT_NAME)
                digest = None if norms is None else norms.digest
                hashes = written.hashes if recipe.heal is None else {}
                write_manifest(
                    out.files, checkpoint, written.identity, report.recipe, digest, hashes
                )
                if prepared is not None:
                    mark_pending(out.files, signature)
            out.complete()
            report = ranks().share(report)
        assert report is not None
        log_warnings([each for each in report.warnings if each != starving])

    assert report is not None
    if prepared is not None:
        report = evaluate_checkpoint(
            path, source, report, prepared, models, options, stopwatch, measured
        )
    return _pushed(report, path, destination)


def _pushed(report: RunReport, path: Path, destination: "Destination | None") -> RunReport:
    """The report of a finished checkpoint, which is pushed if that is asked for."""
    if destination is not None and ranks().main:
        from emp_llm.reporting.push import push_finished

        with stage("push"):
            report.push = push_finished(path, destination)
    logger.info(
        "written to %s (%s)",
        path,
        ", ".join(f"{name} {s.seconds:.1f} s" for name, s in report.stages.items()),
    )
    return report


def show(result: "RunReport | DryRun") -> None:
    """Print the result of a run, or the plan of a dry run."""
    from emp_llm.reporting.run_tables import (
        check_lines,
        dry_run_table,
        evaluation_table,
        fit_lines,
        healing_lines,
        loss_lines,
        pruning_table,
    )

    if not isinstance(result, RunReport):
        print(dry_run_table(result))
        return
    print(pruning_table(result))
    for line in [*fit_lines(result), *healing_lines(result)]:
        print(line)
    if result.evaluation is not None:
        print(evaluation_table(result))
    for line in [*loss_lines(result), *check_lines(result)]:
        print(line)
    if result.push is not None:
        from emp_llm.reporting.push import pushed_words

        print(pushed_words(result.push))


if __name__ == "__main__":
    run(prune, show)
