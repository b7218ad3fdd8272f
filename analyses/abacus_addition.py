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
from loopinterp.training import Run, TrainingConfig

FILE = RESULTS / "abacus_addition.json"
SEEDS = ("abacus-long", "seed-1", "seed-2", "seed-3", "seed-4")
_INPUT = "model.abacus_target=input"
_SIGNS = f"{_INPUT}, model.abacus_signs=true"
_QK = "model.abacus_target=qk, model.abacus_signs=true"
CHANGES = {
    "abacus-long": "-",
    **{name: f"seed={name[-1]}" for name in SEEDS[1:]},
    "input": _INPUT,
    **{f"input-{seed}": f"{_INPUT}, seed={seed}" for seed in range(1, 5)},
    "signs": _SIGNS,
    **{f"signs-{seed}": f"{_SIGNS}, seed={seed}" for seed in range(1, 5)},
    "signs-last": f"{_SIGNS}, objective.kind=last",
    "signs-last-1": f"{_SIGNS}, objective.kind=last, seed=1",
    "signs-loops-1": f"{_SIGNS}, objective.kind=last, objective.n_loops=1",
    "signs-loops-2": f"{_SIGNS}, objective.n_loops=2",
    "signs-loops-2-1": f"{_SIGNS}, objective.n_loops=2, seed=1",
    "signs-loops-8": f"{_SIGNS}, objective.n_loops=8",
    "signs-equal": f"{_SIGNS}, distribution=equal",
    "signs-input": f"{_SIGNS}, model.injection=input",
    "signs-none": f"{_SIGNS}, model.injection=none",
    "signs-offset-0": f"{_SIGNS}, model.abacus_max_offset=0",
    "signs-offset-16": f"{_SIGNS}, model.abacus_max_offset=16",
    "signs-small": f"{_SIGNS}, model.position_std=none",
    "signs-attention": "model.abacus_signs=true",
    **{f"signs-attention-{seed}": f"model.abacus_signs=true, seed={seed}" for seed in (1, 2, 3)},
    "signs-qk": _QK,
    "signs-qk-long": f"{_QK}, steps=12000",
    "signs-qk-long-1": f"{_QK}, steps=12000, seed=1",
    "no-positions": "model.positions=none",
    "no-positions-1": "model.positions=none, seed=1",
    "fire": "model.positions=fire",
}
"""What each measured run changes of the recipe."""

CELLS = ((8, 8), (12, 12), (16, 16), (20, 20), (24, 24), (16, 8), (24, 5), (5, 24))
LENGTHS = (8, 12, 16, 20, 24)
LOOPS = (1, 2, 4, 8, 16, 32)
OFFSETS = (0, 8)
"""The least; and that which lays the positions of 24 digits in the middle of the trained ones."""
MORE_OFFSETS = (0, 4, 8, 12)
"""Where ten times as many other sums are read."""
RULES = {
    "none": "nothing",
    "digits": "from digits: digits more than 8 apart",
    "window": "also from signs: digits after the eighth",
    "control": "control: as many pairs at most 8 apart",
}
"""What is barred, by rule."""
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
        assert isinstance(run.config, TrainingConfig)
        loops = run.config.objective.n_loops
        stored[args.name] = measured(run.model(), args.samples, args.name, n_loops=loops or 4)
        args.results.write_text(json.dumps(stored, indent=1) + "\n")
        print(args.results)
    else:
        print(args.page, "" if rewrite(args.page, tables(stored)) else "(as it was)")


def measured(model: Any, samples: int, name: str, *, n_loops: int) -> dict[str, Any]:
    """Exact match by rule and offset; of the seeds also what is barred, and where errors begin.

    Of the recipe's own run there are numbers of loops and shares of attention as well.
    """
    abacus = model.config.positions == "abacus"
    window = model.config.abacus_window or 8
    models = {"none": model}
    if abacus:
        models = {"window": with_window(model, window), "none": with_window(model, None)}
    # Positions end where the table does: offsets that do not fit are left out.
    fits = [k for k in OFFSETS if abacus and k + max(LENGTHS) + 1 < model.config.n_ctx]
    batches = {n: cell(n, n, samples) for n in LENGTHS}
    found: dict[str, Any] = {"samples": samples, "loops_run": n_loops}
    found["grid"] = [
        {"offset": offset, "rule": rule, "n_a": a, "n_b": b}
        | {"exact_match": exact(one, cell(a, b, samples), n_loops=n_loops, offset=offset)}
        for offset in fits or [0]
        for rule, one in models.items()
        for a, b in CELLS
    ]
    if name in SEEDS:
        found["offsets"] = [
            {"n": n, "offset": offset}
            | {"exact_match": exact(models["window"], batch, offset=offset)}
            for n in (16, 24)
            for batch in [cell(n, n, 10 * samples, seed=99)]
            for offset in MORE_OFFSETS
        ]
        found["bars"] = [
            {"n": n, "rule": rule, "offset": offset}
            | {"exact_match": barred(models["none"], batch, rule, window, offset)}
            for offset in fits
            for n, batch in batches.items()
            for rule in RULES
        ]
        found["errors"] = [
            {"n": n, "offset": offset} | errors(models["window"], batch, offset)
            for offset in fits
            for n, batch in batches.items()
        ]
    if name == SEEDS[0]:
        found["loops"] = [
            {"n": n, "loops": loops}
            | {"exact_match": exact(models["window"], batch, n_loops=loops)}
            for n, batch in batches.items()
            for loops in LOOPS
        ]
        found["attention"] = [row for n in (8, 24) for row in shares(models["none"], batches[n])]
    return found


