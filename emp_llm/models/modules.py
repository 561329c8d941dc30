"""The modules of a model, with or without weights: its towers, lists of decoder blocks, linear
layers and stacks of experts.

transformers marks every encoder of images, video or sound with the inputs that it takes
(`input_modalities`), and knows the decoder. The language tower is the part that holds the decoder
and no encoder. All other parts, such as projectors, belong to the encoders.

The matrices of all experts of a block lie in parameters of three dimensions, which are no linear
layers (`nn.Linear`).

transformers renames, merges or transposes some weights while it loads them. Its tables say how, so
`find_names` can tell where a checkpoint stores each weight. Three conversions are supported: new
names, experts stacked into one parameter (in order, gate before up), and transposed stacks. Tensors
with any other conversion are never pruned.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.pytorch_utils import Conv1D

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError, shorten_list
from emp_llm.common.machine import exact_device, in_float64
from emp_llm.models.layers import (
    CONNECTS,
    HALF,
    IS_MLP,
    MIXES_TOKENS,
    ExpertSlice,
    Layer,
    Purpose,
    Shape,
    Tower,
    is_router,
    named_tower,
    tower_of,
    within,
)

Values = TypeVar("Values", Tensor, NDArray[Any])
_NUMBER = re.compile(r"\.(\d+)(?=\.)")  # of an expert
Lists = dict[str, nn.ModuleList]


@dataclass(frozen=True)
class BlockList:
    """A list of blocks.

    Attributes:
        path, modules: its name in the model, and the list.
        tower: the tower to which it belongs.
        label: tells it apart from other lists ("encoder", "vision"); empty for the only list of a
            language model.
    """

    path: str
    modules: nn.ModuleList
    tower: Tower
    label: str = ""


@dataclass(frozen=True)
class Towers:
    """The towers of a model.

    Attributes:
        lists: the lists of blocks; those of the language tower first.
        language: name of the module of the language tower; empty if it is the whole model.
        others: name of a module outside the language tower -> its tower.
    """

    lists: tuple[BlockList, ...]
    language: str
    others: dict[str, Tower]

    def place(self, name: str) -> tuple[BlockList, int, str] | None:
        """The list of blocks that holds a module, the number of its block, and its name there;
        None outside the blocks.
        """
        for blocks in self.lists:
            if name.startswith(f"{blocks.path}."):
                number, _, inside = name.removeprefix(f"{blocks.path}.").partition(".")
                return blocks, int(number), inside
        return None


@dataclass(frozen=True)
class ExpertStack:
    """A parameter of shape (experts, outputs, inputs), or (experts, inputs, outputs) if
    `transposed`, in a decoder block.

    Attributes:
        name: the parameter's name in the model.
        block: number of the decoder block.
        transposed: None if unknown.
        shape: the shape of the parameter.
        tower, block_list: those of its layers.
    """

    name: str
    block: int
    transposed: bool | None
    shape: Shape
    tower: Tower = "language"
    block_list: str = ""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def outputs(self) -> int:
        return self.shape[2 if self.transposed else 1]

    @property
    def inputs(self) -> int:
        return self.shape[1 if self.transposed else 2]


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The decoder blocks of a model: of the lists of its language tower, the one with the most
    parameters.

    Args:
        model: a language model, with or without weights.
        path: the list's name, if given by the user ("model.layers").

    Returns:
        The path of the list and the list.

    Raises:
        UserError: the model has no list of blocks, or none at `path`.
    """
    lists = block_lists(model, path).lists
    path, modules = _largest_list(
        {blocks.path: blocks.modules for blocks in lists if blocks.tower == lists[0].tower}
    ).popitem()
    return path, modules


def block_lists(model: nn.Module, path: str | None = None) -> Towers:
    """The towers of a model with their lists of blocks, or only the list at `path`. Errors are
    those of `find_blocks`.
    """
    towers = find_towers(model)
    if path is None and not towers.lists:
        raise UserError(
            f"{type(model).__name__}: found no decoder blocks (an nn.ModuleList). If it has a "
            "list, name it with --blocks PATH."
        )
    if path is None:
        return towers
    try:
        blocks = model.get_submodule(path)
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        known = [
            name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
        ]
        lists = (
            f"The lists of this model are: {shorten_list(known)}."
            if known
            else "This model has none."
        )
        raise UserError(
            f"--blocks {path!r} is not a list of modules (nn.ModuleList) of "
            f"{type(model).__name__}. {lists}"
        )
    tower = tower_of(towers.others, path)
    return replace(
        towers, lists=(BlockList(path, blocks, tower, "" if tower == "language" else tower),)
    )


