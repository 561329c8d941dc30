"""The output of `bench`: speed and memory of a model with and without its zeros, on one machine."""

from typing import ClassVar

import msgspec

from emp_llm.records.base import FileRecord, Part


class Speed(Part, kw_only=True, omit_defaults=False):
    """The measurements of one model.

    Attributes:
        model: its name; revision: its commit on the Hub; null for a folder.
        runtime: "dense" or "sparse".
        load_seconds: from the files, which were read before.
        weight_bytes: of its weights in memory.
        memory_bytes: by which the process, or the GPU's memory, grew while the model was loaded and ran for the first time.
        prefill_seconds: of the prompt, in each round.
        decode_seconds: of all new tokens, in each round.
        prefill_tokens_per_second, decode_tokens_per_second: from the medians, over all sequences.
    """

    model: str
    revision: str | None = None
    runtime: str
    load_seconds: float
    weight_bytes: int
    memory_bytes: int
    prefill_seconds: list[float]
    decode_seconds: list[float]
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


class Bench(FileRecord, kw_only=True, omit_defaults=False):
    """Two models measured in turn in one process.

    Attributes:
        model: the pruned one; revision: its commit on the Hub; identity: of its checkpoint, as in results files.
        sparsity: the share of zeros in its packed layers; layers: their number.
        processor, threads, device: where; versions, command: how.
        prompt_tokens, new_tokens, batch_size, repeats: as for the command.
        dense, sparse: the measurements.
        prefill_ratio, decode_ratio: speed of sparse over that of dense, the medians of the rounds.
        memory_ratio: memory of sparse over that of dense.
        equal_tokens: the share of new tokens that are the same in both, with the same model and greedy choice; null with
            another baseline.
    """

    KIND: ClassVar[str] = "bench"

    model: str
    revision: str | None = None
    identity: str | None = None
    sparsity: float
    layers: int
    processor: str
    threads: int
    device: str
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    repeats: int
    dense: Speed
    sparse: Speed
    prefill_ratio: float
    decode_ratio: float
    memory_ratio: float
    equal_tokens: float | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    command: str = ""
