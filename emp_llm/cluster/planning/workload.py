"""The work of a job: its tokens, its floating-point operations, and the bytes that it reads and writes.

The rates are those of one machine and a stated GPU; `needs.assumptions` prints them.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from emp_llm.cluster.plan_file import JobKind
from emp_llm.cluster.planning.model_size import ModelSize
from emp_llm.evaluation.suites import Suite, Task
from emp_llm.records.corpus import Corpus

GPU_FLOPS = 1.0e14  # a third of the peak of a GPU with 3.1e14 bfloat16 operations a second; not measured
# Of one process. A core gave 0.2e11 in bfloat16 without instructions for it (scripts/results/needs.md), 1.2e11 in float32
# (scripts/results/refit.md), and 3e11 in bfloat16 with them (scripts/results/calibration_by_blocks.md).
CPU_FLOPS = 0.5e11
DISK = 0.4e9  # bytes a second, read and written at once: scripts/results/bench_prune.md
START = 30.0  # seconds to import the packages and to load the data

TEXT_BYTES = 1_300_000  # of an evaluation text of unknown size: that of WikiText-2's test split


class TaskSize(NamedTuple):
    """The size of a task.

    Attributes:
        examples: their number.
        choices: answers that the model reads for each; answers of one token are read at once.
        length, longest: tokens of a question with an answer, in the mean and at most.
    """

    examples: int
    choices: int
    length: int
    longest: int


# The numbers of examples are those of the data sets; the tokens are rough, for a vocabulary of 32,000.
TASKS = {
    "arc_challenge": TaskSize(1172, 4, 44, 200),
    "arc_easy": TaskSize(2376, 4, 36, 200),
    "boolq": TaskSize(3270, 1, 160, 1000),
    "hellaswag": TaskSize(10042, 4, 100, 200),
    "openbookqa": TaskSize(500, 4, 24, 100),
    "piqa": TaskSize(1838, 2, 40, 300),
    "rte": TaskSize(277, 1, 90, 350),
    "wikitext": TaskSize(62, 1, 5600, 2048),
    "winogrande": TaskSize(1267, 2, 32, 80),
}
UNKNOWN_TASK = TaskSize(1000, 4, 100, 400)
_LOGITS_AT_A_TIME = 1 << 28  # of evaluation.perplexity


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job does, as far as its needs depend on it.

    Attributes:
        gpu_gb: memory of a GPU, 1e9 bytes; 0: it computes on the CPU.
        processes: ranks, each with a whole model.
        dtype: of forward passes; "auto" is the checkpoint's.
        calibrates: it collects norms; false if it is given an activations file, or needs none.
        samples, seqlen, batch_size: of the calibration text.
        refit: it moves the kept weights (--refit, SparseGPT or ADMM).
        searches: it searches for masks and weights by ADMM.
        propagates: --propagate pruned.
        suite: that is evaluated.
        limit: of --limit.
        task_batch: examples of a task in a forward pass.
        points: of a sweep, without the dense model.
        keep: a sweep keeps its checkpoints.
    """

    gpu_gb: float = 0.0
    processes: int = 1
    dtype: str = "auto"
    calibrates: bool = False
    samples: int = 128
    seqlen: int = 2048
    batch_size: int = 4
    refit: bool = False
    searches: bool = False
    propagates: bool = False
    suite: Suite | None = None
    limit: int | None = None
    task_batch: int = 8
    points: int = 0
    keep: bool = False

    @property
    def tokens(self) -> int:
        """Of the calibration."""
        return self.samples * self.seqlen

    @property
    def measured(self) -> Suite | None:
        """The suite with its limit."""
        return self.suite and self.suite.limited(self.limit)


def hours_of(kind: JobKind, size: ModelSize, work: Work) -> float:
    """The time of a job in hours: of its operations and bytes, one after the other."""
    ranks = work.processes
    runs = work.gpu_gb > 0
    operations, moved = 0.0, 0.0
    if work.calibrates or work.refit:
        operations += _calibration(size, work)
        moved += size.file_bytes
    if kind == "prune":
        moved += 2 * size.file_bytes
    if kind in ("evaluate", "sweep"):
        times = work.points + 1 if kind == "sweep" else 1
        operations += times * evaluation_operations(size, work)
        moved += size.file_bytes * (1 + (2 if work.keep else 1) * work.points)
    seconds = START + operations / ranks / (GPU_FLOPS if runs else CPU_FLOPS) + moved / DISK
    return seconds / 3600


