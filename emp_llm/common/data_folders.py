"""Data folders for users to edit: inside the installed package, or beside it in a source checkout."""

from importlib import resources
from pathlib import Path


def data_folder(name: str) -> Path:
    """The path of `calibration/`, `eval/` or `slurm/` (of `scripts/`). The wheel holds them in `emp_llm/data`."""
    packaged = Path(str(resources.files("emp_llm"))) / "data" / name
    checkout = Path(__file__).parents[2]
    return packaged if packaged.is_dir() else checkout / "scripts" / name if name == "slurm" else checkout / name
