"""`python -m emp_llm.prune`: checkpoint (+ activations) -> pruned checkpoint, and what it cost."""

import logging
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedModel
from typer import Option

from emp_llm.cli import run
from emp_llm.models.activations import Activations
from emp_llm.models.calibration import Calibration, calibration_corpus, warn_if_foreign
from emp_llm.models.errors import UserError
from emp_llm.models.files import replace_json, sync_tree
from emp_llm.models.journal import Journal
from emp_llm.models.loading import Quantization, check_options, load_model, load_tokenizer, max_context, quantization_of
from emp_llm.models.manifest import ACTIVATIONS_NAME, definition, norms_digest, write_manifest
from emp_llm.models.memory import free_memory
from emp_llm.models.output import OutputFolder, needed_bytes
from emp_llm.models.plan import Plan
from emp_llm.models.propagation import Execution, Propagate
from emp_llm.models.provenance import command_line, versions
from emp_llm.models.ranks import ranks
from emp_llm.models.recipe import REPORT_NAME, MatchBy, Method, Recipe
from emp_llm.models.stages import Stages
from emp_llm.models.summary import summarise
from emp_llm.selection.scheme import Group
from emp_llm.services.evaluation import BATCH_SIZE, Evaluation, Measures
from emp_llm.services.hub import Source, find_model
from emp_llm.services.options import (
    AllowPartial,
    BatchSize,
    Blocks,
    CalibrationText,
    DeviceMap,
    Dtype,
    ExecutionMode,
    HiddenStatesPlace,
    Ignore,
    MinExpertTokens,
    Model,
    Samples,
    Seed,
    Seqlen,
    Targets,
    TrustRemoteCode,
)
from emp_llm.services.publishing import publish_finished
from emp_llm.services.suites import find_suite
from emp_llm.services.terminal import show_pruning as show
from emp_llm.services.upload import Destination, check_login

logger = logging.getLogger(__name__)


