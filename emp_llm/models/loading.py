"""Offloaded parameters: loaded on their device once for many calls, then removed.

accelerate keeps an offloaded module's parameters on the meta device, and reads them from the
safetensors (or from CPU memory) before every call. Here its hooks run once, and the weights stay
for as many calls as needed; a thread loads the next block while this one computes.
"""

import logging
import re
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, SequentialHook
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from emp_llm.checkpoint.checkpoint import check_no_adapter
from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import (
    UserError,
    count_of,
    did_you_mean,
    disk_sentence,
    format_bytes,
    quotable,
    reason,
    shorten_list,
)
from emp_llm.common.machine import OutOfMemory, ran_out, trim_heap, without_team
from emp_llm.common.progress import shows_bars
from emp_llm.common.ranks import ranks
from emp_llm.models.placement import Quantization, indexed, parse_device_map, quantization_config

logger = logging.getLogger(__name__)


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


# Models, tokenizers and processors of a folder, by transformers, from safetensors only.
#
# `build_skeleton` gives a model without weights, `load_model` one with all of them, or an error.
# transformers fills missing weights with random numbers and only logs their names, and never
# compares the shapes of weights that are offloaded to disk.


# It warns of every model that lies on disk, as the user has asked for.
logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
# It warns whenever a number is read in which layers differ, even by its own checks.
logging.getLogger("transformers.integrations.heterogeneity").setLevel(logging.ERROR)

