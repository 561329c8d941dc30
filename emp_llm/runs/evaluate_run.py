"""The run of `evaluate`: a stage for each model and quantisation to measure."""

import logging
from dataclasses import dataclass
from pathlib import Path

from emp_llm.calibration.corpora import text_rows
from emp_llm.common.errors import UserError
from emp_llm.common.memory import free_memory
from emp_llm.common.wording import count_of
from emp_llm.evaluation.comparison import check_format, compare
from emp_llm.evaluation.earlier_results import results_to_compare
from emp_llm.evaluation.evaluated_model import model_of_results
from emp_llm.evaluation.evaluator import Evaluator, missing
from emp_llm.evaluation.harness import Harness, parse_batch_size
from emp_llm.evaluation.results_file import ResultsFile, new_results
from emp_llm.evaluation.suites import Suite, suite_of
from emp_llm.execution.device_map import parse_device_map
from emp_llm.execution.loading import load_model, load_tokenizer
from emp_llm.execution.quantization import Quantization, quantization_of
from emp_llm.hub.local_model import LocalModel, find_model
from emp_llm.options.commands import EvaluateOptions
from emp_llm.options.runtime import Runtime
from emp_llm.records.results import Results
from emp_llm.runtime.loader import load, run_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluated:
    """The results, and their table with the baselines."""

    results: Results
    table: str


@dataclass(frozen=True)
class Prepared:
    """The content of the cache: a line for each model, text and task."""

    suite: str
    prepared: list[str]


class EvaluateRun:
    """One evaluation: `run_stages(run.stages)`.

    Args:
        options: of the command.

    Attributes:
        stages: one for each model and quantisation; the last is that of --model.

    Raises:
        UserError: options are wrong or do not fit together, or a model, the suite or a file cannot be used.
    """

    def __init__(self, options: EvaluateOptions) -> None:
        check_format(options.form)
        options.check()
        parse_device_map(options.device_map)
        self._options = options
        self._size = parse_batch_size(options.batch_size)
        self._quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
        self._suite = suite_of(options)
        names = [name for name in (options.model, options.baseline) if name and not _is_results(name)]
        self._sources = [
            find_model(name, options.revision if name == options.model else None, options.trust_remote_code) for name in names
        ]
        self.stages: list[ResultsStage] = []
        if not options.prepare:
            self._add_stages()

    def prepare(self) -> Prepared:
        """Load every text and data set of the suite once, so that they are in the cache."""
        suite, lines = self._suite, [source.name for source in self._sources]
        if suite.corpus is not None:
            rows = sum(1 for _ in text_rows(suite.corpus))
            lines.append(f"text {suite.corpus.source}: {count_of(rows, 'row')}")
        if suite.tasks:
            lines += [f"task {name}: {count_of(count, 'example')}" for name, count in Harness(suite.tasks).examples().items()]
        return Prepared(suite.name, lines)

    @property
    def evaluated(self) -> Evaluated:
        """The results and their table; available when the stages are finished."""
        results = [*self._first, *(stage.file.results for stage in self.stages), *self._beside]
        table = compare([model_of_results(each) for each in results], self._options.form)
        return Evaluated(self.stages[-1].file.results, table)

    def _add_stages(self) -> None:
        options = self._options
        if not options.model:
            raise UserError("--model is missing; give the folder or Hub id of the model to evaluate.")
        source = self._sources[0]
        marks = [source.short_name, self._quantization, _file_name(self._suite.name)]
        self._output = options.output or Path(f"{'-'.join(filter(None, marks))}.json")
        last = self._stage(source, "", self._quantization, options.runtime)
        made_by = last.file.results.made_by
        self._beside = [results_to_compare(path, "--beside", made_by) for path in options.beside or []]
        baseline = options.baseline
        self._first = [results_to_compare(Path(baseline), "--baseline", made_by)] if baseline and _is_results(baseline) else []
        before: list[ResultsStage] = []
        if len(self._sources) > 1:
            before.append(self._stage(self._sources[1], "-baseline", None))
            if self._quantization is not None:
                before.append(self._stage(source, "-unquantised", None))
                before.append(self._stage(self._sources[1], f"-baseline-{self._quantization}", self._quantization))
        self.stages = [*before, last]
        unfinished = [stage for stage in self.stages if stage.unfinished]
        harness = Harness(self._suite.tasks) if self._suite.tasks and unfinished else None
        for stage in unfinished:
            stage.prepare(harness)

    def _stage(
        self,
        source: LocalModel,
        mark: str,
        quantization: Quantization | None,
        runtime: Runtime = "dense",
    ) -> "ResultsStage":
        path = self._output.with_name(f"{self._output.stem}{mark}.json") if mark else self._output
        options = self._options
        loading = options.dtype, options.device_map, quantization, runtime
        results = new_results(source, self._suite, self._size, *loading)
        return ResultsStage(
            source, self._suite, ResultsFile(path, results, options.overwrite), options, quantization, self._size
        )


class ResultsStage:
    """Measures a suite on one model, and saves the results in a file.

    Args:
        source: the model.
        suite: to measure.
        file: for the results.
        options: of the command.
        quantization: of this model.
        batch_size: examples per forward pass of a task.
    """

    def __init__(
        self,
        source: LocalModel,
        suite: Suite,
        file: ResultsFile,
        options: EvaluateOptions,
        quantization: Quantization | None,
        batch_size: int | str,
    ) -> None:
        self.name = f"evaluate {source.short_name}"
        self.file = file
        self._source = source
        self._suite = suite
        self._options = options
        self._quantization = quantization
        self._batch_size = batch_size
        self._evaluator: Evaluator | None = None

    @property
    def unfinished(self) -> bool:
        """Whether the file lacks a part of the suite."""
        return any(True for _ in missing(self._suite, self.file.results.measures))

    def prepare(self, harness: Harness | None) -> None:
        """Read the text and the tasks' data before any model is measured, so that missing data is reported at once."""
        tokenizer = load_tokenizer(self._source.folder, self._options.trust_remote_code)
        self._evaluator = Evaluator(self._suite, tokenizer, self._batch_size, harness)

    def finished(self) -> bool:
        if self.unfinished:
            return False
        logger.info("%s: already finished; not measured again.", self.file.path)
        self.file.save(self.file.results.measures, complete=True)  # a run may have been interrupted just before this
        return True

    def run(self) -> None:
        assert self._evaluator is not None
        options, measures = self._options, self.file.results.measures
        if measures.parts:
            logger.info("%s: resuming after %s of the suite.", self.file.path, count_of(measures.parts, "finished part"))
        folder, trust = self._source.folder, options.trust_remote_code
        if self.file.results.made_by.runtime == "sparse":
            model = load(folder, device=run_device(options.device_map), dtype=options.dtype, trust_remote_code=trust)
        else:
            model = load_model(folder, options.device_map, options.dtype, trust, self._quantization)
        measures = self._evaluator.measure(model, measures, self.file.save)
        self.file.save(measures, complete=True)
        self._evaluator = None
        del model
        free_memory()
        logger.info("results in %s", self.file.path)


def _is_results(baseline: str) -> bool:
    return Path(baseline).suffix == ".json"


def _file_name(suite: str) -> str:
    """A suite's name as part of a file name: "perplexity-seqlen=512" of "perplexity,seqlen=512"; no folder and no extension."""
    base, _, changes = suite.partition(",")
    return "-".join([Path(base).stem, *filter(None, changes.split(","))])
