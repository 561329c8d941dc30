"""A checkpoint as one GGUF file, for llama.cpp. The package gguf has the format, the names of the
tensors and the quantised types; this file has what differs between a model in transformers and the
same model in llama.cpp.
"""

import glob
import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import FilePool, read_json, sync_path, write_bytes
from emp_llm.checkpoint.headers import StoredTensor
from emp_llm.checkpoint.matrices import as_tensor, read_words, words_in
from emp_llm.common.errors import UserError, quotable
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.loading import check_head, read_config
from emp_llm.pruning.writing import report_of_weights
from emp_llm.records.run_report import RunReport

# It logs the name of each file, and guesses about chat templates.
logging.getLogger("gguf").setLevel(logging.ERROR)
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}  # of checkpoints
# Norms and routers are small, and stay in float32.
_ALWAYS_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
_NOTED = 1 << 28  # bytes, after which an export notes what is on disk
_EDGES = ("token_embd.weight", "output.weight")
_UNUSED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a tokenizer of bytes splits a text -> llama.cpp's name for it.
_SPLITS = {
    "GPT-2": "gpt-2",
    "digits, GPT-2": "smollm",
    _LLAMA3: "llama-bpe",
    _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2",
}


@dataclass(frozen=True)
class Family:
    """How a model of transformers becomes one of llama.cpp.

    Attributes:
        architecture: its name in `gguf.MODEL_ARCH`.
        interleaved: two neighbouring rows of a head of queries or keys rotate together; in
            transformers, a row of the first half and one of the second.
        plus_one: the norms are stored as 1 + weight.
        per_layer_architecture: that for models whose layers differ in width; None if there is none.
    """

    architecture: str
    interleaved: bool = False
    plus_one: bool = False
    per_layer_architecture: str | None = None


FAMILIES = {
    "llama": Family("LLAMA", interleaved=True, per_layer_architecture="DECI"),
    "mistral": Family("LLAMA", interleaved=True, per_layer_architecture="DECI"),
    "mixtral": Family("LLAMA", interleaved=True),
    "qwen2": Family("QWEN2"),
    "qwen2_moe": Family("QWEN2MOE"),
    "qwen3": Family("QWEN3"),
    "qwen3_moe": Family("QWEN3MOE"),
    "gemma": Family("GEMMA", plus_one=True),
    "gemma2": Family("GEMMA2", plus_one=True),
    "phi3": Family("PHI3"),
}


