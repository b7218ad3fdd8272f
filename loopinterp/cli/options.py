"""What the commands are given: options and arguments that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loopinterp.errors import GREATEST_SEED, MOST_THREADS, InputError


def read_path(given: str | Path) -> Path:
    """A path as it was given, or by default; an empty one would be the folder one is in."""
    text = str(given)
    if not text.strip() or "\0" in text:
        raise typer.BadParameter(f"expected a path, got {text!r}. Name a folder or file.")
    return Path(text)


SEED: dict[str, Any] = {"min": 0, "max": GREATEST_SEED}
FILE: dict[str, Any] = {"metavar": "FILE", "parser": read_path}
THREADS: dict[str, Any] = {
    "min": 1,
    "max": MOST_THREADS,
    "help": "CPU threads; at these model sizes one is as fast as more.",
}

Run = Annotated[Path, typer.Argument(metavar="RUN", parser=read_path, help="Folder of a run.")]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", parser=read_path, help="Folders of runs.")
]
Out = Annotated[Path, typer.Option(metavar="PATH", parser=read_path, help="Folder of the run.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; one that is absent is an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress bars.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated."),
]
Threads = Annotated[int, typer.Option(**THREADS)]
TrainingThreads = Annotated[int | None, typer.Option(**THREADS, show_default="1")]
StudySeed = Annotated[int, typer.Option("--seed", **SEED, help="Seed of the examples drawn.")]


def examples(*lines: str) -> str:
    r"""An epilog of commands; ``\b`` keeps their line breaks."""
    return "\b\nExamples:\n" + "\n".join(f"  loopinterp {line}" for line in lines)


def use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def read_numbers(option: str, text: str) -> list[int]:
    """Numbers of loops with commas between them; none if there is no text."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        fix = f"Write {option} 1,2,4,8."
        raise InputError(
            option, expected="numbers with commas between them", given=repr(text), fix=fix
        )
    return [int(part) for part in parts]
