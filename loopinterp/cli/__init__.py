"""The command line: train a looped transformer, open it, and write the report.

What a command needs is imported when it runs, after the handler of interrupts (Ctrl-C) is in place.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # typing itself would take longer than this module
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one message on stderr and exit status 2."""
    with _ending_in_one_line():
        from loopinterp.cli import run_commands, study_commands  # noqa: F401, in this order
        from loopinterp.cli.shared import run

        run(arguments)


@contextmanager
def _ending_in_one_line() -> Iterator[None]:
    """Inside, an interrupt ends the program, whatever libraries make of it.

    Compiled modules interrupted during import raise other errors or abort, so an import is ended at
    once. An interrupt in a destructor raises nothing, so the signal is remembered. A program that
    has its own handler, ignores interrupts (``nohup``), or calls from another thread keeps its
    behaviour.
    """
    interrupted = False
    status = 128 + signal.SIGINT  # as a shell reports a process that an interrupt ended

    def remember(number: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:  # in an import
            end()
        raise KeyboardInterrupt

    def end() -> NoReturn:
        with suppress(OSError, ValueError, RuntimeError):  # closed, or in the middle of a write
            sys.stdout.flush()
        _say()
        os._exit(status)

    def end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
        if interrupted:  # in a destructor or a callback: the program would go on
            end()
        hook(unraisable)

    before = signal.getsignal(signal.SIGINT)
    try:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread, which alone is interrupted
        pass
    hook, sys.unraisablehook = sys.unraisablehook, end_if_interrupted
    try:
        yield
    except BaseException:
        if not interrupted:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one comes too late
        _say()
        raise SystemExit(status) from None
    finally:
        sys.unraisablehook = hook
        if signal.getsignal(signal.SIGINT) in (remember, signal.SIG_IGN) and before is not None:
            signal.signal(signal.SIGINT, before)


def _say() -> None:
    sys.stderr.write("Interrupted.\n")
    sys.stderr.flush()
