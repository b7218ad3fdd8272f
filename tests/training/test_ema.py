"""The average against its closed form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopinterp.training.ema import Ema


def scalar_model(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_average_follows_the_recurrence() -> None:
    model = scalar_model(0.0)
    ema, expected = Ema(model, decay=0.5), 0.0
    for t, value in enumerate([4.0, -2.0, 8.0, 1.0, 1.0, 3.0, 7.0, 2.0, 5.0, 6.0]):
        nn.init.constant_(model.weight, value)
        ema.update()
        decay = min(0.5, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * value
        assert ema.shadow["weight"].item() == pytest.approx(expected)


def test_average_of_constant_weights_is_those_weights() -> None:
    model = scalar_model(3.0)
    ema = Ema(model, decay=0.999)
    for _ in range(5):
        ema.update()
    assert ema.shadow["weight"].item() == pytest.approx(3.0)


def test_average_is_no_view_of_the_weights() -> None:
    model = scalar_model(3.0)
    ema = Ema(model, decay=0.9)
    nn.init.constant_(model.weight, 9.0)
    assert ema.shadow["weight"].item() == 3.0
    assert not ema.shadow["weight"].requires_grad


def test_tied_weights_are_averaged_once() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    ema = Ema(nn.Sequential(first, second), decay=0.0)
    nn.init.constant_(first.weight, 2.0)
    ema.update()
    assert list(ema.shadow) == ["0.weight"]
    assert (ema.shadow["0.weight"] == 2.0).all()


def test_weights_that_are_not_to_be_averaged_leave_no_trace() -> None:
    model = scalar_model(3.0)
    ema = Ema(model, decay=0.9)
    nn.init.constant_(model.weight, torch.nan)
    ema.update(unless=torch.tensor(True))
    assert ema.shadow["weight"].item() == 3.0
    nn.init.constant_(model.weight, 5.0)
    plain = Ema(model, decay=0.9)
    for one in (ema, plain):
        one.shadow["weight"].fill_(3.0)
        one.n_updates = 7
    ema.update(unless=torch.tensor(False))
    plain.update()
    assert torch.equal(ema.shadow["weight"], plain.shadow["weight"])
