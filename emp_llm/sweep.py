"""`python -m emp_llm.sweep`: one calibration, many recipes, and what each of them measures."""

import logging
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedModel
from typer import Option

from emp_llm.cli import run
from emp_llm.models.activations import Activations
from emp_llm.models.calibration import Calibration, calibration_corpus, warn_if_foreign
from emp_llm.models.errors import UserError
from emp_llm.models.files import replace_json, sync_path
from emp_llm.models.headers import read_json
from emp_llm.models.in_memory import InMemory
from emp_llm.models.journal import Journal
from emp_llm.models.loading import check_options, load_model, load_tokenizer, max_context
from emp_llm.models.manifest import ACTIVATIONS_NAME, MANIFEST_NAME, definition, norms_digest, write_manifest
from emp_llm.models.memory import free_memory
from emp_llm.models.outcomes import ALL_KEPT, masks_digest
from emp_llm.models.output import OutputFolder, needed_bytes
from emp_llm.models.plan import Plan
from emp_llm.models.points import BETAS, Point, plan_points
from emp_llm.models.propagation import Execution, Mode
from emp_llm.models.provenance import command_line, versions
from emp_llm.models.pruning import Pruner
from emp_llm.models.ranks import ranks
from emp_llm.models.recipe import REPORT_NAME, Recipe
from emp_llm.models.stages import Stages
from emp_llm.models.summary import summarise
from emp_llm.models.sweeps import SweepFolder
from emp_llm.selection.scheme import Group
from emp_llm.services.evaluation import BATCH_SIZE, Evaluation, Measures, missing
from emp_llm.services.hub import Source, find_model
from emp_llm.services.options import (
    AllowPartial,
    BatchSize,
    Blocks,
    CalibrationText,
    DeviceMap,
    Dtype,
    HiddenStatesPlace,
    Ignore,
    Limit,
    MinExpertTokens,
    Model,
    Revision,
    Samples,
    Seed,
    Seqlen,
    Targets,
    TrustRemoteCode,
)
from emp_llm.services.overview import sweep_plan, sweep_table
from emp_llm.services.results import ResultsFile, new_record
from emp_llm.services.suites import find_suite

logger = logging.getLogger(__name__)


