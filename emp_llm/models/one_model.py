"""The model of a run that is in memory: loaded when it is needed, and one at a time."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.common.machine import Stopwatch, free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emp_llm.models.placement import Quantization


class OneModel:
    """Loads models, and holds one. Calibration and evaluation share the dense model through it.

    Args:
        device_map, dtype, trust_remote_code: the arguments of `load_model`.
        stopwatch: times the loading of the first model.
    """

    def __init__(
        self,
        device_map: str = "auto",
        dtype: str = "auto",
        trust_remote_code: bool = False,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._loading = device_map, dtype, trust_remote_code
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self._stopwatch = stopwatch
        self._held: tuple[Path, Quantization | None, PreTrainedModel] | None = None

    def get(self, folder: Path, quantization: "Quantization | None" = None) -> "PreTrainedModel":
        """The model of a folder: the one in memory, or loaded after that one is freed. Callers
        keep no reference to it.
        """
        from emp_llm.models.loading import load_model

        if self._held is None or self._held[:2] != (folder, quantization):
            self.free()
            with self._stopwatch("load") if self._stopwatch is not None else nullcontext():
                self._held = folder, quantization, load_model(folder, *self._loading, quantization)
            self._stopwatch = None
        return self._held[2]

    def free(self) -> None:
        """Free the model in memory, if there is one. An offloaded model is in a reference cycle."""
        if self._held is not None:
            self._held = None
            free_memory()
