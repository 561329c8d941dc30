"""The models of a run, loaded when first needed and one at a time."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.memory import free_memory
from emp_llm.common.timing import Stopwatch
from emp_llm.options.model import LoadingOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emp_llm.hub.local_model import LocalModel
    from emp_llm.models.placement import Quantization


class RunModels:
    """Loads the dense model and the pruned ones. Calibration and evaluation share the dense model.

    Args:
        source: the dense model.
        loading: device map and dtype.
        trust_remote_code: run code from the model's folder.
        stopwatch: times the loading, and the stages that use the models.
    """

    def __init__(self, source: "LocalModel", loading: LoadingOptions, trust_remote_code: bool, stopwatch: Stopwatch) -> None:
        self.source = source
        self._loading = loading
        self._trust_remote_code = trust_remote_code
        self.stopwatch = stopwatch
        self._dense: PreTrainedModel | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The dense model's tokenizer."""
        from emp_llm.models.loading import load_tokenizer

        return load_tokenizer(self.source.folder, self._trust_remote_code)

    @cached_property
    def processor(self) -> Any:
        """The dense model's processor of texts and images."""
        from emp_llm.models.loading import load_processor

        return load_processor(self.source.folder, self._trust_remote_code)

    def dense(self, quantization: "Quantization | None" = None) -> "PreTrainedModel":
        """The dense model, loaded at the first call."""
        if self._dense is None:
            with self.stopwatch("load"):
                self._dense = self.load(self.source.folder, quantization)
        return self._dense

    def load(self, folder: Path, quantization: "Quantization | None" = None) -> "PreTrainedModel":
        """The model in a folder. The caller owns it."""
        from emp_llm.models.loading import load_model

        return load_model(folder, self._loading.device_map, self._loading.dtype, self._trust_remote_code, quantization)

    def free(self) -> None:
        """Free the dense model, if it is loaded."""
        if self._dense is not None:
            self._dense = None
            free_memory()
