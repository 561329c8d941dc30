"""Decoder blocks: the repeated layers of a language model, detected without knowledge of its family."""

from dataclasses import replace

from torch import nn

from emp_llm.architecture.towers import BlockList, Towers, find_towers, parameters_of
from emp_llm.common.errors import UserError


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The decoder blocks of a model: of the lists of its language tower, the one with the most parameters.

    Args:
        model: a language model, with or without weights.
        path: the list's name, if given by the user ("model.layers").

    Returns:
        The path of the list and the list.

    Raises:
        UserError: the model has no list of blocks, or none at `path`.
    """
    lists = block_lists(model, path).lists
    tower = lists[0].tower
    best = max((blocks for blocks in lists if blocks.tower == tower), key=lambda blocks: parameters_of(blocks.modules))
    return best.path, best.modules


def block_lists(model: nn.Module, path: str | None = None) -> Towers:
    """The towers of a model with their lists of blocks, or only the list at `path`. Errors are those of `find_blocks`."""
    towers = find_towers(model)
    if path is not None:
        modules = _named_blocks(model, path)
        tower = towers.of(path)
        return replace(towers, lists=(BlockList(path, modules, tower, "" if tower == "language" else tower),))
    if not towers.lists:
        raise UserError(
            f"{type(model).__name__}: found no decoder blocks (an nn.ModuleList that holds parameters). If there is such a "
            "list, name it with --blocks PATH."
        )
    return towers


def body_of(model: nn.Module) -> nn.Module:
    """The model without its head: in small models with large vocabularies, the logits take most of the time."""
    body: nn.Module = getattr(model, "base_model", model)
    return body


def _named_blocks(model: nn.Module, path: str) -> nn.ModuleList:
    try:
        blocks = model.get_submodule(path)
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        known: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in known):
                known.append(name)
        lists = f"The lists of this model are: {', '.join(known)}." if known else "This model has none."
        raise UserError(f"--blocks {path!r} is not a list of modules (nn.ModuleList) of {type(model).__name__}. {lists}")
    return blocks
