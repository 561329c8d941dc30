"""Wiring: which rows and columns of a block's matrices belong to a head or a neuron. It is measured, not assumed.

The model is built from config.json without its weights. Each linear layer returns random outputs in place of products. The
gradient of a layer's inputs with respect to the outputs of the layers before it shows what depends on what. So the layout of
joined matrices (q, k and v in one; gate and up in one, as halves or in turn) needs no code for a family.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from emp_llm.common.errors import UserError, reason
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import run_on_text
from emp_llm.models.layers import Layer
from emp_llm.models.modules import body_of, find_blocks
from emp_llm.structure.units import Indices, Units

logger = logging.getLogger(__name__)
_TOKENS = 24  # of the random text; each neuron behind a ReLU is active in some of them
_NARROW = 4  # a part narrower than this share of the hidden states is a low-rank connection, not an MLP
_SAMPLES = 16  # features of an MLP whose place is measured; the others must follow the same rule


@dataclass(frozen=True)
class _Seen:
    """What one layer read and returned during the measurement."""

    layer: Layer
    inputs: Tensor
    outputs: Tensor


def find_units(architecture: Architecture, skeleton: Any, blocks: str | None = None) -> list[Units]:
    """The heads and neurons of all decoder blocks, block by block; single query heads, with their keys and values.

    Args:
        architecture: of the checkpoint.
        skeleton: the model, from `hollow_model`.
        blocks: name of the list of decoder blocks; None: detected.

    Raises:
        UserError: the model does not run on a text without its weights.
    """
    path, modules = find_blocks(skeleton, blocks)
    layers = [layer for layer in architecture.layers if layer.block is not None and layer.name.startswith(f"{path}.")]
    plain = {layer.name: layer for layer in layers if layer.expert is None and layer.kind in ("attention", "mlp")}
    every: list[Units] = []
    hidden = int(skeleton.config.get_text_config().hidden_size)
    with _random_products(skeleton, plain) as seen:
        for number, found in _blocks(skeleton, modules, seen):
            heads, neurons = _heads(found, number, skeleton), _neurons(found, number, hidden)
            every += [units for units in (heads, *neurons, *expert_units(layers, number)) if units is not None]
    return every


def hollow_model(build: Any) -> Any:
    """A model on the CPU whose matrices need no memory: all rows of a matrix are the same random ones.

    Args:
        build: returns the model; called with parameters on the meta device and buffers on the CPU.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    filled: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter not in filled:
                # Norms and biases get values of their own. Of a matrix, all rows are the same.
                shape = (1,) * (parameter.dim() - 1) + parameter.shape[-1:]
                value = 0.5 + torch.rand(shape, generator=generator)
                filled[parameter] = nn.Parameter(value.expand(parameter.shape), requires_grad=False)
            if parameter is not None:
                module._parameters[name] = filled[parameter]
    return model.eval()


def expert_units(layers: list[Layer], block: int) -> list[Units]:
    """The neurons of a mixture's experts in a block: one `Units` for each expert whose matrices are stored one by one."""
    by_expert: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        if layer.block == block and layer.expert is not None:
            by_expert.setdefault((layer.name.rpartition(".")[0], layer.expert.expert), []).append(layer)
    found = []
    for of_expert in by_expert.values():
        parameters = {layer.expert.parameter for layer in of_expert if layer.expert is not None}
        of_parameter = {name: [e for e in of_expert if e.expert and e.expert.parameter == name] for name in parameters}
        joined = [each for each in of_parameter.values() if len(each) == 2]
        single = [each[0] for each in of_parameter.values() if len(each) == 1]
        if len(joined) != 1 or len(single) != 1:
            continue
        (output,), sources = single, joined[0]
        assert output.expert is not None
        width = output.expert.inputs
        if all(e.expert is not None and e.expert.last - e.expert.first == width for e in sources):
            each = np.arange(width, dtype=np.int64)[:, None]
            found.append(Units("neurons", block, output, each, dict.fromkeys(sources, each), np.zeros(width, dtype=np.int64)))
    return found


