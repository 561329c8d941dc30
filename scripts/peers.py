"""Other codes that prune a model, for `bench_peers.py`, which runs this file in an environment of
its own. It imports nothing of emp-llm.

    python scripts/peers.py llm-compressor wanda|sparsegpt 0.5|2:4 MODEL TOKENS OUT
    python scripts/peers.py papers         wanda|sparsegpt 0.5|2:4 MODEL TOKENS OUT

TOKENS is a safetensors file with `tokens`, int64, shape (samples, length). `llm-compressor` calls
that package. `papers` is written from the equations of Wanda (Sun et al. 2024, arXiv 2306.11695)
and SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774) in the way of their own codes: `datasets`
reads the text in the same process; block by block, one sequence at a time; a pass that collects
statistics of all layers of a block, and a pass of the pruned block.
"""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
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


def main(line: list[str] | None = None) -> None:
    """Prune a model, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", choices=["llm-compressor", "papers"])
    parser.add_argument("method", choices=["wanda", "sparsegpt"])
    parser.add_argument("size", help="a sparsity, or N:M")
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("tokens", help="safetensors file")
    parser.add_argument("out", help="folder to write")
    options = parser.parse_args(line)
    prune = llm_compressor if options.code == "llm-compressor" else papers
    tokens = load_file(options.tokens)["tokens"]
    prune(options.method, options.size, options.model, tokens, options.out)


if __name__ == "__main__":
    main()
