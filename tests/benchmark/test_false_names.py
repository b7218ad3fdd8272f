"""False names: a near miss is never taken for the program it nearly is."""

from __future__ import annotations

from functools import partial

import pytest

from loopinterp.benchmark import FalseNames, false_names_study, ground_truth
from loopinterp.compiler import rotate
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.programs import list_programs
from tests.small_studies import name_on_few_pairs

BARE, ROTATED = ("bare", []), ("rotated", [partial(rotate, seed=0)])


@pytest.fixture(scope="module", autouse=True)
def short_studies():
    """Short inputs, and a twelfth of the pairs with which a program is named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ground_truth, "LENGTHS", {"addition": 4, "prefix_sum": 4})
        name_on_few_pairs(patch, ground_truth, 512)
        yield


@pytest.fixture(scope="module")
def result():
    # Disguised models answer as bare ones do (tests/compiler/test_disguises.py): one is enough.
    return false_names_study(["prefix_xor", "ripple"], misses_of_each=1, disguises=[ROTATED])


def test_no_wrong_program_is_named(result):
    assert result.wrong_names == []
    assert int(result.data["wrong"].sum()) == 0


def test_stock_programs_are_named_where_they_are_listed(result):
    stock = [p == o for p, o in zip(result.programs, result.originals)]
    assert sum(stock) == 2
    assert (result.data["named"].values[stock] == 1).all()
    assert result.data["named"].isnull().sum() == len(stock) - 2


def test_every_model_is_held_against_every_leave_one_out_list(result):
    lists = dict(zip(result.programs, result.data["lists"].values.tolist()))
    assert lists["prefix_xor"] == 0  # it is the only program that reads these tokens
    rivals = len(list_programs("addition")) - 1
    assert lists["ripple"] == 1 + rivals
    (miss,) = [p for p in result.programs if p.startswith("ripple,")]
    assert lists[miss] == 1 + rivals + 1  # the original is one of its rivals


def test_counts_by_task(result):
    totals = result.totals()
    assert set(totals) == {"prefix_sum", "addition"}
    assert totals["addition"]["near misses"] == 1
    assert totals["addition"]["models"] == 2


def test_every_disguise_of_a_program_is_a_model():
    result = false_names_study(["prefix_xor"], misses_of_each=0, disguises=[BARE, ROTATED])
    assert result.disguises == ["bare", "rotated"]
    assert result.data["named"].sum() == 2
    assert result.totals()["prefix_sum"] == {
        "near misses": 0,
        "models": 2,
        "lists": result.data["lists"].sum(),
        "wrong names": 0,
        "rarely apart": 0,
        "equivalent names": 0,
        "named when listed": 2,
    }


def test_it_is_read_back(result, tmp_path):
    again = load_result(result.save(tmp_path))
    assert isinstance(again, FalseNames)
    assert again.data.equals(result.data)
    assert again.programs == result.programs


def test_a_name_in_place_of_a_list_of_programs_is_refused():
    with pytest.raises(InputError) as caught:
        false_names_study("ripple")
    assert caught.value.what == "programs"
