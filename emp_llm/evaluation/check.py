"""The check of a run: the perplexity of a few sequences that the calibration did not see."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.evaluation.perplexity import perplexity
from emp_llm.models.loading import headless_class
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import Quantization
from emp_llm.records.evaluation import PerplexityRecord

logger = logging.getLogger(__name__)


def held_out_perplexity(
    folder: Path,
    config: Mapping[str, Any],
    tokens: Tensor,
    models: OneModel,
    quantization: Quantization | None = None,
) -> PerplexityRecord | None:
    """The perplexity of a model, which stays in memory; None if it has none. A failure is logged,
    and ends no run. A collective call.

    Args:
        folder: of the model.
        config: of the dense model.
        tokens: the sequences to measure, int64, shape (sequences, length).
        models, quantization: load the model.
    """
    if config.get("is_encoder_decoder") or headless_class(config) is not None:
        return None
    try:
        model = models.get(folder, quantization)
        record = perplexity(model, tokens.flatten(), tokens.shape[1], batch_size=1)
    except UserError as error:
        logger.warning("warning: the perplexity of held-out text was not measured: %s", error)
        return None
    # The stage has the time; equal runs have equal reports.
    return msgspec.structs.replace(record, seconds=0.0)
