"""TRM: one stack for both parts, an MLP over positions, and its halting head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopinterp.adapters import TRMAdapter, adapt
from loopinterp.errors import HookError, InputError
from tests.adapters.published import hrm, trm


def _tokens() -> Tensor:
    return torch.randint(64, (3, 6), generator=torch.Generator().manual_seed(1))


def _adapted(published: hrm.ACTWrapper) -> TRMAdapter:
    model = adapt(published)
    assert isinstance(model, TRMAdapter)
    return model


PUZZLES = torch.tensor([4, 0, 4])


def test_a_puzzle_may_have_more_positions_than_its_vector_fills() -> None:
    published = trm.tiny(puzzle_emb_ndim=40, puzzle_emb_len=4)
    model, tokens = _adapted(published), _tokens()
    logits = model(model.with_puzzle(tokens, PUZZLES), n_loops=3)
    expected = trm.native(published, tokens, 3, puzzles=PUZZLES)
    assert (logits[:, 4:] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("places", ["rope", "learned", "none"])
def test_any_kind_of_positions(places: str) -> None:
    published = trm.tiny(pos_encodings=places)
    model, tokens = _adapted(published), _tokens()
    logits, cache = model.run_with_cache(tokens, n_loops=3)
    assert (logits - trm.native(published, tokens, 3)).abs().max() <= 1e-5
    assert ("blocks.0.attn.hook_rot_q" in cache) == (places == "rope")
    assert cache.nbytes == model.cache_nbytes(3, 6, n_loops=3)


def test_an_mlp_over_the_positions_in_the_place_of_attention() -> None:
    published = trm.tiny(mlp_t=True)
    model, tokens = _adapted(published), _tokens()
    logits, cache = model.run_with_cache(tokens, n_loops=3)
    assert (logits - trm.native(published, tokens, 3)).abs().max() <= 1e-5
    assert cache.nbytes == model.cache_nbytes(3, 6, n_loops=3)
    assert cache["blocks.0.mlp_t.hook_post"].shape == (3, 32, 256)
    change = torch.linspace(-1, 1, 32)
    handle = published.inner.L_level.layers[0].mlp_t.register_forward_hook(
        lambda module, inputs, output: output + change[:, None]
    )
    try:
        expected = trm.native(published, tokens, 3)
    finally:
        handle.remove()
    sites = [f"loops.{t}.inner.{s}.blocks.0.hook_mix_out" for t in range(3) for s in range(4)]
    hooks = [(sites, lambda x, hook: x + change)]
    assert (model.run_with_hooks(tokens, n_loops=3, fwd_hooks=hooks) - expected).abs().max() <= 1e-5
    with pytest.raises(InputError, match="6 positions, which an MLP mixes"):
        model(tokens[:, :5])
    with pytest.raises(HookError):
        model.site("attn.hook_pattern", loop=0, layer=0)


@pytest.mark.parametrize("alone", [True, False])
def test_the_halting_head_stops_where_the_published_code_does(alone: bool) -> None:
    published, tokens = trm.tiny(no_ACT_continue=alone), _tokens()
    with torch.no_grad():  # about as ready to halt as not
        published.inner.q_head.bias.copy_(torch.tensor([-0.35, 0.6]))
    model, stops = _adapted(published), []
    for n_loops in (2, 4, 6, 8):
        told = trm.segments(published, tokens, n_loops)
        other = 0 if alone else told["q_continue_logits"]
        stops.append(told["q_halt_logits"] > other)
        state = model(tokens, n_loops=n_loops, return_type="state")
        assert torch.equal((model.exit_probability(state) > 0.5).all(-1), stops[-1])
    assert 0 < torch.stack(stops).float().mean() < 1  # it does both
