from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.dynamics import find_limits
from loopinterp.dynamics.state_planes import StatePlane, corner_states
from loopinterp.errors import InputError
from loopinterp.models import bind
from tests.dynamics.toys import LinearModel, random_state


def test_the_plane_holds_its_centre_and_corners_and_keeps_distances() -> None:
    centre, first, second = (2 * state for state in random_state(3, 4, 5))
    plane = StatePlane.through(centre, {"a": first, "b": second})
    assert plane.unit == pytest.approx(centre.norm().item())
    places = torch.tensor([(0.0, 0.0), *plane.corners.values()], dtype=torch.float64)
    held = plane.at(places)
    torch.testing.assert_close(held, torch.stack([centre, first, second]))
    apart = plane.unit * (places[1] - places[2]).norm()
    assert apart.item() == pytest.approx((first - second).norm().item())
    (x, y), (_, across) = plane.corners.values()
    assert x > 0 and y == pytest.approx(0) and across > 0


def test_around_zero_the_unit_is_the_first_corner() -> None:
    plane = StatePlane.through(
        torch.zeros(1, 2), {"a": torch.tensor([[3.0, 0]]), "b": torch.ones(1, 2)}
    )
    assert plane.unit == 3 and plane.corners["a"] == (1, 0)


@pytest.mark.parametrize("factor", [0.0, 1.0, -2.0])
def test_corners_on_a_line_with_the_centre_are_refused(factor: float) -> None:
    centre, first = random_state(2, 3, 4)
    for corners in (
        {"a": first, "b": centre + factor * (first - centre)},
        {"a": centre, "b": first},
    ):
        with pytest.raises(InputError, match="'a' and 'b', which are on a line"):
            StatePlane.through(centre, corners)


def test_corners_are_taken_by_name_or_as_states_and_chosen_where_limits_differ() -> None:
    model = LinearModel(0.5 * torch.eye(2))
    counted = torch.ones(3, 1, dtype=torch.bool)

    def corners(of: Any, tokens: list[int]) -> dict[str, torch.Tensor]:
        iteration = bind(model, torch.tensor(tokens)[:, None])
        own = find_limits(iteration, iteration.h0, max_loops=100)
        generator = torch.Generator().manual_seed(0)
        return corner_states(of, iteration, own, counted, generator, same=0.01)

    assert [*corners(None, [1, 1, 5])] == ["other 2", "noise 1"]  # 1 and 1 have one limit
    assert [*corners(None, [1, 1, 1])] == ["noise 2", "noise 1"]
    named = corners(("own", "other 1"), [1, 4, 4])
    torch.testing.assert_close(named["own"], torch.zeros(1, 2))
    expected = model.limit(torch.tensor([[4]]))[0]
    torch.testing.assert_close(named["other 1"], expected, atol=1e-3, rtol=0)
    given = {"a": torch.ones(1, 2), "b": torch.eye(2)[:1]}
    assert corners(given, [1, 1, 1]) == given
    wrong = {
        "two that differ": ("zeros", "zeros"),
        "got 'noise 3'": ("noise 3", "zeros"),
        "corner 'b': expected shape": {**given, "b": torch.ones(2, 2)},
        "corner 'b': expected finite": {**given, "b": torch.full((1, 2), torch.nan)},
    }
    for said, of in wrong.items():
        with pytest.raises(InputError, match=said):
            corners(of, [1, 1, 1])
