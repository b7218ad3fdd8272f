"""Commands that measure: by length and loops, by both operands, settings times seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import loopinterp
from loopinterp.cli.options import (
    FILE,
    Device,
    Json,
    Progress,
    Run,
    Settings,
    StudySeed,
    Threads,
    examples,
    read_numbers,
    read_path,
    use_threads,
)
from loopinterp.cli.output import next_step, print_document, spell_findings
from loopinterp.studied_model import RESULTS

commands = typer.Typer()

_LOOP_COLUMNS = ("loop_exact_match", "loop_perplexity")


@commands.command(
    epilog=examples(
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
        list[str] | None,
        typer.Option(help="Input distribution; may be repeated. Default: all of the task."),
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

    use_threads(threads)
    if stopping:
        named = [rule.partition("=")[0] for rule in stop or ()]
        every = (*loopinterp.workflow.STOPPING, loopinterp.workflow.CALIBRATED)
        stop = [*(stop or ()), *(rule for rule in every if rule not in named)]
    result = loopinterp.workflow.evaluate_run(
        run,
        lengths=length,
        distributions=distribution,
        loops=read_numbers("--loops", loops),
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
    document["lowest"] = [
        {"length": n, "exact_match": lowest.share, "distributions": list(lowest.distributions)}
        for n in result.data["length"].values.tolist()
        for lowest in [result.lowest(n)]
    ]
    document["not_judged"] = list(result.not_judged)
    shown = ["exact_match", "exact_match_low", "exact_match_high", "perplexity"]
    tables = [cells[["distribution", "length", *shown]]]
    if loops:
        by_loop = result.to_dataframe("loop_exact_match", "loop_perplexity")
        document["by_loop"] = by_loop.to_dict("records")
        asked = by_loop[by_loop["loop"].isin(read_numbers("--loops", loops))]
        tables.append(asked[["loop", "distribution", "length", *_LOOP_COLUMNS]])
    if stop:
        stopped = result.to_dataframe("stopped_exact_match", "stopped_at")
        document["stopped"] = stopped.to_dict("records")
        tables.append(stopped)
    words = [table.round(3).to_string(index=False) for table in tables]
    findings, told = spell_findings([result])
    print_document(
        {**document, "findings": findings},
        "\n".join([*words, told, next_step("analyze", run)]),
        as_json,
    )


@commands.command(epilog=examples("grid runs/abacus --to 12 --loops 1,2,4,8,16,32 --samples 100"))
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

    use_threads(threads)
    result = loopinterp.workflow.grid_run(
        run,
        to=to,
        loops=read_numbers("--loops", loops),
        samples=samples,
        seed=seed,
        device=device,
        progress=progress,
    )
    cells = result.to_dataframe("exact_match")
    findings, told = spell_findings([result])
    document = {"run": str(run), "file": str(run / RESULTS / f"grid{SUFFIX}"), "samples": samples}
    print_document(
        {**document, "cells": cells.to_dict("records"), "findings": findings},
        "\n".join([told, next_step("report", run)]),
        as_json,
    )


@commands.command(
    epilog=examples(
        "sweep analyses/sweeps/smoke.json --out runs/smoke",
        "sweep analyses/sweeps/ablations_addition.json --out runs/ablations --jobs 2",
        "sweep FILE --out DIR --scale paper --cluster slurm --cluster-set timeout_min=240",
    )
)
def sweep(
    file: Annotated[Path, typer.Argument(**FILE, help="The experiment, as JSON.")],
    out: Annotated[Path, typer.Option(metavar="PATH", parser=read_path, help="Its folder.")],
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
    document = {
        "out": str(out),
        "failed": result.failed,
        "missing": result.missing,
        "cells": result.table().to_dict("records"),
        "findings": spell_findings([result])[0],
    }
    document |= {"table": str(out / "sweep.csv"), "page": str(out / "sweep.html")}
    shown = f"Exact match by length\n{result.in_short().to_string()}"
    # The table says how right each setting is; what did not end has no row that says why.
    unended = [finding.text for finding in result.findings() if finding.value]
    files = [f"Table: {document['table']}", f"Figure: {document['page']}"]
    print_document(document, "\n".join([shown, *unended, *files]), as_json)
    if result.failed:
        raise typer.Exit(1)
