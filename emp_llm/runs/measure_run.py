"""The run of `measure`: its stages, and its file."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from emp_llm.calibration.given_norms import given_norms, may_reach_images, warn_if_foreign
from emp_llm.checkpoint.identity import identity_of
from emp_llm.common.errors import UserError
from emp_llm.common.provenance import command_line, versions
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.hub.local_model import find_model
from emp_llm.options.base import part
from emp_llm.options.commands import MeasureOptions
from emp_llm.options.criterion import GIVEN, CriterionOptions, ScoreOptions
from emp_llm.options.recipe import Recipe, TargetOptions
from emp_llm.pruning.curve import curve_points, kept_of_outcomes, settle_budget
from emp_llm.pruning.measuring import measure_targets
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.recipe import check_ranges, criterion_record, recipe_record
from emp_llm.pruning.summary import matrix_records, sizes_record, targets_record, warnings_of
from emp_llm.records.measure import Measure, MeasureEntry
from emp_llm.records.source import ModelSource, RecipeRecord
from emp_llm.runs.stages.calibrating import CalibrateStage, prepare_calibration
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.sweeping.sweep_points import parse_numbers, parse_words
from emp_llm.selection.arithmetic.definitions import check_beta
from emp_llm.selection.criteria import CRITERIA
from emp_llm.storage.output.output_file import OutputFile, check_output_file

logger = logging.getLogger(__name__)
_CRITERIA = "magnitude,wanda"


class MeasureRun:
    """One run of `measure`, as a context: `with run: run_stages([run.calibrate, run.measure])`.

    Args:
        options: of the command.

    Raises:
        UserError: options are wrong or do not fit together, or the model, the text or the output cannot be used.
    """

    calibrate: CalibrateStage
    measure: "MeasureStage"

    def __init__(self, options: MeasureOptions) -> None:
        self._options = options
        self._recipes = _recipes(options)
        self._betas = _betas(options.betas)
        options.check_loading()
        options.check_calibration()
        if ranks().count > 1:
            raise UserError("measure runs in one process. Calibrate with torchrun first, and give the file as --activations.")
        self._leading = next((recipe for recipe in self._recipes if recipe.needs_activations), self._recipes[0])
        self._given = given_norms(options, self._leading)
        self._source = find_model(options.model, options.revision, options.trust_remote_code)
        self._path = options.output or Path(f"{self._source.short_name}-measure.json")
        check_output_file(self._path, options.overwrite)
        images = self._leading.needs_activations and may_reach_images(options)
        self._plan = Plan.of_folder(
            self._source.folder, self._source.name, self._leading, options.trust_remote_code, "cpu", images
        )
        self._pruners = [self._plan.pruner_of(recipe) for recipe in self._recipes]
        self._stack = ExitStack()

    @property
    def record(self) -> Measure:
        """The record; available when the stages are finished."""
        assert self.measure.record is not None
        return self.measure.record

    def __enter__(self) -> "MeasureRun":
        options = self._options
        models = RunModels(self._source, options, options.trust_remote_code, Stopwatch())
        calibration = None
        if self._leading.needs_activations and self._given is None:
            calibration = prepare_calibration(models, self._plan.architecture, options, blocks=options.blocks)
        self._output = self._stack.enter_context(OutputFile(self._path))
        self.calibrate = CalibrateStage(
            models,
            self._plan.checkpoint,
            calibration,
            self._plan.layers_to_calibrate,
            self._output.progress,
            given=self._given,
            keep=lambda _: models.free(),
        )
        self.measure = MeasureStage(self._recipes, self._pruners, self._plan, self._betas, self._assemble)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.record.save(self._path)
            self._output.publish()
            logger.info("written to %s", self._path)
        self._stack.__exit__(kind, error, traceback)

    def _assemble(self) -> Measure:
        options, checkpoint, norms = self._options, self._plan.checkpoint, self.calibrate.norms
        identity = identity_of(checkpoint)
        if norms is not None:
            warn_if_foreign(norms, identity, checkpoint.folder)
        for recipe, pruner in zip(self._recipes, self._pruners, strict=True):
            if recipe.needs_activations and norms is not None:
                pruner.scores.use(norms, str(options.activations or "the activations"))
        chosen = {name: getattr(options, name) for name in ("targets", "ignore", "min_expert_tokens", "blocks")}
        chosen |= {} if options.tower == "language" else {"tower": options.tower}
        return Measure(
            source=ModelSource(model=self._source.name, revision=self._source.revision, identity=identity),
            command=command_line(),
            recipe=RecipeRecord(**chosen, criterion=criterion_record(self._recipes[-1])),
            calibration=None if norms is None else norms.about,
            versions=versions(),
            measures=[],
        )


class MeasureStage:
    """Measures all targets by several recipes.

    Args:
        recipes, pruners: one pruner for each recipe.
        plan: of the targets.
        betas: of the curve of the sparsity.
        assemble: gives the pruners their norms, and creates the record without its measures.

    Attributes:
        record: the result; None until the stage is finished.
    """

    name = "measure"

    def __init__(
        self, recipes: list[Recipe], pruners: list[Pruner], plan: Plan, betas: list[float], assemble: Callable[[], Measure]
    ) -> None:
        self.record: Measure | None = None
        self._recipes = recipes
        self._pruners = pruners
        self._plan = plan
        self._betas = betas
        self._assemble = assemble

    def finished(self) -> bool:
        return False

    def run(self) -> None:
        record, numbers = self._assemble(), {}  # type: ignore[var-annotated]
        for pruner in self._pruners:
            settle_budget(pruner, numbers)
        measured = zip(self._recipes, self._pruners, measure_targets(self._pruners), strict=True)
        record.measures = [self._entry(*each) for each in measured]
        self.record = record

    def _entry(self, recipe: Recipe, pruner: Pruner, outcomes: list[Outcome]) -> MeasureEntry:
        matrices = matrix_records(outcomes, pruner)
        targets = targets_record(outcomes, self._plan.coverage, pruner)
        weights, parameters = sum(outcome.target.matrix.numel for outcome in outcomes), self._plan.coverage.parameters
        chosen = recipe_record(recipe)
        return MeasureEntry(
            criterion=recipe.criterion_name,
            order=2.0 if recipe.order is None else recipe.order,
            score=chosen.score,
            count_by=chosen.count_by,
            targets=targets,
            sizes=sizes_record(outcomes, self._plan.checkpoint, fitted=False),
            matrices=matrices,
            curve=curve_points(self._betas, kept_of_outcomes(pruner, outcomes, self._betas), weights, parameters),
            warnings=warnings_of(matrices, pruner),
        )


def _betas(text: str) -> list[float]:
    """The betas of --betas, in ascending order."""
    betas = sorted(set(parse_numbers(text, "--betas")))
    try:
        for beta in betas:
            check_beta(beta)
    except ValueError as error:
        raise UserError(f"--betas {text!r}: {error}.") from error
    return betas


def _recipes(options: MeasureOptions) -> list[Recipe]:
    """A recipe at beta 1 for each criterion and order."""
    kinds: tuple[type[Any], ...] = (TargetOptions, ScoreOptions, CriterionOptions)
    common = Recipe(**{name: value for kind in kinds for name, value in vars(part(options, kind)).items()})
    common.check_score()
    recipes = []
    criteria = parse_words(_CRITERIA if options.criteria is None else options.criteria, "--criteria")
    if options.criteria is None and common.own_name is not None:
        criteria.append(common.own_name)
    for criterion in dict.fromkeys(criteria):
        if criterion in CRITERIA and CRITERIA[criterion].fits:
            raise UserError(f"--criteria: {criterion} has no scores to measure; leave it out.")
        if criterion not in CRITERIA:
            raise UserError(f"--criteria: {criterion!r} is not one of {', '.join(n for n in CRITERIA if n != GIVEN)}.")
        orders = dict.fromkeys(parse_numbers(options.orders, "--orders"))
        recipes += [replace(common.with_method(f"emp-{criterion}"), order=order) for order in orders]
    if options.score is not None and not any(recipe.score == options.score for recipe in recipes):
        raise UserError(
            f"--score {options.score} is for criteria that need activations, and --criteria has none that it changes."
        )
    for recipe in recipes:
        recipe.check_recipe()
        check_ranges(recipe)
    return recipes
