"""The script of a small Ouro's edges: how effects are sorted by loop, and the page."""

from __future__ import annotations

import pandas as pd
import pytest

from analyses import ouro_small_edges as script
from analyses.tables_in_pages import PAGES, RESULTS, put


def test_effects_of_a_tied_edge_are_sorted_by_the_loop_that_reads_it() -> None:
    edges = [
        ("input", "0:block.0.head.1.q", 0.4),
        ("input", "2:block.0.head.1.q", 0.1),
        ("0:block.1.mlp", "1:block.0.mlp", 0.2),
        ("0:block.1.mlp", "3:block.0.mlp", 0.3),
        ("1:block.1.mlp", "3:block.0.mlp", 0.3),
        ("3:block.1.mlp", "readout", 0.9),
    ]
    table = pd.DataFrame(edges, columns=["sender", "receiver", "size"])
    wide = script.by_loop(table)
    assert wide.index[0] == "1.mlp → readout" and wide.loc["1.mlp → readout", 4] == 0.9
    assert wide.loc["input → 0.head.1.q"].dropna().to_dict() == {1: 0.4, 3: 0.1}
    assert wide.loc["1.mlp → 0.mlp (1 loop later)"].dropna().to_dict() == {2: 0.2}
    late = wide.loc["1.mlp → 0.mlp (2 or 3 loops later)"].dropna().to_dict()
    assert late == {4: pytest.approx(0.6)}


def test_the_page_says_what_was_measured() -> None:
    text = (PAGES / script.PAGE).read_text()
    tables = script.as_tables(pd.read_csv(RESULTS / script.FILES[1]))
    assert put(text, tables) == text, "run python -m analyses.ouro_small_edges --page"
