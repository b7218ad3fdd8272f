"""What the studies conclude of models in float32, bfloat16 and float16.

    python -m analyses.half_precision

Five zoo models, of which one is a trained Ouro, and a random Huginn are studied in each precision.
What was found is kept in analyses/results/half_precision.csv; the table goes into a page of the
documentation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp import dynamics, lenses
from loopinterp.adapters import adapt
from loopinterp.tasks import Batch, as_batch
from loopinterp.zoo import load_pretrained, pretrained_run
from tests.adapters.published import huginn

FILE, PAGE, NAME = "half_precision.csv", "results/convergence.md", "half-precision"
ZOO = ("addition", "addition-no-loop-norm", "parity", "prefix_sum")
DTYPES, FAR = ("float32", "bfloat16", "float16"), 60  # loops of a search for a limit
STUDIES: dict[str, Callable[[Any, Batch], Any]] = {
    "convergence": lambda m, b: dynamics.convergence_study(
        m, b, n_loops=32, n_spectral=2, limit_steps=FAR
    ),
    "extrapolation": lambda m, b: dynamics.extrapolation_study(m, b, n_loops=48),
    "geometry": lambda m, b: dynamics.geometry_study(m, b, n_loops=32, limit_steps=FAR),
    "reachability": lambda m, b: dynamics.reachability_study(
        m, b[:3], n_loops=FAR, kicks=(0.1, 1.0), n_draws=1
    ),
    "input dependence": lambda m, b: dynamics.input_dependence_study(
        m, b[:3], n_loops=FAR, n_substituted=0, n_sensitivity=0
    ),
    "local stability": lambda m, b: dynamics.local_stability_study(
        m, b[:1], n_loops=32, k=2, max_products=40, growth_loops=2, lyapunov_loops=16
    ),
    "basins": lambda m, b: dynamics.basin_map(m, b[:3], n_loops=FAR, points=3),
    "frozen heads": lambda m, b: dynamics.attention_stabilisation_study(m, b, n_loops=16),
    "exits": lambda m, b: lenses.exit_study(m, b, n_loops=16),
    "lens": lambda m, b: lenses.lens_study(m, b, lens="logit", n_loops=16),
}


def models() -> Iterator[tuple[str, Any, Batch]]:
    """Names, models and examples."""
    for name in ZOO:
        run = pretrained_run(name)
        yield name, run.model(), as_batch(run.task, n=run.cutoff, batch_size=6)
    ouro = load_pretrained("ouro-small")
    yield "ouro-small", ouro, replace(as_batch(ouro.task, n=16, batch_size=6), task=None)
    random = adapt(huginn.tiny())
    inputs = torch.randint(4, (6, 8), generator=torch.Generator().manual_seed(0))
    answers, n = random(inputs, n_loops=16).argmax(-1), torch.full((6,), 8)
    yield "Huginn, random", random, Batch(inputs, answers, n, n)


def measure(name: str, model: Any, batch: Batch) -> Iterator[dict[str, Any]]:
    """The first finding of each study in each precision."""
    for dtype, (title, study) in product(DTYPES, STUDIES.items()):
        result = study(deepcopy(model).to(getattr(torch, dtype)), batch)
        findings = result.findings()
        said = any("rounding decides" in finding.text.lower() for finding in findings)
        value = findings[0].value or findings[0].text.split(". ")[0]
        found = {"model": name, "study": title, "dtype": dtype, "value": value}
        rounded = "computed_in" in result.provenance.config
        yield {**found, "good": findings[0].good, "says rounding": said, "in float32": rounded}


def as_table(known: pd.DataFrame) -> str:
    """A row for each model and study.

    † marks a result whose sentence says what rounding decides, ‡ a study that runs in float32 and
    says that only the rounding of the weights decides.
    """
    known = known.assign(cell=known["value"] + known["says rounding"].map({True: " †", False: ""}))
    each: Any = known.groupby(["model", "study"], sort=False)
    rows = []
    for (model, study), part in each:
        title = f"{study} ‡" if part["in float32"].any() else study
        rows.append([model, title, *part.set_index("dtype").loc[[*DTYPES], "cell"]])
    return table(["model", "study", *DTYPES], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="What studies conclude in half precision.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for each in models() for row in measure(*each)]
    pd.DataFrame(rows).to_csv(args.results / FILE, index=False)
    rewrite(args.page, {NAME: as_table(pd.read_csv(args.results / FILE))})


if __name__ == "__main__":
    main()
