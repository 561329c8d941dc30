"""Loading models and tokenizers with transformers, from safetensors only."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from emp_llm.architecture.skeleton import NoModelClassError, read_config
from emp_llm.common.errors import UserError, count_of, format_bytes, reason
from emp_llm.common.machine import OutOfMemory, ran_out
from emp_llm.common.progress import shows_bars
from emp_llm.execution.completeness import check_complete, load_report
from emp_llm.execution.device_map import parse_device_map
from emp_llm.execution.offload_folder import OffloadFolder
from emp_llm.execution.quantization import Quantization, quantization_config
from emp_llm.options.model import DTYPES

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    device_map: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """A language model in evaluation mode, its weights from safetensors only: of text alone, multimodal or encoder-decoder.

    Args:
        folder: the model folder.
        device_map: as for `parse_device_map`.
        dtype: "auto" for the checkpoint's own, or a torch dtype's name.
        trust_remote_code: run code from the folder.
        quantization: by bitsandbytes while loading, of all linear layers but the head.

    Raises:
        UserError: the folder holds no model that transformers can load, its weights are not complete, or memory runs out.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    placement = parse_device_map(device_map)
    if quantization is not None and isinstance(placement, dict) and "disk" in placement.values():
        raise UserError(
            f"--device-map {device_map}: a model quantised to {quantization} cannot lie on disk; use auto or a device."
        )
    start = time.perf_counter()
    with OffloadFolder() as offload, load_report() as report, quiet_bar():
        try:
            model, info = read_config(folder, trust_remote_code)[1].from_pretrained(
                folder,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                device_map=placement,
                offload_folder=offload,
                use_safetensors=True,
                # Given as None, it would hide that a checkpoint is quantised: FP8 weights would be read without their scales.
                **({} if quantization is None else {"quantization_config": quantization_config(quantization)}),
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # listed in `info`, and refused below
                output_loading_info=True,
            )
        except NoModelClassError:
            raise
        except (ValueError, KeyError, OSError, ImportError, MemoryError, RuntimeError) as error:
            if ran_out(error) or report.out_of_memory:
                raise OutOfMemory(
                    f"{folder}: out of memory while loading it with --device-map {device_map}. Keep less of it in memory: "
                    "--device-map auto, disk, or a JSON map."
                ) from error
            report.refuse_conversions(folder, error)
            if isinstance(error, RuntimeError):
                raise
            raise UserError(f"{folder}: transformers cannot load it ({reason(error, whole=True)}).") from error
        check_complete(folder, model, info)
        model._emp_llm_offload = offload  # so that the folder is deleted with the model
    logger.debug("%s: loaded in %.1f s; %s", folder, time.perf_counter() - start, _loaded_words(model))
    loaded: PreTrainedModel = model.eval()
    return loaded


def _loaded_words(model: PreTrainedModel) -> str:
    """The size of a model, and where its weights lie, for the log."""
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        sizes["offloaded" if parameter.device.type == "meta" else str(parameter.device)] += parameter.nbytes
    places = ", ".join(f"{format_bytes(size)} on {place}" for place, size in sizes.items())
    return f"{count_of(model.num_parameters(), 'parameter')}, {str(model.dtype).removeprefix('torch.')}, {places}."


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder.

    Raises:
        UserError: there is none that transformers can load.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        user_errors = (ValueError, KeyError, OSError, ImportError, AttributeError, RecursionError)
        if not isinstance(error, user_errors) and type(error) is not Exception:  # tokenizers raises a bare Exception
            raise
        raise UserError(
            f"{folder}: no tokenizer that transformers can load ({reason(error, whole=True)}). Copy the model's tokenizer "
            "files into the folder."
        ) from error


def load_processor(folder: Path, trust_remote_code: bool = False) -> Any:
    """The processor of a multimodal model: its tokenizer and image processor.

    Raises:
        UserError: there is none for images that transformers can load.
    """
    problem = ""
    try:
        processor: Any = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if all(hasattr(processor, part) for part in ("image_processor", "tokenizer")):
            return processor
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError) as error:
        problem = f" ({reason(error, whole=True)})"
    raise UserError(
        f"{folder}: no image processor that transformers can load{problem}. Copy processor_config.json and "
        "preprocessor_config.json of the original model into the folder, or leave out image=."
    )


@contextmanager
def quiet_bar() -> Iterator[None]:
    """Switch transformers' progress bars off inside this context, unless this process draws bars."""
    if shows_bars() or not transformers.utils.logging.is_progress_bar_enabled():
        yield
        return
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()


def max_context(model_config: Any) -> int | None:
    """The longest sequence for which a model has positions, in tokens; None if its config does not say."""
    config = model_config if isinstance(model_config, dict) else model_config.to_dict()
    text = config.get("text_config") or config
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(text.get(key), int):
            return int(text[key])
    return None


def input_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: that of the input embedding, or, if the embedding is offloaded, the device that runs it."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    return torch.device(next(embedding.parameters()).device)
