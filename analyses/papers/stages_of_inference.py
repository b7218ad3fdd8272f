"""Do the layers of a loop repeat the stages of inference of a feed-forward model?

    python -m analyses.train_huginn_small text --texts FOLDER --only ouro-6 feedforward-6 --seed 0 1
    python -m analyses.papers.stages_of_inference --texts FOLDER

arXiv 2604.11791 (abstract): recurrent blocks learn stages of inference that closely mirror those of
feed-forward models, and repeat them in each loop. Here r correlates measures of layers between two
loops or models. Controls: other orders of the layers, untrained models.
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

PAPER, LOOPED, PLAIN, LAYERS = "2604.11791", "ouro-6", "feedforward-6", 6
CLAIMS = {"the loop before": "Each loop repeats the stages of the loop before.",
          PLAIN: "The stages of a loop mirror those of a feed-forward model."}  # fmt: skip
MEASURES = ("evenness of attention", "attention adds", "MLP adds", "dimension", "lens entropy")


@torch.no_grad()
def measured(published, inputs) -> np.ndarray:
    """[loop, measure, layer, window]; *adds*: the cosine of an output and the stream."""
    model, cells, n_keys = adapt(published.eval()), [], torch.arange(2, inputs.shape[1] + 1)
    _, cache = model.run_with_cache(inputs)
    for k in range(model.n_loops * LAYERS):
        states = [cache[f"blocks.{k}.hook_resid_{x}"] for x in ("pre", "mid", "post")]
        pattern = cache[f"blocks.{k}.attn.hook_pattern"]  # [window, head, query, key]
        even = torch.special.entr(pattern).sum(-1)[..., 1:] / n_keys.log()
        cosines = [cosine_similarity(y - x, x, -1).mean(1) for x, y in pairwise(states)]
        read = torch.special.entr(model.readout(states[2]).softmax(-1)).sum(-1).mean(1)
        cells += [even.mean((1, 2)), *cosines, participation_ratio(states[2]), read]
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
        pairs = [("the loop before", x[1:], x[:-1])] if LOOPED in name else []
        pairs += [(f"{other}, seed {k}", x, y.repeat(len(x), 0)) for (other, k), y in found.items()
                  if other == name.replace(LOOPED, PLAIN) and (k != seed or name == LOOPED)
                  ]  # fmt: skip
        for beside, a, b in pairs:
            who, first = {"model": name, "seed": seed, "beside": beside}, 1 + len(x) - len(a)
            rows += [{**who, "loop": first + t, **alike(*two)} for t, two in enumerate(zip(a, b))]
    frame, claims = pd.DataFrame(rows), []
    for seed, (what, claim) in product(args.seed, CLAIMS.items()):
        here = frame[frame["beside"].str.contains(what)].query("seed == @seed").sort_values("r")
        own, control = (here[here["model"] == x] for x in (LOOPED, f"untrained {LOOPED}"))
        least, floor, orders = own.iloc[0], control.iloc[-1], own["orders"].max()
        good, bad = least["r_low"] > max(0, floor["r_high"]), own["r_high"].max() < 0.5
        status = "yes" if good and orders <= 0.05 else "no" if bad else "not decided"
        text = (f"r is {cell(least, 'r', 1, 2)} or more, untrained {cell(floor, 'r', 1, 2)} or "
                f"less; {100 * orders:.1f}% of other orders are as alike.")  # fmt: skip
        claims.append(Claim(PAPER, claim, f"{LOOPED}, seed {seed}; text", text, status))
    shown = np.concatenate(found[LOOPED, args.seed[0]].mean(-1), -1)  # [measure, layer of the run]
    shown = shown / abs(shown).max(1, keepdims=True)
    lines = [Series(m, range(1, len(x) + 1), x) for m, x in zip(MEASURES, shown)]
    plot = line_figure(lines, x_title="layer, over all loops", y_title="share of the largest")
    publish("stages_of_inference", args, claims, frame, as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """r by loop, and the largest share of other orders that are as alike."""
    shown, loops = [], range(1, 5)
    for (name, seed, beside), part in rows.groupby(["model", "seed", "beside"], sort=False):
        r = {x["loop"]: cell(x, "r", 1, 2) for _, x in part.iterrows()}
        orders = f"{part['orders'].max():.1%}"
        shown.append([name, seed, beside, *(r.get(t, "") for t in loops), orders])
    return table(["model", "seed", "beside", *(f"loop {t}" for t in loops), "other orders"], shown)


if __name__ == "__main__":
    main()
