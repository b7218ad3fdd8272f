"""Do sparse features live at one loop or at all? Ouro-small and the addition model.

    python -m analyses.sparse_features

For each model and seed a top-k autoencoder is trained on the states of all loops, and one on those
of each. What was measured is kept in analyses/results; the tables go into a page of the
documentation. ``--pictures`` draws the pictures too (Chromium and the extra ``browser``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp import load_pretrained
from loopinterp.core.intervals import wilson_estimate
from loopinterp.features import FeatureStudy, feature_study, train_autoencoder
from loopinterp.features.feature_study_figures import ONE_LOOP
from loopinterp.models import ActivationStore, store_activations

PAGE, PICTURES = "results/sparse-features.md", PAGES / "pictures"
FILES = ("sparse_features.csv", "sparse_features_spliced.csv", "sparse_features_across.csv")
SEEDS = (0, 1, 2)
SIZES = {"n_features": 256, "steps": 1200, "batch_size": 256}
N_PROMPTS, N_EXAMPLES = 1024, 512
ACROSS = ("fve_across", "fve_recentred", "cosine_across", "cosine_control")
MEASURES = ("effective_loops", "effective_loops_random", "effective_loops_shuffled")


@dataclass(frozen=True)
class Studied:
    """A model of the zoo, the length of its examples, active features, and the loops studied."""

    name: str
    n: int
    k: int
    n_loops: int
    loops: tuple[int, ...]


MODELS = (
    Studied("ouro-small", n=48, k=8, n_loops=4, loops=(0, 1, 2, 3)),
    Studied("addition", n=16, k=2, n_loops=17, loops=(0, 2, 4, 8, 16)),
)


def stored(model: Any, studied: Studied, folder: str) -> ActivationStore:
    """States of fresh prompts after the studied loops."""
    prompts = model.task.sample(studied.n, batch_size=N_PROMPTS, seed=100).inputs
    sites = [f"loops.{t}.hook_state_post" for t in studied.loops]
    return store_activations(
        model, prompts, folder, names_filter=sites, n_loops=studied.n_loops, batch_size=256
    )


def results(studied: Studied, sizes: Any = None) -> list[FeatureStudy]:
    """One study for each seed; its repeats are the next seed's autoencoders."""
    model, sizes = load_pretrained(studied.name), {"k": studied.k, **(sizes or SIZES)}
    with tempfile.TemporaryDirectory() as folder:
        store = stored(model, studied, folder)
        states = store.stack("state_post")  # [loop, row, d_model]
        shared = [train_autoencoder(states.flatten(0, 1), **sizes, seed=s) for s in SEEDS]
        by_loop = [
            {t: train_autoencoder(x, **sizes, seed=s) for t, x in zip(studied.loops, states)}
            for s in SEEDS
        ]
    data = model.task.sample(studied.n, batch_size=N_EXAMPLES, seed=200)
    return [
        feature_study(
            model,
            data,
            shared[k],
            by_loop=by_loop[k],
            repeats=by_loop[(k + 1) % len(SEEDS)],
            loops=[*studied.loops],
            n_loops=studied.n_loops,
            seed=seed,
        )
        for k, seed in enumerate(SEEDS)
    ]


def rows_of(name: str, seed: int, result: FeatureStudy) -> tuple[pd.DataFrame, ...]:
    """Rows of the three files: features, splices, and autoencoders across loops."""
    who, data = {"model": name, "seed": seed}, result.data
    effective = data["effective_loops"].values
    # The loop of each feature that belongs to one.
    loop = data["activity"].values[:, effective < ONE_LOOP].argmax(0)
    features: dict[str, Any] = {"loops": data.sizes["loop"], "dead": result.n_dead}
    features |= {"counted": int((~np.isnan(effective)).sum())}
    features |= {"one": len(loop), "one_first": int((loop == 0).sum())}
    for measure in MEASURES:
        values = data[measure].values[~np.isnan(data[measure].values)]
        quartiles = np.quantile(values, (0.5, 0.25, 0.75))
        features |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), quartiles))
        share = wilson_estimate((values < ONE_LOOP).sum(), len(values))
        features |= dict(
            zip((f"{measure}_one", f"{measure}_one_low", f"{measure}_one_high"), share)
        )
    one = result.to_dataframe("fve", "kept", "loss").assign(**who)
    whole = result.to_dataframe("kept_all", "loss_all")
    whole.columns = whole.columns.str.replace("_all", "")
    splices = pd.concat([one, whole.assign(loop="all", **who)]).assign(clean=result.loss_clean)
    across = result.to_dataframe(*ACROSS).assign(**who)
    return pd.DataFrame([who | features]), splices, across


