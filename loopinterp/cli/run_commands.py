"""Commands that make runs and measure them: demo, train, compile, evaluate, grid, sweep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import loopinterp
from loopinterp.cli.shared import (
    FILE,
    OUT,
    RUNS,
    SEED,
    Device,
    Json,
    Out,
    Progress,
    Run,
    Settings,
    StudySeed,
    Texts,
    Threads,
    TrainingThreads,
    command,
    next_step,
    print_document,
    read_numbers,
    read_program,
    spell_command,
    spell_findings,
    spell_run,
    study_options,
)


@command("demo", "demo --out runs/mine --seed 1", "demo --json")
def demo(
    out: Out = Path("runs/demo"),
    seed: Annotated[
        int | None, Option(**SEED, help="Seed of weights, data and studies.", show_default="0")
    ] = None,
    settings: Settings = None,
    threads: TrainingThreads = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train an addition model, study it and a zoo model that runs a program; write the reports.

    Takes about four minutes on two cores. If it is interrupted, run the same command to resume.
    """
    start = time.monotonic()
    pages = loopinterp.app.workflow.demo(
        out, seed=seed, settings=settings or (), threads=threads, progress=progress
    )
    finite = pages.finite.parent
    record, of_finite = (loopinterp.pages.read_run(folder) for folder in (out, finite))
    document = {
        "run": str(out),
        "report": str(pages.report),
        "findings": spell_findings(record.results.values())[0],
        "finite_report": str(pages.finite),
        "finite_findings": spell_findings(of_finite.results.values())[0],
        "comparison": str(pages.comparison),
    }
    # Of the other model the program is what matters.
    heading, *facts = spell_run(finite, of_finite).splitlines()
    lines = [
        f"Done in {loopinterp.pages.seconds(time.monotonic() - start)}.",
        heading.replace("looped transformer", "model with a one-bit state"),
        *facts[-1:],
        spell_run(out, record),
        f"Side by side: {pages.comparison}",
        f"Open: {spell_command('report', out)} --open",
        f'Play: {spell_command("lens", out)} --prompt "127 + 1"',
        f"All findings: {spell_command('report', out)} --text",
    ]
    print_document(document, "\n".join(lines), as_json)


