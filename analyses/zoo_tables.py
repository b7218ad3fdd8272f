"""One table of all zoo models: kept as CSV, written into a page, one model anew at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd
import torch

from analyses.tables_in_pages import PAGES, RESULTS, rewrite
from loopinterp.models import LoopedTransformer
from loopinterp.models.study_examples import makes_one_loop
from loopinterp.zoo import list_pretrained, load_pretrained


def measure_zoo(
    about: str,
    measure: Callable[[str, Sequence[int], int], pd.DataFrame],
    as_table: Callable[[pd.DataFrame], str],
    *,
    file: str,
    page: str,
    table: str,
    times: Sequence[int],
    samples: int,
) -> None:
    """Run such a script: measure the models asked for, leave the others, write file and page.

    Args:
        about: What it measures, for ``--help``.
        measure: From a model's name, multiples of its training cutoff and a number of samples to
            the rows of the table, with a column ``model``.
        as_table: From all rows to the table of the page.
        file: Name of the CSV file.
        page: Name of the page.
        table: Name of the table in it.
        times: Multiples of the cutoff by default.
        samples: Samples by default.
    """
    names = looped_models()
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / page)
    parser.add_argument("--name", action="append", choices=names, help="Default: all.")
    parser.add_argument("--times", type=int, nargs="+", default=times, help="The cutoff.")
    parser.add_argument("--samples", type=int, default=samples)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = args.results / file
    known = pd.read_csv(kept) if kept.exists() else pd.DataFrame(columns=["model"])
    for name in args.name or names:
        found = measure(name, args.times, args.samples)
        others = known.query("model != @name and model in @names")
        known = pd.concat([others, found] if len(others) else [found])
        known = known.sort_values(by=["model"], kind="stable")
        args.results.mkdir(parents=True, exist_ok=True)
        known.to_csv(kept, index=False, float_format="%.4f")
        print(found.to_string(index=False), flush=True)
    rewrite(args.page, {table: as_table(pd.read_csv(kept))})
    print(args.page)


@cache
def looped_models() -> tuple[str, ...]:
    """Names of the zoo's looped transformers that make more than one loop."""
    models = {name: load_pretrained(name) for name in list_pretrained().index}
    return tuple(
        name
        for name, model in models.items()
        if isinstance(model, LoopedTransformer) and not makes_one_loop(model)
    )
