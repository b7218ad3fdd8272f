"""A code of sign bits between the loops: what a loop makes of a state, and how it is trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import ConfigError
from loopinterp.models.state_code import Softening
from tests.models.coded_model import coded


def inputs(batch: int = 5, n_pos: int = 7) -> torch.Tensor:
    return torch.randint(6, (batch, n_pos), generator=torch.Generator().manual_seed(0))


@given(n_bits=st.integers(1, 5), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_a_loop_rounds_its_state_to_one_of_a_few(n_bits, seed):
    model = coded(n_bits, seed=seed)
    states = model(inputs(), n_loops=4, return_type="states")
    different = states.flatten(0, 2).mul(1e4).round().unique(dim=0)
    assert len(different) <= 2**n_bits
    code = model.code
    assert code is not None
    bits = torch.where(states[1:] @ torch.linalg.pinv(code.write.weight).T >= 0, 1.0, -1.0)
    torch.testing.assert_close(code.state(bits), states[1:])  # n_bits <= d_model: U has full rank


def test_the_bits_are_the_signs_of_what_is_read_off_the_normed_state():
    model = coded()
    states, cache = model.run_with_cache(inputs(), n_loops=3, return_type="states")
    code = model.code
    assert code is not None
    norm = model.ln_loop
    assert norm is not None
    normed = cache.stack("ln_loop.hook_normalized") * norm.weight + norm.bias
    z = normed @ code.read.weight.T + code.read.bias
    torch.testing.assert_close(cache.stack("hook_code_pre"), z)
    assert torch.equal(cache.stack("hook_code"), torch.where(z >= 0, 1.0, -1.0))
    start = -code.write.weight.sum(1) + code.write.bias  # all bits are -1
    torch.testing.assert_close(states[0], start.expand_as(states[0]))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_logit_attribution_goes_through_the_code(norm):
    model = coded(norm=norm)
    x = inputs()
    logits, cache = model.run_with_cache(x, n_loops=3)
    wanted = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(1))
    parts = cache.logit_attribution(wanted)
    given_logits = logits.gather(-1, wanted[..., None])[..., 0]
    total = torch.tensor(parts.sum("component").values, dtype=logits.dtype)
    torch.testing.assert_close(total, given_logits, atol=1e-4, rtol=1e-4)


@given(hard=st.floats(0, 1), gain=st.floats(0.5, 4))
@settings(max_examples=20, deadline=None)
def test_soft_signs_are_hard_ones_in_a_share_and_have_a_gradient(hard, gain):
    model = coded()
    code = model.code
    assert code is not None
    h = torch.randn(64, 40, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    softening = Softening(hard, gain, 0.0, torch.Generator().manual_seed(3))
    with code.softened(softening):
        soft = code._bits(code.read(h))
    share = float((soft.abs() == 1).float().mean())
    assert abs(share - hard) < 0.03
    (gradient,) = torch.autograd.grad(soft.sum(), h)
    z = code.read(h)
    (smooth,) = torch.autograd.grad(torch.tanh(gain * z).sum(), h)
    torch.testing.assert_close(gradient, smooth)  # of hard bits too
    assert torch.equal(code._bits(z), torch.where(z >= 0, 1.0, -1.0))  # hard again outside


@pytest.mark.parametrize(
    "changes",
    [
        {"state_code": None},
        {"initial_state": "zeros"},
        {"state_code": 0},
        {"state_code": 17},
        {"injection": "none"},
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes):
    with pytest.raises(ConfigError):
        coded(**changes)
