"""Tiny random models of more than one tower, and encoder-decoder models, with what the package
has to find in them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from transformers import PreTrainedModel

TEXT: dict[str, Any] = tiny.GLU | {"intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2}
TEXT["vocab_size"] = 264  # bytes, and the ids of images
HEADS = {"head_dim": 8}
CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "num_heads": 4,
    "patch_size": 8,
}
ROPE = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
}
IDS = {
    "image_token_id": 260,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
}
GEMMA_IDS = {
    "image_token_index": 260,
    "boi_token_index": 261,
    "eoi_token_index": 262,
    "mm_tokens_per_image": 4,
}
BART = {
    "vocab_size": 264,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
}
T5 = {
    "vocab_size": 264,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A model family, and what has to be found in it, written down by hand.

    Attributes:
        config, values: class and arguments of its config.
        mlp, number: the stored names of its "mlp" targets, and how many these are.
        vision: the same for `--tower vision`; None for a model without.
        dense: the parts outside its language tower, in the model.
    """

    config: str
    values: dict[str, Any]
    mlp: str
    number: int
    vision: tuple[str, int] | None = None
    dense: tuple[str, ...] = ()

    @property
    def auto(self) -> Any:
        """The auto class of transformers with which a user loads it."""
        return (
            transformers.AutoModelForSeq2SeqLM
            if self.vision is None
            else transformers.AutoModelForImageTextToText
        )


def _mlp(prefix: str, names: str, layers: str = "[01]") -> str:
    return rf"{prefix}\.{layers}\.({names})\.weight"


_GLU = r"mlp\.(gate|up|down)_proj"
_VISUAL = ("model.visual",)
_TOWER = ("model.vision_tower", "model.multi_modal_projector")
FAMILIES: dict[str, Family] = {
    "llava": Family(
        "LlavaConfig",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": CLIP | {"model_type": "clip_vision_model"},
            "image_token_index": 260,
        },
        _mlp(r"language_model\.model\.layers", _GLU),
        6,
        (_mlp(r"vision_tower\.(vision_model\.)?encoder\.layers", r"mlp\.fc[12]", "[012]"), 6),
        _TOWER,
    ),
    "qwen2_vl": Family(
        "Qwen2VLConfig",
        {
            "text_config": TEXT | ROPE,
            "vision_config": QWEN | {"embed_dim": 32, "mlp_ratio": 2},
            **IDS,
        },
        _mlp(r"model\.layers", _GLU),
        6,
        (_mlp(r"visual\.blocks", r"mlp\.fc[12]", "[012]"), 6),
        _VISUAL,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLConfig",
        {"text_config": TEXT | ROPE, "vision_config": QWEN | {"fullatt_block_indexes": [1]}, **IDS},
        _mlp(r"model\.layers", _GLU),
        6,
        (_mlp(r"visual\.blocks", _GLU, "[012]"), 9),
        _VISUAL,
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig",
        {
            "text_config": TEXT | HEADS | ROPE,
            "vision_config": QWEN
            | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **IDS,
        },
        _mlp(r"model\.language_model\.layers", _GLU),
        6,
        (_mlp(r"model\.visual\.blocks", r"mlp\.linear_fc[12]", "[012]"), 6),
        _VISUAL,
    ),
    "gemma3": Family(
        "Gemma3Config",
        {
            "text_config": TEXT
            | HEADS
            | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
            "vision_config": CLIP,
            **GEMMA_IDS,
        },
        _mlp(r"language_model\.model\.layers", _GLU),
        6,
        (_mlp(r"vision_tower\.(vision_model\.)?encoder\.layers", r"mlp\.fc[12]", "[012]"), 6),
        _TOWER,
    ),
    "mistral3": Family(
        "Mistral3Config",
        {
            "text_config": TEXT | HEADS | {"model_type": "mistral"},
            "vision_config": CLIP | HEADS | {"model_type": "pixtral"},
            "image_token_index": 260,
        },
        _mlp(r"language_model\.model\.layers", _GLU),
        6,
        (
            _mlp(
                r"vision_tower\.transformer\.layers", r"feed_forward\.(gate|up|down)_proj", "[012]"
            ),
            9,
        ),
        _TOWER,
    ),
    "llama4": Family(
        "Llama4Config",
        {
            "text_config": TEXT
            | HEADS
            | {
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 64,
            },
            "vision_config": CLIP
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            "image_token_index": 260,
        },
        r"language_model\.model\.layers\.[01]\.feed_forward\.((shared_expert\.)?(gate|up|down)_proj\.weight"
        r"|experts\.(gate_up|down)_proj)",
        8,
        (_mlp(r"vision_model\.model\.layers", r"mlp\.fc[12]", "[012]"), 6),
        ("vision_model", "multi_modal_projector"),
    ),
    "t5": Family(
        "T5Config",
        T5,
        r"(encoder|decoder)\.block\.[01]\.layer\.[12]\.DenseReluDense\.(wi|wo)\.weight",
        8,
    ),
    "t5-gated": Family(
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        r"(encoder|decoder)\.block\.[01]\.layer\.[12]\.DenseReluDense\.(wi_[01]|wo)\.weight",
        12,
    ),
    "bart": Family(
        "BartConfig", BART, r"model\.(encoder|decoder)\.layers\.[01]\.fc[12]\.weight", 8
    ),
}
MULTIMODAL = tuple(name for name, family in FAMILIES.items() if family.vision is not None)
ENCODER_DECODER = tuple(name for name, family in FAMILIES.items() if family.vision is None)


def make_multimodal(folder: Path, name: str) -> Path:
    """A random model of a family with a byte-level tokenizer, in several shards; returns its
    folder.
    """
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.values)
    model = tiny.random_model(family.auto, config, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB")
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


def load_own(folder: Path, name: str) -> PreTrainedModel:
    """The model as a user of transformers loads it; the experts of a mixture run one by one."""
    return FAMILIES[name].auto.from_pretrained(folder).eval()
