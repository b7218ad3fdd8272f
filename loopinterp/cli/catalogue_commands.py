"""Commands that list what there is: tasks, recipes, trained models, models of known circuit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import loopinterp
from loopinterp.cli.options import FILE, Json, Progress, examples
from loopinterp.cli.output import next_step, print_document, spell_facts
from loopinterp.errors import InputError
from loopinterp.progress import showing

commands = typer.Typer()


@commands.command(epilog=examples("tasks", "tasks --json"))
def tasks(as_json: Json = False) -> None:
    """List the tasks."""
    listed = loopinterp.workflow.list_task_facts()
    print_document(listed, "\n\n".join(spell_facts(facts) for facts in listed), as_json)


@commands.command(epilog=examples("recipes", "recipes addition --json"))
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, with what their models were measured at."""
    if name is None:
        listed = loopinterp.workflow.list_recipe_facts()
        print_document(listed, "\n\n".join(spell_facts(facts) for facts in listed), as_json)
        return
    from loopinterp.settings import flatten

    recipe = loopinterp.training.get_recipe(name)
    in_words = {"recipe": name, **flatten(recipe.to_dict(defaults=False))}
    print_document({"recipe": name, **recipe.to_dict()}, spell_facts(in_words), as_json)


@commands.command(epilog=examples("zoo", "zoo addition", "zoo addition --out runs/addition"))
def zoo(
    name: Annotated[str | None, typer.Argument(help="One model, with its card.")] = None,
    out: Annotated[
        Path | None, typer.Option(**FILE, help="Copy the model there, as a run.")
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
        print_document(table.to_dict("records"), table.to_string(index=False), as_json)
        return
    card = loopinterp.zoo.get_card(name)
    lowest = {
        n: {"exact_match": share, "distributions": list(card.lowest(n).distributions)}
        for n, share in card.worst().items()
    }
    facts = {"model": name, **card.to_dict(), "lowest": lowest, "fails_at": card.fails_at()}
    if out is None:
        about = {key: value for key, value in facts.items() if key not in ("exact_match", "lowest")}
        text = (
            f"{spell_facts(about)}\n\nExact match by loops beyond T(n)\n{card.table().to_string()}"
            f"\n\nLowest of the distributions after T(n) loops\n{card.lowest_table().to_string()}"
        )
        print_document(facts, text, as_json)
    else:
        loopinterp.load_pretrained(name, out)
        print_document(
            {"run": str(out), **facts}, f"{out}: {card.note} {next_step('analyze', out)}", as_json
        )


@commands.command(
    epilog=examples("benchmark runs/known", "benchmark runs/ripple --only ripple --json")
)
def benchmark(
    folder: Annotated[Path, typer.Argument(**FILE, help="A new folder, or one with a benchmark.")],
    only: Annotated[
        list[str] | None, typer.Option(help="A program or a model; may be repeated. Default: all.")
    ] = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Write the benchmark: models of known circuit, with cards, each file known by its digest.

    `loopinterp.benchmark.Benchmark(FOLDER)` reads it back, and refuses what was changed since.
    """
    with showing(progress):
        made = loopinterp.benchmark.make_benchmark(folder, only or None)
    document = {"folder": str(folder), "digest": made.digest, "models": list(made)}
    text = f"{folder}: {len(made)} models whose circuit is known, digest {made.digest}"
    print_document(document, text, as_json)
