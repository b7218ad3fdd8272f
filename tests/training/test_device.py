"""Devices, threads, noise and the compiled step."""

from __future__ import annotations

import functools

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer
from loopinterp.training import TrainingConfig
from loopinterp.training.device import (
    cpu_threads,
    make_bind,
    resolve_device,
    with_state_noise,
)


def test_cpu_is_cpu() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


def test_no_gpu_is_an_error_and_never_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"device 'cuda'.*Use --device cpu"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(InputError, match="only 1 of them"):
        resolve_device("cuda:3")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cud"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="expected one of auto, cpu, cuda"):
        resolve_device(name)


def test_threads_are_set_for_a_while_only() -> None:
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before


def test_noise_enters_before_each_step(tiny: TrainingConfig) -> None:
    model = LoopedTransformer(tiny.model)
    inputs = torch.tensor([[4, 1, 2], [4, 0, 3]])
    plain = model.bind(inputs)
    noisy = with_state_noise(plain, 0.5, torch.Generator().manual_seed(3))
    noise = torch.randn(plain.h0.shape, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(noisy.step(plain.h0), plain.step(plain.h0 + 0.5 * noise))
    one = noisy.select(slice(0, 1))
    assert one.step(one.h0).shape == (1, 3, 8)
    assert not torch.equal(one.step(one.h0), one.step(one.h0))


def check_compiled(config: TrainingConfig, device: str) -> None:
    model = LoopedTransformer(config.model).to(device)
    plain, compiled = model.bind, make_bind(model, compiled=True)
    for inputs in (
        torch.tensor([[4, 1, 2], [4, 0, 3], [4, 3, 3]]),
        torch.tensor([[4, 1, 2, 3]] * 2),
    ):
        inputs = inputs.to(device)
        one, other = plain(inputs), compiled(inputs)
        torch.testing.assert_close(one.h0, other.h0)
        state = one.step(one.h0)
        torch.testing.assert_close(other.step(other.h0), state)
        part = other.select(slice(0, 2))
        torch.testing.assert_close(part.step(state[:2]), one.step(state)[:2])
        torch.testing.assert_close(part.readout(state), one.readout(state))


@pytest.mark.slow
# PyTorch's compiler warns of PyTorch's own deprecations, and cannot trace the type checks.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("no_type_checks")
def test_the_traced_step_is_the_step(tiny: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    check_compiled(tiny, "cpu")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("no_type_checks")
def test_the_compiled_step_is_the_step(tiny: TrainingConfig) -> None:
    check_compiled(tiny, "cuda")
