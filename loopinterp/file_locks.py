"""One writer at a time: locks that the death of their holder lets go of."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from loopinterp.errors import InputError

_PACKAGE = Path(__file__).resolve().parent


def lock(handle: int, *, wait: bool = False) -> bool:
    """Lock an open file; the lock goes when the file is closed.

    Args:
        handle: File descriptor.
        wait: Whether to wait while another holds it.

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
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
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
    with writing_to(path.parent, "folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _held(handle, what):
            raise InputError(
                what, expected="one writer at a time", given="another one now", fix=fix
            )
        yield
    finally:
        os.close(handle)


@contextmanager
def in_turn(folder: str | Path) -> Iterator[None]:
    """Hold a folder's lock, once whoever holds it lets go; do without where there are no locks."""
    with ExitStack() as held:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            lock(handle, wait=True)
        yield


def _held(handle: int, what: str) -> bool:
    try:
        return lock(handle)
    except OSError as error:  # some network file systems: better unlocked than not at all
        warnings.warn(f"{what} is not locked against a second writer: {error}", stacklevel=4)
        return True


def need_writable(path: str | Path) -> None:
    """Raise if a path is inside the package: what it came with stays as it came.

    Raises:
        InputError: If it is; it says how to get a copy.
    """
    path = Path(path)
    try:
        inside = path.resolve().is_relative_to(_PACKAGE)
    except (OSError, ValueError, RuntimeError):  # no path at all, as whoever opens it will say
        return
    if inside:
        raise InputError(
            f"output {path}",
            expected="a place outside the package, which is only read",
            given="one inside it",
            fix="Copy the model first: loopinterp zoo NAME --out FOLDER, or "
            "loopinterp.load_pretrained(NAME, FOLDER).",
        )


@contextmanager
def writing_to(path: Path, kind: Literal["file", "folder"]) -> Iterator[None]:
    """Turn what goes wrong in writing a file, or into a folder, into one error that says so.

    Raises:
        InputError: If it is inside the package, cannot be made or written, or the disk is full.
    """
    need_writable(path)
    try:
        yield
    except (OSError, ValueError) as error:  # a name may hold what no name can
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        raise InputError(
            f"output {kind} {path}",
            expected=f"a {kind} that can be written",
            given=getattr(error, "strerror", None) or str(error),
            fix="Free some space, or choose another disk."
            if full
            else f"Choose another {kind}, or change its permissions.",
        ) from error
