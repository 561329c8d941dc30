"""What jobs need of the Hub, downloaded into the cache by the login node, because the nodes have no network.

A process of its own does it (`python -m emp_llm.cluster.slurm.downloads`): the cache is chosen by variables of the environment,
which the Hub's client reads once.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from emp_llm.cluster.plan_file import Job
from emp_llm.common.errors import UserError
from emp_llm.evaluation.suites import Suite, find_suite, suite_of
from emp_llm.options.evaluation import SuiteOptions
from emp_llm.records.corpus import Corpus

logger = logging.getLogger(__name__)
_LOCAL_READERS = ("json", "csv", "parquet", "text", "arrow")


class _Wanted(msgspec.Struct):
    """Input of the process: the jobs, and the outputs of the plan, which are no models of the Hub."""

    jobs: list[Job]
    outputs: list[str]


def download_for(jobs: Sequence[Job], plan: Sequence[Job], study: Path, cache: str | None) -> None:
    """Download models, calibration texts and the data of suites that are not in the cache yet.

    Args:
        jobs: that will run.
        plan: all jobs of the study.
        study: where they will run.
        cache: HF_HOME; None: as the environment says.

    Raises:
        UserError: something cannot be downloaded.
    """
    wanted = msgspec.json.encode(_Wanted([*jobs], [job.output for job in plan]))
    environment = os.environ | ({} if cache is None else {"HF_HOME": cache})
    root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    words = [sys.executable, "-m", "emp_llm.cluster.slurm.downloads"]
    done = subprocess.run(words, cwd=study, env=environment, input=wanted, stdout=subprocess.PIPE, check=False)
    answer = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == 2:
        raise UserError(answer)
    if done.returncode:
        raise UserError("the download for the nodes failed, as shown above; with --no-prepare, nothing is downloaded.")


def download_listed() -> None:
    """Read the wanted jobs from standard input, and download what they need; a UserError is printed, with exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=_Wanted)
    try:
        _download(wanted)
    except UserError as error:
        print(error)
        sys.exit(2)


def _download(wanted: _Wanted) -> None:
    from emp_llm.hub.local_model import find_model

    models = dict.fromkeys(_models(wanted))
    texts = [corpus for name in dict.fromkeys(filter(None, map(_calibration, wanted.jobs))) for corpus in _corpora(name)]
    suites = list(dict.fromkeys(suite for job in wanted.jobs for suite in _suites(job)))
    texts += [suite.corpus for suite in suites if suite.corpus is not None]
    for name, revision, trust in models:
        logger.info("%s: looking in the cache.", name)
        find_model(name, revision, trust)
    for corpus in dict.fromkeys(texts):
        _download_text(corpus)
    for suite in suites:
        tasks = tuple(task for task in suite.tasks if task.folder is None or _reads_hub(task.folder))
        if tasks:
            from emp_llm.evaluation.harness import Harness

            logger.info("suite %s: looking for its tasks in the cache.", suite.name)
            Harness(tasks)


def _models(wanted: _Wanted) -> Iterable[tuple[str, str | None, bool]]:
    """(name, revision, trust_remote_code) of the models that are no folders here."""
    for job in wanted.jobs:
        words = job.arguments
        for flag in ("--model", "--baseline"):
            name = _value(words, flag)
            if name is None or name in wanted.outputs or name.endswith(".json"):
                continue
            if not (Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
                revision = _value(words, "--revision") if flag == "--model" else None
                yield name, revision, "--trust-remote-code" in words


def _calibration(job: Job) -> str | None:
    """The calibration text of a job; None if it reads none."""
    from emp_llm.options.calibration import TEXT

    words = job.arguments
    given = _value(words, "--calibration")
    if given is not None:
        return given
    methods = (_value(words, "--methods") or _value(words, "--method") or "wanda").split(",")
    fits = any(word.startswith(("--refit", "--propagate")) for word in words)
    if job.kind == "evaluate" or _value(words, "--activations") is not None:
        return None
    return TEXT if job.kind == "calibrate" or fits or not all(name.strip().endswith("magnitude") for name in methods) else None


def _corpora(calibration: str) -> list[Corpus]:
    from emp_llm.calibration.texts import calibration_corpora
    from emp_llm.options.calibration import CalibrationOptions

    return calibration_corpora(CalibrationOptions(calibration=calibration), None)


def _suites(job: Job) -> Iterable[Suite]:
    words = job.arguments
    if job.kind in ("evaluate", "sweep"):
        yield suite_of(SuiteOptions(suite=_value(words, "--suite"), tasks=_value(words, "--tasks")))
    elif job.kind == "prune":
        name = _value(words, "--evaluate")
        if name is not None:
            yield find_suite(name)


def _download_text(corpus: Corpus) -> None:
    if corpus.file is not None or corpus.dataset is None or Path(corpus.dataset).is_dir():
        return
    if corpus.stream:
        raise UserError(
            f"{corpus.source} is streamed from the Hub and never in the cache, and the nodes are offline. Run its calibrations "
            "here (emp-llm run STUDY --only ID), calibrate on a file of it, or set offline = false in the site file."
        )
    from emp_llm.calibration.texts import open_data_set

    logger.info("%s: looking in the cache.", corpus.source)
    open_data_set(corpus)


def _reads_hub(folder: Path) -> bool:
    """Whether a task file in a folder names a data set that is not read from local files."""
    for path in folder.rglob("*.yaml"):
        names = re.findall(r"^dataset_path:\s*[\"']?([^\"'\s#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if any(name not in _LOCAL_READERS and not Path(name).exists() for name in names):
            return True
    return False


def _value(words: Sequence[str], flag: str) -> str | None:
    """The value of an option of a command line; None if it is not given."""
    found = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


if __name__ == "__main__":
    download_listed()
