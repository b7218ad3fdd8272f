"""In how many directions the states of trained models lie, and how their trajectories end.

    python -m analyses.state_geometry                # every model of the zoo: some minutes
    python -m analyses.state_geometry --name parity  # one anew, the others as they were

Examples of the training cutoff and of twice its length are run for four times T(n). What was found
is kept in analyses/results/state_geometry.csv; the table goes into a page of the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analyses.tables_in_pages import table
from analyses.zoo_tables import measure_zoo
from loopinterp.dynamics import SettlingClass, geometry_study
from loopinterp.tasks import as_batch
from loopinterp.zoo import pretrained_run

FILE, PAGE, NAME = "state_geometry.csv", "results/convergence.md", "state-geometry"
TIMES = (1, 2)
CLASSES = [kind.label for kind in SettlingClass]


def main() -> None:
    measure_zoo(
        "How trajectories end, and in how many directions states lie.", measure, as_table,
        file=FILE, page=PAGE, table=NAME, times=TIMES, samples=50,
    )  # fmt: skip


def measure(name: str, times: Sequence[int], samples: int) -> pd.DataFrame:
    """Classes of tokens, dimensions at T(n), at the end and by chance, layers at rest."""
    run, rows = pretrained_run(name), []
    for n in (run.cutoff * k for k in times):
        batch = as_batch(run.task, n=n, batch_size=samples)
        answered = int(batch.n_loops.max())
        n_loops = max(64, 4 * answered)
        result = geometry_study(run.model(), batch, n_loops=n_loops, n_trajectories=1)
        data, counts = result.data, result.classes().sum("answer")
        shares = {kind: float(counts.sel(settling=kind) / counts.sum()) for kind in CLASSES}
        found = {"model": name, "length": n, "samples": samples, **shares}
        for when, loop in {"answered": answered, "end": n_loops}.items():
            found |= {f"{m}_{when}": float(data[m][loop]) for m in ("rank", "spread")}
        exact = {"answered": data["exact"].sel(loop=data["answer_loops"]), "end": data["exact"][-1]}
        found |= {f"exact_{when}": float(right.mean()) for when, right in exact.items()}
        found["participation_end"] = float(data["participation"][-1])
        found["embedded"] = float(data["set_rank"].sel(set="embedding"))
        found["gaussian"] = float(data["control_rank"].sel(set="embedding").mean())
        converged = result.converged().values
        layered = not result.no_layers and converged.any()
        of_layers = result.of_pairs("layer_cosine").isel(batch=converged) if layered else None
        found["layer_cosine"] = np.nan if of_layers is None else float(of_layers.min())
        rows.append(found)
    return pd.DataFrame(rows)


def as_table(known: pd.DataFrame) -> str:
    """A row for each model and length."""
    rows = []
    for at in known.to_dict(orient="records"):
        shares = [f"{at[kind]:.2f}" if at[kind] else "" for kind in CLASSES]
        ranks = [f"{at[f'rank_{when}']:.1f}" for when in ("answered", "end")]
        others = [f"{at[name]:.1f}" for name in ("participation_end", "embedded", "gaussian")]
        exact = " / ".join(f"{at[f'exact_{when}']:.2f}" for when in ("answered", "end"))
        cosine = "" if pd.isna(at["layer_cosine"]) else f"{at['layer_cosine']:.2f}"
        spread = f"{at['spread_end']:.2g}"
        rows.append([at["model"], at["length"], *shares, *ranks, *others, spread, cosine, exact])
    names = ["model", "n", *CLASSES, "rank at T(n)", "at the end", "participation ratio"]
    names += ["of embeddings", "of Gaussians", "spread", "layers' cosine", "right at T(n) / end"]
    return table(names, rows)


if __name__ == "__main__":
    main()
