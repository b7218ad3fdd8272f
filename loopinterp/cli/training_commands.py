"""Commands that make a run: train, compile, and the demo, which does everything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import loopinterp
from loopinterp.cli.options import (
    FILE,
    SEED,
    Json,
    Out,
    Progress,
    Settings,
    TrainingThreads,
    examples,
)
from loopinterp.cli.output import next_step, print_document, spell_findings

commands = typer.Typer()


@commands.command(epilog=examples("demo", "demo --out runs/mine --seed 1", "demo --json"))
def demo(
    out: Out = Path("runs/demo"),
    seed: Annotated[
        int | None,
        typer.Option(**SEED, help="Seed of weights, data and studies.", show_default="0"),
    ] = None,
    settings: Settings = None,
    threads: TrainingThreads = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train an addition model and study it, beside one that is a program; write the reports.

    About seven minutes on two cores. Killed at any moment, the same command goes on.
    """
    pages = loopinterp.workflow.demo(
        out, seed=seed, settings=settings or (), threads=threads, progress=progress
    )
    folders = (pages.finite.parent, out)
    of_finite, of_own = (
        spell_findings(loopinterp.report.read_run(folder).results.values()) for folder in folders
    )
    document = {
        "run": str(out),
        "report": str(pages.report),
        "findings": of_own[0],
        "finite_report": str(pages.finite),
        "finite_findings": of_finite[0],
        "comparison": str(pages.comparison),
    }
    told = (
        f"A model whose state is one bit, trained on sums before:\n{of_finite[1]}\n"
        f"Report: {pages.finite}\n\nThe model trained now:\n{of_own[1]}\n"
        f"Report: {pages.report}\nSide by side: {pages.comparison}\nNext: open them in a browser."
    )
    print_document(document, told, as_json)


@commands.command(
    epilog=examples(
        "train --task addition --out runs/add",
        "train --task addition --set model.d_model=128 --set steps=4000 --out runs/wide",
        "train --task parity --seed 1 --no-progress --out runs/parity-1",
        "train --config runs/add/config.json --seed 2 --out runs/add-2",
        "train --recipe addition-finite --drop-bits --seed 2 --out runs/finite",
    )
)
def train(
    out: Out,
    task: Annotated[str | None, typer.Option(help="One of `loopinterp tasks`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Default: the one named as the task.")] = None,
    config: Annotated[Path | None, typer.Option(**FILE, help="Configuration as JSON.")] = None,
    without_recipe: Annotated[
        bool, typer.Option("--without-recipe", help="Start from the demo's model instead.")
    ] = False,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(**SEED, help="Seed of weights and data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    drop_bits: Annotated[
        bool,
        typer.Option(
            "--drop-bits",
            help="Then drop the bits of model.state_code one by one, as long as every answer "
            "stays right. Each stage is a run in OUT.",
        ),
    ] = False,
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
    options = {"progress": progress, "resume": resume}
    if drop_bits:
        _say_stages(loopinterp.workflow.train_finite_run(chosen, out, **options), as_json)
        return
    run = loopinterp.workflow.train_run(chosen, out, **options)
    if not is_first():  # of several processes, one speaks
        return
    last = run.metrics().tail(1).to_dict("records")
    document = {"run": str(out), "steps": run.steps_done, "seconds": run.seconds}
    print_document(
        {**document, "last": last[0] if last else None},
        f"{out}: {run.steps_done} steps in {run.seconds:.0f} s. {next_step('evaluate', out)}",
        as_json,
    )


def _say_stages(stages: list[loopinterp.training.FiniteStage], as_json: bool) -> None:
    """What became of each number of bits, and which run is the smallest that is right."""
    found = loopinterp.training.smallest_stage(stages)
    document = [
        {
            "run": str(stage.run.folder),
            "bits": stage.n_bits,
            "from_anywhere": stage.from_anywhere,
            "exact_match": stage.lowest,
            "learnt": stage.learnt,
        }
        for stage in stages
    ]
    lines = [
        f"{stage.run.folder}: {stage.n_bits} bits, "
        + ", ".join(f"{share:.3g} right at {n}" for n, share in stage.lowest.items())
        for stage in stages
    ]
    smallest = None if found is None else str(found.run.folder)
    last = "No stage is right on every example." if found is None else f"Smallest: {smallest}. "
    lines.append(last + ("" if found is None else next_step("analyze", found.run.folder)))
    print_document({"stages": document, "smallest": smallest}, "\n".join(lines), as_json)


@commands.command(
    name="compile",
    epilog=examples(
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
    seed: Annotated[int, typer.Option(**SEED, help="Seed of the disguises.")] = 0,
    as_json: Json = False,
) -> None:
    """Compile a program into a model whose circuit is known.

    The run that it makes is evaluated, analysed and reported like one that was trained.
    """
    run = loopinterp.workflow.compile_run(
        program, out, max_length=max_length, disguises=disguise or (), seed=seed
    )
    config = run.config.model
    print_document(
        {"run": str(out), "program": program, "task": run.config.task, "d_model": config.d_model},
        f"{out}: {program} in {config.d_model} dimensions. {next_step('analyze', out)}",
        as_json,
    )
