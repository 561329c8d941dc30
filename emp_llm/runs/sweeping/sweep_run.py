"""The run of `sweep`: its stages, and its folder."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.provenance import command_line
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.common.wording import count_of, format_bytes
from emp_llm.evaluation.evaluator import BATCH_SIZE, Evaluator
from emp_llm.evaluation.results_file import new_results
from emp_llm.evaluation.suites import suite_of
from emp_llm.hub.local_model import find_model
from emp_llm.models.architecture import Coverage
from emp_llm.options.base import part
from emp_llm.options.commands import METHODS, SweepOptions
from emp_llm.options.criterion import CriterionOptions, ScoreOptions
from emp_llm.options.recipe import Recipe, ShareOptions, TargetOptions
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.recipe import check_ranges, criterion_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import Results
from emp_llm.records.run_report import PointRecord
from emp_llm.records.source import ModelSource, RecipeRecord
from emp_llm.records.sweep import Sweep, SweepMadeBy
from emp_llm.runs.stages.calibrating import (
    CalibrateStage,
    given_norms,
    may_reach_images,
    prepare_calibration,
    warn_if_foreign,
)
from emp_llm.runs.stages.evaluating import EvaluateStage
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import stage_records
from emp_llm.runs.sweeping.sweep_folder import SweepFolder
from emp_llm.runs.sweeping.sweep_point_stage import PointStage, SweepShared
from emp_llm.runs.sweeping.sweep_points import SweepPoint, plan_points

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.calibration import ForwardPasses


_COMMON: tuple[type[Any], ...] = (TargetOptions, ShareOptions, ScoreOptions, CriterionOptions)  # options that all points share


@dataclass(frozen=True)
class SweepDryRun:
    """The plan of a sweep.

    Attributes:
        points: the unfinished points.
        coverage: the targets' share of the model.
        disk_bytes: size of the checkpoints under --keep.
    """

    points: list[PointRecord]
    coverage: Coverage
    disk_bytes: int
    dry_run: bool = True


def dry_run_words(plan: SweepDryRun) -> str:
    """The plan as text: names of the points, the targets, and the disk space for kept checkpoints."""
    coverage = plan.coverage
    lines = [point.name for point in plan.points]
    lines.append(f"{count_of(len(lines), 'point')} to measure, and the dense model")
    inside = coverage.targets - coverage.targets_outside
    lines.append(f"targets: {inside} of {count_of(coverage.matrices, 'matrix', 'matrices')} in blocks")
    return "\n".join(lines + ([f"disk: {format_bytes(plan.disk_bytes)} for the checkpoints"] if plan.disk_bytes else []))


class SweepRun:
    """One sweep, as a context: `with run: run_stages([run.calibrate, run.evaluate_dense, *run.points])`.

    Args:
        options: of the command.

    Raises:
        UserError: options are wrong or do not fit together, or the model, the text or the output cannot be used.
    """

    calibrate: CalibrateStage
    evaluate_dense: EvaluateStage
    points: list[PointStage]

    def __init__(self, options: SweepOptions) -> None:
        self._options = options
        chosen = {name: value for kind in _COMMON for name, value in vars(part(options, kind)).items()}
        common = Recipe(group=options.group, **chosen)
        own = "" if common.own_name is None else f",emp-{common.own_name},{common.own_name}"
        self._planned = plan_points(
            f"{METHODS}{own}" if options.methods is None else options.methods,
            options.betas,
            options.orders,
            options.sparsities,
            options.patterns,
            options.matched_baselines,
            options.emp_sparsities,
        )
        self._common = common
        for point in self._planned:
            if point.baseline_of is None:
                self._recipe(point).check_recipe()
                check_ranges(self._recipe(point))
        self._check_fits()
        self._check_score()
        options.check()
        if ranks().count > 1:
            raise UserError(
                "A sweep runs in one process. Start it without torchrun; --device-map spreads a large model over devices."
            )
        self._suite = suite_of(options)
        scored = [self._recipe(point) for point in self._planned if self._recipe(point).needs_activations]
        leading = scored[0] if scored else self._recipe(self._planned[0])
        self._scored = bool(scored)
        self._given = given_norms(options, leading)
        self._source = find_model(options.model, options.revision, options.trust_remote_code)
        images = leading.needs_activations and may_reach_images(options)
        self._plan = Plan.of_folder(
            self._source.folder, self._source.name, leading, options.trust_remote_code, options.mask_device, images
        )
        if self._given is not None:
            self._plan.pruner_of(leading).scores.use(self._given, str(options.activations))
        path = options.output or Path(f"{self._source.short_name}-sweep")
        self._folder = SweepFolder(path, self._plan.checkpoint, self._planned, options.overwrite)
        self._stack = ExitStack()

    def _check_fits(self) -> None:
        """Raise UserError for a method that changes the kept weights: the points of a sweep only mask them."""
        fits = next((point.method for point in self._planned if self._recipe(point).fits), None)
        if fits is not None:
            raise UserError(f"--methods: a sweep only sets weights to zero; run prune --method {fits} instead.")

    def _check_score(self) -> None:
        """Raise UserError for options of the scores that no point uses."""
        self._common.check_score()
        self._common.check_shares()
        fixed = "methods with a fixed sparsity and activations"
        for name, needed in (("score", "methods that need activations"), ("count_by", "emp methods"), ("shares", fixed)):
            asked = getattr(self._common, name)
            if asked is not None and not any(getattr(self._recipe(point), name) == asked for point in self._planned):
                raise UserError(f"--{name.replace('_', '-')} {asked} is for {needed}, and --methods has none that it changes.")

    def dry_run(self) -> SweepDryRun:
        """The plan of the sweep."""
        unfinished = [point.record() for point in self._planned if self._folder.report(point) is None]
        disk = self._plan.checkpoint.output_bytes * len(self._planned) if self._options.keep else 0
        return SweepDryRun(unfinished, self._plan.coverage, disk)

    @property
    def record(self) -> Sweep:
        """The content of sweep.json."""
        return self._folder.record

    def __enter__(self) -> "SweepRun":
        with ExitStack() as guard:
            guard.push(self._stack)  # closes it if something below fails
            self._stack.enter_context(self._folder)
            self._begin()
            guard.pop_all()
        return self

    def _begin(self) -> None:
        """Resume the sweep in the folder or begin one, and prepare the stages."""
        options, folder, stopwatch = self._options, self._folder, Stopwatch()
        models = RunModels(self._source, options, options.trust_remote_code, stopwatch)
        calibration: ForwardPasses | None = None
        norms_origin: dict[str, Any] | None = None if self._given is None else {"norms": self._given.digest}
        if self._scored and self._given is None:
            calibration = prepare_calibration(models, self._plan.architecture, options, blocks=options.blocks)
            norms_origin = calibration.signature
        dense = new_results(self._source, self._suite, BATCH_SIZE, options.dtype, options.device_map)
        identity = dense.made_by.model.identity or ""
        if self._given is not None:
            warn_if_foreign(self._given, identity, self._source.folder)
        source = ModelSource(model=self._source.name, revision=self._source.revision, identity=identity)
        made_by = SweepMadeBy(
            **{name: getattr(dense.made_by, name) for name in dense.made_by.__struct_fields__},
            recipe=self._shared_recipe(),
            activations=norms_origin,
        )
        folder.begin(made_by, Sweep(command=command_line(), source=source, suite=self._suite.name))
        self._add_stages(models, calibration, dense, source)

    def _add_stages(self, models: RunModels, calibration: "ForwardPasses | None", dense: Results, source: ModelSource) -> None:
        folder, evaluator = self._folder, Evaluator(self._suite, models.tokenizer)
        if self._given is not None and not folder.activations.is_file():
            self._given.save(folder.activations)
        self.calibrate = CalibrateStage(
            models,
            self._plan.checkpoint,
            calibration,
            self._plan.layers_to_calibrate,
            folder.calibration,
            given=self._given,
            restore=folder.collected_norms,
            keep=lambda norms: self._keep_norms(norms, models.stopwatch),
        )
        self.evaluate_dense = EvaluateStage(
            "evaluate dense",
            evaluator,
            folder.dense,
            lambda: dense,
            models.dense,
            models.stopwatch,
            after=lambda: self._note_dense(models.stopwatch),
        )
        shared = SweepShared(
            self._plan,
            folder,
            models,
            evaluator,
            self._options,
            source,
            self._dense_measures,
            lambda: self.calibrate.norms,
            self._stack,
        )
        count = len(self._planned)
        self.points = [
            PointStage(point, point.recipe(self._common, folder.points), shared, f"{number} of {count}")
            for number, point in enumerate(self._planned, 1)
        ]

    def _keep_norms(self, norms: "Activations", stopwatch: Stopwatch) -> None:
        norms.save(self._folder.activations)
        self._folder.record.stages |= stage_records(stopwatch)
        self._folder.save()

    def _note_dense(self, stopwatch: Stopwatch) -> None:
        self._folder.record.stages |= stage_records(stopwatch)
        self._folder.record.dense = self.evaluate_dense.measures
        self._folder.save()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _dense_measures(self) -> Measures:
        assert self.evaluate_dense.measures is not None
        return self.evaluate_dense.measures

    def _recipe(self, point: SweepPoint) -> Recipe:
        return point.recipe(self._common, Path())

    def _shared_recipe(self) -> RecipeRecord:
        """The fields that the recipes of all points share."""
        names = ("group", "targets", "ignore", "min_expert_tokens", "blocks")
        criterion = criterion_record(self._common)
        record = RecipeRecord(**{name: getattr(self._common, name) for name in names}, criterion=criterion)
        record.score = "relative" if self._common.score == "relative" else None
        record.count_by = self._common.count_by
        if self._common.shares == "owl":
            record.shares, record.owl_lambda, record.owl_m = "owl", self._common.owl_lambda, self._common.owl_m
        return record
