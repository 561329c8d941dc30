"""The stage that fits the kept weights to the calibration text: a refit of the masks, or a method that chooses its own."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.commands import PruneOptions
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.kept_masks import KeptMasks, removed_of
from emp_llm.pruning.pruner import Pruner
from emp_llm.records.run_report import FitRecord
from emp_llm.records.source import CalibrationRecord
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.storage.output.work_folder import WorkFolder

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.calibration import Calibration, ForwardPasses
    from emp_llm.refit.fitters import Fitted, Fitter
    from emp_llm.refit.refit_pass import RefitPass


class RefitStage:
    """Fits the kept weights.

    Args:
        models: loads the dense model.
        pruner: decides the masks.
        recipe: of the run.
        calibration: the text.
        options: of the forward passes.
        work: the unfinished output; finished blocks are kept there.
        norms: returns the norms for the pruner, or None.

    Attributes:
        files: the fitted weights.
    """

    name = "refit"

    def __init__(
        self,
        models: RunModels,
        pruner: Pruner,
        recipe: Recipe,
        calibration: "Calibration",
        options: CalibrationOptions,
        work: WorkFolder,
        norms: "Callable[[], Activations | None]",
    ) -> None:
        from emp_llm.refit.fitted_weights import FittedFiles

        self.files: FittedFiles = FittedFiles(work.fitted, lambda block: work.note(fitted=block))
        self._models = models
        self._pruner = pruner
        self._recipe = recipe
        self._calibration = calibration
        self._options = options
        self._work = work
        self._norms = norms

    def finished(self) -> bool:
        done = ranks().share(self._work.get("refitted") if ranks().main else None)
        if done is not None:
            self._models.stopwatch.record |= done
        return done is not None

    def run(self) -> None:
        norms = self._norms()
        if norms is not None:
            self._pruner.scores.use(norms)
        settle_budget(self._pruner)
        model = self._models.dense()
        with self._models.stopwatch(self.name):
            refit_pass(self._pruner, self._recipe, self._calibration.text.tokens, self._options).run(model, self.files)
        if ranks().main:
            self._work.note(refitted=dict(self._models.stopwatch.record))

    def origin(self) -> CalibrationRecord:
        """The origin of the fit, for methods without norms."""
        source = self._models.source
        name = source.name if source.revision is not None else source.folder.name
        return self._calibration.origin(CalibrationRecord(model=name, revision=source.revision))


def refit_stage(
    models: RunModels,
    pruner: Pruner,
    options: PruneOptions,
    calibration: "ForwardPasses",
    work: WorkFolder,
    norms: "Callable[[], Activations | None]",
) -> RefitStage:
    """The stage of a run; raises UserError if its data or its model cannot be used for a fit."""
    from emp_llm.calibration.calibration import Calibration

    check_refittable(pruner, options)
    by_blocks = f"{options.fit_flag} runs block by block"
    if not isinstance(calibration, Calibration):
        raise UserError(f"{by_blocks}, on text alone. {options.without_fit}, or leave out image= in --calibration.")
    if pruner.checkpoint.config.get("is_encoder_decoder"):
        raise UserError(f"{by_blocks}, which an encoder-decoder model cannot. {options.without_fit}.")
    return RefitStage(models, pruner, options, calibration, options, work, norms)


def refit_pass(pruner: Pruner, recipe: Recipe, tokens: "Tensor", options: CalibrationOptions) -> "RefitPass":
    """The fit that a recipe asks for.

    Args:
        pruner: of the recipe, with its norms and a settled budget.
        tokens: the calibration text, int64, shape (samples, length).
        options: of the forward passes.
    """
    from emp_llm.refit.fitters import AdmmChoice, ChoosingFitter, MaskedFitter, SparseGptChoice
    from emp_llm.refit.refit_pass import RefitPass
    from emp_llm.selection.budgets import PatternBudget

    least, masks = recipe.min_expert_tokens, KeptMasks(pruner)
    fitter: Fitter
    if not pruner.scheme.criterion.fits:
        fitter = MaskedFitter(masks.of, recipe.refit_damping, least)
    else:
        budget = pruner.scheme.budget
        pattern = (budget.n, budget.m) if isinstance(budget, PatternBudget) else None
        choose: SparseGptChoice | AdmmChoice = SparseGptChoice(partial(removed_of, pruner), pattern)
        if recipe.searches:
            choose = AdmmChoice(masks.counts_of, pattern, recipe.refit_damping)
        fitter = ChoosingFitter(choose, recipe.refit, recipe.refit_damping, masks.of, least)
    targets, restores = fittable(pruner.targets), recipe.restored == "block"
    return RefitPass(targets, tokens, options, fitter, recipe.weighting, recipe.blocks, restores)


def fit_memory(pruner: Pruner, recipe: Recipe) -> int:
    """An upper bound on the memory of a recipe's fit beside the model and the hidden states, in bytes."""
    from emp_llm.reconstruction.admm import admm_workspace_bytes
    from emp_llm.reconstruction.least_squares import workspace_bytes
    from emp_llm.refit.refit_pass import fit_bytes

    return fit_bytes(pruner.targets, recipe.weighting, admm_workspace_bytes if recipe.searches else workspace_bytes)


