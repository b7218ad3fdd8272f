"""Lenses of a model in bfloat16: maps and measures stay in float32."""

from __future__ import annotations

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