def as_tables(
    features: pd.DataFrame, splices: pd.DataFrame, across: pd.DataFrame
) -> dict[str, str]:
    return {
        "feature-loops": _loops(features),
        "feature-splices": _splices(splices),
        "feature-across": _across(across),
    }


def _loops(features: pd.DataFrame) -> str:
    """A row for each model and seed: effective numbers of loops, and features of one loop."""
    rows = []
    for x in _records(features):
        medians = [_spell(x, m, 1, 1) for m in MEASURES]
        shares = [_spell(x, f"{m}_one", 100) for m in MEASURES[:2]]
        first = f"{x['one_first']} of {x['one']}"
        counts = [first, x["counted"], x["dead"]]
        rows.append([x["model"], x["seed"], x["loops"], *medians, *shares, *counts])
    header = ["model", "seed", "loops", "shared", "random directions", "loops permuted"]
    return table([*header, "one loop, %", "random, %", "at loop 0", "counted", "dead"], rows)


def _splices(splices: pd.DataFrame) -> str:
    """A row for each model and dictionary: variance explained, and answers kept; means of seeds."""
    rows = []
    by_dictionary: Any = splices.groupby(["model", "dictionary"], sort=False)
    for (model, dictionary), each in by_dictionary:
        one, whole = each.query("loop != 'all'"), each.query("loop == 'all'")
        worst = one.groupby("loop", sort=False)["kept"].mean()
        ends = {name: whole[name].mean() for name in ("kept", "kept_low", "kept_high")}
        cells = [
            f"{100 * one['fve'].mean():.0f}",
            f"{100 * worst.min():.0f} (loop {worst.idxmin()})",
        ]
        rows.append(
            [model, dictionary, *cells, _spell(ends, "kept", 100), f"{whole['loss'].mean():.2f}"]
        )
    header = ["model", "dictionary", "variance, %", "worst loop: answers kept, %"]
    return table([*header, "all loops: answers kept, %", "loss"], rows)


def _across(across: pd.DataFrame) -> str:
    """A row for each model and distance of loops: means and their range over seeds."""
    across = across.assign(distance=(across["loop"] - across["trained_loop"]).abs())
    rows = []
    for model, of_model in across.groupby("model", sort=False):
        steps = sorted({*of_model["distance"]})
        for name, distance in (("same", steps[0]), ("next", steps[1]), ("farthest", steps[-1])):
            here: Any = of_model[of_model["distance"] == distance].groupby("seed")
            cells = []
            for measure in ACROSS:
                means = here[measure].mean()
                cells.append(f"{means.mean():.2f} ({means.min():.2f} to {means.max():.2f})")
            rows.append([model, f"{name} ({distance})", *cells])
    return table(["model", "distance of loops", "variance", "recentred", "cosine", "control"], rows)


def _records(frame: pd.DataFrame) -> Iterable[dict[str, Any]]:
    return ({str(k): v for k, v in row.items()} for _, row in frame.iterrows())


def _spell(cell: dict[str, Any], name: str, times: int, digits: int = 0) -> str:
    """A value with its ends, ``98 (97–99)``."""
    value, low, high = (times * cell[x] for x in (name, f"{name}_low", f"{name}_high"))
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def draw(found: dict[str, list[FeatureStudy]]) -> None:
    """The pictures of the two pages, from the first seed."""
    from analyses.still_pictures import StillPictures

    ouro, addition = (found[studied.name][0].figures() for studied in MODELS)
    shown = {"activity-ouro-small": ouro[0], "activity-addition": addition[0]}
    shown |= {"across-ouro-small": ouro[3], "top": ouro[4]}
    with StillPictures() as pictures:
        for name, figure in shown.items():
            file = PICTURES / f"sparse-features-{name}.png"
            file.write_bytes(pictures.draw(figure.plot, scale=1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse features, loop by loop.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--keep", type=Path, help="Folder for the saved studies.")
    parser.add_argument("--pictures", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {studied.name: results(studied) for studied in MODELS}
    parts = [
        rows_of(name, seed, result)
        for name, studies in found.items()
        for seed, result in zip(SEEDS, studies)
    ]
    for file, frames in zip(FILES, zip(*parts)):
        pd.concat(frames).to_csv(args.results / file, index=False, float_format="%.6g")
    for name, studies in found.items() if args.keep else ():
        for seed, result in zip(SEEDS, studies):
            result.save(args.keep, f"{name}-{seed}")
    rewrite(args.page, as_tables(*(pd.read_csv(args.results / file) for file in FILES)))
    if args.pictures:
        draw(found)


if __name__ == "__main__":
    main()
