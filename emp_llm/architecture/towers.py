"""Towers: the language model of a multimodal model, and the encoders of images, video and sound beside it.

transformers marks every encoder with the inputs that it takes (`input_modalities`). The language tower is the part that holds
the input embeddings and the decoder blocks. All other parts, such as projectors, belong to the encoders.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from emp_llm.architecture.layers import MIXES_TOKENS, Tower, named_tower, tower_of

_CONNECTS = re.compile(r"projector|connector|aligner|multi_modal", re.IGNORECASE)
_HALF = re.compile(r"(?:^|\.)(encoder|decoder)(?=\.|$)")


@dataclass(frozen=True)
class BlockList:
    """A list of blocks.

    Attributes:
        path, modules: its name in the model, and the list.
        tower: to which it belongs.
        part: tells the layers of several lists apart ("encoder", "vision"); empty for the only list of a language model.
    """

    path: str
    modules: nn.ModuleList
    tower: Tower
    part: str = ""


@dataclass(frozen=True)
class Towers:
    """The towers of a model.

    Attributes:
        lists: of blocks; those of the language tower first.
        language: name of the module of the language tower; empty if it is the whole model.
        others: name of a module outside the language tower -> its tower.
    """

    lists: tuple[BlockList, ...]
    language: str
    others: dict[str, Tower]

    def of(self, name: str) -> Tower:
        """The tower of a module or parameter."""
        return tower_of(self.others, name)

    def place(self, name: str) -> tuple[BlockList, int, str] | None:
        """The list of blocks that holds a module, the number of its block, and its name there; None outside the blocks."""
        for blocks in self.lists:
            if name.startswith(f"{blocks.path}."):
                number, _, inside = name.removeprefix(f"{blocks.path}.").partition(".")
                return blocks, int(number), inside
        return None


def find_towers(model: nn.Module) -> Towers:
    """The towers of a model of any class, with or without weights. Lists without parameters are left out."""
    embedding = _embedding_of(model)
    encoders: dict[str, Tower] = {}
    lists: dict[str, nn.ModuleList] = {}
    _visit(model, "", embedding, encoders, lists)
    root = _language_root(model, embedding, encoders, lists)
    inside = {path: modules for path, modules in lists.items() if _within(path, root)}
    of_language = _with_attention(inside) if _is_encoder_decoder(model, root) else {}
    of_language = of_language or _largest(inside)
    own = [BlockList(path, modules, "language", _half(path, of_language)) for path, modules in of_language.items()]
    return Towers((*own, *_lists_of_encoders(model, encoders)), root, _others(model, root, encoders))


def parameters_of(module: nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _embedding_of(model: Any) -> str:
    """Name of the embedding of the token ids; empty if unknown."""
    getter = getattr(model, "get_input_embeddings", None)  # modules of other libraries have none
    try:
        embedding = None if getter is None else getter()
    except NotImplementedError:  # of a class that does not name its embedding; the size of the vocabulary finds it below
        embedding = None
    named = dict(model.named_modules())
    found = next((name for name, module in named.items() if module is embedding), "")
    if found or not hasattr(model, "config"):
        return found
    words = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    tables = (name for name, module in named.items() if isinstance(module, nn.Embedding) and module.num_embeddings == words)
    return next(tables, "")


def _visit(module: nn.Module, name: str, embedding: str, encoders: dict[str, Tower], lists: dict[str, nn.ModuleList]) -> None:
    """Collect the outermost encoders of other inputs than text, and the outermost lists of modules outside them."""
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if not parameters_of(child):
            continue
        tower = None if _within(embedding, path) else _tower_of_module(child, leaf)
        if tower is not None:
            encoders[path] = tower
        elif isinstance(child, nn.ModuleList):
            lists[path] = child
        else:
            _visit(child, path, embedding, encoders, lists)


def _tower_of_module(module: Any, leaf: str) -> Tower | None:
    """The tower that begins with a module; None if it reads text, or says nothing."""
    given = getattr(module, "input_modalities", None)
    modalities = {given} if isinstance(given, str) else set(given or ())
    if modalities and "text" not in modalities:
        return "audio" if "audio" in modalities else "vision"
    return "vision" if getattr(module, "main_input_name", "") == "pixel_values" else named_tower(leaf)


def _language_root(model: Any, embedding: str, encoders: dict[str, Tower], lists: dict[str, nn.ModuleList]) -> str:
    """The largest module that holds the embedding and a list of blocks, and no encoder; else the smallest with a list."""
    if not encoders or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return ""
    parts = embedding.split(".")[:-1]
    paths = [".".join(parts[: number + 1]) for number in range(len(parts))]
    holding = [path for path in paths if any(_within(name, path) for name in lists)]
    alone = [path for path in holding if not any(_within(encoder, path) for encoder in encoders)]
    return alone[0] if alone else holding[-1] if holding else ""


def _is_encoder_decoder(model: Any, root: str) -> bool:
    module = model.get_submodule(root) if root else model
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _with_attention(lists: dict[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """The lists of blocks that mix tokens."""
    return {path: modules for path, modules in lists.items() if any(map(_mixes_tokens, modules))}


def _mixes_tokens(block: nn.Module) -> bool:
    for name, module in block.named_modules():
        owner = type(block.get_submodule(name.rpartition(".")[0])).__name__
        if isinstance(module, nn.Linear) and (MIXES_TOKENS.search(name) or MIXES_TOKENS.search(owner)):
            return True
    return False


def _largest(lists: dict[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    path = max(lists, key=lambda path: parameters_of(lists[path]), default=None)
    return {} if path is None else {path: lists[path]}


def _half(path: str, lists: dict[str, nn.ModuleList]) -> str:
    """ "encoder" or "decoder", if a model has both; its name if there are other lists; empty for a single list."""
    if len(lists) < 2:
        return ""
    halves = {other: match[1] if (match := _HALF.search(other)) else other for other in lists}
    return halves[path] if len(set(halves.values())) == len(lists) else path


def _lists_of_encoders(model: nn.Module, encoders: dict[str, Tower]) -> Iterator[BlockList]:
    """The lists of blocks with attention in each encoder; the largest list of an encoder without attention."""
    found: list[tuple[str, nn.ModuleList, Tower]] = []
    for root, tower in encoders.items():
        lists: dict[str, nn.ModuleList] = {}
        _lists_within(model.get_submodule(root), root, lists)
        found += [(path, modules, tower) for path, modules in (_with_attention(lists) or _largest(lists)).items()]
    for path, modules, tower in found:
        alone = sum(other == tower for _, _, other in found) == 1
        yield BlockList(path, modules, tower, tower if alone else path.removeprefix("model."))


def _lists_within(module: nn.Module, name: str, lists: dict[str, nn.ModuleList]) -> None:
    for leaf, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            _lists_within(child, f"{name}.{leaf}", lists)
        elif parameters_of(child):
            lists[f"{name}.{leaf}"] = child


def _others(model: Any, root: str, encoders: dict[str, Tower]) -> dict[str, Tower]:
    """The encoders, and the parts outside the language tower and them, which connect the two."""
    others = dict(encoders)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    connects: Tower = "vision" if "vision" in encoders.values() else "audio"

    def visit(module: nn.Module, name: str) -> None:
        for leaf, _ in module.named_parameters(recurse=False) if root else ():
            others[f"{name}.{leaf}" if name else leaf] = connects
        for leaf, child in module.named_children():
            path = f"{name}.{leaf}" if name else leaf
            if path == root or path in encoders or not parameters_of(child) or any(part is head for part in child.modules()):
                continue
            if _within(root, path) or any(_within(encoder, path) for encoder in encoders):
                visit(child, path)
            elif root or _CONNECTS.search(leaf):
                others[path] = connects

    if encoders:
        visit(model, "")
    return others


def _within(name: str, root: str) -> bool:
    return not root or name == root or name.startswith(f"{root}.")
