"""The plan of a study: options and their TOML table -> models x points -> study.yaml, which the
Snakefile beside it reads.
"""

import logging
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec
import yaml

from emp_llm.calibration.texts import (
    calibration_corpora,
    check_there,
    generates,
    hub_answers,
    names_in,
    read_toml,
    with_path,
)
from emp_llm.common.declared import flag_of
from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.evaluation.results import find_suite
from emp_llm.models.loading import NoModelClassError, build_skeleton
from emp_llm.models.local_model import find_config
from emp_llm.options.prune import AMOUNTS, check_recipe
from emp_llm.options.shared import TEXT, check_values, parse_list
from emp_llm.options.sweep import (
    DEFAULT_SUITE,
    METHODS,
    PlanOptions,
    PointOptions,
    SweepOptions,
    plan_points,
)
from emp_llm.options.words import RecipeWords
from emp_llm.records.base import Corpus, converted
from emp_llm.reporting.studies import short_model_name

logger = logging.getLogger(__name__)
STUDY_NAME = "study.yaml"
_ACTIVATIONS = "activations/{model}.safetensors"  # the Snakefile puts in the name of the model
_ABOUT = """\
# A study for Snakemake; the Snakefile beside this file reads it. Edit it as you like.
#   models     "model" is a folder or a Hub id; its files begin with its name
#   points     "prune" has the options of emp-llm prune; a point with "after: calibrate" waits for
#              the calibration of its model
#   fetch, calibrate, evaluate     options of these commands
#   keep       false deletes each pruned checkpoint as soon as it is evaluated
#   offline    true downloads models and data first, and then runs jobs without a network
#   command    how a job calls emp-llm; setup: shell that runs before it
#   needs      of each job, by rule: GPUs, main memory, hours, cores. A number beside a model (and
#              beside a point, for its prune) goes first.
"""
_NUMBERS = ("betas", "orders", "sparsities", "emp_sparsities")  # a table may give them as numbers
_OF_POINTS = ("method", "beta", "order", "sparsity", "pattern")
_OF_COMMAND = ("table", "output", "overwrite")  # options that a table does not hold
# Options of jobs that name files or models, and those that name texts or suites.
_OF_FILES = ("--activations", "--baseline", "--beside")
_OF_TEXTS = ("--calibration", "--evaluate", "--suite")


class StudyModel(msgspec.Struct, omit_defaults=True):
    """A model of a study.

    Attributes:
        name: unique; its files begin with it.
        model: absolute path of a folder, or Hub id.
        memory_gb: main memory for each of its jobs, in place of the rule's.
    """

    name: str
    model: str
    memory_gb: int | None = None


class StudyPoint(msgspec.Struct, omit_defaults=True):
    """A recipe of a study.

    Attributes:
        name: unique.
        prune: options of `prune`.
        after: what comes first: a calibration of the model, or nothing.
        gpus, memory_gb: for its prune, in place of the rule's.
    """

    name: str
    prune: str
    after: Literal["calibrate"] | None = None
    gpus: int | None = None
    memory_gb: int | None = None


class Needs(msgspec.Struct):
    """What a job needs, by default that of a model with 13 billion weights on one GPU."""

    gpus: int = 1
    memory_gb: float = 64
    hours: float = 12
    cores: int = 4


class Study(msgspec.Struct):
    """The content of study.yaml, as its first lines say. Other fields are the user's."""

    models: list[StudyModel]
    points: list[StudyPoint]
    fetch: str
    calibrate: str
    evaluate: str
    keep: bool = True
    offline: bool = False
    command: str = "emp-llm"
    setup: str = ""
    needs: dict[str, Needs] = msgspec.field(
        default_factory=lambda: {name: Needs() for name in ("calibrate", "prune", "evaluate")}
    )


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
    values = {name: value for name, value in vars(merged).items() if not name.endswith("_options")}
    empty = next((name for name, value in values.items() if value == ""), None)
    if empty is not None:
        raise UserError(f"{flag_of(empty)} is empty. Give a value, or leave it out.")
    if not merged.models:
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


