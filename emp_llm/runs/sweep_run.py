"""A run of `sweep`: what its points share, and how each of them is measured."""

import logging
import shutil
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import CalibrationText, calibration_data, keep_generated
from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
from emp_llm.calibration.passes import (
    calibrated,
    calibration_signature,
    delete_progress,
    fit_origin,
    model_origin,
)
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.declared import as_tree
from emp_llm.common.errors import UserError
from emp_llm.common.machine import Stopwatch, command_line
from emp_llm.common.paths import ACTIVATIONS_NAME, MANIFEST_NAME, REPORT_NAME, SELF_NAME
from emp_llm.common.progress import stage
from emp_llm.evaluation.evaluate import (
    PreparedSuite,
    evaluate_model,
    evaluation_record,
    measure,
    prepare_suite,
)
from emp_llm.evaluation.results import new_results, open_results
from emp_llm.evaluation.suites import Suite
from emp_llm.hub.local_model import LocalModel, find_model
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.one_model import OneModel
from emp_llm.options.base import GivenOptions
from emp_llm.options.calibration import NormOptions
from emp_llm.options.flat import RecipeWords
from emp_llm.options.model import LoadingOptions, ModelOptions
from emp_llm.options.recipe import Given, Match, Own, Recipe
from emp_llm.options.sweep import SweepOptions, SweepPoint
from emp_llm.pruning.chosen import Chosen, scores_of, targets_of_folder
from emp_llm.pruning.counts import Numbers, counts_of
from emp_llm.pruning.loaded_model import holds_stored_weights, pruned
from emp_llm.pruning.masks import Pruner, check_device
from emp_llm.pruning.outcome import ALL_KEPT, Outcomes, masks_digest
from emp_llm.pruning.report import report_of
from emp_llm.pruning.scores import recorded
from emp_llm.pruning.updates import move_weights
from emp_llm.pruning.writing import (
    criterion_source,
    keep_criterion,
    run_signature,
    write_checkpoint,
    write_manifest,
)
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import CalibrationRecord, ModelSource, stage_records
from emp_llm.records.sweep import Sweep, SweepMadeBy
from emp_llm.runs.sweep_folder import SweepFolder, measures_of, point_record
from emp_llm.walk.moved import MovedWeights

logger = logging.getLogger(__name__)


