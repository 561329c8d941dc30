"""`emp-llm plan`: models x recipes -> the jobs of a study."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from emp_llm.calibration.texts import calibration_corpora
from emp_llm.cluster.plan_file import Job, JobKind
from emp_llm.cluster.planning.model_size import ModelSize, model_size
from emp_llm.cluster.planning.needs import LEAST_HOURS, estimated_needs
from emp_llm.cluster.planning.study_table import Planned, absolute
from emp_llm.cluster.planning.workload import Work
from emp_llm.common.errors import UserError
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.commands import PruneOptions
from emp_llm.options.lists import parse_words
from emp_llm.sweep import SweepPoint, plan_points

ParseWords = Callable[[JobKind, list[str]], Any]


@dataclass(frozen=True)
class PlannedModel:
    """A model of a study.

    Attributes:
        name: Hub id, or absolute path of a folder.
        slug: short and unique, for ids and names of files.
        size: from its config.
        work: what a job of the study does with it that leaves nothing out.
    """

    name: str
    slug: str
    size: ModelSize
    work: Work


def planned_models(planned: Planned) -> list[PlannedModel]:
    """The models of a study.

    Raises:
        UserError: a name is empty, or given twice; a config cannot be read; the calibration text is none.
    """
    found = []
    text = CalibrationOptions(calibration=planned.calibration, samples=planned.samples, seqlen=planned.seqlen)
    for name, slug in named_models(planned.models).items():
        size = model_size(name, None, planned.trust_remote_code)
        corpora = calibration_corpora(text, size.context)
        work = Work(
            samples=sum(corpus.samples or 0 for corpus in corpora),
            seqlen=max(corpus.seqlen or 0 for corpus in corpora),
            suite=planned.suite_content,
            limit=planned.limit,
            dtype=planned.dtype or "auto",
            gpu_gb=planned.gpu_gb,
            processes=planned.processes,
        )
        found.append(PlannedModel(name, slug, size, work))
    return found


def named_models(models: str | list[str]) -> dict[str, str]:
    """name -> slug of the models in an option; folders become absolute.

    Raises:
        UserError: a name is empty, or given twice.
    """
    given = parse_words(models, "--models") if isinstance(models, str) else [str(model) for model in models]
    names = [absolute(name) for name in given]
    if len(set(names)) < len(names):
        raise UserError(f"--models names {next(n for n in names if names.count(n) > 1)} twice; leave one out.")
    slugs: dict[str, str] = {}
    for name in names:
        parts = [part for part in PurePath(name).parts if part != "/"]
        short = parts[-2:] if parts[-1:] == ["model"] else parts[-1:]
        slug = re.sub(r"[^a-z0-9._]+", "-", "-".join(short).lower()).strip("-.")[:60] or "model"
        number = 2
        while slug in slugs.values():
            slug, number = f"{slug.rstrip('0123456789').rstrip('-')}-{number}", number + 1
        slugs[name] = slug
    return slugs


class JobMaker:
    """Makes the jobs of a study.

    Args:
        planned: the options, with their defaults.
        parse_words: returns the options of a command, given its kind and its words.

    Attributes:
        points: the recipes.

    Raises:
        UserError: a method or number is wrong, or the options of a command conflict.
    """

    def __init__(self, planned: Planned, parse_words: ParseWords) -> None:
        self._planned = planned
        betas = None if planned.emp_sparsities is not None and planned.betas is None else planned.betas or "1"
        adaptive = any(method.strip().startswith("emp-") for method in planned.methods.split(","))
        self.points = plan_points(
            planned.methods,
            betas if adaptive or planned.betas is not None else None,
            planned.orders,
            planned.sparsities,
            planned.patterns,
            emp_sparsities=planned.emp_sparsities,
        )
        self._recipes = self._checked(parse_words)

    def jobs(self, model: PlannedModel) -> Iterator[Job]:
        """The jobs of a model: its dense evaluation, its calibration, and those of each recipe; or one sweep."""
        if self._planned.per == "model":
            yield self._sweep(model)
            return
        yield self._evaluate(model, "dense", model.name, [])
        calibrations = [point for point in self.points if self._shares_activations(point)]
        if calibrations:
            yield self._calibrate(model)
        for point in self.points:
            yield from self._recipe(model, point, point in calibrations)

    def _recipe(self, model: PlannedModel, point: SweepPoint, shares: bool) -> Iterator[Job]:
        name, options = f"{model.slug}.{point.name}", self._recipes[_shape(point)]
        output, activations = f"runs/{name}", f"activations/{model.slug}.safetensors"
        words = [*self._model_words(model.name), *_point_words(point), *_given("targets", self._planned.targets)]
        words += ["--activations", activations] if shares else self._text_words(model) if _reads_text(options) else []
        words += [*_given("dtype", self._planned.dtype), "--output", output, *shlex.split(self._planned.prune_options)]
        reads = _reads_text(options) and not shares
        propagates = options.propagate == "pruned"
        work = replace(model.work, calibrates=reads, refit=options.fits, searches=options.searches, propagates=propagates)
        work = work if reads else replace(work, processes=1)
        after = [f"{model.slug}.calibrate"] if shares else []
        yield self._job(model, f"{name}.prune", "prune", words, after, output, work)
        yield self._evaluate(model, point.name, output, [f"{name}.prune"])

    def _evaluate(self, model: PlannedModel, name: str, target: str, after: list[str]) -> Job:
        planned, output = self._planned, f"results/{model.slug}.{name}.json"
        words = [*self._model_words(target), "--suite", planned.suite, *_given("limit", planned.limit)]
        words += [*_given("dtype", planned.dtype), "--output", output, *shlex.split(planned.evaluate_options)]
        return self._job(model, f"{model.slug}.{name}.evaluate", "evaluate", words, after, output, model.work)

    def _calibrate(self, model: PlannedModel) -> Job:
        output = f"activations/{model.slug}.safetensors"
        words = [
            *self._model_words(model.name),
            *self._text_words(model),
            *_given("dtype", self._planned.dtype),
            "--output",
            output,
        ]
        return self._job(model, f"{model.slug}.calibrate", "calibrate", words, [], output, replace(model.work, calibrates=True))

    def _sweep(self, model: PlannedModel) -> Job:
        planned, output = self._planned, f"runs/{model.slug}"
        words = [*self._model_words(model.name), "--methods", planned.methods]
        betas = "1" if any(point.beta is not None for point in self.points) else None
        words += _given("betas", planned.betas or betas)
        for name in ("orders", "sparsities", "emp_sparsities", "patterns"):
            words += _given(name, getattr(planned, name))
        words += ["--suite", planned.suite, *_given("limit", planned.limit), *_given("targets", planned.targets)]
        calibrates = any(options.needs_activations for options in self._recipes.values())
        words += self._text_words(model) if calibrates else []
        words += [*_given("dtype", planned.dtype), "--output", output, *shlex.split(planned.prune_options)]
        work = replace(model.work, calibrates=calibrates, points=len(self.points))
        return self._job(model, f"{model.slug}.sweep", "sweep", words, [], output, work)

    def _job(
        self, model: PlannedModel, name: str, kind: JobKind, words: list[str], after: list[str], output: str, work: Work
    ) -> Job:
        command, needs = shlex.join(["emp-llm", kind, *words]), estimated_needs(kind, model.size, work)
        if kind != "prune" or work.calibrates:  # else it reads files, on one node
            needs.nodes = self._planned.nodes
            needs.hours = max(LEAST_HOURS, needs.hours / needs.nodes)
        return Job(id=name, kind=kind, command=command, after=after, output=output, needs=needs)

    def _model_words(self, name: str) -> list[str]:
        return ["--model", name, *(["--trust-remote-code"] if self._planned.trust_remote_code else [])]

    def _text_words(self, model: PlannedModel) -> list[str]:
        """The calibration text, in batches of which every process gets one."""
        planned, batch = self._planned, model.work.samples // (self._planned.processes * self._planned.nodes)
        return [
            *_given("calibration", planned.calibration),
            *_given("samples", planned.samples),
            *_given("seqlen", planned.seqlen),
            *_given("batch_size", max(1, batch) if batch < model.work.batch_size else None),
        ]

    def _shares_activations(self, point: SweepPoint) -> bool:
        """Whether a recipe takes its norms from the model's calibration job; a fit reads the text itself."""
        options = self._recipes[_shape(point)]
        return options.needs_activations and not options.fits and options.propagate == "dense" and options.activations is None

    def _checked(self, parse_words: ParseWords) -> dict[Any, PruneOptions]:
        """The options of every form of a recipe, checked as the command would check them."""
        found = {}
        extra = shlex.split(self._planned.prune_options) if self._planned.per == "recipe" else []
        for point in {_shape(point): point for point in self.points}.values():
            words = ["--model", "model", *_point_words(point), *_given("targets", self._planned.targets), *extra]
            options: PruneOptions = parse_words("prune", [*words, *_given("dtype", self._planned.dtype)])
            options.check()
            found[_shape(point)] = options
        if self._planned.per == "model":
            if self._planned.processes * self._planned.nodes > 1:
                raise UserError("--per model plans sweeps, and a sweep runs in one process. Leave out --processes and --nodes.")
            parse_words(
                "sweep", ["--model", "model", "--methods", self._planned.methods, *shlex.split(self._planned.prune_options)]
            )
        parse_words("evaluate", ["--model", "model", *shlex.split(self._planned.evaluate_options)])
        return found


def _shape(point: SweepPoint) -> tuple[Any, ...]:
    """Equal for recipes that differ in their numbers only."""
    return point.method, point.beta is None, point.order is None, point.sparsity is None, point.pattern is None


def _point_words(point: SweepPoint) -> list[str]:
    """The options of a recipe."""
    words = ["--method", point.method]
    order = None if point.order == 2 else point.order
    for name, value in (("beta", point.beta), ("order", order), ("sparsity", point.sparsity), ("pattern", point.pattern)):
        words += _given(name, f"{value:.12g}" if isinstance(value, float) else value)
    return words


def _given(name: str, value: Any) -> list[str]:
    """An option with its value; nothing for None."""
    return [] if value is None else [f"--{name.replace('_', '-')}", str(value)]


def _reads_text(options: PruneOptions) -> bool:
    """Whether a prune reads the calibration text itself, unless it is given activations."""
    return (options.needs_activations or options.fits) and options.activations is None
