"""Decoder blocks: the repeated layers of a causal language model, found by structure and not by family."""

from torch import nn

from emp_llm.models.errors import UserError


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder blocks of a model: its `nn.ModuleList` with the most parameters that lies in no other.

    Returns:
        The path of the list ("model.layers") and the list.

    Raises:
        UserError: the model has no ModuleList that holds parameters.
    """
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    best = max(lists, key=lambda item: _parameters(item[1]), default=None)
    if best is None or _parameters(best[1]) == 0:
        raise UserError(f"{type(model).__name__}: found no decoder blocks; looked for an nn.ModuleList that holds parameters.")
    return best


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
