"""`emp-llm bench MODEL`: what the zeros of a pruned model buy on this machine."""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.output import check_output_file
from emp_llm.cli import command, run
from emp_llm.common.errors import UserError, count_of, format_bytes, reason
from emp_llm.common.machine import command_line, processor_name, resident_memory, versions
from emp_llm.common.progress import progress_bar
from emp_llm.common.tables import table
from emp_llm.hub.local_model import find_model
from emp_llm.options.base import Opt
from emp_llm.options.model import DeviceOptions, ModelOptions
from emp_llm.records.bench import Bench, Speed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(DeviceOptions, ModelOptions):
    """Options of `bench`. The model is pruned or packed."""

    baseline: Annotated[str | None, Opt("Dense model to compare with; default: the same model, run dense.")] = None
    prompt_tokens: Annotated[int, Opt("Tokens of the prompt.", minimum=1)] = 512
    new_tokens: Annotated[int, Opt("Tokens to decode after it.", minimum=1)] = 32
    batch_size: Annotated[int, Opt("Sequences at a time.", minimum=1)] = 1
    repeats: Annotated[int, Opt("Rounds; both models run in each, and medians are reported.", minimum=1)] = 5
    output: Annotated[Path | None, Opt("File for the figures, which report and push read; default: MODEL-bench.json.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing file.")] = False


