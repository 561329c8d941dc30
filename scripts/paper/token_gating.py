"""Activations at inference: each token keeps the effective number of the hidden features of its
MLP. No weight changes.

    python scripts/paper/token_gating.py --model NAME [--text TEXT] [--betas B ...] [--block N]
    [--limit N] [--dtype TYPE]
        [--device-map MAP]

Hidden features are the inputs of down_proj, fc2 or c_proj; in a mixture, those of each expert. The
row of Algorithm 1 is the features of one token: its clip(floor(beta * N_eff), 1, N) largest stay,
and the others are zero for this token. Prints the perplexity for each beta beside the dense one,
and the share of features kept in each layer. It saves no time: the products are computed in full.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from emp_llm.calibration.texts import find_corpus
from emp_llm.common.errors import UserError
from emp_llm.common.tables import percent_cell, table
from emp_llm.evaluation.evaluate import block_length, perplexity, text_tokens
from emp_llm.evaluation.results import find_suite
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.models.local_model import find_model
from emp_llm.models.modules import find_stacks, inputs_of, model_layers
from emp_llm.selection.effective import effective_mask
from emp_llm.selection.rule import NonFiniteError, check_beta

_AT_A_TIME = 1 << 24  # features


@dataclass
class KeptFeatures:
    """The features of one layer that were kept: `kept` of all `tokens` together, of `width` for
    each token.
    """

    width: int
    tokens: int = 0
    kept: int = 0

    @property
    def fraction(self) -> float | None:
        """The mean over the tokens of the share kept; None for a layer that saw none."""
        return self.kept / (self.tokens * self.width) if self.tokens else None


def keep_effective_features(features: Tensor, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Set to zero all but the clip(floor(beta * N_eff), 1, N) largest |features| of each token.

    Args:
        features: floating, shape (..., N): the last dimension is a token's hidden features.
        beta: multiple of the effective number to keep.

    Returns:
        The pruned features, a new tensor of the same shape; and the number kept, int64, of that
        shape without the last dimension. It is -1 for a token whose features are NaN or infinite:
        they stay as they are.

    Raises:
        ValueError: beta is not a positive finite number.
    """
    rows = features.detach().reshape(-1, features.shape[-1])
    if rows.numel() == 0:
        return features.clone(), rows.new_zeros(features.shape[:-1], dtype=torch.int64)
    mask = torch.cat(
        [_mask(part, beta) for part in torch.split(rows, max(1, _AT_A_TIME // rows.shape[1]))]
    )
    kept = torch.where(torch.isfinite(rows).all(1), mask.sum(1), -1)
    return features.masked_fill(~mask.reshape(features.shape), 0), kept.reshape(features.shape[:-1])


def _mask(rows: Tensor, beta: float) -> Tensor:
    try:
        return effective_mask(rows, beta=beta)
    except NonFiniteError:
        mask = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
        finite = torch.isfinite(rows).all(1)
        if bool(finite.any()):
            mask[finite] = effective_mask(rows[finite], beta=beta)
        return mask


def hidden_readers(model: PreTrainedModel) -> dict[str, int]:
    """The number of hidden features by the layer that reads them, in the model's order.

    An MLP is the linear layers of a block, without attention and routers, that one module holds;
    experts are one MLP. One matrix maps hidden states to hidden features, or to as many features
    and as many gates; the reader is the last one that maps them back.

    Raises:
        UserError: there is none.
    """
    groups: dict[str, list[tuple[str, int, int]]] = {}  # module -> (matrix, inputs, outputs)
    for layer in model_layers(model):
        if layer.purpose == "mlp" and layer.tower == "language":
            module: Any = model.get_submodule(layer.name)
            outputs = module.out_features if isinstance(module, nn.Linear) else module.nf
            groups.setdefault(layer.name.rpartition(".")[0], []).append(
                (layer.name, inputs_of(model, layer), int(outputs))
            )
    for stack in find_stacks(model).values():
        if stack.tower == "language":
            groups.setdefault(stack.module, []).append((stack.name, stack.inputs, stack.outputs))
    size = getattr(model.config.get_text_config(), "hidden_size", None)
    found = {}
    for matrices in groups.values():
        for place, (name, inputs, outputs) in reversed(list(enumerate(matrices))):
            sources = [
                each for each in matrices[:place] + matrices[place + 1 :] if each[1] == outputs
            ]
            if any(each[2] in (inputs, 2 * inputs) for each in sources) and size in (None, outputs):
                found[name] = inputs
                break
    if not found:
        raise UserError(
            f"--model: {type(model).__name__} has no MLP with hidden features in its blocks (a "
            "linear layer that maps hidden states to features, and one that maps them back)."
        )
    return found


class _ExpertProducts(TorchFunctionMode):
    """Changes the inputs of every product with an expert's matrix.

    Args:
        stacks: name of the parameter that holds the matrices of all experts -> the parameter.
        change: takes the name and the inputs, shape (tokens, inputs), and returns others.
    """

    def __init__(self, stacks: dict[str, Tensor], change: Any) -> None:
        super().__init__()
        self._names = {stack.untyped_storage().data_ptr(): name for name, stack in stacks.items()}
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__):
            name = self._names.get(args[1].untyped_storage().data_ptr())
            if name is not None:
                args = (self._change(name, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def pruned_features(model: PreTrainedModel, beta: float) -> Iterator[dict[str, KeptFeatures]]:
    """Inside this context, each token keeps the effective number of hidden features of every MLP;
    yields the counts by layer.

    Args:
        model: its experts run one by one in this context.
        beta: multiple of the effective number to keep.

    Raises:
        UserError: the model has no MLP with hidden features.
    """
    counts = {name: KeptFeatures(width) for name, width in hidden_readers(model).items()}

    def prune(name: str, features: Tensor) -> Tensor:
        pruned, kept = keep_effective_features(features, beta)
        counts[name].tokens += int((kept >= 0).sum())
        counts[name].kept += int(kept.clamp(min=0).sum())
        return pruned

    parameters = dict(model.named_parameters())
    stacks = {name: parameters[name] for name in counts if name in parameters}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: (prune(name, args[0]), *args[1:])
        )
        for name in counts.keys() - stacks.keys()
    ]
    configs = [model.config, model.config.get_text_config()] if stacks else []
    before = [(each, each._experts_implementation) for each in configs]
    try:
        for each in configs:
            each._experts_implementation = "eager"
        with _ExpertProducts(stacks, prune):
            yield counts
    finally:
        for each, implementation in before:
            each._experts_implementation = implementation
        for handle in handles:
            handle.remove()


def main(line: list[str] | None = None) -> None:
    """Measure a model for each beta, and print the tables. A UserError ends it with exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model folder or Hub id")
    parser.add_argument(
        "--text",
        help="text of the perplexity; default: that of the suite perplexity, WikiText-2 test",
    )
    parser.add_argument(
        "--betas", type=float, nargs="+", default=[1.0], help="multiples of N_eff to keep"
    )
    parser.add_argument(
        "--block", type=int, help="tokens in a block; default: 2048, or the model's context"
    )
    parser.add_argument("--limit", type=int, help="blocks to measure; default: all")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--device-map", default="auto", help="auto, cpu or cuda:N")
    options = parser.parse_args(line)
    try:
        print(measured(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def measured(options: argparse.Namespace) -> str:
    """The tables: perplexity by beta, and the features kept in each layer."""
    for beta in options.betas:
        try:
            check_beta(beta)
        except ValueError as error:
            raise UserError(f"--betas: {error}.") from error
    corpus = find_suite("perplexity").corpus if options.text is None else find_corpus(options.text)
    assert corpus is not None
    folder = find_model(options.model).folder
    tokens = text_tokens(corpus, load_tokenizer(folder))
    model = load_model(folder, options.device_map, options.dtype)
    length = options.block or block_length(corpus, model.config)
    dense = perplexity(model, tokens, length, limit=options.limit).value
    rows = [["beta", "perplexity", "change %", "kept %"], ["dense", f"{dense:.3f}", "", "100.00"]]
    by_layer: dict[str, list[str]] = {}
    for beta in options.betas:
        with pruned_features(model, beta) as counts:
            value = perplexity(model, tokens, length, limit=options.limit).value
        for name, each in counts.items():
            by_layer.setdefault(name, []).append(percent_cell(each.fraction))
        seen = sum(each.tokens * each.width for each in counts.values())
        kept = sum(each.kept for each in counts.values()) / seen
        rows.append(
            [f"{beta:g}", f"{value:.3f}", f"{100 * (value / dense - 1):+.2f}", percent_cell(kept)]
        )
    layers = [["kept in %, mean over the tokens", *(f"beta {beta:g}" for beta in options.betas)]]
    layers += [[name, *cells] for name, cells in by_layer.items()]
    return f"{table(rows)}\n\n{table(layers)}"


if __name__ == "__main__":
    main()
