"""Weights that come and go: a module's offloaded parameters brought to their device, and taken away again.

accelerate leaves an offloaded module's parameters on the meta device and reads them from the safetensors (or from CPU memory)
before every single call. Here they are read once, stay for as many calls as are wanted, and go; the next block is read
by a thread while this one computes.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import named_module_tensors
from torch import Tensor, nn


@dataclass
class _Held:
    """The weights of one offloaded module, as read; `meta` are the placeholders they take the places of."""

    module: nn.Module
    hook: AlignDevicesHook
    values: dict[str, Tensor]
    meta: dict[str, Tensor]


def is_offloaded(model: nn.Module) -> bool:
    """Whether any part of a model lies outside the device it runs on."""
    return any(_offload_hook(module) is not None for module in model.modules())


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: what its hooks say, else where its first parameter is."""
    for part in module.modules():
        for hook in _hooks(part):
            if hook.execution_device is not None:
                device = hook.execution_device
                return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


class Outside:
    """The modules outside the blocks: each is brought when it is first called, and stays until `release`."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        inside = set(blocks.modules())
        self._modules = [m for m in model.modules() if m not in inside and _offload_hook(m) is not None]
        self._embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        self._held: dict[nn.Module, list[_Held]] = {}
        self.bytes_read = 0

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While this lasts, whatever is called is brought first."""
        handles = [module.register_forward_pre_hook(lambda module, args: self._bring(module)) for module in self._modules]
        try:
            if self._embeddings in self._modules:  # models ask them for their device before they call them
                self._bring(self._embeddings)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def release(self) -> None:
        """Let go of all that was brought."""
        for held in self._held.values():
            _drop(held)
        self._held.clear()

    def _bring(self, module: nn.Module) -> None:
        if module not in self._held:
            held = self._held[module] = _read([module])
            self.bytes_read += _size(held)
            _place(held)


class Residents:
    """Blocks in their order, each brought once; the next is read meanwhile. To be used as a context."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-weights")
        self._next: Future[list[_Held]] | None = None
        self.bytes_read = 0

    def __enter__(self) -> "Residents":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """A block with its weights on its device; to be called with 0, 1, 2, ... in turn."""
        held = (self._next or self._read(index)).result()
        self._next = self._read(index + 1) if index + 1 < len(self._blocks) else None
        self.bytes_read += _size(held)
        _place(held)
        try:
            yield self._blocks[index]
        finally:
            _drop(held)
            _trim()

    def _read(self, index: int) -> Future[list[_Held]]:
        return self._thread.submit(_read, list(self._blocks[index].modules()))


def _trim() -> None:
    """Give the heap's free pages back to the system, where the C library can: glibc keeps those between pieces in use."""
    trim = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def _offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    return next((hook for hook in _hooks(module) if hook.offload), None)


def _read(modules: list[nn.Module]) -> list[_Held]:
    """Read the weights of the offloaded ones among some modules to where they are used."""
    found = []
    for module in modules:
        hook = _offload_hook(module)
        if hook is None:
            continue
        tensors = named_module_tensors(
            module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
        )
        device = execution_device(module)
        meta = dict(tensors)
        values = {name: _at(hook.weights_map[name], device, old.dtype) for name, old in meta.items()}
        found.append(_Held(module, hook, values, meta))
    return found


def _at(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    moved = value.to(device, dtype)
    # On the CPU the value is a view of the mapped file: the copy is the read, here and not in the midst of a product.
    return moved.clone() if moved is value and device.type == "cpu" else moved


def _place(held: list[_Held]) -> None:
    for entry in held:
        for name, value in entry.values.items():
            _set(entry.module, name, value)
        entry.hook.offload = False  # accelerate leaves it alone from here on


def _drop(held: list[_Held]) -> None:
    for entry in held:
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


def _size(held: list[_Held]) -> int:
    return sum(value.nbytes for entry in held for value in entry.values.values())
