from __future__ import annotations

import pytest

from loopinterp.dynamics import Anderson, get_solver, list_solvers
from loopinterp.errors import InputError


def test_names_give_solvers_and_instances_are_kept() -> None:
    assert [type(get_solver(name)).__name__.lower() for name in list_solvers()] == [
        name.replace("-", "") for name in list_solvers()
    ]
    mine = Anderson(window=2)
    assert get_solver(mine) is mine


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="'anderson'"):
        get_solver("andersen")