def sweep(
    model: Model,
    output: Annotated[Path | None, Option(help="Folder of the sweep; default: MODEL-sweep in the current folder.")] = None,
    methods: Annotated[str, Option(help="Of prune, separated by commas.")] = "emp-wanda,wanda,emp-magnitude,magnitude",
    betas: Annotated[str | None, Option(help=f"Of the emp methods; default {BETAS}.")] = None,
    orders: Annotated[str | None, Option(help="Hill orders of the emp methods; default 2.")] = None,
    sparsities: Annotated[str | None, Option(help="Of the other methods; default 0.5.")] = None,
    patterns: Annotated[str | None, Option(help="N:M patterns of the other methods.")] = None,
    matched_baselines: Annotated[
        bool, Option("--matched-baselines", help="Beside each emp point, uniform rows: as many left in all, or of each matrix.")
    ] = False,
    suite: Annotated[str, Option(help="What to judge by: a suite of eval/, or a .toml file of your own.")] = "perplexity",
    limit: Limit = None,
    group: Annotated[Group, Option(help="What competes for places: row or matrix.")] = "row",
    targets: Targets = "mlp",
    ignore: Ignore = None,
    activations: Annotated[Path | None, Option(help="Activations file; default: calibrate once.")] = None,
    calibration: CalibrationText = "wikitext2",
    samples: Samples = None,
    seqlen: Seqlen = None,
    batch_size: BatchSize = 4,
    device_map: DeviceMap = "auto",
    dtype: Dtype = "auto",
    execution: Annotated[
        Mode, Option(help="Of the calibration: whole model or by blocks; auto: by blocks if offloaded.")
    ] = "auto",
    hidden_states: HiddenStatesPlace = "auto",
    blocks: Blocks = None,
    min_expert_tokens: MinExpertTokens = 32,
    allow_partial: AllowPartial = False,
    seed: Seed = 0,
    keep: Annotated[bool, Option("--keep", help="Write the checkpoint of every point, too.")] = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be measured, and touch nothing.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Throw away a sweep of another kind at the output.")] = False,
) -> dict[str, Any]:
    """Prune a model by many recipes and measure each: the curves of beta and of sparsity, beside the dense model.

    The model is loaded and calibrated once; each point's weights are masked in memory, measured, and put back. Points that are
    finished are not measured again, and a killed sweep goes on with the same command; more betas or methods add points to it.

    Returns what sweep.json holds; for a dry run, the points.
    """
    points = plan_points(methods, betas, orders, sparsities, patterns, matched_baselines)
    common = Recipe(
        group=group, targets=targets, ignore=ignore, min_expert_tokens=min_expert_tokens, allow_partial=allow_partial
    )
    for point in points:
        if point.baseline_of is None:
            _recipe(point, common).check()
    if group == "all" and matched_baselines:
        raise UserError("--matched-baselines fix what every matrix loses; they go with --group row or matrix, not all.")
    if ranks().count > 1:
        raise UserError("a sweep runs in one process; start it without torchrun, and spread a large model by --device-map.")
    check_options(device_map, dtype)
    how = Execution(execution, "dense", hidden_states, blocks)
    how.check()
    chosen = find_suite(suite).limited(limit)
    scored = next((point for point in points if _recipe(point, common).needs_activations), None)
    given = Activations.load(activations) if activations is not None and scored is not None else None
    source = find_model(model, revision, trust_remote_code)
    plan = Plan(source.folder, source.name, _recipe(scored or points[0], common), trust_remote_code, blocks)
    if given is not None:
        warn_if_foreign(given, plan.checkpoint)
        plan.pruner_of(_recipe(scored or points[0], common)).use(given, str(activations))
    place = SweepFolder(output or Path(f"{source.short_name}-sweep"), plan.checkpoint, points, overwrite)
    if dry_run:
        unfinished = [point.record() for point in points if place.report(point) is None]
        disk = needed_bytes(plan.checkpoint) * len(points) if keep else 0
        return {"dry_run": True, "points": unfinished, "coverage": asdict(plan.coverage), "disk_bytes": disk}
    with place as folder:
        tokenizer = load_tokenizer(source.folder, trust_remote_code)
        text: Calibration | None = None
        made_of: dict[str, Any] | None = None if given is None else {"norms": norms_digest(given)}
        if scored is not None and given is None:
            corpus = calibration_corpus(calibration, samples, seqlen, max_context(plan.checkpoint.config))
            text = Calibration(plan.checkpoint, tokenizer, corpus, seed)
            made_of = text.signature(batch_size, how, None)
        record = new_record(source, chosen, BATCH_SIZE, dtype, device_map)
        made_by = record["made_by"] | {"recipe": _shared(common), "activations": made_of}
        about = {"command": command_line(), "source": _source(source, plan), "suite": chosen.name}
        folder.begin(made_by, about)
        evaluation = Evaluation(chosen, tokenizer, BATCH_SIZE)
        job = _Sweep(source, plan, common, folder, evaluation, (device_map, dtype, trust_remote_code), keep)
        if scored is not None:
            job.norms = given or _calibrated(folder.activations) or job.calibrate(text, batch_size, how)
            if given is not None and not folder.activations.is_file():
                given.save(folder.activations)
        job.measure_dense(ResultsFile(folder.dense, record))
        job.run(points)
        return folder.record


def show(record: dict[str, Any]) -> None:
    """Print the table of all points."""
    print(sweep_plan(record) if record.get("dry_run") else sweep_table(record))


def _recipe(point: Point, common: Recipe) -> Recipe:
    return point.recipe(common, Path())


def _shared(common: Recipe) -> dict[str, Any]:
    """What the recipes of all points have in common."""
    keys = ("group", "targets", "ignore", "min_expert_tokens")
    return {key: getattr(common, key) for key in keys}


