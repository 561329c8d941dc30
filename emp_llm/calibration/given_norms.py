"""Input norms from a file of the user, in place of a calibration. Imports no torch before a file is read."""

import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.calibration.texts import generates, has_images
from emp_llm.common.errors import UserError
from emp_llm.options.calibration import NormOptions
from emp_llm.options.recipe import Recipe

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations

logger = logging.getLogger(__name__)


def given_norms(options: NormOptions, recipe: Recipe) -> "Activations | None":
    """The activations of --activations, if given and needed. Options without effect are logged."""
    if not recipe.needs_activations:
        unused = _changed(options) if not recipe.moves else ["--activations"] if options.activations is not None else []
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            logger.warning("warning: %s %s no effect: method %s needs no activations.", ", ".join(unused), verb, recipe.method)
        return None
    if options.activations is None:
        return None
    if not recipe.moves and generates(options.text_name):
        raise UserError("--calibration self: --activations holds the norms of a text already. Leave out one of them.")
    if (options.samples, options.seqlen) != (None, None) and not recipe.moves:
        logger.info("--samples and --seqlen have no effect: the norms of --activations are used.")
    from emp_llm.calibration.activations import Activations

    return Activations.load(options.activations)


def _changed(options: NormOptions) -> list[str]:
    """The flags of the norms' options that do not have their defaults; a switch that is off has the prefix "no-"."""
    values = ((each, getattr(options, each.name)) for each in fields(NormOptions))
    changed = ((each.name, value) for each, value in values if value != each.default)
    return [f"--{'no-' if value is False else ''}{name.replace('_', '-')}" for name, value in changed]


def may_reach_images(options: NormOptions) -> bool:
    """Whether the norms may cover the vision tower: they come from a file, or from data with images."""
    return options.activations is not None or has_images(options.text_name)


def warn_if_foreign(activations: "Activations", identity: str, folder: Path) -> None:
    """Warn if activations come from a model with other weights, whose shapes may be the same."""
    made_by = activations.about.identity
    if made_by is not None and made_by != identity:
        name = activations.about.model or "an unnamed model"
        logger.warning("warning: the activations come from other weights than those of %s (from %s).", folder, name)
