"""Where the carry of decimal addition is: written digits, probes, barred attention, interchanges.

    python -m analyses.abacus_carries --run runs/abacus-long --name abacus-long
    python -m analyses.abacus_carries

The first command measures a run of the recipe ``abacus-long``; the second writes tables of
docs/results/abacus-addition.md from ``analyses/results/abacus_carries.json``. Sums have two
operands of n digits, least significant first: ``a_0 … + b_0 … = s_0 …``. The token ``s_k`` asks for
``s_(k+1) = (a_(k+1) + b_(k+1) + c_(k+1)) mod 10``, with the carry ``c_(k+1)`` out of column k.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analyses.abacus_addition import SEEDS, mean
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.interventions import InterchangePairs, InterchangeRun
from loopinterp.interventions.engine import project, random_change
from loopinterp.models import LoopedTransformer
from loopinterp.probing import probe_study
from loopinterp.tasks import IGNORE, AbacusAddition, Batch
from loopinterp.training import Run

FILE = RESULTS / "abacus_carries.json"
LENGTHS, LOOPS, SAMPLES = (8, 16), 4, 400
BARRED = {
    "nothing": "nothing",
    "before": "the written column",
    "due": "the due column",
    "others": "all other digits",
}
"""Digits that the answer's tokens may not read, but for their own."""
OUTCOMES = ("base", "carry", "source", "other")
"""The answer is the base's, the base's with the source's carry, the source's, or none of these."""
PUT_IN = {
    "state": "the whole state",
    "direction": "its part along the carry's direction",
    "random": "control: a random change of that size",
    "same": "control: that part, of a source with the same carry",
}


@dataclass(frozen=True)
class Sums:
    """Sums of two numbers of n digits, and their columns.

    Attributes:
        a, b: Digits of the operands, ``[example, column]``.
        carry: The carry into each column, ``[example, column + 1]``.
        batch: The tokens.
    """

    a: Tensor
    b: Tensor
    carry: Tensor
    batch: Batch

    @property
    def n(self) -> int:
        return self.a.shape[1]

    @property
    def queries(self) -> Tensor:
        """Places of the tokens ``s_0`` to ``s_(n-2)``: each asks for a column's digit."""
        return torch.arange(2 * self.n + 2, 3 * self.n + 1)

    def by_query(self, values: Tensor) -> Tensor:
        """Values of the due columns ``[example, n - 1]`` at their tokens, ``[example, pos]``."""
        spread = torch.full_like(self.batch.inputs, IGNORE)
        spread[:, self.queries] = values
        return spread


