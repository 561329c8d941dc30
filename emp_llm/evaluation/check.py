"""The check of a run: what pruning cost, on a few sequences of the text that the calibration did
not see.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.evaluation.perplexity import perplexity
from emp_llm.models.loading import headless_class
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import Quantization
from emp_llm.records.evaluation import CheckRecord, PerplexityRecord

logger = logging.getLogger(__name__)


class Check:
    """Measures the perplexity of the dense and of the pruned model. A failure is logged, and ends
    no run.

    Args:
        tokens: the sequences to measure, int64, shape (sequences, length); None: no text.
        config: of the dense model.
        models: that load both.
        quantization: of both.
    """

    def __init__(
        self,
        tokens: Tensor | None,
        config: Any,
        models: OneModel,
        quantization: Quantization | None = None,
    ) -> None:
        reads = not config.get("is_encoder_decoder") and headless_class(config) is None
        self._tokens = tokens if reads else None
        self._models = models
        self._quantization = quantization
        self._dense: PerplexityRecord | None = None

    def measure_dense(self, folder: Path) -> None:
        """Measure the dense model. A collective call."""
        self._dense = self._measured(folder)

    def record(self, folder: Path) -> CheckRecord | None:
        """Measure the pruned model; None if one of both was not measured. A collective call."""
        pruned = None if self._dense is None else self._measured(folder)
        return (
            None
            if self._dense is None or pruned is None
            else CheckRecord(dense=self._dense, pruned=pruned)
        )

    def _measured(self, folder: Path) -> PerplexityRecord | None:
        if self._tokens is None:
            return None
        try:
            model = self._models.get(folder, self._quantization)
            found = perplexity(model, self._tokens.flatten(), self._tokens.shape[1], batch_size=1)
        except UserError as error:
            logger.warning("warning: the perplexity of held-out text was not measured: %s", error)
            return None
        # The stage has the time; equal runs have equal reports.
        return msgspec.structs.replace(found, seconds=0.0)
