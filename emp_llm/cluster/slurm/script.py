"""The batch script of an array, from the template scripts/slurm/job.sh."""

import shlex
import sys
from pathlib import Path

from emp_llm.cluster.slurm.arrays import JobArray
from emp_llm.cluster.slurm.site import Site
from emp_llm.common.paths import data_folder

FOLDER_NAME = "slurm"  # in the study
# Variables of the login node that tasks get. No other goes to Slurm, because any might hold a secret.
EXPORTED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MODULEPATH", "PYTHONPATH"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "EMP_LLM_CACHE"),
    "SLURM_CONF",
)
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")


def script_text(array: JobArray, site: Site, study: Path) -> str:
    """The batch script of an array.

    Args:
        array: to run.
        site: the cluster.
        study: absolute path of the study.
    """
    text = (data_folder("slurm") / "job.sh").read_text(encoding="utf-8")
    head, _, rest = text.partition("#\n")
    rest = rest.partition("#@ options\n")[2]
    head = head.replace("#!/bin/bash\n", "#!/bin/bash -l\n") if site.modules else head
    changes = {
        "#@ environment\n": "".join(f"{line}\n" for line in _environment(site, array.request.threads)),
        'list="slurm/NAME.jobs"': f'list="{FOLDER_NAME}/{array.name}.jobs"',
        "    emp-llm run": f"    {' '.join(filter(None, (site.container, _command(site))))} run",
        "-lt 50 ]": f"-lt {site.requeues} ]",
    }
    for mark, line in changes.items():
        assert rest.count(mark) == 1, f"job.sh has no line with {mark!r}"
        rest = rest.replace(mark, line)
    options = "".join(f"#SBATCH {option}\n" for option in _options(array, site, study))
    return f"{head}# Array {array.name}, written by emp-llm submit.\n{options}{rest}"


def list_text(array: JobArray) -> str:
    """The list of an array: the id of the job of task N on line N + 1; an empty line for an index without a task."""
    return "".join(f"{array.jobs[index].id if index in array.jobs else ''}\n" for index in range(max(array.jobs) + 1))


def _options(array: JobArray, site: Site, study: Path) -> list[str]:
    """The options of sbatch."""
    request, places = array.request, f"%{site.at_once}" if site.at_once is not None else ""
    chosen = {
        "job-name": array.name,
        "array": f"{array.indices}{places}",
        "chdir": str(study),
        "output": f"{FOLDER_NAME}/{array.name}-%a.log",
        "partition": site.partition_of(request.gpus),
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "nodes": str(request.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(request.cpus),
        "time": f"{request.minutes // 60}:{request.minutes % 60:02d}:00",
        "signal": f"TERM@{site.signal_seconds}",
    }
    lines = [f"--{name}={_quoted(value)}" for name, value in chosen.items() if value is not None]
    if request.gpus:
        lines.append(site.gpus.replace("{gpus}", str(request.gpus)))
    if site.memory:
        lines.append(site.memory.replace("{megabytes}", str(request.megabytes)))
    return [*lines, "--requeue", "--open-mode=append", "--kill-on-invalid-dep=yes", *site.options]


def _environment(site: Site, threads: int) -> list[str]:
    """Lines of shell before the job."""
    lines = [f"module load {shlex.join(site.modules)}"] if site.modules else []
    lines.append(f"export OMP_NUM_THREADS={threads}")
    if site.cache is not None:
        lines.append(f"export HF_HOME={shlex.quote(site.cache)}")
    if site.offline:
        lines.append("export " + " ".join(f"{name}=1" for name in _OFFLINE))
    if site.scratch is not None:
        lines += [f'export TMPDIR="{site.scratch}"', 'mkdir -p "$TMPDIR"']
    return [*lines, *site.prolog]


def _command(site: Site) -> str:
    if site.command is not None:
        return site.command
    return "emp-llm" if site.container else f"{shlex.quote(sys.executable)} -m emp_llm"


def _quoted(value: str) -> str:
    """A value for a line of options."""
    return f'"{value}"' if any(letter.isspace() for letter in value) else value
