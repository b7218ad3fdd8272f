"""The commands as one program, and what becomes of an error."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

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


class _Command(TyperCommand):
    """A command that takes no option's name for another option's value (``--out --json``)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        flags = {
            name
            for option in options
            if getattr(option, "is_flag", False)
            for name in (*option.opts, *option.secondary_opts)
        }
        words = iter(args)
        for word in words:
            if word == "--":
                break
            value = next(words, None) if word in names - flags - {"--help", "-h"} else None
            if value in names:
                raise InputError(
                    word,
                    expected="a value",
                    given=f"the option {value}",
                    fix=f"Write the value after it; one of that name is written {word}={value}.",
                )
        return super().parse_args(ctx, args)


for _part in (training_commands, evaluation_commands, study_commands, catalogue_commands):
    for _info in _part.commands.registered_commands:
        _info.cls = _Command
        app.registered_commands.append(_info)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"loopinterp {loopinterp.__version__}")
        raise typer.Exit


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one message on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal has no sign for is escaped
            stream.reconfigure(errors="backslashreplace")
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
