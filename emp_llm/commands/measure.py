"""`emp-llm measure`: effective numbers and masses of a model's matrices, by criterion and order;
no weights are written.
"""

import logging
import shutil
from pathlib import Path
from typing import Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, did_you_mean
from emp_llm.common.paths import SELF_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.options.criterion import custom_name
from emp_llm.options.recipe import Effective, Recipe, Score, Targets, score_kinds, searches
from emp_llm.options.shared import (
    GivenOptions,
    LoadingOptions,
    ModelOptions,
    NormOptions,
    Some,
    parse_list,
    parse_numbers,
)
from emp_llm.options.words import RecipeWords, check_used
from emp_llm.records.run_report import Measure

logger = logging.getLogger(__name__)
CURVE_BETAS = "0.5,0.6,0.7,0.8,0.9,1,1.1,1.2,1.3,1.4,1.5,1.75,2"


@command
def measure(
    model: ModelOptions,
    shared: Annotated[RecipeWords, Some(Targets, Score, "count_by")],
    text: NormOptions,
    loading: LoadingOptions,
    given: GivenOptions,
    *,
    output: Annotated[
        Path | None, Flag("File to write; default: MODEL-measure.json in the current folder.")
    ] = None,
    overwrite: Annotated[bool, Flag("Replace an existing output.")] = False,
    criteria: Annotated[
        str | None, Flag("Criteria, separated by commas; default: magnitude,wanda and your own.")
    ] = None,
    orders: Annotated[str, Flag("Hill orders of the effective number, separated by commas.")] = "2",
    betas: Annotated[
        str, Flag("Betas at which to show the sparsity, separated by commas.")
    ] = CURVE_BETAS,
    loss: Annotated[
        str | None,
        Flag("Budgets such as 1%,2%,5%: how much can go within each rise of the perplexity."),
    ] = None,
) -> Measure:
    """Measure the effective number N_eff of every row of every matrix, and the share s_eff of the
    N_eff largest scores.

    The table shows, for every criterion and order, N_eff/N with its distribution over the rows,
    s_eff, and for order 2 the lower bound on s_eff. Each matrix is read once. The weights that EMP
    keeps at beta 1 are reported as by prune. A warning says where rows would keep less than 5 % of
    their weights.

    With --loss, a table shows how much each criterion removes within each rise of the perplexity of
    held-out text, with uniform rows and with EMP's counts, as prune --loss finds it.

    Returns the content of the output.
    """
    if loss is not None and text.activations is not None and text.calibration is None:
        raise UserError(
            "--loss measures held-out text, and --activations holds only norms. Name the text with "
            "--calibration."
        )
    recipes = _recipes(criteria, orders, shared)
    curve = sorted(set(parse_numbers(betas, "--betas")))
    for beta in curve:
        Effective(beta=beta)
    from emp_llm.checkpoint.checkpoint import identity_of
    from emp_llm.checkpoint.output import OutputFile, check_output_file
    from emp_llm.common.machine import Stopwatch, command_line, versions
    from emp_llm.common.ranks import ranks
    from emp_llm.models.local_model import find_model
    from emp_llm.pruning.counts import (
        Numbers,
        counts_of,
        entry_of,
        starving_rows,
        targets_of_folder,
    )
    from emp_llm.pruning.masks import Pruner, measure_targets
    from emp_llm.pruning.scores import Scores, as_recorded
    from emp_llm.runs.run import read_given_norms, warn_if_foreign

    budgets = []
    if loss is not None:
        from emp_llm.runs.loss_budget import LossBudget, within_budgets
        from emp_llm.runs.prune_run import split_held_out
        from emp_llm.runs.trials import LossCurve

        budgets = [LossBudget.of(budget) for budget in parse_list(loss, "--loss")]
    if ranks().count > 1:
        raise UserError(
            "measure runs in one process. Calibrate with torchrun first, and give the "
            "file as --activations."
        )
    leading = next((recipe for recipe in recipes if recipe.needs_activations), recipes[0])
    norms = read_given_norms(text, leading, given)
    source = find_model(model.model, model.revision, model.trust_remote_code)
    path = output or Path(f"{source.short_name}-measure.json")
    check_output_file(path, overwrite)
    chosen = targets_of_folder(
        source.folder, source.name, leading, model.trust_remote_code, calibrates=norms is None
    )
    checkpoint = chosen.checkpoint
    targets = chosen.targets
    calibrates = leading.needs_activations and norms is None
    # Scores of one's own are checked now.
    unscored = [Scores(checkpoint, targets, recipe) for recipe in recipes]
    run = None
    if calibrates or budgets:
        load_packages()
        from emp_llm.calibration.data import CHOOSING, calibration_data, keep_generated
        from emp_llm.models.one_model import OneModel
        from emp_llm.runs.run import Run, calibrate

        models = OneModel(loading.device_map, loading.dtype, model.trust_remote_code)
        run = Run(
            source=source,
            recipe=leading,
            chosen=chosen,
            options=text,
            text=calibration_data(
                text, chosen.architecture, models, held_out=CHOOSING if budgets else 0
            ),
            path=path,
            models=models,
            stopwatch=Stopwatch(),
        )
        if budgets:
            held_out, _ = split_held_out(run.data.held_out, text.text_name)
    with OutputFile(path) as out:
        if run is not None and calibrates:
            with stage("calibrate"):
                statistics = {name for recipe in recipes for name in recipe.statistics}
                layers = chosen.layers_to_calibrate()
                norms = calibrate(run, layers, statistics, out.progress)
                run.models.free()
            keep_generated(path.with_suffix(f".{SELF_NAME.name}"), run.text)
        with stage("measure"):
            identity = identity_of(checkpoint)
            if norms is not None:
                warn_if_foreign(norms, identity, checkpoint.folder)
            numbers: Numbers = {}  # of the magnitudes, shared by recipes whose counts they set
            pruners = []
            for scores in unscored:
                if norms is not None and scores.recipe.needs_activations:
                    name = str(text.activations or "the activations")
                    scores = scores.with_activations(norms, name)
                pruners.append(Pruner(scores, counts_of(scores, numbers)))
            entries = []
            for pruner, outcomes in zip(pruners, measure_targets(pruners), strict=True):
                entry = entry_of(pruner, outcomes, chosen.coverage, curve)
                starving = starving_rows(pruner, outcomes)
                if starving is not None:
                    logger.warning("warning: %s: %s", pruner.scores.recipe.method, starving)
                    entry.warnings.insert(0, starving)
                entries.append(entry)
        losses = []
        if run is not None and budgets:
            work = path.with_name(f".{path.name}.loss")
            losses = within_budgets(LossCurve(run, held_out, "cpu", work), recipes, budgets, norms)
            run.models.free()
            shutil.rmtree(work, ignore_errors=True)
        record = Measure(
            source=source.as_source(identity),
            command=command_line(),
            recipe=as_recorded(recipes[-1]),
            calibration=None if norms is None else norms.about,
            versions=versions(),
            measures=entries,
            losses=losses,
        )
        record.save(path)
        out.complete()
    logger.info("written to %s", path)
    return record


def _recipes(given: str | None, orders: str, shared: RecipeWords) -> list[Recipe]:
    """A recipe at beta 1 for each criterion and order."""
    recipes = []
    unused = []
    known = score_kinds()
    own = custom_name(shared.get("criterion"), shared.get("scores"))
    criteria = parse_list(
        ",".join(filter(None, ("magnitude", "wanda", own))) if given is None else given,
        "--criteria",
    )
    for criterion in dict.fromkeys(criteria):
        if criterion in searches():
            raise UserError(f"--criteria: {criterion} has no scores to measure; leave it out.")
        if criterion not in known and not {"criterion", "scores"} & shared.keys():
            raise UserError(
                f"--criteria: {criterion!r} is not one of "
                f"{', '.join(known)}.{did_you_mean(criterion, known)}"
            )
        for order in dict.fromkeys(parse_numbers(orders, "--orders")):
            words = shared.but(method=f"emp-{criterion}", order=order)
            recipe, left = words.read(unused=tuple(shared))
            recipes.append(recipe)
            unused.append(left)
    check_used(shared, unused, "--criteria")
    return recipes


def show(record: Measure) -> None:
    """Print the tables."""
    from emp_llm.reporting.run_tables import measure_table

    print(measure_table(record))
