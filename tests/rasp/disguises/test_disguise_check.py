"""What a check of a disguise measures, against runs of the two models."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import add_noise, check_disguise, rotate, superpose
from tests.rasp.disguises.small_models import logits_of, small_model


def test_it_measures_the_largest_differences_at_every_loop(monkeypatch):
    plain = small_model("ripple")
    noisy = add_noise(rotate(plain.compiled, seed=0), relative=0.02, seed=1)
    check = check_disguise(noisy, plain.compiled, plain.inputs, n_loops=plain.n_loops)
    logits = logits_of(noisy, plain.inputs, plain.n_loops)
    assert torch.allclose(check.logits, (logits - plain.logits).abs().amax((1, 2, 3)))
    assert check.logits.min() > 1e-3 and check.reads.min() > 1e-4
    # In the original a read is 0 or 1, so that it is the error that agreement reports.
    assert float(check.reads.max()) == pytest.approx(check.agreement.state_error, abs=1e-6)
    monkeypatch.setattr("loopinterp.rasp.compiler.agreement.CHUNK", 1)
    one_by_one = check_disguise(noisy, plain.compiled, plain.inputs, n_loops=plain.n_loops)
    assert torch.allclose(one_by_one.logits, check.logits, atol=1e-5)
    assert torch.allclose(one_by_one.reads, check.reads, atol=1e-5)


def test_it_says_whether_values_and_answers_are_right():
    plain = small_model("ripple")
    for width, exact in ((12, True), (4, False)):
        dense = superpose(plain.compiled, d_model=width, seed=0, steps=100)
        check = check_disguise(dense, plain.compiled, plain.inputs, n_loops=plain.n_loops)
        assert check.exact is exact


@pytest.mark.usefixtures("quick")
def test_both_models_need_circuits():
    plain = small_model("ripple")
    with pytest.raises(InputError, match="compiled: expected a Compiled"):
        check_disguise(plain.compiled, plain.compiled.model, plain.inputs, n_loops=2)  # type: ignore[arg-type]
