"""Tables of `bench`: what the zeros buy on a machine."""

from collections.abc import Sequence
from pathlib import Path

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, format_bytes, printable
from emp_llm.common.tables import Rows
from emp_llm.pruning.counts import REPORT_LIMIT
from emp_llm.records.base import record_of, version_of
from emp_llm.records.bench import Bench, Speed

SPEED_NOTE = (
    "The pruned model from packed weights (a bit for each weight, and the weights that are not zero), and the same model or a "
    "baseline dense. Both are measured in turn in one process; medians. Memory is what the process grew by."
)


def split_benches(paths: Sequence[Path]) -> tuple[list[Path], list[Bench]]:
    """The paths that are no output of `bench`, and the records of the others.

    Raises:
        UserError: an output of `bench` is wrong or of a newer version.
    """
    others, benches = [], []
    for path in paths:
        try:
            values = read_json(path, limit=REPORT_LIMIT) if path.is_file() else {}
        except UserError:  # the reader of the others says it with the name of its option
            values = {}
        if values.get("format") is not None and version_of(values, Bench) is not None:
            benches.append(record_of(values, Bench, str(path)))
        else:
            others.append(path)
    return others, benches


def speed_rows(benches: Sequence[Bench]) -> Rows:
    """A row for each bench."""
    rows = [
        ["model", "zeros in packed layers", "machine", "tokens", "prefill, tokens/s", "decode, tokens/s", "memory", "weights"]
    ]
    for bench in benches:
        dense, sparse = bench.dense, bench.sparse
        threads = f", {bench.threads} threads" if bench.device == "cpu" else ""
        rows.append(
            [
                printable(bench.model if dense.model == bench.model else f"{bench.model}, dense: {dense.model}"),
                f"{bench.sparsity:.1%}",
                printable(bench.processor if bench.device == "cpu" else bench.device) + threads,
                f"{bench.batch_size} x {bench.prompt_tokens} + {bench.new_tokens}",
                _change(dense.prefill_tokens_per_second, sparse.prefill_tokens_per_second, bench.prefill_ratio),
                _change(dense.decode_tokens_per_second, sparse.decode_tokens_per_second, bench.decode_ratio),
                _smaller(dense.memory_bytes, sparse.memory_bytes),
                _smaller(dense.weight_bytes, sparse.weight_bytes),
            ]
        )
    return rows


def speed_figures(benches: Sequence[Bench]) -> Rows:
    """All figures, for CSV: a row for each bench and runtime."""
    fields = [name for name in Speed.__struct_fields__ if not name.endswith("_seconds") or name == "load_seconds"]
    common = ["model", "sparsity", "processor", "threads", "device", "prompt_tokens", "new_tokens", "batch_size", "repeats"]
    ratios = ["prefill_ratio", "decode_ratio", "memory_ratio"]
    rows = [[*common, *(field for field in fields if field != "model"), *ratios]]
    for bench in benches:
        for speed in (bench.dense, bench.sparse):
            own = [str(speed[field]) for field in fields if field != "model"]
            rows.append([*(str(bench[name]) for name in common), *own, *(str(bench[name]) for name in ratios)])
    return rows


def _change(dense: float, sparse: float, ratio: float) -> str:
    return f"{dense:.1f} → {sparse:.1f} ({ratio:.2f} x)"


def _smaller(dense: int, sparse: int) -> str:
    return f"{format_bytes(dense)} → {format_bytes(sparse)} ({sparse / max(1, dense):.2f} x)"
