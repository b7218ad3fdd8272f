"""Make the models of the zoo: train each by its recipe, measure it, and put it into the package.

    python -m analyses.make_zoo --out runs/zoo
    python -m analyses.make_zoo --out runs/zoo --name parity

One minute to half an hour a model on one core; runs that are finished are kept. To add a model is
to add a line to MODELS.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import loopinterp
from analyses import notebook_models
from loopinterp.models import LoopRule
from loopinterp.training import RECIPES, Run, apply_settings, train
from loopinterp.training.run import LoopsByLength
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
    "addition-no-spare-loops": (
        "addition",
        ["objective.extra_loops=-2"],
        "Asked after as many loops as a carry takes: the logit lens reads each bit as it comes.",
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
        [],
        "A layer that sees all, then a loop that closes gaps.",
    ),
    "token_addition": (
        "token_addition",
        ["seed=1"],
        "Addition in tokens, most significant bit first.",
    ),
    "abacus": ("abacus", [], "Two layers, four loops, decimal digits written one by one."),
}
"""Each model: its recipe, what is changed of it, and what it is an example of."""

NOTEBOOK = {
    "notebook-standard": "Beside it, an ordinary transformer: four untied layers, no loop.",
    "notebook-looped": "A public notebook's looped model of 8 bits: right on 15 in 16 at most.",
}
"""The models of analyses/notebook_models.py, and what they are examples of."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, measure and keep the models of the zoo.")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="Where to train.")
    parser.add_argument("--zoo", type=Path, default=Path(loopinterp.__file__).parent / "zoo")
    parser.add_argument(
        "--name", action="append", choices=[*MODELS, *NOTEBOOK], help="Default: all."
    )
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    for name in args.name or [*MODELS, *NOTEBOOK]:
        if name in NOTEBOOK:
            recipe, note, run = None, NOTEBOOK[name], notebooks(name, args.out)
        else:
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
