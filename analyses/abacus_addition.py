"""Decimal addition beyond the training length: the abacus window, its control, and the attention.

    python -m analyses.abacus_addition --run runs/abacus-long --name abacus-long
    python -m analyses.abacus_addition

The first command measures a run of the recipe ``abacus-long``, or of a change of it (CHANGES). Such
a run is trained by ``loopinterp train --recipe abacus-long --set …``. The second writes the tables
of docs/results/abacus-addition.md from ``analyses/results/abacus_addition.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.models import LoopedTransformer
from loopinterp.models.positions import abacus_positions
from loopinterp.tasks import IGNORE, AbacusAddition, Batch
from loopinterp.training import Run

FILE = RESULTS / "abacus_addition.json"
CHANGES = {
    "abacus-long": "-",
    "seed-1": "seed=1",
    "seed-2": "seed=2",
    "queries-and-keys": "model.abacus_target=qk, 7,000 steps",
    "wide-heads": "model.n_heads=3, model.d_head=64, model.abacus_max_offset=20, model.n_ctx=32, "
    "optimiser.weight_decay=0.1, 5,000 steps",
}
"""What each measured run changes of the recipe."""

SEEDS = ("abacus-long", "seed-1", "seed-2")

CELLS = ((8, 8), (12, 12), (16, 16), (20, 20), (24, 24), (16, 8), (24, 5), (5, 24))
LENGTHS = (8, 12, 16, 20, 24)
LOOPS = (1, 2, 4, 8, 16, 32)
OFFSETS = (0, 4)
RULES = ("none", "window", "control")
DIGITS = tuple(range(10))
PLUS, EQUALS = (AbacusAddition.symbols.index(sign) for sign in "+=")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, help="A trained run to measure.")
    parser.add_argument("--name", choices=CHANGES, default="abacus-long", help="Which run it is.")
    parser.add_argument("--samples", type=int, default=100, help="Examples of each cell.")
    parser.add_argument("--results", type=Path, default=FILE)
    parser.add_argument("--page", type=Path, default=PAGES / "results" / "abacus-addition.md")
    args = parser.parse_args()
    stored = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.run:
        run = Run.load(args.run)
        stored[args.name] = measured(run.model(), args.samples)
        args.results.write_text(json.dumps(stored, indent=1) + "\n")
        print(args.results)
    else:
        print(args.page, "" if rewrite(args.page, tables(stored)) else "(as it was)")


def measured(model: Any, samples: int) -> dict[str, Any]:
    """Exact match with each rule and after each number of loops, and shares of attention."""
    window = model.config.abacus_window or 8
    models = {"window": with_window(model, window), "none": with_window(model, None)}
    # Positions end where the table does: offsets that do not fit are left out.
    offsets = [k for k in OFFSETS if k + max(LENGTHS) + 1 < model.config.n_ctx]
    return {
        "samples": samples,
        "window": window,
        "grid": [
            {"offset": offset, "rule": rule, "n_a": a, "n_b": b}
            | {"exact_match": exact(models[rule], cell(a, b, samples), offset=offset)}
            for offset in offsets
            for rule in models
            for a, b in CELLS
        ],
        "bars": [
            {"n": n, "rule": rule}
            | {"exact_match": barred(models["none"], cell(n, n, samples), rule, window)}
            for n in LENGTHS
            for rule in RULES
        ],
        "errors": [
            {"n": n, "offset": offset} | errors(models["window"], cell(n, n, samples), offset)
            for offset in offsets
            for n in LENGTHS
        ],
        "loops": [
            {"n": n, "loops": loops}
            | {"exact_match": exact(models["window"], cell(n, n, samples), n_loops=loops)}
            for n in LENGTHS
            for loops in LOOPS
        ],
        "attention": [row for n in (8, 24) for row in shares(models["none"], cell(n, n, samples))],
    }


def with_window(model: LoopedTransformer, window: int | None) -> LoopedTransformer:
    """The same weights with another abacus window."""
    twin = LoopedTransformer(model.config.replace(abacus_window=window))
    twin.load_state_dict(model.state_dict())
    return twin


def cell(n_a: int, n_b: int, samples: int) -> Batch:
    """Sums of numbers of these lengths, the same for every model."""
    generator = torch.Generator().manual_seed(7)
    return AbacusAddition().sample_operands(n_a, n_b, batch_size=samples, generator=generator)


@torch.no_grad()
def exact(
    model: LoopedTransformer,
    batch: Batch,
    *,
    n_loops: int = 4,
    offset: int = 0,
    hooks: Sequence[tuple[Callable[[str], bool], Callable[..., torch.Tensor]]] = (),
) -> float:
    """Share of answers that greedy generation gives fully right.

    The right answer is in the input: generation follows it as long as every token is right.
    """
    options: dict[str, Any] = {"n_loops": n_loops, "position_offset": offset}
    logits = model.run_with_hooks(batch.inputs, fwd_hooks=list(hooks), **options)
    right = (logits.argmax(-1) == batch.targets) | (batch.targets == IGNORE)
    return float(right.all(1).float().mean())


@torch.no_grad()
def errors(model: LoopedTransformer, batch: Batch, offset: int) -> dict[str, float]:
    """Shares of answers by their first wrong token: of the first two, the last three, or between.

    The last three are the final digit or two, and the end.
    """
    logits = model(batch.inputs, n_loops=4, position_offset=offset)
    asked = batch.targets != IGNORE
    wrong = asked & (logits.argmax(-1) != batch.targets)
    first = (asked.long().cumsum(1) - 1).masked_fill(~wrong, -1)  # place in the answer
    first = torch.where(first < 0, first.max() + 1, first).amin(1)  # [batch]
    failed, length = wrong.any(1), asked.sum(1)
    places = {"first": first < 2, "last": (first >= 2) & (first >= length - 3)}
    places["between"] = ~(places["first"] | places["last"])
    return {name: mean((failed & at).float()) for name, at in places.items()}


def barred(model: LoopedTransformer, batch: Batch, rule: str, window: int) -> float:
    """Exact match with no attention between some digits, in a model without a window.

    ``window``: digits more than that many abacus positions apart. ``control``: as many pairs, drawn
    from those that are 2 to ``window`` apart (all of them, if they are fewer).
    """
    index = abacus_positions(batch.inputs, DIGITS)
    query, key = index[:, :, None], index[:, None]
    apart = torch.where((query > 0) & (key > 0), (query - key).abs(), 0)  # [batch, query, key]
    bar = apart > window
    if rule == "control":
        near = (apart > 1) & (apart <= window)
        share = bar.sum() / near.sum()
        bar = near & (torch.rand(near.shape, generator=torch.Generator().manual_seed(0)) < share)
    elif rule == "none":
        bar = torch.zeros_like(bar)

    def put(scores: torch.Tensor, hook: object) -> torch.Tensor:
        return scores.masked_fill(bar[:, None], float("-inf"))

    return exact(model, batch, hooks=[(lambda name: name.endswith("hook_attn_scores"), put)])


@torch.no_grad()
def shares(model: LoopedTransformer, batch: Batch) -> list[dict[str, Any]]:
    """Attention of the answer's digits, by loop and head, and that of even attention.

    ``next``: to both operands' digits of the column whose sum is due; ``same``: to the column
    before it; ``signs``: to tokens that are no digits; ``other``: to the rest.
    """
    tokens = batch.inputs
    index, place = abacus_positions(tokens, DIGITS), torch.arange(tokens.shape[1])
    equals = (tokens == EQUALS).int().argmax(1)[:, None]  # [batch, 1]
    n = int(batch.n.max())
    asks = (place > equals) & (place < equals + n)  # [batch, query]: the next column has digits
    operand = ((place < equals) & (index > 0))[:, None]  # [batch, 1, key]
    step = index[:, None] - index[:, :, None]  # [batch, query, key]
    keys = {"next": operand & (step == 1), "same": operand & (step == 0)}
    keys["signs"] = (index == 0)[:, None].expand_as(step)
    keys["other"] = ~(keys["next"] | keys["same"] | keys["signs"])
    seen = torch.ones_like(step, dtype=torch.bool).tril()
    even = {name: (seen & k).sum(-1) / seen.sum(-1) for name, k in keys.items()}
    rows = [{"n": n, "loop": None, "head": None} | {k: mean(x[asks]) for k, x in even.items()}]
    names = lambda name: name.endswith("hook_pattern")  # noqa: E731
    _, cache = model.run_with_cache(tokens, n_loops=4, names_filter=names)
    for loop, pattern in enumerate(cache.values()):  # [batch, head, query, key]
        for head in range(pattern.shape[1]):
            mass = {name: (pattern[:, head] * k).sum(-1)[asks] for name, k in keys.items()}
            rows.append(
                {"n": n, "loop": loop, "head": head} | {k: mean(x) for k, x in mass.items()}
            )
    return rows


def mean(values: torch.Tensor) -> float:
    return round(float(values.mean()), 4)


def tables(stored: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    return {
        "grid": grid_table(stored),
        "bars": bars_table(stored),
        "errors": errors_table(stored),
        "loops": loops_table(stored["abacus-long"]["loops"]),
        "attention": attention_table(stored["abacus-long"]["attention"]),
    }


def grid_table(stored: dict[str, Any]) -> str:
    rows = []
    for name in filter(stored.__contains__, CHANGES):
        by_row: dict[tuple[int, str], list[str]] = {}
        for one in stored[name]["grid"]:
            row = by_row.setdefault((one["offset"], one["rule"]), [])
            row.append(f"{one['exact_match']:.2f}")
        for (offset, rule), shown in by_row.items():
            width = stored[name]["window"] if rule == "window" else "-"
            rows.append([name, CHANGES[name], offset, width, *shown])
    header = ["run", "changes", "offset", "window", *(f"{a} x {b}" for a, b in CELLS)]
    return table(header, rows)


def bars_table(stored: dict[str, Any]) -> str:
    named = {
        "none": "nothing",
        "window": "digits more than 8 apart",
        "control": "control: as many pairs 2 to 8 apart",
    }
    rows = [
        [name, named[rule], *(f"{x['exact_match']:.2f}" for x in bars if x["rule"] == rule)]
        for name, bars in ((name, stored[name]["bars"]) for name in SEEDS if name in stored)
        for rule in RULES
    ]
    return table(["run", "barred", *map(str, LENGTHS)], rows)


def errors_table(stored: dict[str, Any]) -> str:
    kinds = ("first", "between", "last")
    rows = [
        [name, one["offset"], one["n"], *(f"{one[kind]:.2f}" for kind in kinds)]
        for name in SEEDS
        for one in stored.get(name, {}).get("errors", [])
        if one["n"] in (12, 24)
    ]
    return table(["run", "offset", "digits", "first two", "between", "last three"], rows)


def loops_table(found: list[dict[str, Any]]) -> str:
    rows = [[n, *(f"{x['exact_match']:.2f}" for x in found if x["n"] == n)] for n in LENGTHS]
    return table(["digits", *(f"{k} loop{'s' * (k > 1)}" for k in LOOPS)], rows)


def attention_table(found: list[dict[str, Any]]) -> str:
    kinds = ("next", "same", "signs", "other")
    rows = []
    for one in found:
        where = "even attention" if one["loop"] is None else f"loop {one['loop']}"
        head = "-" if one["head"] is None else one["head"]
        rows.append([one["n"], where, head, *(f"{one[kind]:.2f}" for kind in kinds)])
    return table(["digits", "loop", "head", *kinds], rows)


if __name__ == "__main__":
    main()