@dataclass
class SweepRun:
    """A run of `sweep`. What follows from its options is worked out when it is first asked for.

    Attributes:
        points: in order.
        recipes: of the points, by their names.
        leading: the recipe that needs most; it chooses the targets.
        text_options: of the calibration.
        source, chosen: the dense model, and its targets.
        norms: of a file, later also of the calibration; None: no point needs them.
        measured: digest of masks -> the point that had them first, and its measurements.
        numbers: of the magnitudes, shared by points whose counts they set.
    """

    points: list[SweepPoint]
    recipes: dict[str, Recipe]
    leading: Recipe
    model: ModelOptions
    text_options: NormOptions
    loading: LoadingOptions
    options: SweepOptions
    suite: Suite
    source: LocalModel
    chosen: Chosen
    folder: SweepFolder
    models: OneModel
    stopwatch: Stopwatch
    norms: Activations | None
    measured: dict[str, tuple[str, Measures]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        points: list[SweepPoint],
        model: ModelOptions,
        text_options: NormOptions,
        loading: LoadingOptions,
        suite: Suite,
        options: SweepOptions,
        given: GivenOptions,
    ) -> "SweepRun":
        """The run that checked options ask for.

        Raises:
            UserError: the model or the file of norms is missing, a recipe does not fit the model,
                or the output is not the folder of a sweep.
        """
        check_device(options.mask_device)
        recipes = {point.name: point.recipe for point in points}
        leading = max(
            recipes.values(),
            key=lambda recipe: (recipe.needs_activations, recipe.update is not None),
        )
        moving = next((recipe for recipe in recipes.values() if recipe.update is not None), None)
        if moving is not None and text_options.activations and text_options.calibration is None:
            raise UserError(
                f"{moving.update_flag} fits weights to the calibration text, and --activations "
                "holds only its norms. Name the text with --calibration."
            )
        norms = given_norms(text_options, leading, given)
        trust = model.trust_remote_code
        source = find_model(model.model, model.revision, trust, headers_suffice=options.dry_run)
        chosen = targets_of_folder(
            source.folder, source.name, leading, trust, calibrates=norms is None
        )
        for point in points:
            if point.baseline_of is not None:  # the run that it matches is one of this sweep
                continue
            scores = scores_of(chosen, recipes[point.name], chosen.checkpoint.config)
            if norms is not None and scores.recipe.needs_activations:
                scores.with_activations(norms, str(text_options.activations))
        path = options.output or Path(f"{source.short_name}-sweep")
        folder = SweepFolder(path, source.folder, points)
        stopwatch = Stopwatch()
        models = OneModel(loading.device_map, loading.dtype, trust, stopwatch)
        return cls(
            points,
            recipes,
            leading,
            model,
            text_options,
            loading,
            options,
            suite,
            source,
            chosen,
            folder,
            models,
            stopwatch,
            norms,
        )

    @property
    def scored(self) -> list[Recipe]:
        """The recipes that need norms."""
        return [recipe for recipe in self.recipes.values() if recipe.needs_activations]

    @property
    def moving(self) -> list[Recipe]:
        """The recipes that move weights."""
        return [recipe for recipe in self.recipes.values() if recipe.update is not None]

    @property
    def calibrates(self) -> bool:
        """Whether the run collects the norms of inputs."""
        return bool(self.scored) and self.text_options.activations is None

    @property
    def reads_text(self) -> bool:
        """Whether the run needs a text."""
        return self.calibrates or bool(self.moving)

    @cached_property
    def text(self) -> CalibrationText:
        """The calibration text, of a run that needs one."""
        return calibration_data(self.text_options, self.chosen.architecture, self.models)

    @cached_property
    def prepared(self) -> PreparedSuite:
        """The data of the suite."""
        tokenizer = load_tokenizer(self.source.folder, self.model.trust_remote_code)
        return prepare_suite(self.suite, self.source.folder, tokenizer)

    @cached_property
    def dense(self) -> Results:
        """The results of the dense model so far."""
        return new_results(
            self.source,
            self.prepared.suite,
            self.prepared.batch_size,
            self.loading.dtype,
            self.loading.device_map,
        )

    @cached_property
    def made_from(self) -> ModelSource:
        """The dense model, as reports name it."""
        identity = self.dense.made_by.model.identity or ""
        return ModelSource(model=self.source.name, revision=self.source.revision, identity=identity)

    @cached_property
    def in_memory(self) -> bool:
        """Whether the loaded weights are the stored ones."""
        dense = self.models.get(self.source.folder)
        if holds_stored_weights(dense, self.chosen.checkpoint, self.chosen.targets):
            return True
        logger.info(
            "the loaded weights differ from the stored ones; each point is written to a temporary "
            "checkpoint."
        )
        del dense
        self.models.free()
        return False

    def begin(self, shared: RecipeWords) -> None:
        """Read the text and the suite, and resume the sweep in the folder, or begin one.

        Args:
            shared: the options that the recipes of all points share.

        Raises:
            UserError: the folder holds a sweep by other options.
        """
        options = self.text_options
        made_of = {} if self.norms is None else {"norms": self.norms.digest}
        if self.reads_text:
            made_of |= calibration_signature(self.text, options.batch_size, options.execution)
        identity = self.made_from.identity or ""
        if self.norms is not None:
            warn_if_foreign(self.norms, identity, self.source.folder)
        # A criterion or scores of the user's own are recorded by their hashes.
        scope = {"targets": self.leading.targets.layers, "group": self.leading.group}
        words: dict[str, Any] = scope | shared
        for recipe in self.recipes.values():
            if isinstance(recipe.score, Own | Given):
                name = "criterion" if isinstance(recipe.score, Own) else "scores"
                words[name] = as_tree(recorded(recipe).score)
        made_by = SweepMadeBy(
            **msgspec.structs.asdict(self.dense.made_by),
            shared=words,
            activations=made_of or None,
        )
        about = Sweep(command=command_line(), source=self.made_from, suite=self.suite.name)
        self.folder.begin(made_by, about, self.options.overwrite)
        if self.reads_text:
            keep_generated(self.folder.path / SELF_NAME.name, self.text)

    def calibrate(self) -> None:
        """Collect the norms, unless they are given or those of an interrupted run, and keep them
        in the folder.
        """
        file = self.folder.activations
        if self.norms is not None and not file.is_file():
            self.norms.save(file)
        if not self.calibrates:
            return
        if file.is_file():
            self.norms = Activations.load(file)
        else:
            options = self.text_options
            source = self.source
            with stage("calibrate"), self.stopwatch("calibrate"):
                self.norms = calibrated(
                    self.models.get(source.folder),
                    self.text,
                    self.chosen.layers_to_calibrate(),
                    model_origin(source.name, source.revision, self.chosen.checkpoint),
                    batch_size=options.batch_size,
                    execution=options.execution,
                    hidden_states=options.hidden_states,
                    statistics={name for recipe in self.scored for name in recipe.statistics},
                    blocks=self.leading.targets.blocks,
                    resume=self.folder.calibration if options.resumable_calibration else None,
                )
            self.norms.save(file)
        delete_progress(self.folder.calibration)

    def measure_dense(self) -> None:
        """Measure what the results of the dense model lack of the suite."""
        file = self.folder.dense
        self.dense = open_results(file, self.dense)
        if not self.dense.complete:
            with stage("evaluate dense"), self.stopwatch("evaluate dense"):
                model = self.models.get(self.source.folder)
                evaluate_model(model, self.prepared, self.dense, file)
                del model
        self.measured[ALL_KEPT] = ("dense", self.dense.measures)
        self.folder.note(stage_records(self.stopwatch.record), self.dense.measures)

    def measure_points(self) -> None:
        """Measure the points that are not finished."""
        for place, point in enumerate(self.points, 1):
            report = self.folder.report(point)
            has_checkpoint = (self.folder.points / point.name / MANIFEST_NAME).is_file()
            if report is not None and (has_checkpoint or not self.options.keep):
                logger.info("%s: already finished; not measured again.", point.name)
            else:
                if report is not None:  # its checkpoint is missing
                    self.folder.note_measures(point, report.masks or "", measures_of(report))
                with stage(point.name):
                    report = self._measure(point)
                logger.info(
                    "%s: done, %.2f %% removed; %d of %d.",
                    point.name,
                    100 * report.targets.sparsity_of_targets,
                    place,
                    len(self.points),
                )
            measures = self.folder.finish(point, report)
            self.measured.setdefault(report.masks or "", (point.name, measures))
            shutil.rmtree(self.folder.moved / point.name, ignore_errors=True)
        shutil.rmtree(self.folder.moved, ignore_errors=True)
        self.models.free()

    def _measure(self, point: SweepPoint) -> RunReport:
        """Measure a point, and write its report."""
        watch = Stopwatch()
        pruner = self._pruner(point)
        in_memory = self.in_memory
        moved = self._moved(point, pruner, watch)
        if self.options.keep:
            return self._keep(point, pruner, moved, watch)
        if in_memory:
            report = self._report_in_memory(point, pruner, moved, watch)
        else:
            files = self.folder.scratch
            files.mkdir()
            try:
                with watch("prune"):
                    outcomes = write_checkpoint(pruner, files, moved=moved).outcomes
                report = self._report(point, pruner, outcomes, moved, watch, files)
            finally:
                shutil.rmtree(files, ignore_errors=True)
        report.save(self.folder.points / point.name / REPORT_NAME)
        return report

    def _keep(
        self, point: SweepPoint, pruner: Pruner, moved: MovedWeights | None, watch: Stopwatch
    ) -> RunReport:
        """Write the checkpoint of a point, and measure it."""
        checkpoint = self.chosen.checkpoint
        recipe = pruner.scores.recipe
        norms = self.norms if recipe.needs_activations else None
        digest = None if norms is None else norms.digest
        path = self.folder.points / point.name
        needed = checkpoint.output_bytes
        with OutputFolder(path, [self.source.folder], needed, overwrite=True) as out:
            made_of = None if digest is None else {"norms": digest}
            out.begin(run_signature(checkpoint, recipe, made_of))
            with watch("prune"):
                written = write_checkpoint(pruner, out.files, out, moved)
            if self.in_memory:
                report = self._report_in_memory(point, pruner, moved, watch)
            else:
                report = self._report(point, pruner, written.outcomes, moved, watch, out.files)
            report.save(out.files / REPORT_NAME)
            keep_criterion(out.files, criterion_source(recipe))
            if norms is not None:
                norms.save(out.files / ACTIVATIONS_NAME)
            identity = written.identity
            write_manifest(out.files, checkpoint, identity, report.recipe, digest, written.hashes)
            out.complete()
        return report

    def _report_in_memory(
        self, point: SweepPoint, pruner: Pruner, moved: MovedWeights | None, watch: Stopwatch
    ) -> RunReport:
        """Measure a point on the dense model with its weights masked, and restore them."""
        folder = self.source.folder
        with ExitStack() as masked:
            with watch("prune"):
                outcomes = masked.enter_context(pruned(self.models.get(folder), pruner, moved))
            return self._report(point, pruner, outcomes, moved, watch, folder)

    def _report(
        self,
        point: SweepPoint,
        pruner: Pruner,
        outcomes: Outcomes,
        moved: MovedWeights | None,
        watch: Stopwatch,
        folder: Path,
    ) -> RunReport:
        """Measure a point.

        Args:
            folder: of the model; that of the dense one if its weights in memory are masked.
        """
        recipe = pruner.scores.recipe
        masks = masks_digest(outcomes, recipe, pruner.scores.by_magnitude)
        measures = self._measures(point, masks, folder, watch)
        origin = self._origin(recipe)
        coverage = self.chosen.coverage
        report = report_of(self.made_from, pruner, outcomes, coverage, moved, origin)
        report.dtype = self.loading.dtype
        report.device_map = self.loading.device_map
        report.point = point_record(point)
        report.masks = masks
        report.evaluation = evaluation_record(self.prepared, self.dense.measures, measures)
        report.stages = stage_records(watch.record)
        return report

    def _pruner(self, point: SweepPoint) -> Pruner:
        """What decides the masks of a point."""
        recipe = self.recipes[point.name]
        if point.baseline_of is not None and isinstance(recipe.counts, Match):
            run = str(self.folder.points / point.baseline_of)
            counts = replace(recipe.counts, run=run)
            recipe = recipe.but(counts=counts)
        scores = scores_of(self.chosen, recipe, self.chosen.checkpoint.config)
        if self.norms is not None and recipe.needs_activations:
            scores = scores.with_activations(self.norms)
        return Pruner(scores, counts_of(scores, self.numbers), self.options.mask_device)

    def _moved(self, point: SweepPoint, pruner: Pruner, watch: Stopwatch) -> MovedWeights | None:
        """The weights that the update of a point moves; None without one."""
        update = pruner.scores.recipe.update
        if update is None:
            return None
        moved = MovedWeights(self.folder.moved / point.name)
        with stage(update.name), watch(update.name):
            move_weights(
                self.models.get(self.source.folder),
                pruner,
                update,
                self.text.tokens,
                moved,
                self.text_options.batch_size,
                self.text_options.hidden_states,
            )
        return moved

    def _measures(self, point: SweepPoint, masks: str, folder: Path, watch: Stopwatch) -> Measures:
        """The measurements of a point: those of another one with the same masks, or new ones."""
        if masks in self.measured:
            name, same = self.measured[masks]
            logger.info("%s: the same masks as %s, so the same values.", point.name, name)
            return Measures(perplexity=same.perplexity, tasks=same.tasks, same_masks_as=name)
        begun = self.folder.measured_so_far(point, masks)
        with nullcontext() if self.in_memory else watch("load"):
            model = self.models.get(folder)
        with watch("evaluate pruned"):
            note = partial(self.folder.note_measures, point, masks)
            measures = measure(model, self.prepared, begun, note)
        del model
        if not self.in_memory:
            self.models.free()  # the next point's checkpoint has the same path
        return measures

    def _origin(self, recipe: Recipe) -> CalibrationRecord | None:
        """The origin of the norms of a point, or of its weights that moved; None of neither."""
        if self.norms is not None and recipe.needs_activations:
            return self.norms.about
        if recipe.update is None:
            return None
        about = model_origin(self.source.name, self.source.revision, self.chosen.checkpoint)
        return fit_origin(self.text, self.text_options.batch_size, about)
