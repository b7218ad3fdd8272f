from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from analyses import settled_but_wrong
from analyses.settled_but_wrong import FILE, longest_run, properties, telling
from analyses.tables_in_pages import RESULTS
from loopinterp.dynamics import FATES
from loopinterp.tasks import Addition, Parity, get_task

STORED = pd.read_csv(RESULTS / FILE)


def test_every_example_has_one_fate() -> None:
    np.testing.assert_allclose(STORED[list(FATES)].sum(axis="columns"), 1, atol=1e-3)


def test_a_model_on_a_cycle_moves_on_and_is_right() -> None:
    rows = settled_but_wrong.measure("prefix_sum", [1], 4).to_dict(orient="records")
    assert {row["distribution"] for row in rows} == {*get_task("prefix_sum").distributions}
    uniform = next(row for row in rows if row["distribution"] == "uniform")
    # It ends on a cycle of two loops.
    assert uniform["samples"] == 4 and uniform["moves on, right"] == 1


def test_the_longest_way_of_a_carry_is_told() -> None:
    # 1 + 1, then three pairs that hand the carry on, and one that ends it.
    batch = Addition().encode([(0b01111, 0b00001), (0b10101, 0b01010)], n=5)
    by_name = properties(Addition(), batch)
    name = "longest way of a carry"
    assert by_name[name].tolist() == [3, 0]
    assert longest_run([1, 1, 0, 0, 0, 1]) == 3 and longest_run([1, 1, 0], of=0) == 1


def test_what_separates_wrong_from_right_is_named_where_there_are_enough_of_both() -> None:
    task = Parity()
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(8, batch_size=40, generator=generator, distribution="uniform")
    expected = "longest run in the input"
    runs = properties(task, batch)[expected]
    name, area = telling(task, batch, runs > np.median(runs))
    assert (name, area) == (expected, 1.0)
    assert telling(task, batch, np.arange(40) < 4)[0] == ""
