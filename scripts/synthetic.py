"""A synthetic checkpoint of any size: a Llama of random bfloat16 weights, with the layer shapes
of a 7B model, or of a smaller one.
"""

import json
import math
from pathlib import Path

import torch

HIDDEN = 4096
INTERMEDIATE = 11008
VOCABULARY = 32000
_PIECE = 1 << 24  # random weights in memory


def make_checkpoint(
    folder: Path,
    gigabytes: float,
    shards: int = 2,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> int:
    """Write a checkpoint tensor by tensor, without a shard in memory.

    Args:
        folder: is created.
        gigabytes: the size is at least this: the embeddings and the head (0.5 GB) and as many
            blocks of 0.4 GB as needed.
        shards: the number of files.
        hidden, intermediate: sizes of the layers; `hidden` is a multiple of 128, the size of a
            head.

    Returns:
        Its size in bytes.
    """
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    ends = {
        "model.embed_tokens": (VOCABULARY, hidden),
        "lm_head": (VOCABULARY, hidden),
        "model.norm": (hidden,),
    }
    bytes_per_layer = 2 * sum(math.prod(shape) for shape in layer.values())
    bytes_of_ends = 2 * sum(math.prod(shape) for shape in ends.values())
    layers = max(1, math.ceil((gigabytes * 1e9 - bytes_of_ends) / bytes_per_layer))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in ends.items()}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    folder.mkdir()
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        _write_shard(folder / file, {name: shapes[name] for name in part})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in folder.iterdir())


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # aligns the weights, as the safetensors library does
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_PIECE, generator=generator).mul_(0.02).bfloat16()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            left = math.prod(shape)
            while left:
                # The same noise from another start: random enough for timing, and fast to create.
                start = int(torch.randint(0, _PIECE // 2, (1,), generator=generator))
                piece = noise[start : start + min(left, _PIECE // 2)]
                file.write(piece.view(torch.uint8).numpy().tobytes())
                left -= piece.numel()