@dataclass(frozen=True)
class Widths:
    """The numbers of heads, of heads of keys and values, and of neurons of each layer, from the
    shapes of the stored matrices.
    """

    heads: tuple[int, ...]
    key_value_heads: tuple[int, ...]
    neurons: tuple[int, ...]

    @property
    def differ(self) -> bool:
        """Whether two layers have different numbers."""
        return any(
            len(set(numbers)) > 1 for numbers in (self.heads, self.key_value_heads, self.neurons)
        )


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file.

    Attributes:
        name: in the file.
        sources: the stored tensor; of experts, one for each.
        shape: in the file, as numpy has it.
        type: one of `TYPES`.
        heads: how many heads its rows are, if the two halves of each are to be interleaved; else 0.
        plus: what is added to each number.
    """

    name: str
    sources: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    type: str
    heads: int = 0
    plus: float = 0.0

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        block, size = gguf.GGML_QUANT_SIZES[_ggml_type(self.type)]
        return int(math.prod(self.shape) // block * size)

    def read(self, files: FilePool) -> NDArray[Any]:
        """The tensor in its type: the array whose bytes are written."""
        stacked = [_numbers(source, files) for source in self.sources]
        values = (stacked[0] if len(stacked) == 1 else np.stack(stacked)).reshape(self.shape)
        if self.heads:
            halves = values.reshape(self.heads, 2, -1, *self.shape[1:])
            values = halves.swapaxes(1, 2).reshape(self.shape)
        if self.plus:
            values = values + np.float32(self.plus)
        quantised: NDArray[Any] = gguf.quants.quantize(
            np.ascontiguousarray(values), _ggml_type(self.type)
        )
        return quantised


def _ggml_type(type_name: str) -> Any:
    return gguf.GGMLQuantizationType[type_name.upper()]


def _numbers(tensor: StoredTensor, files: FilePool) -> NDArray[np.float32]:
    """A stored tensor in float32, in its own shape."""
    words = read_words(files.reader(tensor.shard), tensor, 0, words_in(tensor))
    values: NDArray[np.float32] = as_tensor(words, tensor.dtype).float().numpy()
    return values.reshape(tensor.shape)


class GGUFFile:
    """What a checkpoint becomes as a GGUF file.

    Args:
        checkpoint: of a model of one of `FAMILIES`.
        type_name: type of the matrices, one of `TYPES`; None: the dtype of most weights. With four
            bits, embeddings and head have eight. With quantised types, matrices whose rows do not
            fill blocks of 32 are stored in float16.
        name: of the model.

    Raises:
        UserError: a family that is not in `FAMILIES`, quantised weights, or a tokenizer, position
            encoding or tensor that llama.cpp has no name for.
    """

    def __init__(self, checkpoint: Checkpoint, type_name: str | None, name: str) -> None:
        check_head(checkpoint.folder)
        self.checkpoint = checkpoint
        self._name = name
        self._family = family_of(checkpoint)
        self._config, _ = read_config(checkpoint.folder)
        check_computes_the_same(checkpoint.folder, self._config)
        self.type = type_name or _most_common_type(checkpoint)
        self._tokenizer = Tokenizer(checkpoint.folder, self._vocabulary)
        self.widths = self._widths()
        architecture = self._family.architecture
        if self.widths.differ:
            if self._family.per_layer_architecture is None:
                raise UserError(
                    f"{checkpoint.folder}: its layers differ in width, and llama.cpp has no "
                    f"architecture for that of a {self._config.model_type}."
                )
            architecture = self._family.per_layer_architecture
        self._architecture = gguf.MODEL_ARCH[architecture]
        self.tensors = self._tensors()
        self._factors = _rope_factors(checkpoint.folder, self._config, self._rotated)

    @cached_property
    def report(self) -> RunReport | None:
        """Of the run that pruned the model; None for a dense one."""
        folder = self.checkpoint.folder
        if not (folder / REPORT_NAME).is_file():
            return None
        return report_of_weights(folder, identity_of(self.checkpoint))

    @property
    def zeros(self) -> float:
        """The fraction of zeros in the pruned layers; 0 for a dense model, or if units were
        removed.
        """
        if self.report is None or self.report.structure is not None:
            return 0.0
        return self.report.targets.sparsity_of_targets

    @property
    def unquantised(self) -> list[str]:
        """The matrices that a quantised type does not take."""
        if not self.type.startswith("q"):
            return []
        return [tensor.name for tensor in self.tensors if tensor.type == "f16"]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def _vocabulary(self) -> int:
        embeddings = self.checkpoint.tensors.get("model.embed_tokens.weight")
        if embeddings is None:
            raise UserError(
                f"{self.checkpoint.folder}: it holds no model.embed_tokens.weight. Get the "
                "complete checkpoint."
            )
        return embeddings.shape[0]

    @property
    def _config_of_layers(self) -> Sequence[Any]:
        """The configuration of each layer."""
        of_layers = getattr(self._config, "per_layer_config", None)  # older transformers have none
        return of_layers or [self._config] * self._layers()

    @property
    def _head_dim(self) -> int:
        config = self._config
        stated = getattr(config, "head_dim", None)
        heads = self._config_of_layers[0].num_attention_heads
        return int(stated or config.hidden_size // heads)

    @property
    def _rotated(self) -> int:
        """How many numbers of a head its position rotates."""
        return int(self._head_dim * self._config.rope_parameters.get("partial_rotary_factor", 1.0))

    def _layers(self) -> int:
        return int(self._config.num_hidden_layers)

    def _widths(self) -> Widths:
        layers = self._config_of_layers

        def rows(name: str, unit: int, field: str) -> tuple[int, ...]:
            stored = [
                self.checkpoint.tensors.get(f"model.layers.{layer}.{name}.weight")
                for layer in range(self._layers())
            ]
            return tuple(
                getattr(config, field) if tensor is None else tensor.shape[0] // unit
                for tensor, config in zip(stored, layers, strict=True)
            )

        return Widths(
            rows("self_attn.q_proj", self._head_dim, "num_attention_heads"),
            rows("self_attn.k_proj", self._head_dim, "num_key_value_heads"),
            rows("mlp.gate_proj", 1, "intermediate_size"),
        )

    def _tensors(self) -> list[GGUFTensor]:
        """All tensors of the file, in the order of the checkpoint."""
        names = gguf.get_tensor_name_map(self._architecture, self._layers())
        experts: dict[str, dict[int, StoredTensor]] = {}
        tensors: dict[str, GGUFTensor] = {}
        for tensor in self.checkpoint.tensors.values():
            if self._is_unused(tensor.name):
                continue
            shared, number = _without_expert(tensor.name)
            name = names.get_name(shared, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise UserError(
                    f"{tensor.shard}: llama.cpp's {self._architecture.name.lower()} has no place "
                    f"for the tensor {quotable(tensor.name)}."
                )
            if number is None:
                tensors[name] = self._tensor(name, (tensor,), tensor.shape)
                continue
            experts.setdefault(name, {})[number] = tensor
            stacked = tuple(expert for _, expert in sorted(experts[name].items()))
            tensors[name] = self._tensor(name, stacked, (len(stacked), *tensor.shape))
        return list(tensors.values())

    def _is_unused(self, name: str) -> bool:
        """Whether transformers does not load a tensor, or loads it from another name."""
        words = name.split(".")
        numbered = words[1:2] == ["layers"] and words[2].isdecimal()
        beyond = numbered and int(words[2]) >= self._layers()
        tied = name == "lm_head.weight" and self._config.tie_word_embeddings
        return beyond or tied or name.endswith(_UNUSED)

    def _tensor(
        self, name: str, sources: tuple[StoredTensor, ...], shape: tuple[int, ...]
    ) -> GGUFTensor:
        if len(shape) == 2 and 1 in shape:
            shape = (max(shape),)
        type_name = self.type
        if type_name in ("q4_0", "q4_1") and name in _EDGES:
            type_name = "q8_0"
        if type_name.startswith("q") and shape[-1] % 32:
            type_name = "f16"
        if len(shape) == 1 or name.endswith(_ALWAYS_FLOAT32):
            type_name = "f32"
        tensor = GGUFTensor(name, sources, shape, type_name)
        role = name.rpartition(".")[0].rpartition(".")[2]
        if self._family.interleaved and role in ("attn_q", "attn_k"):
            layer = int(name.split(".")[1])
            heads = self.widths.heads if role == "attn_q" else self.widths.key_value_heads
            return replace(tensor, heads=heads[layer])
        if self._family.plus_one and name.endswith("norm.weight"):
            return replace(tensor, plus=1.0)
        return tensor

    def write(self, path: Path) -> None:
        """Write the file. Memory holds one tensor in float32.

        What is written until then lies beside it, under a name made of its header and of the
        shards' states. A call that was interrupted resumes after the last tensor that is noted to
        be on disk: after a loss of power, a file may have its size without its bytes.
        """
        head = self._head(path.with_name(f".{path.name}.head"))
        made_of = head + repr(self.checkpoint.states).encode()
        digest = hashlib.blake2b(made_of, digest_size=8).hexdigest()
        partial = path.with_name(f".{path.name}.{digest}.partial")
        note = path.with_name(f".{path.name}.{digest}.size.partial")
        for older in partials(path):
            if older not in (partial, note) or older.is_symlink():
                older.unlink()
        size = _noted(note)
        if size > (partial.stat().st_size if partial.exists() else 0):  # of a file that is gone
            note.unlink()
            size = 0
        noted = size
        with (
            partial.open("r+b" if partial.exists() else "w+b") as file,
            progress_bar(self.nbytes, "export", "B") as bar,
            self.checkpoint.open_files() as files,
        ):
            start = end = len(head)
            if size < end:
                file.write(head)
            try:
                for tensor in self.tensors:
                    end = start + gguf.GGUFWriter.ggml_pad(
                        tensor.nbytes, gguf.GGUF_DEFAULT_ALIGNMENT
                    )
                    if size < end:
                        file.seek(start)
                        tensor.read(files).tofile(file)
                        file.write(bytes(end - start - tensor.nbytes))
                    start = end  # of the next tensor
                    bar.update(tensor.nbytes)
                    if start >= noted + _NOTED:
                        noted = _note(note, partial, file, start)
            except BaseException:
                if start > size:
                    with suppress(OSError):  # the disk is full
                        _note(note, partial, file, start)
                raise
            file.flush()
            sync_path(partial)
        self.checkpoint.check_unchanged()
        note.unlink(missing_ok=True)
        os.replace(partial, path)

    def _head(self, path: Path) -> bytes:
        """All before the checkpoint's tensors: sizes, tokenizer, names, and the tensors that are
        made of the config. The package writes it to a file, which is deleted.
        """
        writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self._architecture])
        try:
            self._describe(writer)
            self._tokenizer.describe(writer)
            for name, values in self._factors.items():
                writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
            for tensor in self.tensors:
                writer.add_tensor_info(
                    tensor.name,
                    tensor.shape,
                    np.dtype(np.float32),
                    tensor.nbytes,
                    _ggml_type(tensor.type),
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for values in self._factors.values():
                writer.write_tensor_data(values)
            writer.close()
            head = path.read_bytes()
        finally:
            writer.close()
            path.unlink(missing_ok=True)
        return head + bytes(-len(head) % gguf.GGUF_DEFAULT_ALIGNMENT)

    def _describe(self, writer: gguf.GGUFWriter) -> None:
        """The model's sizes, and where it comes from."""
        config = self._config
        writer.add_type("model")
        writer.add_name(self._name)
        extent = "ALL" if self.type == "f32" else "MOSTLY"
        writer.add_file_type(gguf.LlamaFileType[f"{extent}_{self.type.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(self._vocabulary)
        context = config.max_position_embeddings
        windowed = config.model_type in ("gemma2", "phi3")
        if not windowed and getattr(config, "sliding_window", None):
            # Others attend to all tokens there, which is the same within the window.
            context = min(context, config.sliding_window)
        writer.add_context_length(context)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(self._layers())
        writer.add_head_count(_one_if_equal(self.widths.heads))
        writer.add_head_count_kv(_one_if_equal(self.widths.key_value_heads))
        writer.add_feed_forward_length(_one_if_equal(self.widths.neurons))
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        self._describe_positions(writer)
        self._describe_experts(writer)
        if windowed:
            writer.add_sliding_window(config.sliding_window or config.max_position_embeddings)
        if config.model_type == "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if self.report is not None:
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, Path(self.report.source.model).name)
            writer.add_string("emp_llm.report", self.report.encoded().decode())

    def _describe_positions(self, writer: gguf.GGUFWriter) -> None:
        rope = self._config.rope_parameters
        rope_type = rope.get("rope_type", "default")
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(self._rotated)
        scaling = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        if rope_type in scaling:
            writer.add_rope_scaling_type(scaling[rope_type])
            writer.add_rope_scaling_factor(rope["factor"])
        original = rope.get("original_max_position_embeddings")
        if rope_type in ("yarn", "longrope") and original:
            writer.add_rope_scaling_orig_ctx_len(original)
        if rope_type == "longrope" and original:
            longer = max(1.0, self._config.max_position_embeddings / original)
            usual = math.sqrt(1 + math.log(longer) / math.log(original))
            writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or usual)

    def _describe_experts(self, writer: gguf.GGUFWriter) -> None:
        config = self._config
        count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if not count:
            return
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if config.model_type in ("qwen2_moe", "qwen3_moe"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if config.model_type == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _note(note: Path, partial: Path, file: BinaryIO, size: int) -> int:
    """Note that so many bytes of a file are on disk, after bringing them there; returns the
    size.
    """
    file.flush()
    sync_path(partial)
    write_bytes(note, str(size).encode())
    return size


def _noted(note: Path) -> int:
    """The size that a note says is on disk; 0 if there is no note."""
    held = note.read_text() if note.exists() else ""
    return int(held) if held.isdecimal() else 0


def partials(path: Path) -> list[Path]:
    """What interrupted calls of `GGUFFile.write` have left beside a file."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.partial"))


def family_of(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint; UserError if it cannot become a GGUF file."""
    model_type = checkpoint.config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UserError(
            f"{checkpoint.folder}: its model_type is {quotable(str(model_type))}, and --to gguf "
            f"knows {', '.join(FAMILIES)}. llama.cpp's own convert_hf_to_gguf.py knows more."
        )
    others = {tensor.dtype for tensor in checkpoint.tensors.values()} - set(_DTYPES)
    if checkpoint.config.get("quantization_config") is not None or others:
        raise UserError(
            f"{checkpoint.folder}: its weights are quantised already. Export the model of 16 or 32 "
            "bits that it was made from."
        )
    return family


def check_computes_the_same(folder: Path, config: Any) -> None:
    """Raise UserError for numbers of a config that llama.cpp takes to be others."""
    model_type = config.model_type
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    usual = ("gelu", "gelu_pytorch_tanh") if model_type.startswith("gemma") else ("silu", "swish")
    wanted: dict[str, tuple[Any, tuple[Any, ...]]] = {"hidden_act": (activation, usual)}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        wanted["norm_topk_prob"] = (config.norm_topk_prob, (model_type == "qwen3_moe",))
    if model_type == "gemma2":
        wanted["query_pre_attn_scalar"] = (config.query_pre_attn_scalar, (config.head_dim,))
    if FAMILIES[model_type].interleaved:
        rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
        wanted["partial_rotary_factor"] = (rotated, (1.0,))
    for name, (value, allowed) in wanted.items():
        if value not in allowed:
            raise UserError(
                f"{folder}: {name} is {value!r} in config.json, and llama.cpp computes "
                f"{model_type} with {allowed[0]!r}."
            )


def _most_common_type(checkpoint: Checkpoint) -> str:
    """The dtype that most weights have, as one of `TYPES`."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.numel
    return _DTYPES[sizes.most_common(1)[0][0]]


def _one_if_equal(values: tuple[int, ...]) -> Any:
    """One number, or a list with one for each layer."""
    return values[0] if len(set(values)) == 1 else list(values)


def _without_expert(name: str) -> tuple[str, int | None]:
    """The name that an expert's tensor shares with those of the other experts, and its number."""
    before, mark, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    if mark and number.isdecimal():
        return f"{before}.experts.{rest}", int(number)
    return name, None


def _rope_factors(folder: Path, config: Any, rotated: int) -> dict[str, NDArray[np.float32]]:
    """Tensors that divide the frequencies of the rotary positions.

    "llama3" leaves high frequencies as they are, divides low ones by a factor, and goes over from
    one to the other between (Llama 3.1).
    """
    rope = config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if rope_type == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], dtype=np.float32)
            for length in ("long", "short")
        }
    if rope_type in ("default", "linear", "yarn"):
        return {}
    if rope_type != "llama3":
        raise UserError(
            f"{folder}: llama.cpp has no name for the rope_type {quotable(str(rope_type))} of "
            "config.json."
        )
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    places = np.arange(0, rotated, 2) / rotated
    wavelengths = 2 * math.pi * rope["rope_theta"] ** places
    turns = rope["original_max_position_embeddings"] / wavelengths
    unscaled = np.clip((turns - low) / (high - low), 0, 1)  # of a frequency that stays
    factors = 1 / ((1 - unscaled) / rope["factor"] + unscaled)
    return {"rope_freqs.weight": factors.astype(np.float32)}


