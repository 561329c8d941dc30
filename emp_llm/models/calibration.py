"""One calibration: text and model in, activations with what made them out."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.models.activations import Activations
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.corpora import Corpus, corpus_record, find_corpus, token_ids
from emp_llm.models.errors import UserError
from emp_llm.models.layers import Layer
from emp_llm.models.loading import Quantization, quantization_record
from emp_llm.models.progress import Progress, tokens_signature
from emp_llm.models.propagation import Execution
from emp_llm.models.provenance import versions
from emp_llm.models.pruning import Pruner
from emp_llm.models.ranks import ranks

logger = logging.getLogger(__name__)


def calibration_corpus(name: str, samples: int | None, seqlen: int | None, context: int | None) -> Corpus:
    """The corpus of a recipe with the user's samples and seqlen, fitted to a model's context.

    Raises:
        UserError: no such recipe, samples or seqlen below 1, or a seqlen asked for that the model cannot take.
    """
    for flag, value in (("samples", samples), ("seqlen", seqlen)):
        if value is not None and value < 1:
            raise UserError(f"--{flag} must be at least 1, got {value}.")
    corpus = find_corpus(name)
    length = seqlen or corpus.seqlen or 512
    if context is not None and length > context:
        if seqlen is not None:
            raise UserError(f"--seqlen {seqlen} is longer than the model's context of {context} tokens.")
        logger.info("seqlen %d of recipe %s is shortened to the model's context of %d tokens.", length, name, context)
        length = context
    return replace(corpus, samples=samples or corpus.samples or 128, seqlen=length)


class Calibration:
    """Text made ready for a model; `run` then does the forward passes.

    Args:
        checkpoint: the model, for its context length and fingerprint.
        tokenizer: its tokenizer.
        corpus: as from `calibration_corpus`.
        seed: for corpora that are shuffled.
    """

    def __init__(self, checkpoint: Checkpoint, tokenizer: Any, corpus: Corpus, seed: int) -> None:
        self.tokens: Tensor = token_ids(corpus, tokenizer, seed)
        self._checkpoint = checkpoint
        self._record = {"text": corpus_record(corpus), "seed": seed if corpus.shuffle else None}

    def run(
        self,
        model: PreTrainedModel,
        layers: list[Layer],
        batch_size: int,
        about: dict[str, Any],
        execution: Execution,
        pruner: Pruner | None = None,
        resume: Path | None = None,
        quantization: Quantization | None = None,
    ) -> Activations:
        """Collect the norms of these layers' inputs; under several ranks, each runs its share of the batches.

        Args:
            about: more for the record (model, revision).
            execution: how the passes are run.
            pruner: decides the masks of a pruned propagation.
            resume: folder in which finished blocks are noted while it goes block by block; an earlier, killed run of the
                same calibration is continued from there. It is there until `forget`. Several ranks do not resume.
            quantization: how the model was loaded.
        """
        record = {
            **about,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": quantization_record(quantization),
            "ranks": ranks().count,
            **self._record,
            "tokens": self.tokens.numel(),
            "batch_size": batch_size,
            "fingerprint": self._checkpoint.fingerprint,
            "versions": versions(),
        }
        progress: Progress | None = None
        if resume is not None and ranks().count == 1 and execution.by_blocks(model):
            names = [layer.name for layer in layers]
            signature = record | {"layers": names, "propagate": execution.propagate, "ids": tokens_signature(self.tokens)}
            progress = Progress(resume, signature)
        activations = execution.calibrate(model, layers, self.tokens, batch_size, pruner, progress)
        record |= activations.about
        return replace(activations, about=record)

    def signature(self, batch_size: int, execution: Execution, quantization: Quantization | None) -> dict[str, Any]:
        """What the norms depend on beside the model, known before it is loaded, as JSON."""
        how = {"execution": execution.mode, "propagate": execution.propagate, "quantization": quantization_record(quantization)}
        return {"batch_size": batch_size, **how, **self._record, "ids": tokens_signature(self.tokens)}

    def forget(self, resume: Path) -> None:
        """Delete the folder of finished blocks: what they were for is written."""
        if ranks().main:
            shutil.rmtree(resume, ignore_errors=True)


def warn_if_foreign(activations: Activations, checkpoint: Checkpoint) -> None:
    """Say so when activations were made by other weights than these; their shapes may fit all the same."""
    made_by = activations.about.get("fingerprint")
    if made_by is not None and made_by != checkpoint.fingerprint:
        logger.warning(
            "warning: the activations were made by other weights than %s (by %s).",
            checkpoint.folder,
            activations.about.get("model", "an unnamed model"),
        )
