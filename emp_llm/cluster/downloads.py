"""What jobs need of the Hub, downloaded into the cache by the login node, because the nodes have no
network.

A process of its own downloads (`python -m emp_llm.cluster.downloads`): variables of the environment
choose the cache, and the Hub's client reads them once.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emp_llm.cluster.jobs import Job
from emp_llm.common.errors import UserError
from emp_llm.options.calibration import TEXT
from emp_llm.options.evaluation import SuiteOptions
from emp_llm.options.recipe import Recipe
from emp_llm.options.sweep import METHODS

logger = logging.getLogger(__name__)


class Wanted(msgspec.Struct):
    """What jobs read.

    Attributes:
        models: (name, revision, trust_remote_code). texts: of calibrations. suites: (suite, tasks).
    """

    models: list[tuple[str, str | None, bool]] = []
    texts: list[str] = []
    suites: list[tuple[str | None, str | None]] = []


def wanted_by(
    jobs: Sequence[Job], outputs: Sequence[str], parsed: Callable[[str, list[str]], Any]
) -> Wanted:
    """What jobs read of the Hub, or of files.

    Args:
        jobs: that will run.
        outputs: of the plan, which are no models of the Hub.
        parsed: the options of a command, given its name and its words.
    """
    wanted = Wanted()
    for job in jobs:
        options = parsed(job.kind, job.arguments[1:])
        wanted.models.append((options.model, options.revision, options.trust_remote_code))
        if (
            job.kind == "evaluate"
            and options.baseline is not None
            and not options.baseline.endswith(".json")
        ):
            wanted.models.append((options.baseline, None, options.trust_remote_code))
        if _reads_text(job.kind, options):
            wanted.texts.append(options.calibration or TEXT)
        if job.kind in ("evaluate", "sweep"):
            wanted.suites.append((options.suite, options.tasks))
        elif job.kind == "prune" and options.evaluate is not None:
            wanted.suites.append((options.evaluate, None))
    wanted.models = [model for model in wanted.models if model[0] not in outputs]
    return wanted


def _reads_text(kind: str, options: Any) -> bool:
    """Whether a job reads its calibration text."""
    if kind == "evaluate":
        return False
    if kind == "calibrate" or options.calibration is not None:
        return True
    calibrates = options.activations is None
    if kind == "sweep":
        return calibrates and not all(
            name.strip().endswith("magnitude") for name in (options.methods or METHODS).split(",")
        )
    recipe: Recipe = options.groups["words"].recipe
    return recipe.moves or (recipe.needs_activations and calibrates)


def download(wanted: Wanted, study: Path, cache: str | None) -> None:
    """Download what is not in the cache yet, in a process of its own.

    Args:
        study: folder that relative paths begin at.
        cache: HF_HOME; None: as the environment says.

    Raises:
        UserError: something cannot be downloaded, or a local model is missing.
    """
    environment = os.environ | ({} if cache is None else {"HF_HOME": cache})
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    words = [sys.executable, "-m", "emp_llm.cluster.downloads"]
    text = msgspec.json.encode(wanted)
    done = subprocess.run(
        words, cwd=study, env=environment, input=text, stdout=subprocess.PIPE, check=False
    )
    if done.returncode == 2:
        raise UserError(done.stdout.decode("utf-8", "replace").strip())
    if done.returncode:
        raise UserError(
            "the download for the nodes failed, as shown above; with --no-prepare, "
            "nothing is downloaded."
        )


def _download_here(wanted: Wanted) -> None:
    from emp_llm.calibration.texts import calibration_corpora, open_data_set
    from emp_llm.evaluation.suites import suite_of
    from emp_llm.hub.local_model import find_model

    for model in dict.fromkeys(wanted.models):
        logger.info("%s: looking for it.", model[0])
        find_model(*model)
    texts = [corpus for name in wanted.texts for corpus in calibration_corpora(name)]
    suites = dict.fromkeys(
        suite_of(SuiteOptions(suite=suite, tasks=tasks)) for suite, tasks in wanted.suites
    )
    texts += [suite.corpus for suite in suites if suite.corpus is not None]
    for corpus in dict.fromkeys(texts):
        if corpus.file is not None or corpus.dataset is None or Path(corpus.dataset).is_dir():
            continue
        if corpus.stream:
            raise UserError(
                f"{corpus.source} is streamed from the Hub and never in the cache, and the nodes "
                "are offline. Run its calibrations here (emp-llm run STUDY --only ID), calibrate "
                "on a file, or set offline = false."
            )
        logger.info("%s: looking for it.", corpus.source)
        open_data_set(corpus)
    for suite in suites:
        if suite.tasks:
            from emp_llm.evaluation.harness import Harness

            logger.info("suite %s: looking for its tasks.", suite.name)
            Harness(suite.tasks)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _download_here(msgspec.json.decode(sys.stdin.buffer.read(), type=Wanted))
    except UserError as error:
        print(error)
        sys.exit(2)
