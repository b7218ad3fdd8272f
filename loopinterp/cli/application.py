"""The commands as one program, and what becomes of an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import loopinterp
from loopinterp.cli import (
    catalogue_commands,
    evaluation_commands,
    study_commands,
    training_commands,
)
from loopinterp.errors import InputError

app = typer.Typer(
    name="loopinterp",
    help="Mechanistic interpretability of looped transformers.",
    epilog="Start with: loopinterp demo --out runs/demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _part in (training_commands, evaluation_commands, study_commands, catalogue_commands):
    app.registered_commands += _part.commands.registered_commands


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"loopinterp {loopinterp.__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one message on stderr and exit status 2."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="loopinterp")
    except InputError as error:
        _fail(str(error))
    except OSError as error:
        _fail(
            f"{error.filename or 'system'}: expected it to work, got: "
            f"{error.strerror or error}. Check the path, its permissions and the free space."
        )
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _fail(
            "memory: expected a job that fits into it, got one that does not. Take fewer samples, "
            "shorter lengths or a smaller model."
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own, a GPU's, or that of PyTorch on the CPU, which has no type of its own."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _fail(message: str) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    sys.exit(2)
