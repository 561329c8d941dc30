"""Offloaded parameters: loaded on their device once for many calls, then removed.

accelerate keeps an offloaded module's parameters on the meta device, and reads them from the
safetensors (or from CPU memory) before every call. Here its hooks run once, and the weights stay
for as many calls as needed; a thread loads the next block while this one computes.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import Tensor, nn

from emp_llm.common.machine import trim_heap, without_team


def is_offloaded(model: nn.Module) -> bool:
    """Whether any weights of a model are stored elsewhere than on the device that uses them."""
    return any(_offload_hook(module) is not None for module in model.modules())


def execution_device(module: nn.Module) -> torch.device:
    """The device that runs a module: that of its hooks, else that of its first parameter."""
    for submodule in module.modules():
        for hook in _hooks(submodule):
            device = hook.execution_device
            if device is not None:
                return torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def input_device(model: Any) -> torch.device:
    """The device for token ids: the one that runs the input embedding."""
    return execution_device(model.get_input_embeddings())


def resident_parameter(model: nn.Module, name: str) -> Tensor | None:
    """A parameter's values where they lie in memory: on its device, or offloaded to the CPU; for
    one on disk, on "meta".

    Returns:
        The values, which can be changed in place; None if the model has no such parameter.
    """
    owner, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
        parameter = model.get_parameter(name)
    except AttributeError:
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
    indices = (
        getattr(getattr(getattr(hook, "weights_map", None), "dataset", None), "index", {})
        for hook in hooks
    )
    files: dict[str, dict[str, str]] = {}
    # One index serves all modules.
    for name, place in next((index for index in indices if index), {}).items():
        if "safetensors_file" in place:
            files.setdefault(place["safetensors_file"], {})[name] = place.get("weight_name", name)
    return files


def load_blocks(blocks: Sequence[nn.Module]) -> Generator[int, None, None]:
    """Load the weights of one block after another; a thread loads the next block in the background.

    Yields:
        The bytes that were loaded for the block. Its weights are on its device until the next block
        is requested.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    with ThreadPoolExecutor(1, "emp-llm-weights", initializer=without_team) as thread:

        def load(some: Sequence[nn.Module]) -> list[Future[int]]:
            return [thread.submit(_load_block, each, _stream_for(each, streams)) for each in some]

        try:
            ahead = load(blocks[:1])
            for number, block in enumerate(blocks, 1):
                size = ahead.pop().result()
                ahead = load(blocks[number : number + 1])
                yield size
                _unload_weights(block.modules())
                trim_heap()
        finally:
            thread.shutdown()
            for block in blocks:
                _unload_weights(block.modules())


def _stream_for(
    block: nn.Module, streams: dict[torch.device, torch.cuda.Stream]
) -> torch.cuda.Stream | None:
    """The stream that loads an offloaded block to a GPU; None for others. That of the computations
    would copy the weights only after all work that it was given before.
    """
    device = execution_device(block)
    if device.type != "cuda" or not is_offloaded(block):
        return None
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # It may get the memory of the block before the last one, which is in use until then.
    streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams[device]


def _load_block(block: nn.Module, stream: torch.cuda.Stream | None) -> int:
    """Load the weights of a block, by a stream of a GPU if there is one; returns their bytes."""
    if stream is None:
        return _load_weights(block.modules())
    with torch.cuda.stream(stream):
        size = _load_weights(block.modules())
    stream.synchronize()
    return size


class OutsideModules:
    """The offloaded modules outside the blocks: each is loaded when it is first called, and
    stays until `release`.
    """

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        inside = set(blocks.modules())
        self._modules = [
            m for m in model.modules() if m not in inside and _offload_hook(m) is not None
        ]
        self._embeddings = getattr(model, "get_input_embeddings", lambda: None)()

    @contextmanager
    def loaded_on_call(self) -> Iterator[None]:
        """Inside this context, a module is loaded before it is called."""

        def load(module: nn.Module, args: Any) -> None:
            _load_weights([module])

        handles = [module.register_forward_pre_hook(load) for module in self._modules]
        try:
            # Models ask for their device before they call them.
            if self._embeddings in self._modules:
                _load_weights([self._embeddings])
            yield
        finally:
            for handle in handles:
                handle.remove()

    def release(self) -> int:
        """Remove all loaded weights; returns their bytes."""
        return _unload_weights(self._modules)


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def _offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    """accelerate's hook that loads a module's weights before each call; None if they are loaded."""
    return next((hook for hook in _hooks(module) if hook.offload), None)


def _load_weights(modules: Iterable[nn.Module]) -> int:
    """Load the weights of those modules that are offloaded, each to the device that runs it;
    returns their bytes.
    """
    size = 0
    for module in modules:
        hook = _offload_hook(module)
        if hook is None:
            continue
        hook.pre_forward(module)
        hook.offload = False  # accelerate leaves the module alone from here on
        for parameter in module.parameters(recurse=hook.place_submodules):
            # A view of the stored values; the copy reads a file now, and can be changed.
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()
            size += parameter.nbytes
    return size


def _unload_weights(modules: Iterable[nn.Module]) -> int:
    """Remove the weights that `_load_weights` has loaded; returns their bytes."""
    size = 0
    for module in modules:
        for hook in _hooks(module):
            if hook.weights_map is not None and not hook.offload:
                size += sum(
                    parameter.nbytes
                    for parameter in module.parameters(recurse=hook.place_submodules)
                )
                hook.offload = True
                hook.post_forward(module, None)
    return size
