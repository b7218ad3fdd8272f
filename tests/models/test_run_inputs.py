"""Spans of loops and numbers of loops; what runs refuse is tested with the model."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models.run_inputs import loop_span
from tests.models.variants import build


def test_spans() -> None:
    assert loop_span(0, None, 4, None) == range(4)
    assert loop_span(2, 3, 4, torch.zeros(1, 1, 8)) == range(2, 3)
    assert loop_span(4, None, 4, torch.zeros(1, 1, 8)) == range(4, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (3, 2), (0, 5), (5, None)])
def test_spans_outside_the_run(start: int, stop: int | None) -> None:
    with pytest.raises(InputError, match="loops inside the run"):
        loop_span(start, stop, 4, torch.zeros(1, 1, 8))


@pytest.mark.parametrize("given", [0, -1, True])
def test_numbers_of_loops_that_are_none(given: int) -> None:
    with pytest.raises(InputError, match="n_loops: expected an integer >= 1"):
        build("plain").n_loops = given
