"""Six tasks at five times their training length: the measures, on cases made by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from analyses import five_times
from analyses.five_times import (
    FILE,
    SAMPLES,
    ZOO,
    by_ones,
    curve,
    exact_rows,
    factor,
    kinds_of_wrong,
    one_hot,
    path_of_symbols,
    patterns_of_the_loop,
    read_from,
    spread,
    tables,
    where_wrong,
)
from analyses.tables_in_pages import PAGES, put
from loopinterp.tasks import Multiplication, UniqueSet
from loopinterp.zoo import load_pretrained

PAGE = PAGES / "results" / "five-times.md"


def test_the_page_is_what_is_stored() -> None:
    page = PAGE.read_text()
    stored: dict[str, Any] = json.loads(FILE.read_text())
    assert put(page, tables(stored)) == page
    assert {*ZOO} <= {*stored["measured"]}


def test_rows_measured_elsewhere_stand_beside_ours() -> None:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    shares = {"60": {"uniform": 0.941, "chain": 1.0}}
    row = {"name": "given-4", "task": "token_addition", "seed": 4, "cutoff": 12}
    stored["given"] = [row | {"exact": shares, "samples": 1000}]
    lines = tables(stored)["six-tasks-five-times"].splitlines()
    [line] = [x for x in lines if "given-4" in x]
    cells = [x.strip() for x in line.strip("|").split("|")]
    assert cells[-2:] == ["0.941", "1000"] and not any(cells[4:-2])


@pytest.mark.parametrize(
    ("reach", "lengths", "samples"),
    [
        (99, [10, 50], 1000),  # right everywhere: nothing between
        (20, [10, 15, 20, 30], None),  # stops at the first length where nothing is right
        (40, [10, 15, 20, 30, 40, 50], SAMPLES),
        (5, [10], None),
    ],
)
def test_a_curve_stops_where_nothing_is_right(
    monkeypatch: pytest.MonkeyPatch, reach: int, lengths: list[int], samples: int | None
) -> None:
    def exact_match(model: Any, task: Any, length: int, n: int) -> dict[str, float]:
        return {"easy": 1.0, "hard": float(length <= reach)}

    monkeypatch.setattr(five_times, "exact_match", exact_match)
    found, many = curve(None, None, 10, many_samples=1000)
    assert [*found] == [str(n) for n in lengths] and many == samples


def test_a_place_that_fails_beyond_some_ones_is_seen_to() -> None:
    ones = torch.arange(33).repeat(4)
    limit = torch.tensor([99, 99, 19, 99, 31, 99])
    rows = by_ones(ones[:, None] <= limit, ones)
    assert [*rows] == ["0-12", "13-19", "20-27", "28-32"]
    assert sum(row["examples"] for row in rows.values()) == len(ones)
    assert rows["13-19"]["answers"] == 1 and rows["20-27"]["answers"] == 0
    assert rows["28-32"]["places"] == [1, 1, 0, 1, 0.8, 1]


def test_wrong_symbols_are_told_apart() -> None:
    prompt = torch.tensor([[3, 1, 4, 1]])
    targets = torch.tensor([[3, 1, 4, 9, 9]])  # 9 is the end mark
    kinds = {(7, 1, 4): (0, 0, 0), (1, 1, 4): (1, 0, 1), (9, 1, 4): (0, 1, 0), (3, 1, 4): None}
    for symbols, expected in kinds.items():
        predictions = torch.tensor([[*symbols, 9, 9]])
        found = kinds_of_wrong(predictions, targets, prompt, 9)
        assert found["cells"] == 3 and found["wrong"] == (expected is not None)
        if expected is not None:
            assert (found["of the prompt"], found["end"], found["next"]) == expected
            assert found["chance"] == pytest.approx(2 / 8, abs=0.05)


def test_variance_within_classes_against_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat(500)
    means = 3 * torch.eye(8)
    states = means[labels] + torch.randn(len(labels), 8, generator=generator)
    within, between = 8.0, 9 * 7 / 8  # of unit noise in 8 directions; of the means
    found = spread(states, labels, means, torch.arange(8), 8)
    assert found["within"] == pytest.approx(within / (within + between), abs=0.01)
    assert found["nearest"] == 1


@pytest.mark.parametrize("speed", [1, 0])
def test_states_are_followed_at_one_position_a_loop(speed: int) -> None:
    """A model that moves each symbol: its states have no spread only along the right path."""
    task, n = UniqueSet(n_symbols=20), 12

    class Mover:
        def run_with_cache(self, inputs: torch.Tensor, n_loops: int, **_: Any) -> Any:
            states = []
            for t in range(1, n_loops + 1):
                state = torch.nn.functional.one_hot(inputs, task.d_vocab).float()
                states.append(state.roll(speed * t, dims=1))
            return None, SimpleNamespace(stack=lambda site: torch.stack(states))

    found = path_of_symbols(Mover(), task, n, samples=(400, 50))["8"]
    assert (found["within"] == 0 and found["nearest"] == 1) == (speed == 1)
    if speed == 0:
        assert found["within"] > 0.9 and found["nearest"] < 0.5


def test_hard_attention_is_put_into_the_loop_alone() -> None:
    in_loops = patterns_of_the_loop(load_pretrained("unique_set"), 5)  # one prelude layer
    sites = [f"blocks.{k}.attn.hook_pattern" for k in (0, 1, 10)]
    assert [site in in_loops for site in sites] == [False, True, True]
    assert "blocks.1.attn.hook_z" not in in_loops and len(in_loops) == 10
    pattern = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.4, 0.0]])
    assert one_hot(pattern, None).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_bit_copied_from_the_place_before_is_wrong_only_where_it_differs() -> None:
    targets = torch.randint(0, 2, (50, 27), generator=torch.Generator().manual_seed(0))
    targets[:, 26] = 2
    copied = targets.clone()
    copied[:, 15:24] = targets[:, 14:23]
    more = copied.clone()
    more[:, 26] = 0
    found = where_wrong(copied, more, targets, places=26, cutoff=12, n=24)
    assert found["low"] == 0 and found["equal"] == 0 and found["end"] == 0
    assert found["differs"] == pytest.approx(9 / 18, abs=0.03)
    assert found["end after 4 more loops"] == 1 and found["low after 4 more loops"] == 0


@pytest.mark.parametrize(("first", "value"), [("1", 1), ("2", 2), ("3", 3)])
def test_products_of_one_first_factor(first: str, value: int) -> None:
    task = Multiplication()
    batch, m = factor(task, 6, first, 20)
    n, places = 6, 2 ** torch.arange(6 + m)
    b = (batch.inputs[:, m + 2 : m + 2 + n] * places[:n]).sum(1)
    answer = (batch.targets[:, n + m + 2 : 2 * (n + m) + 2] * places).sum(1)
    assert torch.equal(answer, value * b)


def test_reading_is_of_the_bit_that_the_place_copies() -> None:
    n, m, cutoff = 8, 2, 4
    first_bit, equals = m + 2, n + m + 2
    pattern = torch.zeros(equals + n + m + 1, equals + n + m + 1)
    for k in range(1, n):
        near = k < cutoff
        pattern[equals + k, first_bit + k - (1 if near else 2)] = 1.0
    found = read_from(pattern, first_bit=first_bit, equals=equals, n=n, cutoff=cutoff)
    assert (found["right, low"], found["before, low"]) == (1, 0)
    assert (found["right, high"], found["before, high"]) == (0, 1)


def test_exact_rows_give_the_lowest_distribution() -> None:
    exact = {"12": {"a": 1.0, "b": 0.99}, "18": {"a": 0.02, "b": 0.5}}
    row = {"task": "copy", "seed": 0, "cutoff": 12, "exact": exact, "samples_at_five": None}
    [found] = exact_rows({"m": row})
    assert found[4:] == ["0.990", "0.020", "", "", "", "", SAMPLES]
