"""The size of a model, from its config.json alone: of the weightless model that transformers builds from it."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.hub.local_model import find_config

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# The names of the number of experts that a token passes through, in the configs of mixtures.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a model.

    Attributes:
        name: of the model, as the user gave it.
        parameters: number of all parameters; tied ones count once.
        embeddings: of the input embeddings and of the head; tied ones count once.
        head: weights that the logits of a token are computed with.
        in_blocks, largest_block: parameters of all decoder blocks, and of the largest.
        active: parameters of the blocks that a token passes through; fewer than `in_blocks` in a mixture of experts.
        layers: number of decoder blocks.
        hidden_size: width of the hidden states.
        shapes: (outputs, inputs, number) of the linear layers in blocks, each expert's among them.
        vocabulary: number of tokens.
        context: longest sequence in tokens; None if the config does not say.
        experts: of a block, for a mixture; else 0.
        dtype: of the checkpoint.
        fp8: the weights of the blocks are stored in 8 bits.
    """

    name: str
    parameters: int
    embeddings: int
    head: int
    in_blocks: int
    largest_block: int
    active: int
    layers: int
    hidden_size: int
    shapes: tuple[tuple[int, int, int], ...]
    vocabulary: int
    context: int | None
    experts: int
    dtype: str
    fp8: bool = False

    def bytes_of(self, parameters: int, dtype: str = "auto") -> int:
        """Bytes of a number of parameters in a dtype; "auto" is the checkpoint's."""
        return parameters * self.itemsize(dtype)

    def itemsize(self, dtype: str = "auto") -> int:
        """Bytes of a number."""
        return _BYTES[self.dtype if dtype == "auto" else dtype]

    def weight_bytes(self, dtype: str = "auto") -> int:
        """Bytes of all weights in the dtype in which the model runs."""
        return self.bytes_of(self.parameters, dtype)

    @property
    def widest_input(self) -> int:
        """Largest number of inputs of a linear layer in a block."""
        return max((inputs for _, inputs, _ in self.shapes), default=0)

    @property
    def file_bytes(self) -> int:
        """Bytes of the checkpoint."""
        return self.weight_bytes() - (self.in_blocks * (self.itemsize() - 1) if self.fp8 else 0)


@cache
def model_size(name: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelSize:
    """The size of a model, found once for each name. Of a Hub repository, only config.json is downloaded.

    Args:
        name: folder or Hub id.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run code from the model repository.

    Raises:
        UserError: there is no such model, its config.json is missing or cannot be fetched, or transformers cannot build it.
    """
    from emp_llm.architecture.skeleton import build_skeleton

    folder = find_config(name, revision, trust_remote_code)
    model = build_skeleton(folder, trust_remote_code)
    try:
        return _size_of(name, model)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _size_of(name: str, model: "PreTrainedModel") -> ModelSize:
    from emp_llm.architecture.blocks import block_lists
    from emp_llm.architecture.experts import find_stacks
    from emp_llm.architecture.towers import parameters_of
    from emp_llm.execution.loading import max_context

    lists = block_lists(model).lists
    blocks = [block for each in lists for block in each.modules]
    text = model.config.get_text_config()
    stacks = find_stacks(model).values()
    shapes = _linear_shapes(blocks)
    for stack in stacks:
        shapes[stack.outputs, stack.inputs] += stack.shape[0]
    experts = max((stack.shape[0] for stack in stacks), default=0)
    chosen = next((getattr(text, key) for key in _CHOSEN if isinstance(getattr(text, key, None), int)), experts)
    in_stacks = sum(stack.shape[0] * stack.shape[1] * stack.shape[2] for stack in stacks)
    in_blocks = sum(parameters_of(each.modules) for each in lists)
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(table.weight): table.weight.numel() for table in tables if getattr(table, "weight", None) is not None}
    head = getattr(tables[1], "weight", None)
    return ModelSize(
        name=name,
        parameters=model.num_parameters(),
        embeddings=sum(weights.values()),
        head=0 if head is None else head.numel(),
        in_blocks=in_blocks,
        largest_block=max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks),
        active=in_blocks - (in_stacks * max(0, experts - chosen) // experts if experts else 0),
        layers=len(blocks),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        shapes=tuple((*shape, number) for shape, number in shapes.items()),
        vocabulary=int(getattr(text, "vocab_size", 0) or 0),
        context=max_context(model.config),
        experts=experts,
        dtype=_dtype_of(model.config),
        fp8=_quantization(model.config) == "fp8",
    )


def _linear_shapes(blocks: "list[nn.Module]") -> Counter[tuple[int, int]]:
    """(outputs, inputs) of the linear layers of blocks, and how many there are of each."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    shapes: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                shapes[module.out_features, module.in_features] += 1
            elif isinstance(module, Conv1D):
                shapes[module.weight.shape[1], module.weight.shape[0]] += 1
    return shapes


def _dtype_of(config: Any) -> str:
    """The dtype that a config names, or that of its text model; float32 if it names none, as transformers assumes."""
    for part in (config, config.get_text_config()):
        name = str(getattr(part, "dtype", None)).removeprefix("torch.")
        if name in _BYTES:
            return name
    return "float32"


def _quantization(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