def body_of(model: nn.Module) -> nn.Module:
    """The model without its head: in small models with large vocabularies, the logits take most
    of the time.
    """
    body: nn.Module = getattr(model, "base_model", model)
    return body


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder, whose two halves both read text."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def parameters_of(module: nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def model_layers(model: nn.Module, towers: Towers | None = None) -> list[Layer]:
    """All linear layers (nn.Linear and its subclasses, GPT-2's Conv1D) and embeddings of a model,
    in its order.

    Args:
        model: a model of any class, with or without weights.
        towers: the result of `block_lists`, if it is known.
    """
    towers = towers or block_lists(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = []
    for name, module in model.named_modules():
        transposed = isinstance(module, Conv1D)
        if isinstance(module, nn.Embedding):
            layers.append(Layer(name, "embedding", None, tower=tower_of(towers.others, name)))
        elif isinstance(module, (nn.Linear, Conv1D)):
            place = towers.place(name)
            grouped = _is_grouped(module)
            if place is None:
                outside: Purpose = "head" if module is head else "other"
                tower = tower_of(towers.others, name)
                layers.append(Layer(name, outside, None, transposed, tower=tower, grouped=grouped))
            else:
                blocks, number, inside = place
                purpose = _purpose_in_block(blocks.modules[number], inside, module)
                of_list = blocks.tower, blocks.label
                layers.append(Layer(name, purpose, number, transposed, None, *of_list, grouped))
    return layers


def _is_grouped(module: nn.Module) -> bool:
    """Whether a linear layer multiplies each group of its inputs by rows of its own (DeepSeek-V4's
    output projection), by the attributes with which such classes say so.
    """
    if type(module).forward is nn.Linear.forward:
        return False
    numbers = (getattr(module, name, 1) for name in ("n_groups", "num_groups", "groups"))
    return any(isinstance(number, int) and number > 1 for number in numbers)


def _purpose_in_block(block: nn.Module, name: str, module: nn.Module) -> Purpose:
    """The purpose of a linear layer of a block, by its shape and the names and classes of the
    modules around it.
    """
    weight: Any = module.weight
    outputs, inputs = weight.T.shape if isinstance(module, Conv1D) else weight.shape
    around = name.split(".")[:-1]
    if is_router(name, outputs, inputs):
        return "router"
    classes = []
    for component in around:
        block = block.get_submodule(component)
        classes.append((component, type(block).__name__))
    if classes and IS_MLP.search(classes[-1][1]):  # "mixer" of Nemotron-H, RecurrentGemmaMlp
        return "mlp"
    mixes = any(MIXES_TOKENS.search(text) for names in classes for text in names)
    return "attention" if mixes else "mlp"


def find_stacks(model: nn.Module, towers: Towers | None = None) -> dict[str, ExpertStack]:
    """The parameters that hold one matrix per expert, by name, in the model's order; arguments
    are those of `model_layers`.
    """
    towers = towers or block_lists(model)
    config: Any = getattr(model, "config", None)
    hidden = None if config is None else getattr(config.get_text_config(), "hidden_size", None)
    stacks = {}
    for name, module in model.named_modules():
        place = towers.place(name)
        if place is None or isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            continue
        shapes = {
            leaf: tuple(parameter.shape)
            for leaf, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3 and min(parameter.shape) > 1 and "bias" not in leaf
        }
        if not shapes:
            continue
        blocks, number, _ = place
        transposed = _transposed(module, list(shapes.values()), hidden)
        for leaf, shape in shapes.items():
            stack = ExpertStack(
                f"{name}.{leaf}", number, transposed, shape, blocks.tower, blocks.label
            )
            stacks[stack.name] = stack
    return stacks


def _transposed(
    module: nn.Module, shapes: list[tuple[int, ...]], hidden: int | None
) -> bool | None:
    """Whether a module's experts are stored as (inputs, outputs), by its attribute or else by
    its shapes; None if unknown.
    """
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    if len(shapes) == 1:
        sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
        as_outputs = shapes[0][1:] == sizes
        as_inputs = shapes[0][1:] == sizes[::-1]
    else:  # the first maps from the hidden states, the last back to them
        as_outputs = shapes[0][2] == hidden and shapes[-1][1] == hidden
        as_inputs = shapes[0][1] == hidden and shapes[-1][2] == hidden
    return as_inputs if as_outputs != as_inputs else None


def rows_in(parameter: Values, layer: Layer) -> Values:
    """The part of a parameter's values that is a layer's weight, shape (outputs, inputs): a
    view. Filters are flat.
    """
    if layer.expert is None:
        if parameter.ndim > 2:
            return parameter.reshape(parameter.shape[0], -1)
        return parameter.T if layer.transposed else parameter
    matrix: Values = parameter[layer.expert.expert]
    return (matrix.T if layer.expert.transposed else matrix)[layer.expert.first : layer.expert.last]


def weight_of(model: nn.Module, layer: Layer) -> Tensor:
    """A layer's weight in a model, shape (outputs, inputs): a view that can be changed in place."""
    if layer.expert is None:
        weight: Any = model.get_submodule(layer.name).weight
    else:
        weight = model.get_parameter(layer.parameter)
    values: Tensor = weight.data
    return rows_in(values, layer)


def bias_of(model: nn.Module, layer: Layer) -> Tensor | None:
    """A layer's bias in a model, shape (outputs,); None for a layer without one, and for
    experts.
    """
    bias = (
        None if layer.expert is not None else getattr(model.get_submodule(layer.name), "bias", None)
    )
    return bias.data if isinstance(bias, Tensor) else None


def inputs_of(model: nn.Module, layer: Layer) -> int:
    """Number of a layer's input features, even if its weight is quantised or offloaded."""
    if layer.expert is not None:
        return layer.expert.inputs
    module: Any = model.get_submodule(layer.name)
    return int(module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0])


