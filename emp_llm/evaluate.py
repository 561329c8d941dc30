"""`python -m emp_llm.evaluate`: checkpoint -> results.json, and a table beside what it is compared with."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from emp_llm.cli import run
from emp_llm.models.corpora import text_rows
from emp_llm.models.errors import UserError
from emp_llm.models.loading import Quantization, check_options, load_model, load_tokenizer, quantization_of
from emp_llm.models.memory import free_memory
from emp_llm.services.comparison import Format, check_format, compare
from emp_llm.services.evaluation import BATCH_SIZE, Evaluation, missing
from emp_llm.services.harness import Harness, parse_batch_size
from emp_llm.services.hub import Source, find_model
from emp_llm.services.options import DeviceMap, Dtype, Limit, Revision, TrustRemoteCode
from emp_llm.services.results import Record, ResultsFile, difference, new_record, read_results
from emp_llm.services.suites import Suite, find_suite

logger = logging.getLogger(__name__)


def evaluate(
    model: Annotated[str | None, Option(help="Model folder or Hub id.")] = None,
    suite: Annotated[str, Option(help="What to judge it by: a suite of eval/, or a .toml file of your own.")] = "perplexity",
    baseline: Annotated[str | None, Option(help="Model, or results.json of an earlier run, to compare with.")] = None,
    beside: Annotated[list[Path] | None, Option(help="results.json of a further model for the table; repeatable.")] = None,
    limit: Limit = None,
    batch_size: Annotated[str, Option(help="Examples to a forward pass of a task, or auto.")] = str(BATCH_SIZE),
    load_in_8bit: Annotated[bool, Option("--load-in-8bit", help="Quantise by bitsandbytes (LLM.int8).")] = False,
    load_in_4bit: Annotated[bool, Option("--load-in-4bit", help="Quantise by bitsandbytes (NF4).")] = False,
    device_map: DeviceMap = "auto",
    dtype: Dtype = "auto",
    output: Annotated[Path | None, Option(help="Results file; default: MODEL-SUITE.json in the current folder.")] = None,
    form: Annotated[Format, Option("--format", help="Of the table.")] = "terminal",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Measure anew where the output holds results already.")] = False,
    prepare: Annotated[
        bool, Option("--prepare", help="Only fetch what the suite (and the model) needs into the cache.")
    ] = False,
) -> dict[str, Any]:
    """Measure a suite on a model, keep the results in a file, and show them beside a baseline's.

    Results are written after every task; the same command again goes on where the last one stopped. A baseline that is a
    model is measured likewise and kept beside the output, as OUTPUT-baseline.json. With --load-in-8bit or --load-in-4bit and
    such a baseline, both models are measured both ways: what pruning costs, what quantising costs, and both.

    Returns the record that is written to the output, and under "table" the table that the command line shows; with --prepare
    "prepared": what is in the cache now.
    """
    check_format(form)
    check_options(device_map, dtype)
    size = parse_batch_size(batch_size)
    quantization = quantization_of(load_in_8bit, load_in_4bit)
    chosen = find_suite(suite).limited(limit)
    sources = [find_model(name, revision if name == model else None, trust_remote_code) for name in _models(model, baseline)]
    if prepare:
        return {"suite": suite, "prepared": [source.name for source in sources] + _prepare(chosen)}
    if model is None:
        raise UserError("--model is missing: the folder or Hub id of the model to measure.")
    source = sources[0]
    marks = [source.short_name, quantization, _file_name(chosen.name)]
    output = output or Path(f"{'-'.join(filter(None, marks))}.json")

    def job(source: Source, mark: str, quantization: Quantization | None) -> "_Job":
        path = output.with_name(f"{output.stem}{mark}.json") if mark else output
        record = new_record(source, chosen, size, dtype, device_map, quantization)
        return _Job(chosen, source, ResultsFile(path, record, overwrite), (device_map, dtype, trust_remote_code, quantization))

    judged = job(source, "", quantization)
    known = [_other(path, "--beside", judged.record) for path in beside or []]
    first = [_other(Path(baseline), "--baseline", judged.record)] if baseline and _is_results(baseline) else []
    jobs = [judged]
    if len(sources) > 1 and quantization is None:
        jobs = [job(sources[1], "-baseline", None), judged]
    elif len(sources) > 1:
        jobs = [job(sources[1], "-baseline", None), job(source, "-unquantised", None)]
        jobs += [job(sources[1], f"-baseline-{quantization}", quantization), judged]
    harness = Harness(chosen.tasks) if chosen.tasks and any(each.unfinished for each in jobs) else None
    for each in jobs:
        each.prepare(harness, size)
    for each in jobs:
        each.run()
    return judged.record | {"table": compare([*first, *(each.record for each in jobs), *known], form)}


def show(record: dict[str, Any]) -> None:
    """Print the table, or what was fetched."""
    if "prepared" in record:
        print("\n".join(["in the cache:", *(f"  {line}" for line in record["prepared"])]))
    else:
        print(record["table"])


def _is_results(baseline: str) -> bool:
    return Path(baseline).suffix == ".json"


def _models(model: str | None, baseline: str | None) -> list[str]:
    """The models among the two."""
    return [name for name in (model, baseline) if name is not None and not _is_results(name)]


def _prepare(suite: Suite) -> list[str]:
    """Load every text and data set of a suite once, so that they are in the cache; returns what they hold, in words."""
    lines = []
    if suite.corpus is not None:
        lines.append(f"text {suite.corpus.source}: {sum(1 for _ in text_rows(suite.corpus)):,} rows")
    if suite.tasks:
        lines += [f"task {name}: {count:,} examples" for name, count in Harness(suite.tasks).examples().items()]
    return lines


class _Job:
    """A suite on one model, into one file.

    Args:
        suite, source, file: what is measured, on which model, and where it is kept.
        options: of `load_model`: device map, dtype, whether remote code is trusted, quantisation.
    """

    def __init__(
        self, suite: Suite, source: Source, file: ResultsFile, options: tuple[str, str, bool, Quantization | None]
    ) -> None:
        self._suite = suite
        self._source = source
        self._options = options
        self._file = file
        self._evaluation: Evaluation | None = None

    @property
    def record(self) -> Record:
        return self._file.record

    @property
    def unfinished(self) -> bool:
        return any(True for _ in missing(self._suite, self.record))

    def prepare(self, harness: Harness | None, batch_size: int | str) -> None:
        """Read the text, so that what is missing is said before hours are spent on the rest."""
        if self.unfinished:
            tokenizer = load_tokenizer(self._source.folder, self._options[2])
            self._evaluation = Evaluation(self._suite, tokenizer, batch_size, harness)

    def run(self) -> None:
        """Measure what is missing; the file is written after each part."""
        if self._evaluation is None:
            logger.info("%s: finished before; nothing is measured again.", self._file.path)
            self._file.save(complete=True)  # a run may have been stopped between the last part and this
            return
        done = int("perplexity" in self.record) + len(self.record.get("tasks", {}))
        if done:
            logger.info("%s: goes on after %d finished parts of the suite.", self._file.path, done)
        loaded = load_model(self._source.folder, *self._options)
        self._evaluation.measure(loaded, self.record, lambda _: self._file.save())
        self._file.save(complete=True)
        self._evaluation = None
        del loaded
        free_memory()
        logger.info("results in %s", self._file.path)


def _other(path: Path, option: str, record: Record) -> Record:
    """Results measured before, of the same suite."""
    other = read_results(path, option)
    wanted = json.loads(json.dumps(record["made_by"]))
    for key in ("text", "tasks", "limit"):
        field = difference(other["made_by"].get(key), wanted.get(key), key)
        if field is not None:
            raise UserError(f"{option} {path}: results of another suite or limit ({field}); evaluate it with the same ones.")
    if not other.get("complete"):
        raise UserError(f"{option} {path}: that run has not finished; run its command again, it goes on where it stopped.")
    for key in ("batch_size", "dtype", "device", "versions"):
        field = difference(other["made_by"].get(key), wanted.get(key), key)
        if field is not None:
            logger.warning("warning: %s was measured otherwise (%s); last digits may differ for that alone.", path, field)
    return other


def _file_name(suite: str) -> str:
    """A suite's name as part of a file's: "perplexity,seqlen=512" and "my/suite.toml" have characters of their own."""
    base, _, changes = suite.partition(",")
    return "-".join([Path(base).stem, *filter(None, changes.split(","))])


if __name__ == "__main__":
    run(evaluate, show)