def with_window(model: LoopedTransformer, window: int | None) -> LoopedTransformer:
    """The same weights with another abacus window."""
    twin = LoopedTransformer(model.config.replace(abacus_window=window))
    twin.load_state_dict(model.state_dict())
    return twin


def cell(n_a: int, n_b: int, samples: int, seed: int = 7) -> Batch:
    """Sums of numbers of these lengths, the same for every model."""
    generator = torch.Generator().manual_seed(seed)
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


def barred(
    model: LoopedTransformer, batch: Batch, rule: str, window: int, offset: int = 0
) -> float:
    """Exact match with no attention to some digits, in a model without a window; see RULES.

    The control bars as many pairs as the window, drawn from those within it that are no neighbours.
    """
    index = abacus_positions(batch.inputs, DIGITS)
    query, key = index[:, :, None], index[:, None]
    seen = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool).tril()
    apart = torch.where(seen & (key > 0), (query - key).abs(), 0)  # [batch, query, key]
    bar = apart > window
    if rule == "digits":
        bar &= query > 0
    elif rule == "control":
        near = (apart > 1) & (apart <= window)
        share = bar.sum() / near.sum()
        bar = near & (torch.rand(near.shape, generator=torch.Generator().manual_seed(0)) < share)
    elif rule == "none":
        bar = torch.zeros_like(bar)

    def put(scores: torch.Tensor, hook: object) -> torch.Tensor:
        return scores.masked_fill(bar[:, None], float("-inf"))

    hooks = [(lambda name: name.endswith("hook_attn_scores"), put)]
    return exact(model, batch, offset=offset, hooks=hooks)


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
        "offsets": offsets_table(stored),
        "bars": bars_table(stored),
        "errors": errors_table(stored),
        "changes": changes_table(stored),
        "loops": loops_table(stored["abacus-long"]["loops"]),
        "attention": attention_table(stored["abacus-long"]["attention"]),
    }


def grid_table(stored: dict[str, Any]) -> str:
    rows = [
        [name, offset, "8" if rule == "window" else "-", *shown.values()]
        for name in SEEDS
        if name in stored
        for (offset, rule), shown in by_row(stored[name]["grid"]).items()
    ]
    return table(["run", "offset", "window", *(f"{a} x {b}" for a, b in CELLS)], rows)


def by_row(grid: list[dict[str, Any]]) -> dict[tuple[int, str], dict[tuple[int, int], str]]:
    """Exact match as it is shown, by offset and rule, then by digits."""
    rows: dict[tuple[int, str], dict[tuple[int, int], str]] = {}
    for one in grid:
        row = rows.setdefault((one["offset"], one["rule"]), {})
        row[one["n_a"], one["n_b"]] = f"{one['exact_match']:.2f}"
    return rows


def changes_table(stored: dict[str, Any]) -> str:
    """All runs, with the window where they can have one."""
    cells = [(offset, n) for offset in OFFSETS for n in (8, 16, 24)]
    rows = []
    for name in filter(stored.__contains__, CHANGES):
        grid = by_row(stored[name]["grid"])
        rule = "window" if any(rule == "window" for _, rule in grid) else "none"
        shown = [grid[offset, rule][n, n] if (offset, rule) in grid else "-" for offset, n in cells]
        rows.append([CHANGES[name].replace(", ", "<br>"), stored[name]["loops_run"], *shown])
    return table(["changes", "loops", *(f"{n} x {n}, offset {k}" for k, n in cells)], rows)


def bars_table(stored: dict[str, Any]) -> str:
    rows = [
        [name, offset, RULES[rule], *(f"{one['exact_match']:.2f}" for one in bars)]
        for name in SEEDS
        if name in stored
        for offset in OFFSETS
        for rule in RULES
        for bars in [
            [x for x in stored[name]["bars"] if (x["rule"], x["offset"]) == (rule, offset)]
        ]
    ]
    return table(["run", "offset", "barred", *map(str, LENGTHS)], rows)


def offsets_table(stored: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{one['exact_match']:.2f}" for one in stored[name]["offsets"])]
        for name in SEEDS
        if name in stored
    ]
    columns = [f"{n} x {n}, offset {offset}" for n in (16, 24) for offset in MORE_OFFSETS]
    return table(["run", *columns], rows)


def errors_table(stored: dict[str, Any]) -> str:
    kinds = ("first", "between", "last")
    rows = [
        [name, one["offset"], one["n"], *(f"{one[kind]:.2f}" for kind in kinds)]
        for name in SEEDS
        for one in stored.get(name, {}).get("errors", [])
        if one["n"] in (16, 24)
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
