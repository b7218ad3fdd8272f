"""Rules that are not told n against the required loops T(n), beyond the training length.

    python -m analyses.unknown_loops                      # an hour on one core
    python -m analyses.unknown_loops --name parity        # one model anew, the others as they were
    python -m analyses.unknown_loops --run runs/parity-drawn

Every example may run CAP loops, whatever its length. A rule reads the positions of the answer, or
every position of the state. Its threshold is calibrated on training lengths alone. Rows are kept
in analyses/results/unknown_loops.csv; the tables go into docs/results/unknown-loops.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.core.intervals import wilson_estimate
from loopinterp.models import (
    AccelerationBelow,
    AnswerHeld,
    ConfidenceAbove,
    EntropyBelow,
    LoopView,
    ReadoutKL,
    ResidualBelow,
)
from loopinterp.models.protocol import own_depth
from loopinterp.models.stopped_run import first_ready, score_loops
from loopinterp.models.study_examples import fit_to_model
from loopinterp.tasks import IGNORE, Batch, Task
from loopinterp.training import Run, calibrate_stopping
from loopinterp.training.device import stream
from loopinterp.zoo import pretrained_run

FILE = RESULTS / "unknown_loops.csv"
CAP, HOLD = 128, 24
MOVEMENT: dict[str, Any] = {
    "residual": ResidualBelow(1.0),
    "readout-kl": ReadoutKL(1.0),
    "acceleration": AccelerationBelow(1.0),
    "answer-held": AnswerHeld(HOLD),
}
RULES = MOVEMENT | {"entropy": EntropyBelow(1.0), "confidence": ConfidenceAbove(0.5)}
"""Only the scores of these rules are used: their thresholds are calibrated."""

THRESHOLDS = tuple(10 ** (k / 4) for k in range(-28, 1))
CHOICES = ("loosest", "middle", "strictest")
SHIFTS = (-4, -3, -2, -1, 0, 1, 2, 4, 8, 12, 16)
ORACLE = "T(n)+0"
FIXED = {"T(cutoff)": "T(cutoff)", "last": f"{CAP} loops", "line": "line"}
CONFIDENT = ("max-confidence", "max-confidence-batch")
HELD = ("parity", "addition")
ONE = "a single 1"
DETAILED = ("parity", "parity-drawn", "parity-no-hold", "addition")
MODELS = (
    *("parity", "parity-finite", "parity-no-window"),
    *("addition", *(f"addition-seed-{k}" for k in range(1, 5)), "addition-finite"),
    *("addition-no-hold", "addition-no-spare-loops", "addition-no-loop-norm"),
    *("prefix_sum", "prefix_sum-finite", "binary_sum", "copy", "unique_set"),
    *("multiplication", "token_addition"),
)


class Cell(NamedTuple):
    """Examples of one length and distribution, each run for CAP loops.

    Attributes:
        scores: By rule and by what it reads (``answer`` or ``state``), ``[loop, example]``.
        wrong: Whether the answer is wrong after each loop, ``[loop, example]``.
        n_loops: T(n) of each example.
        n_positions: Positions of the input.
    """

    scores: dict[tuple[str, str], Tensor]
    wrong: Tensor
    n_loops: Tensor
    n_positions: int


@dataclass(frozen=True)
class Wrong:
    """A rule whose score is 1 where the answer is wrong: scores and answers come from one run."""

    targets: Tensor
    tolerance: float = 0.0

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return CAP if max_loops is None else max_loops

    def score(self, view: LoopView) -> Tensor:
        return view.worst((view.answers != self.targets).float())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--name", action="append", choices=MODELS, help="Default: all.")
    parser.add_argument("--run", type=Path, action="append", help="Trained runs instead.")
    parser.add_argument("--samples", type=int, help="Default: 1000 for parity and addition, 200.")
    parser.add_argument("--results", type=Path, default=FILE)
    parser.add_argument("--page", type=Path, default=PAGES / "results" / "unknown-loops.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {folder.name: Run.load(folder) for folder in args.run or ()}
    for name in [*runs] or args.name or MODELS:
        run = runs.get(name) or pretrained_run(name)
        found = measure(run, args.samples or (1000 if run.task.name in HELD else 200))
        known = pd.read_csv(args.results) if args.results.exists() else pd.DataFrame({"model": []})
        parts = [known.query("model != @name"), found.assign(model=name)]
        found = pd.concat([part for part in parts if len(part)])
        found.to_csv(args.results, index=False, float_format="%.4g")
        print(name, flush=True)
    rewrite(args.page, tables(pd.read_csv(args.results)))
    print(args.page)


def measure(
    run: Run,
    samples: int,
    *,
    times: Sequence[int] = (1, 2, 4),
    trained: int = 100,
    cap: int = CAP,
) -> pd.DataFrame:
    """A row for each rule, scope and choice of threshold, by distribution and length."""
    model, task, lengths = run.model(), run.task, range(1, run.cutoff + 1)
    if own_depth(model) is not None:  # trained for the same loops at every length
        model.loop_rule = None
    names = task.distributions
    seen = [draw(model, task, d, n, trained, "calibration") for d in names for n in lengths]
    thresholds = calibrate([cell(model, batch, cap) for batch in seen])
    line = calibrate_stopping(model, task, lengths[len(lengths) // 2 :], n_samples=trained)
    longest = max(int(batch.n_loops.max()) for batch in seen)
    rows, hardest = [], [ONE] if task.name == "parity" else []
    for d, n in ((d, run.cutoff * k) for d in [*names, *hardest] for k in times):
        if d == ONE:
            batch = one_bit(draw(model, task, names[0], n, n, "evaluation"))
        else:
            batch = draw(model, task, d, n, samples, "evaluation")
        each = cell(model, batch, cap)
        at = each.n_loops
        fixed = {f"T(n){k:+d}": at + k for k in SHIFTS} | {"2 T(n)": 2 * at}
        fixed |= {"T(cutoff)": longest, "last": cap, "line": line.loops(each.n_positions)}
        found = [outcome(each, loops) | {"rule": rule} for rule, loops in fixed.items()]
        doubt = each.scores["max-confidence", "answer"][1:]  # from loop 1 on
        for rule, loops in zip(CONFIDENT, (doubt.argmin(0) + 1, doubt.mean(1).argmin() + 1)):
            found.append(outcome(each, loops) | {"rule": rule})
        for (rule, scope, choice), threshold in thresholds.items():
            stop = first_ready(each.scores[rule, scope], threshold)
            said = {"rule": rule, "reads": scope, "choice": choice, "threshold": threshold}
            found.append(outcome(each, stop, each.scores[rule, "state"] > threshold) | said)
        residual = each.scores["residual", "state"]
        said = {"task": task.name, "distribution": d, "length": n, "times": n // run.cutoff}
        said |= {"samples": len(batch), "t_of_n": float(at.double().mean())}
        said |= {"residual_at_t": float(residual.gather(0, at.clamp(max=cap)[None]).median())}
        said |= {"residual_last": float(residual[cap].median())}
        rows += [said | one for one in found]
    return pd.DataFrame(rows)


def draw(model: Any, task: Task, distribution: str, n: int, samples: int, purpose: str) -> Batch:
    """The examples that ``evaluate`` and ``calibrate_stopping`` draw."""
    generator = stream(0, f"{purpose} {distribution} {n}")
    batch = task.sample(n, batch_size=samples, generator=generator, distribution=distribution)
    return fit_to_model(model, replace(batch, task=task))


def one_bit(batch: Batch) -> Batch:
    """Parity of n inputs with a single 1, at each place in turn."""
    bits = (batch.inputs == 0) | (batch.inputs == 1)  # [batch, pos]
    place = bits.long().cumsum(1) - 1
    one = (place == torch.arange(len(batch))[:, None]).long()
    first = (batch.targets != IGNORE).long().argmax(1, keepdim=True)
    targets = batch.targets.scatter(1, first, 1)
    return replace(batch, inputs=batch.inputs.where(~bits, one), targets=targets)


def cell(model: Any, batch: Batch, max_loops: int = CAP) -> Cell:
    """Scores of every rule after every loop."""
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for inputs, targets in zip(batch.inputs.split(250), batch.targets.split(250)):
        rules, mask = [*RULES.values(), Wrong(targets)], targets != IGNORE
        found = score_loops(model, inputs, rules, max_loops=max_loops, per_token=True)
        by_name = dict(zip([*RULES, "wrong"], found))  # [loop, batch, pos] each
        doubt = -torch.log1p(-by_name["confidence"]) * mask  # -log of the highest probability
        parts.setdefault(("max-confidence", "answer"), []).append(doubt.sum(-1) / mask.sum(-1))
        for name, score in by_name.items():
            score = score.nan_to_num(math.inf, math.inf)
            answer = score.masked_fill(~mask, -math.inf).amax(-1)
            parts.setdefault((name, "answer"), []).append(answer)
            parts.setdefault((name, "state"), []).append(score.amax(-1))
    scores = {key: torch.cat(part, 1) for key, part in parts.items()}
    wrong = scores.pop(("wrong", "answer")) > 0
    return Cell(scores, wrong, batch.n_loops, batch.inputs.shape[1])


def calibrate(cells: Sequence[Cell]) -> dict[tuple[str, str, str], float]:
    """Thresholds by rule, what it reads, and choice.

    A threshold is admissible if it stops 99% of the examples of every cell by the last loop, and if
    the lowest exact match over cells is within .01 of the best such threshold's.
    """
    chosen = {}
    scopes = [(rule, "answer") for rule in RULES] + [(rule, "state") for rule in MOVEMENT]
    for rule, scope in scopes:
        reached = {}
        # The score of a held answer is HOLD less the loops for which it was held.
        for threshold in map(float, range(HOLD)) if rule == "answer-held" else THRESHOLDS:
            scores = [each.scores[rule, scope] for each in cells]
            if min(float((x.amin(0) <= threshold).double().mean()) for x in scores) >= 0.99:
                stops = (first_ready(x, threshold) for x in scores)
                wrong = (wrong_at(*pair) for pair in zip(cells, stops))
                reached[threshold] = min(float((~x).double().mean()) for x in wrong)
        good = sorted(x for x in reached if reached[x] >= max(reached.values()) - 0.01)
        if good:
            ends = good[-1], good[len(good) // 2], good[0]
            chosen |= {(rule, scope, choice): x for choice, x in zip(CHOICES, ends)}
    return chosen


def wrong_at(each: Cell, loops: Tensor) -> Tensor:
    """Whether each example is wrong after its number of loops."""
    return each.wrong.gather(0, loops[None])[0]


def outcome(each: Cell, loops: Tensor | int, moves: Tensor | None = None) -> dict[str, float]:
    """How often the answer is right where the examples stop; NaN if the run ends before.

    ``early_lost``, ``late_lost``: stopped before (after) T(n), wrong there, and right at T(n).
    ``moving``: share of the former whose state still moves then. ``another``: control, exact match
    where the next example of the cell stops.
    """
    last, at = len(each.wrong) - 1, each.n_loops
    stop = torch.as_tensor(loops).expand_as(at)
    found = {"loops": float(stop.double().mean())}
    if int(stop.max()) > last or int(stop.min()) < 0:
        return found | {"exact_match": math.nan}
    wrong, by_another = (wrong_at(each, x) for x in (stop, stop.roll(1)))
    lost = wrong & ~wrong_at(each, at.clamp(max=last))
    shares = {"exact_match": ~wrong, "another": ~by_another, "early": stop < at, "late": stop > at}
    shares |= {f"{when}_lost": shares[when] & lost for when in ("early", "late")}
    if moves is not None and shares["early_lost"].any():
        shares["moving"] = moves.gather(0, stop[None])[0][shares["early_lost"]]
    return found | {name: float(share.double().mean()) for name, share in shares.items()}


def tables(known: pd.DataFrame) -> dict[str, str]:
    """The tables of the page, by name."""
    words = ("task", "model", "distribution", "rule", "reads", "choice")
    known = known.astype(dict.fromkeys(words, "category"))  # quick to look for
    middle = known.query("choice != choice or choice == 'middle'")  # NaN where none is chosen
    far = middle.query("times == times.max()")
    return {
        "unknown-loops": rules_table(far),
        "shortfall": shortfall_table(known.query("task in @HELD")),
        "stops": stops_table(far.query("model in @DETAILED")),
        "off-by-k": shifts_table(middle.query("times == 2")),
    }


def rules_table(far: pd.DataFrame) -> str:
    """Exact match on the distribution where it is lowest, and the mean loops there."""
    columns = [(scope, rule) for scope in ("state", "answer") for rule in MOVEMENT]
    columns = [(None, rule) for rule in (ORACLE, *FIXED)] + columns + [("answer", "confidence")]
    rows = []
    for name, cells in by_model(far):
        row = [name, cells.index[0][1]]
        for scope, rule in [*columns, *((None, rule) for rule in CONFIDENT)]:
            found = picked(cells, rule, scope).sort_values("exact_match", kind="stable")
            pairs = zip(found["exact_match"], found["loops"])
            row.append(next((f"{exact:.2f} ({loops:.0f})" for exact, loops in pairs), "–"))
        rows.append(row)
    shown = [FIXED.get(rule, rule) + (f", {scope}" if scope else "") for scope, rule in columns[1:]]
    return table(["model", "n", "T(n)", *shown, *CONFIDENT], rows)


def shortfall_table(cells: pd.DataFrame) -> str:
    """The most that a rule loses against the best T(n) + k on a distribution, at any length."""
    rules = [(scope, rule) for scope in ("state", "answer") for rule in MOVEMENT]
    rows = []
    for name, each in by_model(cells):
        best = best_shift(each)
        row = [name, len(best), with_interval(best, each)]
        row.append(with_interval(picked(each, "residual", "state")["exact_match"], each))
        for scope, rule in rules:
            of_rule = [picked(each, rule, scope, choice)["exact_match"] for choice in CHOICES]
            most = [(best - found).max() for found in of_rule]
            row.append("–" if not len(of_rule[0]) else f"{most[1]:.3f} ({max(most):.3f})")
        rows.append(row)
    shown = [f"{rule}, {scope}" for scope, rule in rules]
    return table(["model", "cells", "best T(n) + k", "residual, state: reached", *shown], rows)


def best_shift(cells: pd.DataFrame) -> pd.Series:
    """Exact match at T(n) + k with the best k in hindsight, by distribution and length."""
    at = pd.concat([picked(cells, f"T(n){k:+d}")["exact_match"] for k in SHIFTS], axis=1)
    return at.max(axis=1)


def with_interval(exact: pd.Series, cells: pd.DataFrame) -> str:
    """The lowest of some exact matches with its 95% interval (of most samples); – of none."""
    if exact.empty:
        return "–"
    rows = picked(cells, ORACLE).assign(exact_match=exact)
    least = rows.sort_values(["exact_match", "samples"], ascending=[True, False]).iloc[0]
    share, samples = float(least["exact_match"]), int(least["samples"])
    _, low, high = wilson_estimate(share * samples, samples)
    return f"{share:.3f} ({low:.3f}–{high:.3f})"


def stops_table(far: pd.DataFrame) -> str:
    """Where the residual rule stops, and what that loses."""
    shares, rows = ("early", "early_lost", "late", "late_lost", "moving", "another"), []
    for name, cells in by_model(far):
        for scope in ("state", "answer"):
            for one in picked(cells, "residual", scope).reset_index().to_dict("records"):
                shown = ["–" if pd.isna(one[x]) else f"{one[x]:.2f}" for x in shares]
                loops = [f"{one[x]:.0f}" for x in ("t_of_n", "loops")]
                rows.append([name, one["distribution"], scope, *loops, *shown])
    header = ["model", "inputs", "reads", "T(n)", "loops", "early", "lost", "late", "lost"]
    return table([*header, "still moving", "another's loop"], rows)


def shifts_table(cells: pd.DataFrame) -> str:
    """Exact match at T(n) + k on the distribution where it is lowest, and the state's movement."""
    rules, rows = [*(f"T(n){k:+d}" for k in SHIFTS), "2 T(n)", "last"], []
    for name, each in by_model(cells):
        exact = [picked(each, rule)["exact_match"].min() for rule in rules]
        shown = ["–" if pd.isna(x) else f"{x:.2f}" for x in exact]
        moves = (f"{each[x].median():.0e}" for x in ("residual_at_t", "residual_last"))
        rows.append([name, each.index[0][1], *shown, *moves])
    header = [*(f"{k:+d}" for k in SHIFTS), "2 T(n)", FIXED["last"]]
    return table(["model", "n", *header, "residual at T(n)", f"residual at {CAP}"], rows)


def picked(
    cells: pd.DataFrame, rule: str, scope: str | None = None, choice: str = "middle"
) -> pd.DataFrame:
    """The rows of a rule among some :func:`by_cell`."""
    asked = cells["rule"] == rule
    if scope is not None:
        asked &= (cells["reads"] == scope) & (cells["choice"] == choice)
    return cells.loc[asked]


def by_cell(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by distribution and length."""
    return rows.set_index(["distribution", "length"]).sort_index()


def by_model(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each model by cell: the zoo's in the order of MODELS, then runs."""
    for name in dict.fromkeys([*MODELS, *cells["model"]]):
        if len(rows := cells.loc[cells["model"] == name]):
            yield name, by_cell(rows)


if __name__ == "__main__":
    main()
