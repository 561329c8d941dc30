"""The options of `prune`, and the conflicts between them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.common.declared import Flag, flag_of, options_of
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import check_one_process
from emp_llm.options.recipe import BY_GRADIENTS, Recipe, Structure
from emp_llm.options.shared import (
    GivenOptions,
    LoadingOptions,
    MaskDevice,
    ModelOptions,
    NormOptions,
    Propagate,
    QuantizationOptions,
    ReportTo,
)
from emp_llm.options.words import RecipeWords

# Options that are for weights and not for units.
_OF_WEIGHTS = (
    "criterion",
    "scores",
    "score_map",
    "score",
    "count_by",
    "ignore",
    "targets",
    "tower",
    "pattern",
    "shares",
    "neff_dtype",
    "match_by",
    "group",
    "propagate",
    "mask_device",
    "allow_partial",
)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(QuantizationOptions, LoadingOptions, NormOptions, ModelOptions):
    """The options of `prune` that are not part of the recipe."""

    propagate: Annotated[
        Propagate, Flag("Calibrate each block on the outputs of dense or of pruned blocks.")
    ] = "dense"
    mask_device: MaskDevice = "cpu"
    parameters: Annotated[
        float | str | None, Flag("Remove weights until at most this many are left, such as 6e9.")
    ] = None
    memory: Annotated[
        float | str | None,
        Flag("Remove weights until the model, packed, takes at most this, such as 24GB."),
    ] = None
    loss: Annotated[
        float | str | None,
        Flag(
            "Remove as many weights as possible while the rise in held-out perplexity plus its "
            "standard error stays below this, such as 2%."
        ),
    ] = None
    check: Annotated[
        bool,
        Flag(
            "Measure held-out perplexity before and after; --evaluate replaces this.",
            flag="--check/--no-check",
        ),
    ] = True
    evaluate: Annotated[
        str | None,
        Flag(
            "Evaluate the dense and the pruned model with this suite (name or file); "
            ",limit=N shortens it."
        ),
    ] = None
    baseline: Annotated[
        Path | None, Flag("Results file of the dense model, used instead of evaluating it.")
    ] = None
    output: Annotated[
        Path | None, Flag("Folder to write; default: MODEL-METHOD in the current folder.")
    ] = None
    overwrite: Annotated[
        bool, Flag("Replace an existing checkpoint at the output, and on the Hub.")
    ] = False
    report_to: ReportTo = "none"
    dry_run: Annotated[bool, Flag("Print the plan of the run, and write nothing.")] = False
    push_to_hub: Annotated[
        str | None, Flag("Push the result to USER/NAME on the Hub, with a model card.")
    ] = None
    private: Annotated[bool, Flag("Create that repository as private.")] = False
    push_revision: Annotated[
        str | None, Flag("Branch to push to; created if missing. (--revision is the source's.)")
    ] = None


def check_wanted(options: PruneOptions, given: GivenOptions, reads_text: bool) -> None:
    """Raise UserError if a check is asked for, and an evaluation replaces it or no text is read."""
    if "check" not in given or not options.check:
        return
    if options.evaluate is not None:
        raise UserError("--check: --evaluate measures both models. Leave out one of them.")
    if not reads_text:
        raise UserError(
            "--check measures text after that of the calibration, and this run reads "
            "none. Name a text with --calibration, or leave it out."
        )


def check_recipe(words: RecipeWords, options: PruneOptions, given: GivenOptions) -> Recipe:
    """The recipe that options ask for.

    Args:
        given: the names of the options of the call.

    Raises:
        UserError: an option is invalid, or options exclude each other.
    """
    if "structure" in words:
        _check_for_units(given)
    recipe = words.recipe
    if "report_to" in given and recipe.heal is None:
        raise UserError("--report-to has no effect without --heal. Add --heal, or leave it out.")
    structure = recipe.structure
    if structure is not None:
        _check_structured(recipe, structure, options)
        if "min_expert_tokens" in given and recipe.update is None:
            raise UserError(
                f"--min-expert-tokens with --structure {structure.units} is for a refit. Add "
                "--refit, or leave it out."
            )
    if options.parameters is not None or options.memory is not None:
        for name in ("sparsity", "pattern", "match", "beta", "neff_dtype"):
            if name in given:
                raise UserError(
                    f"--parameters and --memory set the sparsity; leave out {flag_of(name)}, or "
                    "both of them."
                )
        if structure is not None and structure.keep_shapes:
            raise UserError(
                "--keep-shapes keeps the size of the model; leave it out, or "
                "--parameters and --memory."
            )
    if options.loss is not None:
        _check_loss(recipe, options, given)
    if options.baseline is not None and options.evaluate is None:
        raise UserError("--baseline needs an evaluation; add --evaluate SUITE.")
    if options.push_to_hub is None and (options.private or options.push_revision is not None):
        raise UserError("--private and --push-revision need a push; add --push-to-hub USER/NAME.")
    if words.get("shares") == "cost":
        _check_cost(options)
    if options.load_in_8bit or options.load_in_4bit:
        _check_quantised(recipe, words, options)
    if recipe.update is not None and options.execution == "model":
        raise UserError(
            f"{recipe.update_flag} runs the model block by block; leave out --execution model."
        )
    if structure is None:
        _check_text(recipe, options)
    elif not options.dry_run:
        _check_amount(recipe, structure.units, given)
    return recipe


def _check_text(recipe: Recipe, options: PruneOptions) -> None:
    """Raise UserError for what does not go with the calibration of a recipe of weights."""
    if options.propagate == "pruned":
        if options.execution == "model":
            raise UserError("--propagate pruned works block by block; leave out --execution model.")
        recipe.check_propagated(options.activations)
    if recipe.moves:
        flag = recipe.update_flag if recipe.update is not None else "--heal"
        if options.calibration is None and options.activations is not None:
            alternative = "" if recipe.searches else f", or {flag}"
            raise UserError(
                f"{flag} fits weights to the calibration text, and --activations holds only its "
                f"norms. Leave out --activations{alternative}; or name the text with --calibration."
            )
        if options.calibration is None and not recipe.searches and not recipe.needs_activations:
            raise UserError(
                f"{flag} fits weights to a calibration text, and method {recipe.method} needs "
                f"none. Leave out {flag}, or name the text with --calibration."
            )


def _check_quantised(recipe: Recipe, words: RecipeWords, options: PruneOptions) -> None:
    """Raise UserError for what does not go with quantised weights."""
    flag = recipe.update_flag if recipe.update is not None else "--heal"
    reasons = {
        "--structure needs the original weights": recipe.structure is not None,
        "--shares cost masks the weights in memory": words.get("shares") == "cost",
        "--loss masks the weights in memory": options.loss is not None,
        "--propagate pruned cannot set quantised weights to zero": options.propagate == "pruned",
        f"{flag} cannot change quantised weights": recipe.moves,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"{reason}; leave out --load-in-8bit and --load-in-4bit.")


def _check_cost(options: PruneOptions) -> None:
    """Raise UserError for what does not go with --shares cost."""
    if options.calibration is None and options.activations is not None:
        raise UserError(
            "--shares cost measures held-out text, and --activations holds only norms. Name the "
            "text with --calibration."
        )
    check_one_process("--shares cost")


def _check_loss(recipe: Recipe, options: PruneOptions, given: GivenOptions) -> None:
    """Raise UserError for what does not go with --loss."""
    for name in ("sparsity", "match", "beta", "neff_dtype", "shares"):
        if name in given:
            raise UserError(f"--loss finds the sparsity; leave out {flag_of(name)}, or --loss.")
    for name in ("parameters", "memory"):
        if name in given:
            raise UserError(f"--loss and --{name} both set the sparsity; give only one.")
    reasons = {
        "evaluate": "ends with its own check. Run emp-llm evaluate afterwards.",
        "push_to_hub": "ends before a push. Run emp-llm push afterwards.",
    }
    for name, reason in reasons.items():
        if getattr(options, name):
            raise UserError(f"--loss {reason}")
    if recipe.heal is not None and recipe.heal.minutes is not None:
        raise UserError("--loss may heal several times; give --heal-steps, not --heal-minutes.")
    if "check" in given and not options.check:
        raise UserError("--loss ends with a check of untouched text; leave out --no-check.")
    units = recipe.structure is not None
    reads = recipe.name != "magnitude" if units else recipe.needs_activations
    if options.calibration is None and not reads and not recipe.moves:
        raise UserError(
            f"--loss measures held-out text, and method {recipe.method} reads none. Name one with "
            "--calibration, such as --calibration wikitext2."
        )


# The options that say how much goes.
AMOUNTS = frozenset({"sparsity", "parameters", "memory", "loss", "match", "beta"})


def _check_amount(recipe: Recipe, units: str, given: GivenOptions) -> None:
    """Raise UserError unless options say how many units go. By itself the rule may remove far more
    than a model can lose (docs/structure.md, docs/experts.md).
    """
    if not given & AMOUNTS:
        rule = ", or by --beta 1, the rule of the effective number" * recipe.adaptive
        raise UserError(
            f"--structure {units}: say how much goes, by --sparsity, --parameters, --memory or "
            f"--loss 2%{rule}. There is no default, because a model can lose few of its units; "
            "--dry-run shows sizes."
        )


def _check_for_units(given: GivenOptions) -> None:
    """Raise UserError for options of weights, given with --structure."""
    options = RecipeWords.options() | options_of(PruneOptions)
    instead = {
        "group": "Use --structure-group",
        "targets": "Use --structure heads, neurons or both",
    }
    for name in _OF_WEIGHTS:
        if name in given:
            raise UserError(
                f"{options[name].flag} does not go with --structure. "
                f"{instead.get(name, 'Leave it out')}."
            )


def _check_structured(recipe: Recipe, structure: Structure, options: PruneOptions) -> None:
    """Raise UserError for options that do not go with --structure."""
    units = structure.units
    if "wanda" not in structure.criteria and options.activations is not None:
        raise UserError(
            f"--activations holds norms of inputs, which do not score {units}. Leave it out."
        )
    if options.activations is not None and recipe.name in BY_GRADIENTS:
        raise UserError(
            f"--activations holds norms, and --method {recipe.method} needs gradients. Leave it "
            "out, or use --method wanda."
        )
    if options.activations is not None and recipe.moves:
        flag = "--refit" if recipe.update is not None else "--heal"
        raise UserError(
            f"--activations holds norms, and {flag} needs a text. Leave out one of them."
        )
