"""The plan of a study: options and their TOML table -> models x recipes -> jobs."""

import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from emp_llm.calibration.texts import (
    calibration_corpora,
    check_there,
    names_in,
    read_toml,
    with_path,
)
from emp_llm.cluster.jobs import Job, JobKind
from emp_llm.common.declared import flag_of
from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.evaluation.suites import find_suite
from emp_llm.options.base import check_values, parse_list
from emp_llm.options.flat import RecipeWords
from emp_llm.options.jobs import DEFAULT_SUITE, PlanOptions
from emp_llm.options.prune import checked_recipe
from emp_llm.options.sweep import METHODS, PointOptions, SweepOptions, SweepPoint, plan_points
from emp_llm.records.base import converted
from emp_llm.records.corpus import Corpus
from emp_llm.reporting.studies import short_model_name

# Where a prune gets its norms: from the model's calibration job, from the text, or it needs none.
TextUse = Literal["activations", "text", "none"]
_NUMBERS = ("betas", "orders", "sparsities", "emp_sparsities")  # a table may give them as numbers
_OF_POINTS = ("method", "beta", "order", "sparsity", "pattern")
_OF_COMMAND = ("table", "output", "overwrite")  # options that a table does not hold
# Options of jobs that name files or models, and those that name texts or suites.
_OF_FILES = ("--activations", "--baseline", "--beside")
_OF_TEXTS = ("--calibration", "--evaluate", "--suite")


def with_table(options: PlanOptions) -> PlanOptions:
    """The options, with those of the table where the command line has none, the defaults of a
    study, and absolute paths.

    Raises:
        UserError: the table cannot be read or has an unknown key; an option is wrong, or no models
            are named.
    """
    if options.table is not None and options.table.is_dir():
        raise UserError(
            f"{options.table} is a folder, and a plan begins with a TOML file. Give models by "
            f"--models {options.table}."
        )
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    kinds = get_type_hints(PlanOptions)
    for name, value in ({} if options.table is None else read_toml(options.table)).items():
        if name not in values or name in _OF_COMMAND:
            raise UserError(f"{options.table}: unknown field {quotable(name)}.")
        if isinstance(value, list) and name != "models":
            value = ",".join(map(str, value))
        given = converted(
            str(value) if name in _NUMBERS else value, kinds[name], f"{options.table}: {name}"
        )
        if values[name] in (None, False):
            values[name] = given
    merged = PlanOptions(**values)
    check_values(merged)
    if merged.models is None:
        raise UserError("--models is missing; name model folders or Hub ids, separated by commas.")
    methods = merged.methods or METHODS
    adaptive = any(method.strip().startswith("emp-") for method in methods.split(","))
    return replace(
        merged,
        methods=methods,
        betas=merged.betas or ("1" if adaptive and merged.emp_sparsities is None else None),
        suite=absolute(merged.suite or DEFAULT_SUITE),
        calibration=None if merged.calibration is None else absolute_mix(merged.calibration),
        prune_options=further_options(merged.prune_options, "--prune-options"),
        evaluate_options=further_options(merged.evaluate_options, "--evaluate-options"),
    )


def further_options(text: str | None, option: str) -> str | None:
    """Further options of jobs, with absolute paths; UserError if a quotation mark is missing."""
    if text is None:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {reason(error)}.") from error
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        at = place if equals else place + 1
        if at == len(words):
            break
        if not equals:
            value = words[at]
        if flag in _OF_FILES:
            value = _absolute_path(value)
        elif flag in _OF_TEXTS:
            value = absolute_mix(value)
        words[at] = f"{flag}={value}" if equals else value
    return shlex.join(words)


def absolute(name: str) -> str:
    """A path that exists as an absolute path, because jobs run in the study's folder; other
    names as they are.
    """
    if name.startswith("self:"):
        return f"self:{absolute(name[5:])}"
    path, changes = with_path(name.split(","))
    words = [_absolute_path(path)]
    while changes:
        field, equals, value = changes[0].partition("=")
        changes = changes[1:]
        if field.strip() in ("file", "dataset") and equals:
            value, changes = with_path([value, *changes])
            value = _absolute_path(value)
        words.append(f"{field}{equals}{value}")
    return ",".join(words)


def absolute_mix(mix: str) -> str:
    """`absolute` of each text of a mix."""
    return ",".join(absolute(name) for name in names_in(mix))


def _absolute_path(path: str) -> str:
    file = Path(path).expanduser()
    return str(file.resolve()) if path and file.exists() else path


def named_models(models: str | list[str]) -> dict[str, str]:
    """name -> slug of the models in an option; folders become absolute.

    Raises:
        UserError: a name is empty, or given twice.
    """
    given = (
        parse_list(models, "--models")
        if isinstance(models, str)
        else [str(model) for model in models]
    )
    names = [absolute(name) for name in given]
    if len(set(names)) < len(names):
        raise UserError(
            f"--models names {next(n for n in names if names.count(n) > 1)} twice; leave one out."
        )
    slugs: dict[str, str] = {}
    for name in names:
        short = short_model_name(name).lower()
        slug = re.sub(r"[^a-z0-9._]+", "-", short).strip("-.")[:60] or "model"
        number = 2
        while slug in slugs.values():
            slug = f"{slug.rstrip('0123456789').rstrip('-')}-{number}"
            number = number + 1
        slugs[name] = slug
    return slugs