@command(
    "train --task addition --out runs/add",
    "train --task addition --set model.d_model=128 --set steps=4000 --out runs/wide",
    "train --task parity --seed 1 --no-progress --out runs/parity-1",
    "train --config runs/add/config.json --seed 2 --out runs/add-2",
    "train --recipe addition-finite --drop-bits --seed 2 --out runs/finite",
)
def train(
    out: Annotated[Path | None, Option(**OUT, show_default="runs/TASK")] = None,
    task: Annotated[str | None, Option(help="One of `loopinterp tasks`.")] = None,
    recipe: Annotated[
        str | None, Option(help="One of `loopinterp recipes`. Default: the task's.")
    ] = None,
    config: Annotated[Path | None, Option(**FILE, help="Configuration as JSON.")] = None,
    without_recipe: Annotated[
        bool, Option("--without-recipe", help="Start from the settings of the demo's model.")
    ] = False,
    settings: Settings = None,
    seed: Annotated[int | None, Option(**SEED, help="Seed of weights and data.")] = None,
    steps: Annotated[int | None, Option(help="Optimiser steps.")] = None,
    device: Annotated[str | None, Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, Option(help="fp32 or bf16.")] = None,
    compile_: Annotated[bool, Option("--compile", help="Use torch.compile.")] = False,
    drop_bits: Annotated[
        bool,
        Option(
            "--drop-bits",
            help="After training, drop the bits of model.state_code one by one, as long as every "
            "answer stays right. Each stage is a run in PATH.",
        ),
    ] = False,
    resume: Annotated[
        bool, Option("--resume/--no-resume", help="Continue an interrupted run.")
    ] = True,
    threads: TrainingThreads = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train a looped transformer on a task.

    Starts from the task's recipe or from --config, then applies each --set and the other
    options. A task without a recipe that generalises is refused, unless --without-recipe is given.
    If it is interrupted, run the same command to resume; the numbers are identical. With
    `torchrun --nproc-per-node N -m loopinterp train …`, N processes share each batch.
    """
    from loopinterp.app.runs import configure, train_finite_run, train_run
    from loopinterp.training.device import is_first

    flags = {"seed": seed, "steps": steps, "device": device, "precision": precision}
    # An option that is not given is None, so that it changes no recipe.
    flags |= {"compile": compile_ or None, "threads": threads}
    start = {"task": task, "recipe": recipe, "file": config, "without_recipe": without_recipe}
    chosen = configure(**start, settings=settings or (), flags=flags)
    out = out or RUNS / (recipe or chosen.task)
    if without_recipe:
        # Nothing is known of what this model learns, so its window is said.
        window, some = chosen.model.attention_window, chosen.model.windowed_heads
        seen = "without a window" if window is None else f"with a window of {window} to the left"
        seen += "" if some is None else f" in {some} of {chosen.model.n_heads} heads"
        typer.echo(f"No recipe is used for {task}: this is the demo's model, {seen}.", err=True)
    options = {"progress": progress, "resume": resume}
    if drop_bits:
        print_document(*_spell_stages(train_finite_run(chosen, out, **options)), as_json)
        return
    run = train_run(chosen, out, **options)
    if not is_first():  # of several processes, one speaks
        return
    # A run of no step has no metrics.
    last = run.metrics().tail(1).to_dict("records")
    document: dict[str, Any] = {"run": str(out), "steps": run.steps_done, "seconds": run.seconds}
    document["last"] = last[0] if last else None
    done = f"{out}: {run.steps_done} steps in {run.seconds:.0f} s. {next_step('evaluate', out)}"
    print_document(document, done, as_json)


def _spell_stages(stages: list[loopinterp.training.FiniteStage]) -> tuple[Any, str]:
    """The outcome for each number of bits, and the smallest run that is right."""
    document, lines = [], []
    for stage in stages:
        run, bits = stage.run.folder, stage.n_bits
        learnt = {"from_anywhere": stage.from_anywhere, "exact_match": stage.lowest}
        document.append({"run": str(run), "bits": bits, **learnt, "learnt": stage.learnt})
        shares = ", ".join(f"{share:.3g} right at {n}" for n, share in stage.lowest.items())
        lines.append(f"{run}: {bits} bits, {shares}")
    smallest = loopinterp.training.smallest_stage(stages)
    if smallest is None:
        lines.append("No stage is right on every example.")
        return {"stages": document, "smallest": None}, "\n".join(lines)
    folder = smallest.run.folder
    lines.append(f"Smallest: {folder}. {next_step('analyze', folder)}")
    return {"stages": document, "smallest": str(folder)}, "\n".join(lines)


@command(
    "compile ripple --max-length 24 --out runs/ripple",
    "compile parity --max-length 16 --disguise permute --disguise rotate --out runs/hidden",
    name="compile",
)
def compile_(
    program: Annotated[
        str, Argument(metavar="PROGRAM", parser=read_program, help="One of `loopinterp programs`.")
    ],
    max_length: Annotated[int, Option(min=1, help="Greatest problem length of the model.")],
    out: Annotated[Path | None, Option(**OUT, show_default="runs/PROGRAM")] = None,
    disguise: Annotated[
        Texts, Option(help="distract, permute, superpose or rotate; may be repeated.")
    ] = None,
    seed: Annotated[int, Option(**SEED, help="Seed of the disguises.")] = 0,
    as_json: Json = False,
) -> None:
    """Compile a program into a known-circuit model.

    Its run can be evaluated, analysed and reported like that of a trained model.
    """
    out = out or RUNS / program
    run = loopinterp.app.runs.compile_run(
        program, out, max_length=max_length, disguises=disguise or (), seed=seed
    )
    d_model = run.config.model.to_dict()["d_model"]
    document = {"run": str(out), "program": program, "task": run.config.task, "d_model": d_model}
    done = f"{out}: {program} in {d_model} dimensions. {next_step('analyze', out)}"
    print_document(document, done, as_json)


@command(
    "evaluate runs/add",
    "evaluate runs/add --length 24 --length 96 --distribution chain --json",
    "evaluate runs/add --loops 1,2,4,8,16,32",
    "evaluate runs/add --stopping",
    "evaluate runs/add --stop max-confidence --stop residual=0.03",
    "evaluate runs/add --stop residual --stopping-reads state --max-loops 128",
)
def evaluate(
    run: Run,
    length: Annotated[
        list[int] | None, Option(min=1, help="Problem length; may be repeated.")
    ] = None,
    distribution: Annotated[
        Texts, Option(help="Input distribution; may be repeated. Default: all of the task.")
    ] = None,
    stop: Annotated[
        Texts,
        Option(
            metavar="RULE",
            help="Compare with stopping by max-confidence, max-confidence-batch, "
            "residual[=TOLERANCE], readout-kl[=TOLERANCE], acceleration[=TOLERANCE], "
            "answer-held[=LOOPS], entropy[=TOLERANCE], confidence[=THRESHOLD] or calibrated; "
            "may be repeated.",
        ),
    ] = None,
    stopping: Annotated[
        bool, Option("--stopping", help="Compare with all of these rules.")
    ] = False,
    stopping_reads: Annotated[
        str,
        Option(
            metavar="POSITIONS",
            help="Positions that the rules read: answer (those of the answer) or state (all).",
        ),
    ] = "answer",
    max_loops: Annotated[
        int | None,
        Option(min=0, help="Loops after which every rule stops. Default: T(n) + 25."),
    ] = None,
    loops: Annotated[
        str, Option(metavar="N,N,...", help="Measure after these numbers of loops too.")
    ] = "",
    samples: Annotated[int, Option(min=1, help="Examples for each length and distribution.")] = 300,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Measure exact match, bit accuracy and perplexity by length.

    Each example gets T(n) loops, the number that its length requires. A model of fixed depth always
    runs all its layers. The result is saved in RUN/results.
    """
    from loopinterp.app.session import CALIBRATED, STOPPING_RULES

    options = study_options(seed, device, threads, progress)
    rules, loop_counts = [*(stop or ())], read_numbers("--loops", loops)
    if stopping:
        # Rules with a number of their own keep it.
        named = [rule.partition("=")[0] for rule in rules]
        rules += [rule for rule in (*STOPPING_RULES, CALIBRATED) if rule not in named]
    options |= {"lengths": length, "distributions": distribution, "samples": samples}
    options |= {"stop": rules, "stopping_reads": stopping_reads, "max_loops": max_loops}
    result = loopinterp.app.workflow.evaluate_run(run, loops=loop_counts, **options)
    print_document(*_spell_evaluation(run, result, loop_counts), as_json)


def _spell_evaluation(
    run: Path, result: loopinterp.training.EvaluationResult, loop_counts: list[int]
) -> tuple[dict[str, Any], str]:
    """Accuracies as JSON, and as tables with the loops that were asked for."""
    cells = result.to_dataframe("exact_match", "bit_accuracy", "perplexity")
    document: dict[str, Any] = {
        "run": str(run),
        "file": str(run / "results" / "generalisation.safetensors"),
        "samples": result.n_samples,
        "cells": cells.to_dict("records"),
        "lowest": [
            {"length": n, "exact_match": lowest.share, "distributions": list(lowest.distributions)}
            for n in result.data["length"].values.tolist()
            for lowest in [result.lowest(n)]
        ],
        "not_judged": list(result.not_judged),
    }
    exact = ["exact_match", "exact_match_low", "exact_match_high"]
    tables = [cells[["distribution", "length", *exact, "perplexity"]]]
    if loop_counts:
        names = ("loop_exact_match", "loop_perplexity")
        by_loop = result.to_dataframe(*names)
        document["by_loop"] = by_loop.to_dict("records")
        # The document has every loop; the printed table those that were asked for.
        by_loop = by_loop[by_loop["loop"].isin(loop_counts)]
        tables.append(by_loop[["loop", "distribution", "length", *names]])
    if "stopped_at" in result.data:
        stopped = result.to_dataframe("stopped_exact_match", "stopped_at")
        document["stopped"] = stopped.to_dict("records")
        tables.append(stopped)
    words = [table.round(3).to_string(index=False) for table in tables]
    document["findings"], findings_text = spell_findings([result])
    return document, "\n".join([*words, findings_text, next_step("analyze", run)])


@command("grid runs/abacus --to 12 --loops 1,2,4,8,16,32 --samples 100")
def grid(
    run: Run,
    to: Annotated[int, Option(min=1, help="Greatest length of each operand.")],
    loops: Annotated[str, Option(metavar="N,N,...", help="Numbers of loops.")] = ("1,2,4,8,16,32"),
    samples: Annotated[int, Option(min=1, help="Examples for each pair of lengths.")] = 100,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Measure exact match by the lengths of both operands.

    Answers are scored as greedy generation would write them. If it is interrupted, run the same
    command to resume. The result is saved in RUN/results.
    """
    options = study_options(seed, device, threads, progress)
    numbers = read_numbers("--loops", loops)
    result = loopinterp.app.workflow.grid_run(run, to=to, loops=numbers, samples=samples, **options)
    findings, findings_text = spell_findings([result])
    file = run / "results" / "grid.safetensors"
    document = {"run": str(run), "file": str(file), "samples": samples}
    document |= {"cells": result.to_dataframe("exact_match").to_dict("records")}
    text = "\n".join([findings_text, next_step("report", run)])
    print_document(document | {"findings": findings}, text, as_json)


@command(
    "sweep analyses/sweeps/smoke.json --out runs/smoke",
    "sweep analyses/sweeps/ablations_addition.json --out runs/ablations --jobs 2",
    "sweep FILE --out DIR --scale paper --cluster slurm --cluster-set timeout_min=240",
)
def sweep(
    file: Annotated[Path, Argument(**FILE, help="The experiment, as JSON.")],
    out: Annotated[Path | None, Option(**OUT, show_default="runs/FILE")] = None,
    scale: Annotated[
        str | None, Option(help="laptop or paper.", show_default="laptop, if it has one")
    ] = None,
    only: Annotated[
        Texts, Option(metavar="SETTING", help="Run only this one; may be repeated.")
    ] = None,
    jobs: Annotated[
        int | None,
        Option(min=1, help="Processes, or jobs of a cluster, that run at the same time."),
    ] = None,
    cluster: Annotated[
        str | None, Option(help="slurm: submit each cell as a job, with submitit.")
    ] = None,
    cluster_set: Annotated[
        Texts, Option(metavar="KEY=VALUE", help="Parameter of submitit; may be repeated.")
    ] = None,
    settings: Settings = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Train and evaluate each setting of an experiment with each seed; write a table and a figure.

    If it is interrupted, run the same command to resume. If a cell (one setting, one seed) fails,
    the others continue; the command names it and ends with status 1. The folder --out gets
    sweep.csv, sweep.html, and a run for each cell.
    """
    out = out or RUNS / file.stem
    result = loopinterp.app.runs.sweep_file(
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
    table, page = out / "sweep.csv", out / "sweep.html"
    document = {
        "out": str(out),
        "failed": result.failed,
        "missing": result.missing,
        "cells": result.table().to_dict("records"),
        "findings": spell_findings([result])[0],
        "table": str(table),
        "page": str(page),
    }
    shown = f"Exact match by length\n{result.in_short().to_string()}"
    # The table says how right each setting is; what did not end has no row that says why.
    unended = [finding.text for finding in result.findings() if finding.value]
    text = "\n".join([shown, *unended, f"Table: {table}", f"Figure: {page}"])
    print_document(document, text, as_json)
    if result.failed:
        # Status 1, as 2 is for bad input.
        raise typer.Exit(1)
