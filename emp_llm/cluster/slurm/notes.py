"""submitted.jsonl: which job of a study is which task of Slurm; and which of them are still queued."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import ClassVar

import msgspec

from emp_llm.cluster.slurm.arrays import JobArray
from emp_llm.cluster.slurm.queue import queued_tasks
from emp_llm.cluster.slurm.script import FOLDER_NAME
from emp_llm.common.errors import UserError
from emp_llm.records.base import FileRecord, record_of

NOTES_NAME = "submitted.jsonl"


class SubmittedTask(FileRecord, kw_only=True, omit_defaults=False):
    """A job that was submitted.

    Attributes:
        job: its id.
        array: name of the script and the list.
        task: of Slurm, such as "123_4".
    """

    KIND: ClassVar[str] = "submitted task"
    VERSION: ClassVar[int] = 1

    job: str
    array: str
    task: str


class Notes:
    """What was submitted of a study.

    Args:
        study: absolute path of its folder.

    Attributes:
        folder: of scripts, lists and submitted.jsonl.
        tasks: the noted tasks, oldest first.

    Raises:
        UserError: submitted.jsonl cannot be read.
    """

    def __init__(self, study: Path) -> None:
        self._study = study
        self.folder = study / FOLDER_NAME
        self._path = self.folder / NOTES_NAME
        self.tasks = _read(self._path)

    def queued(self) -> dict[str, str]:
        """id -> task of the jobs that wait or run in Slurm.

        A submission that was killed before it noted its array is found by the array's name and the list of its jobs.

        Raises:
            UserError: something was submitted, and squeue does not answer.
        """
        lists = {path.stem: path for path in self.folder.glob("*.jobs")}
        if not lists and not self.tasks:
            return {}
        try:
            waiting = queued_tasks(self._study)
        except UserError as error:
            raise UserError(
                f"{self._path}: jobs were submitted before, and nobody knows whether they are still queued: {error} Nothing "
                "is submitted, so that no job runs twice. Try again when squeue answers; to forget what was submitted, move "
                f"{self.folder} away."
            ) from error
        noted = {each.task: each.job for each in self.tasks}
        jobs = {name: path.read_text(encoding="utf-8").splitlines() for name, path in lists.items()}
        found = {}
        for task, (name, folder) in waiting.items():
            number = task.partition("_")[2]
            if task in noted:
                found[noted[task]] = task
            elif folder == str(self._study) and number.isdigit() and int(number) < len(jobs.get(name, [])):
                found[jobs[name][int(number)]] = task
        return found

    def numbers(self) -> Iterator[int]:
        """Numbers for the names of further arrays."""
        names = [path.name.partition("-")[0] for path in self.folder.glob("*-*.*")]
        return count(1 + max((int(name) for name in names if name.isdigit()), default=0))

    def add(self, array: JobArray, number: str) -> None:
        """Note a submitted array; the notes are on disk on return."""
        new = [SubmittedTask(job=job.id, array=array.name, task=f"{number}_{index}") for index, job in array.jobs.items()]
        text = b"".join(msgspec.json.encode(each) + b"\n" for each in new)
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            end = os.lseek(file, 0, os.SEEK_END)
            torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
            os.write(file, b"\n" * torn + text)
            os.fsync(file)
        finally:
            os.close(file)
        self.tasks += new

    def tasks_of(self, number: str) -> set[str]:
        """All noted tasks of an array."""
        return {each.task for each in self.tasks if each.task.partition("_")[0] == number}


def _read(path: Path) -> list[SubmittedTask]:
    """The notes; an incomplete line, of a crash, is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(values, dict):
            found.append(record_of(values, SubmittedTask, f"{path}:{number}"))
    return found
