"""Which examples are chosen, of runs that are written down."""

from __future__ import annotations

import torch

from loopinterp.explorer.interesting_examples import Chosen, choose

ASKED = torch.ones(6, 2, dtype=torch.bool)


def right(*runs: str) -> torch.Tensor:
    """[loop, example, pos] from a word for each example: how many of two are right, by loop."""
    rows = [[[int(k) > 0, int(k) > 1] for k in run] for run in runs]
    return torch.tensor(rows).transpose(0, 1)


RUNS = right("0222", "0001", "0021", "0002", "0222", "1111")


def chosen(most: int, **settled: list[int]) -> list[Chosen]:
    loops = {name: torch.tensor(values) for name, values in settled.items()}
    return choose(RUNS, ASKED, loops, most, torch.Generator().manual_seed(0))


def test_one_of_each_kind_is_chosen_and_says_why() -> None:
    found = chosen(6, quick=[1, 1, 1, 1, 1, 1], slow=[2, 1, 1, 1, 3, 1])
    assert [(one.row, one.reason) for one in found[:4]] == [
        (2, "wrong after right"),
        (1, "wrong"),
        (3, "right last"),
        (4, "long chain"),
    ]
    assert "all of its answers are right after loop 2, 1 is wrong" in found[0].detail
    assert "1 of 2 answers" in found[1].detail and "from loop 3 on" in found[2].detail
    assert "slow has its whole answer only after loop 3" in found[3].detail


def test_none_is_chosen_twice_and_a_quarter_is_drawn_at_random() -> None:
    for most in range(1, 7):
        found = chosen(most)
        assert len({one.row for one in found}) == len(found) == most
        if most >= 4:
            assert sum(one.reason == "drawn at random" for one in found) >= most // 4


def test_where_nothing_is_interesting_all_are_drawn_and_no_more_than_there_are() -> None:
    plain = torch.ones(3, 2, 2, dtype=torch.bool)
    found = choose(plain, ASKED[:2], {}, 8, torch.Generator().manual_seed(0))
    assert sorted(one.row for one in found) == [0, 1]
    assert {one.reason for one in found} == {"drawn at random"}


def test_what_is_as_late_as_another_is_not_called_later() -> None:
    generator = torch.Generator().manual_seed(0)
    alike = choose(right("002", "002", "022"), ASKED[:3], {}, 3, generator)
    assert [one.detail.split(", ")[-1] for one in alike[:2]] == ["among the last."] * 2
    one = choose(right("002", "022", "022"), ASKED[:3], {}, 3, generator)[0]
    assert (one.row, one.detail.split(", ")[-1]) == (0, "later than in the other examples.")
    equal = {"program": torch.tensor([2, 2, 2])}
    found = choose(right("222", "222", "222"), ASKED[:3], equal, 3, generator)
    assert {one.reason for one in found} == {"drawn at random"}  # no chain is longer than another
