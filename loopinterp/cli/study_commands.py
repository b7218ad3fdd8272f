"""Commands that study a run, and report on it."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

import loopinterp
from loopinterp.cli.options import (
    FILE,
    Device,
    Json,
    Progress,
    Run,
    Runs,
    StudySeed,
    Threads,
    examples,
    read_path,
    use_threads,
)
from loopinterp.cli.output import next_step, print_document, spell_findings
from loopinterp.errors import InputError

commands = typer.Typer()


@commands.command(
    epilog=examples("analyze runs/add", "analyze runs/add --study convergence --seed 1 --json")
)
def analyze(
    run: Run,
    study: Annotated[
        list[str] | None, typer.Option(help="One study; may be repeated. Default: all.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Problem length of the examples.", show_default="each study's"),
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
    use_threads(threads)
    found = loopinterp.workflow.analyze_run(
        run, studies=study, length=length, seed=seed, device=device, progress=progress
    )
    document = {
        name: {
            "file": str(found.files[name]),
            "seconds": result.provenance.wall_time,
            "findings": spell_findings([result])[0],
        }
        for name, result in found.results.items()
    }
    unsaid = [f"- {name}: cannot be said because {why}." for name, why in found.unsaid.items()]
    unsaid += [f"- {name}: left out because {why}." for name, why in found.left_out.items()]
    print_document(
        {"run": str(run), "results": document}
        | {"unsaid": found.unsaid, "left_out": found.left_out},
        "\n".join([spell_findings(found.results.values())[1], *unsaid, next_step("report", run)]),
        as_json,
    )


@commands.command(
    epilog=examples(
        'lens runs/add --prompt "13 + 9"',
        'lens addition --prompt "1+1 0+1 1+0" --lens tuned',
        'lens models/hrm-text --prompt "The cat sat on" --lens logit',
    )
)
def lens(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            parser=read_path,
            help="A run; a model of the zoo; or a published model: its folder, or hf:owner/name.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What the model reads, in its task's words.")],
    lens: Annotated[
        str,
        typer.Option(
            metavar="LENS",
            help="What is read: coda (the model's own readout), logit, tuned, jacobian, or the "
            "FILE of a fitted lens.",
        ),
    ] = "coda",
    out: Annotated[
        Path | None, typer.Option(**FILE, help="Default: RUN/lens.html, or else lens.html.")
    ] = None,
    loops: Annotated[
        int | None, typer.Option(min=1, help="Loops to show.", show_default="the model's own")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code beside a published model.")
    ] = False,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Write a page on one prompt: what a lens reads at each loop and position.

    One HTML file that works offline: tokens by loops with the reading of each, attention of the
    position that is chosen, and the way of its state. A tuned or Jacobian lens is fitted first, to
    samples of the run's task. Published looped models (Ouro, Huginn, HRM-Text) read any text.
    """
    from loopinterp.lens_page import write_lens_page

    use_threads(threads)
    path, result = write_lens_page(
        model,
        prompt,
        lens=lens,
        out=out,
        n_loops=loops,
        trust_remote_code=trust_remote_code,
        seed=seed,
        device=device,
        progress=progress,
    )
    findings, told = spell_findings([result])
    document = {"model": str(model), "page": str(path), "lens": result.lens}
    document |= {"tokens": result.tokens[0]}
    print_document(document | {"findings": findings}, f"{told}\n{path}", as_json)


@commands.command(
    epilog=examples(
        "report runs/add --open",
        "report runs/add --out add.html",
        "report runs/seed-0 runs/seed-1 runs/compiled --out side-by-side.html",
    )
)
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(**FILE, help="Default: RUN/report.html; needed for several runs.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write the report: one HTML file that works offline. Of several runs: them side by side.

    It is made from the saved results of `evaluate` and `analyze`, without the model.
    """
    if len(runs) > 1 and out is None:
        raise InputError(
            "--out",
            expected="the file to write the comparison to",
            given="none",
            fix="Say which: --out side-by-side.html.",
        )
    if len(runs) > 1:
        path = loopinterp.report.write_comparison(runs, str(out))
        document = {"runs": [str(run) for run in runs], "report": str(path)}
    else:
        path = loopinterp.report.write_report(runs[0], out)
        document = {"run": str(runs[0]), "report": str(path)}
    print_document(document, str(path), as_json)
    if open_it:
        webbrowser.open(path.resolve().as_uri())
    elif not as_json and sys.stderr.isatty():  # the path alone is for scripts
        typer.echo("Next: open it in a browser.", err=True)
