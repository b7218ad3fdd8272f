"""Arguments of public calls: what fits is passed on in Python's types, what does not is refused."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import GREATEST_SEED, MOST_LOOPS, InputError
from loopinterp.core.settings import Seed

if TYPE_CHECKING:
    from loopinterp.models.protocol import LoopedModel


@checked
def _study(
    model: LoopedModel | None = None,
    n: PositiveInt | None = None,
    *,
    share: Annotated[float, Field(gt=0, le=1)] = 0.5,
    scale: PositiveFloat = 1.0,
    norm: Literal["2", "max"] = "2",
    lengths: int | Sequence[int] = 3,
    loops: Loops = 4,
    seed: Seed = 0,
    exact: bool = False,
) -> dict[str, Any]:
    """Everything that was passed on."""
    return dict(locals())


@given(st.integers(1, 10**6), st.sampled_from([int, np.int64, np.int32]))
def test_integers_of_numpy_become_those_of_python(n: int, kind: type) -> None:
    passed_on = _study(n=kind(n))["n"]
    assert passed_on == n and type(passed_on) is int


@pytest.mark.parametrize("lengths", [[2, 4], (2, 4), range(2, 5, 2), np.array([2, 4])])
def test_sequences_of_all_kinds_are_taken(lengths: Any) -> None:
    assert list(_study(lengths=lengths)["lengths"]) == [2, 4]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, -1, True, 2.0, "3", torch.tensor(3))),
        *(("share", value) for value in (0, 1.1, float("nan"), "0.5")),
        *(("scale", value) for value in (0.0, float("inf"), 10**400, None)),
        *(("norm", value) for value in ("mx", 2, None)),
        *(("lengths", value) for value in ("3", [1, "b"], None, [True])),
        *(("loops", value) for value in (0, MOST_LOOPS + 1)),
        *(("seed", value) for value in (-1, GREATEST_SEED + 1)),
        ("exact", 1),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        _study(**{name: value})
    assert caught.value.what == name and caught.value.fix


def test_the_nearest_choice_is_suggested() -> None:
    with pytest.raises(InputError) as caught:
        _study(norm="mx")  # type: ignore[arg-type]
    assert "2, max" in caught.value.expected and "'max'" in caught.value.fix


def test_what_only_type_checkers_know_is_passed_on_as_it_is() -> None:
    model = object()
    assert _study(model)["model"] is model  # type: ignore[arg-type]


def test_defaults_names_and_signature_are_the_functions_own() -> None:
    assert _study()["n"] is None and _study.__name__ == "_study"
    assert list(inspect.signature(_study).parameters)[:2] == ["model", "n"]
    with pytest.raises(TypeError):
        _study(lenghts=3)  # type: ignore[call-arg]


def test_methods_are_checked_too() -> None:
    class Reading:
        @checked
        def at(self, loop: NonNegativeInt) -> int:
            return loop

    assert Reading().at(np.int64(2)) == 2  # type: ignore[arg-type]
    with pytest.raises(InputError):
        Reading().at(-1)
