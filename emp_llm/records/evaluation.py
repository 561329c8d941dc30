"""The measurements of a suite: a perplexity and tasks, and the definition of the suite itself."""

import math
from typing import Any

import msgspec

from emp_llm.records.base import Part
from emp_llm.records.source import TextRecord


class PerplexityRecord(Part, kw_only=True, omit_defaults=False):
    """A perplexity, and the extent of the measured text.

    Attributes:
        perplexity: exp of `loss`; null if it is infinite because the loss is too large for exp.
        loss: mean of the blocks' mean next-token losses, each weighted by its tokens; in nats.
        tokens, blocks, block_length: extent of the measured text; the last block may be shorter.
        seconds: of the forward passes.
        block_losses: mean loss of each block in order, to seven decimals, for the uncertainty of a difference.
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

    @property
    def value(self) -> float:
        """The perplexity, infinity included."""
        return math.inf if self.perplexity is None else self.perplexity


class SampleCount(Part, kw_only=True):
    """Number of examples of a task, and number of those that were used."""

    original: int
    effective: int


class TaskRecord(Part, kw_only=True, omit_defaults=False):
    """One task of a suite, as lm-eval reports it.

    Attributes:
        results: metrics by task; a group or tag has several tasks. Accuracies ("acc,none") are fractions; errors are named
            with "_stderr". null is an infinite perplexity.
        versions, n_shot, n_samples: by task.
        groups: names in `results` that summarise others.
        seconds: time of the task.
    """

    results: dict[str, dict[str, Any]]
    versions: dict[str, Any] = {}
    n_shot: dict[str, Any] = msgspec.field(default_factory=dict, name="n-shot")
    n_samples: dict[str, SampleCount] = msgspec.field(default_factory=dict, name="n-samples")
    groups: list[str] = []
    seconds: float | None = None


class Measures(Part, kw_only=True):
    """The measurements of a suite on one model.

    Attributes:
        perplexity, tasks: the measured parts of the suite.
        same_masks_as: in a sweep, the earlier point with the same masks, from which the numbers were copied.
    """

    perplexity: PerplexityRecord | None = None
    tasks: dict[str, TaskRecord] = {}
    same_masks_as: str | None = None

    @property
    def parts(self) -> int:
        """Number of measured parts of the suite."""
        return (self.perplexity is not None) + len(self.tasks)


class SuiteTask(Part, kw_only=True):
    """A task of a suite: its name and settings; for the user's own task files, name and hash of their folder."""

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
