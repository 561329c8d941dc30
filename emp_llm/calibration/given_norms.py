"""Input norms from a file of the user, in place of a calibration. Imports no torch before a file
is read.
"""

import logging
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.calibration.texts import generates
from emp_llm.checkpoint.checkpoint import config_digest
from emp_llm.common.errors import UserError
from emp_llm.options.base import GivenOptions
from emp_llm.options.calibration import NormOptions
from emp_llm.options.model import QuantizationOptions
from emp_llm.options.recipe import Recipe
from emp_llm.records.source import ModelIdentity

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations

logger = logging.getLogger(__name__)
_OF_NORMS = tuple(field.name for field in fields(NormOptions))
_OF_TEXT = {"calibration", "samples", "seqlen", "seed"}
_OF_PASSES = tuple(field.name for field in fields(QuantizationOptions))  # of prune


def read_given_norms(
    options: NormOptions, recipe: Recipe, given: GivenOptions, checks: bool = False
) -> "Activations | None":
    """The activations of --activations, if given and needed. Options without effect, of the
    `given` ones, are logged.

    Args:
        checks: a text that is given checks the run, also if the recipe needs none.
    """
    if checks and options.calibration is not None:
        given = GivenOptions(given - _OF_TEXT)
    if not recipe.needs_activations:
        unused = _flags(
            options,
            given & ({"activations", "execution"} if recipe.moves else {*_OF_NORMS, *_OF_PASSES}),
        )
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            logger.warning(
                "warning: %s %s no effect: method %s needs no activations.",
                ", ".join(unused),
                verb,
                recipe.method,
            )
        return None
    if options.activations is None:
        return None
    if not recipe.moves and generates(options.text_name):
        raise UserError(
            "--calibration self: --activations holds the norms of a text already. "
            "Leave out one of them."
        )
    unused = (
        [] if recipe.moves else _flags(options, given & {*_OF_NORMS, *_OF_PASSES} - {"activations"})
    )
    if unused:
        logger.info(
            "no effect, because the norms of --activations are used: %s.", ", ".join(unused)
        )
    from emp_llm.calibration.activations import Activations

    return Activations.load(options.activations)


def _flags(options: NormOptions, names: Set[str]) -> list[str]:
    """The flags of options; a switch that is off has the prefix "no-"."""
    ordered = [name for name in (*_OF_NORMS, *_OF_PASSES) if name in names]
    return [
        f"--{'no-' if getattr(options, name) is False else ''}{name.replace('_', '-')}"
        for name in ordered
    ]


def warn_if_foreign(activations: "Activations", identity: str, folder: Path) -> None:
    """Warn if activations come from a model with other weights or another config, whose shapes may
    be the same.
    """
    about = activations.about
    model = ModelIdentity(identity=identity, sha256_of_config=config_digest(folder))
    words = None if about.identity is None else about.difference(model)
    if words is not None:
        name = about.model or "an unnamed model"
        logger.warning("warning: the activations come from %s %s (from %s).", words, folder, name)
