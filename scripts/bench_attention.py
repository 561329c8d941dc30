"""The causal attention of `emp_llm.models.attention` beside torch's, in turn: milliseconds of the
forward pass and of both passes, medians, and the error beside float64's.

    python scripts/bench_attention.py --threads 1

Each shape is SEQUENCES,HEADS,SHARED,LENGTH,FEATURES, where SHARED is the number of heads of keys.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from bench_helpers import hardware, in_turn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from emp_llm.common.tables import markdown_table
from emp_llm.models import attention
from emp_llm.models.attention import FastAttention

SHAPES = ["1,9,3,384,64", "4,9,3,512,64", "4,12,12,512,64", "1,32,8,2048,128", "1,32,32,2048,128"]


def main(line: list[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(line)
    if min(options.threads, options.repeats) < 1:
        parser.error("--threads and --repeats must be at least 1.")
    torch.set_num_threads(options.threads)
    rows = []
    for shape in options.shapes:
        sizes = [int(size) if size.isdecimal() else 0 for size in shape.split(",")]
        if len(sizes) != 5 or min(sizes) < 1 or sizes[1] % sizes[2]:
            parser.error(f"--shapes {shape}: five whole numbers are needed, as {SHAPES[0]}.")
        rows.append([shape.replace(",", " x "), *_measured(sizes, options.repeats)])
    print(hardware("cpu"), f"{options.threads} threads")
    if not attention._is_slow_in_torch():
        print("On this processor, torch's attention is used.", file=sys.stderr)
    columns = ["shape", "forward, torch", "ours", "both, torch", "ours", "error, torch", "ours"]
    print(markdown_table([columns, *rows]))


def _measured(sizes: list[int], repeats: int) -> list[str]:
    """The cells of a shape."""
    sequences, heads, shared, length, width = sizes

    def features(count: int) -> Tensor:
        values = torch.randn(sequences, length, count, width).bfloat16()
        return values.transpose(1, 2).requires_grad_()

    query, key, value = features(heads), features(shared), features(shared)
    weights = features(heads).detach()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gqa = heads > shared
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with FastAttention():
            return attend(query, key, value)

    def both(way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(way(query, key, value), (query, key, value), weights)

    ways: dict[str, Callable[[], object]] = {
        "torch": lambda: attend(query.detach(), key.detach(), value.detach()),
        "ours": lambda: ours(query.detach(), key.detach(), value.detach()),
        "both, torch": lambda: both(attend),
        "both, ours": lambda: both(ours),
    }
    found, failed = in_turn(ways, repeats, warm_up=True)
    assert not failed
    first = (tensor.detach()[:1].double() for tensor in (query, key, value))
    exact = attend(*first)
    errors = [
        float((way(query, key, value).detach()[:1].double() - exact).norm() / exact.norm())
        for way in (attend, ours)
    ]
    times = [f"{1000 * statistics.median(seconds):.1f}" for seconds in found.values()]
    return [*times, *(f"{error:.4f}" for error in errors)]


if __name__ == "__main__":
    main()
