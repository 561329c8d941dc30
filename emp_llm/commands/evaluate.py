"""`emp-llm evaluate`: checkpoint -> results.json, and a table with its baselines."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError
from emp_llm.common.progress import load_packages
from emp_llm.evaluation.results import suite_of
from emp_llm.options.shared import (
    DEVICE_NAME,
    LoadingOptions,
    QuantizationOptions,
    Runtime,
    SuiteOptions,
    TableFormat,
    TrustRemoteCode,
)
from emp_llm.records.run_report import Results

if TYPE_CHECKING:
    from emp_llm.models.local_model import LocalModel
    from emp_llm.models.placement import Quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluated:
    """The results, and their table with the baselines."""

    results: Results
    table: str


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        source, tokenizer: the model.
        path: its results file.
        quantization, runtime: how it runs.
        results: what is measured so far.
    """

    source: "LocalModel"
    tokenizer: Any
    path: Path
    quantization: "Quantization | None"
    runtime: Runtime
    results: Results


@command
def evaluate(
    model: Annotated[str, Flag("Model folder or Hub id.", argument=True, flag="--model")],
    *,
    revision: Annotated[str | None, Flag("Branch, tag or commit of --model on the Hub.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    suite_options: SuiteOptions,
    loading: LoadingOptions,
    quantized: QuantizationOptions,
    output: Annotated[
        Path | None, Flag("Results file; default: MODEL-SUITE.json in the current folder.")
    ] = None,
    overwrite: Annotated[bool, Flag("Evaluate again if the output already holds results.")] = False,
    baseline: Annotated[
        str | None,
        Flag("Model to compare with (a Hub id may end in @REVISION), or its results file."),
    ] = None,
    beside: Annotated[
        list[Path] | None, Flag("Results file of another model to add to the table; repeatable.")
    ] = None,
    batch_size: Annotated[str | int, Flag("Examples per forward pass of a task, or auto.")] = "8",
    runtime: Annotated[
        Runtime, Flag("Run the model dense, or from packed weights (sparse); baselines run dense.")
    ] = "dense",
    form: Annotated[TableFormat, Flag("Format of the table.", flag="--format")] = "terminal",
) -> Evaluated:
    """Evaluate a model on a suite, write the results to a file, and compare them with a baseline in
    a table.

    Results are written after every task, and the same command resumes after the last finished one.
    A baseline that is a model is measured too, and its results are written beside the output as
    OUTPUT-baseline.json. With --load-in-8bit or --load-in-4bit and such a baseline, both models are
    measured with and without quantisation.

    Returns the results and the table.
    """
    load_packages()
    from emp_llm.checkpoint.files import lock
    from emp_llm.common.machine import free_memory
    from emp_llm.common.progress import stage
    from emp_llm.evaluation.evaluate import (
        Harness,
        evaluate_model,
        missing,
        parse_batch_size,
        prepare_suite,
    )
    from emp_llm.evaluation.results import (
        new_results,
        open_results,
        results_to_compare,
        save_results,
    )
    from emp_llm.models.loading import load_tokenizer
    from emp_llm.models.local_model import find_model
    from emp_llm.models.placement import parse_device_map, quantization_of
    from emp_llm.reporting.studies import compare

    if runtime == "sparse":
        if quantized.load_in_8bit or quantized.load_in_4bit:
            raise UserError(
                "--runtime sparse computes from packed weights; leave out "
                "--load-in-8bit and --load-in-4bit."
            )
        if DEVICE_NAME.fullmatch(loading.device_map) is None:
            raise UserError(
                "--runtime sparse runs on one device: --device-map auto, cpu or "
                f"cuda:N, not {loading.device_map}."
            )
    parse_device_map(loading.device_map)
    size = parse_batch_size(batch_size)
    quantization = quantization_of(quantized.load_in_8bit, quantized.load_in_4bit)
    suite = suite_of(suite_options)
    trust = trust_remote_code
    given = Path(baseline) if baseline is not None and baseline.endswith(".json") else None
    sources = [find_model(model, revision, trust)]
    if baseline is not None and given is None:
        sources.append(find_model(baseline, None, trust))
    # "perplexity-seqlen=512" of "perplexity,seqlen=512".
    base, _, changes = suite.name.partition(",")
    marks = [
        sources[0].short_name,
        quantization,
        Path(base).stem,
        *filter(None, changes.split(",")),
    ]
    name = "-".join(str(mark) for mark in marks if mark)
    file = output or Path(f"{name.replace('/', '-')}.json")

    with ExitStack() as stack:

        def subject(
            source: "LocalModel",
            mark: str = "",
            bits: "Quantization | None" = None,
            engine: Runtime = "dense",
        ) -> Subject:
            path = file.with_name(f"{file.stem}{mark}.json") if mark else file
            stack.enter_context(lock(path))  # before its earlier results are read
            results = new_results(
                source, suite, size, loading.dtype, loading.device_map, bits, engine
            )
            tokenizer = load_tokenizer(source.folder, trust)
            results.made_by.text = suite.of_model(source.folder, tokenizer).record().text
            return Subject(
                source, tokenizer, path, bits, engine, open_results(path, results, overwrite)
            )

        # What is measured, in the order of the table; the last is --model.
        runs = []
        if len(sources) > 1:
            runs.append(subject(sources[1], "-baseline"))
            if quantization is not None:
                runs.append(subject(sources[0], "-unquantised"))
                runs.append(subject(sources[1], f"-baseline-{quantization}", quantization))
        runs.append(subject(sources[0], bits=quantization, engine=runtime))
        results = runs[-1].results
        others = [results_to_compare(path, "--beside", results.made_by) for path in beside or []]
        first = [] if given is None else [results_to_compare(given, "--baseline", results.made_by)]

        # The data of the suite is read before any model is measured.
        unfinished = [run for run in runs if missing(suite, run.results.measures)]
        harness = Harness(suite.tasks) if suite.tasks and unfinished else None
        prepared = {
            run.path: prepare_suite(suite, run.source.folder, run.tokenizer, size, harness)
            for run in unfinished
        }
        for run in runs:
            if run.path not in prepared:
                logger.info("%s: already finished; not measured again.", run.path)
                # A run was interrupted just before this.
                if not run.results.complete:
                    run.results.complete = True
                    save_results(run.results, run.path)
                continue
            with stage(f"evaluate {run.source.short_name}"):
                loaded = _load(run, loading, trust)
                evaluate_model(loaded, prepared.pop(run.path), run.results, run.path)
                del loaded
                free_memory()
            logger.info("results in %s", run.path)
    every = [*first, *(run.results for run in runs), *others]
    return Evaluated(results, compare(every, form))


def _load(run: Subject, loading: LoadingOptions, trust_remote_code: bool) -> Any:
    """The model of a run, by its runtime."""
    from emp_llm.models.loading import load_model
    from emp_llm.runtime.loader import load, run_device

    folder = run.source.folder
    if run.runtime == "dense":
        return load_model(
            folder, loading.device_map, loading.dtype, trust_remote_code, run.quantization
        )
    return load(
        folder,
        device=run_device(loading.device_map),
        dtype=loading.dtype,
        trust_remote_code=trust_remote_code,
    )


def show(result: Evaluated) -> None:
    """Print the table."""
    print(result.table)
