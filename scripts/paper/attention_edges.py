"""Attention edges: each head keeps the effective number of its query-key scores before the softmax.
No weight changes.

    python scripts/paper/attention_edges.py --model NAME [NAME ...] [--text TEXT] [--block N]
    [--limit N] [--betas B ...]

An edge is one score q·k of a query and a key at or before it. Its sign matters, so the scores of a
group are shifted by their minimum before Algorithm 1. A group is the edges of one head in one block
of text ("per head"), or those of all heads of a layer in it ("global"). The clip(floor(beta *
N_eff), 1, N) largest edges of a group stay, and the others are masked before the softmax; a query
left without an edge has a zero output. The baselines keep the share of "per head" at the smallest
beta: of each query, the largest scores, or random ones.

Prints the perplexity, the share of edges kept, how many of the edges to the first token stay, and
the share of the attention on the first token, of queries from the 64th on: what the rule says about
attention sinks.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from emp_llm.calibration.texts import find_corpus
from emp_llm.common.errors import UserError
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.evaluate import block_length, perplexity, text_tokens
from emp_llm.evaluation.results import find_suite
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.models.local_model import find_model
from emp_llm.selection.effective import effective_mask

GROUPS = ("per head", "global")
BASELINES = ("largest of each query", "random")


@dataclass
class Edges:
    """What the heads of a model kept, summed over layers and blocks of text.

    Attributes:
        rule, beta: which edges stay.
        share: for the baselines, the share of a query's edges that stays.
        totals: sums by name.
    """

    rule: str
    beta: float = 1.0
    share: float = 1.0
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def ratio(self, part: str, whole: str) -> float:
        """One sum as a share of another."""
        return self.totals[part] / self.totals[whole] if self.totals[whole] else math.nan


def kept_edges(scores: Tensor, allowed: Tensor, edges: Edges) -> Tensor:
    """The edges that stay: bool, the shape of `scores`.

    Args:
        scores: float32, shape (sequences, heads, queries, keys).
        allowed: bool, shape (queries, keys): true at or before the query.
        edges: the rule.
    """
    if edges.rule == "dense":
        return allowed.expand_as(scores)
    if edges.rule in ("per head", "global"):
        values = scores[..., allowed]  # (sequences, heads, edges)
        groups = values if edges.rule == "per head" else values.flatten(1)
        mask = effective_mask(groups - groups.amin(-1, keepdim=True), beta=edges.beta)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept[..., allowed] = mask.reshape(values.shape)
        return kept
    order = torch.rand_like(scores) if edges.rule == "random" else scores
    order = order.masked_fill(~allowed, -math.inf)
    rank = order.argsort(-1, descending=True).argsort(-1)
    return (rank < (edges.share * allowed.sum(-1, keepdim=True)).ceil()) & allowed


def attention(edges: Edges) -> Any:
    """An attention function of transformers that masks the edges which do not stay, and counts
    them.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        scores = (query.float() @ key.float().transpose(2, 3)) * scaling
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        kept = kept_edges(scores, allowed, edges)
        # NaN: a query without edges.
        weights = scores.masked_fill(~kept, -math.inf).softmax(-1).nan_to_num(0.0)
        totals = edges.totals
        sequences_and_heads = scores.shape[0] * scores.shape[1]
        totals["edges"] += int(allowed.sum()) * sequences_and_heads
        totals["kept"] += int(kept.sum())
        totals["queries"] += scores.shape[2] * sequences_and_heads
        totals["empty"] += int((~kept.any(-1)).sum())
        totals["to the first"] += int(kept[..., 0].sum())
        later = slice(64, None)  # queries for which one token in many would be little
        totals["later"] += float(weights[:, :, later].sum())
        totals["later to the first"] += float(weights[:, :, later, 0].sum())
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def masked(model: Any, edges: Edges) -> Iterator[None]:
    """The model with masked edges, inside this context."""
    before = model.config._attn_implementation
    AttentionInterface.register("emp_edges", attention(edges))
    model.set_attn_implementation("emp_edges")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def rows_of(name: str, options: argparse.Namespace) -> list[list[str]]:
    """The rows of one model: dense, each group and beta, and the baselines."""
    torch.manual_seed(0)
    corpus = find_suite("perplexity").corpus if options.text is None else find_corpus(options.text)
    assert corpus is not None
    folder = find_model(name).folder
    tokens = text_tokens(corpus, load_tokenizer(folder))
    model = load_model(folder, "cpu", "float32")
    length = options.block or block_length(corpus, model.config)
    rules = [Edges("dense"), *(Edges(group, beta) for group in GROUPS for beta in options.betas)]
    rows: list[list[str]] = []
    share = dense = 0.0
    while rules:
        edges = rules.pop(0)
        with masked(model, edges):
            value = perplexity(model, tokens, length, batch_size=1, limit=options.limit).value
        assert value is not None
        dense = dense or value
        if edges.rule == GROUPS[0] and edges.beta == min(options.betas):
            share = edges.ratio("kept", "edges")
            rules += [Edges(rule, share=share) for rule in BASELINES]
        rows.append(
            [
                Path(name).name,
                edges.rule,
                f"{edges.beta:g}" if edges.rule in GROUPS else "",
                f"{value:.3f}",
                "" if edges.rule == "dense" else f"{100 * (value / dense - 1):+.2f} %",
                f"{100 * edges.ratio('kept', 'edges'):.1f}",
                f"{100 * edges.ratio('empty', 'queries'):.2f}",
                f"{100 * edges.ratio('to the first', 'queries'):.1f}",
                f"{100 * edges.ratio('later to the first', 'later'):.1f}",
            ]
        )
    return rows


def main(line: list[str] | None = None) -> None:
    """Measure the models, and print a table. A UserError ends it with exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", required=True, help="model folders or Hub ids")
    parser.add_argument(
        "--text",
        help="text of the perplexity; default: that of the suite perplexity, WikiText-2 test",
    )
    parser.add_argument(
        "--betas",
        type=float,
        nargs="+",
        default=[0.5, 0.75, 1.0],
        help="multiples of N_eff to keep",
    )
    parser.add_argument(
        "--block", type=int, help="tokens in a block; default: 2048, or the model's context"
    )
    parser.add_argument("--limit", type=int, help="blocks to measure; default: all")
    options = parser.parse_args(line)
    head = [
        "model",
        "group",
        "beta",
        "perplexity",
        "change",
        "edges kept, %",
        "queries without an edge, %",
    ]
    head += ["edges to the first token kept, %", "attention on the first token, %"]
    try:
        print(
            markdown_table(
                [head, *(row for name in options.model for row in rows_of(name, options))],
                as_markdown=True,
            )
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