def study_of(
    options: PlanOptions, models: dict[str, str], parsed: Callable[[str, list[str]], Any]
) -> Study:
    """The study that options ask for; its points are checked as their commands would check them.

    Args:
        options: with their table.
        models: name -> slug.
        parsed: the options of a command, given its name and its words.

    Raises:
        UserError: a method or number is wrong, the options of a command conflict, or a file, text
            or suite in them is missing.
    """
    trust = ["--trust-remote-code"] if options.trust_remote_code else []
    common = [*trust, *_given(dtype=options.dtype)]
    text = _given(calibration=options.calibration, samples=options.samples, seqlen=options.seqlen)
    further = shlex.split(options.prune_options or "")
    evaluation = [*common, *_given(suite=options.suite, limit=options.limit)]
    evaluation += shlex.split(options.evaluate_options or "")
    _check_there("--evaluate-options", "evaluate", evaluation, parsed)
    calibration_corpora(options.calibration or TEXT, None, options.samples, options.seqlen)
    asked = parsed("prune", ["--model", "model", *further]).groups
    amounts = asked["given"] & AMOUNTS
    if amounts:
        flags = " and ".join(map(flag_of, sorted(amounts)))
        raise UserError(
            f"--prune-options: a plan sets how much goes at each point. Leave out {flags}, and "
            "give --sparsities, --betas or --emp-sparsities."
        )
    units = asked["words"].get("structure")
    points = []
    texts = dict[str, None]()
    shared = {each.name: getattr(options, each.name) for each in fields(PointOptions)}
    by_units = RecipeWords() if units is None else RecipeWords(structure=units)
    for point in plan_points(SweepOptions(**shared), by_units):
        words = {name: point.words.get(name) for name in _OF_POINTS}
        words |= {"order": None if words["order"] == 2 else words["order"]}
        own = [*common, *_given(**words, targets=options.targets)]
        given = _check_there(
            "--prune-options",
            "prune",
            [*own, *_given(calibration=options.calibration), *further],
            parsed,
        )
        recipe = check_recipe(**given.groups)
        needs_norms = recipe.needs_activations and given.activations is None
        after: Literal["calibrate"] | None = None
        file = ""
        reads_text = recipe.moves or recipe.sums_units
        reads_text = reads_text or (needs_norms and given.propagate != "dense")
        mix = given.calibration or TEXT
        if reads_text and generates(mix):
            if mix != options.calibration:
                raise UserError("--prune-options: give a text of the model itself to plan.")
            after = "calibrate"  # which writes the text; the others find it in the cache
        if reads_text:
            own += text
        elif needs_norms:
            after = "calibrate"
            file = f" --activations {_ACTIVATIONS}"
        if reads_text or needs_norms:
            texts[mix] = None
        # A run without units loads its model to compare it with the dense one.
        light = (None, None) if reads_text or recipe.structure is not None else (0, 2)
        prune = shlex.join([*own, *further]) + file
        points.append(StudyPoint(point.name, prune, after, *light))
    return Study(
        models=[
            StudyModel(name=slug, model=name, memory_gb=memory_of(name, options))
            for name, slug in models.items()
        ],
        points=points,
        fetch=shlex.join(trust + _given(suite=options.suite, calibration=",".join(texts) or None)),
        calibrate=shlex.join([*common, *text]),
        evaluate=shlex.join(evaluation),
        keep=not options.discard,
    )


def _check_there(
    option: str, command: str, words: list[str], parsed: Callable[[str, list[str]], Any]
) -> Any:
    """The parsed options of a command; UserError if a file, text or suite that they name is
    missing.
    """
    given = parsed(command, ["--model", "model", *words])
    files = [getattr(given, "activations", None), *(getattr(given, "beside", None) or [])]
    baseline = Path(getattr(given, "baseline", None) or "model")
    if baseline.suffix == ".json" or baseline.is_absolute():  # else a job finds the model
        files.append(baseline)
    for file in files:
        if file is not None and not file.exists():
            raise UserError(f"{option}: no file or folder {file}. Give its path from here.")
    mix = getattr(given, "calibration", None)
    texts: list[Corpus | None] = [] if mix is None else [*calibration_corpora(mix)]
    suites = [getattr(given, "evaluate", None), getattr(given, "suite", None)]
    texts += [find_suite(suite).corpus for suite in suites if suite is not None]
    for corpus in texts:
        if corpus is not None and corpus.file is not None:
            check_there(corpus.file)
    return given


def memory_of(name: str, options: PlanOptions) -> int | None:
    """Main memory for a job of a model, in GB, from its config: a fifth more than its weights, and
    3 GB. None if there is no network to ask the Hub, or transformers cannot build the model.

    Raises:
        UserError: there is no such model.
    """
    try:
        folder = find_config(name, None, options.trust_remote_code)
    except UserError:
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or hub_answers():
            raise
        logger.warning("warning: %s: not looked for, as the Hub does not answer.", name)
        return None
    try:
        skeleton = build_skeleton(folder, options.trust_remote_code)
    except NoModelClassError:
        return None
    weight: int = 4 if options.dtype == "float32" else skeleton.dtype.itemsize
    return math.ceil(1.2e-9 * weight * int(skeleton.num_parameters())) + 3


def study_text(study: Study) -> str:
    """The content of study.yaml."""
    how: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 1000}
    return _ABOUT + str(yaml.safe_dump(msgspec.to_builtins(study), **how))


def read_study(folder: Path) -> Study:
    """The study in a folder. UserError if study.yaml cannot be read, or a field of it is wrong."""
    path = folder / STUDY_NAME
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({reason(error)}).") from error
    return converted(values, Study, str(path))


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
