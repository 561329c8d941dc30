"""The model of a run that is in memory: loaded when it is needed, and one at a time."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.common.machine import Stopwatch, free_memory
from emp_llm.models.placement import Quantization, parse_device_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OneModel:
    """Loads models, and holds one. Calibration and evaluation share the dense model through it.

    Args:
        device_map, dtype, trust_remote_code: the arguments of `load_model`.
        stopwatch: times the loading of the first model.

    Raises:
        UserError: the device map names a device that this machine does not have.
    """

    def __init__(
        self,
        device_map: str = "auto",
        dtype: str = "auto",
        trust_remote_code: bool = False,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        if device_map != "auto":
            parse_device_map(device_map)
        self.device_map = device_map
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self._stopwatch = stopwatch
        self._held: tuple[Path, Quantization | None, str, PreTrainedModel] | None = None

    def get(
        self,
        folder: Path,
        quantization: Quantization | None = None,
        by_blocks: bool = False,
    ) -> "PreTrainedModel":
        """The model of a folder: the one in memory, or loaded after that one is freed. Callers
        keep no reference to it.

        Args:
            by_blocks: it runs block by block alone. Without a GPU, and unless the user places it,
                it stays on disk then: each block is read when its turn comes, in the same time.
        """
        import torch

        from emp_llm.models.loading import load_model

        place = self.device_map
        on_cpu = place == "auto" and quantization is None and not torch.accelerator.is_available()
        if by_blocks and on_cpu:
            place = "disk"
        if self._held is None or self._held[:3] != (folder, quantization, place):
            self.free()
            with self._stopwatch("load") if self._stopwatch is not None else nullcontext():
                model = load_model(folder, place, self.dtype, self.trust_remote_code, quantization)
            self._held = folder, quantization, place, model
            self._stopwatch = None
        return self._held[3]

    def free(self) -> None:
        """Free the model in memory, if there is one. An offloaded model is in a reference cycle."""
        if self._held is not None:
            self._held = None
            free_memory()
