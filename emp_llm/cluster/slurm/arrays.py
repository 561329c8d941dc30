"""Jobs grouped into arrays of tasks with equal needs, that wait for other tasks."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emp_llm.cluster.plan_file import Job, Needs
from emp_llm.cluster.slurm.site import Site
from emp_llm.common.errors import UserError, count_of

# Needs are rounded up to these steps, so that jobs with almost equal needs share an array.
_MINUTES = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 960, 1440, 2160, 2880, 4320)
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Request:
    """What each task of an array asks for.

    Attributes:
        nodes: their number.
        cpus, gpus, megabytes: of each node; a megabyte is 2**20 bytes, as Slurm has it.
        minutes: time limit.
        threads: of each process.
    """

    nodes: int
    cpus: int
    gpus: int
    megabytes: int
    minutes: int
    threads: int

    @property
    def words(self) -> str:
        """The request in words."""
        gpus = f"{count_of(self.gpus, 'GPU')}, " if self.gpus else ""
        nodes = f"{self.nodes} nodes with " if self.nodes > 1 else ""
        gigabytes = self.megabytes * _MEBIBYTE / 1e9
        return f"{nodes}{gpus}{count_of(self.cpus, 'core')}, {gigabytes:.3g} GB, {_hours(self.minutes)} h"


@dataclass
class JobArray:
    """An array of tasks.

    Attributes:
        name: unique in the study.
        request: of each task.
        jobs: index of the task -> its job.
        waits: ids of jobs that all tasks wait for.
        follows: name of an array; each task also waits for the task of the same index in it.
    """

    name: str = ""
    request: Request = Request(1, 1, 0, 0, 1, 1)
    jobs: dict[int, Job] = field(default_factory=dict)
    waits: tuple[str, ...] = ()
    follows: str | None = None

    @property
    def indices(self) -> str:
        """The indices for sbatch: "0-3,7"."""
        runs: list[list[int]] = []
        for index in sorted(self.jobs):
            if runs and runs[-1][1] == index - 1:
                runs[-1][1] = index
            else:
                runs.append([index, index])
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def request_of(needs: Needs, site: Site) -> Request:
    """What a job asks of a site; its needs are rounded up."""
    megabytes = math.ceil(_step(needs.memory_gb) * 1e9 / _MEBIBYTE)
    if site.largest_node is not None and needs.memory_gb <= site.largest_node.memory_gb:
        megabytes = min(megabytes, int(site.largest_node.memory_gb * 1e9 / _MEBIBYTE))
    least, most = math.ceil(site.min_hours * 60), max(1, int(site.max_hours * 60))
    wanted = math.ceil(needs.hours * 60 + site.signal_seconds / 60)
    minutes = next((step for step in _MINUTES if step >= wanted), wanted)
    cpus = site.cpus * needs.processes
    return Request(needs.nodes, cpus, needs.gpus, megabytes, min(max(minutes, least), most), site.cpus)


def check_fits(jobs: Sequence[Job], site: Site, path: Path) -> None:
    """Raise UserError if a job needs more than the site's largest node has."""
    node = site.largest_node
    if node is None:
        return
    large = [job for job in jobs if _lacking(job.needs, site)]
    if not large:
        return
    needs, others = large[0].needs, len(large) - 1
    what = ", ".join(_lacking(needs, site))
    has = f"{node.cpus} cores, {node.memory_gb:g} GB" + (f" and {node.gpus} GPUs of {node.gpu_gb:g} GB" if node.gpus else "")
    more = (
        " Another job is too large as well."
        if others == 1
        else f" {others:,} other jobs are too large as well."
        if others
        else ""
    )
    raise UserError(
        f"{large[0].id} needs {what} on a node, and the largest node of {path} has {has}.{more} Plan with needs that fit "
        "(a smaller model, fewer processes, --gpu-gb), or correct largest_node."
    )


def _lacking(needs: Needs, site: Site) -> list[str]:
    """The needs of a job that the largest node does not meet, in words."""
    node = site.largest_node
    assert node is not None
    found = []
    if needs.gpus > node.gpus:
        found.append(count_of(needs.gpus, "GPU"))
    if needs.gpus and needs.gpu_gb > node.gpu_gb:
        found.append(f"{needs.gpu_gb:.3g} GB of GPU memory")
    if needs.memory_gb > node.memory_gb:
        found.append(f"{needs.memory_gb:.3g} GB of memory")
    if site.cpus * needs.processes > node.cpus:
        found.append(f"{site.cpus * needs.processes} cores ({site.cpus} for each of {needs.processes} processes)")
    return found


