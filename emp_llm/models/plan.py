"""What a run will prune: the layers of a model, the targets that a recipe chooses among them, and how much of it they are."""

import logging
from pathlib import Path

from transformers import PreTrainedModel

from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.errors import UserError
from emp_llm.models.layers import Layer
from emp_llm.models.pruning import Pruner
from emp_llm.models.recipe import Recipe
from emp_llm.models.targets import Architecture, build_skeleton

logger = logging.getLogger(__name__)


class Plan:
    """A model's targets; nothing is written or run.

    Args:
        folder, name: the model folder, and what the user called it.
        recipe: what chooses the targets; further recipes of the same targets may be asked of `pruner_of`.
        trust_remote_code: run code from the model's folder.
        blocks: name of the list of decoder blocks; None: found by structure.

    Attributes:
        checkpoint, architecture: of the model.
        chosen: the targets, in the model's order.
        coverage: how much of the model they are.

    Raises:
        UserError: it is quantised, nothing matches, or most of it cannot be pruned.
    """

    def __init__(
        self, folder: Path, name: str, recipe: Recipe, trust_remote_code: bool = False, blocks: str | None = None
    ) -> None:
        self.checkpoint = Checkpoint(folder)
        if "quantization_config" in self.checkpoint.config:
            raise UserError(f"{name}: it is quantised already. Prune the original model and quantise the result.")
        self.architecture = Architecture(self.checkpoint, _skeleton(folder, recipe, trust_remote_code), blocks)
        self.chosen = self.architecture.select(recipe.targets, recipe.ignore)
        self.coverage = self.architecture.coverage(self.chosen)
        self.coverage.check(recipe.targets, recipe.allow_partial)
        no_inputs = next((target for target in self.chosen if target.layer.kind == "embedding"), None)
        if recipe.needs_activations and no_inputs is not None:
            raise UserError(f"{no_inputs.name}: an embedding has no input activations; use a magnitude method for it.")

    def pruner_of(self, recipe: Recipe) -> Pruner:
        """What prunes the targets by a recipe."""
        scheme = recipe.scheme({target.name: target.matrix.numel for target in self.chosen})
        return Pruner(self.checkpoint, self.chosen, scheme, least_tokens=recipe.min_expert_tokens)

    def layers_to_calibrate(self) -> list[Layer]:
        """Every linear layer, so that the activations serve other targets too, and whatever else was named."""
        everything = self.architecture.select("all-linear") + self.chosen
        return list(dict.fromkeys(target.layer for target in everything))


def _skeleton(folder: Path, recipe: Recipe, trust_remote_code: bool) -> PreTrainedModel | None:
    try:
        return build_skeleton(folder, trust_remote_code)
    except UserError as error:
        if recipe.needs_activations:
            raise
        logger.warning("%s Magnitude needs no model class: its layers are taken from the tensors' names.", error)
        return None
