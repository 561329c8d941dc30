"""`emp-llm fetch`: a model and data of the Hub -> the cache, for runs without a network."""

from typing import Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError
from emp_llm.common.progress import load_packages
from emp_llm.options.shared import Some, SuiteOptions, TrustRemoteCode


@command
def fetch(
    model: Annotated[
        str | None, Flag("Model folder or Hub id.", argument=True, flag="--model")
    ] = None,
    *,
    revision: Annotated[str | None, Flag("Branch, tag or commit of --model on the Hub.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    suite_options: Annotated[SuiteOptions, Some("suite", "tasks")],
    calibration: Annotated[str | None, Flag("Calibration text, as for prune.")] = None,
) -> list[str]:
    """Download a model, the data of a suite and a calibration text into the cache, so that later
    runs need no network (HF_HUB_OFFLINE=1).

    Returns what is in the cache: a line for each model, text and task.
    """
    load_packages()
    from emp_llm.calibration.texts import find_corpus, names_in, text_rows
    from emp_llm.common.errors import count_of
    from emp_llm.evaluation.evaluate import Harness
    from emp_llm.evaluation.results import suite_of
    from emp_llm.models.local_model import find_model

    judged = suite_of(suite_options) if suite_options.suite or suite_options.tasks else None
    texts = [find_corpus(name) for name in names_in(calibration)] if calibration else []
    texts += [judged.corpus] if judged is not None and judged.corpus is not None else []
    if not (model or judged or texts):
        raise UserError(
            "There is nothing to fetch; name a model, --suite, --tasks or --calibration."
        )
    streamed = next((text for text in texts if text.stream), None)
    if streamed is not None:
        raise UserError(
            f"{streamed.source} is streamed from the Hub and never in the cache. Calibrate on a "
            "file of it, or where there is a network."
        )
    lines = [find_model(model, revision, trust_remote_code).name] if model else []
    for text in texts:
        if text.file is not None or text.dataset is not None:
            rows = sum(1 for _ in text_rows(text))
            lines.append(f"text {text.source}: {count_of(rows, 'row')}")
    counts = Harness(judged.tasks).examples() if judged is not None and judged.tasks else {}
    return lines + [f"task {name}: {count_of(count, 'example')}" for name, count in counts.items()]


def show(lines: list[str]) -> None:
    """Print what is in the cache."""
    print("in the cache:", *lines, sep="\n  ")
