"""Do the layers of a loop repeat the stages of inference of a feed-forward model?

    python -m analyses.train_huginn_small text --texts FOLDER --only ouro-6 feedforward-6 --seed 0 1
    python -m analyses.papers.stages_of_inference --texts FOLDER

arXiv 2604.11791 (abstract): recurrent blocks learn stages of inference that closely mirror those of
feed-forward models, and repeat them in each loop. Here r correlates measures of the layers of two
loops, or of two models. Controls: other orders of the layers, untrained models.
"""

from __future__ import annotations

from itertools import pairwise, permutations, product

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import cosine_similarity

from analyses.papers.claims import Claim, cell, options, publish, within
from analyses.small_language_models import held_out_windows, read_texts
from analyses.tables_in_pages import table
from analyses.train_huginn_small import OUT, build_ouro, trained
from loopinterp.adapters import adapt
from loopinterp.core.intervals import mean_estimate
from loopinterp.dynamics import participation_ratio
from loopinterp.figures import Series, line_figure
from loopinterp.lenses import lens_study

PAPER, LOOPED, PLAIN, LAYERS = "2604.11791", "ouro-6", "feedforward-6", 6
CLAIMS = [("the loop before", [2, 3, 4], "Each loop repeats the stages of the loop before."),
          *((PLAIN, [t], f"The stages of loop {t} mirror those of a feed-forward model.")
            for t in (1, 4))]  # fmt: skip
MEASURES = ("evenness of attention", "dimension", "lens entropy", "attention adds", "MLP adds")


@torch.no_grad()
def measured(published, inputs) -> np.ndarray:
    """[loop, measure, layer, window]; *adds*: the cosine of an output and the stream."""
    model, cells, n_keys = adapt(published.eval()), [], torch.arange(2, inputs.shape[1] + 1)
    _, cache = model.run_with_cache(inputs)
    lens = lens_study(model, inputs, lens="logit", n_loops=model.n_loops, inside=True)
    entropy = torch.tensor(lens.data["entropy"].mean("pos").values[1:, :LAYERS]).flatten(0, 1)
    for k in range(model.n_loops * LAYERS):
        states = [cache[f"blocks.{k}.hook_resid_{x}"] for x in ("pre", "mid", "post")]
        even = torch.special.entr(cache[f"blocks.{k}.attn.hook_pattern"]).sum(-1)[..., 1:]
        cells += [(even / n_keys.log()).mean((1, 2)), participation_ratio(states[2]), entropy[k]]
        cells += [cosine_similarity(y - x, x, -1).mean(1) for x, y in pairwise(states)]
    return torch.stack(cells).unflatten(0, (model.n_loops, LAYERS, -1)).transpose(1, 2).numpy()


def alike(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """r with its interval over windows, and the share of other orders of b's layers as alike."""
    a, b = ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) for x in (a, b))
    orders = b[:, np.array([*permutations(range(LAYERS))])]  # [measure, order, layer, window]
    own, *others = np.einsum("mlw,molw->ow", a, orders) / a[..., 0].size
    return {**within("r", mean_estimate(own)), "orders": np.mean(np.mean(others, 1) >= own.mean())}


def main() -> None:
    args = options(__doc__, samples=100, weights=OUT)
    inputs, found, rows = held_out_windows(read_texts(args.texts)[1], args.samples).inputs, {}, []
    for seed, name in product(args.seed, (LOOPED, PLAIN)):
        found[name, seed] = measured(dict(trained(args.weights, "text", seed))[name], inputs)
        found[f"untrained {name}", seed] = measured(build_ouro(name, seed), inputs)
    for (name, seed), x in found.items():
        pairs = [("the loop before", t, b, a) for t, (a, b) in enumerate(pairwise(x), 2)]
        pairs += [(f"{other}, seed {k}", t, a, y[0]) for (other, k), y in found.items()
                  for t, a in enumerate(x, 1) if other == name.replace(LOOPED, PLAIN)
                  and (k != seed or name == LOOPED)]  # fmt: skip
        for beside, t, a, b in pairs:
            rows.append({"model": name, "seed": seed, "beside": beside, "loop": t, **alike(a, b)})
    frame, claims = pd.DataFrame(rows), []
    for seed, (what, loops, claim) in product(args.seed, CLAIMS):
        here = frame.loc[frame["beside"].str.contains(what) & frame["loop"].isin(loops)]
        own, control = (here.loc[(here["seed"] == seed) & (here["model"] == x)].sort_values("r")
                        for x in (LOOPED, f"untrained {LOOPED}"))  # fmt: skip
        least, floor, orders = own.iloc[0], control.iloc[-1], own["orders"].max()
        good = least["r_low"] > max(0.5, floor["r_high"]) and orders <= 0.05
        status = "yes" if good else "no" if own["r_high"].max() < 0.5 else "not decided"
        text = (f"r is {cell(least, 'r', 1, 2)} or more, untrained {cell(floor, 'r', 1, 2)} or "
                f"less; {orders:.1%} of other orders are as alike.")  # fmt: skip
        claims.append(Claim(PAPER, claim, f"{LOOPED}, seed {seed}; text", text, status))
    shown = np.concatenate(found[LOOPED, args.seed[0]].mean(-1), -1)  # [measure, layer of the run]
    lines = [Series(m, range(1, len(x) + 1), x / abs(x).max()) for m, x in zip(MEASURES, shown)]
    plot = line_figure(lines, x_title="layer, over all loops", y_title="share of the largest")
    publish("stages_of_inference", args, claims, frame, as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """r by loop, and the largest share of other orders that are as alike."""
    shown, loops = [], [f"loop {t}" for t in range(1, 5)]
    for (name, seed, beside), part in rows.groupby(["model", "seed", "beside"], sort=False):
        r = {f"loop {x['loop']}": cell(x, "r", 1, 2) for _, x in part.iterrows()}
        shown.append([name, seed, beside, *(r.get(x, "") for x in loops), part["orders"].max()])
    return table(["model", "seed", "beside", *loops, "other orders"], shown)


if __name__ == "__main__":
    main()
