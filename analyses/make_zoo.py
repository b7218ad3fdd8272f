"""Make the models of the zoo: train each by its recipe, measure it, and put it into the package.

    python -m analyses.make_zoo --out runs/zoo
    python -m analyses.make_zoo --out runs/zoo --name parity
    python -m analyses.make_zoo --add

One minute to half an hour a model on one core; runs that are finished are kept. --add trains
nothing: it measures the distributions that a card lacks, from the weights that are there. Either
writes the table of docs/zoo.md. To add a model is to add a line to MODELS.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopinterp
from analyses import notebook_models, train_huginn_small, train_ouro_small, train_trm_small
from analyses.tables_in_pages import PAGES, rewrite, table
from loopinterp.core.errors import InputError
from loopinterp.core.storage import write_json
from loopinterp.models import LoopRule
from loopinterp.training import (
    RECIPES,
    Run,
    TrainingConfig,
    apply_settings,
    smallest_stage,
    train,
    train_finite,
)
from loopinterp.training.run import LoopsByLength
from loopinterp.zoo import Card, get_card, list_pretrained, make_entry, pretrained_run
from loopinterp.zoo.pretrained import CARD, THIS, TIMES_THE_CUTOFF, measure_card

NO_HOLD = ["objective.hold_loops=0", "state_noise=0"]
MODELS: dict[str, tuple[str, list[str], str]] = {
    "addition": (
        "addition",
        [],
        "Addition, right at eight times the training length; the demo's model.",
    ),
    **{
        f"addition-seed-{seed}": ("addition", [f"seed={seed}"], note)
        for seed, note in enumerate(
            (
                "Recipe addition, another seed.",
                "Recipe addition, another seed: an injected carry persists longer.",
                "Recipe addition, another seed: an injected carry persists for one loop.",
                "Recipe addition, another seed: fails on random bits, but not on chains.",
            ),
            start=1,
        )
    },
    "addition-no-hold": (
        "addition",
        NO_HOLD,
        "Trained without hold loops and noise; with this seed as accurate.",
    ),
    "addition-no-spare-loops": (
        "addition",
        ["objective.extra_loops=-2"],
        "Trained to answer two loops earlier: the logit lens reads a bit when its carry arrives.",
    ),
    "addition-no-loop-norm": (
        "addition",
        ["model.loop_norm=false"],
        "No loop norm: beyond the training length the carry of a chain arrives late.",
    ),
    "parity": ("parity", [], "Parity, right at eight times the training length; holds its answer."),
    "parity-no-window": ("parity-no-window", [], "Parity, whose answer does not stay after T(n)."),
    "prefix_sum": (
        "prefix_sum",
        [],
        "Running XOR; other seeds of its recipe fail at shorter lengths.",
    ),
    "copy": ("copy", [], "A shift: right at T(n) loops, and at no other number."),
    "binary_sum": ("binary_sum", [], "Counts ones: the bits move to a counter at the =."),
    "multiplication": (
        "multiplication-two-bits",
        [],
        "Products of 2-bit and n-bit numbers; wrong where the first factor has one bit.",
    ),
    "unique_set": (
        "unique_set",
        ["seed=2"],
        "Distinct symbols: a prelude layer finds repeats, the loop closes the gaps.",
    ),
    "token_addition": (
        "token_addition",
        ["seed=1", "steps=8000", "optimiser.schedule=linear"],
        "Addition in tokens, most significant bit first.",
    ),
    "abacus": (
        "abacus",
        ["steps=8000"],
        "Abacus addition: two layers, four loops; writes decimal digits one by one.",
    ),
    "abacus-long": (
        "abacus-long",
        [],
        "Abacus addition: one layer, four loops; most sums of 32 digits, trained to 8.",
    ),
}
"""Each model: its recipe, what is changed of it, and what it is an example of."""

FINITE: dict[str, tuple[str, list[str], str]] = {
    "addition-finite": (
        "addition-finite",
        [],
        "A finite automaton, trained on answers alone: ripple-carry addition in every transition.",
    ),
    "parity-finite": (
        "parity-finite",
        ["seed=2"],
        "A finite automaton, trained on answers alone: a running XOR, with two bits per position.",
    ),
    "prefix_sum-finite": (
        "prefix_sum-finite",
        [],
        "A finite automaton, trained on answers alone: prefix sums, with one bit per position.",
    ),
}
"""The same of models with a state code, whose bits are dropped as long as they stay right."""

ADAPTED: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "ouro-small": train_ouro_small.zoo_entry,
    "ouro-small-ahead": train_ouro_small.zoo_entry,
    "trm-small": train_trm_small.zoo_entry,
    "hrm-small": train_trm_small.zoo_entry,
    "huginn-small": train_huginn_small.zoo_entry,
}
"""Adapted models: a function of a folder for weights and the name, which loads or trains the model.

