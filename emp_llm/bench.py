"""`emp-llm bench MODEL`: what the zeros of a pruned model buy on this machine."""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.output import check_output_file
from emp_llm.cli import command, run
from emp_llm.common.errors import UserError, count_of, format_bytes, reason
from emp_llm.common.machine import command_line, processor_name, resident_memory, versions
from emp_llm.common.paths import data_folder
from emp_llm.common.progress import load_packages, progress_bar
from emp_llm.common.tables import table
from emp_llm.hub.local_model import find_model
from emp_llm.options.base import Opt, parse_numbers
from emp_llm.options.model import DeviceOptions, ModelOptions
from emp_llm.records.bench import Batch, Bench, LoadedModel, Speed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


TEXT = "demo/heldout.txt"  # of eval/


@dataclass(frozen=True, kw_only=True)
class BenchOptions(DeviceOptions, ModelOptions):
    """Options of `bench`. The model is pruned or packed."""

    baseline: Annotated[
        str | None, Opt("Dense model to compare with; default: the same model, run dense.")
    ] = None
    prompt_tokens: Annotated[int, Opt("Tokens of each prompt.", minimum=1)] = 128
    new_tokens: Annotated[int, Opt("Tokens to decode after it.", minimum=1)] = 32
    batch_sizes: Annotated[str, Opt("Numbers of sequences at a time, separated by commas.")] = (
        "1,4,16"
    )
    repeats: Annotated[
        int, Opt("Rounds; both models run in each, and medians are reported.", minimum=1)
    ] = 5
    output: Annotated[
        Path | None,
        Opt("File for the figures, which report and push read; default: MODEL-bench.json."),
    ] = None
    overwrite: Annotated[bool, Opt("Replace an existing file.")] = False


