"""The run of `bench`: two models measured in turn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.common.memory import resident_memory
from emp_llm.common.progress_bars import progress_bar
from emp_llm.common.provenance import command_line, processor_name, versions
from emp_llm.common.tables import Rows, table
from emp_llm.common.wording import count_of, format_bytes
from emp_llm.evaluation.results_file import folder_identity
from emp_llm.hub.local_model import LocalModel, find_model
from emp_llm.models.loading import load_model, read_config
from emp_llm.models.placement import max_context
from emp_llm.options.runtime import BenchOptions
from emp_llm.records.bench import Bench, Speed
from emp_llm.runtime.loader import NEVER, load, run_device, sparse_layers


@dataclass(frozen=True)
class Benched:
    """The figures, and their table."""

    record: Bench
    table: str


class _Runner:
    """One model, and its measurements so far.

    Args:
        source: of the model, for the record.
        runtime: "dense" or "sparse".
        make: loads it.
        prompt: token ids, int64, shape (sequences, tokens).
        new_tokens: to decode.
    """

    def __init__(
        self, source: LocalModel, runtime: str, make: Callable[[], PreTrainedModel], prompt: torch.Tensor, new_tokens: int
    ) -> None:
        before, start = resident_memory(prompt.device), time.perf_counter()
        self.model = make()
        self._load_seconds = time.perf_counter() - start
        self._source, self._runtime, self._prompt, self._new_tokens = source, runtime, prompt, new_tokens
        self.tokens = self.round()
        self._memory = resident_memory(prompt.device) - before
        self.prefill: list[float] = []
        self.decode: list[float] = []

    def round(self) -> torch.Tensor:
        """Prefill the prompt and decode, greedily; returns the new tokens, shape (sequences, new tokens)."""
        with torch.inference_mode():
            start = _now(self._prompt.device)
            output = self.model(self._prompt, use_cache=True, logits_to_keep=1)
            middle = _now(self._prompt.device)
            tokens = [output.logits[:, -1:].argmax(-1)]
            for _ in range(self._new_tokens):
                output = self.model(tokens[-1], past_key_values=output.past_key_values, use_cache=True)
                tokens.append(output.logits[:, -1:].argmax(-1))
            end = _now(self._prompt.device)
        self.seconds = (middle - start, end - middle)
        return torch.cat(tokens, dim=1)

    def measure(self) -> None:
        """One round that counts."""
        self.round()
        self.prefill.append(self.seconds[0])
        self.decode.append(self.seconds[1])

    def speed(self) -> Speed:
        """The record of all rounds."""
        sequences, length = self._prompt.shape
        weights = [*self.model.parameters(), *(part for each in sparse_layers(self.model).values() for part in each.buffers())]
        return Speed(
            model=self._source.name,
            revision=self._source.revision,
            runtime=self._runtime,
            load_seconds=round(self._load_seconds, 3),
            weight_bytes=sum(part.nbytes for part in weights),
            memory_bytes=self._memory,
            prefill_seconds=[round(each, 5) for each in self.prefill],
            decode_seconds=[round(each, 5) for each in self.decode],
            prefill_tokens_per_second=round(sequences * length / statistics.median(self.prefill), 3),
            decode_tokens_per_second=round(sequences * self._new_tokens / statistics.median(self.decode), 3),
        )


def run_bench(options: BenchOptions) -> Benched:
    """Measure, save the figures, and make their table.

    Raises:
        UserError: options are wrong, a model cannot be loaded, no layer is packed, or the output exists.
    """
    options.check()
    device = torch.device(run_device(options.device))
    source = find_model(options.model, options.revision, options.trust_remote_code)
    baseline = None if options.baseline is None else find_model(options.baseline, None, options.trust_remote_code)
    output = options.output or Path(f"{source.short_name}-bench.json")
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists. Choose another --output, or replace it with --overwrite.")
    how: dict[str, Any] = {"device": device, "dtype": options.dtype, "trust_remote_code": options.trust_remote_code}

    def dense() -> PreTrainedModel:
        if baseline is None:
            return load(source.folder, **how, least_zeros=NEVER, check=False)
        return load_model(baseline.folder, str(device), options.dtype, options.trust_remote_code)

    def sparse() -> PreTrainedModel:
        model = load(source.folder, **how)
        if not sparse_layers(model):
            raise UserError(f"{options.model}: no layer has enough zeros to be packed, so there is nothing to compare.")
        return model

    prompt = _prompt(source.folder, options).to(device)
    with progress_bar(options.repeats + 2, "measure", "round") as bar:
        runners = [_Runner(source, "sparse", sparse, prompt, options.new_tokens)]
        bar.update(1)
        runners.append(_Runner(baseline or source, "dense", dense, prompt, options.new_tokens))
        bar.update(1)
        for number in range(options.repeats):
            for runner in runners if number % 2 else runners[::-1]:
                runner.measure()
            bar.update(1)
    record = _record(options, folder_identity(source.folder), device, *runners)
    record.save(output)
    return Benched(record, f"{table(bench_rows(record))}\n{_note(record)}\nfigures in {output}")


def _prompt(folder: Path, options: BenchOptions) -> torch.Tensor:
    """Random token ids, the same in every run; int64, shape (sequences, tokens)."""
    whole = read_config(folder, options.trust_remote_code)[0]
    if getattr(whole, "is_encoder_decoder", False):
        raise UserError(f"{options.model}: an encoder-decoder model; bench measures models that continue their prompt.")
    config = whole.get_text_config()
    longest, wanted = max_context(config), options.prompt_tokens + options.new_tokens
    if longest is not None and wanted > longest:
        raise UserError(
            f"--prompt-tokens {options.prompt_tokens} and --new-tokens {options.new_tokens} exceed the {longest} positions "
            "of the model. Lower them."
        )
    shape = (options.batch_size, options.prompt_tokens)
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def bench_rows(record: Bench) -> Rows:
    """The table of a bench: a line for each figure."""
    dense, sparse = record.dense, record.sparse

    def line(name: str, cell: Callable[[Speed], str], ratio: float) -> list[str]:
        return [name, cell(dense), cell(sparse), f"{ratio:.2f}"]

    def weights(speed: Speed) -> float:
        return speed.weight_bytes

    return [
        [
            f"{record.device}, {record.batch_size} x {record.prompt_tokens} + {record.new_tokens} tokens",
            "dense",
            "sparse",
            "ratio",
        ],
        line("prefill, tokens/s", lambda s: f"{s.prefill_tokens_per_second:.1f}", record.prefill_ratio),
        line("decode, tokens/s", lambda s: f"{s.decode_tokens_per_second:.1f}", record.decode_ratio),
        line("weights in memory", lambda s: format_bytes(s.weight_bytes), weights(sparse) / weights(dense)),
        line("memory of the process", lambda s: format_bytes(s.memory_bytes), record.memory_ratio),
        line("load, seconds", lambda s: f"{s.load_seconds:.2f}", sparse.load_seconds / max(dense.load_seconds, 1e-9)),
    ]


def _note(record: Bench) -> str:
    where = record.processor if record.device == "cpu" else record.device
    same = "" if record.equal_tokens is None else f"; {record.equal_tokens:.1%} of the new tokens are the same"
    return (
        f"{count_of(record.layers, 'packed layer')}, {record.sparsity:.1%} zeros; {where}, "
        f"{count_of(record.threads, 'thread')}; medians of {count_of(record.repeats, 'round')}{same}"
    )


def _record(options: BenchOptions, identity: str | None, device: torch.device, sparse: _Runner, dense: _Runner) -> Bench:
    layers = [layer.rows for layer in sparse_layers(sparse.model).values()]
    weights = sum(rows.rows * rows.columns for rows in layers)
    first, second = dense.speed(), sparse.speed()

    def ratio(slow: list[float], fast: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 4)

    return Bench(
        model=options.model,
        revision=second.revision,
        identity=identity,
        sparsity=1 - sum(rows.values.numel() for rows in layers) / weights,
        layers=len(layers),
        processor=processor_name(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        repeats=options.repeats,
        dense=first,
        sparse=second,
        prefill_ratio=ratio(dense.prefill, sparse.prefill),
        decode_ratio=ratio(dense.decode, sparse.decode),
        memory_ratio=round(second.memory_bytes / max(1, first.memory_bytes), 4),
        equal_tokens=float((sparse.tokens == dense.tokens).double().mean()) if options.baseline is None else None,
        versions=versions(),
        command=command_line(),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
