"""Six tasks at five times their training length, and the mechanism that fails where one does.

    python -m analyses.five_times --measure                            # the zoo's models
    python -m analyses.five_times --measure --run mixed-3=runs/mixed-3 # a trained run beside them
    python -m analyses.five_times                                      # the page alone

Measured are exact match from one to five times the training length, and for tasks that fail: right
places of a counter by the number of ones (binary_sum), the state of a symbol along its path
(unique_set), and when and from where places of a product are written (multiplication). Numbers are
kept in analyses/results/five_times.json; the tables go into docs/results/five-times.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.models.study_examples import fit_to_model
from loopinterp.tasks import Batch
from loopinterp.training import Run, evaluate
from loopinterp.zoo import pretrained_run

FILE = RESULTS / "five_times.json"
ZOO = ("parity", "copy", "token_addition", "binary_sum", "unique_set", "multiplication")
TIMES, FIVE = (1, 1.5, 2, 3, 4, 5), 5
RIGHT, NONE = 0.9, 0.05
SAMPLES = 200

COUNTED = (20, 32, 48)  # bits of the inputs on which a counter is measured
ONES = ((0, 12), (13, 19), (20, 27), (28, 32), (33, 48))
MOVED, PATH = (18, 24, 30, 36, 48), (8, 16, 24, 36, 47)
PRODUCTS = {"1": (1, (1, 0)), "2": (2, (0, 1)), "3": (2, (1, 1))}
"""First factors: the number of bits, and the bits, least significant first."""

Shares = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="Measure, and keep the numbers.")
    parser.add_argument("--name", action="append", choices=ZOO, help="Default: all, without --run.")
    parser.add_argument("--run", action="append", metavar="NAME=FOLDER", help="A trained run.")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="At five times the length, where right."
    )
    parser.add_argument("--results", type=Path, default=FILE)
    parser.add_argument("--page", type=Path, default=PAGES / "results" / "five-times.md")
    args = parser.parse_args()
    if args.measure:
        torch.set_num_threads(1)
        folders = dict(each.split("=", 1) for each in args.run or ())
        runs = {name: Run.load(folder) for name, folder in folders.items()}
        for name in args.name or ([] if runs else ZOO):
            runs[name] = pretrained_run(name)
        for name, run in runs.items():
            stored = json.loads(args.results.read_text()) if args.results.exists() else {}
            stored = {"given": [], "measured": {}} | stored
            stored["measured"][name] = measured(run, args.samples)
            args.results.write_text(json.dumps(stored, indent=1) + "\n")
            print(name, stored["measured"][name]["exact"], flush=True)
    stored = json.loads(args.results.read_text())
    print(args.page, "" if rewrite(args.page, tables(stored)) else "(as it was)")


def measured(run: Run, samples: int) -> dict[str, Any]:
    """Exact match of a run, and what its task's mechanism is measured by."""
    model, task = run.model(), run.task
    exact, at_five = curve(model, task, run.cutoff, many_samples=samples)
    row = {"task": task.name, "seed": run.config.to_dict()["seed"], "cutoff": run.cutoff}
    row |= {"steps": run.steps_done, "exact": exact, "samples_at_five": at_five}
    if task.name == "binary_sum":
        row["counter"] = {str(n): counter(model, task, n) for n in COUNTED}
    if task.name == "unique_set":
        row["symbols"] = symbols(model, task)
    if task.name == "multiplication":
        row["products"] = products(model, task, run.cutoff)
    return row


def curve(model: Any, task: Any, cutoff: int, *, many_samples: int) -> tuple[Shares, int | None]:
    """Exact match by length and distribution, and the number of samples at five times the cutoff.

    The lengths between are measured where the last one is not reached, up to the first at which the
    lowest distribution is below NONE.
    """
    longest = math.ceil(FIVE * cutoff)
    exact = {str(cutoff): exact_match(model, task, cutoff, SAMPLES)}
    if lowest(exact[str(cutoff)]) >= RIGHT:
        last = exact_match(model, task, longest, 20)  # whether many samples are worth their time
        if lowest(last) >= RIGHT:
            last = exact_match(model, task, longest, SAMPLES)
        if lowest(last) >= RIGHT:
            if many_samples > SAMPLES:
                last = exact_match(model, task, longest, many_samples)
            return exact | {str(longest): last}, max(many_samples, SAMPLES)
    for length in (math.ceil(k * cutoff) for k in TIMES[1:]):
        if lowest([*exact.values()][-1]) < NONE:
            return exact, None
        exact[str(length)] = exact_match(model, task, length, SAMPLES)
    return exact, SAMPLES if str(longest) in exact else None


