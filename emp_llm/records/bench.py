"""The output of `bench`: speed and memory of a model with and without its zeros, on one machine."""

from typing import ClassVar

import msgspec

from emp_llm.records.base import FileRecord, Part


class LoadedModel(Part, kw_only=True, omit_defaults=False):
    """One of the two models.

    Attributes:
        model: its name; revision: its commit on the Hub; null for a folder.
        runtime: "dense" or "sparse".
        load_seconds: from the files, which were read before.
        weight_bytes: size of its weights in memory.
        memory_bytes: by which the process, or the GPU's memory, grew while the model was loaded and
            ran for the first time, on the smallest batch.
    """

    model: str
    revision: str | None = None
    runtime: str
    load_seconds: float
    weight_bytes: int
    memory_bytes: int


class Speed(Part, kw_only=True, omit_defaults=False):
    """The speed of both models at one thing.

    Attributes:
        dense_seconds, sparse_seconds: in each round; both models run in it, one after the other.
        dense, sparse: tokens per second over all sequences, from the medians of the seconds.
        ratio, lowest_ratio, highest_ratio: speed of sparse over that of dense in the rounds: their
            median, and their range.
    """

    dense_seconds: list[float]
    sparse_seconds: list[float]
    dense: float
    sparse: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float


class Batch(Part, kw_only=True, omit_defaults=False):
    """Both models with some sequences at a time.

    Attributes:
        batch_size: the number of sequences.
        prefill, decode: speed at the prompts, and at all new tokens.
        equal_tokens: the share of new tokens that are the same in both, with the same model and
            greedy choice; null with another baseline.
    """

    batch_size: int
    prefill: Speed
    decode: Speed
    equal_tokens: float | None = None


class Bench(FileRecord, kw_only=True, omit_defaults=False):
    """Two models measured in turn in one process.

    Attributes:
        model: the pruned one; revision: its commit on the Hub; identity: of its checkpoint, as in
            results files.
        sparsity: the share of zeros in its packed layers; layers: their number.
        processor, threads, device: where; versions, command: how.
        text: the file of the prompts; null: random tokens, because the model has no tokenizer.
        prompt_tokens, new_tokens, repeats: as for the command.
        dense, sparse: the models.
        memory_ratio: memory of sparse over that of dense.
        batches: their speeds.
    """

    KIND: ClassVar[str] = "bench"
    VERSION: ClassVar[int] = 2

    model: str
    revision: str | None = None
    identity: str | None = None
    sparsity: float
    layers: int
    processor: str
    threads: int
    device: str
    text: str | None = None
    prompt_tokens: int
    new_tokens: int
    repeats: int
    dense: LoadedModel
    sparse: LoadedModel
    memory_ratio: float
    batches: list[Batch]
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    command: str = ""