def fit_disk(pruner: Pruner) -> int:
    """The size of the fitted weights, which lie beside the output until the checkpoint is written."""
    return sum(target.matrix.numel * target.matrix.itemsize for target in pruner.targets)


def check_refittable(pruner: Pruner, recipe: Recipe) -> None:
    """Raise UserError if no target can be fitted, or one is stored in a form whose values cannot."""
    if not fittable(pruner.targets):
        raise UserError(
            f"{recipe.fit_flag} moves weights of the language model's decoder blocks, and no target is in one. "
            f"{recipe.without_fit}."
        )
    scaled = next((target for target in pruner.targets if target.matrix.scales is not None), None)
    if scaled is not None:
        flag = recipe.fit_flag
        raise UserError(f"{scaled.name} is stored in FP8, whose scales {flag} would change. Use the unquantised model.")


def fittable(targets: list[Target]) -> list[Target]:
    """The targets that can be fitted: those in decoder blocks of the language model."""
    return [target for target in targets if target.layer.block is not None and target.layer.tower == "language"]


def fit_records(figures: "dict[str, Fitted]") -> dict[str, FitRecord]:
    """The outcomes of a fit as a report records them."""
    return {
        name: FitRecord(
            tokens=each.tokens,
            damping=each.damping,
            error_before=each.before,
            error_after=each.after,
            held_out_before=each.held_out_before,
            held_out_after=each.held_out_after,
        )
        for name, each in figures.items()
    }


def fit_warnings(figures: "dict[str, Fitted]", pruner: Pruner, recipe: Recipe) -> list[str]:
    """Sentences about targets whose fit is weak: left out, on few tokens, or with a higher damping than asked for."""
    inputs, total = {target.name: target.matrix.columns for target in pruner.targets}, len(figures)
    left = [name for name, each in figures.items() if each.damping is None]
    few = [name for name, each in figures.items() if name not in left and each.tokens < inputs[name]]
    raised = [name for name, each in figures.items() if (each.damping or 0.0) > _asked(recipe, inputs[name], each.tokens)]
    outside = [name for name in inputs if name not in figures]
    said = []
    if outside:
        said.append(
            f"{len(outside)} of {len(inputs)} matrices lie outside the decoder blocks and were not fitted, such as "
            f"{outside[0]}."
        )
    if left:
        said.append(f"{len(left)} of {total} matrices saw too few tokens for a fit and keep their weights, such as {left[0]}.")
    if few:
        said.append(
            f"{len(few)} of {total} matrices were fitted on fewer tokens than they have inputs, such as {few[0]} "
            f"({figures[few[0]].tokens} tokens, {inputs[few[0]]} inputs). Give more --samples."
        )
    if raised:
        most = max(figures[name].damping or 0.0 for name in raised)
        said.append(
            f"the damping of {len(raised)} of {total} matrices was raised, up to {most:g}, because their second moments are "
            f"singular, such as {raised[0]}. Give more --samples, or a higher --refit-damping."
        )
    return said


def _asked(recipe: Recipe, inputs: int, tokens: int) -> float:
    """The damping that a fit begins with."""
    from emp_llm.reconstruction.least_squares import damping_for
    from emp_llm.reconstruction.sparsegpt import SPARSEGPT_DAMPING

    if not recipe.refit and not recipe.searches:
        return SPARSEGPT_DAMPING
    return damping_for(inputs, tokens) if recipe.refit_damping is None else recipe.refit_damping