# The generating models of transformers, by auto class; a type in several of them is built as its
# config.json says.
_GENERATE = {
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForMultimodalLM": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
_TRUST = " Its code is in the repository; if you trust it, add --trust-remote-code."
_CLASSES = "causal language model, image-text-to-text or encoder-decoder class"
_REMEDY = "Get the complete checkpoint and the config.json that belongs to it."


class NoModelClassError(UserError):
    """transformers has no class for a model that generates text for a config.json, or the file
    is missing.
    """


def read_config(folder: Path, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The configuration of a model folder, and the auto class of transformers that builds its
    model.

    Raises:
        NoModelClassError: transformers does not know the model type, or has no class that generates
            text for it.
    """
    version = transformers.__version__
    raw = read_json(folder / "config.json")
    remote = raw.get("auto_map") or {}
    model_type: Any = raw.get("model_type")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        name = _auto_class(config, remote if trust_remote_code else {})
    except Exception as error:  # of any kind: config.json may say anything
        known = not isinstance(model_type, str) or model_type in transformers.CONFIG_MAPPING
        if known or trust_remote_code:
            problem = f"transformers cannot read its config.json ({reason(error, whole=True)})."
        else:
            remedy = _TRUST if remote else " Install a version that does."
            problem = (
                f"transformers {version} does not know the model type "
                f"{quotable(model_type)!r}.{remedy}"
            )
        raise NoModelClassError(f"{folder}: {problem}") from error
    if name is not None:
        auto = getattr(transformers, name)
        return config, auto
    hint = _TRUST if remote and not trust_remote_code else ""
    what = next(
        iter(getattr(config, "architectures", None) or ()), f"the model type {config.model_type!r}"
    )
    raise NoModelClassError(f"{folder}: transformers {version} has no {_CLASSES} for {what}.{hint}")


def _auto_class(config: Any, remote: dict[str, Any]) -> str | None:
    """The auto class of a configuration: that of its repository's code, or whose class
    config.json names, or the first one.
    """
    classes = getattr(config, "architectures", None) or [""]
    fitting = {
        auto: table[config.model_type]
        for auto, table in _GENERATE.items()
        if config.model_type in table
    }
    named = [auto for auto in _GENERATE if auto in remote] or [
        auto for auto in fitting if fitting[auto] == classes[0]
    ]
    if not named and "AutoModelForSeq2SeqLM" in fitting:
        if classes[0].endswith("EncoderModel"):  # half of the model
            return None
        if getattr(config, "is_encoder_decoder", False):
            return "AutoModelForSeq2SeqLM"
    return next(iter(named or fitting), None)


def check_head(folder: Path, remedy: str = "Give a model that generates text.") -> None:
    """Raise UserError if a model's class has no head for tokens."""
    name = headless_class(
        read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    )
    if name is not None:
        raise UserError(f"{folder}: {name} has no head for tokens, so it predicts none. {remedy}")


def headless_class(config: Mapping[str, Any]) -> str | None:
    """The class of transformers that config.json names, if it has no head for tokens, such as a
    reward model's; else None.
    """
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    generating = str([list(table.values()) for table in _GENERATE.values()])
    is_headless = (
        isinstance(name, str) and hasattr(transformers, name) and f"'{name}'" not in generating
    )
    return name if is_headless else None


def build_skeleton(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder's config.json on the meta device: all modules, no weights.

    Raises:
        NoModelClassError: config.json is missing, or transformers has no class that generates text
            for it.
    """
    if not (folder / "config.json").is_file():
        raise NoModelClassError(
            f"{folder}: no config.json, so its architecture is unknown. Copy "
            "it from the original model."
        )
    config, auto = read_config(folder, trust_remote_code)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind: config.json may say anything
        raise NoModelClassError(
            f"{folder}: transformers cannot build its model ({reason(error, whole=True)})."
        ) from error
    return model


def load_model(
    folder: Path,
    device_map: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    device: "torch.device | None" = None,
) -> PreTrainedModel:
    """A language model in evaluation mode, its weights from safetensors only: of text alone,
    multimodal or encoder-decoder.

    Args:
        folder: the model folder.
        device_map: a strategy of accelerate, a device (cpu, cuda:1, disk), a JSON object, or the
            path of a file that holds one.
        dtype: "auto" for that of the checkpoint, or the name of a torch dtype.
        trust_remote_code: run code from the folder.
        quantization: the form to which bitsandbytes quantises all linear layers but the head.
        device: computes a model that lies on disk; None: the accelerator of this rank, if there is
            one.

    Raises:
        UserError: the folder holds no model that transformers can load, its weights are not
            complete, or memory runs out.
    """
    check_no_adapter(folder)
    placement = parse_device_map(device_map)
    skeleton = build_skeleton(folder, trust_remote_code)
    if isinstance(placement, dict):
        _check_map(placement, skeleton)
    if quantization is not None and isinstance(placement, dict) and "disk" in placement.values():
        raise UserError(
            f"--device-map {device_map}: a model quantised to {quantization} cannot "
            "lie on disk; use auto."
        )
    device = ranks().device if device is None else device
    if placement == {"": "disk"} and device.type != "cpu":
        # accelerate computes on the first device of a map, and warns that no module has this name.
        placement = {"": "disk", "no module": str(indexed(device))}
        warnings.filterwarnings("ignore", ".*keys do not match any submodules.*no module")
    start = time.perf_counter()
    remedy = (
        f" with --device-map {device_map}. Keep less of it in memory: --device-map auto, "
        "disk, or a JSON map."
    )
    with ExitStack() as stack, loading(folder, remedy):
        # For weights that transformers converts and then offloads to disk, such as experts.
        offload = tempfile.TemporaryDirectory(prefix="emp-llm-offload-", ignore_cleanup_errors=True)
        stack.enter_context(offload)
        model, info = read_config(folder, trust_remote_code)[1].from_pretrained(
            folder,
            dtype=dtype,
            device_map=placement,
            offload_folder=offload.name,
            use_safetensors=True,
            # None would hide that a checkpoint is quantised: FP8 weights would be read without
            # their scales.
            **(
                {}
                if quantization is None
                else {"quantization_config": quantization_config(quantization)}
            ),
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # listed in `info`, and refused below
            output_loading_info=True,
        )
        check_complete(folder, model, info)
        if any(Path(offload.name).iterdir()):
            weakref.finalize(model, stack.pop_all().close)
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        sizes["offloaded" if parameter.device.type == "meta" else str(parameter.device)] += (
            parameter.nbytes
        )
    places = ", ".join(f"{format_bytes(size)} on {place}" for place, size in sizes.items())
    parameters = count_of(model.num_parameters(), "parameter")
    loaded_dtype = str(model.dtype).removeprefix("torch.")
    logger.debug(
        "%s: loaded in %.1f s; %s, %s, %s.",
        folder,
        time.perf_counter() - start,
        parameters,
        loaded_dtype,
        places,
    )
    return model


def _check_map(placement: Mapping[str, Any], skeleton: PreTrainedModel) -> None:
    """Raise UserError unless a device map has a place for each weight, one for tied weights, and
    no place for a module that is not there; with another one, transformers would fail in a forward
    pass.
    """

    def place_of(name: str) -> Any:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        return next((placement[prefix] for prefix in prefixes if prefix in placement), None)

    missing = [name for name, _ in skeleton.named_parameters() if place_of(name) is None]
    if missing:
        raise UserError(
            f"--device-map: it has no place for {shorten_list(missing)}. Add one, or use auto."
        )
    names = {name for name, _ in skeleton.named_modules()}
    names |= {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in skeleton.named_buffers()}
    unknown = next((name for name in placement if name not in names), None)
    if unknown is not None:
        raise UserError(
            f"--device-map: there is no module {quotable(unknown)}.{did_you_mean(unknown, names)}"
        )
    for name, tied in getattr(skeleton, "all_tied_weights_keys", {}).items():
        if place_of(name) != place_of(tied):
            raise UserError(
                f"--device-map: {name} and {tied} are one weight. Give both the same place."
            )


@contextmanager
def loading(folder: Path, remedy: str = ".") -> Iterator[None]:
    """transformers loads a model inside this context. Its table of problems is not shown, because
    `check_complete` reports the same; nor is its progress bar, unless this process draws bars.

    Args:
        folder: the model folder, for messages.
        remedy: ends the message when memory runs out.

    Raises:
        UserError: the model cannot be loaded, or memory runs out.
    """
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json")
    table = ""
    their_logger = logging.getLogger("transformers.modeling_utils")
    level = their_logger.level
    shown = their_logger.getEffectiveLevel()

    def hold_back(record: logging.LogRecord) -> bool:
        nonlocal table
        if "LOAD REPORT" not in record.getMessage():
            return record.levelno >= shown
        table = re.sub(r"\x1b\[\d*m", "", record.getMessage())  # without the colours of a terminal
        return False

    their_logger.addFilter(hold_back)
    if not their_logger.isEnabledFor(logging.WARNING):
        # At WARNING itself, transformers also checks plans for many devices.
        their_logger.setLevel(logging.WARNING - 1)
    hides_bar = transformers.utils.logging.is_progress_bar_enabled() and not shows_bars()
    if hides_bar:
        transformers.utils.logging.disable_progress_bar()
    try:
        yield
    except UserError:
        raise
    except (ValueError, KeyError, OSError, ImportError, MemoryError, RuntimeError) as error:
        # The parameters that could not be built from the stored tensors; those of several layers as
        # "layers.{0, 1}.NAME".
        parts = re.findall(r"^(\S.*?) *\| *CONVERSION\b", table, re.MULTILINE)
        if ran_out(error) or (
            parts and re.search("OutOfMemoryError|MemoryError|allocate memory", table)
        ):
            raise OutOfMemory(f"{folder}: out of memory while loading it{remedy}") from error
        if parts:
            raise UserError(
                f"{folder}: parts of {shorten_list(parts)} are missing, or of other shapes than "
                f"in config.json. {_REMEDY}"
            ) from error
        if isinstance(error, RuntimeError):
            raise
        told = disk_sentence(error)
        raise UserError(
            told or f"{folder}: transformers cannot load it ({reason(error, whole=True)})."
        ) from error
    finally:
        their_logger.removeFilter(hold_back)
        their_logger.setLevel(level)
        if hides_bar:
            transformers.utils.logging.enable_progress_bar()


def check_complete(folder: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse a model with weights that do not come from its checkpoint; warn of tensors that it
    does not use.

    Args:
        folder: the model folder, for messages.
        model: as transformers loaded it, offloaded or not.
        info: the second result of `from_pretrained(..., output_loading_info=True)`. It lists no
            tied weights, and nothing that the architecture allows to be missing.

    Raises:
        UserError: weights are missing, or have other shapes than the model's.
    """
    tied = getattr(model, "all_tied_weights_keys", {})  # name -> the weight that it is tied to
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def untied(listed: Collection[str]) -> list[str]:
        """The listed parameters, without those that are tied to another listed one."""
        return [name for name in names if name in listed and tied.get(name) not in listed]

    head = (
        head_parameter(model)
        if headless_class(read_json(folder / "config.json")) is not None
        else None
    )
    missing = [name for name in untied(info["missing_keys"]) if name != head]
    if missing:
        raise UserError(
            f"{folder}: the checkpoint lacks {count_of(len(missing), 'weight')}: "
            f"{shorten_list(missing)}. {_REMEDY}"
        )
    shapes = {
        name: (list(stored), list(expected)) for name, stored, expected in info["mismatched_keys"]
    }
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for path, places in offloaded_files(model).items():
        with safe_open(path, framework="pt") as file:
            for name in places.keys() & tensors.keys():
                stored = file.get_slice(places[name]).get_shape()
                expected = list(tensors[name].shape)
                if stored != expected:
                    shapes[name] = stored, expected
    different = untied(shapes) or sorted(shapes)
    if different:
        stored, expected = shapes[different[0]]
        raise UserError(
            f"{folder}: the checkpoint does not fit config.json. The shapes of "
            f"{count_of(len(different), 'weight')} differ: {different[0]} is {stored} in the "
            f"checkpoint, and {expected} by config.json. {_REMEDY}"
        )
    if not ranks().main:
        return
    warning = "warning: %s: the checkpoint %s: %s."
    buffers = sorted(info["missing_keys"] - set(names))
    if buffers:
        lacks = (
            f"lacks {count_of(len(buffers), 'buffer')} of the model, which transformers fills in"
        )
        logger.warning(warning, folder, lacks, shorten_list(buffers))
    unused = sorted(info["unexpected_keys"])
    if unused:
        holds = f"holds {count_of(len(unused), 'tensor')} that the model does not use"
        logger.warning(warning, folder, holds, shorten_list(unused))


def head_parameter(model: Any) -> str | None:
    """The name of the weight of a model's head for tokens."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next(
        (f"{name}.weight" for name, module in model.named_modules() if module is head), None
    )


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder.

    Raises:
        UserError: there is none that transformers can load.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of any kind, by what the files say
        raise UserError(
            f"{folder}: no tokenizer that transformers can load ({reason(error, whole=True)}). "
            "Copy the model's tokenizer files into the folder."
        ) from error
