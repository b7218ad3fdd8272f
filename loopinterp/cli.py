"""The command line: train a looped transformer, open it, and write the report.

Everything behind a command is imported when it is run, so that ``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import loopinterp
from loopinterp.errors import GREATEST_SEED, MOST_THREADS, InputError
from loopinterp.studied_model import RESULTS

if TYPE_CHECKING:
    from loopinterp.results import Result

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


def _path(given: str | Path) -> Path:
    """A path as it was given, or by default; an empty one would be the folder one is in."""
    text = str(given)
    if not text.strip() or "\0" in text:
        raise typer.BadParameter(f"expected a path, got {text!r}. Name a folder or file.")
    return Path(text)


_SEED: dict[str, Any] = {"min": 0, "max": GREATEST_SEED}
_FILE: dict[str, Any] = {"metavar": "FILE", "parser": _path}
_THREADS: dict[str, Any] = {
    "min": 1,
    "max": MOST_THREADS,
    "help": "CPU threads; at these model sizes one is as fast as more.",
}

Run = Annotated[Path, typer.Argument(metavar="RUN", parser=_path, help="Folder of a run.")]
Out = Annotated[Path, typer.Option(metavar="PATH", parser=_path, help="Folder of the run.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; one that is absent is an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress bars.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated."),
]
Threads = Annotated[int, typer.Option(**_THREADS)]
TrainingThreads = Annotated[int | None, typer.Option(**_THREADS, show_default="1")]
StudySeed = Annotated[int, typer.Option("--seed", **_SEED, help="Seed of the examples drawn.")]


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
        typer.echo(f"loopinterp {loopinterp.__version__}")
        raise typer.Exit


@app.command(epilog=_examples("demo", "demo --out runs/mine --seed 1", "demo --json"))
def demo(
    out: Out = Path("runs/demo"),
    seed: Annotated[
        int | None,
        typer.Option(**_SEED, help="Seed of weights, data and studies.", show_default="0"),
    ] = None,
    settings: Settings = None,
    threads: TrainingThreads = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train an addition model, study it, write the report.

    About five minutes on two cores. Killed at any moment, the same command goes on.
    """
    path = loopinterp.workflow.demo(
        out, seed=seed, settings=settings or (), threads=threads, progress=progress
    )
    findings, told = _found(loopinterp.report.read_run(out).results.values())
    document = {"run": str(out), "report": str(path), "findings": findings}
    _print(document, f"{told}\nReport: {path}\nNext: open it in a browser.", as_json)


