"""The measurements of a suite: a perplexity and tasks, and the definition of the suite itself."""

import math
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from emp_llm.common.errors import count_of
from emp_llm.records.base import FileRecord, Part, TextRecord


class PerplexityRecord(Part, kw_only=True, omit_defaults=False):
    """A perplexity, and the extent of the measured text.

    Attributes:
        perplexity: exp of `loss`; null if it is infinite because the loss is too large for exp.
        loss: mean of the blocks' mean next-token losses, each weighted by its tokens; in nats.
        tokens, blocks, block_length: extent of the measured text; the last block may be shorter.
        seconds: duration of the forward passes.
        block_losses: mean loss of each block in order, to seven decimals, for the uncertainty of a
            difference.
        partial: whether a limit left out a part of the text.
    """

    perplexity: float | None
    loss: float | None = None
    tokens: int
    blocks: int = 0
    block_length: int
    seconds: float = 0.0
    partial: bool = False
    block_losses: list[float] = []

    def __post_init__(self) -> None:
        if self.block_losses and not 0 < self.block_tokens[-1] <= self.block_length:
            given = count_of(len(self.block_losses), "block loss", "block losses")
            raise ValueError(f"its {given} do not fit {count_of(self.tokens, 'token')}")

    @property
    def block_tokens(self) -> list[int]:
        """Number of tokens of each block in `block_losses`; only the last may be shorter."""
        full = max(0, len(self.block_losses) - 1)
        return [self.block_length] * full + [self.tokens - full * self.block_length] * bool(
            self.block_losses
        )

    @property
    def value(self) -> float:
        """The perplexity, infinity included."""
        return math.inf if self.perplexity is None else self.perplexity


class CheckRecord(Part, kw_only=True):
    """The dense and the pruned model on sequences of the calibration's text that the calibration
    did not see.

    Attributes:
        text: its name, as --calibration names it; null in older reports.
    """

    text: str | None = None
    dense: PerplexityRecord
    pruned: PerplexityRecord


class SampleCount(Part, kw_only=True):
    """Number of examples of a task, and number of those that were used."""

    original: int
    effective: int


class AnswersRecord(Part, kw_only=True):
    """The correct answers of a task, one bit for each example, for the standard error of a
    difference.

    Attributes:
        examples: their number.
        sha256: of the examples' numbers and hashes in order; equal for the same examples in the
            same order.
        correct: for each accuracy ("acc,none"), the bits as base64: 1 for a correct answer. The
            first example has the highest bit of the first byte; zeros fill the last byte.
    """

    examples: int
    sha256: str
    correct: dict[str, str]

    def __post_init__(self) -> None:
        for metric in self.correct:
            self.bits(metric)

    def bits(self, metric: str) -> int:
        """The bits of an accuracy as one number, the last example lowest; ValueError if their
        count is wrong.
        """
        data = b64decode(self.correct[metric], validate=True)
        surplus = -self.examples % 8
        bits = int.from_bytes(data)
        if (
            self.examples < 1
            or 8 * len(data) != self.examples + surplus
            or bits & ((1 << surplus) - 1)
        ):
            raise ValueError(
                f"correct: {metric} must be one bit for each of the {self.examples} examples"
            )
        return bits >> surplus


def packed_answers(correct: Sequence[bool]) -> str:
    """Answers as in `AnswersRecord.correct`."""
    size = -(-len(correct) // 8)
    bits = int("".join("1" if each else "0" for each in correct).ljust(8 * size, "0") or "0", 2)
    return b64encode(bits.to_bytes(size)).decode("ascii")


class TaskRecord(Part, kw_only=True, omit_defaults=False):
    """One task of a suite, as lm-eval reports it.

    Attributes:
        results: metrics by task; a group or tag has several tasks. Accuracies ("acc,none") are
            fractions; errors are named with "_stderr". null is an infinite perplexity.
        versions, n_shot, n_samples: by task.
        higher_is_better: by task and metric; null if the members of a group disagree.
        groups: names in `results` that summarise others.
        seconds: time of the task.
        answers: by task, if every answer is right or wrong; older files have none.
    """

    results: dict[str, dict[str, Any]]
    versions: dict[str, Any] = {}
    n_shot: dict[str, Any] = msgspec.field(default_factory=dict, name="n-shot")
    n_samples: dict[str, SampleCount] = msgspec.field(default_factory=dict, name="n-samples")
    higher_is_better: dict[str, dict[str, bool | None]] = {}
    groups: list[str] = []
    seconds: float | None = None
    answers: dict[str, AnswersRecord] = {}


class Measures(Part, kw_only=True):
    """The measurements of a suite on one model.

    Attributes:
        perplexity, tasks: the measured parts of the suite.
        same_masks_as: in a sweep, the earlier point with the same masks, from which the numbers
            were copied.
    """

    perplexity: PerplexityRecord | None = None
    tasks: dict[str, TaskRecord] = {}
    same_masks_as: str | None = None

    @property
    def parts(self) -> int:
        """Number of measured parts of the suite."""
        return (self.perplexity is not None) + len(self.tasks)


class SuiteTask(Part, kw_only=True):
    """A task of a suite: its name and settings; for the user's own task files, name and hash of
    their folder.
    """

    name: str
    num_fewshot: int | None = None
    limit: int | None = None
    folder: str | None = None
    sha256: str | None = None
    chat_template: bool | None = None


class SuiteRecord(Part, kw_only=True):
    """The definition of a suite."""

    suite: str = "suite"
    limit: int | None = None
    text: TextRecord | None = None
    tasks: list[SuiteTask] = []


class EvaluationRecord(SuiteRecord, kw_only=True):
    """The measurements of a suite on the dense and the pruned model."""

    batch_size: int | str | None = None
    dense: Measures | None = None
    pruned: Measures | None = None


# The output of `bench`: speed and memory of a model with and without its zeros, on one machine.


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
