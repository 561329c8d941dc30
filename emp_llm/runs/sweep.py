"""The folder of a sweep.

DIR/sweep.jsonl               a line on what makes the sweep, and one for each finished point
DIR/activations.safetensors   the norms of its calibration
DIR/self.jsonl                the calibration text, if the model itself wrote it
DIR/points/NAME/              the checkpoint of a point, under --keep
DIR/.sweep.jsonl.lock, .calibration, .unfinished, points/.NAME.partial    unfinished work
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import calibration_data, keep_generated
from emp_llm.calibration.passes import calibration_signature, fit_origin
from emp_llm.checkpoint.files import (
    explain_disk_error,
    lock,
    own_line,
    remove,
    sync_path,
    write_bytes,
)
from emp_llm.checkpoint.output import (
    CALIBRATION_FILES,
    OutputFolder,
    check_apart,
    check_own,
    describe_difference,
)
from emp_llm.common.declared import as_tree
from emp_llm.common.errors import UserError
from emp_llm.common.machine import Stopwatch, command_line
from emp_llm.common.paths import ACTIVATIONS_NAME, MANIFEST_NAME, SELF_NAME, SWEEP_NAME
from emp_llm.common.progress import stage
from emp_llm.evaluation.evaluate import PreparedSuite, evaluation_record, measure, prepare_suite
from emp_llm.evaluation.results import Suite, new_results
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.local_model import find_model
from emp_llm.models.one_model import OneModel
from emp_llm.options.recipe import Given, Match, Own, Recipe
from emp_llm.options.shared import GivenOptions, LoadingOptions, ModelOptions, NormOptions
from emp_llm.options.sweep import SweepOptions, SweepPoint
from emp_llm.options.words import RecipeWords
from emp_llm.pruning.counts import Numbers, counts_of, match, scores_of, targets_of_folder
from emp_llm.pruning.masks import ALL_KEPT, Pruner, check_device, masks_digest
from emp_llm.pruning.report import report_of
from emp_llm.pruning.scores import as_recorded, own_sources
from emp_llm.pruning.updates import move_weights
from emp_llm.pruning.writing import run_signature, write_checkpoint
from emp_llm.records.base import stage_records
from emp_llm.records.evaluation import Measures
from emp_llm.records.run_report import PointRecord, Sweep, SweepMadeBy, SweptPoint, read_sweep
from emp_llm.runs.run import (
    Run,
    calibrate,
    dense_model,
    read_given_norms,
    warn_if_foreign,
    write_records,
)
from emp_llm.runs.trials import try_masks
from emp_llm.walk.updated import UpdatedWeights

logger = logging.getLogger(__name__)


# In the order of their deletion.
_OWN = (
    "points",
    "activations.safetensors",
    SELF_NAME.name,
    ".calibration",
    ".unfinished",
    SWEEP_NAME,
)


def point_record(point: SweepPoint) -> PointRecord:
    """A point as a report records it."""
    recipe = as_recorded(point.recipe)
    return PointRecord(name=point.name, recipe=recipe, baseline_of=point.baseline_of)


def finished(sweep: Sweep | None, point: SweepPoint) -> SweptPoint | None:
    """The report of a point; None if it is not finished."""
    asked = point_record(point)
    return next((each for each in sweep.points if each.point == asked), None) if sweep else None


class SweepFolder:
    """The folder of a sweep. It keeps the finished points, so that the same sweep resumes and a
    larger sweep extends it.

    Args:
        path: the folder; created by `lock` if missing.
        source: the folder of the dense model; never touched.

    Attributes:
        activations: file in the folder; points: parent of the checkpoints; calibration, scratch:
            folders for unfinished work.
        record: what its file says; known from `begin` on.

    Raises:
        UserError: the path exists and is not the folder of a sweep, or it contains the source or
            lies in it.
    """

    record: Sweep

    def __init__(self, path: Path, source: Path) -> None:
        self.path = Path(path)
        self.points = self.path / "points"
        self.activations = self.path / "activations.safetensors"
        self.calibration = self.path / ".calibration"
        self.scratch = self.path / ".unfinished"
        self._file = self.path / SWEEP_NAME
        check_apart(path, [source])
        if os.path.lexists(self.path) and not self._ours():
            raise UserError(
                f"--output {path}: it exists and is not the folder of a sweep; name another folder."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run."""
        with lock(self._file, f"--output {self.path}"):
            check_own(self.points, ("*",))
            check_own(self.calibration, CALIBRATION_FILES)
            check_own(self.scratch, ("*",))
            try:
                yield
            except Exception as error:
                explained = explain_disk_error(error, self.path, [self.path])
                if explained is None:
                    raise
                raise explained from error

    def held(self) -> Sweep | None:
        """The sweep in the folder; None if it has not begun. UserError if it cannot be read."""
        return read_sweep(self._file) if self._file.is_file() else None

    def begin(self, record: Sweep, overwrite: bool) -> None:
        """Resume the sweep in the folder, or begin one.

        Args:
            record: the sweep without points. The `activations` that it is made by are None if no
                point needs norms; then it matches any activations in the folder.
            overwrite: discard a different sweep.

        Raises:
            UserError: the folder holds a different sweep, and `overwrite` is false.
        """
        held = self.held()
        if held is not None:
            before = held.made_by.as_dict()
            asked = record.made_by.as_dict()
            kept = held.made_by.activations
            if kept is None or record.made_by.activations is None:
                before["activations"] = asked["activations"]
            difference = describe_difference(before, asked)
            if difference is None:
                record.made_by.activations = record.made_by.activations or kept
                record.stages = held.stages
                record.dense = held.dense
                record.points = held.points
            elif not overwrite:
                raise UserError(
                    f"--output {self.path}: it holds a sweep with {difference}. Name another "
                    "folder, or add --overwrite to discard it."
                )
            else:
                for name in _OWN:
                    remove(self.path / name)
        remove(self.scratch)  # left by an interrupted run
        self.record = record
        self.save()

    def save(self) -> None:
        """Write the file of the sweep anew."""
        first = _line(msgspec.structs.replace(self.record, points=[]))
        write_bytes(self._file, first + b"".join(map(_line, self.record.points)))

    def add(self, report: SweptPoint) -> None:
        """Add a finished point; another one of its name goes."""
        others = [each for each in self.record.points if each.point.name != report.point.name]
        self.record.points = [*others, report]
        with self._file.open("ab") as file:
            file.write(_line(report))
        sync_path(self._file)
        remove(self.scratch)

    def _ours(self) -> bool:
        """Whether the path is the folder of a sweep that has at least begun, or empty."""
        if not self.path.is_dir():
            return False
        first = f".{SWEEP_NAME}."  # of a run that was killed at its first file
        return self._file.is_file() or all(
            entry.name.startswith(first) for entry in self.path.iterdir()
        )