@app.command(
    epilog=_examples(
        "train --task addition --out runs/add",
        "train --task addition --set model.d_model=128 --set steps=4000 --out runs/wide",
        "train --task parity --seed 1 --no-progress --out runs/parity-1",
        "train --config runs/add/config.json --seed 2 --out runs/add-2",
    )
)
def train(
    out: Out,
    task: Annotated[str | None, typer.Option(help="One of `loopinterp tasks`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Default: the one named as the task.")] = None,
    config: Annotated[Path | None, typer.Option(**_FILE, help="Configuration as JSON.")] = None,
    without_recipe: Annotated[
        bool, typer.Option("--without-recipe", help="Start from the demo's model instead.")
    ] = False,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(**_SEED, help="Seed of weights and data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with a run that was stopped.")
    ] = True,
    threads: TrainingThreads = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train a looped transformer on a task.

    Starts from the task's recipe or from --config, then applies each --set and the other
    options. A task without a recipe that generalises is refused, unless --without-recipe is given.
    Killed at any moment, the same command goes on, with the same numbers. Started by
    `torchrun --nproc-per-node N -m loopinterp train …`, N processes share each batch.
    """
    from loopinterp.training.processes import is_first

    flags = {
        "seed": seed,
        "steps": steps,
        "device": device,
        "precision": precision,
        "compile": compile_ or None,
        "threads": threads,
    }
    chosen = loopinterp.workflow.configure(
        task=task,
        recipe=recipe,
        file=config,
        settings=settings or (),
        flags=flags,
        without_recipe=without_recipe,
    )
    if without_recipe:
        window, some = chosen.model.attention_window, chosen.model.windowed_heads
        seen = "without a window" if window is None else f"with a window of {window} to the left"
        seen += "" if some is None else f" in {some} of {chosen.model.n_heads} heads"
        typer.echo(f"No recipe is used for {task}: this is the demo's model, {seen}.", err=True)
    run = loopinterp.workflow.train_run(chosen, out, progress=progress, resume=resume)
    if not is_first():  # of several processes, one speaks
        return
    last = run.metrics().tail(1).to_dict("records")
    document = {"run": str(out), "steps": run.steps_done, "seconds": run.seconds}
    _print(
        {**document, "last": last[0] if last else None},
        f"{out}: {run.steps_done} steps in {run.seconds:.0f} s. {_next('evaluate', out)}",
        as_json,
    )


@app.command(
    name="compile",
    epilog=_examples(
        "compile ripple --max-length 24 --out runs/ripple",
        "compile parity --max-length 16 --disguise permute --disguise rotate --out runs/hidden",
    ),
)
def compile_(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="Name of a stock program.")],
    out: Out,
    max_length: Annotated[
        int, typer.Option(min=1, help="Greatest problem length that it has room for.")
    ],
    disguise: Annotated[
        list[str] | None,
        typer.Option(help="distract, permute, superpose or rotate; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(**_SEED, help="Seed of the disguises.")] = 0,
    as_json: Json = False,
) -> None:
    """Compile a program into a model whose circuit is known.

    The run that it makes is evaluated, analysed and reported like one that was trained.
    """
    run = loopinterp.workflow.compile_run(
        program, out, max_length=max_length, disguises=disguise or (), seed=seed
    )
    config = run.config.model
    _print(
        {"run": str(out), "program": program, "task": run.config.task, "d_model": config.d_model},
        f"{out}: {program} in {config.d_model} dimensions. {_next('analyze', out)}",
        as_json,
    )


@app.command(
    epilog=_examples(
        "evaluate runs/add",
        "evaluate runs/add --length 24 --length 96 --distribution chain --json",
        "evaluate runs/add --loops 1,2,4,8,16,32",
        "evaluate runs/add --stopping",
        "evaluate runs/add --stop max-confidence --stop residual=0.03",
    )
)
def evaluate(
    run: Run,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Problem length; may be repeated.")
    ] = None,
    distribution: Annotated[
        list[str] | None, typer.Option(help="Input distribution; may be repeated.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Compare with stopping by max-confidence, max-confidence-batch, "
            "residual[=TOLERANCE], readout-kl[=TOLERANCE], acceleration[=TOLERANCE], "
            "answer-held[=LOOPS] or calibrated; may be repeated.",
        ),
    ] = None,
    stopping: Annotated[
        bool, typer.Option("--stopping", help="Compare with all of these rules.")
    ] = False,
    loops: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="Also after these numbers of loops, at any length."),
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="Examples for each length.")] = 300,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Measure exact match, bit accuracy and perplexity by length.

    Every example gets its own T(n) loops, a model of a fixed depth its depth. The result is saved
    in RUN/results.
    """
    from loopinterp.results import SUFFIX

    _use_threads(threads)
    if stopping:
        named = [rule.partition("=")[0] for rule in stop or ()]
        every = (*loopinterp.workflow.STOPPING, loopinterp.workflow.CALIBRATED)
        stop = [*(stop or ()), *(rule for rule in every if rule not in named)]
    result = loopinterp.workflow.evaluate_run(
        run,
        lengths=length,
        distributions=distribution,
        loops=_numbers("--loops", loops),
        stop=stop or (),
        samples=samples,
        seed=seed,
        device=device,
        progress=progress,
    )
    cells = result.to_dataframe("exact_match", "bit_accuracy", "perplexity")
    file = run / RESULTS / f"generalisation{SUFFIX}"
    document: dict[str, Any] = {"run": str(run), "file": str(file), "samples": samples}
    document["cells"] = cells.to_dict("records")
    shown = ["exact_match", "exact_match_low", "exact_match_high", "perplexity"]
    tables = [cells[["distribution", "length", *shown]]]
    if loops:
        by_loop = result.to_dataframe("loop_exact_match", "loop_perplexity")
        document["by_loop"] = by_loop.to_dict("records")
        asked = by_loop[by_loop["loop"].isin(_numbers("--loops", loops))]
        tables.append(asked[["loop", "distribution", "length", *_LOOP_COLUMNS]])
    if stop:
        stopped = result.to_dataframe("stopped_exact_match", "stopped_at")
        document["stopped"] = stopped.to_dict("records")
        tables.append(stopped)
    words = [table.round(3).to_string(index=False) for table in tables]
    findings, told = _found([result])
    _print(
        {**document, "findings": findings},
        "\n".join([*words, told, _next("analyze", run)]),
        as_json,
    )


