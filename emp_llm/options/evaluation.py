"""Options of evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(Options):
    """The suite, or tasks without one, and a limit on their size."""

    suite: Annotated[str | None, Opt("Evaluation suite: a name from eval/, or your own .toml file; default: perplexity.")] = (
        None
    )
    tasks: Annotated[str | list[str] | None, Opt("lm-eval tasks a,b instead of a suite.")] = None
    num_fewshot: Annotated[
        int | None, Opt("Examples before each question, for --tasks; default: each task's own number.", minimum=0)
    ] = None
    apply_chat_template: Annotated[bool, Opt("Ask the questions of tasks through the tokenizer's chat template.")] = False
    limit: Annotated[int | None, Opt("Use at most this many examples per task and blocks of text; results are partial.")] = None


@dataclass(frozen=True, kw_only=True)
class EvaluationStageOptions(Options):
    """The evaluation stages of `prune`: of the dense and of the pruned model."""

    evaluate: Annotated[
        str | None,
        Opt("Evaluate the dense and the pruned model with this suite (name or file); ,limit=N shortens it."),
    ] = None
    baseline: Annotated[Path | None, Opt("Results file of the dense model, used instead of evaluating it.")] = None

    def check_evaluation(self) -> None:
        """Raise UserError for a baseline without an evaluation."""
        if self.baseline is not None and self.evaluate is None:
            raise UserError("--baseline needs an evaluation; add --evaluate SUITE.")
