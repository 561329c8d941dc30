"""Offloaded parameters: loaded on their device once for many calls, then removed.

accelerate keeps an offloaded module's parameters on the meta device, and reads them from the safetensors (or from CPU memory)
before every call. Here they are read once and stay for as many calls as needed; a thread reads the next block while this one
computes.
"""

import ctypes
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


def execution_device(module: nn.Module) -> torch.device:
    """The device that runs a module: that of its hooks, else that of its first parameter."""
    for part in module.modules():
        for hook in _hooks(part):
            device = hook.execution_device
            if device is not None:
                return torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def input_device(model: Any) -> torch.device:
    """The device for token ids: the one that runs the input embedding."""
    return execution_device(model.get_input_embeddings())


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
    hooks = (_offload_hook(module) for module in model.modules())
    indices = (getattr(getattr(getattr(hook, "weights_map", None), "dataset", None), "index", {}) for hook in hooks)
    files: dict[str, dict[str, str]] = {}
    for name, place in next((index for index in indices if index), {}).items():  # one index serves all modules
        if "safetensors_file" in place:
            files.setdefault(place["safetensors_file"], {})[name] = place.get("weight_name", name)
    return files


def loaded_blocks(blocks: Iterable[nn.Module]) -> Generator[int, None, None]:
    """Load the weights of one block after another; a thread reads the next block in the background.

    Yields:
        The bytes that were read for the block. Its weights are on its device until the next block is requested.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-weights")
    ahead = (thread.submit(_read, list(block.modules())) for block in blocks)
    try:
        following = next(ahead, None)
        while following is not None:
            weights = following.result()
            following = next(ahead, None)
            size = _size(weights)
            _install(weights)
            try:
                yield size
            finally:
                _remove(weights)
                _trim()
    finally:
        thread.shutdown(cancel_futures=True)


class OutsideModules:
    """The offloaded modules outside the blocks: each is loaded when it is first called, and stays until `release`."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        inside = set(blocks.modules())
        self._modules = [m for m in model.modules() if m not in inside and _offload_hook(m) is not None]
        self._embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        self._loaded: dict[nn.Module, list[_Weights]] = {}

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

    def release(self) -> int:
        """Remove all loaded weights; returns their bytes."""
        size = sum(_size(weights) for weights in self._loaded.values())
        for weights in self._loaded.values():
            _remove(weights)
        self._loaded.clear()
        return size

    def _load(self, module: nn.Module) -> None:
        if module not in self._loaded:
            self._loaded[module] = _read([module])
            _install(self._loaded[module])


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


def _trim() -> None:
    """Return free pages of the heap to the system, if the C library can: glibc keeps those between pieces in use."""
    trim = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim", None)
    if trim is not None:
        trim(0)