_LOOP_COLUMNS = ("loop_exact_match", "loop_perplexity")


def _numbers(option: str, text: str) -> list[int]:
    """Numbers of loops with commas between them; none if there is no text."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        fix = f"Write {option} 1,2,4,8."
        raise InputError(
            option, expected="numbers with commas between them", given=repr(text), fix=fix
        )
    return [int(part) for part in parts]


@app.command(epilog=_examples("grid runs/abacus --to 12 --loops 1,2,4,8,16,32 --samples 100"))
def grid(
    run: Run,
    to: Annotated[int, typer.Option(min=1, help="Greatest length of each operand.")],
    loops: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of loops.")] = (
        "1,2,4,8,16,32"
    ),
    samples: Annotated[int, typer.Option(min=1, help="Examples for each pair of lengths.")] = 100,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Measure exact match by the lengths of both operands.

    Answers are scored as greedy generation would write them. Killed at any moment, the same
    command goes on. The result is saved in RUN/results.
    """
    from loopinterp.results import SUFFIX

    _use_threads(threads)
    result = loopinterp.workflow.grid_run(
        run,
        to=to,
        loops=_numbers("--loops", loops),
        samples=samples,
        seed=seed,
        device=device,
        progress=progress,
    )
    cells = result.to_dataframe("exact_match")
    findings, told = _found([result])
    document = {"run": str(run), "file": str(run / RESULTS / f"grid{SUFFIX}"), "samples": samples}
    _print(
        {**document, "cells": cells.to_dict("records"), "findings": findings},
        "\n".join([told, _next("report", run)]),
        as_json,
    )


@app.command(
    epilog=_examples(
        "sweep analyses/sweeps/smoke.json --out runs/smoke",
        "sweep analyses/sweeps/addition_ablations.json --out runs/ablations --jobs 2",
        "sweep FILE --out DIR --scale paper --cluster slurm --cluster-set timeout_min=240",
    )
)
def sweep(
    file: Annotated[Path, typer.Argument(**_FILE, help="The experiment, as JSON.")],
    out: Annotated[Path, typer.Option(metavar="PATH", parser=_path, help="Its folder.")],
    scale: Annotated[
        str | None, typer.Option(help="laptop or paper.", show_default="laptop, if it has one")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="SETTING", help="Run this one; may be repeated.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, or jobs of a cluster at the same time."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="slurm: run each cell as a job there, with submitit.")
    ] = None,
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Parameter of submitit; may be repeated."),
    ] = None,
    settings: Settings = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Run an experiment: settings times seeds, each trained and evaluated; one table and figure.

    Killed at any moment, the same command goes on. A cell that fails stops no other; it is named,
    and the exit status is 1. Everything is in PATH: sweep.csv, sweep.html, and a run for each cell.
    """
    result = loopinterp.workflow.sweep_file(
        file,
        out,
        settings=settings or (),
        scale=scale,
        only=only or (),
        jobs=jobs,
        cluster=cluster,
        cluster_options=cluster_set or (),
        progress=progress,
    )
    table = result.table()
    cells = table.astype(object).where(table.notna(), None).to_dict("records")  # NaN is no JSON
    document = {
        "out": str(out),
        "failed": result.failed,
        "missing": result.missing,
        "cells": cells,
        "findings": _found([result])[0],
    }
    document |= {"table": str(out / "sweep.csv"), "page": str(out / "sweep.html")}
    shown = f"Exact match by length\n{result.in_short().to_string()}"
    # The table says how right each setting is; what did not end has no row that says why.
    unended = [finding.text for finding in result.findings() if finding.value]
    files = [f"Table: {document['table']}", f"Figure: {document['page']}"]
    _print(document, "\n".join([shown, *unended, *files]), as_json)
    if result.failed:
        raise typer.Exit(1)


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
    """Run the studies that the report shows, as far as they can say something of the run.

    Each result is saved in RUN/results, with its controls. A study that asks nothing of the run's
    task is left out; one that cannot be made says why.
    """
    _use_threads(threads)
    found = loopinterp.workflow.analyze_run(
        run, studies=study, seed=seed, device=device, progress=progress
    )
    document = {
        name: {
            "file": str(found.files[name]),
            "seconds": result.provenance.wall_time,
            "findings": _found([result])[0],
        }
        for name, result in found.results.items()
    }
    unsaid = [f"- {name}: cannot be said because {why}." for name, why in found.unsaid.items()]
    unsaid += [f"- {name}: left out because {why}." for name, why in found.left_out.items()]
    _print(
        {"run": str(run), "results": document}
        | {"unsaid": found.unsaid, "left_out": found.left_out},
        "\n".join([_found(found.results.values())[1], *unsaid, _next("report", run)]),
        as_json,
    )


@app.command(epilog=_examples("report runs/add", "report runs/add --out add.html"))
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option(**_FILE, help="Default: RUN/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write the report: one HTML file that works offline.

    It is made from the saved results of `evaluate` and `analyze`, without the model.
    """
    path = loopinterp.report.write_report(run, out)
    _print({"run": str(run), "report": str(path)}, str(path), as_json)
    if not as_json and sys.stderr.isatty():  # the path alone is for scripts
        typer.echo("Next: open it in a browser.", err=True)


