"""All lenses, and exits by gates, on published models: the same studies, with no case for any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.lenses import exit_study, fit_jacobian_lens, fit_tuned_lens, lens_study
from loopinterp.lenses.fitted_lens import layer_hooks, places
from loopinterp.models import GateAbove, bind, run_until
from tests.adapters.kinds import FAMILIES, KINDS, adapted, every, tokens_of
from tests.lenses.lens_toys import end_by_hook

LOOPS = 2
FIRSTS = [family[0] for family in FAMILIES]


@every
def test_every_lens_is_exact_at_the_end(name: str) -> None:
    model, x = adapted(name), tokens_of(name, 2, 3)
    others = tokens_of(name, 1, 2, seed=3)
    tuned = fit_tuned_lens(model, others, n_loops=LOOPS, inside=True, steps=2)
    jacobian = None
    if name in FIRSTS:  # its places are those of the tuned lens, whichever the adapter
        jacobian = fit_jacobian_lens(model, others, n_loops=LOOPS, inside=True)
    for lens in filter(None, ("logit", "coda", tuned, jacobian)):
        result = lens_study(model, x, lens=lens, n_loops=LOOPS, inside=True)
        kl = result.data["kl"].sel(loop=LOOPS)
        if lens == "logit" and result.has_coda:
            assert float(kl.max()) > 1e-4
        else:
            assert float(kl.sel(layer="state").max()) < 1e-6
            if lens is not jacobian:
                assert float(kl.isel(layer=-2).max()) < 1e-6
        assert np.isfinite(result.data["kl"].isel(loop=slice(1, None))).all()


@every
def test_a_transport_is_what_a_small_change_does(name: str) -> None:
    """Along random directions, one position after the other, by central differences."""
    model, x = adapted(name), tokens_of(name, 2, 3)
    iteration = bind(model, x)
    J = fit_jacobian_lens(model, x, n_loops=LOOPS).matrix[1].double()
    h = [h.detach() for _, h in iteration.run(1)][-1]
    v = torch.randn(h.shape[-1], generator=torch.Generator().manual_seed(0))
    size, moved = 1e-2 * h.norm(dim=-1).mean() / v.norm(), torch.zeros(h.shape[-1])
    with torch.no_grad():
        for pos in range(3):
            added = torch.zeros_like(h)
            added[:, pos] = size * v
            ends = iteration.step(h + added, 1), iteration.step(h - added, 1)
            moved = moved + (ends[0] - ends[1]).sum((0, 1))
    slope = moved.double() / (2 * size) / (2 * 3)
    assert (J @ v.double() - slope).norm() < 1e-3 * slope.norm()


@every
def test_a_loop_whose_last_layer_puts_out_what_it_did_leaves_what_it_left(name: str) -> None:
    model, x = adapted(name), tokens_of(name, 2, 4)
    start, *_, layer, state = places(model, x, 1, inside=True)
    span = {"n_loops": 1, "start_at_loop": 0, "stop_at_loop": 1, "state": start.residual}
    last = layer_hooks(model, 0, 1)[-1]
    left = end_by_hook(model, x, layer.residual, last, span)
    torch.testing.assert_close(left, state.residual)
    other = end_by_hook(model, x, layer.residual + 1, last, span)
    assert (other - left).abs().max() > 0.01


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.halts])
def test_a_gate_is_compared_with_the_other_rules(name: str) -> None:
    model, x = adapted(name), tokens_of(name, 6, 4)
    result = exit_study(model, x, n_loops=5, gate=model.exit_probability)
    assert result.data["rule"].values.tolist()[-2:] == ["gate", "gate, cumulated"]
    gate = GateAbove(model.exit_probability, cumulated=True)
    stopped = run_until(model, x, gate, max_loops=5)
    loops = float(result.data["own_loops"].sel(rule="gate, cumulated"))
    assert loops == pytest.approx(float(stopped.loop.float().mean()))
