"""The stage that measures one point of a sweep."""

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.file_names import ACTIVATIONS_NAME, MANIFEST_NAME, REPORT_NAME
from emp_llm.common.memory import free_memory
from emp_llm.common.timing import Stopwatch
from emp_llm.evaluation.evaluator import Evaluator
from emp_llm.options.commands import SweepOptions
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.loaded_model import MaskedModel
from emp_llm.pruning.outcome import ALL_KEPT, Outcome, masks_digest
from emp_llm.pruning.output.checkpoint_writer import CheckpointWriter
from emp_llm.pruning.output.manifest import run_signature, write_manifest
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.recipe import recipe_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.runs.stages.evaluating import evaluation_record
from emp_llm.runs.stages.report_assembly import assemble_report
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import stage_records
from emp_llm.runs.sweeping.sweep_folder import SweepFolder
from emp_llm.runs.sweeping.sweep_points import SweepPoint
from emp_llm.selection.arithmetic.number_counts import GroupNumbers
from emp_llm.storage.output.journal import Journal
from emp_llm.storage.output.output_folder import OutputFolder

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations

logger = logging.getLogger(__name__)


class SweepShared:
    """Everything that the points of a sweep share.

    Attributes:
        numbers: order -> effective numbers of the magnitudes, for points whose counts they set.

    Args:
        plan: the targets.
        folder: of the sweep.
        models: loads the dense model.
        evaluator: measures the suite.
        options: of the command.
        source: the dense model, for reports.
        dense: returns the measurements of the dense model.
        norms: returns the norms, or None.
        stack: restores the dense weights at the end of the sweep.
    """

    def __init__(
        self,
        plan: Plan,
        folder: SweepFolder,
        models: RunModels,
        evaluator: Evaluator,
        options: SweepOptions,
        source: ModelSource,
        dense: Callable[[], Measures],
        norms: "Callable[[], Activations | None]",
        stack: ExitStack,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.models = models
        self.evaluator = evaluator
        self.options = options
        self.source = source
        self.dense = dense
        self.norms = norms
        self._stack = stack
        self._masked: list[MaskedModel | None] = []
        self.numbers: dict[float, list[GroupNumbers]] = {}
        self._measured: dict[str, tuple[str, Measures]] = {}  # digest of masks -> name of a point, its measurements

    def masked_model(self) -> MaskedModel | None:
        """The loaded model, if its weights are those of the checkpoint and can be masked; else None, and the model is freed."""
        if not self._masked:
            masked = MaskedModel(self.models.dense(), self.plan.pruner_of(Recipe(method="magnitude", sparsity=0.0)))
            if masked.fits():
                self._masked.append(self._stack.enter_context(masked))
            else:
                logger.info("the loaded weights differ from the stored ones; each point is written to a temporary checkpoint.")
                self._masked.append(None)
                del masked
                self.models.free()
        return self._masked[0]

    def same_masks(self, masks: str) -> tuple[str, Measures] | None:
        """Name and measurements of an earlier point with the same masks; None if there is none."""
        return ("dense", self.dense()) if masks == ALL_KEPT else self._measured.get(masks)

    def note(self, point: SweepPoint, report: RunReport) -> None:
        """Note a finished point."""
        assert report.evaluation is not None
        assert report.evaluation.pruned is not None
        self._measured.setdefault(report.masks or "", (point.name, report.evaluation.pruned))
        self.folder.finish(point, report)


class PointStage:
    """Decides a point's masks, measures the masked model, and writes the report; with --keep also the checkpoint.

    Args:
        point: of the sweep; recipe: its recipe.
        shared: everything that all points share.
        place: "3 of 24", for the log.
    """

    def __init__(self, point: SweepPoint, recipe: Recipe, shared: SweepShared, place: str) -> None:
        self.name = point.name
        self._point = point
        self._recipe = recipe
        self._shared = shared
        self._place = place
        self._path = shared.folder.points / point.name
        self._stopwatch = Stopwatch()

    def finished(self) -> bool:
        report = self._shared.folder.report(self._point)
        kept = (self._path / MANIFEST_NAME).is_file()
        if report is None or (self._shared.options.keep and not kept):
            return False
        logger.info("%s: already finished; not measured again.", self.name)
        self._shared.note(self._point, report)
        return True

    def run(self) -> None:
        shared, pruner = self._shared, self._shared.plan.pruner_of(self._recipe)
        norms = shared.norms() if self._recipe.needs_activations else None
        if norms is not None:
            pruner.scores.use(norms)
        settle_budget(pruner, shared.numbers)
        masked = shared.masked_model()
        if shared.options.keep:
            report = self._run_and_keep(pruner, norms, masked)
        else:
            report = self._run_without_keeping(pruner, norms, masked)
        removed = 100 * report.targets.sparsity_of_targets
        logger.info("%s: done, %.2f %% removed; %s.", self.name, removed, self._place)
        shared.note(self._point, report)

    def _run_without_keeping(self, pruner: Pruner, norms: "Activations | None", masked: MaskedModel | None) -> RunReport:
        """Measure without a checkpoint, or with a temporary one if the loaded model cannot be masked."""
        scratch = self._shared.folder.scratch
        with self._stopwatch("prune"):
            if masked is not None:
                outcomes = masked.prune(pruner)
            else:
                scratch.mkdir(exist_ok=True)
                outcomes = CheckpointWriter(pruner).write(scratch)
        report = self._report(pruner, outcomes, norms, masked, scratch)
        shutil.rmtree(scratch, ignore_errors=True)
        report.save(self._path / REPORT_NAME)
        return report

    def _run_and_keep(self, pruner: Pruner, norms: "Activations | None", masked: MaskedModel | None) -> RunReport:
        """Measure, and write the checkpoint."""
        checkpoint = self._shared.plan.checkpoint
        record = recipe_record(self._recipe, pruner.scheme)
        digest = None if norms is None else norms.digest
        output = OutputFolder(self._path, [checkpoint.folder], checkpoint.output_bytes, overwrite=True)
        with output as out:
            out.begin(run_signature(checkpoint, record, pruner.scheme, None if digest is None else {"norms": digest}))
            if norms is not None:
                norms.save(out.files / ACTIVATIONS_NAME)
            journal = Journal(out.work)
            writer = CheckpointWriter(pruner, journal)
            with self._stopwatch("prune"):
                if masked is not None:
                    masked.prune(pruner)
                outcomes = writer.write(out.files)
            report = self._report(pruner, outcomes, norms, masked, out.files)
            report.save(out.files / REPORT_NAME)
            hashes = journal.hasher.finished
            write_manifest(out.files, checkpoint, writer.source_identity, record, pruner.scheme, digest, hashes)
            out.publish()
        return report

    def _report(
        self, pruner: Pruner, outcomes: list[Outcome], norms: Any, masked: MaskedModel | None, written: Path
    ) -> RunReport:
        """The report of a point with its measurements."""
        shared = self._shared
        masks = masks_digest(outcomes, pruner.scheme, pruner.scores.by_magnitude)
        known = shared.folder.report(self._point)
        if known is not None and known.masks == masks and known.evaluation is not None:
            measures = known.evaluation.pruned or Measures()
        else:
            measures = self._measures(masks, masked, written)
        about = None if norms is None else norms.about
        report = assemble_report(shared.source, shared.plan, self._recipe, shared.options, pruner, outcomes, about)
        report.point, report.masks = self._point.record(), masks
        suite, size = shared.evaluator.suite.record(), shared.evaluator.batch_size
        report.evaluation = evaluation_record(suite, size, shared.dense(), measures)
        report.stages = stage_records(self._stopwatch)
        return report

    def _measures(self, masks: str, masked: MaskedModel | None, written: Path) -> Measures:
        """The measurements of the model with these masks, in memory or from a checkpoint."""
        shared = self._shared
        same = shared.same_masks(masks)
        if same is not None:
            name, measures = same
            logger.info("%s: the same masks as %s, so the same values.", self.name, name)
            return Measures(perplexity=measures.perplexity, tasks=measures.tasks, same_masks_as=name)
        measures = shared.folder.measured_so_far(self._point, masks)
        model = None if masked is None else masked.model
        if model is None:
            with self._stopwatch("load"):
                model = shared.models.load(written)
        with self._stopwatch("evaluate pruned"):
            shared.evaluator.measure(model, measures, lambda part: shared.folder.note_measures(self._point, masks, part))
        if masked is None:
            del model
            free_memory()  # an offloaded model is in a reference cycle, and would stay in memory beside the next one
        return measures