@app.command(epilog=_examples("tasks", "tasks --json"))
def tasks(as_json: Json = False) -> None:
    """List the tasks."""
    listed = loopinterp.workflow.list_task_facts()
    _print(listed, "\n\n".join(_facts(facts) for facts in listed), as_json)


@app.command(epilog=_examples("recipes", "recipes addition --json"))
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, with what their models were measured at."""
    if name is None:
        listed = loopinterp.workflow.list_recipe_facts()
        _print(listed, "\n\n".join(_facts(facts) for facts in listed), as_json)
        return
    from loopinterp.settings import flatten

    recipe = loopinterp.training.get_recipe(name)
    in_words = {"recipe": name, **flatten(recipe.to_dict(defaults=False))}
    _print({"recipe": name, **recipe.to_dict()}, _facts(in_words), as_json)


@app.command(epilog=_examples("zoo", "zoo addition", "zoo addition --out runs/addition"))
def zoo(
    name: Annotated[str | None, typer.Argument(help="One model, with its card.")] = None,
    out: Annotated[
        Path | None, typer.Option(**_FILE, help="Copy the model there, as a run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the trained models that come with the package.

    A copy is a run as any other, to evaluate, analyze and report; nothing is written into the
    package.
    """
    if name is None:
        if out is not None:
            raise InputError(
                "NAME",
                expected="the model to copy",
                given="--out alone",
                fix="Say which one: `loopinterp zoo` lists them.",
            )
        table = loopinterp.list_pretrained().reset_index()
        _print(table.to_dict("records"), table.to_string(index=False), as_json)
        return
    card = loopinterp.zoo.get_card(name)
    facts = {"model": name, **card.to_dict(), "fails_at": card.fails_at()}
    if out is None:
        about = {key: value for key, value in facts.items() if key != "exact_match"}
        text = f"{_facts(about)}\n\nExact match by loops beyond T(n)\n{card.table().to_string()}"
        _print(facts, text, as_json)
    else:
        loopinterp.load_pretrained(name, out)
        _print({"run": str(out), **facts}, f"{out}: {card.note} {_next('analyze', out)}", as_json)


def _next(command: str, run: Path) -> str:
    # A script of a user's own registers its tasks before it calls this command line.
    script = Path(sys.argv[0])
    own = script.suffix == ".py" and script.name != "__main__.py"
    start = f"python {shlex.quote(str(script))}" if own else "loopinterp"
    return f"Next: {start} {command} {shlex.quote(str(run))}"


def _found(results: Iterable[Result]) -> tuple[list[dict[str, Any]], str]:
    """What results say in plain words: as JSON has it, and as a list to read."""
    findings = loopinterp.workflow.in_reading_order(results)
    told = "\n".join(f"- {finding.text}" for finding in findings)
    return [dataclasses.asdict(finding) for finding in findings], told


def _facts(facts: Mapping[str, Any]) -> str:
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
