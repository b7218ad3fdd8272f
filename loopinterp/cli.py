"""The command line: train a looped transformer, open it, and write the report.

Torch is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from loopinterp import __version__
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

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a training run.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; one that is absent is an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress bars.")]
Threads = Annotated[
    int,
    typer.Option(min=1, help="CPU threads. At these model sizes one is as fast as more."),
]
StudySeed = Annotated[int, typer.Option("--seed", help="Seed of the examples drawn.")]


def _examples(*lines: str) -> str:
    r"""An epilog of commands; ``\b`` keeps their line breaks."""
    return "\b\nExamples:\n" + "\n".join(f"  loopinterp {line}" for line in lines)


def _print(document: Any, text: str, as_json: bool) -> None:
    typer.echo(json.dumps(document, indent=1, default=str) if as_json else text)


def _use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"loopinterp {__version__}")
        raise typer.Exit


@app.command(epilog=_examples("demo", "demo --out runs/mine --seed 1", "demo --json"))
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train an addition model, study it, and write the report: about five minutes on two cores.

    Killed at any moment, the same command goes on where it stopped.
    """
    from loopinterp import workflow

    _use_threads(threads)
    outcome = workflow.demo(out, seed=seed, progress=progress)
    _print(outcome.to_dict(), outcome.text(), as_json)


@app.command(
    epilog=_examples(
        "train --task addition --out runs/add",
        "train --task addition --set model.d_model=128 --set steps=4000 --out runs/wide",
        "train --task parity --seed 1 --no-progress --out runs/parity-1",
        "train --task addition --config runs/add/config.json --seed 2 --out runs/add-2",
    )
)
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run goes on.")],
    task: Annotated[str | None, typer.Option(help="One of `loopinterp tasks`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Default: the one named as the task.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration as JSON.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with a run that was stopped.")
    ] = True,
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train a looped transformer on a task.

    Starts from the task's recipe, then applies --config, each --set, and the options, in that
    order. Killed at any moment, the same command goes on with the same numbers.
    """
    from loopinterp import workflow

    _use_threads(threads)
    flags = {
        "seed": seed,
        "steps": steps,
        "device": device,
        "precision": precision,
        "compile": compile_ or None,
    }
    chosen = workflow.configure(
        task=task, recipe=recipe, file=config, settings=settings or [], flags=flags
    )
    outcome = workflow.train_run(chosen, out, progress=progress, resume=resume)
    _print(outcome.to_dict(), outcome.text(), as_json)


@app.command(
    epilog=_examples(
        "evaluate runs/add",
        "evaluate runs/add --length 24 --length 96 --distribution chain --json",
    )
)
def evaluate(
    run: Run,
    length: Annotated[
        list[int] | None, typer.Option(help="Problem length; may be repeated.", min=1)
    ] = None,
    distribution: Annotated[
        list[str] | None, typer.Option(help="Input distribution; may be repeated.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Examples per length.", min=1)] = 300,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Measure exact match by length, each example at its own T(n) loops."""
    from loopinterp import workflow

    _use_threads(threads)
    outcome = workflow.evaluate_run(
        run,
        lengths=length,
        distributions=distribution,
        samples=samples,
        seed=seed,
        device=device,
        progress=progress,
    )
    _print(outcome.to_dict(), outcome.text(), as_json)


@app.command(
    epilog=_examples("analyze runs/add", "analyze runs/add --study convergence --seed 1 --json")
)
def analyze(
    run: Run,
    study: Annotated[
        list[str] | None, typer.Option(help="One study; may be repeated. Default: all.")
    ] = None,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Run the studies that the report shows, and save their results in RUN/results."""
    from loopinterp import workflow

    _use_threads(threads)
    outcome = workflow.analyze_run(run, studies=study, seed=seed, device=device, progress=progress)
    _print(outcome.to_dict(), outcome.text(), as_json)


@app.command(epilog=_examples("report runs/add", "report runs/add --out add.html"))
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="Default: RUN/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run from its saved results: one HTML file that works offline."""
    from loopinterp import workflow

    outcome = workflow.report_run(run, out=out)
    _print(outcome.to_dict(), outcome.text(), as_json)


@app.command(epilog=_examples("tasks", "tasks --json"))
def tasks(as_json: Json = False) -> None:
    """List the tasks: formats, loops T(n), input distributions."""
    from loopinterp import workflow

    outcome = workflow.describe_tasks()
    _print(outcome.to_dict(), outcome.text(), as_json)


@app.command(epilog=_examples("models", "models addition --json"))
def models(
    name: Annotated[str | None, typer.Argument(help="Show one recipe in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the models that the recipes train, or show one recipe's whole configuration."""
    from loopinterp import workflow

    outcome = workflow.describe_models(name)
    _print(outcome.to_dict(), outcome.text(), as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one message on stderr and exit status 2."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="loopinterp")
    except InputError as error:
        _fail(str(error))
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _fail(f"{named}{error.strerror or error}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    sys.exit(2)