def draw(n: int, samples: int, seed: int, *, chains: float = 0.0) -> Sums:
    """Sums of random digits; a share ``chains`` of the columns adds up to nine."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randint(10, (2, samples, n), generator=generator)
    nine = torch.rand(samples, n, generator=generator) < chains
    return written(a, torch.where(nine, 9 - a, b))


def written(a: Tensor, b: Tensor) -> Sums:
    carry = torch.zeros(len(a), a.shape[1] + 1, dtype=torch.long)
    for k in range(a.shape[1]):
        carry[:, k + 1] = (a[:, k] + b[:, k] + carry[:, k]) > 9
    lengths = torch.full((len(a), 2), a.shape[1])
    return Sums(a, b, carry, AbacusAddition().from_digits(torch.stack([a, b], 1), lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, help="A trained run to measure.")
    parser.add_argument("--name", choices=SEEDS, default=SEEDS[0], help="Which run it is.")
    parser.add_argument("--results", type=Path, default=FILE)
    parser.add_argument("--page", type=Path, default=PAGES / "results" / "abacus-addition.md")
    args = parser.parse_args()
    stored = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.run:
        stored[args.name] = measured(Run.load(args.run).model())
        args.results.write_text(json.dumps(stored, indent=1) + "\n")
        print(args.results)
    else:
        print(args.page, "" if rewrite(args.page, tables(stored)) else "(as it was)")


def measured(model: Any) -> dict[str, Any]:
    """Every measurement of one model."""
    return {
        "written": [row for n in LENGTHS for row in changed_tokens(model, n)],
        "probes": [row for n in LENGTHS for row in probes(model, n)],
        "barred": [row for n in LENGTHS for row in barred(model, n)],
        "interchanges": [row for n in LENGTHS for row in interchanges(model, n)],
    }


@torch.no_grad()
def changed_tokens(model: LoopedTransformer, n: int) -> list[dict[str, Any]]:
    """Answers after a column that adds up to nine, where written digit and operands disagree.

    Such a column's carry is 1 if its written digit is 0, and 0 if it is 9. Either the written digit
    is turned, or the operands of a column below so that the carry into the nine turns. The answer
    follows the written digit, the operands, or neither.
    """
    sums = draw(n, SAMPLES, seed=11, chains=0.5)
    # The last column k >= 1 that adds up to nine and is followed by another.
    nine = (sums.a + sums.b == 9)[:, 1:-1]
    some = nine.any(1)
    k = (nine * torch.arange(1, n - 1)).amax(1)[some]
    a, b, carry, tokens = (x[some] for x in (sums.a, sums.b, sums.carry, sums.batch.inputs))
    row, query = torch.arange(len(k)), 2 * n + 2 + k
    # The first column below that does not add up to nine decides: as 0 + 0 or 9 + 9 it carries
    # what it did not.
    column = torch.arange(n)
    decides = (a + b != 9) & (column < k[:, None])
    has_start = decides.any(1)
    below = (decides * column).amax(1)
    digit = torch.where(carry[row, k] > 0, 0, 9)
    cases = {"nothing": tokens, "written digit": tokens.clone(), "operands": tokens.clone()}
    cases["written digit"][row, query] = 9 - tokens[row, query]
    for first in (0, n + 1):
        cases["operands"][row, first + below] = digit
    due = (a + b)[row, k + 1]
    rows = []
    for changed, inputs in cases.items():
        keep = has_start if changed == "operands" else torch.ones_like(has_start)
        answer = model(inputs, n_loops=LOOPS)[row, query].argmax(-1)
        true = carry[row, k + 1]  # of the clean sum, which the written digit shows
        follows = {"written": true, "operands": true}
        if changed != "nothing":
            turned = "written" if changed == "written digit" else "operands"
            follows[turned] = 1 - true
        rows.append(
            {"n": n, "changed": changed, "examples": int(keep.sum())}
            | {rule: mean((answer == (due + c) % 10)[keep].float()) for rule, c in follows.items()}
        )
    return rows


def probes(model: LoopedTransformer, n: int) -> list[dict[str, Any]]:
    """Held-out accuracy of linear probes at the answer's digits, by loop, with their controls."""
    sums = draw(n, SAMPLES, seed=12)
    due = sums.a[:, 1:] + sums.b[:, 1:]
    targets = {
        "carry": sums.by_query(sums.carry[:, 1:-1]),
        "sum without carry": sums.by_query(due % 10),
        "answer": sums.by_query((due + sums.carry[:, 1:-1]) % 10),
    }
    queries = torch.zeros_like(sums.batch.inputs, dtype=torch.bool)
    queries[:, sums.queries] = True
    result = probe_study(
        model, sums.batch, targets, n_loops=LOOPS, groups={"digits": queries}, seed=0
    )
    names = ("accuracy", "random_model", "embedding", "majority")
    one = result.data.isel(group=0, site=0)
    return [
        {"n": n, "target": target, "loop": loop}
        | {name: round(float(one[name].sel(target=target, loop=loop)), 4) for name in names}
        for target in targets
        for loop in range(LOOPS)
    ]


@torch.no_grad()
def barred(model: LoopedTransformer, n: int) -> list[dict[str, Any]]:
    """Right digits if the answer's tokens cannot read some digits, by loop and head.

    ``other_carry`` is the share of answers that are right but for the carry. The control bars the
    digits of all other columns, of the operands and of the answer.
    """
    sums = draw(n, SAMPLES, seed=13)
    due = sums.a[:, 1:] + sums.b[:, 1:]
    right = (due + sums.carry[:, 1:-1]) % 10
    no_carry = (due + 1 - sums.carry[:, 1:-1]) % 10  # with the other carry
    places: dict[str, Tensor] = {}  # what each query may not read, [query, pos]
    column = torch.arange(n - 1)
    pos = torch.arange(sums.batch.inputs.shape[1])
    for what, at in (("before", column), ("due", column + 1)):
        places[what] = (pos == at[:, None]) | (pos == n + 1 + at[:, None])
    digits = (pos != n) & (pos != 2 * n + 1) & (pos != sums.queries[:, None])
    places["others"] = digits & ~places["before"] & ~places["due"]
    heads = model.config.n_heads
    where = [("all", "all"), *((loop, "all") for loop in range(LOOPS))]
    where += [("all", head) for head in range(heads)]
    rows = []
    for what, keys in {"nothing": None, **places}.items():
        for loop, head in where if keys is not None else where[:1]:
            bar = torch.zeros(heads, len(pos), len(pos), dtype=torch.bool)
            if keys is not None:
                chosen = slice(None) if head == "all" else int(head)
                bar[chosen, sums.queries] = keys

            def put(scores: Tensor, hook: object, bar: Tensor = bar) -> Tensor:
                return scores.masked_fill(bar, float("-inf"))

            loops = range(LOOPS) if loop == "all" else [loop]
            names = [
                f"loops.{t}.blocks.{layer}.attn.hook_attn_scores"
                for t in loops
                for layer in range(model.config.n_layers)
            ]
            logits = model.run_with_hooks(
                sums.batch.inputs, n_loops=LOOPS, fwd_hooks=[(names, put)]
            )
            answer = logits[:, sums.queries].argmax(-1)
            rows.append(
                {"n": n, "barred": what, "loop": loop, "head": head}
                | {"right": mean((answer == right).float())}
                | {"other_carry": mean((answer == no_carry).float())}
            )
    return rows


