"""`emp-llm sweep`: one calibration, many recipes, and the measurements of each.

DIR/sweep.json                      the definition of the sweep ("made_by"), and the measurements of
all finished points DIR/activations.safetensors         the norms of the calibration
DIR/self.jsonl                      the calibration text, if the model itself wrote it
DIR/dense.json                      the measurements of the dense model
DIR/points/NAME/emp_report.json     a finished point, with its checkpoint under --keep
DIR/.sweep.json.lock, .calibration, .checkpoint, .moved, points/.NAME.*    unfinished work
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from emp_llm.checkpoint.files import INDEX_LIMIT, explain_disk_error, read_json, write_json
from emp_llm.checkpoint.locks import locked
from emp_llm.checkpoint.output import (
    CALIBRATION_FILES,
    OutputFolder,
    check_own,
    describe_difference,
)
from emp_llm.cli import command, run
from emp_llm.common.errors import UserError, count_of, format_bytes
from emp_llm.common.machine import Stopwatch, command_line
from emp_llm.common.paths import ACTIVATIONS_NAME, MANIFEST_NAME, REPORT_NAME, SELF_NAME, SWEEP_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import ranks
from emp_llm.options.base import Given, Some
from emp_llm.options.calibration import NormOptions
from emp_llm.options.evaluation import SuiteOptions
from emp_llm.options.model import LoadingOptions, ModelOptions
from emp_llm.options.recipe import Given as GivenScores
from emp_llm.options.recipe import Match, Own, Recipe
from emp_llm.options.recipe_options import REFIT_FIELDS, SCORE_FIELDS, TARGET_FIELDS, RecipeOptions
from emp_llm.options.sweep import SweepOptions, SweepPoint, plan_points
from emp_llm.records.base import converted, read_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.run_report import PointRecord, RunReport
from emp_llm.records.source import CalibrationRecord, ModelSource, stage_records
from emp_llm.records.sweep import Sweep, SweepMadeBy, SweptPoint

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.data import CalibrationText
    from emp_llm.evaluation.evaluate import PreparedSuite
    from emp_llm.models.one_model import OneModel
    from emp_llm.pruning.chosen import Chosen
    from emp_llm.pruning.counts import Numbers
    from emp_llm.pruning.masks import Pruner
    from emp_llm.records.run_report import TargetsRecord
    from emp_llm.walk.moved import MovedWeights

logger = logging.getLogger(__name__)
# In the order of their deletion.
_OWN = (
    "points",
    "activations.safetensors",
    SELF_NAME.name,
    "dense.json",
    ".calibration",
    ".checkpoint",
    ".moved",
    SWEEP_NAME,
)


@dataclass(frozen=True)
class SweepDryRun:
    """The plan of a sweep.

    Attributes:
        points: names of the unfinished points.
        coverage: the targets' share of the model.
        disk_bytes: size of the checkpoints under --keep.
    """

    points: list[str]
    coverage: "TargetsRecord"
    disk_bytes: int


@command
def sweep(
    model: ModelOptions,
    shared: Annotated[
        RecipeOptions,
        Some(
            (
                *TARGET_FIELDS,
                "group",
                *SCORE_FIELDS,
                "shares",
                "owl_lambda",
                "owl_m",
                *REFIT_FIELDS,
            )
        ),
    ],
    text: NormOptions,
    loading: LoadingOptions,
    suite_options: SuiteOptions,
    options: SweepOptions,
    given: Given,
) -> Sweep | SweepDryRun:
    """Prune a model by many recipes and measure each: curves over beta and sparsity, with the dense
    model.

    The model is loaded and calibrated once. For each point the weights are masked in memory, the
    model is measured, and the weights are restored. Finished points are not measured again: the
    same command resumes an interrupted sweep, and more betas or methods add points to it.

    Returns the content of sweep.json; for a dry run, the plan.
    """
    if shared.shares == "cost":
        raise UserError("--shares cost is for prune. Leave it out.")
    points = plan_points(options, shared)
    load_packages()
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
    from emp_llm.calibration.texts import self_notes
    from emp_llm.evaluation.evaluate import evaluate_model, prepare_suite
    from emp_llm.evaluation.results import new_results, open_results
    from emp_llm.evaluation.suites import suite_of
    from emp_llm.hub.local_model import find_model
    from emp_llm.models.loading import load_tokenizer
    from emp_llm.models.one_model import OneModel
    from emp_llm.pruning.chosen import targets_of_folder
    from emp_llm.pruning.masks import check_device
    from emp_llm.pruning.outcome import ALL_KEPT
    from emp_llm.pruning.scores import Scores, recorded
    from emp_llm.pruning.updates import check_updatable
    from emp_llm.walk.checks import check_apart, check_update

    if ranks().count > 1:
        raise UserError(
            "A sweep runs in one process. Start it without torchrun; --device-map spreads a large "
            "model over devices."
        )
    check_device(options.mask_device)
    suite = suite_of(suite_options)
    recipes = {point.name: point.recipe.tree for point in points}
    scored = [recipe for recipe in recipes.values() if recipe.needs_activations]
    moving = [recipe for recipe in recipes.values() if recipe.update is not None]
    others = [*scored, *moving, *recipes.values()]
    leading = next((recipe for recipe in scored if recipe.update is not None), others[0])
    if moving and text.activations is not None and text.calibration is None:
        raise UserError(
            f"{moving[0].update_flag} fits weights to the calibration text, and --activations "
            "holds only its norms. Name the text with --calibration."
        )
    norms = given_norms(text, leading, given)
    source = find_model(
        model.model, model.revision, model.trust_remote_code, headers_suffice=options.dry_run
    )
    stopwatch = Stopwatch()
    chosen = targets_of_folder(
        source.folder, source.name, leading, model.trust_remote_code, calibrates=norms is None
    )
    checkpoint = chosen.checkpoint
    targets = chosen.targets
    calibrates = bool(scored) and norms is None
    for recipe in moving:
        check_update(targets, recipe.update_flag, recipe.without_update)
        check_apart(checkpoint.config, recipe.update_flag, recipe.without_update)
    if norms is not None and scored:
        for recipe in scored:
            Scores(checkpoint, targets, recipe).with_activations(norms, str(text.activations))
    path = options.output or Path(f"{source.short_name}-sweep")
    folder = SweepFolder(path, source.folder, points)
    if options.dry_run:
        unfinished = [point.name for point in points if folder.report(point) is None]
        for note in self_notes(text.text_name) if calibrates or moving else []:
            logger.info("%s", note)
        return SweepDryRun(
            unfinished,
            chosen.coverage,
            checkpoint.output_bytes * len(points) if options.keep else 0,
        )

    with folder.locked():
        # Everything that the measurements depend on; a sweep with other values is refused.
        models = OneModel(loading.device_map, loading.dtype, model.trust_remote_code, stopwatch)
        data = None
        made_of = None if norms is None else {"norms": norms.digest}
        if calibrates or moving:
            from emp_llm.calibration.data import calibration_data, keep_generated
            from emp_llm.calibration.passes import (
                calibrated,
                calibration_signature,
                delete_progress,
                model_origin,
            )

            data = calibration_data(
                text, chosen.architecture, model.trust_remote_code, models=models
            )
            if moving:
                check_updatable(moving[0], chosen)
            made_of = (made_of or {}) | calibration_signature(data, text.batch_size, text.execution)
        prepared = prepare_suite(
            suite, source.folder, load_tokenizer(source.folder, model.trust_remote_code)
        )
        dense = new_results(
            source, prepared.suite, prepared.batch_size, loading.dtype, loading.device_map
        )
        identity = dense.made_by.model.identity or ""
        if norms is not None:
            warn_if_foreign(norms, identity, source.folder)
        named = ModelSource(model=source.name, revision=source.revision, identity=identity)
        # A criterion or scores of the user's own are recorded by their hashes.
        scores = [
            recipe for recipe in recipes.values() if isinstance(recipe.score, Own | GivenScores)
        ]
        hashes = recorded(scores[0]).custom_scores if scores else {}
        made_by = SweepMadeBy(
            **msgspec.structs.asdict(dense.made_by),
            recipe=shared.but(**hashes),
            activations=made_of,
        )
        folder.begin(
            made_by,
            Sweep(command=command_line(), source=named, suite=suite.name),
            options.overwrite,
        )
        if data is not None:
            keep_generated(path / SELF_NAME.name, data)

        # The norms and the dense model, once.
        if norms is not None and not folder.activations.is_file():
            norms.save(folder.activations)
        elif calibrates and folder.activations.is_file():
            norms = Activations.load(folder.activations)
        elif calibrates and data is not None:
            with stage("calibrate"), stopwatch("calibrate"):
                about = model_origin(source.name, source.revision, checkpoint)
                layers = chosen.layers_to_calibrate()
                progress = folder.calibration
                norms = calibrated(
                    models.get(source.folder),
                    data,
                    layers,
                    about,
                    batch_size=text.batch_size,
                    execution=text.execution,
                    hidden_states=text.hidden_states,
                    statistics={name for recipe in scored for name in recipe.statistics},
                    blocks=leading.targets.blocks,
                    resume=progress if text.resumable_calibration else None,
                )
            norms.save(folder.activations)
            folder.note_stages(stage_records(stopwatch.record))
        if calibrates:
            delete_progress(folder.calibration)  # an interrupted run may have ended before it did
        dense = open_results(folder.dense, dense)
        if not dense.complete:
            with stage("evaluate dense"), stopwatch("evaluate dense"):
                evaluate_model(models.get(source.folder), prepared, dense, folder.dense)
            folder.note_stages(stage_records(stopwatch.record), dense.measures)

        measuring = _Measuring(
            folder=folder,
            options=options,
            text=text,
            device_map=loading.device_map,
            source=named,
            dense_folder=source.folder,
            chosen=chosen,
            models=models,
            data=data,
            norms=norms,
            prepared=prepared,
            dense=dense.measures,
            measured={ALL_KEPT: ("dense", dense.measures)},
        )
        for place, point in enumerate(points, 1):
            known = folder.report(point)
            is_kept = (folder.points / point.name / MANIFEST_NAME).is_file()
            if known is not None and (is_kept or not options.keep):
                logger.info("%s: already finished; not measured again.", point.name)
                report = known
            else:
                with stage(point.name):
                    report = measuring.report(point, recipes[point.name], known)
                logger.info(
                    "%s: done, %.2f %% removed; %d of %d.",
                    point.name,
                    100 * report.targets.sparsity_of_targets,
                    place,
                    len(points),
                )
            measures = folder.finish(point, report)
            measuring.measured.setdefault(report.masks or "", (point.name, measures))
            shutil.rmtree(folder.moved / point.name, ignore_errors=True)
        shutil.rmtree(folder.moved, ignore_errors=True)
        models.free()
    return folder.record


@dataclass
class _Measuring:
    """What the points of a sweep are measured with. Their weights are masked in memory, or in a
    temporary checkpoint where the loaded weights are not the stored ones.

    Attributes:
        text: of the calibration; data: what it holds, if a point needs it.
        source, dense_folder: the dense model.
        norms: None: no point needs them.
        dense: measurements of the dense model.
        measured: digest of masks -> the point that had them first, and its measurements.
        numbers: of the magnitudes, shared by points whose counts they set.
    """

    folder: "SweepFolder"
    options: SweepOptions
    text: NormOptions
    device_map: str
    source: ModelSource
    dense_folder: Path
    chosen: "Chosen"
    models: "OneModel"
    data: "CalibrationText | None"
    norms: "Activations | None"
    prepared: "PreparedSuite"
    dense: Measures
    measured: dict[str, tuple[str, Measures]]
    numbers: "Numbers" = field(default_factory=dict)

    @cached_property
    def in_memory(self) -> bool:
        """Whether the loaded weights are the stored ones."""
        from emp_llm.pruning.loaded_model import holds_stored_weights

        dense = self.models.get(self.dense_folder)
        if holds_stored_weights(dense, self.chosen.checkpoint, self.chosen.targets):
            return True
        logger.info(
            "the loaded weights differ from the stored ones; each point is written to a temporary "
            "checkpoint."
        )
        del dense
        self.models.free()
        return False

    def report(self, point: SweepPoint, recipe: Recipe, known: RunReport | None) -> RunReport:
        """Measure a point, and write its report.

        Args:
            known: an earlier report of the point, whose checkpoint is missing.
        """
        from emp_llm.evaluation.evaluate import evaluation_record
        from emp_llm.pruning.counts import counts_of, matched
        from emp_llm.pruning.loaded_model import pruned
        from emp_llm.pruning.masks import Pruner
        from emp_llm.pruning.outcome import masks_digest, report_of
        from emp_llm.pruning.scores import Scores
        from emp_llm.pruning.writing import run_signature, write_checkpoint, write_manifest

        watch = Stopwatch()
        checkpoint = self.chosen.checkpoint
        if point.baseline_of is not None and isinstance(recipe.counts, Match):
            run = str(self.folder.points / point.baseline_of)
            counts = replace(recipe.counts, run=run)
            recipe = matched(replace(recipe, counts=counts), self.chosen.targets)
        norms = self.norms if recipe.needs_activations else None
        digest = None if norms is None else norms.digest
        scores = Scores(checkpoint, self.chosen.targets, recipe)
        if norms is not None:
            scores = scores.with_activations(norms)
        pruner = Pruner(scores, counts_of(scores, self.numbers), self.options.mask_device)
        in_memory = self.in_memory
        moved = self._moved(point, pruner, watch)
        path = self.folder.points / point.name
        files = self.dense_folder  # of the model to measure
        out = None
        with ExitStack() as of_point:
            with watch("prune"):
                if self.options.keep:
                    sources = [self.dense_folder]
                    out = OutputFolder(path, sources, checkpoint.output_bytes, overwrite=True)
                    of_point.enter_context(out)
                    made_of = None if digest is None else {"norms": digest}
                    out.begin(run_signature(checkpoint, recipe, made_of))
                    written = write_checkpoint(pruner, out.files, out, moved)
                    outcomes = written.outcomes
                    files = out.files
                elif not in_memory:
                    files = self.folder.scratch
                    of_point.callback(shutil.rmtree, files, ignore_errors=True)
                    files.mkdir()
                    outcomes = write_checkpoint(pruner, files, moved=moved).outcomes
                if in_memory:
                    files = self.dense_folder
                    dense = self.models.get(files)
                    outcomes = of_point.enter_context(pruned(dense, pruner, moved))
                    del dense
            masks = masks_digest(outcomes, recipe, scores.by_magnitude)
            if known is not None and known.masks == masks and known.evaluation is not None:
                measures = known.evaluation.pruned or Measures()
            else:
                measures = self._measures(point, masks, files, watch)
            about = self._origin(recipe) if norms is None else norms.about
            coverage = self.chosen.coverage
            report = report_of(self.source, pruner, outcomes, coverage, moved, about)
            report.dtype = self.models.dtype
            report.device_map = self.device_map
            report.point = point_record(point)
            report.masks = masks
            report.evaluation = evaluation_record(self.prepared, self.dense, measures)
            report.stages = stage_records(watch.record)
            report.save((path if out is None else out.files) / REPORT_NAME)
            if out is not None:
                if norms is not None:
                    norms.save(out.files / ACTIVATIONS_NAME)
                identity = written.identity
                write_manifest(
                    out.files, checkpoint, identity, report.recipe, digest, written.hashes
                )
                out.complete()
        return report

    def _moved(
        self, point: SweepPoint, pruner: "Pruner", watch: Stopwatch
    ) -> "MovedWeights | None":
        """The weights that the update of a point moves; None without one."""
        update = pruner.scores.recipe.update
        if update is None or self.data is None:
            return None
        from emp_llm.pruning.updates import move_weights
        from emp_llm.walk.moved import MovedWeights

        moved = MovedWeights(self.folder.moved / point.name)
        with stage(update.name), watch(update.name):
            move_weights(
                self.models.get(self.dense_folder),
                pruner,
                update,
                self.data.tokens,
                moved,
                self.text.batch_size,
                self.text.hidden_states,
            )
        return moved

    def _measures(self, point: SweepPoint, masks: str, files: Path, watch: Stopwatch) -> Measures:
        """The measurements of a point: those of another one with the same masks, or new ones.

        Args:
            files: the folder of the model, whose weights in memory may be masked.
        """
        from emp_llm.evaluation.evaluate import measure

        if masks in self.measured:
            name, same = self.measured[masks]
            logger.info("%s: the same masks as %s, so the same values.", point.name, name)
            return Measures(perplexity=same.perplexity, tasks=same.tasks, same_masks_as=name)
        begun = self.folder.measured_so_far(point, masks)
        with nullcontext() if self.in_memory else watch("load"):
            loaded = self.models.get(files)
        with watch("evaluate pruned"):
            note = partial(self.folder.note_measures, point, masks)
            measures = measure(loaded, self.prepared, begun, note)
        del loaded
        if not self.in_memory:
            self.models.free()  # the next point's checkpoint has the same path
        return measures

    def _origin(self, recipe: Recipe) -> CalibrationRecord | None:
        """The origin of weights that moved; None if none did."""
        if recipe.update is None or self.data is None:
            return None
        from emp_llm.calibration.passes import fit_origin, model_origin

        about = model_origin(self.source.model, self.source.revision, self.chosen.checkpoint)
        return fit_origin(self.data, self.text.batch_size, about)


def point_record(point: SweepPoint) -> PointRecord:
    """A point as a report records it."""
    numbers = {
        name: getattr(point.recipe, name)
        for name in ("method", "beta", "order", "sparsity", "pattern")
    }
    return PointRecord(
        name=point.name, baseline_of=point.baseline_of, match=point.recipe.match_by, **numbers
    )


class SweepFolder:
    """The folder of a sweep. It keeps the finished parts, so that the same sweep resumes and a
    larger sweep extends it.

    Args:
        path: the folder; created if missing.
        source: the folder of the dense model; never touched.
        planned: the points of this run, in order.

    Attributes:
        activations, dense: files in the folder; points: parent of the points' folders; calibration,
            scratch, moved: folders for unfinished work.
        record: the content of sweep.json.

    Raises:
        UserError: the path exists and is not the folder of a sweep, or it contains the source or
            lies in it.
    """

    record: Sweep

    def __init__(self, path: Path, source: Path, planned: list[SweepPoint]) -> None:
        self.path = Path(path)
        self.points = self.path / "points"
        self.activations = self.path / "activations.safetensors"
        self.dense = self.path / "dense.json"
        self.calibration = self.path / ".calibration"
        self.scratch = self.path / ".checkpoint"
        self.moved = self.path / ".moved"
        self._planned = planned
        self._file = self.path / SWEEP_NAME
        real = self.path.resolve()
        origin = source.resolve()
        if real == origin or real in origin.parents or origin in real.parents:
            raise UserError(
                f"--output {path}: it is the input folder, lies inside it or contains "
                "it; name another folder."
            )
        if os.path.lexists(self.path) and not self._ours():
            raise UserError(
                f"--output {path}: it exists and is not the folder of a sweep; name another folder."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run."""
        with locked(self._file, f"--output {self.path}"):
            check_own(self.points, ("*",))
            check_own(self.calibration, CALIBRATION_FILES)
            check_own(self.scratch, ("*",))
            check_own(self.moved, ("*",))
            try:
                self.points.mkdir(exist_ok=True)
                yield
            except OSError as error:
                explained = explain_disk_error(error, self.path, [self.points])
                if explained is None:
                    raise
                raise explained from error

    def begin(self, made_by: SweepMadeBy, about: Sweep, overwrite: bool) -> None:
        """Resume the sweep in the folder, or begin one.

        Args:
            made_by: everything that the measurements depend on. Its `activations` are None if no
                point needs norms; then it matches any activations in the folder.
            about: the record to begin with: command, source, suite.
            overwrite: discard a different sweep.

        Raises:
            UserError: the folder holds a different sweep, and `overwrite` is false.
        """
        held = read_record(self._file, Sweep, INDEX_LIMIT) if self._file.is_file() else None
        before = held.made_by.as_dict() if held is not None and held.made_by is not None else {}
        asked = made_by.as_dict()
        kept = before.get("activations")
        if kept is None or made_by.activations is None:
            before["activations"] = asked.get("activations")
        difference = describe_difference(before, asked) if held is not None else None
        if difference is not None and not overwrite:
            raise UserError(
                f"--output {self.path}: it holds a sweep with {difference}. Name another folder, "
                "or add --overwrite to discard it."
            )
        if difference is not None:
            for name in _OWN:
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
            self.points.mkdir()
            held = None
            kept = None
        shutil.rmtree(self.scratch, ignore_errors=True)  # left by an interrupted run
        made_by.activations = made_by.activations or kept
        self.record = about
        self.record.made_by = made_by
        if held is not None:
            self.record.stages = held.stages
            self.record.dense = held.dense
            self.record.points = held.points
        self.record.save(self._file)

    def note_stages(self, stages: Any, dense: Measures | None = None) -> None:
        """Note times of stages, and the measurements of the dense model, in sweep.json."""
        self.record.stages |= stages
        self.record.dense = dense or self.record.dense
        self.record.save(self._file)

    def report(self, point: SweepPoint) -> RunReport | None:
        """The report of a finished point; None if it is not finished."""
        path = self.points / point.name
        if not (path / REPORT_NAME).is_file():
            return None
        from emp_llm.records.run_report import read_report

        report = read_report(path)
        held = report.point
        wanted = point_record(point)
        if held is not None and point.recipe.sparsity is not None and point.recipe.adaptive:
            wanted.beta = held.beta
        return report if held == wanted and report.evaluation is not None else None

    def measured_so_far(self, point: SweepPoint, masks: str) -> Measures:
        """The measurements of an interrupted run for a point with these masks."""
        path = self._partial(point)
        before = read_json(path) if path.is_file() else {}
        return (
            converted(before["measures"], Measures, str(path))
            if before.get("masks") == masks
            else Measures()
        )

    def note_measures(self, point: SweepPoint, masks: str, measures: Measures) -> None:
        """Note the measurements of an unfinished point."""
        write_json(self._partial(point), {"masks": masks, "measures": measures.as_dict()})

    def finish(self, point: SweepPoint, report: RunReport) -> Measures:
        """Note the measurements of a finished point in sweep.json; returns them."""
        assert report.evaluation is not None
        assert report.point is not None
        measures = report.evaluation.pruned or Measures()
        entry = SweptPoint(
            **msgspec.structs.asdict(report.point),
            sparsity_of_targets=report.targets.sparsity_of_targets,
            sparsity_of_all_parameters=report.targets.sparsity_of_all_parameters or 0.0,
            evaluation=measures,
            masks=report.masks or "",
        )
        known = {other.name: other for other in self.record.points} | {point.name: entry}
        order = dict.fromkeys([planned.name for planned in self._planned if planned.name in known])
        self.record.dense = report.evaluation.dense
        self.record.points = [known[name] for name in order | dict.fromkeys(known)]
        self.record.save(self._file)
        self._partial(point).unlink(missing_ok=True)
        return measures

    def _partial(self, point: SweepPoint) -> Path:
        """The file with the measurements of an unfinished point."""
        return self.points / f".{point.name}.measures.json"

    def _ours(self) -> bool:
        """Whether the path is the folder of a sweep that has at least begun, or empty."""
        if not self.path.is_dir():
            return False
        if self._file.is_file():
            return True
        # By a run that was killed at its first file.
        begun = {"points", f".{SWEEP_NAME}.lock", f".{SWEEP_NAME}.partial"}
        names = {entry.name for entry in self.path.iterdir()}
        return names <= begun and not (self.points.is_dir() and any(self.points.iterdir()))


def show(result: Sweep | SweepDryRun) -> None:
    """Print the table of all points; for a dry run, names of the points, the targets, and the
    disk space of the checkpoints.
    """
    if isinstance(result, SweepDryRun):
        coverage = result.coverage
        print(
            *result.points,
            f"{count_of(len(result.points), 'point')} to measure, and the dense model",
            sep="\n",
        )
        inside = coverage.matrices - coverage.matrices_outside
        print(
            f"targets: {inside} of {count_of(coverage.matrices_in_blocks, 'matrix', 'matrices')} "
            "in blocks"
        )
        if result.disk_bytes:
            print(f"disk: {format_bytes(result.disk_bytes)} for the checkpoints")
        return
    from emp_llm.reporting.run_tables import sweep_table

    print(sweep_table(result))


if __name__ == "__main__":
    run(sweep, show)
