"""Commands that study a run, report on it, and list what there is."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import loopinterp
from loopinterp.cli.shared import (
    FILE,
    Device,
    Json,
    Progress,
    Run,
    Runs,
    StudySeed,
    Texts,
    Threads,
    command,
    next_step,
    print_document,
    read_path,
    spell_command,
    spell_facts,
    spell_findings,
    spell_run,
    study_options,
)
from loopinterp.core.errors import InputError, need
from loopinterp.core.text import showing


@command("analyze runs/add", "analyze runs/add --study convergence --seed 1 --json")
def analyze(
    run: Run,
    study: Annotated[Texts, Option(help="One study; may be repeated. Default: all.")] = None,
    length: Annotated[
        int | None,
        Option(min=1, help="Problem length of the examples.", show_default="each study's"),
    ] = None,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Run the studies that the report shows.

    Each result is saved in RUN/results, with its controls. Studies that do not apply to the model
    are skipped; `report --text` gives the reasons. If a study fails, the others continue, and the
    exit status is 1.
    """
    from loopinterp.app.study import spell_skip

    options = study_options(seed, device, threads, progress)
    analysis = loopinterp.app.workflow.analyze_run(run, studies=study, length=length, **options)
    results = {
        name: {
            "file": str(analysis.files[name]),
            "seconds": result.provenance.wall_time,
            "findings": spell_findings([result])[0],
        }
        for name, result in analysis.results.items()
    }
    skipped = {name: spell_skip(skip) for name, skip in analysis.skipped.items()}
    left_out = {name: spell_skip(skip) for name, skip in analysis.left_out.items()}
    document = {"run": str(run), "results": results, "skipped": skipped, "left_out": left_out}
    document["failed"] = analysis.failed
    if study:  # what was asked for, in full
        lines = [spell_findings(analysis.results.values())[1], next_step("report", run)]
    else:
        lines = [spell_run(run, loopinterp.pages.read_run(run))]
        if skipped:
            lines.append(f"  Skipped: {', '.join(skipped)}")
        lines += [f"  Failed: {name} ({error})" for name, error in analysis.failed.items()]
        lines += [f"{next_step('report', run)} --open"]
        lines += [f"All findings: {spell_command('report', run)} --text"]
    print_document(document, "\n".join(lines), as_json)
    if analysis.failed:
        # Status 1, as 2 is for bad input.
        raise typer.Exit(1)


