"""The report of a model that was pruned in memory, and the files that make its saved folder a
finished checkpoint.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from torch import nn

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.common.paths import ACTIVATIONS_NAME, REPORT_NAME
from emp_llm.models.architecture import Architecture
from emp_llm.models.loading import build_skeleton
from emp_llm.models.masks import Masks
from emp_llm.pruning.trained import check_zeros, digests
from emp_llm.pruning.verification import Findings
from emp_llm.pruning.writing import (
    check_as_written,
    files_beside,
    keep_criterion,
    read_manifest,
    write_manifest,
)
from emp_llm.records.run_report import MatrixRecord, RunReport, TargetsRecord, read_report


@dataclass(frozen=True)
class ModelReport:
    """The effect of pruning a model in memory.

    Attributes:
        record: the report of the run, as `prune` writes it.
        masks: the masks by parameter name.
        activations: the norms that decided them; None for methods without.
        model: the model.
        criterion_source: the source file of a criterion of the user's own; None if there is none.
        weights: digests of the pruned weights, which tell whether they are trained later.
        folder: from which the report was loaded; None: the model was pruned in memory.
    """

    record: RunReport
    masks: Masks
    activations: Activations | None
    model: nn.Module
    criterion_source: bytes | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __repr__(self) -> str:
        """A short table."""
        return repr(self.record)

    @property
    def targets(self) -> TargetsRecord:
        """Counts over all targets, and the sparsity."""
        return self.record.targets

    @property
    def matrices(self) -> dict[str, MatrixRecord]:
        """The effect on each matrix, by layer name."""
        return self.record.matrices

    @property
    def warnings(self) -> list[str]:
        return self.record.warnings

    @classmethod
    def load(cls, folder: Path | str) -> "ModelReport":
        """The report of a pruned folder, with its masks and norms, and a model without weights.
        After a training, `ModelReport.load("pruned").save("trained")` completes the trained folder.

        Raises:
            UserError: the folder is no finished checkpoint, or its weights have changed since.
        """
        folder = Path(folder)
        record = read_report(folder)
        read_manifest(folder)
        checkpoint = Checkpoint(folder)
        check_as_written(checkpoint)
        architecture = Architecture.of_checkpoint(checkpoint, record.recipe.targets.blocks)
        norms = folder / ACTIVATIONS_NAME
        return cls(
            record,
            Masks.load(folder),
            Activations.load(norms) if norms.is_file() else None,
            build_skeleton(folder, trust_remote_code=False),
            weights=digests(architecture),
            folder=folder,
        )

    def save(self, folder: Path | str) -> None:
        """Complete the folder of the saved model: add the report, the norms and the manifest.

        Save the pruned model and its tokenizer first: `model.save_pretrained(folder)`. Then
        `report`, `verify`, `reapply_mask`, `pack` and `push` take the folder. The manifest does not
        identify the dense model; `verify --source` compares tensors. If weights have changed since
        the pruning, the report says that the model was trained, and leaves out the perplexities
        that were measured before.

        Raises:
            UserError: the folder holds no model, another one, or one whose removed weights are not
                zero.
        """
        folder = Path(folder)
        checkpoint = Checkpoint(folder)
        scope = self.record.recipe.targets
        architecture = Architecture.of_checkpoint(checkpoint, scope.blocks, names_suffice=True)
        targets = architecture.targets_of(scope)
        findings = Findings()
        check_zeros(checkpoint, targets, self.masks, findings)
        if findings.differences:
            raise UserError(
                f"{folder}: {findings.differences[0]} Save the pruned model there first, with "
                "model.save_pretrained; after a training, reapply_mask sets its removed weights to "
                "zero again."
            )
        stored = {target.name: target.matrix.stored.name for target in targets}
        matrices = {
            name: msgspec.structs.replace(entry, tensor=stored.get(name, entry.tensor))
            for name, entry in self.record.matrices.items()
        }
        record = msgspec.structs.replace(self.record, matrices=matrices)
        size = sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
        if record.sizes is not None and record.sizes.dense != size:
            record = msgspec.structs.replace(record, sizes=None)  # they are of another dtype
        if (units := record.structure) is not None:
            units = msgspec.structs.replace(
                units, pruned=msgspec.structs.replace(units.pruned, bytes=size)
            )
            record = msgspec.structs.replace(record, structure=units)
        now = digests(architecture)
        if any(now.get(name, digest) != digest for name, digest in self.weights.items()):
            record = _trained(record)
        norms = None if self.activations is None else self.activations.digest
        if self.folder is not None:
            manifest = read_manifest(self.folder)
            norms = None if manifest.activations is None else manifest.activations.norms
            for path in files_beside(self.folder, manifest):
                (folder / path.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / path, folder / path)
        elif self.activations is not None:
            (folder / ACTIVATIONS_NAME).parent.mkdir(exist_ok=True)
            self.activations.save(folder / ACTIVATIONS_NAME)
        record.save(folder / REPORT_NAME)
        keep_criterion(folder, self.criterion_source)
        write_manifest(folder, checkpoint, None, record.recipe, norms, {})


def _trained(record: RunReport) -> RunReport:
    """The report of a model that was trained since: without what holds no more."""
    sizes = None if record.sizes is None else msgspec.structs.replace(record.sizes, mask=0)
    return msgspec.structs.replace(
        record,
        trained=True,
        check=None,
        unchecked="it was trained since; use emp-llm evaluate",
        evaluation=None,
        sizes=sizes,
    )
