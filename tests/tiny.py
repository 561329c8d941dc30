"""Tiny random models of many families, with a tokenizer, created in milliseconds; shared by the
tests.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
GLU = _COMMON | {"intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GLU),
    "llama-tied": ("LlamaConfig", GLU | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", GLU | {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", GLU),
    "qwen3": ("Qwen3Config", GLU | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", GLU | {"head_dim": 8, "sliding_window": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        GLU
        | {
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", GLU | {"pad_token_id": 0}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 128},
    ),
    "opt": (
        "OPTConfig",
        _COMMON | {"ffn_dim": 80, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        _COMMON | {"intermediate_size": 80, "max_position_embeddings": 128},
    ),
    "mixtral": ("MixtralConfig", GLU | {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        GLU
        | {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}
MIXTURES = ("mixtral", "qwen3_moe")


def make_model(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_size: str = "60KB",
) -> Path:
    """A random model of a family with a byte-level tokenizer, in several shards; returns its
    folder.
    """
    name, values = FAMILIES[family]
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, name)(**(values | ids))
    model = random_model(transformers.AutoModelForCausalLM, config, dtype, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(folder)
    return folder


def random_model(auto: Any, config: Any, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model of a configuration. Its weights are drawn in float32: torch 2.6 draws zeros in
    bfloat16.
    """
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=dtype)
    torch.manual_seed(seed)
    model.load_state_dict(auto.from_config(config, dtype=torch.float32).state_dict())
    return model


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_blocks(source: Path, folder: Path, count: int) -> Path:
    """The first blocks of a model, in two shards, with its tokenizer; returns their folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=count)
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=size * 3 // 5)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's shards, by name."""
    return {
        name: tensor
        for shard in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
