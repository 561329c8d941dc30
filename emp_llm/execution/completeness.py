"""Whether a model that transformers has just loaded holds all its weights, each from its checkpoint.

transformers fills missing weights with random numbers and reports them on the side. It reads weights on the disk when they
are needed, and does not compare their shapes at all.
"""

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.common.wording import count_of, shortened_list
from emp_llm.execution.offload import offloaded_files

logger = logging.getLogger(__name__)
_REMEDY = "Get the complete checkpoint and the config.json that belongs to it."


class LoadReport(logging.Filter):
    """The table of problems that transformers logs while it loads a model. It is held back: `check_complete` says the same."""

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
        """The parameters that could not be made of the stored tensors; those of several layers as "layers.{0, 1}.NAME"."""
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
    theirs = logging.getLogger("transformers.modeling_utils")
    report, level = LoadReport(theirs.getEffectiveLevel()), theirs.level
    theirs.addFilter(report)
    if not theirs.isEnabledFor(logging.WARNING):
        theirs.setLevel(logging.WARNING - 1)  # at WARNING itself, transformers also checks plans for many devices
    try:
        yield report
    finally:
        theirs.removeFilter(report)
        theirs.setLevel(level)


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

    def own(found: Collection[str]) -> list[str]:
        return [name for name in names if name in found and tied.get(name) not in found]

    missing = own(info["missing_keys"])
    if missing:
        raise UserError(
            f"{folder}: the checkpoint lacks {count_of(len(missing), 'weight')} of the model: {shortened_list(missing)}. "
            f"{_REMEDY}"
        )
    shapes = {name: (list(stored), list(wanted)) for name, stored, wanted in info["mismatched_keys"]}
    shapes |= _other_shapes_on_disk(model)
    different = own(shapes) or sorted(shapes)
    if different:
        stored, wanted = shapes[different[0]]
        raise UserError(
            f"{folder}: the checkpoint does not fit config.json. The shapes of {count_of(len(different), 'weight')} differ: "
            f"{different[0]} is {stored} in the checkpoint, and {wanted} by config.json. {_REMEDY}"
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
    """Stored and wanted shape of each parameter and buffer whose tensor on the disk has another shape."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = {}
    for path, places in offloaded_files(model).items():
        with safe_open(path, framework="pt") as file:
            for name in places.keys() & tensors.keys():
                stored, wanted = file.get_slice(places[name]).get_shape(), list(tensors[name].shape)
                if stored != wanted:
                    found[name] = stored, wanted
    return found
