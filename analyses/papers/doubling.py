"""Does a small Ouro double its hops in each loop? Interchanges of the values that it should read.

    python -m analyses.papers.doubling

If each state knows where K = 2^t - 1 hops lead after t loops, layer 0 of the next loop can read the
state there, to know 2K, and layer 1 the state one hop on, to know 2K + 1. Then in the last loop the
answer depends on the values of hop K + 1 in layer 0 and of hop 1 in layer 1 alone, and a source's
values make it the symbol to which the hops that are left lead there.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from analyses.papers.claims import Claim, cell, hop, options, ouro_small, publish, within
from analyses.small_language_models import TASK, fresh
from analyses.tables_in_pages import table
from loopinterp.core.intervals import wilson_estimate
from loopinterp.figures import Series, line_figure
from loopinterp.interventions.engine import random_change

PAPER, CLAIM = "2402.09268", "k hops need a depth of log k; here: each loop doubles the hops."
# By seed: hops, and the loops that answer them.
CASES: dict[int, Any] = {0: ((8, 4),), 1: ((3, 2), (7, 3))}
SITES = {"state": "hook_state_pre", **{f"layer {k}": f"blocks.{k}.attn.hook_v" for k in (0, 1)}}


def measure(model: Any, seed: int, hops: int, n_loops: int, n: int) -> list[dict[str, Any]]:
    """A row for each site of the last loop and hop; hop -1 is a position off the chain."""
    batch = fresh(hops, 2 * n)[n:]
    tokens, each, known = batch.inputs, torch.arange(n), 2 ** (n_loops - 1) - 1
    source, last = tokens.roll(1, 0), torch.full((n,), tokens.shape[1] - 1)
    logits, cache = model.run_with_cache(tokens, n_loops=n_loops)
    clean, generator, rows = logits[:, -1].argmax(-1), torch.Generator().manual_seed(seed), []
    state = cache[f"loops.{n_loops - 1}.{SITES['state']}"]  # the loops before stay as they are
    last_loop = {"n_loops": n_loops, "start_at_loop": n_loops - 1, "state": state}
    chain = torch.stack([hop(tokens, last, k) for k in range(hops + 1)], 1)
    off = torch.tensor([[x for x in range(2, 48) if x not in at][9] for at in chain.tolist()])
    places = [*enumerate(chain.unbind(1)), (-1, off)]
    for site, k, at in ((site, k, at) for site in SITES for k, at in places):
        name = f"loops.{n_loops - 1}.{SITES[site]}"
        own = cache[name][each, at]  # [batch, ...]
        change = cache[name].roll(1, 0)[each, at] - own
        noise = random_change(change.flatten(1), generator).view_as(change)
        row = {"seed": seed, "p": hops, "loop": n_loops, "site": site, "hop": k}
        row["predicted"] = (site, k) in {("layer 0", known + 1), ("layer 1", 1)}
        for kind, new in (("noise", own + noise), ("changed", own + change)):
            hooks = [(name, lambda x, hook, at=at, new=new: x.index_put((each, at), new))]
            answers = model.run_with_hooks(tokens, **last_loop, fwd_hooks=hooks)[:, -1].argmax(-1)
            row |= within(kind, wilson_estimate(int((answers != clean).sum()), n))
        follows = []  # agreement with the source's symbol some hops from there, if it is another
        for left in range(hops + 1):
            end = hop(source, at, left)
            says = source.gather(1, end[:, None])[:, 0].where(end > 0, torch.tensor(TASK.n_symbols))
            told = says != clean
            follows.append(wilson_estimate(int((answers == says)[told].sum()), int(told.sum())))
        row |= within("follows", follows.pop(hops - max(k, 0)))
        rows.append(row | {"rival": max(x[0] for x in follows)})
    return rows


def as_table(rows: pd.DataFrame) -> str:
    """The places that change one answer in twenty, or that doubling predicts."""
    shown = [
        [x["seed"], x["p"], x["loop"], x["site"], x["hop"], "yes" if x["predicted"] else "",
         *(cell(x, name) for name in ("changed", "noise", "follows")), f"{100 * x['rival']:.0f}"]
        for _, x in rows.iterrows() if x["changed"] > 0.05 or x["predicted"]
    ]  # fmt: skip
    header = ["seed", "p", "last loop", "site", "hop", "predicted", "changed", "by noise"]
    return table([*header, "follows", "best other"], shown)


def main() -> None:
    args = options(__doc__)
    parts, claims = [], []
    for seed in args.seed:
        model = ouro_small(args, seed)
        found = [r for p, t in CASES[seed] for r in measure(model, seed, p, t, args.samples)]
        parts.append(rows := pd.DataFrame(found))
        least, others = rows.query("predicted"), rows.query("site != 'state' and not predicted")
        worst, most = least.loc[least["follows"].idxmin()], others.loc[others["changed"].idxmax()]
        holds = worst["follows_low"] > max(0.75, worst["rival"]) and most["changed_high"] < 0.1
        found = (
            f"at predicted places {cell(worst, 'follows')}% of answers or more follow the source; "
            f"elsewhere {cell(most, 'changed')}% change at most."
        )
        name = f"ouro-small, seed {seed}"
        claims.append(Claim(PAPER, CLAIM, name, found, "yes" if holds else "no"))
    rows = pd.concat(parts)
    by_case = rows.query("site != 'state'").groupby(["seed", "p", "site"])
    lines = [Series(str(k), x["hop"].tolist(), x["changed"].tolist()) for k, x in by_case]
    plot = line_figure(lines, x_title="hop", y_title="answers changed")
    publish("doubling", args, claims, rows, as_table, plot)


if __name__ == "__main__":
    main()
