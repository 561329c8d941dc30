"""An output folder of small files: either the complete new folder appears, or the older one stays."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from emp_llm.common.errors import UserError
from emp_llm.storage.atomic import sync_path, sync_tree
from emp_llm.storage.disk_errors import explain_disk_error


def check_folder(path: Path, overwrite: bool, expected: str, option: str = "--output") -> None:
    """Check that a folder can be written.

    Args:
        path: the output.
        overwrite: replace an older output.
        expected: a file that every output of this kind holds; a folder without it is never replaced.
        option: the option that names the path, for errors.

    Raises:
        UserError: the path exists and may not be replaced.
    """
    path = Path(os.path.abspath(path))
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        return
    if path.is_symlink() or not path.is_dir() or not (path / expected).is_file():
        raise UserError(f"{option} {path}: it exists and holds no {expected}, so it is never replaced; name another folder.")
    if not overwrite:
        raise UserError(f"{option} {path}: it exists; name another folder, or add --overwrite.")


def write_folder(path: Path, files: Mapping[str, bytes], overwrite: bool, expected: str, option: str = "--output") -> None:
    """Write files, given by relative name, into a folder that appears when all of them are on disk.

    Arguments and errors as for `check_folder`; also UserError if the disk fails or is full.
    """
    path = Path(os.path.abspath(path))
    check_folder(path, overwrite, expected, option)
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        new, old = aside / "new", aside / "old"
        new.mkdir()
        for name, content in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        sync_tree(new)
        try:
            if path.exists():
                os.replace(path, old)
            os.replace(new, path)
        except BaseException:  # `aside` is deleted below; move the older output out of it first
            if old.exists() and not path.exists():
                os.replace(old, path)
            raise
        sync_path(path.parent)
    except OSError as error:
        explanation = explain_disk_error(error, path, [])
        if explanation is None:
            raise
        raise explanation from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
