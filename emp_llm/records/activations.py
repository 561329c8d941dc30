"""The metadata of an activations file: the layers of each norm, and the origin of the norms."""

from typing import ClassVar

import msgspec

from emp_llm.records.base import FileRecord
from emp_llm.records.source import CalibrationRecord


class ActivationsInfo(FileRecord, kw_only=True):
    """The metadata beside the norms.

    Attributes:
        inputs: layer name -> name of its norm.
        about: the origin of the norms.
        tokens: name of a norm -> number of tokens in its sum.
        relative: layer name -> name of its norm relative to the layer's outputs.
    """

    KIND: ClassVar[str] = "activations"

    inputs: dict[str, str]
    about: CalibrationRecord = msgspec.field(default_factory=CalibrationRecord)
    tokens: dict[str, int] = {}
    relative: dict[str, str] = {}