def prune(
    model: Model,
    output: Annotated[Path | None, Option(help="Folder to write; default: MODEL-METHOD in the current folder.")] = None,
    method: Annotated[Method, Option(help="emp-: the effective number decides how many stay.")] = "emp-wanda",
    beta: Annotated[float | None, Option(help="Keep beta x N_eff (emp methods); default 1.")] = None,
    order: Annotated[float | None, Option(help="Hill order of the effective number (emp methods); default 2.")] = None,
    sparsity: Annotated[float | None, Option(help="Share removed of every group (other methods); default 0.5.")] = None,
    pattern: Annotated[str | None, Option(help="N:M, N of every M inputs stay (other methods).")] = None,
    match: Annotated[Path | None, Option(help="Output of an earlier run: remove as many weights as it did.")] = None,
    match_by: Annotated[
        MatchBy | None, Option(help="As many of all weights as that run, or of every matrix; default: total.")
    ] = None,
    group: Annotated[Group, Option(help="What competes for places.")] = "row",
    targets: Targets = "mlp",
    ignore: Ignore = None,
    activations: Annotated[Path | None, Option(help="Activations file; default: calibrate now.")] = None,
    calibration: CalibrationText = "wikitext2",
    samples: Samples = None,
    seqlen: Seqlen = None,
    batch_size: BatchSize = 4,
    device_map: DeviceMap = "auto",
    dtype: Dtype = "auto",
    execution: ExecutionMode = "auto",
    propagate: Annotated[
        Propagate, Option(help="What each block is shown: the dense model's inputs, or the pruned one's.")
    ] = "dense",
    hidden_states: HiddenStatesPlace = "auto",
    blocks: Blocks = None,
    load_in_8bit: Annotated[bool, Option("--load-in-8bit", help="Quantise for the calibration pass (bitsandbytes).")] = False,
    load_in_4bit: Annotated[bool, Option("--load-in-4bit", help="Quantise for the calibration pass (bitsandbytes).")] = False,
    neff_dtype: Annotated[str | None, Option(help="float64, or bfloat16 as the paper's emp-magnitude.")] = None,
    min_expert_tokens: MinExpertTokens = 32,
    allow_partial: AllowPartial = False,
    seed: Seed = 0,
    evaluate: Annotated[str | None, Option(help="Suite to judge dense and pruned by: perplexity, demo, or a file.")] = None,
    push_to_hub: Annotated[str | None, Option(help="USER/NAME on the Hub to push the result to, with a model card.")] = None,
    private: Annotated[bool, Option("--private", help="Make that repository a private one.")] = False,
    push_revision: Annotated[
        str | None, Option(help="Branch to push to; made where it is not there. (--revision is the source's.)")
    ] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of the source, a Hub model.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be done, and touch nothing.")] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an older checkpoint at the output, and on the Hub.")
    ] = False,
) -> dict[str, Any]:
    """Prune a causal language model after training and write the pruned checkpoint.

    Started by torchrun or accelerate launch, every process runs its share of the calibration and of the evaluation, and the
    first writes the checkpoint. Quantisation is for the calibration pass; the masks are applied to the original weights.

    Returns the report that is also written as emp_report.json, and under "push" what was pushed; for a dry run, what would be
    pruned and what it needs.
    """
    recipe = Recipe(
        method,
        beta,
        order,
        neff_dtype,
        sparsity,
        pattern,
        match,
        group,
        targets,
        ignore,
        min_expert_tokens,
        allow_partial,
        match_by,
    )
    recipe.check()
    check_options(device_map, dtype)
    how = Execution(execution, propagate, hidden_states, blocks)
    how.check()
    quantization = quantization_of(load_in_8bit, load_in_4bit)
    if propagate == "pruned":
        check_pruned(recipe, activations, quantization)
    if push_to_hub is None and (private or push_revision is not None):
        raise UserError("--private and --push-revision are of a push; add --push-to-hub USER/NAME.")
    to = None if push_to_hub is None else Destination(push_to_hub, push_revision, private, overwrite)
    if to is not None:
        to.check_name()
    suite = find_suite(evaluate) if evaluate is not None else None
    if activations is not None and not recipe.needs_activations:
        logger.info("--activations is not needed by method %s, and not read.", method)
    elif activations is not None and (samples, seqlen) != (None, None):
        logger.info("--samples and --seqlen are of no effect: the norms of --activations are used.")
    given = Activations.load(activations) if activations is not None and recipe.needs_activations else None
    source = find_model(model, revision, trust_remote_code)
    plan = _Plan(source, recipe, output or Path(f"{source.short_name}-{method}"), overwrite, trust_remote_code, blocks)
    if given is not None:
        warn_if_foreign(given, plan.checkpoint)
        plan.pruner.use(given, str(activations))
    if dry_run:
        return plan.describe(calibrates=recipe.needs_activations and given is None) | {"push_to_hub": push_to_hub}

    if to is not None and ranks().main:
        check_login(to)
    stages = Stages()
    ranks().share(None)  # all have seen that the output is free, before the first begins with it
    models = _Models(source, device_map, dtype, trust_remote_code, stages)
    evaluation = Evaluation(suite, models.tokenizer, BATCH_SIZE) if suite is not None else None
    measured: dict[str, Measures] = {}
    text: Calibration | None = None
    with plan.output if ranks().main else nullcontext() as out:
        made_of: dict[str, Any] | None = None if given is None else {"norms": norms_digest(given)}
        if recipe.needs_activations and given is None:
            context = max_context(plan.checkpoint.config)
            corpus = calibration_corpus(calibration, samples, seqlen, context)
            text = Calibration(plan.checkpoint, models.tokenizer, corpus, seed)
            made_of = text.signature(batch_size, how, quantization) | {"dtype": dtype, "device_map": device_map}
        defined = definition(plan.checkpoint, recipe.record(), plan.pruner.scheme, made_of)
        if out is not None:
            out.begin(defined | {"blocks": blocks})  # it may decide what the targets are
        if text is not None:
            given = ranks().share(calibrated(out, stages) if out is not None else None)
            if given is None:
                about: dict[str, Any] = {"model": source.name, "revision": source.revision}
                if propagate == "pruned":
                    about["pruned_by"] = recipe.record()
                models.dense(quantization)  # its loading is a stage of its own
                layers = plan.layers_to_calibrate()
                with stages("calibrate"):
                    given = text.run(
                        models.dense(), layers, batch_size, about, how, plan.pruner, plan.output.calibration, quantization
                    )
                if quantization is not None:
                    models.free()
                if out is not None:
                    given.save(out.files / ACTIVATIONS_NAME)
                    sync_tree(out.files)
                    out.work.note(calibrated={"norms": norms_digest(given), "stages": stages.record})
            text.forget(plan.output.calibration)
            plan.pruner.use(given)
        if evaluation is not None:
            dense = models.dense()
            with stages("evaluate dense"):
                measured["dense"] = evaluation.measure(dense)
            del dense
        models.free()
        report: dict[str, Any] = {}
        if out is not None:
            journal = Journal(out.work)
            with stages("prune"):
                outcomes = plan.pruner.write(out.files, journal)
            report = {
                "source": {"model": source.name, "revision": source.revision} | plan.checkpoint.fingerprint,
                "command": command_line(),
                "recipe": recipe.record() | {"dtype": dtype, "device_map": device_map},
                "calibration": given.about if given is not None else None,
                "versions": versions(),
                "stages": stages.record,
                **summarise(outcomes, plan.coverage, plan.pruner),
            }
            write_report(report, out.files)
            used = None if given is None else {"norms": norms_digest(given)}
            write_manifest(out.files, defined | {"activations": used}, journal.digests.finished)
            out.publish()
    report = ranks().share(report)
    for sentence in report["warnings"] if ranks().main else []:
        logger.warning("warning: %s", sentence)
    if evaluation is not None:
        pruned = models.load(plan.output.path)
        with stages("evaluate pruned"):
            measured["pruned"] = evaluation.measure(pruned)
        report["evaluation"] = evaluation.suite.record() | {"batch_size": BATCH_SIZE} | measured
        if ranks().main:
            report["stages"] = stages.record
            write_report(report, plan.output.path)
    times = ", ".join(f"{stage} {entry['seconds']:.1f} s" for stage, entry in stages.record.items())
    logger.info("written to %s (%s)", plan.output.path, times)
    if to is not None and ranks().main:
        report["push"] = publish_finished(plan.output.path, to)
    return report