def exact_match(model: Any, task: Any, length: int, samples: int) -> dict[str, float]:
    """The share of wholly right answers after the model's number of loops, by distribution."""
    found = evaluate(model, task, [length], n_samples=samples).data["exact_match"]
    found = found.sel(estimate="value", length=length, extra_loop=0)
    return {
        str(d): round(float(found.sel(distribution=d)), 4) for d in found["distribution"].values
    }


def lowest(shares: dict[str, float]) -> float:
    return min(shares.values())


def answers(
    model: Any, task: Any, batch: Batch, *, more_loops: int = 0, loops: int | None = None
) -> tuple[Tensor, Tensor]:
    """Predictions and targets of the answer's cells, ``[example, cell]``, from the ``=`` on."""
    fitted = fit_to_model(model, replace(batch, task=task))
    at = int((batch.inputs[0] == task.equals).nonzero())
    loops = int(fitted.n_loops.max()) + more_loops if loops is None else loops
    with torch.no_grad():
        predictions = model(batch.inputs, n_loops=loops).argmax(-1)
    return predictions[:, at:], batch.targets[:, at:]


# -- binary_sum -------------------------------------------------------------------------------


def counter(model: Any, task: Any, n: int, samples: int = 400) -> dict[str, Any]:
    """Right answers and right places of the number of ones among n bits, by that number.

    The probability of a one is drawn uniformly, which makes all numbers of ones about equally
    frequent.
    """
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(samples, 1, generator=generator)
    bits = (torch.rand(samples, n, generator=generator) < chance).long()
    predictions, targets = answers(model, task, task.from_bits(bits, torch.full((samples,), n)))
    return by_ones(predictions == targets, bits.sum(1))


def by_ones(right: Tensor, ones: Tensor) -> dict[str, Any]:
    """By group of numbers of ones: examples, right answers, and right places below 6.

    Shapes: ``right`` ``[example, place]``, ``ones`` ``[example]``.
    """
    rows = {}
    for least, most in ONES:
        some = (ones >= least) & (ones <= most)
        if some.any():
            rows[f"{least}-{most}"] = {
                "examples": int(some.sum()),
                "answers": share(right[some].all(1)),
                "places": [share(right[some, place]) for place in range(min(6, right.shape[1]))],
            }
    return rows


# -- unique_set -------------------------------------------------------------------------------


def symbols(model: Any, task: Any) -> dict[str, Any]:
    """Wrong symbols by length, the state along a symbol's path, and hard attention."""
    wrong = {
        str(n): {d: wrong_symbols(model, task, n, d) for d in ("few", "distinct")} for n in MOVED
    }
    return {
        "wrong": wrong,
        "path": path_of_symbols(model, task, max(MOVED)),
        "hard": {
            str(n): {
                name: cells_right(model, task, n, hard=hard)
                for name, hard in (("as it is", False), ("hard", True))
            }
            for n in (24, 36)
        },
    }


def wrong_symbols(
    model: Any, task: Any, n: int, distribution: str, samples: int = 200
) -> dict[str, float]:
    """:func:`kinds_of_wrong` of the answers to a distribution."""
    batch = task.sample(n, batch_size=samples, distribution=distribution, seed=0)
    prompt = batch.inputs[:, 1 : n + 1]
    return kinds_of_wrong(*answers(model, task, batch), prompt, task.n_answer_symbols)


