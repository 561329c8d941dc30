"""Options of evaluation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from emp_llm.common.declared import Flag

TableFormat = Literal["terminal", "markdown"]


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The suite, or tasks without one, and a limit on their size."""

    suite: Annotated[
        str | None,
        Flag("Evaluation suite: a name from eval/, or your own .toml file; default: perplexity."),
    ] = None
    tasks: Annotated[str | list[str] | None, Flag("lm-eval tasks a,b instead of a suite.")] = None
    num_fewshot: Annotated[
        int | None,
        Flag(
            "Examples before each question, for --tasks; default: each task's own number.",
            minimum=0,
        ),
    ] = None
    apply_chat_template: Annotated[
        bool, Flag("Ask the questions of tasks through the tokenizer's chat template.")
    ] = False
    limit: Annotated[
        int | None,
        Flag(
            "Use at most this many examples per task and blocks of text; results are partial.",
            minimum=1,
        ),
    ] = None
