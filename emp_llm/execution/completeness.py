"""The check that a loaded model has all its weights, each from its checkpoint.

transformers fills missing weights with random numbers and only logs their names. It reads weights that are offloaded to disk
when they are needed, and never compares their shapes.
"""

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError, count_of, shortened_list
from emp_llm.common.ranks import ranks
from emp_llm.execution.offload import offloaded_files

logger = logging.getLogger(__name__)
_REMEDY = "Get the complete checkpoint and the config.json that belongs to it."


class LoadReport(logging.Filter):
    """Holds back the table of problems that transformers logs while it loads a model: `check_complete` reports the same."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level
        self._text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the table; let other records pass as before."""
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return record.levelno >= self._level
        self._text = re.sub(r"\x1b\[\d*m", "", message)  # the colours of a terminal
        return False

    @property
    def conversions(self) -> list[str]:
        """The parameters that could not be built from the stored tensors; those of several layers as "layers.{0, 1}.NAME"."""
        return re.findall(r"^(\S.*?) *\| *CONVERSION\b", self._text, re.MULTILINE)

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out in a conversion; transformers reports this like any other error."""
        return bool(self.conversions) and re.search("OutOfMemoryError|MemoryError|allocate memory", self._text) is not None

    def refuse_conversions(self, folder: Path, error: Exception) -> None:
        """Raise UserError for `error` if stored tensors are the cause."""
        if self.conversions:
            raise UserError(
                f"{folder}: the checkpoint lacks parts of {shortened_list(self.conversions)}, or has them in other shapes than "
                f"config.json. {_REMEDY}"
            ) from error


@contextmanager
def load_report() -> Iterator[LoadReport]:
    """Hold back transformers' table inside this context; yields it."""
    their_logger = logging.getLogger("transformers.modeling_utils")
    report, level = LoadReport(their_logger.getEffectiveLevel()), their_logger.level
    their_logger.addFilter(report)
    if not their_logger.isEnabledFor(logging.WARNING):
        their_logger.setLevel(logging.WARNING - 1)  # at WARNING itself, transformers also checks plans for many devices
    try:
        yield report
    finally:
        their_logger.removeFilter(report)
        their_logger.setLevel(level)


def check_complete(folder: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse a model with weights that do not come from its checkpoint; warn of tensors that it does not use.

    Args:
        folder: the model folder, for messages.
        model: as transformers loaded it, offloaded or not.
        info: of `from_pretrained(..., output_loading_info=True)`. It lists no tied weights, and nothing that the
            architecture allows to be missing.

    Raises:
        UserError: weights are missing, or have other shapes than the model's.
    """
    tied = getattr(model, "all_tied_weights_keys", {})  # name -> the weight that it is tied to
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def own(listed: Collection[str]) -> list[str]:
        return [name for name in names if name in listed and tied.get(name) not in listed]

    missing = own(info["missing_keys"])
    if missing:
        raise UserError(
            f"{folder}: the checkpoint lacks {count_of(len(missing), 'weight')} of the model: {shortened_list(missing)}. "
            f"{_REMEDY}"
        )
    shapes = {name: (list(stored), list(expected)) for name, stored, expected in info["mismatched_keys"]}
    shapes |= _other_shapes_on_disk(model)
    different = own(shapes) or sorted(shapes)
    if different:
        stored, expected = shapes[different[0]]
        raise UserError(
            f"{folder}: the checkpoint does not fit config.json. The shapes of {count_of(len(different), 'weight')} differ: "
            f"{different[0]} is {stored} in the checkpoint, and {expected} by config.json. {_REMEDY}"
        )
    buffers = sorted(info["missing_keys"] - set(names))
    if ranks().main:
        _warn(folder, "lacks {} of the model, which transformers fills in: {}.", "buffer", buffers)
        _warn(folder, "holds {} that the model does not use: {}.", "tensor", sorted(info["unexpected_keys"]))


def _warn(folder: Path, words: str, noun: str, names: list[str]) -> None:
    if names:
        logger.warning(
            "warning: %s: the checkpoint %s", folder, words.format(count_of(len(names), noun), shortened_list(names))
        )


def _other_shapes_on_disk(model: PreTrainedModel) -> dict[str, tuple[list[int], list[int]]]:
    """Stored and expected shape of each parameter and buffer whose tensor on disk has another shape."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    different = {}
    for path, places in offloaded_files(model).items():
        with safe_open(path, framework="pt") as file:
            for name in places.keys() & tensors.keys():
                stored, expected = file.get_slice(places[name]).get_shape(), list(tensors[name].shape)
                if stored != expected:
                    different[name] = stored, expected
    return different
