"""A trained ALBERT, PL-BERT of Kokoro-82M, run past its 12 loops: does it converge, and what turns?

    python -m analyses.trained_albert orbits --every 1     # trained, shuffled and random weights
    python -m analyses.trained_albert turns                # the phase of the first 40 loops
    python -m analyses.trained_albert parts                # sites, and states with heads ablated
    python -m analyses.trained_albert shifts                # does a perturbation shift the phase?
    python -m analyses.trained_albert probes               # phoneme identity at each loop
    python -m analyses.trained_albert export               # beside onnxruntime on the export
    python -m analyses.trained_albert page                 # the tables of the page, from the files

Needs the extra ``kokoro``. Each part writes analyses/results/albert_PART.csv. The sentences, of ten
plays of Shakespeare, were put into phonemes by eSpeak NG (analyses/results/kokoro_sentences.csv).
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.adapters import adapt, albert, load_published, phoneme_tokens
from loopinterp.dynamics import Rotation, find_rotation, lag_distance, relative_residual, run_loops
from loopinterp.figures import Series, line_figure
from loopinterp.models import bind
from loopinterp.probing import probe_study, with_random_weights

LAST, KEPT = 300, 150  # loops of a run; the orbit is what comes after the second number
AHEAD = (100, 300)  # loops after a change between which its phase is measured
PROBED = (0, 2, 5, 8, 11, 12, 15, 19, 23)  # loops of the table, from 0 on
SITES = ("hook_attn_out", "ln1_post.hook_normalized", "hook_mlp_out", "ln2_post.hook_normalized")


def texts(every: int) -> list[Tensor]:
    phonemes = pd.read_csv(RESULTS / "kokoro_sentences.csv")["phonemes"]
    return [phoneme_tokens(text) for text in phonemes[::every]]


def of(rotation: Rotation) -> dict[str, float]:
    """Period, share of the variance explained, and the share common to all positions."""
    first = rotation.amplitudes[0, 0]  # [pos, d_model]
    common = len(first) * first.mean(0).norm() ** 2 / first.norm() ** 2
    together = torch.exp(1j * rotation.phase()).mean().abs()
    return {"period": rotation.period, "explained": rotation.explained,
            "common": float(common), "coherence": float(together)}  # fmt: skip


def orbits(every: int) -> pd.DataFrame:
    trained, rows = load_published("kokoro-plbert"), []
    torch.manual_seed(0)
    untrained = adapt(type(trained.published)(trained.published.config).eval())
    shuffled = {f"shuffled {seed}": with_random_weights(trained, seed=seed) for seed in range(3)}
    for name, model in {"trained": trained, **shuffled, "untrained": untrained}.items():
        for k, tokens in enumerate(texts(every if name == "trained" else 12)):
            states = run_loops(bind(model, tokens), LAST)
            steps = relative_residual(states).mean((1, 2))
            lags = lag_distance(states[LAST - 100 :], 12).mean((1, 2))
            moves = {f"step {t}": float(steps[t - 1]) for t in (1, 6, 12, 24, 60, LAST)}
            back = {f"lag {p}": float(lags[p - 1]) for p in range(1, 13)}
            late = states[KEPT:]
            rows.append({"model": name, "text": k, "positions": tokens.shape[1], **moves, **back,
                         "swing": swing(late), **of(find_rotation(late))})  # fmt: skip
    return pd.DataFrame(rows)


def turns(every: int) -> pd.DataFrame:
    """Phase of the first loops in the plane in which late states turn together."""
    model, rows = load_published("kokoro-plbert"), []
    for k, tokens in enumerate(texts(every)):
        states = run_loops(bind(model, tokens), LAST)[:, 0].mean(1)  # [loop, d_model]
        late = find_rotation(states[KEPT:])
        plane = torch.stack((late.amplitudes[0].real, -late.amplitudes[0].imag), -1)
        at = torch.complex(*(torch.linalg.pinv(plane) @ (states - late.mean).T.double()))
        advance = (at[1:] / at[:-1]).angle() / (2 * math.pi)
        rows += [{"text": k, "loop": t + 1, "advance": float(advance[t])} for t in range(40)]
    return pd.DataFrame(rows)


def parts(every: int) -> pd.DataFrame:
    """Rotation at each site, and of the state with one head, or all attention, set to zero."""
    model, rows = load_published("kokoro-plbert"), []
    silenced = {"none": [], **{f"head {k}": [k] for k in range(12)}, "all heads": [*range(12)]}
    keep = torch.ones(len(silenced), 12)
    for row, heads in zip(keep, silenced.values()):
        row[heads] = 0
    hooks = [
        (lambda name: name.endswith("attn.hook_z"), lambda z, hook: z * keep[:, None, :, None])
    ]
    for k, tokens in enumerate(texts(every)):
        _, cache = model.run_with_cache(
            tokens, n_loops=LAST, names_filter=SITES, loops=range(KEPT, LAST)
        )
        for site in SITES:
            rows.append({"text": k, "part": site, **of(find_rotation(cache.stack(site)))})
        states = model.run_with_hooks(
            tokens.expand(len(keep), -1), n_loops=LAST, fwd_hooks=hooks, return_type="states"
        )
        for part, late in zip(silenced, states[KEPT:].unbind(1)):
            rows.append(
                {"text": k, "part": part, "swing": swing(late), **of(find_rotation(late[:, None]))}
            )
    return pd.DataFrame(rows)


def shifts(every: int) -> pd.DataFrame:
    """The phase in loops AHEAD after a change of the state, against the run without it."""
    model, rows = load_published("kokoro-plbert"), []
    generator = torch.Generator().manual_seed(0)
    for k, tokens in enumerate(texts(every)):
        states = run_loops(bind(model, tokens), LAST)[:, 0]  # [loop, pos, d_model]
        h, step = states[LAST - 10], (states[LAST - 10] - states[LAST - 11]).norm(dim=-1)[:, None]
        noise = torch.nn.functional.normalize(torch.randn(h.shape, generator=generator), dim=-1)
        starts = {"none 0": h, **{f"noise {x}": h + x * step * noise for x in (0.1, 1.0, 2.0)}}
        for ahead in (1, 2, 3, 4):
            later = states[LAST - 10 + ahead]
            starts[f"mean {ahead}"] = h + later.mean(0) - h.mean(0)  # the rest stays
            starts[f"rest {ahead}"] = later + h.mean(0) - later.mean(0)  # the mean stays
            starts[f"all {ahead}"] = later
        runs = model(tokens.expand(len(starts), -1), n_loops=LAST + AHEAD[1], start_at_loop=LAST,
                     state=torch.stack([*starts.values()]), return_type="states")  # fmt: skip
        late = runs[AHEAD[0] + 1 :].unbind(1)
        period = find_rotation(late[0]).period
        turn = torch.exp(-2j * math.pi / period * torch.arange(len(late[0])))
        first, *_ = waves = [((x - x.mean(0)).flatten(1).T + 0j) @ turn for x in late]
        for name, wave in zip(starts, waves):
            inner, (change, size) = first.conj() @ wave, name.split()
            same = float(inner.abs() / (first.norm() * wave.norm()))
            rows.append({"text": k, "change": change, "size": float(size), "period": period,
                         "shift": float(inner.angle()) / (2 * math.pi), "same": same})  # fmt: skip
    return pd.DataFrame(rows)


def probes(every: int) -> pd.DataFrame:
    """Accuracy of linear probes for the phoneme at a position and its neighbours."""
    model = load_published("kokoro-plbert")
    tokens = torch.cat([x[:, :40] for x in texts(every) if x.shape[1] >= 40])
    edge = torch.full_like(tokens[:, :1], -100)
    targets = {
        "this": tokens,
        "before": torch.cat((edge, tokens[:, :-1]), 1),
        "after": torch.cat((tokens[:, 1:], edge), 1),
    }
    result = probe_study(model, tokens, targets, n_loops=24)
    return (
        result.data[["accuracy", "control_task", "random_model", "embedding", "majority"]]
        .to_dataframe()
        .reset_index()
    )


def export(every: int) -> pd.DataFrame:
    """Largest relative difference from the states of onnxruntime, over three texts, by loop."""
    from tests.adapters import test_kokoro as exported

    model, graph = load_published(albert.PLBERT), albert.read_export()
    rows = []
    for arithmetic, nodes in (("float", exported.in_float(graph)), ("8 bits", list(graph.node))):
        session = exported.session_of(graph, nodes)
        tokens = {text: phoneme_tokens(text) for text in exported.TEXTS}
        runs = {text: exported.run_of(session, each) for text, each in tokens.items()}
        whole = []
        for text, states in runs.items():
            gap = model(tokens[text], return_type="states")[1:, 0] - states[1:]  # [loop, pos, …]
            whole.append(gap.norm(dim=(1, 2)) / states[1:].norm(dim=(1, 2)))
        measured = {"all loops so far": torch.stack(whole)}
        measured["this loop"] = exported.loops_apart(model, runs)
        for of, errors in measured.items():
            largest = [f"{x:.0e}" if x < 1e-3 else f"{x:.1%}" for x in errors.amax(0).tolist()]
            loops = {f"loop {t}": x for t, x in enumerate(largest, 1)}
            rows.append({"export in": arithmetic, "difference of": of, **loops})
    return pd.DataFrame(rows)


def swing(states: Tensor) -> float:
    """How far states move about their mean, against their size."""
    return float((states - states.mean(0)).norm() / states.norm())


def table_of_orbits(found: pd.DataFrame) -> str:
    rows = []
    for model, each in found.groupby(found["model"].str.split().str[0], sort=False):
        moving = pd.DataFrame(each[each[f"step {LAST}"] > 1e-3])
        steps = [f"{each[x].mean():.2f}" for x in ("step 12", f"step {LAST}", "lag 2", "lag 5")]
        late = ["–"] * 3
        if len(moving) > len(each) / 2:
            low, mid, high = np.quantile(moving["period"], (0.1, 0.5, 0.9))
            late = [f"{mid:.2f} ({low:.2f} to {high:.2f})"]
            late += [f"{moving[x].mean():.2f}" for x in ("explained", "coherence")]
        rows.append([model, len(each), len(each) - len(moving), *steps, *late])
    head = ["weights", "runs", "converged", "step at loop 12", f"at loop {LAST}"]
    head += ["distance 2 loops apart", "5 loops apart", "period (80% of runs)"]
    return table([*head, "explained", "positions in phase"], rows)


def table_of_parts(found: pd.DataFrame) -> str:
    turns_at_five = (found["explained"] > 0.5) & found["period"].between(4, 6)
    rows = []
    for part, each in found.assign(turns=turns_at_five).groupby("part", sort=False):
        middle = [f"{each[x].median():.2f}" for x in ("period", "explained", "swing")]
        name = f"`{part}`" if part in SITES else part
        rows.append([name, *(x.replace("nan", "–") for x in middle), f"{each['turns'].mean():.0%}"])
    return table(["part", "period", "explained", "swing", "texts that turn"], rows)


def table_of_shifts(found: pd.DataFrame) -> str:
    found = found[found["change"] != "none"].copy()
    ahead = (found["size"] / found["period"]).where(found["change"] != "noise", 0)
    for name, target in (("kept", 0), ("taken", ahead)):
        away = (found["shift"] - target + 0.5) % 1 - 0.5
        found[name] = (away.abs() < 0.05) & (found["same"] > 0.9)
    rows = []
    for (change, size), each in found.groupby(["change", "size"], sort=False):
        shares = [f"{each[x].mean():.0%}" for x in ("kept", "taken")]
        rows.append([change, size, len(each), f"{each['same'].median():.2f}", *shares])
    head = ["change", "size", "texts", "same orbit", "phase kept", "phase of the later state"]
    return table(head, rows)


def table_of_probes(found: pd.DataFrame) -> str:
    by_loop, rows = found.set_index(["target", "loop"]), []
    for target in ("this", "before", "after"):
        shares = [by_loop.loc[(target, t), "accuracy"] for t in PROBED]
        controls = ("embedding", "random_model", "majority")
        shares += [by_loop.loc[target, name].max() for name in controls]
        rows.append([target, *(f"{x:.2f}" for x in shares)])
    names = [f"loop {t + 1}" for t in PROBED]
    return table(["phoneme", *names, "embedding", "shuffled weights", "majority"], rows)


def table_of_export(found: pd.DataFrame) -> str:
    """The rows as they are."""
    return table([*found.columns], found.astype(str).values.tolist())


def tables() -> dict[str, str]:
    """The tables of docs/results/trained-albert.md, from the files."""
    return {
        part: made(pd.read_csv(RESULTS / f"albert_{part}.csv")) for part, made in TABLES.items()
    }


def picture() -> bytes:
    """Distance of late states by the loops between them, as PNG; bands hold 80% of the texts."""
    orbit = pd.read_csv(RESULTS / "albert_orbits.csv")
    orbit["model"] = orbit["model"].str.split().str[0]
    lags, lines = range(1, 13), []
    for model, each in orbit.groupby("model", sort=False):
        apart = each[[f"lag {p}" for p in lags]].to_numpy()
        low, high = np.quantile(apart, (0.1, 0.9), axis=0)
        style = {"low": low, "high": high, "control": model == "shuffled"}
        lines.append(Series(f"{model} weights", lags, apart.mean(0), **style))
    figure = line_figure(lines, x_title="loops apart", y_title="relative distance of states")
    with StillPictures() as pictures:
        return pictures.draw(figure, width=760, height=400)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "page"])
    parser.add_argument("--every", type=int, default=1, help="take every so manieth sentence")
    args = parser.parse_args()
    if args.part == "page":
        rewrite(PAGES / "results/trained-albert.md", tables())
        (PAGES / "pictures" / "trained-albert.png").write_bytes(picture())
        return
    with torch.no_grad():
        PARTS[args.part](args.every).to_csv(
            RESULTS / f"albert_{args.part}.csv", index=False, float_format="%.4f"
        )


TABLES = {
    "orbits": table_of_orbits,
    "parts": table_of_parts,
    "shifts": table_of_shifts,
    "probes": table_of_probes,
    "export": table_of_export,
}
PARTS = {"orbits": orbits, "turns": turns, "parts": parts, "shifts": shifts, "probes": probes,
         "export": export}  # fmt: skip

if __name__ == "__main__":
    main()
