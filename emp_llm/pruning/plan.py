"""The plan of a run: the layers of a model chosen by a recipe, and the share of the model that they cover."""

import logging
from pathlib import Path

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.common.wording import quotable
from emp_llm.models.architecture import Architecture, check_calibrated
from emp_llm.models.layers import Layer
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.mask_device import row_pruner
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.recipe import scheme_of

logger = logging.getLogger(__name__)


class Plan:
    """A model's targets. Nothing is written, and the model is not run.

    Args:
        architecture: of the model.
        recipe: chooses the targets. `pruner_of` accepts other recipes for the same targets.
        mask_device: the device that decides masks.
        with_images: calibration data holds images, which reach the vision tower.

    Attributes:
        checkpoint, architecture: of the model.
        chosen: the targets, in the model's order.
        coverage: the share of the model that they cover.

    Raises:
        UserError: no layer matches, or most of the model cannot be pruned.
    """

    def __init__(
        self, architecture: Architecture, recipe: Recipe, mask_device: str = "auto", with_images: bool = False
    ) -> None:
        self.checkpoint = architecture.checkpoint
        self.architecture = architecture
        self._mask_device = mask_device
        self._with_images = with_images
        self.chosen = self.architecture.select(recipe.targets, recipe.ignore, recipe.tower)
        self.coverage = self.architecture.coverage(self.chosen, recipe.tower)
        self.coverage.check(recipe.targets, recipe.allow_partial)
        no_inputs = next((target for target in self.chosen if target.layer.kind == "embedding"), None)
        if recipe.needs_activations and no_inputs is not None:
            raise UserError(f"{no_inputs.name}: an embedding has no input activations; use a magnitude method.")

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        name: str,
        recipe: Recipe,
        trust_remote_code: bool = False,
        mask_device: str = "auto",
        with_images: bool = False,
    ) -> "Plan":
        """The plan for a model folder; other arguments and errors as for the class.

        Args:
            name: the user's name for the model.
            trust_remote_code: run code from the model's folder.

        Raises:
            UserError: the folder is no checkpoint, or the model is quantised.
        """
        checkpoint = Checkpoint(folder)
        _check_unquantised(checkpoint, name)
        names_suffice = not recipe.needs_activations  # no forward pass needs the model's class
        architecture = Architecture.of_checkpoint(checkpoint, recipe.blocks, trust_remote_code, names_suffice)
        plan = cls(architecture, recipe, mask_device, with_images)
        if recipe.needs_activations:
            check_calibrated([target.layer for target in plan.chosen], with_images)
        return plan

    def pruner_of(self, recipe: Recipe) -> Pruner:
        """The pruner of the targets for a recipe."""
        scheme = scheme_of(recipe, {target.name: target.matrix.numel for target in self.chosen})
        rows = row_pruner(self._mask_device, scheme)
        return Pruner(
            self.checkpoint,
            self.chosen,
            scheme,
            least_tokens=recipe.min_expert_tokens,
            rows=rows,
            given=recipe.scores,
        )

    def layers_to_calibrate(self) -> list[Layer]:
        """All linear layers, so that the activations can be reused for other targets, and all targets."""
        everything = self.architecture.select("all-linear") + self.chosen
        if self._with_images and self.architecture.reads_images:
            everything += self.architecture.select("all-linear", tower="vision")
        return list(dict.fromkeys(target.layer for target in everything))


def _check_unquantised(checkpoint: Checkpoint, name: str) -> None:
    """Raise UserError for a quantised model, unless it is FP8, whose weights can be removed as they are stored."""
    settings = checkpoint.config.get("quantization_config")
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method != "fp8":
        how = f" ({quotable(method)})" if isinstance(method, str) else ""
        raise UserError(f"{name}: it is already quantised{how}. Prune the original model and quantise the result.")
