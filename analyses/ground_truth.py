"""Every tool scored on models whose circuit is known: the table, its page, and what noise does.

python analyses/ground_truth.py --out ground_truth
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loopinterp.benchmark import KnownModel, ground_truth_study, known_models, robustness_study
from loopinterp.compiler import distract, permute, rotate, superpose
from loopinterp.pages import write_results
from loopinterp.programs import list_programs
from loopinterp.programs.sequence_programs import unique_set

LENGTHS = {"abacus_ripple": 3, "multiplication": 4, "token_addition": 4, "binary_sum": 6}
ADDITION = 12
USUAL = 6
NOISY = ("ripple", "parity", "prefix_mod_5")


def models(programs: list[str], disguises: list, label: str, seed: int) -> list[KnownModel]:
    """Every program, at a length at which all of its loops are seen, behind the same disguises."""
    made = []
    for name in programs:
        bits = ADDITION if name in list_programs("addition") else LENGTHS.get(name, USUAL)
        program = unique_set(5) if name == "unique_set" else name
        made += known_models([program], n=bits, disguises=disguises, label=label, seed=seed)
    return made


def main(
    out: Path = Path("ground_truth"),
    program: Annotated[list[str] | None, typer.Option(help="Programs; all by default.")] = None,
    seed: int = 0,
) -> None:
    """Score every tool on every program: bare, rotated, and behind all exact disguises."""
    chosen = program or list_programs()
    hide = [partial(disguise, seed=seed) for disguise in (distract, permute, superpose, rotate)]
    kinds = {"": [], "rotated": hide[-1:], "disguised": hide}
    known = [m for label, done in kinds.items() for m in models(chosen, done, label, seed)]
    result = ground_truth_study(known, seed=seed)
    noise = robustness_study([name for name in chosen if name in NOISY] or chosen[:1], seed=seed)
    result.save(out / "results")
    noise.save(out / "results")
    result.table().to_csv(out / "ground_truth.csv")
    title = "The tools on looped transformers whose circuit is known"
    write_results({r.kind: r for r in (result, noise)}, out / "ground_truth.html", title=title)
    print(*(f.text for r in (result, noise) for f in r.findings()), sep="\n")
    for model, check, value, control in result.missed:
        print(f"missed: {check} on {model}: {value:.4g} (control {control:.4g})")


if __name__ == "__main__":
    typer.run(main)