@torch.no_grad()
def interchanges(model: LoopedTransformer, n: int) -> list[dict[str, Any]]:
    """Answers after a state at an answer's digit is another sum's, by loop and by what is put in.

    Base and source have different carries into the due column, and different sums there. The
    carry's direction is the difference of the class means of other sums' states.
    """
    sums, others = draw(n, SAMPLES, seed=14), draw(n, SAMPLES, seed=15)
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(SAMPLES, (8 * SAMPLES,), generator=generator)
    source = torch.randint(SAMPLES, (8 * SAMPLES,), generator=generator)
    k = torch.randint(n - 1, (8 * SAMPLES,), generator=generator)
    due = (sums.a + sums.b)[:, 1:]  # [example, query]
    own, theirs = sums.carry[base, k + 1], sums.carry[source, k + 1]
    wanted = {
        "base": (due[base, k] + own) % 10,
        "carry": (due[base, k] + theirs) % 10,
        "source": (due[source, k] + theirs) % 10,
    }
    apart = (wanted["source"] != wanted["base"]) & (wanted["source"] != wanted["carry"])
    rows: list[dict[str, Any]] = []
    names = lambda name: name.endswith("hook_state_post")  # noqa: E731
    _, cache = model.run_with_cache(others.batch.inputs, n_loops=LOOPS, names_filter=names)
    label = others.carry[:, 1:-1]
    for loop, state in enumerate(cache.values(), start=1):  # [batch, pos, d_model]
        there = state[:, others.queries]
        direction = there[label == 1].mean(0) - there[label == 0].mean(0)
        direction = direction / direction.norm()
        for put_in in PUT_IN:
            same = put_in == "same"
            chosen = (apart & ((own == theirs) == same)).nonzero().squeeze(1)[:SAMPLES]
            pairs = InterchangePairs.of(
                sums.batch,
                base=base[chosen],
                source=source[chosen],
                positions=sums.queries[k[chosen], None],
                loop=torch.full_like(chosen, loop),
                n_loops=LOOPS,
            )
            run = InterchangeRun(model, pairs)
            change = run.difference
            if put_in != "state":
                change = project(change, direction[None])
            if put_in == "random":
                change = random_change(change, generator)
            answers = run.after(run.base_state + change)  # [pair, delay, pos]
            last = answers[torch.arange(len(chosen)), LOOPS - loop, sums.queries[k[chosen]]]
            shares = {name: last == x[chosen] for name, x in wanted.items()}
            if same:
                shares["carry"] = torch.zeros_like(shares["base"])  # it is the base's
            shares["other"] = ~(shares["base"] | shares["carry"] | shares["source"])
            rows.append(
                {"n": n, "loop": loop, "put_in": put_in, "pairs": len(chosen)}
                | {name: mean(shares[name].float()) for name in OUTCOMES}
            )
    return rows


def tables(stored: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name: of 16 digits, and of the first run alone but for one."""
    one = {k: [x for x in rows if x["n"] == LENGTHS[-1]] for k, rows in stored[SEEDS[0]].items()}
    return {
        "carry-seeds": seeds_table(stored),
        "carry-probes": probes_table(one["probes"]),
        "carry-barred": barred_table(one["barred"]),
        "carry-interchanges": interchanges_table(one["interchanges"]),
    }


def seeds_table(stored: dict[str, Any]) -> str:
    """Of each run: which answers follow the written digit, and which digits may be barred."""
    rows = []
    for name in filter(stored.__contains__, SEEDS):
        for n in LENGTHS:
            written = {x["changed"]: x for x in stored[name]["written"] if x["n"] == n}
            bars = {
                x["barred"]: f"{x['right']:.2f}"
                for x in stored[name]["barred"]
                if (x["n"], x["loop"], x["head"]) == (n, "all", "all")
            }
            follows = [f"{written[x]['written']:.2f}" for x in ("written digit", "operands")]
            rows.append([name, n, *follows, *(bars[x] for x in ("before", "due", "others"))])
    header = ["run", "digits", "written digit changed", "operands changed"]
    return table([*header, *(f"{BARRED[x]} barred" for x in ("before", "due", "others"))], rows)


def probes_table(found: list[dict[str, Any]]) -> str:
    names = ("accuracy", "random_model", "embedding", "majority")
    rows = [[x["target"], x["loop"], *(f"{x[name]:.2f}" for name in names)] for x in found]
    return table(
        ["variable", "loop", "probe", "random weights", "embedding", "most frequent"], rows
    )


def barred_table(found: list[dict[str, Any]]) -> str:
    shares = ("right", "other_carry")
    rows = [
        [BARRED[x["barred"]], x["loop"], x["head"], *(f"{x[share]:.2f}" for share in shares)]
        for x in found
    ]
    return table(["barred", "loop", "head", "right", "right but for the carry"], rows)


def interchanges_table(found: list[dict[str, Any]]) -> str:
    rows = [
        [x["loop"], PUT_IN[x["put_in"]], *(f"{x[outcome]:.2f}" for outcome in OUTCOMES)]
        for x in found
    ]
    header = ["loops before", "put in", "base's", "base's with the source's carry", "source's"]
    return table([*header, "another"], rows)


if __name__ == "__main__":
    main()