def kinds_of_wrong(
    predictions: Tensor, targets: Tensor, prompt: Tensor, n_symbols: int
) -> dict[str, float]:
    """Answer cells that ask a symbol: how many, how many wrong, and which wrong ones.

    ``of the prompt`` counts wrong symbols that are others of the prompt, ``chance`` how many there
    would be if they were drawn among all others, ``end`` end marks, ``next`` symbols that are right
    one cell before or behind. Shapes: ``[example, cell]``, prompt ``[example, symbol]``.
    """
    asked = (targets >= 0) & (targets < n_symbols)
    wrong = asked & (predictions != targets)
    other = (predictions[:, :, None] == prompt[:, None, :]).any(2)
    beside = torch.zeros_like(wrong)
    beside[:, 1:] |= predictions[:, 1:] == targets[:, :-1]
    beside[:, :-1] |= predictions[:, :-1] == targets[:, 1:]
    distinct = asked.sum(1, keepdim=True).expand_as(wrong)
    chance = ((distinct - 1) / (n_symbols - 1))[wrong].sum()
    return {
        "cells": int(asked.sum()),
        "wrong": int(wrong.sum()),
        "of the prompt": int((wrong & other).sum()),
        "chance": round(float(chance), 1),
        "end": int((wrong & (predictions == n_symbols)).sum()),
        "next": int((wrong & beside).sum()),
    }


def path_of_symbols(
    model: Any, task: Any, n: int, samples: tuple[int, int] = (200, 100)
) -> dict[str, dict[str, float]]:
    """How far the states of a symbol spread along its path, after some loops.

    Of distinct symbols the i-th moves one position a loop: from 1 + i to 1 + i + t after loop t.
    """
    parts = []
    for seed, size in enumerate(samples):
        batch = task.sample(n, batch_size=size, distribution="distinct", seed=seed)
        with torch.no_grad():
            _, cache = model.run_with_cache(batch.inputs, n_loops=n, names_filter="hook_state_post")
        parts.append((cache.stack("hook_state_post"), batch.inputs[:, 1 : n + 1]))
    places = torch.arange(n)
    found = {}
    for loop in (t for t in PATH if t < n):
        (states, labels), (held_out, asked) = (
            (x[loop - 1][:, 1 + places + loop].flatten(0, 1), y.flatten()) for x, y in parts
        )
        found[str(loop)] = spread(states, labels, held_out, asked, task.n_answer_symbols)
    return found


def spread(
    states: Tensor, labels: Tensor, held_out: Tensor, asked: Tensor, n_classes: int
) -> dict[str, float]:
    """The share of variance within classes, and how often the nearest class mean is right.

    Shapes: ``states`` and ``held_out`` ``[example, feature]``, labels ``[example]``.
    """
    counts = torch.bincount(labels, minlength=n_classes)[:, None]
    means = torch.zeros(n_classes, states.shape[1]).index_add_(0, labels, states) / counts
    within = (states - means[labels]).pow(2).sum(1).mean()
    total = (states - states.mean(0)).pow(2).sum(1).mean()
    nearest = torch.cdist(held_out, means.nan_to_num(math.inf)).argmin(1)
    return {
        "within": round(float(within / total), 4),
        "nearest": round(float((nearest == asked).float().mean()), 4),
    }


def cells_right(
    model: Any, task: Any, n: int, *, hard: bool, samples: int = 200
) -> dict[str, float]:
    """Answers wholly right, and cells right, where attention in the loop may be made hard."""
    found = {}
    for distribution in ("few", "distinct"):
        batch = task.sample(n, batch_size=samples, distribution=distribution, seed=0)
        hooks = [(site, one_hot) for site in patterns_of_the_loop(model, n)] if hard else []
        with torch.no_grad():
            logits = model.run_with_hooks(batch.inputs, n_loops=n, fwd_hooks=hooks)
        right = (logits.argmax(-1) == batch.targets)[:, n + 1 :]
        found[distribution] = round(float(right.all(1).float().mean()), 4)
        found[f"{distribution}, cells"] = round(float(right.float().mean()), 4)
    return found


def patterns_of_the_loop(model: Any, n_loops: int) -> list[str]:
    """Sites of the attention patterns of all loops, without the prelude's."""
    return model.addresses(n_loops).select("pattern", loops=slice(None))