It returns ``model``, ``task``, ``max_n``, ``origin``, ``note`` and ``baselines``, models by name.
"""

NOTEBOOK = {
    "notebook-standard": "The same notebook's ordinary transformer: four untied layers, no loop.",
    "notebook-looped": "A public notebook's looped model of 8 bits: right on 15 in 16 at most.",
}
"""The models of analyses/notebook_models.py, and what they are examples of."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, measure and keep the models of the zoo.")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="Where to train.")
    parser.add_argument("--zoo", type=Path, default=Path(loopinterp.__file__).parent / "zoo")
    parser.add_argument(
        "--name",
        action="append",
        choices=[*MODELS, *FINITE, *ADAPTED, *NOTEBOOK],
        help="Default: all.",
    )
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--add", action="store_true", help="Distributions that a card lacks.")
    parser.add_argument("--page", type=Path, default=PAGES / "zoo.md")
    args = parser.parse_args()
    for name in args.name or [*MODELS, *FINITE, *ADAPTED, *NOTEBOOK]:
        # The library writes nothing into the package, so what is made is made elsewhere and moved.
        made = args.out / "entries" / name
        shutil.rmtree(made, ignore_errors=True)
        if args.add:
            card = with_missing(name, args.samples)
            write_json(made / CARD, card.to_dict())
        else:
            card = trained(name, made, args)
            shutil.rmtree(args.zoo / name, ignore_errors=True)
        shutil.copytree(made, args.zoo / name, dirs_exist_ok=True)
        shares = ", ".join(f"{share:.2f} at {n}" for n, share in card.worst().items())
        print(f"{name}: exact match {shares}; {card.minutes} min", flush=True)
    rewrite(args.page, {"zoo": zoo_table(), "zoo-baselines": baselines_table()})


def trained(name: str, made: Path, args: argparse.Namespace) -> Card:
    """Train a model, and make its entry in a folder."""
    if name in ADAPTED:
        return adapted(name, made, args)
    if name in NOTEBOOK:
        recipe, note, run = None, NOTEBOOK[name], notebooks(name, args.out)
    else:
        recipe, changes, note = (MODELS | FINITE)[name]
        config = apply_settings(RECIPES[recipe], [*changes, *args.set])
        run = finite(config, args.out / name) if name in FINITE else train(config, args.out / name)
        if not run.is_trained:  # its initial bits were chosen after training
            note, recipe = f"{note} Trained by {recipe} with --drop-bits.", None
    return entry(run, made, args, recipe=recipe, note=note)


def adapted(name: str, made: Path, args: argparse.Namespace) -> Card:
    """Make the entry of an adapted model, measured beside its baselines."""
    known, folder = ADAPTED[name](args.out, name), args.out / name
    shutil.rmtree(folder, ignore_errors=True)
    made_for = {key: known[key] for key in ("max_n", "origin")}
    run = Run.from_model(known["model"], known["task"], folder, **made_for)
    return entry(run, made, args, recipe=None, **{key: known[key] for key in ("note", "baselines")})


def entry(run: Run, made: Path, args: argparse.Namespace, **options: Any) -> Card:
    """Make an entry of our own weights."""
    if options["recipe"] is None:
        options["command"] = f"python -m analyses.make_zoo --name {made.name}"
    return make_entry(run, made, samples=args.samples, licence="MIT", **options)


def finite(config: TrainingConfig, out: Path) -> Run:
    """The smallest finite-state model that a recipe comes to."""
    found = smallest_stage(train_finite(config, out))
    if found is None:
        raise InputError(
            str(out), expected="a stage that is right", given="none", fix="Try a seed."
        )
    return found.run


def with_missing(name: str, samples: int) -> Card:
    """The card of a model of the zoo, with the note from here and all distributions."""
    card, run = get_card(name), pretrained_run(name)
    exact, known = dict(card.exact_match), run.task.distributions
    if lacking := [d for d in known if d not in exact]:
        card = card.replace(samples=min(card.samples, samples))
        exact |= measure_card(run, samples=card.samples, seed=card.seed, distributions=lacking)
    recipe, _, note = (MODELS | FINITE).get(name, (None, [], NOTEBOOK.get(name, card.note)))
    return card.replace(recipe=recipe, note=note, exact_match={d: exact[d] for d in known})


def baselines_table() -> str:
    """The table of the models that have baselines: exact match and answers right, in per cent."""
    rows, measures = [], ("exact match", "answers right")
    for name in list_pretrained().index:
        for model, shares in get_card(name).baselines.items():
            label = name if model == THIS else model
            for distribution, by in shares.items():
                percents = [f"{100 * by[measure]:.1f}" for measure in measures]
                rows.append([label, distribution, *percents])
    return table(["model", "distribution", *measures], rows)


def zoo_table() -> str:
    """The table of the page, from the cards; task and weights are in ``list_pretrained``."""
    models = list_pretrained().astype(object).fillna("")
    times = [f"{k}x" for k in TIMES_THE_CUTOFF]
    header = ["model", "an example of", "trained to", *times, "lowest on"]
    columns = ["note", "trained_to", *(f"exact_{x}" for x in times), "lowest_on"]
    return table(header, models[columns].itertuples())


def notebooks(name: str, out: Path) -> Run:
    """A model of the notebook (seed 0), trained as there, as a run."""
    if (out / name).exists():
        return Run.load(out / name)
    kind = name.removeprefix("notebook-")
    model = notebook_models.notebooks_own(kind, 0, out=out / "notebook")
    task = notebook_models.TASK
    model.loop_rule = LoopRule(1)
    if kind == "looped":
        loops = notebook_models.TRAINING_LOOPS
        of_length, more = LoopsByLength(task), notebook_models.MORE_LOOPS
        model.loop_rule = LoopRule(loops, of_length=of_length, extra=more)
    origin = "trained as a public notebook has it, on PyTorch's own layers, with dropout"
    cutoff = notebook_models.CUTOFF
    return Run.from_model(model, task, out / name, max_n=cutoff, origin=origin)


if __name__ == "__main__":
    main()
