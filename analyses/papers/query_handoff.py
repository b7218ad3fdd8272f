"""Do earlier loops of small Huginns write what the queries of a later loop read?

    python -m analyses.papers.query_handoff    # --saved: from the file of rows

arXiv 2610.34639 (title only). Queries of a run that goes on from another sequence's state go into
the clean run. They must change more than ``SOME`` of answers, as those of another input do.
"""

from __future__ import annotations

import pandas as pd
import torch

from analyses.huginn_small_models import Known, columns, rows_of
from analyses.huginn_small_tables import ends, groups, records, shown
from analyses.papers.claims import Claim, above, interval, options, record, series
from analyses.small_language_models import fresh
from analyses.tables_in_pages import table
from analyses.train_huginn_small import MEAN_LOOPS, OUT
from loopinterp.adapters import adapt
from loopinterp.core.intervals import wilson_estimate
from loopinterp.dynamics import run_loops
from loopinterp.figures import bars_with_intervals
from loopinterp.models import bind

PAPER, SOME = "2610.34639", 0.1
CLAIM = "An earlier loop writes what a later loop's queries read (title only)."
NAMES = {"q": "queries", "k": "keys", "v": "values"}


def handoff(known: Known, n: int) -> pd.DataFrame:
    """Answers that change when queries, keys or values of one loop read another state."""
    tokens = torch.cat([fresh(p, n // 4).inputs for p in (5, 6, 7, 8)])
    return pd.concat([of_run(known, tokens, n_loops) for n_loops in (4, MEAN_LOOPS)])


def of_run(known: Known, tokens: torch.Tensor, n_loops: int) -> pd.DataFrame:
    """Of the last three states that a later loop reads, and of each such loop."""
    model, other = known.looped, tokens.roll(1, 0)
    rows, (states, own) = [], (run_loops(bind(model, x), n_loops) for x in (other, tokens))
    restarted = run_loops(bind(adapt(model.published, seed=1), tokens), n_loops)
    runs = {"another sequence": (tokens, states), "another start": (tokens, restarted)}
    cases = [(source, t, *runs[source]) for source in runs for t in range(n_loops - 4, n_loops - 1)]
    clean = model(tokens, n_loops=n_loops)[:, -1].argmax(-1)
    for source, t, ran, h in [*cases, ("another input", n_loops - 2, other, states)]:
        names = {(part, u): [f"loops.{u}.blocks.{layer}.attn.hook_{part}" for layer in (0, 1)]
                 for part in NAMES for u in range(t + 1, n_loops)}  # fmt: skip
        start = {"n_loops": n_loops, "start_at_loop": t + 1, "state": h[t + 1]}
        wanted = [name for pair in names.values() for name in pair]
        _, cache = model.run_with_cache(ran, **start, names_filter=wanted)
        for (part, u), pair in names.items():
            hooks = [(name, lambda _, hook, new=cache[name]: new) for name in pair]
            reader = {"n_loops": n_loops, "start_at_loop": u, "state": own[u]}
            answers = model.run_with_hooks(tokens, **reader, fwd_hooks=hooks)[:, -1].argmax(-1)
            row = {**known.who, "source": source, "part": part, "n_loops": n_loops}
            share = wilson_estimate(int((answers != clean).sum()), len(tokens))
            rows.append({**row, "written": t + 1, "read": u + 1, **columns(share)})
    return pd.DataFrame(rows)


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for seed, each in rows.groupby("seed"):
        # The pair of loops that changes most answers.
        most = {key: x.loc[x["value"].idxmax()] for key, x in groups(each, "source", "part")}
        queries, values = (most["another sequence", part] for part in "qv")
        control = ends(most["another input", "q"])
        status = above(ends(queries), SOME) if above(control, SOME) == "yes" else "not decided"
        found = (
            f"in the pair of loops with most, queries change {interval(ends(queries), 100, 0)}% of "
            f"answers, values {interval(ends(values), 100, 0)}%; queries of another input change "
            f"{interval(control, 100, 0)}%."
        )
        claims.append(Claim(PAPER, CLAIM, f"huginn-small, seed {seed}", found, status))
    return claims


def as_tables(rows: pd.DataFrame) -> dict[str, str]:
    """What the last loop reads of the states one, two and three loops before its end."""
    last, lines = rows[(rows["read"] == MEAN_LOOPS) & (rows["n_loops"] == MEAN_LOOPS)], []
    for (seed, source), of_source in groups(last, "seed", "source"):
        for part, name in NAMES.items():
            of_part = of_source.sort_values("written", ascending=False).query(f"part == {part!r}")
            cells = [shown(x, 100) for x in records(of_part)]
            lines.append([seed, source, name, *cells, *[""] * (3 - len(cells))])
    written = ("the loop before", "two before", "three before")
    return {"huginn-handoff": table(["seed", "from", "what is put in", *written], lines)}


def main() -> None:
    args = options(__doc__, saved=True, samples=200, weights=OUT)
    rows = rows_of(handoff, args, ["hops"])
    last = groups(rows[rows["written"] == MEAN_LOOPS - 1], "source", "seed")
    parts = [(f"{source}, seed {seed}", each) for (source, seed), each in last]
    plot = bars_with_intervals(series(parts, "part"), value_title="answers that change")
    record("query_handoff", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