def as_created(weight: Tensor) -> AbstractContextManager[None]:
    """The context in which a weight may be changed, or get other values: torch.inference_mode for
    one that was made in it.
    """
    made_so: AbstractContextManager[None] = torch.inference_mode(weight.is_inference())
    return made_so


def set_to_zero(weight: Tensor, removed: Tensor) -> None:
    """Set weights to zero, in place; `removed` is bool, of the same shape. By their bits: torch
    cannot fill FP8, and on CPUs it fills at a twentieth of this speed.
    """
    of_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    with as_created(weight):
        bits = weight.detach().view(of_size[weight.element_size()])
        bits.bitwise_and_(removed.logical_not().to(bits.dtype).neg_())


def find_towers(model: nn.Module) -> Towers:
    """The towers of a model of any class, with or without weights. Lists without parameters are
    left out.
    """
    # Modules of other libraries have no such method.
    known = getattr(model, "get_decoder", lambda: model)()
    decoder = next((name for name, module in model.named_modules() if module is known), "")
    encoders: dict[str, Tower] = {}
    lists: Lists = {}
    _collect(model, "", lists, encoders, decoder)
    root = _language_root(model, decoder, encoders, lists)
    inside = {path: modules for path, modules in lists.items() if within(path, root)}
    chosen = (
        _with_attention(inside) if is_encoder_decoder(model.get_submodule(root)) else {}
    ) or _largest_list(inside)
    all_lists = [
        BlockList(path, modules, "language", _label(path, list(chosen)))
        for path, modules in chosen.items()
    ]
    of_encoders: list[BlockList] = []
    for encoder, tower in encoders.items():
        inside = {}
        _collect(model.get_submodule(encoder), encoder, inside)
        chosen = _with_attention(inside) or _largest_list(inside)
        of_encoders += [
            BlockList(path, modules, tower, path.removeprefix("model."))
            for path, modules in chosen.items()
        ]
    numbers = Counter(blocks.tower for blocks in of_encoders)
    for blocks in of_encoders:
        alone = numbers[blocks.tower] == 1
        all_lists.append(replace(blocks, label=blocks.tower) if alone else blocks)
    return Towers(tuple(all_lists), root, _others(model, root, encoders) if encoders else {})


