"""`emp-llm bench MODEL`: how much faster a pruned model is on this machine."""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.output import check_output_file
from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, count_of, format_bytes, reason
from emp_llm.common.machine import command_line, processor_name, resident_memory, versions
from emp_llm.common.paths import data_folder
from emp_llm.common.progress import load_packages, progress_bar
from emp_llm.common.tables import table
from emp_llm.models.local_model import LocalModel, find_model
from emp_llm.options.shared import DeviceOptions, ModelOptions, parse_numbers
from emp_llm.records.evaluation import Batch, Bench, LoadedModel, Speed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
TEXT = "demo/heldout.txt"  # of eval/
_MOST = 2**24  # tokens of prompts at once


@dataclass(frozen=True, kw_only=True)
class BenchOptions(DeviceOptions, ModelOptions):
    """Options of `bench`. The model is pruned or packed."""

    baseline: Annotated[
        str | None, Flag("Dense model to compare with; default: the same model, run dense.")
    ] = None
    prompt_tokens: Annotated[int, Flag("Tokens of each prompt.", minimum=1)] = 128
    new_tokens: Annotated[int, Flag("Tokens to decode after it.", minimum=1)] = 32
    batch_sizes: Annotated[str, Flag("Numbers of sequences at a time, separated by commas.")] = (
        "1,4,16"
    )
    repeats: Annotated[
        int, Flag("Rounds; both models run in each, and medians are reported.", minimum=1)
    ] = 5
    output: Annotated[
        Path | None,
        Flag("File for the figures, which report and push read; default: MODEL-bench.json."),
    ] = None
    overwrite: Annotated[bool, Flag("Replace an existing file.")] = False