@command(
    'lens runs/add --prompt "13 + 9"',
    'lens addition --prompt "1+1 0+1 1+0" --lens tuned',
    'lens models/hrm-text --prompt "The cat sat on" --lens logit',
)
def lens(
    model: Annotated[
        Path,
        Argument(
            metavar="MODEL",
            parser=read_path,
            help="A run; a model of the zoo; or a published model: its folder, or hf:owner/name.",
        ),
    ],
    prompt: Annotated[str, Option(help="What the model reads, in its task's words.")],
    lens: Annotated[
        str,
        Option(
            metavar="LENS",
            help="How states are read: coda (the model's own readout), logit, tuned, jacobian, or "
            "the FILE of a fitted lens.",
        ),
    ] = "coda",
    out: Annotated[
        Path | None,
        Option(
            **FILE,
            help="Default: lens.html in the run's folder or the current one; if it exists, "
            "lens-2.html.",
        ),
    ] = None,
    loops: Annotated[
        int | None, Option(min=1, help="Loops to show.", show_default="the model's own")
    ] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run the code that comes with a published model.")
    ] = False,
    seed: StudySeed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Write a page on one prompt: what a lens reads at each loop and position.

    The page is one HTML file that works offline. It shows the reading of each token at each loop,
    and attention and state at the chosen position. A tuned or Jacobian lens is fitted first, to
    samples of the run's task. Published looped models (Ouro, Huginn, HRM-Text) read any text.
    """
    from loopinterp.app.lens_page import write_lens_page

    options = study_options(seed, device, threads, progress)
    shown: Any = {"n_loops": loops, "trust_remote_code": trust_remote_code}
    path, result = write_lens_page(model, prompt, lens=lens, out=out, **shown, **options)
    findings, findings_text = spell_findings([result])
    document = {"model": str(model), "page": str(path), "lens": result.lens}
    document |= {"tokens": result.tokens[0], "findings": findings}
    print_document(document, f"{findings_text}\n{path}", as_json)


@command(
    "report runs/add --open",
    "report runs/add --text",
    "report runs/add --out add.html",
    "report runs/seed-0 runs/seed-1 runs/compiled --out side-by-side.html",
)
def report(
    runs: Runs,
    out: Annotated[
        Path | None, Option(**FILE, help="Default: RUN/report.html; needed for several runs.")
    ] = None,
    open_it: Annotated[bool, Option("--open", help="Open it in the browser.")] = False,
    as_text: Annotated[bool, Option("--text", help="Print all findings; write no page.")] = False,
    as_json: Json = False,
) -> None:
    """Write the report, one HTML file that works offline. Several runs are shown side by side.

    It uses the saved results of `evaluate` and `analyze`, and does not run the model.
    """
    if as_text:
        documents, lines = [], []
        for run in runs:
            record = loopinterp.pages.read_run(run)
            listed, findings = spell_findings(record.results.values())
            skipped = [f"- {name}: skipped, because {why}." for name, why in record.skipped.items()]
            documents.append({"run": str(run), "findings": listed, "skipped": {**record.skipped}})
            lines += [spell_run(run, record), findings, *skipped]
        # One JSON document, also of several runs.
        print_document(documents if len(runs) > 1 else documents[0], "\n".join(lines), as_json)
        return
    if len(runs) == 1:
        # One run has a default place, in its folder; several have none.
        path = loopinterp.pages.write_report(runs[0], out)
        document = {"run": str(runs[0]), "report": str(path)}
    elif out is not None:
        path = loopinterp.pages.write_comparison(runs, out)
        document = {"runs": [*map(str, runs)], "report": str(path)}
    else:
        raise InputError(
            "--out",
            expected="the file to write the comparison to",
            given="none",
            fix="Say which: --out side-by-side.html.",
        )
    print_document(document, str(path), as_json)
    if open_it:
        webbrowser.open(path.resolve().as_uri())
    elif not as_json and sys.stderr.isatty():  # the path alone is for scripts
        typer.echo("Next: open it in a browser.", err=True)


def _print_facts(listed: list[dict[str, Any]], as_json: bool) -> None:
    print_document(listed, "\n\n".join(map(spell_facts, listed)), as_json)


@command("tasks", "tasks --json")
def tasks(as_json: Json = False) -> None:
    """List the tasks."""
    listed = []
    for name in loopinterp.tasks.list_tasks():
        task = loopinterp.tasks.get_task(name)
        numbers = f"{task.d_features} numbers a position"
        facts: dict[str, Any] = {"task": name, "asks": task.describe()}
        facts["input"] = f"tokens 0..{task.d_vocab - 1}" if task.d_vocab else numbers
        facts["outputs"] = task.d_vocab_out
        facts["loops T(n)"] = {f"n={n}": task.n_loops(n) for n in (4, 8, 16)}
        facts["distributions"] = list(task.distributions)
        listed.append(facts)
    _print_facts(listed, as_json)


@command("studies", "studies --json")
def studies(as_json: Json = False) -> None:
    """List the studies that `analyze` runs."""
    table = loopinterp.studies()
    words = "\n".join(f"{name:18}{about}" for name, about in table["about"].items())
    print_document(table.reset_index().to_dict("records"), words, as_json)


@command("programs", "programs --json")
def programs(as_json: Json = False) -> None:
    """List the stock programs, by task; `compile` and `analyze` use them."""
    by_task: dict[str, list[str]] = {}
    for name in loopinterp.programs.list_programs():
        by_task.setdefault(str(loopinterp.programs.get_program(name).task), []).append(name)
    words = "\n".join(f"{task}: {', '.join(names)}" for task, names in sorted(by_task.items()))
    print_document(by_task, words, as_json)


@command("recipes", "recipes addition --json")
def recipes(
    name: Annotated[str | None, Argument(help="One recipe, in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, with the measured accuracy of their models."""
    from loopinterp.core.settings import flatten_settings

    if name is not None:
        recipe = loopinterp.training.get_recipe(name)
        # Without defaults, which the JSON document has.
        in_words = {"recipe": name, **flatten_settings(recipe.to_dict(defaults=False))}
        print_document({"recipe": name, **recipe.to_dict()}, spell_facts(in_words), as_json)
        return
    listed = []
    for name in loopinterp.training.list_recipes():
        recipe = loopinterp.training.get_recipe(name)
        config, measured = recipe.config, recipe.measured
        # Counted on a model that is made for it, in its initial state.
        weights = loopinterp.models.LoopedTransformer(config.model).parameters()
        facts = {
            "recipe": name,
            "task": config.task,
            "about": recipe.about,
            "weights": sum(p.numel() for p in weights),
            "minutes": measured.minutes,
            "trained to": config.curriculum.max_n,
            "exact match": {f"n={n}": round(p, 3) for n, p in measured.worst().items()},
            "seeds": list(measured.seeds),
        }
        listed.append(facts)
    _print_facts(listed, as_json)