def _collect(
    module: nn.Module,
    name: str,
    lists: Lists,
    encoders: dict[str, Tower] | None = None,
    decoder: str = "",
) -> None:
    """Collect the outermost lists of modules; with `encoders`, also the outermost encoders of other
    inputs than text.

    No list is collected inside an encoder. A module that holds the decoder is no encoder.
    """
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if not parameters_of(child):
            continue
        tower = None if encoders is None or within(decoder, path) else _tower_of_module(child, leaf)
        if encoders is not None and tower is not None:
            encoders[path] = tower
        elif isinstance(child, nn.ModuleList):
            lists[path] = child
        else:
            _collect(child, path, lists, encoders, decoder)


def _tower_of_module(module: Any, leaf: str) -> Tower | None:
    """The tower that begins with a module; None if it reads text, or says nothing."""
    given = getattr(module, "input_modalities", None)
    modalities = {given} if isinstance(given, str) else set(given or ())
    if modalities and "text" not in modalities:
        return "audio" if "audio" in modalities else "vision"
    return (
        "vision" if getattr(module, "main_input_name", "") == "pixel_values" else named_tower(leaf)
    )


def _language_root(model: nn.Module, decoder: str, encoders: dict[str, Tower], lists: Lists) -> str:
    """The largest module that holds the decoder and no encoder of other inputs than text; the whole
    model if it has no such encoder, or is an encoder-decoder.
    """
    if not encoders or is_encoder_decoder(model):
        return ""
    if any(within(encoder, decoder) for encoder in encoders):
        decoder = next(iter(_largest_list(lists)), "").rpartition(".")[0]
    parts = decoder.split(".")
    paths = (".".join(parts[: number + 1]) for number in range(len(parts)))
    return next(
        (path for path in paths if not any(within(encoder, path) for encoder in encoders)), decoder
    )


def _with_attention(lists: Lists) -> Lists:
    """The lists of blocks that mix tokens."""
    return {path: modules for path, modules in lists.items() if any(map(_mixes_tokens, modules))}


def _mixes_tokens(block: nn.Module) -> bool:
    for name, module in block.named_modules():
        owner = type(block.get_submodule(name.rpartition(".")[0])).__name__
        if isinstance(module, nn.Linear) and (
            MIXES_TOKENS.search(name) or MIXES_TOKENS.search(owner)
        ):
            return True
    return False


def _largest_list(lists: Lists) -> Lists:
    path = max(lists, key=lambda path: parameters_of(lists[path]), default=None)
    return {} if path is None else {path: lists[path]}


def _label(path: str, paths: list[str]) -> str:
    """The label of a list of blocks of the language tower: "encoder" or "decoder" if there are
    both, empty for a single list, else its path.
    """
    if len(paths) < 2:
        return ""
    halves = {}
    for other in paths:
        match = HALF.search(other)
        halves[other] = match[1] if match else other
    return halves[path] if len(set(halves.values())) == len(paths) else path


def _others(model: Any, root: str, encoders: dict[str, Tower]) -> dict[str, Tower]:
    """Name of a module -> its tower, for encoders and for what connects them with the language
    tower.
    """
    others = dict(encoders)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    connects: Tower = "vision" if "vision" in encoders.values() else "audio"

    def visit(module: nn.Module, name: str) -> None:
        for leaf, _ in module.named_parameters(recurse=False) if root else ():
            others[f"{name}.{leaf}" if name else leaf] = connects
        for leaf, child in module.named_children():
            path = f"{name}.{leaf}" if name else leaf
            if (
                path == root
                or path in encoders
                or not parameters_of(child)
                or any(module is head for module in child.modules())
            ):
                continue
            if within(root, path) or any(within(encoder, path) for encoder in encoders):
                visit(child, path)
            elif root or CONNECTS.search(leaf):
                others[path] = connects

    visit(model, "")
    return others


@dataclass(frozen=True)
class StoredNames:
    """The weights of a model in a checkpoint.

    Attributes:
        names: parameter or buffer -> stored tensor, for those stored one to one.
        experts: the layer and the stored matrix of each matrix of an expert, in the model's order.
        missing: parameters without a counterpart in the checkpoint.
        unused: stored tensors that are no part of the model, and further copies of tied weights.
    """

    names: dict[str, str]
    experts: list[tuple[Layer, Matrix]]
    missing: list[str]
    unused: list[str]


