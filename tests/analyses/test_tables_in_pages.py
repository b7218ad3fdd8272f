"""Tables go into their places, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyses.tables_in_pages import put, table
from loopinterp.core.errors import InputError

TEXT = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]))


def page(before: str, between: str, after: str) -> str:
    first = "<!-- table one, written by x.py -->\n"
    return f"{before}{first}{between}<!-- end of one -->{after}"


@given(before=TEXT, old=TEXT, after=TEXT, cells=st.lists(st.lists(TEXT, min_size=2, max_size=2)))
def test_only_what_is_between_the_comments_is_replaced(
    before: str, old: str, after: str, cells: list[list[str]]
) -> None:
    text = table(["a", "b"], cells)
    once = put(page(before, old, after), {"one": text})
    assert once == page(before, text + "\n", after)
    assert put(once, {"one": text}) == once


def test_a_table_without_a_place_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        put(page("", "", ""), {"two": ""})
    assert (caught.value.what, caught.value.given) == ("table two", "0")
    with pytest.raises(InputError) as caught:
        put(page("", "", "\n") * 2, {"one": ""})
    assert (caught.value.what, caught.value.given) == ("table one", "2")


def test_a_table_has_a_line_for_each_row() -> None:
    lines = table(["a", "b"], [[1, "x"], [2, "y"]]).split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows == [["a", "b"], ["---", "---"], ["1", "x"], ["2", "y"]]
    assert all(line[0] == line[-1] == "|" for line in lines)
