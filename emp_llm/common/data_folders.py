"""Data folders for users to edit: inside the installed package, or beside it in a source checkout."""

from importlib import resources
from pathlib import Path


def data_folder(name: str) -> Path:
    """The path of `calibration/` or `eval/`. The wheel holds both in `emp_llm/data`."""
    packaged = Path(str(resources.files("emp_llm"))) / "data" / name
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / name
