"""A calibration on rows with images: the whole model runs on one row at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.batch_pass import norms_of_batches
from emp_llm.calibration.block_pass import Masker
from emp_llm.calibration.calibration import ForwardPasses
from emp_llm.calibration.images.image_rows import ImageRow, image_rows
from emp_llm.calibration.images.row_inputs import RowProcessor, inputs_digest
from emp_llm.calibration.text_mix import calibration_corpora
from emp_llm.calibration.tokens import token_ids
from emp_llm.calibration.whole_pass import current_block
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError, reason
from emp_llm.common.memory import enough_memory, ran_out
from emp_llm.common.progress_bars import progress_bar
from emp_llm.common.ranks import ranks
from emp_llm.common.wording import count_of
from emp_llm.models.layers import Layer
from emp_llm.models.placement import Quantization
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.records.corpus import Corpus
from emp_llm.records.source import CalibrationRecord

Row = ImageRow | Tensor  # a row with images, or the token ids of a text, shape (tokens,)


@dataclass(frozen=True)
class CalibrationRows:
    """The rows of a calibration. Their inputs are made again for the forward pass, so that memory holds those of one row.

    Attributes:
        corpora, seed, number, signature: as for `CalibrationData`.
        rows: of all corpora, in order.
        processor: makes their inputs.
    """

    corpora: list[Corpus]
    seed: int | None
    number: int
    signature: str
    rows: list[Row]
    processor: RowProcessor

    @classmethod
    def prepare(cls, options: CalibrationOptions, processor: Any, context: int | None) -> "CalibrationRows":
        """Read the rows that the options name.

        Args:
            options: its `calibration`, of which at least one part has images, `samples`, `seqlen` and `seed`.
            processor: of the model.
            context: the model's context length in tokens; None: unknown.

        Raises:
            UserError: the data cannot be read, has too few rows, or the processor refuses a row.
        """
        rows: list[Row] = []
        corpora = calibration_corpora(options, context)
        for corpus in corpora:
            if corpus.image is None:
                rows += list(token_ids(corpus, processor.tokenizer, options.seed))
                continue
            found = list(islice(image_rows(corpus, options.seed), corpus.samples))
            if len(found) < (corpus.samples or 1):
                raise UserError(
                    f"{corpus.source}: {count_of(len(found), 'row')}, too few for {corpus.samples} samples; a row with images "
                    "is one sequence. Lower --samples, or use more data."
                )
            rows += found
        seed = options.seed if any(corpus.shuffle for corpus in corpora) else None
        return cls.of_rows(rows, corpora, processor, seed)

    @classmethod
    def of_rows(cls, rows: list[Row], corpora: list[Corpus], processor: Any, seed: int | None) -> "CalibrationRows":
        """Rows in memory, and their sources, which have one `seqlen`. Errors are those of `prepare`."""
        made = RowProcessor(processor, corpora[0].seqlen or 0)
        with progress_bar(len(rows), "images", "row") as bar:

            def inputs() -> Iterator[dict[str, Any]]:
                for row in rows:
                    yield _inputs_of(row, made)
                    bar.update(1)

            signature, number = inputs_digest(inputs())
        return cls(corpora, seed, number, signature, rows, made)


class ImageCalibration(ForwardPasses):
    """The forward passes of a calibration on rows with images: of the whole model, one row at a time.

    Rows differ in length, and padding would count in the experts of a mixture.

    Args:
        rows: the calibration rows.
        options, quantization: as for `ForwardPasses`.
        blocks: name of the list of decoder blocks, for errors; None: detected.
    """

    def __init__(
        self,
        rows: CalibrationRows,
        options: CalibrationOptions,
        quantization: Quantization | None = None,
        blocks: str | None = None,
    ) -> None:
        super().__init__(rows, replace(options, batch_size=1, execution="model"), "dense", quantization)
        self._rows = rows
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
        rows = self._rows.rows
        if len(rows) < ranks().count:
            raise UserError(
                f"{count_of(len(rows), 'row')} with images for {ranks().count} ranks. Raise --samples, or use fewer."
            )
        batches = _Batches(ranks().part(rows), self._rows.processor, model.dtype)
        with current_block(model, self._blocks) as where:

            @contextmanager
            def guard(ids: Tensor) -> Iterator[None]:
                with _explained(model), enough_memory(where, ids, ", or use smaller images"):
                    yield

            norms, _ = norms_of_batches(model, layers, batches, shared=True, guard=guard)
        record = self._record_with(about, model)
        return replace(norms, about=msgspec.structs.replace(record, execution="model", propagate="dense"))


class _Batches:
    """The inputs of rows, made when they are needed. Images have the dtype of the model."""

    def __init__(self, rows: Sequence[Row], processor: RowProcessor, dtype: torch.dtype) -> None:
        self._rows = rows
        self._processor = processor
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            inputs = _inputs_of(row, self._processor)
            yield {name: value.to(self._dtype) if _is_float(value) else value for name, value in inputs.items()}


@contextmanager
def _explained(model: PreTrainedModel) -> Iterator[None]:
    """Raise UserError if the model does not take the inputs of its processor."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if ran_out(error) or isinstance(error, UserError):
            raise
        raise UserError(
            f"{type(model).__name__}: it does not run on the inputs of its processor ({reason(error)}). The processor's files "
            "may be those of another model; copy them from the original."
        ) from error


def _inputs_of(row: Row, processor: RowProcessor) -> dict[str, Any]:
    return processor.inputs(row) if isinstance(row, ImageRow) else {"input_ids": row.reshape(1, -1)}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
