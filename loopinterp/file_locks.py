"""One writer at a time: locks that the death of their holder lets go of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loopinterp.errors import InputError


def lock(handle: int) -> bool:
    """Lock an open file, unless another holds it; the lock goes when the file is closed.

    Args:
        handle: File descriptor.

    Returns:
        Whether it is held now.

    Raises:
        OSError: If files cannot be locked here.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system has no file locks") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def only_writer(path: str | Path, what: str, *, fix: str) -> Iterator[None]:
    """Hold a lock file while something is written by one process only.

    Args:
        path: The lock file, made where it is absent, and left.
        what: What is written.
        fix: What to do while another holds it.

    Raises:
        InputError: If another holds it, or the folder cannot be written.
    """
    path = Path(path)
    with writing_into(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _held(handle, what):
            raise InputError(
                what, expected="one writer at a time", given="another one now", fix=fix
            )
        yield
    finally:
        os.close(handle)


def _held(handle: int, what: str) -> bool:
    try:
        return lock(handle)
    except OSError as error:  # some network file systems: better unlocked than not at all
        warnings.warn(f"{what} is not locked against a second writer: {error}", stacklevel=4)
        return True


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Turn what goes wrong in making or opening files of a folder into one error that says so.

    Raises:
        InputError: If the folder cannot be made or written.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a name may hold what no name can
        raise InputError(
            f"output folder {folder}",
            expected="a folder that can be written",
            given=getattr(error, "strerror", None) or str(error),
            fix="Choose another folder, or change its permissions.",
        ) from error