def study_recipes(
    options: PlanOptions, parsed: Callable[[str, list[str]], Any]
) -> dict[SweepPoint, TextUse]:
    """The recipes of a study, checked as their commands would check them.

    Args:
        options: with their table.
        parsed: the options of a command, given its name and its words.

    Raises:
        UserError: a method or number is wrong, or the options of a command conflict.
    """
    further = shlex.split(options.prune_options or "")
    sweeps = options.per == "model"
    recipes: dict[SweepPoint, TextUse] = {}
    for point in plan_points(SweepOptions(**_point_options(options)), RecipeWords()):
        words = [*_recipe_words(point), *_given(targets=options.targets, dtype=options.dtype)]
        words += [*_given(calibration=options.calibration), *([] if sweeps else further)]
        command = parsed("prune", ["--model", "model", *words])
        recipe = checked_recipe(**command.groups)
        needs_norms = recipe.needs_activations and command.activations is None
        if recipe.moves or (needs_norms and command.propagate != "dense"):
            recipes[point] = "text"
        else:
            recipes[point] = "activations" if needs_norms else "none"
    if sweeps:
        parsed("sweep", ["--model", "model", *further])
    parsed("evaluate", ["--model", "model", *shlex.split(options.evaluate_options or "")])
    return recipes


def check_further(
    options: PlanOptions, jobs: list[Job], parsed: Callable[[str, list[str]], Any]
) -> None:
    """Check that the files, texts and suites in further options are there.

    Args:
        options: with their table.
        jobs: of the study. What they write may be named.
        parsed: as for `study_recipes`.

    Raises:
        UserError: something is missing.
    """
    written = {job.output for job in jobs}
    kind = "sweep" if options.per == "model" else "prune"
    for option, name, text in (
        ("--prune-options", kind, options.prune_options),
        ("--evaluate-options", "evaluate", options.evaluate_options),
    ):
        given = parsed(name, ["--model", "model", *shlex.split(text or "")])
        files = [getattr(given, "activations", None), *(getattr(given, "beside", None) or [])]
        baseline = Path(getattr(given, "baseline", None) or "model")
        if baseline.suffix == ".json" or baseline.is_absolute():  # else a job finds the model
            files.append(baseline)
        for file in files:
            if not (file is None or str(file) in written or (options.output / file).exists()):
                raise UserError(f"{option}: no file or folder {file}. Give its path from here.")
        mix = getattr(given, "calibration", None)
        texts: list[Corpus | None] = [] if mix is None else [*calibration_corpora(mix)]
        suites = [getattr(given, "evaluate", None), getattr(given, "suite", None)]
        texts += [find_suite(suite).corpus for suite in suites if suite is not None]
        for corpus in texts:
            if corpus is not None and corpus.file is not None:
                check_there(corpus.file)


def model_jobs(
    options: PlanOptions, model: str, slug: str, recipes: dict[SweepPoint, TextUse]
) -> list[Job]:
    """The jobs of a model: its dense evaluation, its calibration, and those of each recipe; or one
    sweep.

    Args:
        options: with their table.
        model: Hub id, or absolute path of a folder.
        slug: short and unique, for ids and names of files.
        recipes: each with its use of the calibration text.
    """
    jobs: list[Job] = []
    start = ["--model", model] + (["--trust-remote-code"] if options.trust_remote_code else [])
    text = _given(calibration=options.calibration, samples=options.samples, seqlen=options.seqlen)
    evaluation = _given(suite=options.suite, limit=options.limit)
    targets = _given(targets=options.targets)
    further = {
        "prune": options.prune_options,
        "sweep": options.prune_options,
        "evaluate": options.evaluate_options,
    }

    def add(name: str, kind: JobKind, words: list[str], after: list[str], output: str) -> None:
        words = [*words, *_given(dtype=options.dtype, output=output)]
        words += shlex.split(further.get(kind) or "")
        jobs.append(
            Job(
                id=f"{slug}.{name}",
                kind=kind,
                command=shlex.join(["emp-llm", kind, *words]),
                after=after,
                output=output,
            )
        )

    if options.per == "model":
        words = [*start, *_given(**_point_options(options)), *evaluation, *targets]
        words += text if {*recipes.values()} != {"none"} else []
        add("sweep", "sweep", words, [], f"runs/{slug}")
        return jobs
    add("dense.evaluate", "evaluate", [*start, *evaluation], [], f"results/{slug}.dense.json")
    activations = f"activations/{slug}.safetensors"
    if "activations" in recipes.values():
        add("calibrate", "calibrate", [*start, *text], [], activations)
    for point, use in recipes.items():
        output = f"runs/{slug}.{point.name}"
        words = [*start, *_recipe_words(point), *targets]
        after = []
        if use == "activations":
            words += ["--activations", activations]
            after = [f"{slug}.calibrate"]
        elif use == "text":
            words += text
        add(f"{point.name}.prune", "prune", words, after, output)
        judged = ["--model", output, *start[2:], *evaluation]
        result = f"results/{slug}.{point.name}.json"
        add(f"{point.name}.evaluate", "evaluate", judged, [f"{slug}.{point.name}.prune"], result)
    return jobs


def _point_options(options: PlanOptions) -> dict[str, Any]:
    """The options that `plan` and `sweep` share, in the order of their declaration."""
    return {each.name: getattr(options, each.name) for each in fields(PointOptions)}


def _recipe_words(point: SweepPoint) -> list[str]:
    """The options of a recipe."""
    words = {name: point.words.get(name) for name in _OF_POINTS}
    return _given(**words | {"order": None if words["order"] == 2 else words["order"]})


def _given(**options: Any) -> list[str]:
    """Options with their values; nothing for None."""
    words = []
    for name, value in options.items():
        if value is not None:
            words += [
                flag_of(name),
                f"{value:.12g}" if isinstance(value, float) else str(value),
            ]
    return words
