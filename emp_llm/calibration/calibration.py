"""One calibration: from data and a model to activations and the record of their origin."""

import logging
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.block_pass import Masker, calibrate_blocks
from emp_llm.calibration.resume import CalibrationProgress
from emp_llm.calibration.text_mix import calibration_corpora
from emp_llm.calibration.tokens import token_ids, tokens_signature
from emp_llm.calibration.whole_pass import calibrate_model
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.provenance import versions
from emp_llm.common.ranks import ranks
from emp_llm.common.wording import count_of
from emp_llm.models.blockwise import BlockwiseModel, reads_twice
from emp_llm.models.layers import Layer
from emp_llm.models.offload import is_offloaded
from emp_llm.models.placement import Quantization, quantization_record
from emp_llm.options.calibration import CalibrationOptions, Propagate
from emp_llm.records.corpus import Corpus
from emp_llm.records.source import CalibrationRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationText:
    """The tokens of a calibration.

    Attributes:
        corpora: the sources of the text, in order; each has its number of samples.
        tokens: int64, shape (samples, seqlen).
        seed: of shuffled corpora; None for others.
    """

    corpora: list[Corpus]
    tokens: Tensor
    seed: int | None

    @classmethod
    def prepare(cls, options: CalibrationOptions, tokenizer: Any, context: int | None) -> "CalibrationText":
        """Read and tokenise the text that the options name."""
        corpora = calibration_corpora(options, context)
        tokens = torch.cat([token_ids(corpus, tokenizer, options.seed) for corpus in corpora])
        return cls(corpora, tokens, options.seed if any(corpus.shuffle for corpus in corpora) else None)

    @property
    def number(self) -> int:
        """The number of tokens."""
        return self.tokens.numel()

    @property
    def signature(self) -> str:
        """SHA-256 of the tokens."""
        return tokens_signature(self.tokens)


class CalibrationData(Protocol):
    """What a calibration runs on.

    Attributes:
        corpora: the sources of the data, in order; each has its number of samples.
        seed: of shuffled corpora; None for others.
        number: of tokens.
        signature: a hash of everything that a model is called with.
    """

    @property
    def corpora(self) -> list[Corpus]: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def number(self) -> int: ...
    @property
    def signature(self) -> str: ...


class ForwardPasses(ABC):
    """The forward passes of a calibration, and the record of their origin.

    Args:
        data: the calibration data.
        options: of the forward passes.
        propagate: whether each block sees the inputs of the dense or of the pruned model.
        quantization: of the loaded model.
    """

    def __init__(
        self, data: CalibrationData, options: CalibrationOptions, propagate: Propagate, quantization: Quantization | None
    ) -> None:
        self.quantization = quantization
        self._data = data
        self._options = options
        self._propagate = propagate

    @property
    def signature(self) -> dict[str, Any]:
        """Everything that the norms depend on, except the model, as JSON; known before the model is loaded."""
        record = self._record(CalibrationRecord(execution=self._options.execution, propagate=self._propagate))
        return record.as_dict() | {"ids": self._data.signature}

    @abstractmethod
    def run(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        layers: list[Layer],
        about: CalibrationRecord,
        masker: Masker | None = None,
        resume: Path | None = None,
    ) -> Activations:
        """Collect the input norms of these layers. Each of several ranks runs its share.

        Args:
            model: loaded from the checkpoint.
            checkpoint: of the model.
            layers: linear layers, and matrices of experts.
            about: the origin of the norms as far as the caller knows it (model, revision, identity).
            masker: computes the masks of a pruned propagation.
            resume: folder for the state between blocks, from which an interrupted run of the same calibration resumes. It
                stays until `delete_progress`. Several ranks must see one folder.

        Raises:
            UserError: a norm is not finite, memory runs out, or the model cannot run in this way.
        """

    def origin(self, about: CalibrationRecord) -> CalibrationRecord:
        """The origin of a fit to this data, as far as it does not depend on the model.

        Args:
            about: as far as the caller knows it.
        """
        return msgspec.structs.replace(
            self._record(about), tokens=self._data.number, execution="blocks", ranks=ranks().count, versions=versions()
        )

    def _record(self, about: CalibrationRecord) -> CalibrationRecord:
        texts = [corpus.record() for corpus in self._data.corpora]
        return msgspec.structs.replace(
            about,
            text=texts[0] if len(texts) == 1 else None,
            texts=texts if len(texts) > 1 else [],
            seed=self._data.seed,
            quantization=quantization_record(self.quantization),
            batch_size=self._options.batch_size,
        )

    def _record_with(self, about: CalibrationRecord, model: PreTrainedModel) -> CalibrationRecord:
        """The origin of the norms, as far as it is known before the forward passes."""
        return msgspec.structs.replace(
            self._record(about),
            tokens=self._data.number,
            dtype=str(model.dtype).removeprefix("torch."),
            ranks=ranks().count,
            versions=versions(),
        )


class Calibration(ForwardPasses):
    """The forward passes of a calibration on text.

    Args:
        text: the calibration text.
        options, propagate, quantization: as for `ForwardPasses`.
        blocks: name of the list of decoder blocks; None: detected.
    """

    def __init__(
        self,
        text: CalibrationText,
        options: CalibrationOptions,
        propagate: Propagate = "dense",
        quantization: Quantization | None = None,
        blocks: str | None = None,
    ) -> None:
        super().__init__(text, options, propagate, quantization)
        self.text = text
        self._blocks = blocks

    def run(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        layers: list[Layer],
        about: CalibrationRecord,
        masker: Masker | None = None,
        resume: Path | None = None,
    ) -> Activations:
        record = self._record_with(about, model)
        tokens, size = self.text.tokens, self._options.batch_size
        logger.debug(
            "calibrating %s on %d sequences of %d tokens, %d at a time, %s.",
            count_of(len(layers), "layer"),
            *tokens.shape,
            size,
            "block by block" if self._by_blocks(model) else "the whole model at once",
        )
        if not self._by_blocks(model):
            norms = calibrate_model(model, layers, tokens, size, self._blocks)
            ran = CalibrationRecord(execution="model", propagate="dense")
        else:
            progress = None
            if resume is not None and self._options.resumable_calibration:
                signature = record.as_dict() | {"layers": [layer.name for layer in layers], "files": checkpoint.states}
                progress = CalibrationProgress(resume, signature | {"ids": tokens_signature(tokens)})
            runner = BlockwiseModel(model, self._blocks, self._options.hidden_states)
            pruned = masker if self._propagate == "pruned" else None
            norms = calibrate_blocks(runner, layers, tokens, size, pruned, progress)
            ran = norms.about
        changes: dict[str, Any] = {"execution": ran.execution, "propagate": ran.propagate, "hidden_states": ran.hidden_states}
        if record.pruned_by is not None and record.pruned_by.match is not None:  # the file names no folders
            changes["pruned_by"] = msgspec.structs.replace(record.pruned_by, match=Path(record.pruned_by.match).name)
        return replace(norms, about=msgspec.structs.replace(record, **changes))

    def _by_blocks(self, model: PreTrainedModel) -> bool:
        """Whether the model runs block by block."""
        mode = self._options.execution
        by_itself = is_offloaded(model) and not reads_twice(model)
        return mode == "blocks" or self._propagate == "pruned" or (mode == "auto" and by_itself)


def delete_progress(folder: Path) -> None:
    """Delete the state between blocks, once the activations are written."""
    if ranks().main:
        shutil.rmtree(folder, ignore_errors=True)
