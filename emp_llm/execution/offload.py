"""Offloaded parameters: loaded on their device once for many calls, then removed.

accelerate keeps an offloaded module's parameters on the meta device, and reads them from the safetensors (or from CPU memory)
before every call. Here they are read once and stay for as many calls as needed; a thread reads the next block while this one
computes.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import named_module_tensors
from torch import Tensor, nn


@dataclass
class _Weights:
    """The weights of one offloaded module, as read, and the meta tensors that they replace."""

    module: nn.Module
    hook: AlignDevicesHook
    values: dict[str, Tensor]
    meta: dict[str, Tensor]


def is_offloaded(model: nn.Module) -> bool:
    """Whether any weights of a model are stored elsewhere than on the device that uses them."""
    return any(_offload_hook(module) is not None for module in model.modules())


def resident_parameter(model: nn.Module, name: str) -> Tensor | None:
    """A parameter's values where they lie in memory: on its device, or offloaded to the CPU; for one on disk, on "meta".

    Returns:
        The values, which can be changed in place; None if the model has no such parameter.
    """
    owner, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    parameter = module._parameters.get(leaf)
    if parameter is None:
        return None
    hook = _offload_hook(module)
    if parameter.device.type != "meta" or hook is None or not isinstance(hook.weights_map, Mapping):
        return parameter.data
    held = hook.weights_map
    values = getattr(held, "dataset", held)
    state = getattr(values, "state_dict", values)
    stored = state.get(getattr(held, "prefix", "") + leaf) if isinstance(state, Mapping) else None
    return stored if isinstance(stored, Tensor) else parameter.data


def offloaded_files(model: nn.Module) -> dict[str, dict[str, str]]:
    """The safetensors files of offloaded parameters: path -> parameter -> tensor in the file."""
    files: dict[str, dict[str, str]] = {}
    for module in model.modules():
        hook = _offload_hook(module)
        index = getattr(getattr(getattr(hook, "weights_map", None), "dataset", None), "index", {})
        if index:  # one index serves all modules
            for name, place in index.items():
                if "safetensors_file" in place:
                    files.setdefault(place["safetensors_file"], {})[name] = place.get("weight_name", name)
            break
    return files


def execution_device(module: nn.Module) -> torch.device:
    """The device that runs a module: that of its hooks, else that of its first parameter."""
    for part in module.modules():
        for hook in _hooks(part):
            if hook.execution_device is not None:
                device = hook.execution_device
                return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


class OutsideModules:
    """The offloaded modules outside the blocks: each is loaded when it is first called, and stays until `release`."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        inside = set(blocks.modules())
        self._modules = [m for m in model.modules() if m not in inside and _offload_hook(m) is not None]
        self._embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        self._loaded: dict[nn.Module, list[_Weights]] = {}
        self.bytes_read = 0

    @contextmanager
    def loaded_on_call(self) -> Iterator[None]:
        """Inside this context, a module is loaded before it is called."""
        handles = [module.register_forward_pre_hook(lambda module, args: self._load(module)) for module in self._modules]
        try:
            if self._embeddings in self._modules:  # models ask for their device before they call them
                self._load(self._embeddings)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def release(self) -> None:
        """Remove all loaded weights."""
        for weights in self._loaded.values():
            _remove(weights)
        self._loaded.clear()

    def _load(self, module: nn.Module) -> None:
        if module not in self._loaded:
            weights = self._loaded[module] = _read([module])
            self.bytes_read += _size(weights)
            _install(weights)


class BlockLoader:
    """Loads blocks in order, each once, and reads the next block in the background. Use it as a context."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-weights")
        self._next: Future[list[_Weights]] | None = None
        self.bytes_read = 0

    def __enter__(self) -> "BlockLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """A block with its weights on its device, inside this context; call this with 0, 1, 2, ... in this order."""
        weights = (self._next or self._read(index)).result()
        self._next = self._read(index + 1) if index + 1 < len(self._blocks) else None
        self.bytes_read += _size(weights)
        _install(weights)
        try:
            yield self._blocks[index]
        finally:
            _remove(weights)
            _trim()

    def _read(self, index: int) -> Future[list[_Weights]]:
        return self._thread.submit(_read, list(self._blocks[index].modules()))


def _trim() -> None:
    """Return free pages of the heap to the system, if the C library can: glibc keeps those between pieces in use."""
    trim = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def _offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    return next((hook for hook in _hooks(module) if hook.offload), None)


def _read(modules: list[nn.Module]) -> list[_Weights]:
    """Read the weights of those modules that are offloaded, each to the device that runs it."""
    weights = []
    for module in modules:
        hook = _offload_hook(module)
        if hook is None:
            continue
        tensors = named_module_tensors(
            module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
        )
        device = execution_device(module)
        meta = dict(tensors)
        values = {name: _on_device(hook.weights_map[name], device, old.dtype) for name, old in meta.items()}
        weights.append(_Weights(module, hook, values, meta))
    return weights


def _on_device(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    moved = value.to(device, dtype)
    # On the CPU the value is a view of the mapped file. The copy reads it now; otherwise the first product would.
    return moved.clone() if moved is value and device.type == "cpu" else moved


def _install(weights: list[_Weights]) -> None:
    for entry in weights:
        for name, value in entry.values.items():
            _set(entry.module, name, value)
        entry.hook.offload = False  # accelerate leaves the module alone from here on


def _remove(weights: list[_Weights]) -> None:
    for entry in weights:
        for name, placeholder in entry.meta.items():
            _set(entry.module, name, placeholder)
        entry.hook.offload = True
        entry.values.clear()


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _size(weights: list[_Weights]) -> int:
    return sum(value.nbytes for entry in weights for value in entry.values.values())
