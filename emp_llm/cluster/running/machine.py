"""What a machine can run at the same time: its GPUs, cores and memory, shared out to jobs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from emp_llm.cluster.plan_file import Job
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import available_memory

_CORES = 8  # of a worker, if jobs run on CPUs
_GB = 1e9


@dataclass(frozen=True)
class MachinePart:
    """A job's part of the machine.

    Attributes:
        gpus: numbers of its GPUs; None: all that are visible.
        threads: cores for all its processes; None: as the environment says.
        memory_gb: that it is expected to use.
    """

    gpus: tuple[int, ...] | None
    threads: int | None
    memory_gb: float

    @property
    def words(self) -> str:
        """The GPUs in words, or nothing."""
        return f" on GPU {', '.join(map(str, self.gpus))}" if self.gpus else ""


class Machine:
    """The parts of this machine that are not in use.

    Args:
        workers: number of jobs at the same time.
        gpus: number of GPUs; None: a scheduler has shared out the machine already, and each job may use all of it.
        cores: number of cores; None: the scheduler has set the number of threads.
        memory_gb: that is available.
    """

    def __init__(self, workers: int, gpus: int | None, cores: int | None, memory_gb: float) -> None:
        self._workers = workers
        self._gpus = None if gpus is None else list(range(gpus))
        self._threads = None if cores is None else max(1, cores // workers)
        self._memory = memory_gb
        self._used = 0

    @classmethod
    def found(cls, jobs: Sequence[Job], workers: int | None, scheduled: bool) -> Self:
        """This machine, for some jobs.

        Args:
            jobs: to run.
            workers: number of jobs at the same time; None: the number of GPUs that they can use, or one for each 8 cores.
            scheduled: a scheduler has chosen the machine for the job.

        Raises:
            UserError: a job needs more GPUs than there are.
        """
        cores, memory = len(os.sched_getaffinity(0)), (available_memory() or 0) / _GB
        if scheduled:
            return cls(workers or 1, None, None, memory or float("inf"))
        wanted = max((gpus_of(job) for job in jobs), default=0)
        gpus = _gpus() if wanted else 0
        if wanted > gpus:
            job = next(job for job in jobs if gpus_of(job) == wanted)
            raise UserError(
                f"{job.id} needs {count_of(wanted, 'GPU')}, and this machine has {gpus or 'none'}. Plan with --gpu-gb 0 for "
                "CPUs, or with the memory of your GPUs; or submit the study to a cluster."
            )
        least = min((gpus_of(job) for job in jobs if gpus_of(job)), default=0)
        return cls(workers or (gpus // least if least else max(1, cores // _CORES)), gpus, cores, memory or float("inf"))

    def take(self, job: Job) -> MachinePart | None:
        """A job's share; None while it does not fit beside those that run. A job alone always fits."""
        needs = job.needs
        memory = needs.memory_gb * needs.nodes
        if self._used and (self._used >= self._workers or memory > self._memory):
            return None
        gpus: tuple[int, ...] | None = None
        if self._gpus is not None:
            if len(self._gpus) < gpus_of(job):
                return None
            gpus = tuple(self._gpus[: gpus_of(job)])
            self._gpus = self._gpus[len(gpus) :]
        self._memory -= memory
        self._used += 1
        return MachinePart(gpus, self._threads, memory)

    def give_back(self, share: MachinePart) -> None:
        """Take back the share of a job that has ended."""
        self._used -= 1
        self._memory += share.memory_gb
        if self._gpus is not None and share.gpus is not None:
            self._gpus = sorted([*self._gpus, *share.gpus])


def gpus_of(job: Job) -> int:
    """The number of GPUs of a job on all its nodes together."""
    return job.needs.gpus * job.needs.nodes


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
