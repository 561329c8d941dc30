"""Decoder blocks: the repeated layers of a causal language model, detected without knowledge of its family."""

from torch import nn

from emp_llm.common.errors import UserError


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The decoder blocks of a model: the outermost `nn.ModuleList` with the most parameters.

    Args:
        model: a causal language model, with or without weights.
        path: the list's name, if given by the user ("model.layers").

    Returns:
        The path of the list and the list.

    Raises:
        UserError: the model has no ModuleList that holds parameters, or none at `path`.
    """
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    if path is not None:
        return _named_blocks(model, path, [name for name, _ in lists])
    best = max(lists, key=lambda item: _parameters(item[1]), default=None)
    if best is None or _parameters(best[1]) == 0:
        raise UserError(
            f"{type(model).__name__}: found no decoder blocks (an nn.ModuleList that holds parameters). If there is such a "
            "list, name it with --blocks PATH."
        )
    return best


def body_of(model: nn.Module) -> nn.Module:
    """The model without its head: in small models with large vocabularies, the logits take most of the time."""
    body: nn.Module = getattr(model, "base_model", model)
    return body


def _named_blocks(model: nn.Module, path: str, known: list[str]) -> tuple[str, nn.ModuleList]:
    try:
        blocks = model.get_submodule(path)
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        lists = f"The lists of this model are: {', '.join(known)}." if known else "This model has none."
        raise UserError(f"--blocks {path!r} is not a list of modules (nn.ModuleList) of {type(model).__name__}. {lists}")
    return path, blocks


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