def grouped_jobs(jobs: Sequence[Job], site: Site, queued: Mapping[str, str], numbers: Iterator[int]) -> list[JobArray]:
    """The arrays for jobs, in an order in which they can be submitted.

    Jobs of one kind and request form an array if they wait for the same jobs, or if each waits for another task of one array.

    Args:
        jobs: that are neither done nor queued, those that come first before the others.
        queued: ids of jobs that are queued already; others that a job waits for are done.
        numbers: of the names of arrays.
    """
    arrays: list[JobArray] = []
    places: dict[str, tuple[JobArray, int]] = {}  # id -> its array and index
    depth: dict[str, int] = {}
    pending = {job.id for job in jobs}
    levels: dict[int, dict[tuple[str, Request], list[Job]]] = defaultdict(lambda: defaultdict(list))
    for job in jobs:
        depth[job.id] = 1 + max((depth[name] for name in job.after if name in pending), default=0)
        levels[depth[job.id]][job.kind, request_of(job.needs, site)].append(job)
    for level in sorted(levels):
        for (kind, request), members in levels[level].items():
            waits = {job.id: tuple(name for name in job.after if name in pending or name in queued) for job in members}
            for array in _arrays(members, waits, places, depth):
                for part in _parts(array, site.largest_array):
                    part.name, part.request = f"{next(numbers):03d}-{kind}", request
                    places.update({job.id: (part, index) for index, job in part.jobs.items()})
                    arrays.append(part)
    return arrays


def _arrays(
    members: list[Job],
    waits: dict[str, tuple[str, ...]],
    places: dict[str, tuple[JobArray, int]],
    depth: dict[str, int],
) -> list[JobArray]:
    """The arrays of jobs of one kind and request, which have no name and request yet, by whichever road gives fewer."""
    by_waits: dict[tuple[str, ...], list[Job]] = defaultdict(list)
    # By array of the last job that each waits for, if the other ones are equal: these can follow that array task by task.
    by_array: dict[tuple[tuple[str, ...], str], list[tuple[int, Job]]] = defaultdict(list)
    alone: dict[tuple[str, ...], list[Job]] = defaultdict(list)
    for job in members:
        names = waits[job.id]
        by_waits[names].append(job)
        inside = [name for name in names if name in places]
        if not inside:
            alone[names].append(job)
            continue
        last = max(inside, key=lambda name: (depth[name], len(places[name][0].jobs)))
        array, index = places[last]
        by_array[tuple(name for name in names if name != last), array.name].append((index, job))
    following = [
        JobArray(jobs=layer, waits=others, follows=name)
        for (others, name), found in by_array.items()
        for layer in _layers(found)
    ]
    if len(following) + len(alone) >= len(by_waits):
        following, alone = [], by_waits
    return [*(JobArray(jobs=dict(enumerate(found)), waits=names) for names, found in alone.items()), *following]


def _layers(found: list[tuple[int, Job]]) -> list[dict[int, Job]]:
    """Jobs that follow tasks of an array, as few times index -> job as possible: no index twice in one."""
    layers: list[dict[int, Job]] = []
    taken: Counter[int] = Counter()
    for index, job in found:
        if taken[index] == len(layers):
            layers.append({})
        layers[taken[index]][index] = job
        taken[index] += 1
    return layers


def _parts(array: JobArray, largest: int) -> list[JobArray]:
    """An array in parts of at most `largest` tasks."""
    if array.follows is not None or len(array.jobs) <= largest:
        return [array]
    jobs = list(array.jobs.values())
    return [
        JobArray(jobs=dict(enumerate(jobs[start : start + largest])), waits=array.waits)
        for start in range(0, len(jobs), largest)
    ]


def _step(gigabytes: float) -> float:
    """Memory rounded up to 1, 1.5, 2, 3, 4, 6, 8, 12, 16 ... GB."""
    step = 1.0
    while step < gigabytes:
        step *= 1.5 if math.log2(step).is_integer() else 4 / 3
        step = round(step, 6)
    return step


def _hours(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"