def _blocks(model: Any, modules: nn.ModuleList, seen: list[_Seen]) -> Iterator[tuple[int, list[_Seen]]]:
    """Run the model on a random text; after each block, its number and what its layers read and returned."""
    ends: list[int] = []
    handles = [block.register_forward_hook(lambda *_: ends.append(len(seen))) for block in modules]
    length = min(_TOKENS, _context(model))
    ids = torch.randint(3, _vocabulary(model), (1, length), generator=torch.Generator().manual_seed(0))
    try:
        with torch.enable_grad():
            run_on_text(model, body_of(model), ids)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:  # of the model's own code
        raise UserError(
            f"--structure: {type(model).__name__} cannot be measured without its weights ({reason(error)})."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        yield number, seen[first:last]


@contextmanager
def _random_products(model: Any, layers: dict[str, Layer]) -> Iterator[list[_Seen]]:
    """Inside this context, linear layers return random outputs that depend on nothing; yields what they read and returned."""
    seen: list[_Seen] = []
    generator = torch.Generator().manual_seed(1)
    replaced = []
    for name, module in model.named_modules():
        own = layers.get(name)
        # A router that returns more than a product is left alone.
        if own is not None or type(module).forward in (nn.Linear.forward, Conv1D.forward):
            width = module.out_features if isinstance(module, nn.Linear) else module.nf

            def forward(inputs: Tensor, *_: Any, width: int = width, layer: Layer | None = own) -> Tensor:
                outputs = torch.randn(*inputs.shape[:-1], width, generator=generator).requires_grad_()
                if layer is not None:
                    seen.append(_Seen(layer, inputs, outputs))
                return outputs.clone()  # models write into outputs
        elif not isinstance(module, nn.Conv1d) and any(p.dim() > 2 for p in module.parameters(recurse=False)):  # all experts

            def forward(inputs: Tensor, *_: Any, **__: Any) -> Tensor:  # type: ignore[misc]
                return torch.randn(inputs.shape, generator=generator)
        else:
            continue
        module.forward = forward
        replaced.append(module)
    try:
        yield seen
    finally:
        for module in replaced:
            vars(module).pop("forward", None)


def _heads(found: list[_Seen], block: int, model: Any) -> Units | None:
    """The heads of a block's attention; None if its last layer does not read heads that depend on disjoint outputs."""
    found = [each for each in found if each.layer.kind == "attention"]
    if len(found) < 2:
        return None
    last = found[-1]
    config = model.config.get_text_config()
    number = next((n for n in (getattr(config, a, None) for a in ("num_attention_heads", "n_head")) if isinstance(n, int)), 0)
    width = last.inputs.shape[-1]
    if number < 1 or width % number:
        return None
    columns = np.arange(width, dtype=np.int64).reshape(number, -1)
    touched = [_touched(last.inputs, columns[head], found[:-1]) for head in range(number)]
    rows: dict[Layer, Indices] = {}
    places = np.arange(number, dtype=np.int64)
    for place, source in enumerate(found[:-1]):
        of_heads = [each[place] for each in touched]
        if not any(len(each) for each in of_heads):
            continue
        if len({len(each) for each in of_heads}) != 1:
            return None
        if all(np.array_equal(each, of_heads[0]) for each in of_heads) and number > 1:
            continue  # all heads read the same outputs: a latent, or one head of keys and values
        rows[source.layer] = np.stack(of_heads)
    if not rows or not _has_own_rows(rows, number):
        return None
    for each in rows.values():
        if len(np.unique(each)) < each.size:  # keys and values that several heads share
            places = _shared_places(each)
    return Units("heads", block, last.layer, columns, rows, places, heads=1, keys=1)


def _has_own_rows(rows: dict[Layer, Indices], number: int) -> bool:
    """Whether every head has outputs that no other head reads."""
    for each in rows.values():
        taken, times = np.unique(each, return_counts=True)
        if all(np.isin(each[head], taken[times == 1]).any() for head in range(number)):
            return True
    return False


def _shared_places(rows: Indices) -> Indices:
    """The number of the group of each head: heads are in a group if they share outputs."""
    taken, times = np.unique(rows, return_counts=True)
    shared = [frozenset(row[np.isin(row, taken[times > 1])].tolist()) for row in rows]
    order = {each: place for place, each in enumerate(dict.fromkeys(shared))}
    return np.array([order[each] for each in shared], dtype=np.int64)


def _neurons(found: list[_Seen], block: int, hidden: int) -> list[Units]:
    """The neurons of the MLPs of a block, each read by one layer that has sources with one output, or two, for each.

    Args:
        found: the layers of the block.
        block: its number.
        hidden: width of the hidden states, which the MLPs return.
    """
    found = [each for each in found if each.layer.kind == "mlp"]
    units = []
    for place, last in enumerate(found):
        width = last.inputs.shape[-1]
        if last.outputs.shape[-1] != hidden or _NARROW * width <= hidden:
            continue
        samples = np.unique(np.linspace(0, width - 1, _SAMPLES).astype(np.int64))
        touched = [_touched(last.inputs, samples[i : i + 1], found[:place]) for i in range(len(samples))]
        rows: dict[Layer, Indices] = {}
        for number, source in enumerate(found[:place]):
            layout = _layout(samples, [each[number] for each in touched], width, source.outputs.shape[-1])
            if layout is not None:
                rows[source.layer] = layout
        if rows:
            columns = np.arange(width, dtype=np.int64)[:, None]
            units.append(Units("neurons", block, last.layer, columns, rows, np.zeros(width, dtype=np.int64)))
    return units


def _layout(samples: Indices, touched: list[Indices], width: int, outputs: int) -> Indices | None:
    """The outputs of each neuron by the rule that the samples follow: one each, halves, or pairs; None if there is no such."""
    each = np.arange(width, dtype=np.int64)
    rules = {width: [each[:, None]], 2 * width: [np.stack([each, each + width], 1), np.stack([2 * each, 2 * each + 1], 1)]}
    for rule in rules.get(outputs, []):
        if all(np.array_equal(rule[sample], seen) for sample, seen in zip(samples, touched, strict=True)):
            return rule
    return None


def _touched(inputs: Tensor, columns: Indices, sources: list[_Seen]) -> list[Indices]:
    """For each source, its outputs on which some of these input features depend, in ascending order."""
    if not sources or not inputs.requires_grad:
        return [np.zeros(0, dtype=np.int64) for _ in sources]
    part = inputs[..., torch.from_numpy(columns)]
    weights = torch.randn(part.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((part * weights).sum(), [s.outputs for s in sources], retain_graph=True, allow_unused=True)
    none = torch.zeros(0, dtype=torch.int64)
    found = [
        none if each is None else torch.nonzero(each.reshape(-1, each.shape[-1]).abs().sum(0)).flatten() for each in gradients
    ]
    return [each.numpy() for each in found]


def _context(model: Any) -> int:
    lengths = [getattr(model.config.get_text_config(), name, None) for name in ("max_position_embeddings", "n_positions")]
    return min((n for n in lengths if isinstance(n, int) and n > 0), default=_TOKENS)


def _vocabulary(model: Any) -> int:
    return max(4, int(model.config.get_text_config().vocab_size))
