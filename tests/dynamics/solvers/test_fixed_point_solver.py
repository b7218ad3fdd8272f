from __future__ import annotations

import pytest
import torch

from loopinterp.dynamics.solvers import Status, Termination
from loopinterp.dynamics.solvers.fixed_point_solver import advance, start
from loopinterp.errors import InputError


def test_one_percent_of_progress_resets_the_patience() -> None:
    state = start(lambda x: x - 1, torch.tensor([[100.0]]))
    slow = advance(lambda x: x - 0.995 * x / 99, state, torch.tensor([[100.0]]))
    assert slow.since_best.item() == 1
    fast = advance(lambda x: x - 0.5 * x / 99, slow, torch.tensor([[100.0]]))
    assert fast.since_best.item() == 0


def test_convergence_outranks_the_end_of_the_steps_and_divergence_everything() -> None:
    rule = Termination(max_iter=1)
    x = torch.tensor([[1.0], [1.0], [1.0]])
    outputs = torch.tensor([[1.0], [2.0], [float("inf")]])
    state = advance(lambda _: outputs, start(lambda _: outputs, x), x)
    codes = rule(state).tolist()
    assert codes == [Status.CONVERGED, Status.OUT_OF_BUDGET, Status.DIVERGED]


@pytest.mark.parametrize(
    "options",
    [
        {"tol": 0.0},
        {"tol": float("nan")},
        {"atol": -1.0},
        {"max_iter": 0},
        {"patience": 0},
        {"divergence": float("inf")},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Termination(**options)  # pyright: ignore[reportArgumentType]