def _line(record: Sweep | SweptPoint) -> bytes:
    return own_line(json.loads(record.as_json()))


# A run of `sweep`: what its points share, and how each of them is measured.


@dataclass(frozen=True, kw_only=True)
class SweepRun(Run):
    """A run of `sweep`. That of a point has its recipe, path and stopwatch.

    Attributes:
        recipe: the one that needs most; it chooses the targets.
        sweeping: the options of the sweep.
        points: in order.
        recipes: of the points, by their names.
        folder: at the path.
        norms: of a file; None: the run collects them, or no point needs them.
        calibrates: whether the run collects the norms of inputs.
        needs_text: whether it needs a text: to calibrate, or to move weights.
        suite: measures the points; None: a dry run measures none.
    """

    options: NormOptions
    sweeping: SweepOptions
    points: list[SweepPoint]
    recipes: dict[str, Recipe]
    folder: SweepFolder
    norms: Activations | None
    calibrates: bool
    needs_text: bool
    suite: PreparedSuite | None

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
        """The run that checked options ask for. A dry run reads neither text nor suite.

        Raises:
            UserError: the model, the text, the data of the suite or the file of norms is missing, a
                recipe does not fit the model, or the output is not the folder of a sweep.
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
        norms = read_given_norms(text_options, leading, given)
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
        scored = any(recipe.needs_activations for recipe in recipes.values())
        calibrates = scored and text_options.activations is None
        needs_text = calibrates or moving is not None
        stopwatch = Stopwatch()
        models = OneModel(loading.device_map, loading.dtype, trust, stopwatch)
        folder = SweepFolder(path, source.folder)
        text = None
        prepared = None
        if not options.dry_run:
            if needs_text:
                text = calibration_data(text_options, chosen.architecture, models)
            prepared = prepare_suite(suite, source.folder, load_tokenizer(source.folder, trust))
        return cls(
            source=source,
            recipe=leading,
            chosen=chosen,
            options=text_options,
            text=text,
            path=path,
            models=models,
            stopwatch=stopwatch,
            sweeping=options,
            points=points,
            recipes=recipes,
            folder=folder,
            norms=norms,
            calibrates=calibrates,
            needs_text=needs_text,
            suite=prepared,
        )

    @property
    def prepared(self) -> PreparedSuite:
        """The suite of a run that measures."""
        assert self.suite is not None
        return self.suite


def sweep_points(run: SweepRun, shared: RecipeWords) -> Sweep:
    """Resume the sweep in the folder, or begin one: the dense model is measured, and each point.

    Args:
        shared: the fields that the recipes of all points share.

    Raises:
        UserError: the folder holds a sweep by other options.
    """
    _begin(run, shared)
    norms = run.norms
    if run.calibrates:
        scored = [recipe for recipe in run.recipes.values() if recipe.needs_activations]
        statistics = {name for recipe in scored for name in recipe.statistics}
        layers = run.chosen.layers_to_calibrate()
        file = run.folder.activations
        with stage("calibrate"):
            norms = calibrate(run, layers, statistics, run.folder.calibration, file=file)
    record = run.folder.record
    if record.dense is None:
        with stage("evaluate dense"), run.stopwatch("evaluate dense"):
            record.dense = measure(dense_model(run), run.prepared)
        record.stages = stage_records(run.stopwatch.record)
        run.folder.save()
    measured = {ALL_KEPT: ("dense", record.dense)}
    for each in record.points:
        measured.setdefault(each.masks, (each.point.name, each.measures))
    numbers: Numbers = {}  # of the magnitudes, shared by points whose counts they set
    for place, point in enumerate(run.points, 1):
        has_checkpoint = (run.folder.points / point.name / MANIFEST_NAME).is_file()
        needs_none = has_checkpoint or not run.sweeping.keep
        if needs_none and finished(record, point) is not None:
            logger.info("%s: already finished; not measured again.", point.name)
            continue
        with stage(point.name):
            report = _measure_point(run, point, norms, numbers, record.dense, measured)
        run.folder.add(report)
        measured.setdefault(report.masks, (point.name, report.measures))
        logger.info(
            "%s: done, %.2f %% removed; %d of %d.",
            point.name,
            100 * report.targets.sparsity_of_targets,
            place,
            len(run.points),
        )
    run.models.free()
    return record


def _begin(run: SweepRun, shared: RecipeWords) -> None:
    """Resume the sweep in the folder, or begin one."""
    dense = new_results(
        run.source,
        run.prepared.suite,
        run.prepared.batch_size,
        run.models.dtype,
        run.models.device_map,
    )
    made_of = {} if run.norms is None else {"norms": run.norms.digest}
    if run.text is not None:
        made_of |= calibration_signature(run.text, run.options)
    identity = dense.made_by.model.identity or ""
    if run.norms is not None:
        warn_if_foreign(run.norms, identity, run.source.folder)
    # A criterion or scores of the user's own are recorded by their hashes.
    scope = {"targets": run.recipe.targets.layers, "group": run.recipe.group}
    words: dict[str, Any] = scope | shared
    for recipe in run.recipes.values():
        if isinstance(recipe.score, Own | Given):
            name = "criterion" if isinstance(recipe.score, Own) else "scores"
            words[name] = as_tree(as_recorded(recipe).score)
        words |= own_sources(recipe)
    made_by = SweepMadeBy(
        **msgspec.structs.asdict(dense.made_by),
        shared=words,
        activations=made_of or None,
    )
    record = Sweep(
        command=command_line(),
        source=run.source.as_source(identity),
        suite=run.prepared.suite.name,
        made_by=made_by,
    )
    run.folder.begin(record, run.sweeping.overwrite)
    keep_generated(run.folder.path / SELF_NAME.name, run.text)


def _measure_point(
    sweep: SweepRun,
    point: SweepPoint,
    norms: Activations | None,
    numbers: Numbers,
    dense: Measures,
    measured: Mapping[str, tuple[str, Measures]],
) -> SweptPoint:
    """Measure a point, and write with --keep its checkpoint.

    Args:
        norms: None: no point needs them.
        dense: the measurements of the dense model.
        measured: digest of masks -> the point that had them first, and its measurements.
    """
    run, pruner = _decide(sweep, point, norms, numbers)
    norms = norms if run.recipe.needs_activations else None
    in_memory = sweep.in_memory
    updated = _move(run, pruner)
    origin = None if norms is None else norms.about
    if origin is None and updated is not None:
        origin = fit_origin(run.data, run.options.batch_size, sweep.origin)
    with ExitStack() as stack:
        out = None
        if sweep.sweeping.keep:
            needed = run.checkpoint.output_bytes
            out = OutputFolder(run.path, [run.source.folder], needed, overwrite=True)
            stack.enter_context(out)
            made_of = None if norms is None else {"norms": norms.digest}
            out.begin(run_signature(run.checkpoint, run.recipe, made_of))
            with run.stopwatch("prune"):
                written = write_checkpoint(pruner, out.files, out, updated)
        # What is written is measured in memory, if that is the same.
        if out is not None and not in_memory:
            folder = out.files
            outcomes = written.outcomes
        else:
            scratch = run.folder.scratch / "checkpoint"
            trial = try_masks(sweep, pruner, scratch, run.stopwatch, updated)
            folder, outcomes = stack.enter_context(trial)
        masks = masks_digest(outcomes, run.recipe, pruner.scores.by_magnitude)
        measures = _measures(run, point, masks, folder, measured)
        report = report_of(
            run.folder.record.source, pruner, outcomes, run.chosen.coverage, updated, origin
        )
        about = {
            "dtype": run.models.dtype,
            "device_map": run.models.device_map,
            "point": point_record(point),
            "masks": masks,
            "evaluation": evaluation_record(run.prepared, dense, measures),
            "stages": stage_records(run.stopwatch.record),
        }
        swept = SweptPoint(**msgspec.structs.asdict(report) | about)
        if out is not None:
            if norms is not None:
                norms.save(out.files / ACTIVATIONS_NAME)
            digest = None if norms is None else norms.digest
            write_records(run, out.files, swept, written.identity, digest, written.hashes)
            out.complete()
    return swept


def _decide(
    run: SweepRun, point: SweepPoint, norms: Activations | None, numbers: Numbers
) -> tuple[SweepRun, Pruner]:
    """The run of a point, with its recipe, path and stopwatch, and what decides its masks."""
    recipe = run.recipes[point.name]
    if point.baseline_of is not None and isinstance(recipe.counts, Match):
        folder = str(run.folder.points / point.baseline_of)
        recipe = recipe.but(counts=replace(recipe.counts, run=folder))
        of_point = {each.point.name: each for each in run.folder.record.points}
        recipe = match(recipe, run.targets, of_point[point.baseline_of])
    scores = scores_of(run.chosen, recipe, run.checkpoint.config)
    if norms is not None and recipe.needs_activations:
        scores = scores.with_activations(norms)
    pruner = Pruner(scores, counts_of(scores, numbers), run.sweeping.mask_device)
    path = run.folder.points / point.name
    return replace(run, recipe=scores.recipe, path=path, stopwatch=Stopwatch()), pruner


def _move(run: SweepRun, pruner: Pruner) -> UpdatedWeights | None:
    """The weights that the update of a point moves; None without one."""
    update = run.recipe.update
    if update is None:
        return None
    updated = UpdatedWeights(run.folder.scratch / "moved")
    with stage(update.name), run.stopwatch(update.name):
        move_weights(
            dense_model(run),
            pruner,
            update,
            run.data.in_turns,
            updated,
            run.options.batch_size,
            run.options.hidden_states,
        )
    return updated


def _measures(
    run: SweepRun,
    point: SweepPoint,
    masks: str,
    folder: Path,
    measured: Mapping[str, tuple[str, Measures]],
) -> Measures:
    """The measurements of a point: those of another one with the same masks, or new ones.

    Args:
        folder: of the model; that of the dense one if its weights in memory are masked.
    """
    if masks in measured:
        first, same = measured[masks]
        if first == point.name:  # only its checkpoint was missing
            return same
        logger.info("%s: the same masks as %s, so the same values.", point.name, first)
        return Measures(perplexity=same.perplexity, tasks=same.tasks, same_masks_as=first)
    with run.stopwatch("evaluate pruned"):
        return measure(run.models.get(folder), run.prepared)