@command
def bench(options: BenchOptions) -> Bench:
    """Measure load time, memory, prefill and decoding of a pruned model from packed weights, and of the dense model, in turn.

    Both models are in one process, and each round runs one after the other, so that a machine that is busy slows both. The
    figures are medians; they are saved as JSON, and emp-llm report and emp-llm push --results read the file.

    Returns the content of the file.

    Raises:
        UserError: options are wrong, a model cannot be loaded, no layer is packed, or the output exists.
    """
    import torch

    from emp_llm.evaluation.results import folder_identity
    from emp_llm.models.loading import load_model
    from emp_llm.runtime.loader import NEVER, load, run_device, sparse_layers

    device = torch.device(run_device(options.device))
    source = find_model(options.model, options.revision, options.trust_remote_code)
    baseline = None if options.baseline is None else find_model(options.baseline, None, options.trust_remote_code)
    output = options.output or Path(f"{source.short_name}-bench.json")
    check_output_file(output, options.overwrite)
    try:
        write_bytes(output.with_name(f".{output.name}.probe"), bytes(1 << 16))
        output.with_name(f".{output.name}.probe").unlink()
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written there ({reason(error)}). Name another file.") from error
    prompt = _prompt(source.folder, options).to(device)
    how: dict[str, Any] = {"device": device, "dtype": options.dtype, "trust_remote_code": options.trust_remote_code}

    def load_dense() -> "PreTrainedModel":
        if baseline is None:
            return load(source.folder, **how, least_zeros=NEVER, check=False)
        return load_model(baseline.folder, str(device), options.dtype, options.trust_remote_code)

    def load_sparse() -> "PreTrainedModel":
        model = load(source.folder, **how)
        if not sparse_layers(model):
            raise UserError(f"{options.model}: no layer has enough zeros to be packed, so there is nothing to compare.")
        return model

    with progress_bar(options.repeats + 2, "measure", "round") as bar:
        sparse = _Measured(load_sparse, prompt, options.new_tokens)
        bar.update(1)
        dense = _Measured(load_dense, prompt, options.new_tokens)
        bar.update(1)
        for number in range(options.repeats):
            for measured in (sparse, dense) if number % 2 else (dense, sparse):
                measured.round()
            bar.update(1)
    other = baseline or source
    layers = [layer.rows for layer in sparse_layers(sparse.model).values()]
    record = Bench(
        model=options.model,
        revision=source.revision,
        identity=folder_identity(source.folder),
        sparsity=1 - sum(rows.values.numel() for rows in layers) / sum(rows.rows * rows.columns for rows in layers),
        layers=len(layers),
        processor=processor_name(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        repeats=options.repeats,
        dense=dense.speed(other.name, other.revision, "dense"),
        sparse=sparse.speed(source.name, source.revision, "sparse"),
        prefill_ratio=_ratio(dense.prefill, sparse.prefill),
        decode_ratio=_ratio(dense.decode, sparse.decode),
        memory_ratio=round(sparse.memory / max(1, dense.memory), 4),
        equal_tokens=float((sparse.tokens == dense.tokens).double().mean()) if options.baseline is None else None,
        versions=versions(),
        command=command_line(),
    )
    try:
        record.save(output)
    except OSError as error:
        logger.warning("%s", _shown(record))
        raise UserError(f"--output {output}: cannot be written there ({reason(error)}); the figures are above.") from error
    logger.info("written to %s", output)
    return record


class _Measured:
    """One model, and its measurements so far. The first round does not count.

    Args:
        make: loads it.
        prompt: token ids, int64, shape (sequences, tokens).
        new_tokens: to decode.
    """

    def __init__(self, make: Callable[[], "PreTrainedModel"], prompt: "torch.Tensor", new_tokens: int) -> None:
        self._prompt, self._new_tokens = prompt, new_tokens
        self.prefill: list[float] = []
        self.decode: list[float] = []
        before, start = resident_memory(prompt.device), time.perf_counter()
        self.model = make()
        self._load_seconds = time.perf_counter() - start
        self.tokens = self.round()
        self.memory = resident_memory(prompt.device) - before
        self.prefill.clear()
        self.decode.clear()

    def round(self) -> "torch.Tensor":
        """Prefill the prompt and decode, greedily; returns the new tokens, shape (sequences, new tokens)."""
        import torch

        with torch.inference_mode():
            start = _now(self._prompt)
            output = self.model(self._prompt, use_cache=True, logits_to_keep=1)
            middle = _now(self._prompt)
            tokens = [output.logits[:, -1:].argmax(-1)]
            for _ in range(self._new_tokens):
                output = self.model(tokens[-1], past_key_values=output.past_key_values, use_cache=True)
                tokens.append(output.logits[:, -1:].argmax(-1))
            end = _now(self._prompt)
        self.prefill.append(middle - start)
        self.decode.append(end - middle)
        return torch.cat(tokens, dim=1)

    def speed(self, name: str, revision: str | None, runtime: str) -> Speed:
        """The record of all rounds."""
        from emp_llm.runtime.loader import sparse_layers

        sequences, length = self._prompt.shape
        weights = [*self.model.parameters(), *(part for each in sparse_layers(self.model).values() for part in each.buffers())]
        return Speed(
            model=name,
            revision=revision,
            runtime=runtime,
            load_seconds=round(self._load_seconds, 3),
            weight_bytes=sum(part.nbytes for part in weights),
            memory_bytes=self.memory,
            prefill_seconds=[round(each, 5) for each in self.prefill],
            decode_seconds=[round(each, 5) for each in self.decode],
            prefill_tokens_per_second=round(sequences * length / statistics.median(self.prefill), 3),
            decode_tokens_per_second=round(sequences * self._new_tokens / statistics.median(self.decode), 3),
        )


def _prompt(folder: Path, options: BenchOptions) -> "torch.Tensor":
    """Random token ids, the same in every run; int64, shape (sequences, tokens)."""
    import torch

    from emp_llm.models.loading import read_config
    from emp_llm.models.placement import max_context

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


def _ratio(slow: list[float], fast: list[float]) -> float:
    """The median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 4)


def _now(prompt: "torch.Tensor") -> float:
    import torch

    if prompt.is_cuda:
        torch.cuda.synchronize(prompt.device)
    return time.perf_counter()


def show(record: Bench) -> None:
    """Print a line for each figure, and what was measured."""
    print(_shown(record))


def _shown(record: Bench) -> str:
    """The figures as text."""
    dense, sparse = record.dense, record.sparse

    def line(name: str, cell: Callable[[Speed], str], ratio: float) -> list[str]:
        return [name, cell(dense), cell(sparse), f"{ratio:.2f}"]

    weights, load = sparse.weight_bytes / dense.weight_bytes, sparse.load_seconds / max(dense.load_seconds, 1e-9)
    what = f"{record.device}, {record.batch_size} x {record.prompt_tokens} + {record.new_tokens} tokens"
    rows = [
        [what, "dense", "sparse", "ratio"],
        line("prefill, tokens/s", lambda speed: f"{speed.prefill_tokens_per_second:.1f}", record.prefill_ratio),
        line("decode, tokens/s", lambda speed: f"{speed.decode_tokens_per_second:.1f}", record.decode_ratio),
        line("weights in memory", lambda speed: format_bytes(speed.weight_bytes), weights),
        line("memory of the process", lambda speed: format_bytes(speed.memory_bytes), record.memory_ratio),
        line("load, seconds", lambda speed: f"{speed.load_seconds:.2f}", load),
    ]
    same = "" if record.equal_tokens is None else f"; {record.equal_tokens:.1%} of the new tokens are the same"
    return (
        f"{table(rows)}\n{count_of(record.layers, 'packed layer')}, {record.sparsity:.1%} zeros; "
        f"{record.processor if record.device == 'cpu' else record.device}, {count_of(record.threads, 'thread')}; medians of "
        f"{count_of(record.repeats, 'round')}{same}"
    )


if __name__ == "__main__":
    run(bench, show)