def one_hot(pattern: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(pattern).scatter_(-1, pattern.argmax(-1, keepdim=True), 1.0)


# -- multiplication ---------------------------------------------------------------------------


def products(model: Any, task: Any, cutoff: int) -> dict[str, Any]:
    """Wrong places by first factor, places written by loop, and from where a place is read."""
    return {
        "wrong": {
            str(n): {a: wrong_places(model, task, n, a, cutoff) for a in PRODUCTS}
            for n in (cutoff, 2 * cutoff)
        },
        "written": written(model, task, 2 * cutoff),
        "read": {str(n): reading(model, task, n, cutoff) for n in (cutoff, 2 * cutoff)},
    }


def factor(task: Any, n: int, first: str, samples: int) -> tuple[Batch, int]:
    """Products of one first factor and fair bits, and the bits of the first factor."""
    m, bits = PRODUCTS[first]
    b = torch.randint(0, 2, (samples, n), generator=torch.Generator().manual_seed(0))
    a = torch.tensor(bits).expand(samples, 2)
    return task.from_bits(a, b, torch.full((samples,), m), torch.full((samples,), n)), m


def wrong_places(
    model: Any, task: Any, n: int, first: str, cutoff: int, samples: int = 200
) -> dict[str, float | None]:
    """:func:`where_wrong` of products of one first factor."""
    batch, m = factor(task, n, first, samples)
    predictions, targets = answers(model, task, batch)
    more, _ = answers(model, task, batch, more_loops=4)
    return where_wrong(predictions, more, targets, places=n + m, cutoff=cutoff, n=n)


def where_wrong(
    predictions: Tensor, more: Tensor, targets: Tensor, *, places: int, cutoff: int, n: int
) -> dict[str, float | None]:
    """Shares wrong: answers, places below the cutoff and from it on, and end marks.

    ``differs`` and ``equal`` are shares of places from half the cutoff on, by whether the bit is
    another than that of the place before. ``more`` are predictions after four loops more.
    """
    wrong = predictions != targets
    late = torch.arange(cutoff // 2, n)
    differs = targets[:, late] != targets[:, late - 1]
    return {
        "wrong": share(wrong.any(1)),
        "low": share(wrong[:, :cutoff]),
        "high": share(wrong[:, cutoff:places]),
        "end": share(wrong[:, places]),
        "end after 4 more loops": share((more != targets)[:, places]),
        "low after 4 more loops": share((more != targets)[:, :cutoff]),
        "differs": share(wrong[:, late][differs]),
        "equal": share(wrong[:, late][~differs]),
    }


def share(values: Tensor) -> float | None:
    """The share of True; None of no values."""
    return round(float(values.float().mean()), 4) if values.numel() else None


def written(model: Any, task: Any, n: int, samples: int = 200) -> dict[str, int]:
    """By number of loops: how many places, from the least significant, are right in 95%."""
    batch, _ = factor(task, n, "2", samples)
    found = {}
    for loops in (n // 4, n // 2, 3 * n // 4, n):
        predictions, targets = answers(model, task, batch, loops=loops)
        right = (predictions == targets).float().mean(0) >= 0.95
        found[str(loops)] = int(right.long().cumprod(0).sum())
    return found


def reading(model: Any, task: Any, n: int, cutoff: int, samples: int = 40) -> dict[str, float]:
    """Attention of the block's last layer from place k of the answer to bits of b.

    With the first factor 2, place k is bit k - 1 of b. For each place the attention to a bit is
    the mean over examples, at the loop and head without a window where it is greatest; given are
    means over the places below the cutoff and from it on. Controls are the bits beside it.
    """
    batch, m = factor(task, n, "2", samples)
    loops = int(fit_to_model(model, replace(batch, task=task)).n_loops.max())
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.inputs, n_loops=loops, names_filter="pattern")
    patterns = cache.stack("attn.hook_pattern").mean(1)  # [loop, head, query, key]
    patterns = patterns[:, model.config.windowed_heads or 0 :].amax((0, 1))
    return read_from(patterns, first_bit=m + 2, equals=n + m + 2, n=n, cutoff=cutoff)


def read_from(
    pattern: Tensor, *, first_bit: int, equals: int, n: int, cutoff: int
) -> dict[str, float]:
    """Means over places of the attention ``[query, key]`` to the right bit, and to those beside."""
    found = {}
    for name, offset in (("right", -1), ("before", -2), ("behind", 0)):
        for part, places in (("low", range(2, cutoff)), ("high", range(cutoff, n))):
            values = [float(pattern[equals + k, first_bit + k + offset]) for k in places]
            if values:
                found[f"{name}, {part}"] = round(sum(values) / len(values), 4)
    return found


# -- the page ---------------------------------------------------------------------------------


def tables(stored: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    rows = stored["measured"]
    of = {task: {k: x for k, x in rows.items() if x["task"] == task} for task in ZOO}
    set_of_symbols = [x["symbols"] for x in of["unique_set"].values()]
    return {
        "six-tasks-five-times": table(
            ["model", "task", "seed", "trained to", *(f"{k} times" for k in TIMES), "samples"],
            [*exact_rows(rows), *given_rows(stored["given"])],
        ),
        "ones": table(
            ["model", "bits", *(f"{a} to {b} ones" for a, b in ONES)],
            ones_rows(of["binary_sum"]),
        ),
        "places": table(
            ["model", "ones", *(f"place {k}" for k in range(6))], place_rows(of["binary_sum"])
        ),
        "wrong-symbols": table(
            ["length", "distribution", "symbols asked", "wrong", "of the prompt", "by chance"],
            [
                [n, d, *(x[key] for key in ("cells", "wrong", "of the prompt", "chance"))]
                for each in set_of_symbols
                for n, by_distribution in each["wrong"].items()
                for d, x in by_distribution.items()
            ],
        ),
        "path": table(
            ["after loop", "variance within symbols", "nearest mean is right"],
            [
                [loop, decimals(x["within"]), decimals(x["nearest"])]
                for each in set_of_symbols
                for loop, x in each["path"].items()
            ],
        ),
        "products": table(
            [
                *("model", "n", "first factor", "answers wrong", "places below 12", "from 12"),
                *("end", "bit differs", "bit equal"),
            ],
            [
                [name, n, a, *(decimals(x[key]) for key in WRONG)]
                for name, each in of["multiplication"].items()
                for n, by_factor in each["products"]["wrong"].items()
                for a, x in by_factor.items()
                if n != str(each["cutoff"])
            ],
        ),
        "written": table(
            [
                *("model", *(f"{k} loops" for k in (6, 12, 18, 24))),
                "right bit at 12 bits",
                *("right, below 12", "right, from 12", "before, below 12", "before, from 12"),
            ],
            [
                [name, *each["products"]["written"].values(), *read_row(each["products"]["read"])]
                for name, each in of["multiplication"].items()
            ],
        ),
    }


WRONG = ("wrong", "low", "high", "end", "differs", "equal")


def exact_rows(rows: dict[str, Any]) -> Iterable[list[object]]:
    """Exact match on the lowest distribution, by multiple of the training length."""
    for name, x in rows.items():
        lengths = [str(math.ceil(k * x["cutoff"])) for k in TIMES]
        shares = [decimals(lowest(x["exact"][n])) if n in x["exact"] else "" for n in lengths]
        samples = x["samples_at_five"] or SAMPLES
        yield [name, x["task"], x["seed"], x["cutoff"], *shares, samples]


def given_rows(given: list[dict[str, Any]]) -> Iterable[list[object]]:
    """Rows measured elsewhere: ``{name, task, seed, cutoff, exact, samples}``."""
    for x in given:
        yield from exact_rows({x["name"]: x | {"samples_at_five": x["samples"]}})


def ones_rows(rows: dict[str, Any]) -> Iterable[list[object]]:
    """The share of right answers, by length and number of ones."""
    for name, x in rows.items():
        for n, groups in x["counter"].items():
            cells = (groups.get(f"{a}-{b}") for a, b in ONES)
            yield [name, n, *(decimals(cell and cell["answers"]) for cell in cells)]


def place_rows(rows: dict[str, Any]) -> Iterable[list[object]]:
    """The share of right bits by place and number of ones, among the second length's bits."""
    for name, x in rows.items():
        for ones, cell in x["counter"][str(COUNTED[1])].items():
            yield [name, ones.replace("-", " to "), *map(decimals, cell["places"])]


def read_row(read: dict[str, dict[str, float]]) -> list[str]:
    short, long = read.values()
    parts = ("right, low", "right, high", "before, low", "before, high")
    return [*map(decimals, (short["right, low"], *(long[part] for part in parts)))]


def decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
