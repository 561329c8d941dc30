"""`python -m emp_llm.measure`: how redundant a model is, by criterion and order; no weights are written."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from emp_llm.cli import run
from emp_llm.models.activations import Activations
from emp_llm.models.calibration import Calibration, calibration_corpus, warn_if_foreign
from emp_llm.models.errors import UserError
from emp_llm.models.files import replace_json
from emp_llm.models.loading import check_options, load_model, load_tokenizer, max_context
from emp_llm.models.measuring import measure_targets
from emp_llm.models.output import OutputFile
from emp_llm.models.plan import Plan
from emp_llm.models.points import parse_numbers, parse_words
from emp_llm.models.propagation import Execution
from emp_llm.models.provenance import command_line, versions
from emp_llm.models.ranks import ranks
from emp_llm.models.recipe import Method, Recipe
from emp_llm.models.summary import summarise
from emp_llm.selection.criteria import CRITERIA
from emp_llm.services.hub import Source, find_model
from emp_llm.services.options import (
    AllowPartial,
    BatchSize,
    Blocks,
    CalibrationText,
    DeviceMap,
    ExecutionMode,
    HiddenStatesPlace,
    Ignore,
    MinExpertTokens,
    Model,
    Revision,
    Samples,
    Seed,
    Seqlen,
    Targets,
    TrustRemoteCode,
)
from emp_llm.services.overview import measure_table
from emp_llm.services.runs import MEASURE_FORMAT

logger = logging.getLogger(__name__)


def measure(
    model: Model,
    output: Annotated[Path | None, Option(help="File to write; default: MODEL-measure.json in the current folder.")] = None,
    criteria: Annotated[str, Option(help="Scores, separated by commas: magnitude, wanda.")] = "magnitude,wanda",
    orders: Annotated[str, Option(help="Hill orders of the effective number, separated by commas.")] = "2",
    targets: Targets = "mlp",
    ignore: Ignore = None,
    activations: Annotated[Path | None, Option(help="Activations file; default: calibrate now, if wanda is asked for.")] = None,
    calibration: CalibrationText = "wikitext2",
    samples: Samples = None,
    seqlen: Seqlen = None,
    batch_size: BatchSize = 4,
    device_map: DeviceMap = "auto",
    dtype: Annotated[str, Option(help="Of the calibration pass: auto, bfloat16, float16 or float32.")] = "auto",
    execution: ExecutionMode = "auto",
    hidden_states: HiddenStatesPlace = "auto",
    blocks: Blocks = None,
    min_expert_tokens: MinExpertTokens = 32,
    allow_partial: AllowPartial = False,
    seed: Seed = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing output.")] = False,
) -> dict[str, Any]:
    """Tell the effective number of every row of every matrix, and the share of the scores that so many weights hold.

    N_eff/N, its distribution over rows, s_eff and (for order 2) its lower bound, for every criterion and order, each matrix
    read once for all of them. What would stay at beta 1 is told as in a prune's report.

    Returns what is written to the output.
    """
    common = Recipe(targets=targets, ignore=ignore, min_expert_tokens=min_expert_tokens, allow_partial=allow_partial)
    recipes = _recipes(criteria, orders, common)
    check_options(device_map, dtype)
    how = Execution(execution, "dense", hidden_states, blocks)
    how.check()
    if ranks().count > 1:
        raise UserError("measure runs in one process; calibrate with torchrun first, and give the file as --activations.")
    scored = next((recipe for recipe in recipes if recipe.needs_activations), None)
    given = Activations.load(activations) if activations is not None and scored is not None else None
    source = find_model(model, revision, trust_remote_code)
    output = Path(output or f"{source.short_name}-measure.json")
    if output.is_dir() or next(folder for folder in output.absolute().parents if folder.exists()).is_file():
        raise UserError(f"--output {output}: a file cannot be written there; name a file in a folder.")
    if output.exists() and not overwrite:
        raise UserError(f"--output {output}: it exists; name another file, or add --overwrite.")
    plan = Plan(source.folder, source.name, scored or recipes[0], trust_remote_code, blocks)
    pruners = [plan.pruner_of(recipe) for recipe in recipes]
    if given is not None:
        warn_if_foreign(given, plan.checkpoint)
    with OutputFile(output) as out:
        if scored is not None and given is None:
            corpus = calibration_corpus(calibration, samples, seqlen, max_context(plan.checkpoint.config))
            text = Calibration(plan.checkpoint, load_tokenizer(source.folder, trust_remote_code), corpus, seed)
            about = {"model": source.name, "revision": source.revision}
            loaded = load_model(source.folder, device_map, dtype, trust_remote_code)
            given = text.run(loaded, plan.layers_to_calibrate(), batch_size, about, how, resume=out.progress)
            del loaded
        for recipe, pruner in zip(recipes, pruners, strict=True):
            if recipe.needs_activations and given is not None:
                pruner.use(given, str(activations or "the activations"))
        measured = [
            {"criterion": recipe.criterion_name, "order": recipe.order, **summarise(outcomes, plan.coverage, pruner)}
            for recipe, pruner, outcomes in zip(recipes, pruners, measure_targets(pruners), strict=True)
        ]
        record = _record(source, plan, given, common) | {"measures": measured}
        replace_json(output, record)
        out.publish()
    logger.info("written to %s", output)
    return record


def show(record: dict[str, Any]) -> None:
    """Print the tables."""
    print(measure_table(record))


def _recipes(criteria: str, orders: str, common: Recipe) -> list[Recipe]:
    """A recipe at beta 1 for each criterion and order."""
    recipes = []
    for criterion in dict.fromkeys(parse_words(criteria, "--criteria")):
        if criterion not in CRITERIA:
            raise UserError(f"--criteria: {criterion!r} is none of {', '.join(CRITERIA)}.")
        method: Method = f"emp-{criterion}"  # type: ignore[assignment]
        recipes += [replace(common, method=method, order=order) for order in dict.fromkeys(parse_numbers(orders, "--orders"))]
    for recipe in recipes:
        recipe.check()
    return recipes


def _record(source: Source, plan: Plan, given: Activations | None, recipe: Recipe) -> dict[str, Any]:
    """What was measured, and what made it."""
    return {
        "format": MEASURE_FORMAT,
        "source": {"model": source.name, "revision": source.revision} | plan.checkpoint.fingerprint,
        "command": command_line(),
        "recipe": {"targets": recipe.targets, "ignore": recipe.ignore, "min_expert_tokens": recipe.min_expert_tokens},
        "calibration": given.about if given is not None else None,
        "versions": versions(),
    }


if __name__ == "__main__":
    run(measure, show)