class Tokenizer:
    """A tokenizer, as llama.cpp has it.

    Args:
        folder: with tokenizer.json.
        count: of the rows of the embeddings.

    Raises:
        UserError: there is none, or llama.cpp has no name for it.
    """

    def __init__(self, folder: Path, count: int) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"{folder}: it has no tokenizer.json, and a GGUF file holds the tokenizer. Save it "
                "there: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)."
            )
        self._folder = folder
        self._count = count
        self._json = read_json(path)
        model = self._json.get("model") or {}
        if model.get("type") != "BPE":
            raise UserError(
                f"{path}: a tokenizer of the type {quotable(str(model.get('type')))}; --to gguf "
                "takes BPE."
            )
        self._in_bytes = not model.get("byte_fallback")
        self._split = _split_of(self._json.get("pre_tokenizer")) if self._in_bytes else None
        if self._in_bytes and self._split is None:
            raise UserError(
                f"{path}: it splits a text in a way that --to gguf has no name for "
                f"({', '.join(sorted(set(_SPLITS.values())))} are known). llama.cpp's own "
                "convert_hf_to_gguf.py may know it."
            )

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Add the tokens, merges, special tokens and the chat template."""
        texts = [f"[PAD{number}]" for number in range(self._count)]
        token_types = [gguf.TokenType.UNUSED] * self._count
        for text, number in self._json["model"]["vocab"].items():
            if number < self._count:
                texts[number] = text
                token_types[number] = gguf.TokenType.NORMAL
                if not self._in_bytes and text.startswith("<0x") and len(text) == len("<0x00>"):
                    token_types[number] = gguf.TokenType.BYTE
        for token in self._json.get("added_tokens", ()):
            if (number := token["id"]) < self._count:
                texts[number] = token["content"]
                special = token["special"]
                token_types[number] = (
                    gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
                )
        unknown = self._json["model"].get("unk_token")
        if not self._in_bytes and unknown in texts:
            token_types[texts.index(unknown)] = gguf.TokenType.UNKNOWN
        if self._split is not None:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(self._split)
        else:
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            # A lower number was merged earlier.
            writer.add_token_scores([float(-number) for number in range(self._count)])
            normalizer = str(self._json.get("normalizer"))
            writer.add_add_space_prefix("Prepend" in normalizer)
        writer.add_token_list(texts)
        writer.add_token_types(token_types)
        special = gguf.SpecialVocab(self._folder, load_merges=self._in_bytes, n_vocab=self._count)
        special.add_special_token = {"bos": self._adds_bos} | special.add_special_token
        special.add_to_gguf(writer, quiet=True)

    @property
    def _adds_bos(self) -> bool:
        """Whether each text begins with a special token."""
        template = (self._json.get("post_processor") or {}).get("single") or [{}]
        return "SpecialToken" in template[0]


def _split_of(pre_tokenizer: Any) -> str | None:
    """llama.cpp's name for how a tokenizer of bytes splits a text; None if it has none here."""
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"] and steps[0].get("use_regex", True):
        return _SPLITS["GPT-2"]
    if types == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return _SPLITS["digits, GPT-2"]
    if types == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))
    return None
