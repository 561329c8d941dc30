"""The structure read off conventional names, compared with the model's class: all causal language
models of transformers.

    python scripts/check_conventional.py [MODEL_TYPE ...]

emp-llm reads the structure of most models off the names and shapes of their weights, without
importing their classes. Here each class is built on the meta device with two blocks and its default
sizes. If its names are conventional, both ways must give the same layers in the same order, of the
same kinds. The exit code is 1 if a model differs.
"""

import argparse
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor
from emp_llm.common.errors import UserError, count_of
from emp_llm.models.architecture import Architecture, conventional


class NamedCheckpoint(Checkpoint):
    """The names and shapes of a model's weights, without files."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.folder = Path(model.config.model_type)
        self._config: dict[str, Any] = model.config.to_dict() | {
            "architectures": [type(model).__name__]
        }
        tied = bool(self._config.get("tie_word_embeddings"))
        shapes = {
            name: tuple(weight.shape)
            for name, weight in model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
        self.tensors = {
            name: StoredTensor(name, Path("-"), "BF16", shape, 0, 0)
            for name, shape in shapes.items()
        }

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._config


def main(line: list[str] | None = None) -> None:
    """Compare, and print the models with conventional names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="default: all")
    types = parser.parse_args(line).types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    transformers.logging.set_verbosity_error()
    followers = []
    differ = []
    unbuilt = []
    for kind in types:
        try:
            config = transformers.AutoConfig.for_model(kind)
            config.num_hidden_layers = 2
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:  # a default config that its own class refuses
            unbuilt.append(f"{kind} ({type(error).__name__})")
            continue
        checkpoint = NamedCheckpoint(model)
        found = conventional(checkpoint)
        if found is None:
            continue
        followers.append(kind)
        try:
            exact = Architecture.of_model(checkpoint, model)
        except UserError as error:
            differ.append(f"{kind} ({error})")
            continue
        if found.layers != exact.layers or found.block_shapes != exact.block_shapes:
            differ.append(kind)
    print(f"transformers {transformers.__version__}: {count_of(len(types), 'model type')}")
    print(f"conventional ({len(followers)}): {', '.join(followers)}")
    print(f"not built ({len(unbuilt)}): {', '.join(unbuilt)}")
    print(f"different ({len(differ)}): {', '.join(differ) or 'none'}")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
