"""Effective Model Pruning on one page: a Llama is pruned by its own scores, in plain torch and
transformers.

    python examples/emp.py MODEL TEXT OUTPUT

Every row of the MLP's matrices keeps its floor(N_eff) weights with the largest scores |W| * ||X||,
where ||X|| are the norms of the row's inputs over the first 32 sequences of the text (EMP with
Wanda's scores, arXiv 2509.25606, Algorithm 1). The next 32 sequences give the perplexity before and
after. `emp-llm prune` makes the same masks; tests/test_example.py compares them.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH = 512
BATCH = 4
SEQUENCES = 32


def effective_mask(scores: Tensor) -> Tensor:
    """Which weights stay: the floor(N_eff) largest scores of each row; of equal scores, the
    first.
    """
    omega = scores.double() / scores.double().sum(1, keepdim=True)
    n_eff = 1 / omega.square().sum(1, keepdim=True)
    rank = scores.sort(dim=1, descending=True, stable=True).indices.argsort(1)
    return rank < n_eff.floor().clamp(min=1)


@torch.no_grad()
def perplexity(model: torch.nn.Module, batches: list[Tensor]) -> float:
    """exp of the mean loss per token."""
    return float(
        torch.stack([model(input_ids=batch, labels=batch).loss.double() for batch in batches])
        .mean()
        .exp()
    )


@torch.no_grad()
def input_norms(
    model: torch.nn.Module, layers: dict[str, torch.nn.Linear], batches: list[Tensor]
) -> dict[str, Tensor]:
    """The norm of each input feature of some layers, over all tokens of the batches: shape
    (inputs,).
    """
    sums: dict[str, Tensor] = {}

    def add(name: str, inputs: Tensor) -> None:
        sums[name] = sums.get(name, 0) + inputs.flatten(0, -2).float().square().sum(0).double()

    hooks = [
        layer.register_forward_hook(lambda _, x, __, name=name: add(name, x[0]))
        for name, layer in layers.items()
    ]
    for batch in batches:
        model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: total.sqrt().float() for name, total in sums.items()}


def main(name: str, text: str, output: str) -> None:
    """Prune a model, save it, and print its perplexity before and after."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokens = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    batches = list(tokens[0, : 2 * SEQUENCES * LENGTH].reshape(-1, BATCH, LENGTH))
    calibration = batches[: SEQUENCES // BATCH]
    held_out = batches[SEQUENCES // BATCH :]
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and ".mlp." in name
    }
    before = perplexity(model, held_out)
    for name, norms in input_norms(model, layers, calibration).items():
        weight = layers[name].weight.data
        weight *= effective_mask(weight.float().abs() * norms)
    zeros = torch.cat([layer.weight.flatten() == 0 for layer in layers.values()]).float().mean()
    print(
        f"sparsity of the MLP: {zeros:.2%}; perplexity: {before:.3f} -> "
        f"{perplexity(model, held_out):.3f}"
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python examples/emp.py MODEL TEXT OUTPUT")
    main(*sys.argv[1:])
