"""Other codes that prune a model, for `bench_peers.py`, which runs this file in an environment of
its own. It imports nothing of emp-llm.

    python scripts/peers.py llm-compressor wanda|sparsegpt 0.5|2:4 MODEL TOKENS OUT
    python scripts/peers.py papers         wanda|sparsegpt 0.5|2:4 MODEL TOKENS OUT
    python scripts/peers.py units          METHOD          NUMBER  MODEL TOKENS OUT

TOKENS is a safetensors file with `tokens`, int64, shape (samples, length). `llm-compressor` calls
that package. `papers` is written from the equations of Wanda (Sun et al. 2024, arXiv 2306.11695)
and SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774) in the way of their own codes: `datasets`
reads the text in the same process; block by block, one sequence at a time; a pass that collects
statistics of all layers of a block, and a pass of the pruned block.

`units` removes neurons or layers of a Llama, and writes an ordinary smaller checkpoint. NUMBER says
how many layers stay, or how many neurons in each layer. METHOD is written from the equations of

    shortgpt    Men et al. 2024, arXiv 2403.03853: the layers of the lowest influence go
    replaceme   Shopkhoev et al. 2025, arXiv 2505.02819: layers in a row go; a linear map instead
    flap        An et al. 2023, arXiv 2312.11983: neurons of the lowest fluctuation go; a bias
    2ssp        Sandri et al. 2025, arXiv 2501.17771: neurons of the lowest mean norm go
    llm-pruner  Ma et al. 2023, arXiv 2305.11627: neurons of the lowest Taylor score go

All layers keep the same number of neurons, because servers load nothing else. So FLAP's standard
scores, which compare layers, change nothing here. 2SSP's second stage removes whole attentions,
which the config of a Llama cannot say, and is left out. LLM-Pruner's score is that of the first
order, and all layers are pruned.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

DAMPING = 0.01
BLOCK = 128  # columns


def llm_compressor(method: str, size: str, model: str, tokens: Tensor, out: str) -> None:
    """Prune by `llmcompressor.oneshot`, with its defaults."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier

    modifier = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}[method]
    mask: dict[str, Any] = {"sparsity": 0.5, "mask_structure": size} if ":" in size else {}
    recipe = modifier(
        targets=["Linear"], ignore=["re:.*lm_head"], **(mask or {"sparsity": float(size)})
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    text = Dataset.from_dict(
        {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    )
    oneshot(
        model=loaded,
        tokenizer=AutoTokenizer.from_pretrained(model),
        dataset=text,
        recipe=recipe,
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
    )
    # As an ordinary checkpoint, which every code here loads.
    type(loaded).save_pretrained(loaded, out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


class First(Exception):
    """The first block was called."""


def read_wikitext(model: str, samples: int, length: int) -> Tensor:
    """The first tokens of WikiText-2's training split, shape (samples, length)."""
    from datasets import load_dataset

    wanted = samples * length
    rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")["text"]
    text = "\n\n".join(rows)[: 20 * wanted]  # the whole split would take longer
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    return torch.tensor(ids[:wanted]).view(samples, length)


@torch.no_grad()
def papers(method: str, size: str, model: str, tokens: Tensor, out: str) -> None:
    """Prune block by block by the equations of the papers."""
    if not torch.equal(read_wikitext(model, *tokens.shape), tokens):
        raise SystemExit("the text is not the one that the other codes get")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    blocks = loaded.model.layers
    hidden, arguments = first_inputs(loaded, blocks[0], tokens)
    for block in blocks:
        layers = [each for each in block.modules() if isinstance(each, nn.Linear)]
        sums: dict[nn.Module, Tensor] = {}

        def collect(layer: nn.Module, given: Any, _: Any, sums: Any = sums) -> None:
            x = given[0].flatten(0, -2).float()
            new = x.T @ x if method == "sparsegpt" else x.square().sum(0)
            sums[layer] = sums[layer] + new if layer in sums else new

        handles = [layer.register_forward_hook(collect) for layer in layers]
        for each in hidden:
            run(block, each, arguments)
        for handle in handles:
            handle.remove()
        for layer in layers:
            prune = sparsegpt if method == "sparsegpt" else wanda
            layer.weight.copy_(prune(layer.weight.float(), sums.pop(layer), size))
        hidden = [run(block, each, arguments) for each in hidden]
    loaded.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def first_inputs(
    model: nn.Module, block: nn.Module, tokens: Tensor
) -> tuple[list[Tensor], dict[str, Any]]:
    """The hidden states that enter the first block, and its other arguments."""
    hidden: list[Tensor] = []
    arguments: dict[str, Any] = {}

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        hidden.append(args[0])
        arguments.update(kwargs)
        raise First

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    for ids in tokens:
        with contextlib.suppress(First):
            model(input_ids=ids[None], use_cache=False)
    handle.remove()
    return hidden, arguments


def run(block: Callable[..., Any], hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The output of a block."""
    output = block(hidden, **arguments)
    hidden_after: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_after


def keep(scores: Tensor, size: str) -> Tensor:
    """The mask of the weights that stay in each row, or in each group of M."""
    if ":" in size:
        kept, group = map(int, size.split(":"))
        parts = scores.reshape(len(scores), -1, group)
        best = parts.topk(kept, -1).indices
        return torch.zeros_like(parts, dtype=torch.bool).scatter_(-1, best, True).view_as(scores)
    count = scores.shape[1] - int(scores.shape[1] * float(size))
    best = scores.topk(count, 1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def wanda(weight: Tensor, squares: Tensor, size: str) -> Tensor:
    """|W| ||X||, the largest of each row."""
    return weight * keep(weight.abs() * squares.sqrt(), size)


def sparsegpt(weight: Tensor, hessian: Tensor, size: str) -> Tensor:
    """Algorithm 1 of the paper: blocks of columns, masks by (w / U_jj)^2."""
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    weight[:, dead] = 0
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    factor = torch.linalg.cholesky(hessian)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        part = weight[:, start:end].clone()
        diagonal = factor.diagonal()[start:end]
        mask = torch.empty_like(part, dtype=torch.bool)
        if ":" not in size:
            scores = (part / diagonal).square()
            removed = int(scores.numel() * float(size))
            mask = scores > scores.flatten().sort().values[removed - 1]
        errors = torch.zeros_like(part)
        for column in range(end - start):
            if ":" in size and column % int(size.split(":")[1]) == 0:
                group = slice(column, column + int(size.split(":")[1]))
                mask[:, group] = keep((part[:, group] / diagonal[group]).square(), size)
            kept = part[:, column] * mask[:, column]
            error = (part[:, column] - kept) / diagonal[column]
            row = factor[start + column, start + column : end]
            part[:, column:] -= error[:, None] * row
            part[:, column] = kept
            errors[:, column] = error
        weight[:, start:end] = part
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight


def units(method: str, number: str, model: str, tokens: Tensor, out: str) -> None:
    """Remove neurons or layers, so that so many stay."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    UNITS[method](loaded, tokens, int(number))
    loaded.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


@contextlib.contextmanager
def hooks(*handles: Any) -> Iterator[None]:
    """Remove hooks at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def passes(model: Any, tokens: Tensor, seen: dict[Any, Tensor]) -> Iterator[list[Tensor]]:
    """The hidden states of each sequence, shape (length, width): before the first layer, and after
    each. `seen` is emptied after each sequence.
    """
    states: list[Tensor] = []

    def note(_: nn.Module, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        states.extend(each[0] for each in ([] if states else [given[0]]) + [hidden])

    with hooks(*(layer.register_forward_hook(note) for layer in model.model.layers)):
        for ids in tokens:
            states.clear()
            model(input_ids=ids[None], use_cache=False)
            yield states
            seen.clear()


def distance(one: Tensor, other: Tensor) -> float:
    """1 - cosine, mean over the tokens."""
    return 1 - float(functional.cosine_similarity(one.double(), other.double(), -1).mean())


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Remove all other layers."""
    model.model.layers = nn.ModuleList(model.model.layers[number] for number in kept)
    model.config.num_hidden_layers = len(kept)


@torch.no_grad()
def shortgpt(model: Any, tokens: Tensor, number: int) -> None:
    """Block Influence: 1 - cosine between the input and the output of a layer."""
    influence = torch.zeros(len(model.model.layers), dtype=torch.float64)
    for states in passes(model, tokens, {}):
        influence += torch.tensor([distance(*pair) for pair in pairwise(states)])
    keep_layers(model, sorted(influence.topk(number).indices.tolist()))


@torch.no_grad()
def replaceme(model: Any, tokens: Tensor, number: int) -> None:
    """The layers behind layer i go whose input and output are nearest; then, with M the outputs of
    the MLP of layer i and Y what they are added to, min_T ||M T + Y - L||^2, L the hidden states
    behind the layers that go. T becomes a part of the down projection of layer i.
    """
    removed = len(model.model.layers) - number
    cuts = torch.zeros(number, dtype=torch.float64)
    for states in passes(model, tokens, {}):
        ends = states[1:]
        cuts += torch.tensor([distance(ends[at], ends[at + removed]) for at in range(number)])
    at = int(cuts.argmin())
    layer = model.model.layers[at]
    width = model.config.hidden_size
    gram = torch.zeros(width, width, dtype=torch.float64)
    right = torch.zeros_like(gram)
    seen: dict[Any, Tensor] = {}
    with hooks(
        layer.mlp.register_forward_hook(lambda _, __, output: seen.update(added=output)),
        layer.post_attention_layernorm.register_forward_hook(
            lambda _, given, __: seen.update(rest=given[0])
        ),
    ):
        for states in passes(model, tokens, seen):
            added = seen["added"][0].double()
            gram += added.T @ added
            right += added.T @ (states[at + 1 + removed] - seen["rest"][0].double())
    linear = torch.linalg.lstsq(gram, right).solution
    down = layer.mlp.down_proj.weight
    down.copy_(linear.T @ down.double())
    keep_layers(model, [*range(at + 1), *range(at + 1 + removed, number + removed)])


def keep_neurons(model: Any, scores: Sequence[Tensor], number: int) -> list[Tensor]:
    """Keep the neurons of the highest scores of each layer; returns the others."""
    removed = []
    for layer, score in zip(model.model.layers, scores, strict=True):
        order = score.argsort(descending=True, stable=True)
        kept = order[:number].sort().values
        removed.append(order[number:])
        mlp = layer.mlp
        for linear, dimension in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
            linear.weight = nn.Parameter(linear.weight.data.index_select(dimension, kept))
    model.config.intermediate_size = number
    return removed


@torch.no_grad()
def activations(model: Any, tokens: Tensor) -> list[dict[str, Tensor]]:
    """Of the neurons of each layer: the mean and the variance of their activations over all
    tokens, and the mean over the sequences of their L2 norms.
    """
    sums: list[dict[str, Tensor]] = [{} for _ in model.model.layers]

    def note(_: nn.Module, given: Any, found: dict[str, Tensor]) -> None:
        x = given[0][0].double()
        new = {"sum": x.sum(0), "squares": x.square().sum(0), "norm": x.norm(dim=0)}
        for name, value in new.items():
            found[name] = found[name] + value if name in found else value

    with hooks(
        *(
            layer.mlp.down_proj.register_forward_pre_hook(partial(note, found=found))
            for layer, found in zip(model.model.layers, sums, strict=True)
        )
    ):
        for ids in tokens:
            model(input_ids=ids[None], use_cache=False)
    count = tokens.numel()
    return [
        {
            "mean": found["sum"] / count,
            "variance": (found["squares"] - found["sum"].square() / count) / (count - 1),
            "norm": found["norm"] / len(tokens),
        }
        for found in sums
    ]


@torch.no_grad()
def flap(model: Any, tokens: Tensor, number: int) -> None:
    """Variance of a neuron times the squared norm of its column of the down projection. What the
    removed neurons give on average becomes a bias.
    """
    found = activations(model, tokens)
    columns = [layer.mlp.down_proj.weight.double() for layer in model.model.layers]
    pairs = list(zip(found, columns, strict=True))
    scores = [each["variance"] * weight.square().sum(0) for each, weight in pairs]
    removed = keep_neurons(model, scores, number)
    for layer, (each, weight), gone in zip(model.model.layers, pairs, removed, strict=True):
        mlp = layer.mlp
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):  # a config has all or none
            linear.bias = nn.Parameter(linear.weight.new_zeros(len(linear.weight)))
        mlp.down_proj.bias.copy_(weight[:, gone] @ each["mean"][gone])
    model.config.mlp_bias = True


def two_ssp(model: Any, tokens: Tensor, number: int) -> None:
    """The mean over the sequences of the L2 norm of a neuron's activations."""
    keep_neurons(model, [each["norm"] for each in activations(model, tokens)], number)


def llm_pruner(model: Any, tokens: Tensor, number: int) -> None:
    """|w dL/dw|, summed over the gate row, the up row and the down column of a neuron."""
    keep_neurons(model, taylor_scores(model, tokens), number)


def taylor_scores(model: Any, tokens: Tensor) -> list[Tensor]:
    """The scores of the neurons of each layer, by the gradients of the summed loss."""
    model.requires_grad_(False)
    mlps = [layer.mlp for layer in model.model.layers]
    weights = [each.weight for mlp in mlps for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    for ids in tokens:
        model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.backward()
        for weight, gradient in zip(weights, gradients, strict=True):
            gradient.add_(weight.grad)
            weight.grad = None
    terms = [
        (weight.detach() * gradient).abs()
        for weight, gradient in zip(weights, gradients, strict=True)
    ]
    return [
        gate.sum(1) + up.sum(1) + down.sum(0)
        for gate, up, down in zip(terms[::3], terms[1::3], terms[2::3], strict=True)
    ]


UNITS = {
    "shortgpt": shortgpt,
    "replaceme": replaceme,
    "flap": flap,
    "2ssp": two_ssp,
    "llm-pruner": llm_pruner,
}


def main(line: list[str] | None = None) -> None:
    """Prune a model, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", choices=["llm-compressor", "papers", "units"])
    parser.add_argument("method", choices=["wanda", "sparsegpt", *UNITS])
    parser.add_argument("size", help="a sparsity, or N:M; of units, how many stay")
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("tokens", help="safetensors file")
    parser.add_argument("out", help="folder to write")
    options = parser.parse_args(line)
    if (options.code == "units") != (options.method in UNITS):
        parser.error(f"{options.code} has no method {options.method}.")
    prune = {"llm-compressor": llm_compressor, "papers": papers, "units": units}[options.code]
    tokens = load_file(options.tokens)["tokens"]
    prune(options.method, options.size, options.model, tokens, options.out)


if __name__ == "__main__":
    main()
