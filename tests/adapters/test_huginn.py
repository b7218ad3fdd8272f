"""Huginn's random start: seeded, the same at each place, and distributed as published."""

from __future__ import annotations

import pytest
import torch

from loopinterp.adapters import adapt
from loopinterp.core.errors import InputError
from loopinterp.models import generate
from tests.adapters.published import huginn
from tests.refusals import naming


def test_a_seed_is_a_start_and_a_position_has_its_own() -> None:
    published = huginn.tiny()
    first, other = adapt(published, seed=1), adapt(published, seed=2)
    e = torch.zeros(2, 9, 32)
    start = first.initial_state(e)
    assert torch.equal(start, adapt(published, seed=1).initial_state(e))
    assert not torch.allclose(start, other.initial_state(e))
    assert torch.equal(start[0], start[1]) and not torch.allclose(start[0, 0], start[0, 1])
    assert torch.equal(first.initial_state(e[:, :4]), start[:, :4])
    assert first.config.options == {"seed": 1}


def test_the_start_is_distributed_as_the_published_one() -> None:
    published = huginn.tiny()
    e = torch.zeros(1, 4000, 32)
    ours, theirs = adapt(published).initial_state(e), published.initialize_state(e)
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.02)
    assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.02)
    shares = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    some = (slice(None), slice(0, None, 16))
    quantiles = [torch.quantile(x[some].flatten(), shares) for x in (ours, theirs)]
    assert torch.allclose(quantiles[0], quantiles[1], atol=0.05 * ours.std().item() + 0.01)


def test_a_start_of_the_published_code_is_gone_on_from() -> None:
    published = huginn.tiny()
    model, tokens = adapt(published), torch.arange(6).view(2, 3)
    start = published.initialize_state(model.embed(tokens)).detach()
    expected = huginn.native(published, tokens, 3, start=start)
    assert torch.allclose(model(tokens, n_loops=3, state=start), expected, atol=1e-5)


def test_more_positions_than_angles_and_noise_at_each_step_are_refused() -> None:
    with naming("inputs"):
        adapt(huginn.tiny())(torch.zeros(1, 65, dtype=torch.int64))
    noisy = huginn.tiny()
    noisy.config.test_time_noise = 0.1
    with pytest.raises(InputError, match="test_time_noise"):
        adapt(noisy)


@pytest.mark.parametrize("use_cache", [False, True])
def test_an_answer_may_fill_all_positions_that_the_model_knows(use_cache: bool) -> None:
    model = adapt(huginn.tiny())
    prompt = torch.arange(61)[None]
    answers = generate(model, prompt, n_loops=1, max_new_tokens=4, use_cache=use_cache)
    assert answers.shape == (1, 4)  # 61 + 3 positions are read
    with naming("inputs"):
        generate(model, prompt, n_loops=1, max_new_tokens=5, use_cache=use_cache)