@command
def bench(options: BenchOptions) -> Bench:
    """Measure load time, memory, prefill and decoding of a pruned model, and of the dense model, in
    turn. Zeros run from packed weights; a model with fewer units runs as it is.

    Both models are in one process, and each round runs one after the other, so that a machine that
    is busy slows both. The prompts are text where the model has a tokenizer. The figures are
    medians, and ranges of the rounds; they are saved as JSON, and emp-llm report and emp-llm push
    --results read the file.

    Returns the content of the file.

    Raises:
        UserError: options are wrong, a model cannot be loaded, no layer is packed and no baseline
            is named, or the output exists.
    """
    load_packages()
    import torch

    from emp_llm.evaluation.results import folder_identity
    from emp_llm.models.loading import check_head, load_model
    from emp_llm.runtime.loader import NEVER, load, run_device, sparse_layers

    device = torch.device(run_device(options.device))
    batch_sizes = _batch_sizes(options.batch_sizes)
    trust = options.trust_remote_code
    source = find_model(options.model, options.revision, trust)
    other = source
    if options.baseline is not None:
        other = find_model(options.baseline, None, trust)
    check_head(source.folder)
    output = options.output or Path(f"{source.short_name}-bench.json")
    check_output_file(output, options.overwrite)
    probe = output.with_name(f".{output.name}.probe")
    try:
        write_bytes(probe, bytes(1 << 16))
        probe.unlink()
    except OSError as error:
        raise _unwritable(output, error, "Name another file.") from error
    text, prompts = _prompts(source.folder, options, batch_sizes[-1])
    prompts = prompts.to(device)
    load_pruned = partial(
        load, source.folder, device=device, dtype=options.dtype, trust_remote_code=trust
    )

    def load_sparse() -> "PreTrainedModel":
        model = load_pruned()
        if not sparse_layers(model) and options.baseline is None:
            raise UserError(
                f"{options.model}: no layer has enough zeros to be packed. Name the model to "
                "compare it with: --baseline."
            )
        return model

    def load_dense() -> "PreTrainedModel":
        if options.baseline is not None:
            return load_model(other.folder, str(device), options.dtype, trust)
        return load_pruned(least_zeros=NEVER, check=False)

    def load_timed(
        load_one: Callable[[], "PreTrainedModel"], model: LocalModel
    ) -> tuple["PreTrainedModel", LoadedModel]:
        memory = resident_memory(device)
        start = time.perf_counter()
        network = load_one()
        seconds = time.perf_counter() - start
        _time_run(network, prompts[: batch_sizes[0]], options.new_tokens)
        weights = list(network.parameters())
        for layer in sparse_layers(network).values():
            weights.extend(layer.buffers())
        return network, LoadedModel(
            model=model.name,
            revision=model.revision,
            runtime="sparse" if sparse_layers(network) else "dense",
            load_seconds=round(seconds, 3),
            weight_bytes=sum(tensor.nbytes for tensor in weights),
            memory_bytes=resident_memory(device) - memory,
        )

    batches = []
    rounds = 2 + len(batch_sizes) * (options.repeats + 1)
    with progress_bar(rounds, "measure", "round") as bar:
        sparse_model, sparse = load_timed(load_sparse, source)
        bar.update(1)
        dense_model, dense = load_timed(load_dense, other)
        bar.update(1)
        for size in batch_sizes:
            batches.append(_time_batch(dense_model, sparse_model, prompts[:size], options, bar))
    layers = [layer.rows for layer in sparse_layers(sparse_model).values()]
    stored = sum(rows.values.numel() for rows in layers)
    record = Bench(
        model=source.name,
        revision=source.revision,
        identity=folder_identity(source.folder),
        sparsity=1 - stored / sum(rows.rows * rows.columns for rows in layers) if layers else 0.0,
        layers=len(layers),
        processor=processor_name(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        text=text,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        dense=dense,
        sparse=sparse,
        memory_ratio=round(sparse.memory_bytes / max(1, dense.memory_bytes), 4),
        batches=batches,
        versions=versions(),
        command=command_line(),
    )
    try:
        record.save(output)
    except OSError as error:
        logger.warning("%s", _figures_text(record))
        raise _unwritable(output, error, "The figures are above.") from error
    logger.info("written to %s", output)
    return record


def _unwritable(output: Path, error: OSError, advice: str) -> UserError:
    return UserError(f"--output {output}: cannot be written there ({reason(error)}). {advice}")


def _batch_sizes(text: str) -> list[int]:
    """The numbers of sequences, ascending; UserError unless they are different whole numbers."""
    numbers = parse_numbers(text, "--batch-sizes")
    sizes = sorted({int(number) for number in numbers if number >= 1 and number % 1 == 0})
    if len(sizes) < len(numbers):
        raise UserError(f"--batch-sizes {text!r}: expected different whole numbers from 1 on.")
    return sizes


class _TimedRun(NamedTuple):
    """One prefill and decoding.

    Attributes:
        prefill, decode: seconds of the prompts, and of all new tokens.
        tokens: the tokens that were chosen, int64, shape (sequences, 1 + new tokens).
    """

    prefill: float
    decode: float
    tokens: "torch.Tensor"


def _time_run(model: "PreTrainedModel", prompts: "torch.Tensor", new_tokens: int) -> _TimedRun:
    """Prefill prompts, int64, shape (sequences, tokens), and decode greedily."""
    import torch

    with torch.inference_mode():
        start = _now(prompts)
        output = model(prompts, use_cache=True, logits_to_keep=1)
        middle = _now(prompts)
        tokens = [output.logits[:, -1:].argmax(-1)]
        for _ in range(new_tokens):
            output = model(tokens[-1], past_key_values=output.past_key_values, use_cache=True)
            tokens.append(output.logits[:, -1:].argmax(-1))
        end = _now(prompts)
    return _TimedRun(middle - start, end - middle, torch.cat(tokens, dim=1))


def _time_batch(
    dense_model: "PreTrainedModel",
    sparse_model: "PreTrainedModel",
    prompts: "torch.Tensor",
    options: BenchOptions,
    bar: Any,
) -> Batch:
    """Both models on some prompts, in turn: a round that warms up, then those that count."""
    runs = []
    for number in range(options.repeats + 1):
        if number % 2:  # the other model begins
            sparse = _time_run(sparse_model, prompts, options.new_tokens)
        dense = _time_run(dense_model, prompts, options.new_tokens)
        if not number % 2:
            sparse = _time_run(sparse_model, prompts, options.new_tokens)
        runs.append((dense, sparse))
        bar.update(1)
    (dense, sparse), *rounds = runs
    size = prompts.shape[0]
    same = float((dense.tokens == sparse.tokens).double().mean())
    return Batch(
        batch_size=size,
        prefill=_speed([(a.prefill, b.prefill) for a, b in rounds], size * options.prompt_tokens),
        decode=_speed([(a.decode, b.decode) for a, b in rounds], size * options.new_tokens),
        equal_tokens=same if options.baseline is None else None,
    )


def _speed(rounds: list[tuple[float, float]], tokens: int) -> Speed:
    """The record of the seconds that (dense, sparse) took for some tokens in each round."""
    dense = [seconds for seconds, _ in rounds]
    sparse = [seconds for _, seconds in rounds]
    ratios = [a / b for a, b in rounds]
    return Speed(
        dense_seconds=[round(seconds, 5) for seconds in dense],
        sparse_seconds=[round(seconds, 5) for seconds in sparse],
        dense=round(tokens / statistics.median(dense), 3),
        sparse=round(tokens / statistics.median(sparse), 3),
        ratio=round(statistics.median(ratios), 4),
        lowest_ratio=round(min(ratios), 4),
        highest_ratio=round(max(ratios), 4),
    )


def _prompts(
    folder: Path, options: BenchOptions, sequences: int
) -> tuple[str | None, "torch.Tensor"]:
    """The name of a text, and its first tokens, int64, shape (sequences, tokens): one prompt
    follows the other in the text.

    Without a tokenizer the name is None, and the tokens are random, the same in every run.
    """
    import torch

    from emp_llm.models.loading import load_tokenizer, read_config
    from emp_llm.models.placement import check_ids, max_context

    whole = read_config(folder, options.trust_remote_code)[0]
    if getattr(whole, "is_encoder_decoder", False):
        raise UserError(
            f"{options.model}: an encoder-decoder model; bench measures models that "
            "continue their prompt."
        )
    config = whole.get_text_config()
    longest = max_context(config)
    wanted = options.prompt_tokens + options.new_tokens
    if longest is not None and wanted > longest:
        raise UserError(
            f"--prompt-tokens {options.prompt_tokens} and --new-tokens {options.new_tokens} exceed "
            f"the {longest} positions of the model. Lower them."
        )
    text = (data_folder("eval") / TEXT).read_text(encoding="utf-8")
    number = sequences * options.prompt_tokens
    if number > _MOST:
        raise UserError(
            f"--batch-sizes and --prompt-tokens ask for {number:,} tokens at once, and at most "
            f"{_MOST:,} are measured. Lower them."
        )
    try:
        tokenizer = load_tokenizer(folder, options.trust_remote_code)
    except UserError:
        logger.warning("warning: %s: no tokenizer, so the prompts are random tokens.", folder)
        random = torch.randint(
            0, config.vocab_size, (number,), generator=torch.Generator().manual_seed(0)
        )
        return None, random.view(sequences, -1)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    check_ids(ids, whole, f"{options.model}, prompts by its tokenizer")
    return f"eval/{TEXT}", ids.repeat(-(-number // len(ids)))[:number].view(sequences, -1)


def _now(prompts: "torch.Tensor") -> float:
    import torch

    if prompts.is_cuda:
        torch.cuda.synchronize(prompts.device)
    return time.perf_counter()


def show(record: Bench) -> None:
    """Print a line for each figure, and what was measured."""
    print(_figures_text(record))


def _figures_text(record: Bench) -> str:
    """The figures as text."""
    dense = record.dense
    sparse = record.sparse
    name = "sparse" if record.layers else "smaller"
    rows = [[record.device, "dense", name, "ratio", "rounds"]]
    for batch in record.batches:
        for name, speed in (("prefill", batch.prefill), ("decode", batch.decode)):
            spread = f"{speed.lowest_ratio:.2f}-{speed.highest_ratio:.2f}"
            cells = [f"{speed.dense:.1f}", f"{speed.sparse:.1f}", f"{speed.ratio:.2f}", spread]
            rows.append([f"{name} x {batch.batch_size}, tokens/s", *cells])
    for name, field in (
        ("weights in memory", "weight_bytes"),
        ("memory of the process", "memory_bytes"),
    ):
        sizes = [format_bytes(dense[field]), format_bytes(sparse[field])]
        rows.append([name, *sizes, f"{sparse[field] / max(1, dense[field]):.2f}", ""])
    seconds = [f"{dense.load_seconds:.2f}", f"{sparse.load_seconds:.2f}"]
    ratio = sparse.load_seconds / max(dense.load_seconds, 1e-9)
    rows.append(["load, seconds", *seconds, f"{ratio:.2f}", ""])
    packed = f"; {count_of(record.layers, 'packed layer')}, {record.sparsity:.1%} zeros"
    lines = [
        table(rows),
        f"prompts of {count_of(record.prompt_tokens, 'token')} ({record.text or 'random'}), "
        f"{record.new_tokens} new{packed if record.layers else ''}",
        f"{record.processor if record.device == 'cpu' else record.device}, "
        f"{count_of(record.threads, 'thread')}; medians of "
        f"{count_of(record.repeats, 'round')}, and the range of their ratios",
    ]
    same = [batch.equal_tokens for batch in record.batches if batch.equal_tokens is not None]
    if same:
        fractions = ", ".join(f"{fraction:.1%}" for fraction in same)
        lines.append(f"{fractions} of the new tokens are the same")
    return "\n".join(lines)