@command
def bench(options: BenchOptions) -> Bench:
    """Measure load time, memory, prefill and decoding of a pruned model from packed weights, and of
    the dense model, in turn.

    Both models are in one process, and each round runs one after the other, so that a machine that
    is busy slows both. The prompts are text where the model has a tokenizer. The figures are
    medians, and ranges of the rounds; they are saved as JSON, and emp-llm report and emp-llm push
    --results read the file.

    Returns the content of the file.

    Raises:
        UserError: options are wrong, a model cannot be loaded, no layer is packed, or the output
            exists.
    """
    load_packages()
    import torch

    from emp_llm.evaluation.results import folder_identity
    from emp_llm.models.loading import check_head, load_model
    from emp_llm.runtime.loader import NEVER, load, run_device, sparse_layers

    device = torch.device(run_device(options.device))
    sizes = sorted(
        {
            int(size)
            for size in parse_numbers(options.batch_sizes, "--batch-sizes")
            if size >= 1 and size % 1 == 0
        }
    )
    if len(sizes) != options.batch_sizes.count(",") + 1:
        raise UserError(
            f"--batch-sizes {options.batch_sizes!r}: expected different whole numbers from 1 on."
        )
    source = find_model(options.model, options.revision, options.trust_remote_code)
    baseline = (
        None
        if options.baseline is None
        else find_model(options.baseline, None, options.trust_remote_code)
    )
    check_head(source.folder)
    output = options.output or Path(f"{source.short_name}-bench.json")
    check_output_file(output, options.overwrite)
    try:
        write_bytes(output.with_name(f".{output.name}.probe"), bytes(1 << 16))
        output.with_name(f".{output.name}.probe").unlink()
    except OSError as error:
        raise UserError(
            f"--output {output}: cannot be written there ({reason(error)}). Name another file."
        ) from error
    text, prompts = _prompts(source.folder, options, sizes[-1])
    prompts = prompts.to(device)
    how: dict[str, Any] = {
        "device": device,
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,
    }

    def load_dense() -> "PreTrainedModel":
        if baseline is None:
            return load(source.folder, **how, least_zeros=NEVER, check=False)
        return load_model(baseline.folder, str(device), options.dtype, options.trust_remote_code)

    def load_sparse() -> "PreTrainedModel":
        model = load(source.folder, **how)
        if not sparse_layers(model):
            raise UserError(
                f"{options.model}: no layer has enough zeros to be packed, so there is "
                "nothing to compare."
            )
        return model

    def measured(
        make: Callable[[], "PreTrainedModel"], name: str, revision: str | None, runtime: str
    ) -> tuple["PreTrainedModel", LoadedModel]:
        before = resident_memory(device)
        start = time.perf_counter()
        model = make()
        seconds = time.perf_counter() - start
        _run(model, prompts[: sizes[0]], options.new_tokens)
        weights = [
            *model.parameters(),
            *(part for each in sparse_layers(model).values() for part in each.buffers()),
        ]
        return model, LoadedModel(
            model=name,
            revision=revision,
            runtime=runtime,
            load_seconds=round(seconds, 3),
            weight_bytes=sum(part.nbytes for part in weights),
            memory_bytes=resident_memory(device) - before,
        )

    other = baseline or source
    batches = []
    with progress_bar(2 + len(sizes) * (options.repeats + 1), "measure", "round") as bar:
        model, sparse = measured(load_sparse, source.name, source.revision, "sparse")
        bar.update(1)
        dense_model, dense = measured(load_dense, other.name, other.revision, "dense")
        bar.update(1)
        for size in sizes:
            rounds = []
            for number in range(options.repeats + 1):
                order = (model, dense_model) if number % 2 else (dense_model, model)
                runs = [_run(each, prompts[:size], options.new_tokens) for each in order]
                rounds.append(runs[::-1] if number % 2 else runs)  # dense, sparse
                bar.update(1)
            same = float((rounds[0][0].tokens == rounds[0][1].tokens).double().mean())
            prefills = [[each.prefill for each in both] for both in rounds[1:]]
            decodes = [[each.decode for each in both] for both in rounds[1:]]
            batch = Batch(
                batch_size=size,
                prefill=_speed(prefills, size * options.prompt_tokens),
                decode=_speed(decodes, size * options.new_tokens),
                equal_tokens=same if options.baseline is None else None,
            )
            batches.append(batch)
    layers = [layer.rows for layer in sparse_layers(model).values()]
    record = Bench(
        model=source.name,
        revision=source.revision,
        identity=folder_identity(source.folder),
        sparsity=1
        - sum(rows.values.numel() for rows in layers)
        / sum(rows.rows * rows.columns for rows in layers),
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
        logger.warning("%s", _shown(record))
        raise UserError(
            f"--output {output}: cannot be written there ({reason(error)}); the figures are above."
        ) from error
    logger.info("written to %s", output)
    return record


class _Run(NamedTuple):
    """Seconds of the prompts and of the new tokens; and these, shape (sequences, 1 + new
    tokens).
    """

    prefill: float
    decode: float
    tokens: "torch.Tensor"


def _run(model: "PreTrainedModel", prompts: "torch.Tensor", new_tokens: int) -> _Run:
    """Prefill prompts, shape (sequences, tokens), and decode greedily."""
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
    return _Run(middle - start, end - middle, torch.cat(tokens, dim=1))


def _speed(rounds: list[list[float]], tokens: int) -> Speed:
    """The record of the seconds of (dense, sparse) in each round, in which they take some
    tokens.
    """
    dense, sparse = (list(seconds) for seconds in zip(*rounds, strict=True))
    ratios = [a / b for a, b in rounds]
    return Speed(
        dense_seconds=[round(each, 5) for each in dense],
        sparse_seconds=[round(each, 5) for each in sparse],
        dense=round(tokens / statistics.median(dense), 3),
        sparse=round(tokens / statistics.median(sparse), 3),
        ratio=round(statistics.median(ratios), 4),
        lowest_ratio=round(min(ratios), 4),
        highest_ratio=round(max(ratios), 4),
    )


def _prompts(
    folder: Path, options: BenchOptions, sequences: int
) -> tuple[str | None, "torch.Tensor"]:
    """The name of a text, and its first tokens, one prompt after the other: int64, shape
    (sequences, tokens).

    Without a tokenizer there is no text, and the tokens are random, the same in every run.
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
    print(_shown(record))


def _shown(record: Bench) -> str:
    """The figures as text."""
    dense = record.dense
    sparse = record.sparse
    rows = [[record.device, "dense", "sparse", "ratio", "rounds"]]
    for batch in record.batches:
        for name, speed in (("prefill", batch.prefill), ("decode", batch.decode)):
            spread = f"{speed.lowest_ratio:.2f}-{speed.highest_ratio:.2f}"
            cells = [f"{speed.dense:.1f}", f"{speed.sparse:.1f}", f"{speed.ratio:.2f}", spread]
            rows.append([f"{name} x {batch.batch_size}, tokens/s", *cells])
    for what, field in (
        ("weights in memory", "weight_bytes"),
        ("memory of the process", "memory_bytes"),
    ):
        sizes = [format_bytes(dense[field]), format_bytes(sparse[field])]
        rows.append([what, *sizes, f"{sparse[field] / max(1, dense[field]):.2f}", ""])
    load = sparse.load_seconds / max(dense.load_seconds, 1e-9)
    rows.append(
        [
            "load, seconds",
            f"{dense.load_seconds:.2f}",
            f"{sparse.load_seconds:.2f}",
            f"{load:.2f}",
            "",
        ]
    )
    same = ", ".join(
        f"{batch.equal_tokens:.1%}" for batch in record.batches if batch.equal_tokens is not None
    )
    return "\n".join(
        [
            table(rows),
            f"prompts of {count_of(record.prompt_tokens, 'token')} ({record.text or 'random'}), "
            f"{record.new_tokens} new; {count_of(record.layers, 'packed layer')}, "
            f"{record.sparsity:.1%} zeros",
            f"{record.processor if record.device == 'cpu' else record.device}, "
            f"{count_of(record.threads, 'thread')}; medians of "
            f"{count_of(record.repeats, 'round')}, and the range of their ratios",
            *([f"{same} of the new tokens are the same"] if same else []),
        ]
    )


if __name__ == "__main__":
    run(bench, show)