def _source(source: Source, plan: Plan) -> dict[str, Any]:
    return {"model": source.name, "revision": source.revision} | plan.checkpoint.fingerprint


def _calibrated(path: Path) -> Activations | None:
    return Activations.load(path) if path.is_file() else None


class _Sweep:
    """A sweep at work.

    Args:
        source, plan, common: the model, its targets, and what all recipes share.
        folder: where all of it goes.
        evaluation: what is measured.
        options: of `load_model`: device map, dtype, whether remote code is trusted.
        keep: write the points' checkpoints.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        common: Recipe,
        folder: SweepFolder,
        evaluation: Evaluation,
        options: tuple[str, str, bool],
        keep: bool,
    ) -> None:
        self.norms: Activations | None = None
        self._source = source
        self._plan = plan
        self._common = common
        self._folder = folder
        self._evaluation = evaluation
        self._options = options
        self._keep = keep
        self._model: PreTrainedModel | None = None
        self._stages = Stages()
        self._measured: dict[str, tuple[str, Measures]] = {}  # by the digest of masks: a point's name, its figures

    def calibrate(self, text: Calibration | None, batch_size: int, how: Execution) -> Activations:
        """Collect the norms that all points share, and keep them in the folder."""
        assert text is not None
        model = self._dense()
        about = {"model": self._source.name, "revision": self._source.revision}
        with self._stages("calibrate"):
            layers = self._plan.layers_to_calibrate()
            norms = text.run(model, layers, batch_size, about, how, resume=self._folder.calibration)
        norms.save(self._folder.activations)
        sync_path(self._folder.activations)
        text.forget(self._folder.calibration)
        self._note()
        return norms

    def measure_dense(self, file: ResultsFile) -> None:
        """Measure what is missing of the dense model."""
        if any(True for _ in missing(self._evaluation.suite, file.record)):
            model = self._dense()
            with self._stages("evaluate dense"):
                self._evaluation.measure(model, file.record, lambda _: file.save())
        file.save(complete=True)
        self._folder.record["dense"] = {key: file.record[key] for key in ("perplexity", "tasks") if key in file.record}
        self._measured[ALL_KEPT] = ("dense", self._folder.record["dense"])
        self._note()

    def run(self, points: list[Point]) -> None:
        """Measure what is not finished, one point after the other."""
        with ExitStack() as stack:
            memory: InMemory | None = None
            tried = False
            for number, point in enumerate(points, 1):
                report = self._folder.report(point)
                kept = (self._folder.points / point.name / MANIFEST_NAME).is_file()
                if report is not None and (kept or not self._keep):
                    logger.info("%s: finished before; it is not measured again.", point.name)
                else:
                    if not tried:
                        tried, memory = True, self._in_memory()
                        if memory is not None:
                            stack.enter_context(memory)
                    report = self._measure(point, memory, report)
                    removed = 100 * report["targets"]["sparsity_of_targets"]
                    logger.info("%s: done, %.2f %% removed; %d of %d.", point.name, removed, number, len(points))
                self._measured.setdefault(report["masks"], (point.name, report["evaluation"]["pruned"]))
                self._folder.finish(point, report)

    def _in_memory(self) -> InMemory | None:
        """The loaded model, where its weights can be masked exactly; else none, and the model goes."""
        memory = InMemory(self._dense(), self._plan.pruner_of(Recipe("magnitude", sparsity=0.0)))
        if memory.fits():
            return memory
        logger.info("masks cannot be put in this model in memory as they are written; each point goes through a checkpoint.")
        self._model = None
        del memory
        free_memory()
        return None

    def _measure(self, point: Point, memory: InMemory | None, known: dict[str, Any] | None) -> dict[str, Any]:
        """Decide a point's masks, measure the model under them, and write the report; with --keep the checkpoint too.

        Args:
            memory: where the masks are put; None: in a checkpoint.
            known: its report, where only the checkpoint is missing.
        """
        recipe = point.recipe(self._common, self._folder.points)
        pruner = self._plan.pruner_of(recipe)
        if recipe.needs_activations and self.norms is not None:
            pruner.use(self.norms)
        stages, path = Stages(), self._folder.points / point.name
        with ExitStack() as stack:
            source, kept = self._plan.checkpoint, None
            if self._keep:
                kept = OutputFolder(path, [source.folder], needed_bytes(source), overwrite=True)
            out = stack.enter_context(kept) if kept is not None else None
            journal = self._begun(out, recipe, pruner) if out is not None else None
            with stages("prune"):
                outcomes = memory.prune(pruner) if memory is not None else []
                written = out.files if out is not None else self._folder.scratch if memory is None else None
                if written is not None:
                    written.mkdir(exist_ok=True)
                    outcomes = pruner.write(written, journal)
            masks = masks_digest(outcomes, pruner.scheme, pruner.fallback)
            if known is not None and known["masks"] == masks:
                measures = known["evaluation"]["pruned"]
            else:
                measures = self._figures(point, masks, memory, written, stages)
            suite = self._evaluation.suite.record() | {"batch_size": BATCH_SIZE}
            report = {
                "point": point.record(),
                "source": self._folder.record["source"],
                "command": command_line(),
                "recipe": recipe.record() | {"dtype": self._options[1], "device_map": self._options[0]},
                "calibration": self.norms.about if recipe.needs_activations and self.norms is not None else None,
                "versions": versions(),
                "stages": stages.record,
                **summarise(outcomes, self._plan.coverage, pruner),
                "masks": masks,
                "evaluation": suite | {"dense": self._folder.record["dense"], "pruned": measures},
            }
            if out is None or journal is None:
                shutil.rmtree(self._folder.scratch, ignore_errors=True)
                path.mkdir(exist_ok=True)
                replace_json(path / REPORT_NAME, report)
            else:
                replace_json(out.files / REPORT_NAME, report)
                write_manifest(out.files, self._definition(recipe, pruner), journal.digests.finished)
                out.publish()
        return report

    def _begun(self, out: OutputFolder, recipe: Recipe, pruner: Pruner) -> Journal:
        """Take up the writing of a point's checkpoint, or begin."""
        out.begin(self._definition(recipe, pruner))
        if recipe.needs_activations and self.norms is not None:
            self.norms.save(out.files / ACTIVATIONS_NAME)
        return Journal(out.work)

    def _definition(self, recipe: Recipe, pruner: Pruner) -> dict[str, Any]:
        used = {"norms": norms_digest(self.norms)} if recipe.needs_activations and self.norms is not None else None
        return definition(self._plan.checkpoint, recipe.record(), pruner.scheme, used)

    def _figures(
        self, point: Point, masks: str, memory: InMemory | None, written: Path | None, stages: Stages
    ) -> dict[str, Any]:
        """What the model measures under a point's masks, in memory or in a checkpoint that is written."""
        if masks in self._measured:
            name, measures = self._measured[masks]
            logger.info("%s: the same masks as %s, so the same figures.", point.name, name)
            return measures | {"same_masks_as": name}
        noted = self._folder.partial(point)
        before = read_json(noted) if noted.is_file() else {}
        found: Measures = before["measures"] if before.get("masks") == masks else {}
        model = memory.model if memory is not None else None
        if model is None:
            assert written is not None
            with stages("load"):
                model = load_model(written, *self._options)
        with stages("evaluate pruned"):
            self._evaluation.measure(model, found, lambda part: replace_json(noted, {"masks": masks, "measures": part}))
        if memory is None:
            del model
            free_memory()  # an offloaded model holds itself: the next one would be loaded beside it
        return found

    def _dense(self) -> PreTrainedModel:
        if self._model is None:
            with self._stages("load"):
                self._model = load_model(self._source.folder, *self._options)
        return self._model

    def _note(self) -> None:
        self._folder.record["stages"] |= self._stages.record
        self._folder.save()


if __name__ == "__main__":
    run(sweep, show)