def _calibration(size: ModelSize, work: Work) -> float:
    passes = 2 if work.propagates else 1
    operations = passes * forward_operations(size, work.tokens, work.seqlen)
    if work.refit:
        # The dense and the pruned blocks run once for each level; the moments, and about 12 iterations of the solver. ADMM adds
        # 40 solutions and eight factorisations.
        operations += 6 * forward_operations(size, work.tokens, work.seqlen)
        steps = 12 + (40 if work.searches else 0)
        operations += sum(2 * n * (work.tokens * i * (i + o) + steps * o * i * i) for o, i, n in size.shapes)
        operations += sum(3 * n * i**3 for _, i, n in size.shapes) if work.searches else 0
    return operations


def forward_operations(size: ModelSize, tokens: float, length: float, head: bool = False) -> float:
    """Floating-point operations of a forward pass: two for each weight and token, and those of the attention."""
    weights = size.active + (size.head if head else 0)
    return tokens * (2 * weights + 4 * size.layers * size.hidden_size * length)


def evaluation_operations(size: ModelSize, work: Work) -> float:
    """Floating-point operations of one evaluation of the suite."""
    suite = work.measured
    if suite is None:
        return 0.0
    operations = 0.0
    if suite.corpus is not None:
        length = block_of(size, suite.corpus)
        operations += forward_operations(size, tokens_of_text(size, suite), length, head=True)
    for task in suite.tasks:
        found = size_of_task(task)
        tokens = found.examples * found.choices * found.length
        operations += forward_operations(size, tokens, found.length, head=True)
    return operations


def block_of(size: ModelSize, corpus: Corpus) -> int:
    """Tokens of a block of an evaluation text."""
    wanted = corpus.seqlen or 2048
    return min(wanted, size.context or wanted)


def blocks_at_a_time(size: ModelSize, suite: Suite) -> int:
    """Blocks in a forward pass of the perplexity of a suite's text."""
    assert suite.corpus is not None
    length = block_of(size, suite.corpus)
    blocks = math.ceil(tokens_of_text(size, suite) / length)
    return max(1, min(16, blocks, _LOGITS_AT_A_TIME // (length * max(1, size.vocabulary))))


def tokens_of_text(size: ModelSize, suite: Suite) -> float:
    """Tokens of a suite's text: bytes / (bytes per token, which grow with the vocabulary)."""
    assert suite.corpus is not None
    file = suite.corpus.file
    count = Path(file).stat().st_size if file is not None and Path(file).is_file() else TEXT_BYTES
    tokens = count / bytes_per_token(size.vocabulary)
    return tokens if suite.limit is None else min(tokens, suite.limit * block_of(size, suite.corpus))


def bytes_per_token(vocabulary: int) -> float:
    """Bytes of English text in a token: 1 for 256 tokens, 3.8 for 32,000, 4.6 for 128,000."""
    return max(1.0, 1 + 0.4 * (math.log2(max(1, vocabulary)) - 8))


def size_of_task(task: Task) -> TaskSize:
    """The size of a task with its limit and its examples before each question."""
    size = TASKS.get(task.name) or _own_task(task.name, task.folder) or UNKNOWN_TASK
    shots = 1 + (task.num_fewshot or 0)
    examples = size.examples if task.limit is None else min(size.examples, task.limit)
    return TaskSize(examples, size.choices, size.length * shots, size.longest * shots)


def is_known(task: Task) -> bool:
    """Whether the size of a task is known."""
    return task.name in TASKS or _own_task(task.name, task.folder) is not None


@cache
def _own_task(name: str, folder: Path | None) -> TaskSize | None:
    """The size of a task of the user's own, from the .jsonl files that its NAME.yaml names, with or without their suffix."""
    file = None if folder is None else folder / f"{name}.yaml"
    if folder is None or file is None or not file.is_file():
        return None
    words = file.read_text(encoding="utf-8", errors="replace")
    named = [path for path in sorted(folder.glob("*.jsonl")) if re.search(rf"(?<!\w){re.escape(path.stem)}(?!\w)", words)]
    lines = [len(line) for path in named for line in path.read_bytes().splitlines()]
    per_token = bytes_per_token(1 << 15)
    if not lines:
        return None
    length, longest = sum(lines) / len(lines) / per_token, max(lines) / per_token
    return TaskSize(len(lines), UNKNOWN_TASK.choices, math.ceil(length), math.ceil(longest))
