"""The device that is not there refuses what a GPU refuses, and says where the host would wait."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.pretend_gpu import DEVICE, OnDevice, WouldWait, no_waiting, pretend_gpu

REFUSED = {
    "sum": lambda x: x + torch.zeros(3),
    "matmul": lambda x: x @ torch.zeros(3, 2),
    "cat": lambda x: torch.cat([x, torch.zeros(2, 3)]),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(2, 3)),
    "mask": lambda x: x.masked_fill(torch.zeros(2, 3, dtype=torch.bool), 0.0),
    "index on the device": lambda x: torch.zeros(5)[x[0].long()],
    "assignment": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1, 3)),
    "layer": lambda x: torch.nn.Linear(3, 2)(x),
    "generator": lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
    "noise in place": lambda x: x.normal_(generator=torch.Generator()),
    "numpy": lambda x: x.numpy(),
}
WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "int": lambda x: int(x.max()),
    "tolist": lambda x: x.tolist(),
    "to the CPU": lambda x: x.cpu(),
    "from the CPU": lambda x: torch.zeros(2, 3).to(x.device),
    "made of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "copied": lambda x: x.copy_(torch.zeros(2, 3)),
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "index on the CPU": lambda x: x[torch.tensor([0, 1])],
    "masked_select": lambda x: x.masked_select(x > 0),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x @ x.T),
}
ALLOWED = {
    "scalars": lambda x: x * 2 + torch.tensor(1.0),
    "sent": lambda x: x + torch.ones(2, 3).to(x.device, non_blocking=True),
    "made there": lambda x: x + torch.zeros(2, 3, device=x.device),
    "index": lambda x: x[torch.zeros(2, dtype=torch.long, device=x.device)],
    "draws": lambda x: torch.rand(3, device=x.device, generator=torch.Generator(x.device)),
    "in place": lambda x: x.add_(1).masked_fill_(x > 2, 0.0),
    "view": lambda x: x.view(3, 2).T.contiguous(),
}


def on(device: torch.device) -> Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


@pytest.mark.parametrize("name", REFUSED)
def test_two_devices_do_not_mix(name: str) -> None:
    with pretend_gpu() as device, pytest.raises((RuntimeError, TypeError), match="device"):
        REFUSED[name](on(device))


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_said(name: str) -> None:
    with pretend_gpu() as device:
        x = on(device)
        WAITS[name](x)
        with no_waiting(), pytest.raises(WouldWait):
            WAITS[name](x)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_gpu_does_by_itself_is_done(name: str) -> None:
    with pretend_gpu() as device:
        x = on(device)
        with no_waiting():
            result = ALLOWED[name](x)
        assert isinstance(result, OnDevice) and result.device == DEVICE
        if name not in ("draws", "in place"):
            assert torch.equal(result.cpu(), ALLOWED[name](on(torch.device("cpu"))))


def test_gradients_are_those_of_the_cpu() -> None:
    weight = torch.nn.Linear(3, 2)
    expected = torch.autograd.grad(weight(on(torch.device("cpu"))).square().sum(), weight.weight)
    with pretend_gpu() as device:
        there = copy.deepcopy(weight).to(device)
        there(on(device)).square().sum().backward()
        assert isinstance(there.weight.grad, OnDevice)
        torch.testing.assert_close(there.weight.grad.cpu(), expected[0])


def test_outside_nothing_is_left_of_it() -> None:
    with pretend_gpu():
        pass
    assert torch.Generator().device == torch.device("cpu")
    assert type(torch.zeros(2, device="meta")) is Tensor
