"""The command line: train a looped transformer, open it, and write the report.

Everything behind a command is imported when it is run, so that ``--help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from loopinterp.cli.interrupt import ending_in_one_line

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one message on stderr and exit status 2."""
    with ending_in_one_line():
        from loopinterp.cli.application import run

        run(arguments)
