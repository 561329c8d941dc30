"""The stage that updates the kept weights: a refit of the masks, or a search that chooses its own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.commands import PruneOptions
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.kept_masks import KeptMasks, removed_of
from emp_llm.pruning.pruner import Pruner
from emp_llm.records.source import CalibrationRecord
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.selection.budgets import PatternBudget
from emp_llm.storage.output.work_folder import WorkFolder
from emp_llm.update.update import Update, check_update

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from emp_llm.architecture.targets import Target
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.calibration import Calibration, ForwardPasses
    from emp_llm.update.moved import MovedWeights


class RefitStage:
    """Updates the kept weights; `files` holds those that moved. Created by `refit_stage`."""

    name = "refit"

    def __init__(
        self,
        models: RunModels,
        pruner: Pruner,
        options: PruneOptions,
        calibration: "Calibration",
        work: WorkFolder,
        norms: "Callable[[], Activations | None]",
    ) -> None:
        from emp_llm.update.moved import MovedWeights

        self.files: MovedWeights = MovedWeights(work.fitted, lambda block: work.note(fitted=block))
        self._models = models
        self._pruner = pruner
        self._options = options
        self._calibration = calibration
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
            update_weights(model, self._pruner, self._options, self._calibration.text.tokens, self._options, self.files)
        if ranks().main:
            self._work.note(refitted=dict(self._models.stopwatch.record))

    def origin(self) -> CalibrationRecord:
        """The origin of the calibration, for methods without norms."""
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
    """The stage of a run; raises UserError if its data or its model cannot be used for an update."""
    from emp_llm.calibration.calibration import Calibration

    check_update(pruner.targets, options.fit_flag, options.without_fit)
    by_blocks = f"{options.fit_flag} runs block by block"
    if not isinstance(calibration, Calibration):
        raise UserError(f"{by_blocks}, on text alone. {options.without_fit}, or leave out image= in --calibration.")
    if pruner.checkpoint.config.get("is_encoder_decoder"):
        raise UserError(f"{by_blocks}, which an encoder-decoder model cannot. {options.without_fit}.")
    return RefitStage(models, pruner, options, calibration, work, norms)


def update_of(recipe: Recipe, pruner: Pruner) -> Update:
    """The update that a recipe asks for."""
    search: Any = None
    if pruner.scheme.criterion.fits:
        search = "admm" if recipe.searches else "sparsegpt"
    budget = pruner.scheme.budget
    return Update(
        search=search,
        refit=recipe.refit,
        damping=recipe.refit_damping,
        weighting=recipe.weighting,
        target=recipe.restored,
        pattern=(budget.n, budget.m) if isinstance(budget, PatternBudget) else None,
        min_expert_tokens=recipe.min_expert_tokens,
    )


def update_weights(
    model: "PreTrainedModel",
    pruner: Pruner,
    recipe: Recipe,
    tokens: "Tensor",
    options: CalibrationOptions,
    moved: "MovedWeights",
) -> None:
    """Update a model's kept weights by a recipe; `pruner` has its norms and a settled budget."""
    import torch

    from emp_llm.update.walk import update_model

    masks, update = KeptMasks(pruner), update_of(recipe, pruner)

    def counts_of(target: "Target") -> "Tensor":
        if update.search == "sparsegpt":
            return torch.tensor([target.matrix.numel - removed_of(pruner, target)])
        return masks.counts_of(target)

    update_model(
        model,
        pruner.targets,
        tokens,
        update,
        moved,
        mask_of=masks.of,
        counts_of=counts_of,
        batch_size=options.batch_size,
        hidden_states=options.hidden_states,
        blocks=recipe.blocks,
    )


def fit_disk(pruner: Pruner) -> int:
    """The size of the moved weights, which lie beside the output until the checkpoint is written."""
    return sum(target.matrix.numel * target.matrix.itemsize for target in pruner.targets)
