"""Lenses of a model in bfloat16: maps and measures stay in float32."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from loopinterp.lenses import exit_study, fit_jacobian_lens, fit_tuned_lens, lens_study
from tests.lenses.lens_toys import tokens, transformer


@pytest.mark.parametrize("kind", ["loop norm", "prelude and coda"])
def test_a_model_in_bfloat16_is_read_as_it_is(kind: str) -> None:
    model, x = transformer(kind).to(torch.bfloat16), tokens(4)
    tuned = fit_tuned_lens(model, tokens(8, seed=2), n_loops=2, inside=True, steps=2)
    jacobian = fit_jacobian_lens(model, tokens(8, seed=2), n_loops=2, inside=True)
    full = fit_jacobian_lens(transformer(kind), tokens(8, seed=2), n_loops=2, inside=True)
    assert tuned.matrix.dtype == jacobian.matrix.dtype == torch.float32
    assert (jacobian.matrix - full.matrix).norm() < 0.05 * full.matrix.norm()
    for lens in ("coda", tuned, jacobian):
        data = lens_study(model, x, lens=lens, n_loops=2, inside=True).data
        assert data["kl"].dtype == "float32"
        assert float(data["kl"].sel(loop=2, layer="state").max()) < 1e-6
    assert exit_study(model, x, n_loops=3).best_loop()[0] == 1


def test_readings_and_exits_are_compared_with_float32() -> None:
    model, x = transformer("loop norm").to(torch.bfloat16), tokens(4)
    whole = copy.deepcopy(model).float()
    options = {"lens": "coda", "n_loops": 4}
    here, there = (lens_study(m, x, **options) for m in (model, whole))
    np.testing.assert_array_equal(here.data["float32_answer"], there.data["answer"])
    differs = (here.data["answer"] != there.data["answer"]).sel(layer="state")
    assert here.decided_by_rounding() == float(differs.mean())
    assert there.decided_by_rounding() is None
    # No answer is as it was.
    moved = dataclasses.replace(here, data=here.data.assign(float32_answer=1 - here.data["answer"]))
    assert moved.decided_by_rounding() == 1
    assert "100% decided by rounding" in moved.findings()[-1].value
    exits, of_whole = (exit_study(m, x, n_loops=4) for m in (model, whole))
    assert exits.data["float32_exact"].dims == ("loop", "batch")
    assert of_whole.decided_by_rounding() is None and exits.decided_by_rounding() is not None
