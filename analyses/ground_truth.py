"""Every tool scored on models whose circuit is known: the table, its page, and what noise does.

python analyses/ground_truth.py --out ground_truth
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loopinterp.ground_truth import Subject, ground_truth_study, make_subjects
from loopinterp.plotting import Series, line_figure
from loopinterp.rasp import add_noise, distract, list_programs, permute, rotate, superpose
from loopinterp.rasp.programs.unique_set import unique_set
from loopinterp.report import write_results

LENGTHS = {"abacus_ripple": 3, "multiplication": 4, "token_addition": 4, "binary_sum": 5}
ADDITION = 12
USUAL = 6
LEVELS = (0.003, 0.01, 0.03, 0.1)


def subjects(disguises, programs: list[str], seed: int) -> list[Subject]:
    """Every program, at a length at which all of its loops are seen, behind the same disguises."""
    made = []
    for name in programs:
        bits = ADDITION if name in list_programs("addition") else LENGTHS.get(name, USUAL)
        program = unique_set(5) if name == "unique_set" else name
        made += make_subjects([program], n=bits, disguises=disguises, seed=seed)
    return made


def main(
    out: Path = Path("ground_truth"),
    program: Annotated[list[str] | None, typer.Option(help="Programs; all by default.")] = None,
    seed: int = 0,
) -> None:
    """Score every tool on every program: bare, rotated, and behind all exact disguises."""
    chosen = program or list_programs()
    hidden = [
        partial(distract, seed=seed),
        partial(permute, seed=seed),
        partial(superpose, seed=seed),
        partial(rotate, seed=seed),
    ]
    models = [s for d in ([], hidden[-1:], hidden) for s in subjects(d, chosen, seed)]
    result = ground_truth_study(models, seed=seed, progress=print)
    result.save(out / "results", "ground_truth")
    result.table().to_csv(out / "ground_truth.csv")
    title = "The tools on looped transformers whose circuit is known"
    write_results({"ground_truth": result}, out / "ground_truth.html", title=title)
    print(*(finding.text for finding in result.summary()), sep="\n")
    for model, check, value, control in result.missed:
        print(f"missed: {check} on {model}: {value:.4g} (control {control:.4g})")
    noise(out, seed)


def noise(out: Path, seed: int) -> None:
    """How much noise on all weights each tool, and the behaviour, stands."""
    scores: dict[str, list[float]] = {}
    for level in LEVELS:
        hidden = [partial(rotate, seed=seed), partial(add_noise, relative=level, seed=seed)]
        result = ground_truth_study(subjects(hidden, ["ripple", "parity"], seed), seed=seed)
        result.save(out / "results", f"noise_{level}")
        for check, value in result.table().mean().items():
            scores.setdefault(str(check), []).append(value)
    lines = [Series(name, list(LEVELS), values) for name, values in scores.items()]
    plot = line_figure(lines, x_title="noise, relative to the weights", y_title="score")
    plot.update_xaxes(type="log")
    plot.write_html(out / "noise.html", include_plotlyjs=True)


if __name__ == "__main__":
    typer.run(main)
