"""Whatever PyTorch's default dtype is, the same seed gives the same examples and numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp import edges, interventions, probing
from loopinterp.core.results import load_result
from loopinterp.tasks import Addition, as_batch, get_task
from tests.small_studies import decompile_little
from tests.test_study_arguments import OF_A_TASK, OF_GIVEN_PAIRS, STUDIES, _model


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    decompile_little(monkeypatch)


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _data(name: str) -> Any:
    if name in OF_A_TASK:
        return Addition()
    n, size = (18, 16) if name == "injected_carry_study" else (4, 8)
    return as_batch(Addition(), n=n, batch_size=256 if name == "search_subspaces" else size)


def _result(name: str, model: Any) -> Any:
    data = _data(name)
    if name == "carry_study":
        small: dict[str, Any] = {"n": 8, "n_short": 4, "n_train": 32, "n_test": 32}
        return probing.carry_study(model, data, loops=[0, 4], **small)
    if name in OF_GIVEN_PAIRS:
        other = as_batch(Addition(), n=4, batch_size=8, seed=1)
        if name == "edge_study":
            return edges.edge_study(model, data, other, n_loops=3, methods=["eap"], curve_points=1)
        return interventions.patching_sweep(model, data, other, component="z")
    return STUDIES[name](model, data)


def _numbers(name: str) -> dict[str, np.ndarray]:
    return {key: values.values for key, values in _result(name, _model()).data.items()}


def _in_float64(name: str) -> dict[str, np.ndarray]:
    _model()  # made in float32 both times
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _numbers(name)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_a_study_finds_the_same(name: str) -> None:
    ours, theirs = _numbers(name), _in_float64(name)
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        if values.dtype.kind in "fc":
            np.testing.assert_allclose(theirs[key], values, atol=1e-4, rtol=1e-4, err_msg=key)
        else:
            assert (theirs[key] == values).all(), key


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_a_study_takes_a_model_in_half_precision(name: str, tmp_path: Path) -> None:
    result = _result(name, copy.deepcopy(_model()).to(torch.bfloat16))
    assert load_result(result.save(tmp_path)).data.equals(result.data)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["addition", "multiplication", "unique_set", "sudoku", "maze"])
def test_a_seed_draws_the_same_examples(name: str) -> None:
    def drawn() -> list[torch.Tensor]:
        task = get_task(name)
        return [
            task.sample(
                4, batch_size=8, generator=torch.Generator().manual_seed(0), distribution=kind
            ).inputs
            for kind in task.distributions
        ]

    wide = drawn()
    torch.set_default_dtype(torch.float32)
    for here, there in zip(wide, drawn(), strict=True):
        assert torch.equal(here, there)
