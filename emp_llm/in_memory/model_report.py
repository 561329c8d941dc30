"""The report of a model that was pruned in memory, and the files that make its saved folder a
finished checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray
from torch import nn

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.common.paths import ACTIVATIONS_NAME, REPORT_NAME
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.masks import Masks
from emp_llm.models.modules import rows_in
from emp_llm.pruning.writing import keep_criterion, write_manifest
from emp_llm.records.run_report import MatrixRecord, RunReport, TargetsRecord


@dataclass(frozen=True)
class ModelReport:
    """The effect of pruning a model in memory.

    Attributes:
        record: the report of the run, as `prune` writes it.
        masks: the masks by parameter name.
        activations: the norms that decided them; None for methods without.
        model: the model.
        criterion_source: the source file of a criterion of the user's own; None if there is none.
    """

    record: RunReport
    masks: Masks
    activations: Activations | None
    model: nn.Module
    criterion_source: bytes | None = None

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

    def save(self, folder: Path | str) -> None:
        """Complete the folder of the saved model: add the report, the norms and the manifest.

        Save the pruned model and its tokenizer first: `model.save_pretrained(folder)`. Then
        `report`, `verify`, `reapply_mask`, `pack` and `push` take the folder. The manifest does not
        identify the dense model; `verify --source` compares tensors.

        Raises:
            UserError: the folder holds no model, another one, or one whose removed weights are not
                zero.
        """
        folder = Path(folder)
        checkpoint = Checkpoint(folder)
        scope = self.record.recipe.targets
        architecture = Architecture.of_checkpoint(checkpoint, scope.blocks, names_suffice=True)
        targets = architecture.targets_of(scope)
        self._check_zeros(checkpoint, targets)
        stored = {target.name: target.matrix.stored.name for target in targets}
        matrices = {
            name: msgspec.structs.replace(entry, tensor=stored.get(name, entry.tensor))
            for name, entry in self.record.matrices.items()
        }
        record = msgspec.structs.replace(self.record, matrices=matrices)
        if self.activations is not None:
            (folder / ACTIVATIONS_NAME).parent.mkdir(exist_ok=True)
            self.activations.save(folder / ACTIVATIONS_NAME)
        record.save(folder / REPORT_NAME)
        keep_criterion(folder, self.criterion_source)
        digest = None if self.activations is None else self.activations.digest
        write_manifest(folder, checkpoint, None, record.recipe, digest, {})

    def _check_zeros(self, checkpoint: Checkpoint, targets: list[Target]) -> None:
        """Raise UserError unless every removed weight is zero in a checkpoint."""
        masks: dict[str, NDArray[Any]] = {}
        with checkpoint.open_files() as files:
            for target in targets:
                name = target.layer.parameter
                matrix = target.matrix
                if name not in self.masks:
                    raise UserError(
                        f"{checkpoint.folder}: its layer {target.name} was not pruned; save the "
                        "pruned model there."
                    )
                if name not in masks:
                    masks = {name: self.masks[name].numpy()}  # one at a time
                kept = rows_in(masks[name], target.layer)
                if kept.shape != (matrix.rows, matrix.columns):
                    raise UserError(
                        f"{checkpoint.folder}: {target.name} has another shape; save "
                        "the pruned model there."
                    )
                words = matrix.read(files.reader(matrix.stored.shard), 0, matrix.rows)
                if bool(words[~kept].any()):
                    raise UserError(
                        f"{checkpoint.folder}: {target.name} has weights that the masks remove; "
                        "save the pruned model there first, with model.save_pretrained."
                    )
