"""A run of `prune`: what is known of it, and the steps that pruning of weights and of units share.

Torch is imported when a step needs it: a run without a text decides and writes without it.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emp_llm.calibration.given_norms import given_norms, warn_if_foreign
from emp_llm.calibration.texts import calibration_corpora, self_notes
from emp_llm.checkpoint.agreement import check_agreement
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError
from emp_llm.common.machine import Stopwatch, machine_name
from emp_llm.common.paths import REPORT_NAME, SELF_NAME
from emp_llm.common.progress import load_packages, stage
from emp_llm.common.ranks import ranks
from emp_llm.healing.checks import healing_bytes, sequences_for
from emp_llm.healing.memory import HealingPlan, plan_healing
from emp_llm.hub.local_model import LocalModel, find_model
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.layers import Layer
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import (
    Quantization,
    max_context,
    parse_device_map,
    quantization_of,
)
from emp_llm.options.base import GivenOptions
from emp_llm.options.prune import PruneOptions, check_wanted
from emp_llm.options.recipe import UNIT_CRITERIA, ByCost, Heal, Recipe, Share
from emp_llm.pruning.chosen import stored_bytes
from emp_llm.pruning.dry_run import DryRun, healing_notes, planned_layers, resume_bytes
from emp_llm.pruning.outcome import log_warnings
from emp_llm.pruning.scores import recorded
from emp_llm.pruning.writing import criterion_source, keep_criterion, run_signature, write_manifest
from emp_llm.records.corpus import Corpus
from emp_llm.records.evaluation import CheckRecord
from emp_llm.records.run_report import LossRecord, RunReport
from emp_llm.records.source import CalibrationRecord, ModelSource, stage_records
from emp_llm.walk.checks import update_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.data import CalibrationText
    from emp_llm.calibration.passes import Masker
    from emp_llm.evaluation.evaluate import PreparedSuite
    from emp_llm.evaluation.suites import Suite
    from emp_llm.records.evaluation import Measures, PerplexityRecord
    from emp_llm.walk.moved import MovedWeights
logger = logging.getLogger(__name__)
_LEAST = 6  # held-out sequences, to decide and to judge


@dataclass(frozen=True)
class LossSearch:
    """What a run that keeps to a budget needs beside its options.

    Attributes:
        tokens: the sequences that judge, int64, shape (sequences, length).
        norms: of the calibration; None if the recipe needs none.
        record: the curve, for the report.
    """

    tokens: "Tensor"
    norms: "Activations | None"
    record: LossRecord


@dataclass
class PruneRun:
    """A run of `prune`. What follows from its options is worked out when it is first asked for.

    Attributes:
        recipe: with counts of its own, once the targets are known.
        given: the names of the options that the user gave.
        source: the dense model.
        path: the folder of the checkpoint.
        norms: of a file, or of a search by --loss; None: the run calibrates, or needs none.
        judged: of a run whose sparsity --loss has found; else None.
        suite: to evaluate both models with; None: no evaluation.
        architecture, targets: of the model; set when they are known.
        made_of: what the checkpoint depends on beside model, recipe, norms and text.
        healing: how the model heals; known when the run begins.
    """

    recipe: Recipe
    options: PruneOptions
    given: GivenOptions
    source: LocalModel
    path: Path
    norms: "Activations | None"
    judged: LossSearch | None
    suite: "Suite | None"
    models: OneModel
    stopwatch: Stopwatch
    architecture: Architecture = field(init=False)
    targets: list[Target] = field(init=False)
    made_of: dict[str, Any] = field(default_factory=dict)
    healing: HealingPlan | None = None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        options: PruneOptions,
        given: GivenOptions,
        judged: LossSearch | None = None,
    ) -> "PruneRun":
        """The run that checked options ask for.

        Raises:
            UserError: the model, the suite or the file of norms is missing.
        """
        if options.device_map != "auto":
            parse_device_map(options.device_map)
        norms = None
        if judged is not None:
            norms = judged.norms
        elif options.loss is None and not _sums_units(recipe):
            checks = options.check and options.evaluate is None
            norms = given_norms(options, recipe, given, checks=checks)
        suite = None
        if options.evaluate is not None:
            from emp_llm.evaluation.suites import find_suite

            suite = find_suite(options.evaluate)
        trust = options.trust_remote_code
        source = find_model(options.model, options.revision, trust, headers_suffice=options.dry_run)
        structure = recipe.structure
        name = recipe.method if structure is None else f"{structure.units}-{recipe.method}"
        path = options.output or Path(f"{source.short_name}-{name}")
        stopwatch = Stopwatch()
        models = OneModel(options.device_map, options.dtype, trust, stopwatch)
        return cls(recipe, options, given, source, path, norms, judged, suite, models, stopwatch)

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of the dense model."""
        return self.architecture.checkpoint

    @property
    def by_cost(self) -> Share | None:
        """The counts of a run whose blocks lose by what their weights cost; None for others."""
        counts = self.recipe.counts
        return counts if isinstance(counts, Share) and isinstance(counts.shares, ByCost) else None

    @property
    def sums_units(self) -> bool:
        """Whether units are scored by sums over the text."""
        return _sums_units(self.recipe)

    @property
    def calibrates(self) -> bool:
        """Whether the run collects the norms of inputs. Costs are those of Wanda's masks."""
        needed = self.recipe.needs_activations or self.by_cost is not None
        return needed and self.norms is None

    @property
    def reads_text(self) -> bool:
        """Whether the run needs a text."""
        holds_out = self.options.loss is not None or self.by_cost is not None
        return holds_out or self.recipe.moves or self.sums_units or self.calibrates

    @property
    def checks(self) -> bool:
        """Whether the run ends with a check of held-out text, if it has one."""
        return self.options.check and self.suite is None

    @property
    def has_text(self) -> bool:
        """Whether the run has a text: it needs one, or the user names one, which checks it."""
        return self.reads_text or (self.checks and self.options.calibration is not None)

    @cached_property
    def quantization(self) -> Quantization | None:
        """Of the dense model while it is calibrated and checked."""
        return quantization_of(self.options.load_in_8bit, self.options.load_in_4bit)

    @cached_property
    def text(self) -> "CalibrationText":
        """The calibration text, of a run that needs one."""
        load_packages()
        from emp_llm.calibration.data import CHECKED, CHOOSING, calibration_data

        return calibration_data(
            self.options,
            self.architecture,
            self.models,
            self.options.propagate,
            self.quantization,
            held_out=CHOOSING if self.by_cost or self.options.loss else CHECKED,
            training=0 if self.recipe.heal is None else sequences_for(self.recipe.heal.steps),
        )

    @cached_property
    def divided(self) -> "tuple[Tensor, Tensor]":
        """The held-out sequences that decide how much goes, and those that judge."""
        flag = "--shares cost" if self.options.loss is None else "--loss"
        return split_held_out(self.text.held_out, self.options.text_name, flag)

    @property
    def held_out(self) -> "Tensor | None":
        """The sequences that the run is checked on; None if it has none."""
        if self.judged is not None:
            return self.judged.tokens
        if self.by_cost is not None:
            return self.divided[1]
        return self.text.held_out if self.has_text else None

    @cached_property
    def suite_data(self) -> "tuple[PreparedSuite, Measures | None] | None":
        """The data of the suite, and earlier results of the dense model; None: no evaluation."""
        if self.suite is None:
            return None
        load_packages()
        from emp_llm.evaluation.evaluate import measures_of_baseline, prepare_suite
        from emp_llm.models.loading import load_tokenizer

        folder = self.source.folder
        tokenizer = load_tokenizer(folder, self.options.trust_remote_code)
        prepared = prepare_suite(self.suite, folder, tokenizer)
        options = self.options
        measures = measures_of_baseline(
            options.baseline, self.source, prepared, options.dtype, options.device_map
        )
        return prepared, measures

    @cached_property
    def signature(self) -> dict[str, Any]:
        """What the bytes of the checkpoint depend on, as JSON."""
        made_of = dict(self.made_of)
        if self.norms is not None:
            made_of["norms"] = self.norms.digest
        if self.reads_text:
            from emp_llm.calibration.passes import calibration_signature

            options = self.options
            made_of |= calibration_signature(
                self.text,
                options.batch_size,
                options.execution,
                options.propagate,
                self.quantization,
            )
            made_of |= {"dtype": options.dtype, "device_map": options.device_map}
            if self.recipe.heal is not None:
                made_of["seed"] = options.seed  # of the order of the sequences
                made_of["training"] = self.text.for_training.signature
        return run_signature(self.checkpoint, self.recipe, made_of or None)

    @cached_property
    def origin(self) -> CalibrationRecord:
        """The part of the origin of norms and of fitted weights that concerns the model."""
        from emp_llm.calibration.passes import model_origin

        source = self.source
        return model_origin(source.name, source.revision, self.checkpoint, self.quantization)

    def dense(self, by_blocks: bool = False) -> "PreTrainedModel":
        """The dense model. Callers keep no reference to it.

        Args:
            by_blocks: it runs block by block alone.
        """
        return self._model(self.source.folder, by_blocks)

    def _model(self, folder: Path, by_blocks: bool) -> "PreTrainedModel":
        if by_blocks:  # transformers would write to disk what it puts together or dequantises
            layers = [target.layer for target in self.architecture.select("all-linear")]
            quantised = "quantization_config" in self.checkpoint.config
            by_blocks = not quantised and all(layer.expert is None for layer in layers)
        return self.models.get(folder, self.quantization, by_blocks)

    def plan(self) -> DryRun:
        """What the run would do, and its need of memory and disk.

        Raises:
            UserError: the output may not be written.
        """
        options = self.options
        checkpoint = self.checkpoint
        update = self.recipe.update
        heal = self.recipe.heal
        units = self.recipe.structure is not None
        self.output()  # is only checked
        by_blocks = options.execution != "model" or options.propagate == "pruned"
        resumes = self.calibrates and options.resumable_calibration and by_blocks
        fits = update is not None and not units
        notes = self_notes(options.text_name) if self.reads_text else []
        if options.loss is not None:
            notes.append(
                f"how many go: found by the run, which measures the loss of held-out text at some "
                f"sparsities (--loss {options.loss})"
            )
        if heal is not None:
            corpora = self._corpora()
            length = max(corpus.seqlen or 0 for corpus in corpora)
            samples = sum(corpus.samples or 0 for corpus in corpora)
            healing = self._healing_plan(heal, length, samples)
            notes += healing_notes(checkpoint, self.targets, heal, length, healing)
        return DryRun(
            layers=planned_layers(self.targets),
            coverage=self.architecture.coverage(self.targets, self.recipe.targets.tower),
            output=str(self.path),
            # --loss keeps its best run beside the one that it makes.
            disk_bytes=checkpoint.output_bytes
            * (2 if options.loss is not None and (units or self.recipe.moves) else 1),
            needs_overwrite=os.path.lexists(self.path) and not options.overwrite,
            model_bytes=sum(checkpoint.sizes.values())
            if units or self.calibrates or update is not None
            else None,
            resume_bytes=resume_bytes(checkpoint.config, self._corpora())
            if resumes and not units
            else None,
            fit_bytes=update_bytes(self.targets, update) if update is not None and fits else None,
            fit_disk_bytes=stored_bytes(self.targets) if fits else None,
            push_to_hub=options.push_to_hub,
            recipe=self.recipe.method,
            notes=notes,
        )

    def _corpora(self) -> list[Corpus]:
        options = self.options
        context = max_context(self.checkpoint.config)
        return calibration_corpora(options.text_name, context, options.samples, options.seqlen)

    def check(self) -> None:
        """Fail early: read the text and the suite before loading a model.

        Raises:
            UserError: the output may not be written, or holds other work; or the text or the data
                of the suite is missing, or does not do; or a rank reads something else.
        """
        if self.judged is None:
            check_wanted(self.options, self.given, self.has_text)
        if self.suite is None or not self.path.exists():  # else `awaits_evaluation` decides
            self.output().check_leftover(run_signature(self.checkpoint, self.recipe, None))
        _ = self.signature, self.held_out
        if self.recipe.heal is not None:
            from emp_llm.healing.checks import check_healable

            check_healable(self.checkpoint.config, self.text, self.targets)
        _ = self.suite_data
        made_of = {key: value for key, value in self.signature.items() if key != "source"}
        made_of |= made_of.pop("activations") or {}
        if self.suite is not None:
            made_of["suite"] = msgspec.to_builtins(self.suite.record())
        check_agreement(made_of, model=self.checkpoint)

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the checkpoint is finished, and only its evaluation is not."""
        if self.suite is None:
            return False
        from emp_llm.evaluation.evaluate import pending_matches

        return pending_matches(self.path, self.signature)

    def output(self, more: int = 0) -> OutputFolder:
        """The output.

        Args:
            more: bytes that the work takes beside those of the checkpoint.

        Raises:
            UserError: it may not be written.
        """
        needed = self.checkpoint.output_bytes + more
        overwrite = self.options.overwrite or self.options.dry_run
        return OutputFolder(self.path, [self.source.folder], needed, overwrite)

    def _healing_plan(
        self, heal: Heal, length: int, samples: int, kept: dict[str, Any] | None = None
    ) -> HealingPlan:
        """How the model heals: `samples` sequences of `length` tokens.

        Args:
            kept: the plan of an interrupted run.

        Raises:
            UserError: memory does not suffice.
        """
        options = self.options
        return plan_healing(
            self.checkpoint,
            self.targets,
            self.recipe,
            heal,
            device_map=options.device_map,
            length=length,
            samples=samples,
            batch_size=options.batch_size,
            hidden_states=options.hidden_states,
            kept=kept,
        )

    def plan_healing(self, kept: dict[str, Any] | None = None) -> None:
        """Decide how the model heals on the text of the run; `kept` and the errors are those of
        `_healing_plan`.
        """
        assert self.recipe.heal is not None
        samples, length = self.text.tokens.shape
        self.healing = self._healing_plan(self.recipe.heal, length, samples, kept)

    @property
    def work_bytes(self) -> int:
        """The disk that the work takes beside the output: the weights that move, and those of the
        healing once it is planned.
        """
        recipe = self.recipe
        size = 0
        if recipe.update is not None and recipe.structure is None:
            size += stored_bytes(self.targets)
        if recipe.heal is not None and self.healing is not None:
            by_blocks = self.healing.by == "blocks"
            size += healing_bytes(self.checkpoint, self.targets, recipe.heal, by_blocks)
        return size

    def begin(self, out: OutputFolder) -> None:
        """Resume the work of an interrupted run, or start.

        Raises:
            UserError: the healing will not find the memory or the disk that it needs.
        """
        out.begin(self.signature, machine_name() if self.reads_text else "")
        if self.recipe.heal is not None:
            self.plan_healing(out.get("healing_plan"))
            out.check_space(self.checkpoint.output_bytes + self.work_bytes)
        if self.reads_text:
            from emp_llm.calibration.data import keep_generated

            keep_generated(out.files / SELF_NAME, self.text)
        if self.judged is not None and self.norms is not None and self.options.activations is None:
            from emp_llm.calibration.activations import keep_norms

            keep_norms(out, self.norms, self.stopwatch)  # what decided the masks lies beside them

    def calibrated(
        self, out: OutputFolder, layers: list[Layer], masker: "Masker | None" = None
    ) -> "Activations":
        """The norms of the inputs of layers, or those of an interrupted run. A collective call.

        Args:
            masker: of a pruned propagation; None: dense.
        """
        from emp_llm.calibration.activations import keep_norms, kept_norms
        from emp_llm.calibration.passes import calibrated, delete_progress

        options = self.options
        with stage("calibrate"):
            norms = kept_norms(out, self.stopwatch)
            if norms is None:
                pruned_by = None if masker is None else recorded(self.recipe)
                about = msgspec.structs.replace(self.origin, pruned_by=pruned_by)
                dense = self.dense(by_blocks=masker is not None)
                with self.stopwatch("calibrate"):
                    norms = calibrated(
                        dense,
                        self.text,
                        layers,
                        about,
                        batch_size=options.batch_size,
                        execution=options.execution,
                        hidden_states=options.hidden_states,
                        statistics=self.recipe.statistics,
                        masker=masker,
                        blocks=self.recipe.targets.blocks,
                        resume=out.calibration if options.resumable_calibration else None,
                    )
                del dense
                if self.quantization is not None:
                    self.models.free()
                keep_norms(out, norms, self.stopwatch)
            delete_progress(out.calibration)
        return norms

    def moved(self, out: OutputFolder, name: str, update: Callable[..., None]) -> "MovedWeights":
        """The weights that an update moves, or those of an interrupted run, in the work folder. A
        collective call.

        Args:
            name: of the update.
            update: puts the blocks that are not finished into `moved`, given the dense model.
        """
        from emp_llm.walk.moved import MovedWeights

        with stage(name):
            moved = MovedWeights(out.fitted, lambda block: out.note(fitted=block))
            times = out.get("refitted")
            if times is not None:
                self.stopwatch.record |= times
                return moved
            dense = self.dense(by_blocks=True)
            with self.stopwatch(name):
                update(dense, moved=moved)
            out.note(refitted=dict(self.stopwatch.record))
        return moved

    def held_out_perplexity(self, folder: Path) -> "PerplexityRecord | None":
        """The perplexity of the held-out text by the model in a folder, which stays in memory.

        None if the run checks none, or the model has none. A failure is logged, and ends no run. A
        collective call.
        """
        tokens = self.held_out
        if not self.checks or tokens is None:
            return None
        from emp_llm.evaluation.perplexity import held_out_perplexity

        recipe = self.recipe
        moves_blocks = recipe.update is not None or self.options.propagate == "pruned"
        by_blocks = moves_blocks and recipe.structure is None
        with self.stopwatch("check"):
            return held_out_perplexity(
                lambda: self._model(folder, by_blocks=by_blocks), self.checkpoint.config, tokens
            )

    def made_from(self, identity: str) -> ModelSource:
        """The dense model, as the report names it."""
        return ModelSource(model=self.source.name, revision=self.source.revision, identity=identity)

    def finish(
        self,
        out: OutputFolder,
        report: RunReport,
        hashes: dict[str, str],
        norms: "Activations | None",
        dense: "PerplexityRecord | None",
    ) -> RunReport:
        """Heal and check what is written, and put it at its path. A collective call.

        Args:
            out: with the shards and side files of the checkpoint.
            report: of the pruning; the rest is added.
            hashes: BLAKE3 of each shard, by name.
            norms: that scored; None: no norms did.
            dense: of the dense model, from `held_out_perplexity`.
        """
        log_warnings(report.warnings)
        options = self.options
        heal = self.recipe.heal
        if heal is not None:
            from emp_llm.healing.training import heal_folder, healing_warnings

            assert self.healing is not None
            self.models.free()
            with self.stopwatch("heal"):
                report.healing = heal_folder(
                    out,
                    self.source.folder,
                    self.recipe,
                    heal,
                    self.text,
                    self.origin,
                    self.healing,
                    dtype=options.dtype,
                    trust_remote_code=options.trust_remote_code,
                    batch_size=options.batch_size,
                    seed=options.seed,
                )
            log_warnings(healing_warnings(report.healing))
            report.warnings += healing_warnings(report.healing)
            hashes = {}
        if dense is not None:
            pruned = self.held_out_perplexity(out.files)
            self.models.free()
            report.check = None if pruned is None else CheckRecord(dense=dense, pruned=pruned)
        if self.checks and not self.has_text:
            report.unchecked = "give --calibration"
        elif self.checks and self.held_out is None:
            report.unchecked = "the text ends with the calibration; give fewer --samples"
        if norms is not None:
            report.calibration = norms.about
        elif self.reads_text:
            from emp_llm.calibration.passes import fit_origin

            report.calibration = fit_origin(self.text, options.batch_size, self.origin)
        report.dtype = options.dtype
        report.device_map = options.device_map
        report.loss = None if self.judged is None else self.judged.record
        report.stages = stage_records(self.stopwatch.record)
        if ranks().main:
            identity = report.source.identity or ""
            if self.norms is not None:
                warn_if_foreign(self.norms, identity, self.source.folder)
            report.save(out.files / REPORT_NAME)
            keep_criterion(out.files, criterion_source(self.recipe))
            digest = None if norms is None else norms.digest
            write_manifest(out.files, self.checkpoint, identity, report.recipe, digest, hashes)
            if self.suite is not None:
                from emp_llm.evaluation.evaluate import mark_pending

                mark_pending(out.files, self.signature)
        out.complete()
        return report

    def evaluated(self, report: RunReport) -> RunReport:
        """The report of the finished checkpoint with the results of both models, if they are asked
        for.
        """
        if self.suite_data is None:
            return report
        from emp_llm.evaluation.evaluate import evaluate_checkpoint

        prepared, baseline = self.suite_data
        return evaluate_checkpoint(
            self.path,
            self.source,
            report,
            prepared,
            self.models,
            self.options.device_map,
            self.stopwatch,
            baseline,
        )


def _sums_units(recipe: Recipe) -> bool:
    return recipe.structure is not None and recipe.name in UNIT_CRITERIA


def split_held_out(
    held_out: "Tensor | None", text: str, flag: str = "--loss"
) -> "tuple[Tensor, Tensor]":
    """The held-out sequences that decide, and every third one, which judges.

    Args:
        text: its name.
        flag: what needs them.

    Raises:
        UserError: there are too few.
    """
    if held_out is None or len(held_out) < _LEAST:
        has = 0 if held_out is None else len(held_out)
        raise UserError(
            f"{flag} needs at least {_LEAST} sequences of text behind those of the "
            f"calibration, and {text} has {has}. Give a longer text, or fewer --samples."
        )
    return held_out[[number for number in range(len(held_out)) if number % 3 != 2]], held_out[2::3]
