"""Files of a user's own that a task draws its examples from."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from loopinterp.tasks.task import Task


def task_files(task: Task) -> dict[str, Path]:
    """The files that a task draws from, by the setting that names each; absolute paths.

    A task that has such settings names them in its attribute ``data_files``.

    Example:
        >>> from loopinterp.tasks import get_task
        >>> task_files(get_task("addition"))
        {}
        >>> task_files(get_task("chess_puzzles", csv="/puzzles.csv"))["csv"].name
        'puzzles.csv'
    """
    paths = {name: getattr(task, name) for name in getattr(task, "data_files", ())}
    return {name: Path(path).absolute() for name, path in paths.items() if path is not None}


def digest_file(path: Path) -> str:
    """SHA-256 of a file, read again where its time or size has changed.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        about = path.stat()
        return _digest(path, (about.st_mtime_ns, about.st_size, about.st_ino))
    except (OSError, ValueError) as error:  # a name may hold what no name can
        raise InputError(
            f"data file {path}",
            expected="a file of the task's that can be read",
            given=getattr(error, "strerror", None) or str(error),
            fix="Put it back where it was, or give the path of another one to a new run.",
        ) from error


@lru_cache(maxsize=16)
def _digest(path: Path, stamp: tuple[int, int, int]) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            sha256.update(block)
    return sha256.hexdigest()
