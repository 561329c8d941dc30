"""Experts and layers of every mixture of transformers: of tiny models of all classes, half of them
are removed.

    python scripts/check_experts.py [--structure layers] [MODEL_TYPE ...]

Each class is built small, with random weights. The command removes half of its experts by magnitude
(with --structure layers: half of its layers by the loss) and compares the logits of the written
model with those of the dense one, whose router is closed for them. A class is "removed" if they
agree, else the command's message follows. The exit code is 1 after a traceback.
"""

import argparse
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from emp_llm import prune
from emp_llm.common.errors import UserError, count_of
from emp_llm.models.modules import find_stacks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
tiny = import_module("tiny")

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "vocab_size": 256,
}
_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_SHARED = {
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
}
_CHOICE = {
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_OTHERS = {
    "hybrid_override_pattern": "E*E*",
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 48,
    "moe_topk": 2,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = 8


def main(line: list[str] | None = None) -> None:
    """Build, prune, and print what became of every class."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "types", nargs="*", metavar="MODEL_TYPE", help="default: all with stacks of experts"
    )
    parser.add_argument("--structure", default="experts", choices=("experts", "layers"))
    args = parser.parse_args(line)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, list[str]] = {"removed": [], "refused": [], "not built": [], "traceback": []}
    for kind in args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            model = _tiny(kind)
            if model is None:
                found["not built"].append(kind)
                continue
            if (
                not any("expert" in name for name in find_stacks(model))
                and not args.types
                and args.structure == "experts"
            ):
                continue
            try:
                model.save_pretrained(Path(folder) / "model")
                tiny.make_tokenizer().save_pretrained(Path(folder) / "model")
                answer = _pruned(Path(folder), args.structure)
            except UserError as error:
                answer = f"refused: {error}".replace(folder, "")
            except Exception:
                traceback.print_exc()
                answer = "traceback"
            found[answer.partition(":")[0]].append(kind)
            print(f"{kind}: {answer}", flush=True)
    print(
        "; ".join(
            f"{answer}: {count_of(len(kinds), 'model type')}" for answer, kinds in found.items()
        )
    )
    print(f"not built: {', '.join(found['not built'])}")
    sys.exit(1 if found["traceback"] else 0)


def _tiny(kind: str) -> Any:
    """A model of a class with eight experts and small sizes; None if its config refuses them."""
    config_class = transformers.CONFIG_MAPPING[kind]
    torch.manual_seed(0)
    try:
        default = config_class()
        known = set(default.to_dict())
        values = {
            name: value
            for each in (_SIZES, _HEADS, _LATENT, _SHARED, _CHOICE, _OTHERS)
            for name, value in each.items()
        }
        values |= dict.fromkeys(_EXPERTS, _USED)
        values = {
            name: value
            for name, value in values.items()
            if name in known or name in getattr(default, "attribute_map", {})
        }
        for name in known:  # a value for each layer
            value = getattr(default, name, None)
            if (
                isinstance(value, list)
                and len(value) == getattr(default, "num_hidden_layers", 0)
                and len(value) > 4
            ):
                values[name] = value[-4:]
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config_class(**values))
        if sum(each.numel() for each in model.parameters()) > 20e6:
            return None
        model = transformers.AutoModelForCausalLM.from_config(
            config_class(**values), dtype=torch.float32
        ).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.1)
        model(torch.arange(32)[None], use_cache=False)
    except Exception:  # of the model's own code
        return None
    return model


def _pruned(folder: Path, structure: str) -> str:
    """Remove half, and say whether the logits agree."""
    values: dict[str, Any] = {"method": "magnitude"}
    if structure == "layers":
        values = {"calibration": "demo", "samples": 4, "seqlen": 32}
    values |= {"structure": structure, "sparsity": 0.5, "dtype": "float32", "quiet": True}
    report: Any = prune(folder / "model", output=folder / "out", **values)
    return f"removed: difference {report.structure.difference:.1e}"


if __name__ == "__main__":
    main()
