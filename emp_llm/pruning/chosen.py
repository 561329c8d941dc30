"""The weights to prune: the layers of a model that a recipe chooses, and the share of the model
that they cover.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError, quotable
from emp_llm.models.architecture import Architecture, Target, check_calibrated, check_coverage
from emp_llm.models.layers import Layer
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.counts import check_groups, match
from emp_llm.pruning.scores import Scores
from emp_llm.records.run_report import TargetsRecord
from emp_llm.walk.checks import check_blocks_separable, check_update


@dataclass(frozen=True)
class Chosen:
    """A model's targets.

    Attributes:
        architecture: of the model.
        targets: in the model's order.
        coverage: the share of the model that they cover.
    """

    architecture: Architecture
    targets: list[Target]
    coverage: TargetsRecord

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's files, or its weights in memory."""
        return self.architecture.checkpoint

    def layers_to_calibrate(self) -> list[Layer]:
        """All linear layers, so that the activations can be reused for other targets, and all
        targets.
        """
        everything = self.architecture.select("all-linear") + self.targets
        return list(dict.fromkeys(target.layer for target in everything))


def stored_bytes(targets: Sequence[Target]) -> int:
    """Size of some targets, as they are stored."""
    return sum(target.matrix.numel * target.matrix.itemsize for target in targets)


def choose_targets(architecture: Architecture, recipe: Recipe) -> Chosen:
    """The layers of a model that a recipe chooses. Nothing is written, and the model is not run.

    Raises:
        UserError: no layer matches, or most of the model cannot be pruned.
    """
    targets = architecture.targets_of(recipe.targets)
    coverage = architecture.coverage(targets, recipe.targets.tower)
    check_coverage(coverage, recipe.targets.layers, recipe.targets.allow_partial)
    no_inputs = next((target for target in targets if target.layer.purpose == "embedding"), None)
    if recipe.needs_activations and no_inputs is not None:
        raise UserError(
            f"{no_inputs.name}: an embedding has no input activations; use a magnitude method."
        )
    return Chosen(architecture, targets, coverage)


def scores_of(chosen: Chosen, recipe: Recipe, config: Mapping[str, Any]) -> Scores:
    """The scores of the targets by a recipe, which gets the numbers of the run that it matches.

    Args:
        config: of the model.

    Raises:
        UserError: the recipe does not fit the targets.
    """
    targets = chosen.targets
    recipe = match(recipe, targets)
    check_groups(recipe, targets)
    if recipe.update is not None:
        check_update(targets, recipe.update_flag, recipe.without_update)
        check_blocks_separable(config, recipe.update_flag, recipe.without_update)
    return Scores(chosen.checkpoint, targets, recipe)


def targets_of_folder(
    folder: Path,
    name: str,
    recipe: Recipe,
    trust_remote_code: bool = False,
    calibrates: bool = True,
) -> Chosen:
    """The targets of a model in a folder, which a prune can read and a calibration can reach.

    Args:
        name: the user's name for the model.
        trust_remote_code: run code from the model's folder.
        calibrates: the norms that the recipe needs come from a text, not from a file.

    Raises:
        UserError: the folder is no checkpoint; the model is quantised (not to FP8, whose weights
            are removed as stored); no layer matches, or most of the model cannot be pruned.
    """
    checkpoint = Checkpoint(folder)
    settings = checkpoint.config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if settings is not None and method != "fp8":
        named = f" ({quotable(method)})" if isinstance(method, str) else ""
        raise UserError(
            f"{name}: it is already quantised{named}. Prune the original model and "
            "quantise the result."
        )
    names_suffice = not recipe.needs_activations  # no forward pass needs the model's class
    architecture = Architecture.of_checkpoint(
        checkpoint, recipe.targets.blocks, trust_remote_code, names_suffice
    )
    chosen = choose_targets(architecture, recipe)
    if recipe.needs_activations and calibrates:
        check_calibrated([target.layer for target in chosen.targets])
    return chosen
