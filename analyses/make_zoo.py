"""Make the models of the zoo: train each by its recipe, measure it, and put it into the package.

    python analyses/make_zoo.py --out runs/zoo
    python analyses/make_zoo.py --out runs/zoo --name parity

One to four minutes a model on one core; runs that are finished are kept. To add a model is to add a
line to MODELS.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import loopinterp
from loopinterp.training import RECIPES, apply_settings, train
from loopinterp.zoo import make_entry

NO_HOLD = ["objective.hold_loops=0", "state_noise=0"]
MODELS: dict[str, tuple[str, list[str], str]] = {
    "addition": ("addition", [], "Addition that reaches far; the demo's model."),
    **{
        f"addition-seed-{seed}": ("addition", [f"seed={seed}"], note)
        for seed, note in enumerate(
            (
                "The same, of another seed.",
                "The same, of another seed, in which a planted carry lives longer.",
                "The same, of another seed, in which a planted carry lives for a loop.",
                "The same recipe, a seed that fails on random digits and on no chain.",
            ),
            start=1,
        )
    },
    "addition-no-hold": (
        "addition",
        NO_HOLD,
        "No hold loops, no noise: with this seed as good without.",
    ),
    "addition-no-loop-norm": (
        "addition",
        ["model.loop_norm=false"],
        "No loop norm: on chains beyond training the carry is late.",
    ),
    "parity": ("parity", [], "Parity that reaches far and holds its answer."),
    "parity-no-window": ("parity-no-window", [], "Parity, whose answer does not stay after T(n)."),
    "prefix_sum": ("prefix_sum", [], "Running XOR; other seeds of its recipe reach less far."),
    "copy": ("copy", [], "A shift: right at T(n) loops, and at no other number."),
    "binary_sum": ("binary_sum", [], "A counter at the = that bits run into."),
    "multiplication": ("multiplication", [], "Products of two bits and n, in n loops."),
    "unique_set": (
        "unique_set",
        ["steps=9600"],
        "A layer that sees all, then a loop.",
    ),
    "token_addition": ("token_addition", [], "Addition in tokens, most significant bit first."),
}
"""Each model: its recipe, what is changed of it, and what it is an example of."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, measure and keep the models of the zoo.")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="Where to train.")
    parser.add_argument("--zoo", type=Path, default=Path(loopinterp.__file__).parent / "zoo")
    parser.add_argument("--name", action="append", choices=MODELS, help="Default: all.")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    for name in args.name or MODELS:
        recipe, changes, note = MODELS[name]
        run = train(apply_settings(RECIPES[recipe], [*changes, *args.set]), args.out / name)
        # The library writes nothing into the package, so the entry is made elsewhere and moved.
        made = args.out / "entries" / name
        shutil.rmtree(made, ignore_errors=True)
        card = make_entry(run, made, recipe=recipe, note=note, samples=args.samples)
        shutil.rmtree(args.zoo / name, ignore_errors=True)
        shutil.copytree(made, args.zoo / name)
        shares = ", ".join(f"{share:.2f} at {n}" for n, share in card.worst().items())
        print(f"{name}: exact match {shares}; {card.minutes} min")


if __name__ == "__main__":
    main()
