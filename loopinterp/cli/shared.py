"""What several commands share: options, arguments, output."""

from __future__ import annotations

import dataclasses
import io
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand

import loopinterp
from loopinterp.core.errors import MOST_THREADS, InputError, need

if TYPE_CHECKING:
    from loopinterp.core.results import Result


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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        parameters: list[Any] = self.params
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.metavar = parameter.metavar or str(parameter.name).upper()
                parameter.display_type_rich = lambda ctx: None  # beside its name, Python's type
            elif parameter.metavar is None and not parameter.is_flag:
                parameter.metavar = "N" if "int" in parameter.bare_type() else "TEXT"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # For each option string, whether a value follows it.
        takes_value = {
            name: not getattr(option, "is_flag", False) and name not in ("--help", "-h")
            for option in self.get_params(ctx)
            if option.param_type_name == "option"
            for name in (*option.opts, *option.secondary_opts)
        }
        words = iter(args)
        for word in words:
            if word == "--":
                break
            value = next(words, None) if takes_value.get(word) else None
            fix = f"Write the value after it; one of that name is written {word}={value}."
            need(value not in takes_value, word, "a value", f"the option {value}", fix)
        return super().parse_args(ctx, args)


def command(*examples: str, name: str | None = None) -> Any:
    r"""Makes a function a command; ``\b`` keeps the line breaks of its examples."""
    lines = "\n".join(f"  loopinterp {line}" for line in examples)
    return app.command(name, cls=_Command, epilog=f"\b\nExamples:\n{lines}")


def read_path(path: str | Path) -> Path:
    """A path; an empty one is refused, as it would be the current folder."""
    text = str(path)
    if not text.strip() or "\0" in text:
        raise typer.BadParameter(f"expected a path, got {text!r}. Name a folder or file.")
    return Path(text)


def read_program(name: str) -> str:
    """The name of a stock program."""
    try:
        loopinterp.get_program(name)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    return name


Texts = list[str] | None

SEED: dict[str, Any] = {"min": 0}  # the greatest is checked where it is used

FILE: dict[str, Any] = {"metavar": "FILE", "parser": read_path}

_THREADS: dict[str, Any] = {"min": 1, "max": MOST_THREADS}
_THREADS["help"] = "CPU threads; at these model sizes one is as fast as more."

Run = Annotated[Path, Argument(metavar="RUN", parser=read_path, help="Folder of a run.")]

Runs = Annotated[list[Path], Argument(metavar="RUN", parser=read_path, help="Folders of runs.")]

OUT: dict[str, Any] = {"metavar": "PATH", "parser": read_path, "help": "Folder of the run."}

Out = Annotated[Path, Option(**OUT)]


RUNS = Path("runs")
"""The folder in which runs are made by default."""

Device = Annotated[str, Option(help="auto, cpu or cuda; one that is absent is an error.")]

Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout.")]

Progress = Annotated[bool, Option("--progress/--no-progress", help="Show progress bars.")]

Settings = Annotated[
    Texts, Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
]

Threads = Annotated[int, Option(**_THREADS)]

TrainingThreads = Annotated[int | None, Option(**_THREADS, show_default="1")]

StudySeed = Annotated[int, Option("--seed", **SEED, help="Seed of the examples drawn.")]


def study_options(seed: int, device: str, threads: int, progress: bool) -> dict[str, Any]:
    """Options of every study; sets the number of threads."""
    import torch

    torch.set_num_threads(threads)
    return {"seed": seed, "device": device, "progress": progress}


def read_numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas; none if the text is empty."""
    parts = [part.strip() for part in text.split(",")] if text else []
    numbers = all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    expected, fix = "numbers with commas between them", f"Write {option} 1,2,4,8."
    need(numbers, option, expected, repr(text), fix)
    return [int(part) for part in parts]


def print_document(document: Any, text: str, as_json: bool) -> None:
    from loopinterp.core.storage import spell_json

    typer.echo(spell_json(document, indent=1) if as_json else text)


def next_step(command: str, run: Path) -> str:
    """The line that names the command to give next."""
    return f"Next: {spell_command(command, run)}"


def spell_command(command: str, run: Path) -> str:
    """A command on a run, as it can be given in this shell."""
    script = Path(sys.argv[0])
    start = "loopinterp"
    # A script of a user's own registers its tasks before it calls this command line.
    if script.suffix == ".py" and script.name != "__main__.py":
        start = f"python {shlex.quote(str(script))}"
    elif script.name == start and shutil.which(start) is None:  # as in `make demo`
        start = shlex.quote(str(script))
    return f"{start} {command} {shlex.quote(str(run))}"


def spell_findings(results: Iterable[Result]) -> tuple[list[dict[str, Any]], str]:
    """Findings of results, as JSON and as a list to read."""
    findings = loopinterp.app.workflow.in_reading_order(results)
    return [*map(dataclasses.asdict, findings)], "\n".join(f"- {one.text}" for one in findings)


def spell_run(run: Path, record: loopinterp.pages.RunRecord) -> str:
    """What the model is, and a line for each fact of the run."""
    marks = {True: "✓", False: "✗", None: "·"}
    lines = [
        f"  {marks[fact.good]} {fact.title}: {fact.value} ({fact.detail})"
        for fact in loopinterp.pages.facts_of(record.results)
    ]
    return "\n".join([f"{run}: {loopinterp.pages.introduction(record)}", *lines])


def spell_facts(facts: Mapping[str, Any]) -> str:
    """The first fact's value as a heading, and a line for each other fact."""
    (_, title), *rest = facts.items()
    return "\n".join([str(title), *(f"  {name}: {_shown(value)}" for name, value in rest)])


def _shown(value: Any) -> str:
    if value in (None, {}, [], ()):
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_shown(v)}" for k, v in value.items())
    if not isinstance(value, (list, tuple)):
        return str(value)
    sentences = any(" " in str(part) for part in value)
    return "".join(f"\n  - {part}" for part in value) if sentences else ", ".join(map(str, value))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
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
        message = str(error)
    except OSError as error:
        message = (
            f"{error.filename or 'system'}: expected it to work, got: "
            f"{error.strerror or error}. Check the path, its permissions and the free space."
        )
    except (MemoryError, RuntimeError) as error:
        # Python's own, a GPU's, or that of PyTorch on the CPU, which has no type of its own.
        words = ("allocate memory", "not enough memory", "out of memory")
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        message = (
            "memory: expected a job that fits into it, got one that does not. Take fewer samples, "
            "shorter lengths or a smaller model."
        )
    else:
        return
    typer.echo(f"Error: {message}", err=True)
    sys.exit(2)