@dataclass(frozen=True)
class _Piece:
    """A stored tensor that becomes a part of a stack.

    Attributes:
        key: its name.
        expert: number of its expert; None: it holds all experts.
        position: among the stored tensors of an expert's matrix.
        transposed: it is transposed while loading.
    """

    key: str
    expert: int | None
    position: int
    transposed: bool


def find_names(
    model: nn.Module, checkpoint: Checkpoint, stacks: dict[str, ExpertStack]
) -> StoredNames:
    """Match a model's parameters with a checkpoint's tensors.

    Args:
        model: a model of transformers, with or without weights.
        checkpoint: its weights.
        stacks: the result of `find_stacks`.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict().keys()
    values: dict[str, Tensor] = parameters | {
        name: buffer for name, buffer in model.named_buffers() if name in saved
    }
    prefix = getattr(model, "base_model_prefix", "")
    names: dict[str, str] = {}
    renamed: list[str] = []
    for key in checkpoint.tensors:
        candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
        name = next((candidate for candidate in candidates if candidate in values), None)
        if name is not None:
            names[name] = key
        else:
            renamed.append(key)
    converted, pieces = _converted(model, renamed, values)
    names |= converted
    for name in stacks.keys() & names.keys():
        pieces[name].append(_Piece(names[name], None, 0, False))
    # Tied weights have two names and are stored once. They are one parameter until accelerate has
    # offloaded them.
    tied = getattr(model, "all_tied_weights_keys", {})  # name -> the weight that it is tied to
    stored_as: dict[Any, str] = {}
    copies = []
    for name, key in names.items():
        weight = tied.get(name, name)
        if stored_as.get(weight, key) != key or stored_as.get(id(values[name]), key) != key:
            copies.append(key)
        stored_as[weight] = stored_as[id(values[name])] = key
    for name, parameter in parameters.items():
        stored = stored_as.get(tied.get(name, name)) or stored_as.get(id(parameter))
        if name not in names and stored is not None:
            names[name] = stored
    experts = [
        pair
        for name, stack in stacks.items()
        for pair in _matrices(stack, pieces[name], checkpoint)
    ]
    used = {*names.values(), *(piece.key for parts in pieces.values() for piece in parts)}
    unused = [key for key in renamed if key not in used]
    # A tensor of unknown use may become an absent parameter by an unsupported conversion.
    if not_ignored(model, "unexpected", unused):
        return StoredNames(names, experts, [], unused + copies)
    absent = (name for name in parameters if name not in names and name not in pieces)
    return StoredNames(names, experts, not_ignored(model, "missing", absent), unused + copies)


def not_ignored(model: nn.Module, problem: str, names: Iterable[str]) -> list[str]:
    """The names that transformers does not tolerate as "missing" or "unexpected"."""
    patterns = {
        r"rotary_emb\.inv_freq",
        *(getattr(model, f"_keys_to_ignore_on_load_{problem}", None) or ()),
    }
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _converted(
    model: Any, keys: list[str], values: dict[str, Tensor]
) -> tuple[dict[str, str], defaultdict[str, list[_Piece]]]:
    """Stored tensors that transformers renames or merges while loading (it stores GPT-NeoX's
    lm_head as embed_out).
    """
    names: dict[str, str] = {}
    pieces: defaultdict[str, list[_Piece]] = defaultdict(list)
    if not keys:
        return names, pieces
    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [
        transform for transform in transforms if not isinstance(transform, WeightConverter)
    ]
    for key in keys:
        renamed, merged = rename_source_key(
            key, renamings, converters, model.base_model_prefix, values
        )
        if renamed not in values:
            continue
        if merged is None:
            names[renamed] = key
            continue
        converter = next(
            candidate for candidate in converters if merged in candidate.source_patterns
        )
        piece = _piece(key, converter.source_patterns.index(merged), converter)
        if piece is not None:
            pieces[renamed].append(piece)
    return names, pieces


def _piece(key: str, position: int, converter: Any) -> _Piece | None:
    """A stored tensor as a part of a stack; None if its conversion is more than stacking or
    transposing.
    """
    if len(converter.target_patterns) != 1:
        return None
    steps = [
        (type(step).__name__, *(getattr(step, name, None) for name in ("dim", "dim0", "dim1")))
        for step in converter.operations
    ]
    transpose = [("Transpose", None, 1, 2)]
    if steps == transpose or steps == []:
        return (
            _Piece(key, None, 0, steps == transpose)
            if len(converter.source_patterns) == 1
            else None
        )
    stacked = ("MergeModulelist", 0, None, None)
    if steps == [stacked, ("Concatenate", 1, None, None)] or (
        steps == [stacked] and len(converter.source_patterns) == 1
    ):
        numbers = _NUMBER.findall(key)
        return _Piece(key, int(numbers[-1]), position, False) if numbers else None
    return None


def _matrices(
    stack: ExpertStack, pieces: list[_Piece], checkpoint: Checkpoint
) -> list[tuple[Layer, Matrix]]:
    """The layers and stored matrices of a stack's experts; empty if the stored tensors do not
    make up the whole stack.
    """
    transposed = stack.transposed
    if transposed is None:
        return []
    purpose: Purpose = "attention" if "attention" in stack.module else "mlp"

    def layer(leaf: str, expert: int, first: int, last: int) -> Layer:
        place = ExpertSlice(stack.name, expert, transposed, first, last, stack.inputs)
        name = f"{stack.module}.{expert}.{leaf}".removesuffix(".weight")
        return Layer(name, purpose, stack.block, transposed, place, stack.tower, stack.block_list)

    if len(pieces) == 1 and pieces[0].expert is None:  # stored as a stack, possibly transposed
        stored = checkpoint.tensors[pieces[0].key]
        turned = pieces[0].transposed
        experts, rows, columns = stack.shape
        if stored.shape != ((experts, columns, rows) if turned else stack.shape):
            return []
        leaf = stack.name.rpartition(".")[2]
        every = (layer(leaf, expert, 0, stack.outputs) for expert in range(experts))
        return [
            (member, Matrix(stored, transposed != turned, expert))
            for expert, member in enumerate(every)
        ]
    matrices = []
    filled = dict.fromkeys(range(stack.shape[0]), 0)
    for piece in sorted(
        pieces, key=lambda piece: (-1 if piece.expert is None else piece.expert, piece.position)
    ):
        matrix = Matrix(checkpoint.tensors[piece.key], transposed)
        if (
            piece.expert not in filled
            or len(matrix.stored.shape) != 2
            or matrix.columns != stack.inputs
        ):
            return []
        first = filled[piece.expert]
        filled[piece.expert] = last = first + matrix.rows
        leaf = piece.key.removesuffix(".weight").rpartition(".")[2]
        matrices.append((layer(leaf, piece.expert, first, last), matrix))
    return matrices if set(filled.values()) == {stack.outputs} else []


def finite_logits(_: Tensor, logits: Tensor) -> Tensor:
    """For `generate`, before a token is chosen: UserError if a logit is NaN or infinite. One of
    minus infinity is a token that is ruled out.
    """
    if not bool((logits < math.inf).all()):
        raise UserError(
            "the model's logits are not finite, so it writes nothing of use. Its values may exceed "
            "its dtype; try --dtype float32 or bfloat16."
        )
    return logits


@torch.no_grad()
def mean_losses(logits: Tensor, batch: Tensor) -> Tensor:
    """Mean next-token loss of each sequence: float64, shape (batch,). A few positions are converted
    to float32 at a time.

    Args:
        logits: shape (batch, tokens, vocabulary).
        batch: token ids, shape (batch, tokens).
    """
    piece = 32
    logits = logits[:, :-1]
    labels = batch[:, 1:].to(logits.device)
    exact = exact_device(logits.device)
    sums = torch.zeros(batch.shape[0], dtype=torch.float64, device=exact)
    for first in range(0, labels.shape[1], piece):
        log_probabilities = torch.log_softmax(logits[:, first : first + piece].float(), dim=-1)
        picked = log_probabilities.gather(2, labels[:, first : first + piece, None])
        sums -= in_float64(picked).sum((1, 2))
    return (sums / labels.shape[1]).cpu()
