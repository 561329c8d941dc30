"""Slurm's commands: sbatch and squeue."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from emp_llm.cluster.slurm.script import EXPORTED
from emp_llm.common.errors import UserError, printable

_PATIENCE = 300  # seconds for an answer
_ANSWER = re.compile(r"(\d+)(;\S+)?\s*")


def check_sbatch(study: Path) -> None:
    """Raise UserError if this machine has no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"sbatch: not found; submit on a login node of a Slurm cluster. Without Slurm, emp-llm run {study} runs the study "
            "on this machine, and docs/clusters.md shows other schedulers."
        )


def sbatch_words(script: Path, dependency: str) -> list[str]:
    """The command that submits a script.

    --export stands here and not in the script, where a variable of the environment (SBATCH_EXPORT) would replace it.
    """
    words = ["sbatch", "--parsable", f"--export={','.join(EXPORTED)}"]
    return [*words, *([f"--dependency={dependency}"] if dependency else []), str(script)]


def submit_script(words: Sequence[str], study: Path) -> str:
    """Submit a script; returns the number of the array.

    Args:
        words: of `sbatch_words`.
        study: its folder, where sbatch runs.

    Raises:
        UserError: sbatch refuses, in its own words.
    """
    done = _called(words, study)
    answer = _ANSWER.fullmatch(done.stdout)
    if done.returncode or answer is None:
        raise UserError(_own_words(done, "sbatch"))
    return answer[1]


def queued_tasks(study: Path) -> dict[str, tuple[str, str]]:
    """Task ("123_4") -> (name, folder) of all tasks of this user that wait or run.

    Raises:
        UserError: squeue does not answer.
    """
    user = str(os.getuid())
    done = _called(["squeue", "--noheader", "--array", f"--user={user}", "--format=%i|%j|%Z"], study)
    if done.returncode:
        raise UserError(_own_words(done, "squeue"))
    found = {}
    for line in done.stdout.splitlines():
        task, _, rest = line.partition("|")
        name, _, folder = rest.partition("|")
        found[task.strip()] = name, folder
    return found


def _called(words: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE,
        )
    except OSError as error:
        raise UserError(f"{words[0]}: cannot be started ({error.strerror}).") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{words[0]}: no answer in {_PATIENCE} seconds.") from error


def _own_words(done: "subprocess.CompletedProcess[str]", name: str) -> str:
    """What a command of Slurm said, in one line."""
    lines = [line.removeprefix(f"{name}: ").removeprefix("error: ") for line in (done.stderr + done.stdout).splitlines()]
    said = "; ".join(line.strip().rstrip(".") for line in lines if line.strip())
    return f"{name} said: {printable(said, 500) or f'nothing, with exit code {done.returncode}'}."
