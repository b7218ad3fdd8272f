"""Every tool scored on models whose circuit is known: the table, its page, and noise on weights.

python analyses/ground_truth.py --out ground_truth
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

from loopinterp.benchmark import KnownModel, ground_truth_study, known_models
from loopinterp.compiler import add_noise, distract, permute, rotate, superpose
from loopinterp.pages import write_results
from loopinterp.programs import list_programs
from loopinterp.programs.stock_programs import unique_set

LENGTHS = {"abacus_ripple": 3, "multiplication": 4, "token_addition": 4, "binary_sum": 6}
ADDITION = 12
USUAL = 6
NOISY = ("ripple", "parity", "prefix_mod_5")
NOISE = (0.001, 0.003, 0.01, 0.03, 0.1)
NOISE_TOOLS = ("probes", "interchange interventions", "heads against selectors", "dynamics")
NOISE_CHECKS = [
    *("probe finds", "interchange", "interchange by probe", "heads found", "answer stable")
]


def models(programs: list[str], disguises: list, label: str, seed: int) -> list[KnownModel]:
    """Every program, at a length at which all of its loops are seen, behind the same disguises."""
    made = []
    for name in programs:
        bits = ADDITION if name in list_programs("addition") else LENGTHS.get(name, USUAL)
        program = unique_set(5) if name == "unique_set" else name
        made += known_models([program], n=bits, disguises=disguises, label=label, seed=seed)
    return made


@torch.no_grad()
def exact_match(known: KnownModel) -> float:
    logits = known.compiled.model(known.batch.inputs, n_loops=max(known.n_loops, 1))
    targets = known.batch.targets
    return float(((logits.argmax(-1) == targets) | (targets < 0)).all(-1).float().mean())


def noise_table(programs: list[str], seed: int, *, n: int = 6, examples: int = 128) -> pd.DataFrame:
    """Mean scores of rotated models with noise on all weights, beside the models' exact match."""
    rows = {}
    for level in NOISE:
        hide = [partial(rotate, seed=seed), partial(add_noise, relative=level, seed=seed)]
        known = known_models(programs, n=n, examples=examples, disguises=hide, label="", seed=seed)
        scores = ground_truth_study(known, tools=NOISE_TOOLS, seed=seed).table()[NOISE_CHECKS]
        rows[level] = {**scores.mean(), "exact match": sum(map(exact_match, known)) / len(known)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("noise")


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
    result.save(out / "results")
    result.table().to_csv(out / "ground_truth.csv")
    noise = noise_table([name for name in chosen if name in NOISY] or chosen[:1], seed)
    noise.to_csv(out / "noise.csv")
    title = "The tools on looped transformers whose circuit is known"
    write_results({result.kind: result}, out / "ground_truth.html", title=title)
    print(*(finding.text for finding in result.findings()), noise, sep="\n")
    for model, check, value, control in result.missed:
        print(f"missed: {check} on {model}: {value:.4g} (control {control:.4g})")


if __name__ == "__main__":
    typer.run(main)