@command("zoo", "zoo addition", "zoo addition --out runs/addition")
def zoo(
    name: Annotated[str | None, Argument(help="One model, with its card.")] = None,
    out: Annotated[Path | None, Option(**FILE, help="Copy the model there, as a run.")] = None,
    as_json: Json = False,
) -> None:
    """List the trained models that come with the package.

    A copy (--out) is an ordinary run, to evaluate, analyze and report. Nothing is written into the
    package.
    """
    if name is None:
        fix = "Say which one: `loopinterp zoo` lists them."
        need(out is None, "NAME", "the model to copy", "--out alone", fix)
        table = loopinterp.list_pretrained()
        text = f"{table!r}\nCard of one: loopinterp zoo NAME"
        print_document(table.reset_index().to_dict("records"), text, as_json)
        return
    card = loopinterp.zoo.get_card(name)
    lowest = {
        n: {"exact_match": share, "distributions": list(card.lowest(n).distributions)}
        for n, share in card.worst().items()
    }
    failures = [str(failure) for failure in card.fails_at()]
    facts = {"model": name, **card.to_dict(), "lowest": lowest, "fails_at": failures}
    if out is not None:
        loopinterp.zoo.pretrained_run(name, out)
        copied = f"{out}: {card.note} {next_step('analyze', out)}"
        print_document({"run": str(out), **facts}, copied, as_json)
        return
    # Accuracies are printed as tables.
    in_tables, if_known = ("exact_match", "lowest", "baselines"), ("origin", "licence", "command")
    about = {
        key: value
        for key, value in facts.items()
        if key not in in_tables and not (key in if_known and value is None)
    }
    text = (
        f"{spell_facts(about)}\n\nExact match by loops beyond T(n)\n{card.table().to_string()}"
        f"\n\nLowest of the distributions after T(n) loops\n{card.lowest_table().to_string()}"
    )
    if card.baselines:
        text += f"\n\nBeside other models\n{card.baseline_table().to_string()}"
    print_document(facts, text, as_json)


@command("benchmark runs/known", "benchmark runs/ripple --only ripple --json")
def benchmark(
    folder: Annotated[
        Path,
        Argument(metavar="PATH", parser=read_path, help="A new folder, or one with a benchmark."),
    ],
    only: Annotated[
        Texts, Option(help="A program or a model; may be repeated. Default: all.")
    ] = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Write the benchmark: known-circuit models with cards, each file with its digest.

    `loopinterp.benchmark.Benchmark(FOLDER)` reads it back, and refuses changed files.
    """
    with showing(progress):
        written = loopinterp.benchmark.make_benchmark(folder, only or None)
    document = {"folder": str(folder), "digest": written.digest, "models": list(written)}
    text = f"{folder}: {len(written)} known-circuit models, digest {written.digest}"
    print_document(document, text, as_json)