def check_pruned(recipe: Recipe, activations: Path | None, quantization: Quantization | None = None) -> None:
    """Raise UserError where pruned propagation does not go with a recipe, or with norms that are given."""
    if activations is not None:
        raise UserError("--propagate pruned collects norms of its own; leave out --activations.")
    if quantization is not None:
        raise UserError("--propagate pruned sets weights to zero in memory, which quantised ones do not allow; leave one out.")
    if not recipe.needs_activations:
        raise UserError(f"--propagate pruned is for methods that need activations; {recipe.method} needs none.")
    if recipe.group == "all":
        raise UserError("--propagate pruned decides block by block, and --group all on all blocks at once; take row or matrix.")


class _Plan(Plan):
    """What will be pruned and where to, from what the user asked; nothing is written or run yet."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        output: Path,
        overwrite: bool,
        trust_remote_code: bool,
        blocks: str | None = None,
    ) -> None:
        super().__init__(source.folder, source.name, recipe, trust_remote_code, blocks)
        self.output = OutputFolder(output, [source.folder], needed_bytes(self.checkpoint), overwrite)
        self.pruner = self.pruner_of(recipe)

    def describe(self, calibrates: bool) -> dict[str, Any]:
        """What would be pruned and what it needs, as data."""
        layers: dict[str, dict[str, Any]] = {}
        for target in self.chosen:
            shape = [target.matrix.rows, target.matrix.columns]
            role = layers.setdefault(target.layer.role, {"count": 0, "shape": shape, "weights": 0})
            role["count"] += 1
            role["weights"] += target.matrix.numel
        weights_on_disk = sum(shard.stat().st_size for shard in self.checkpoint.shards)
        return {
            "dry_run": True,
            "layers": layers,
            "coverage": asdict(self.coverage),
            "output": str(self.output.path),
            "disk_bytes": needed_bytes(self.checkpoint),
            "model_bytes_to_calibrate": weights_on_disk if calibrates else None,
        }


class _Models:
    """The models of a run, loaded when they are first needed; the dense one serves calibration and evaluation."""

    def __init__(self, source: Source, device_map: str, dtype: str, trust_remote_code: bool, stages: Stages) -> None:
        self._source = source
        self._options = (device_map, dtype, trust_remote_code)
        self.stages = stages
        self._dense: PreTrainedModel | None = None

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._source.folder, self._options[2])

    def dense(self, quantization: Quantization | None = None) -> PreTrainedModel:
        if self._dense is None:
            with self.stages("load"):
                self._dense = self.load(self._source.folder, quantization)
        return self._dense

    def load(self, folder: Path, quantization: Quantization | None = None) -> PreTrainedModel:
        return load_model(folder, *self._options, quantization)

    def free(self) -> None:
        self._dense = None
        free_memory()


def calibrated(out: OutputFolder, stages: Stages) -> Activations | None:
    """The activations that a stopped run of the same command collected; None where it did not come so far."""
    noted = out.work.get("calibrated")
    if noted is None:
        return None
    given = Activations.load(out.files / ACTIVATIONS_NAME)
    if norms_digest(given) != noted["norms"]:
        raise UserError(f"{out.files / ACTIVATIONS_NAME}: it changed since it was written. Delete {out.work.path}.")
    stages.record |= noted["stages"]
    return given


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write emp_report.json, whole or not at all."""
    replace_json(folder / REPORT_NAME, report)


if __name__ == "__main__":
    run(prune, show)
