"""The command line: train a looped transformer, open it, and write the report.

Everything behind a command is imported when it is run, so that ``--help`` answers at once.
"""

from loopinterp.cli.application import app, main

__all__ = ["app", "main"]
