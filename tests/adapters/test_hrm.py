"""HRM: puzzles, positions, segments and the halting head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopinterp.adapters import HRMAdapter, TRMAdapter, adapt
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import GateAbove, run_until
from tests.adapters.published import hrm, trm
from tests.refusals import naming


def _tokens() -> Tensor:
    return torch.randint(64, (3, 6), generator=torch.Generator().manual_seed(1))


def _adapted(published: hrm.ACTWrapper) -> HRMAdapter:
    model = adapt(published)
    assert isinstance(model, HRMAdapter)
    return model


PUZZLES = torch.tensor([4, 0, 4])


@pytest.mark.parametrize("places", ["rope", "learned"])
@pytest.mark.parametrize("width", [20, 32, 70])  # of one position, or of three, the last padded
def test_a_puzzle_has_positions_before_its_tokens(places: str, width: int) -> None:
    published = hrm.tiny(puzzle_emb_ndim=width, pos_encodings=places)
    model, tokens = _adapted(published), _tokens()
    inputs = model.with_puzzle(tokens, PUZZLES)
    n_places = published.inner.puzzle_emb_len
    assert inputs.shape == (3, n_places + 6) and n_places == -(-width // 32)
    logits, cache = model.run_with_cache(inputs, n_loops=4)
    expected = hrm.native(published, tokens, 4, puzzles=PUZZLES)
    assert (logits[:, n_places:] - expected).abs().max() <= 1e-5
    assert ("hook_pos_embed" in cache) == (places == "learned")
    assert cache["loops.0.hook_state_post"].shape == (3, n_places + 6, 64)
    assert cache.nbytes == model.cache_nbytes(3, n_places + 6, n_loops=4)
    other = hrm.native(published, tokens, 4, puzzles=PUZZLES.roll(1))
    assert (other - expected).abs().max() > 1e-3  # puzzles matter


def test_what_is_no_puzzle_is_refused() -> None:
    model, tokens = _adapted(hrm.tiny(puzzle_emb_ndim=70)), _tokens()
    inputs = model.with_puzzle(tokens, PUZZLES)
    for place, number in ((0, 5), (1, 3), (2, -1)):
        wrong = inputs.clone()
        wrong[1, place] = number
        with naming("inputs"):
            model(wrong)
    with pytest.raises(InputError, match="tokenizer"):
        model(model.with_puzzle(tokens + 60, PUZZLES))
    with pytest.raises(InputError, match="with_puzzle"):
        model(inputs[:, :3])
    with naming("inputs"):
        model(model.with_puzzle(tokens.repeat(1, 2), PUZZLES))


def test_puzzles_beyond_the_range_of_small_tokens_stay_what_they_are() -> None:
    model = _adapted(hrm.tiny(puzzle_emb_ndim=32, num_puzzle_identifiers=400))
    puzzles = torch.tensor([300, 44, 299])
    small = model.with_puzzle(_tokens().to(torch.uint8), puzzles)
    assert torch.equal(small.long(), model.with_puzzle(_tokens(), puzzles))


def test_a_run_that_is_told_nothing_is_all_segments_of_the_published_evaluation() -> None:
    published, tokens = hrm.tiny(halt_max_steps=3), _tokens()
    batch = {"inputs": tokens, "puzzle_identifiers": torch.zeros(3).int()}
    carry, outputs, segments = published.initial_carry(batch), {}, 0
    while not segments or not carry.halted.all():
        carry, outputs = published(carry, batch)
        segments += 1
    model = _adapted(published)
    assert (segments, model.n_loops) == (3, 6)
    assert (model(tokens) - outputs["logits"]).abs().max() <= 1e-5


def test_the_halting_head_is_read_after_every_loop() -> None:
    published, tokens = hrm.tiny(), _tokens()
    model = _adapted(published)
    _, cache = model.run_with_cache(tokens, n_loops=4, names_filter="hook_halt")
    assert cache.stack("hook_halt").shape == (4, 3, 2)
    for n_loops in (2, 4):  # ends of segments
        outputs = hrm.segments(published, tokens, n_loops)
        expected = torch.stack([outputs["q_halt_logits"], outputs["q_continue_logits"]], -1)
        assert (cache[f"loops.{n_loops - 1}.hook_halt"] - expected).abs().max() <= 1e-5
        state = model(tokens, n_loops=n_loops, return_type="state")
        stops = outputs["q_halt_logits"] > outputs["q_continue_logits"]
        probability = model.exit_probability(state)
        assert probability.shape == (3, 6)
        assert torch.equal((probability > 0.5).all(-1), stops)


def test_a_run_stops_where_the_halting_head_first_says_so() -> None:
    published, tokens = hrm.tiny(H_cycles=1), _tokens()  # a segment is a loop
    with torch.no_grad():
        published.inner.q_head.bias.copy_(torch.tensor([-0.9, 0.0]))
    ends = torch.full((3,), 9)
    for n_loops in range(8, 0, -1):
        outputs = hrm.segments(published, tokens, n_loops)
        ends[outputs["q_halt_logits"] > outputs["q_continue_logits"]] = n_loops
    model = _adapted(published)
    stopped = run_until(model, tokens, GateAbove(model.exit_probability), max_loops=9)
    assert torch.equal(stopped.loop, ends)
    assert len(set(ends.tolist())) > 1  # at several loops


def test_a_model_that_computes_in_half_precision_says_so() -> None:
    model, tokens = _adapted(hrm.tiny(forward_dtype="bfloat16")), _tokens()
    logits, cache = model.run_with_cache(tokens, n_loops=2, names_filter="resid_post")
    assert model.dtype == logits.dtype == torch.bfloat16
    assert cache.nbytes == model.cache_nbytes(3, 6, n_loops=2, names_filter="resid_post")
    native = hrm.native(hrm.tiny(forward_dtype="bfloat16"), tokens, 2)
    assert (logits - native).abs().max() < 0.1


def _adapted_trm(published: hrm.ACTWrapper) -> TRMAdapter:
    model = adapt(published)
    assert isinstance(model, TRMAdapter)
    return model


def test_a_puzzle_may_have_more_positions_than_its_vector_fills() -> None:
    published = trm.tiny(puzzle_emb_ndim=40, puzzle_emb_len=4)
    model, tokens = _adapted_trm(published), _tokens()
    logits = model(model.with_puzzle(tokens, PUZZLES), n_loops=3)
    expected = trm.native(published, tokens, 3, puzzles=PUZZLES)
    assert (logits[:, 4:] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("places", ["rope", "learned", "none"])
def test_any_kind_of_positions(places: str) -> None:
    published = trm.tiny(pos_encodings=places)
    model, tokens = _adapted_trm(published), _tokens()
    logits, cache = model.run_with_cache(tokens, n_loops=3)
    assert (logits - trm.native(published, tokens, 3)).abs().max() <= 1e-5
    assert ("blocks.0.attn.hook_rot_q" in cache) == (places == "rope")
    assert cache.nbytes == model.cache_nbytes(3, 6, n_loops=3)


def test_an_mlp_over_the_positions_in_the_place_of_attention() -> None:
    published = trm.tiny(mlp_t=True)
    model, tokens = _adapted_trm(published), _tokens()
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
    sites = [f"loops.{t}.inner.{s}.blocks.0.hook_mix_out" for t in range(3) for s in range(3)]
    hooks = [(sites, lambda x, hook: x + change)]
    assert (model.run_with_hooks(tokens, n_loops=3, fwd_hooks=hooks) - expected).abs().max() <= 1e-5
    with naming("inputs"):
        model(tokens[:, :5])
    with pytest.raises(HookError):
        model.site("attn.hook_pattern", loop=0, layer=0)


@pytest.mark.parametrize("alone", [True, False])
def test_the_halting_head_stops_where_the_published_code_does(alone: bool) -> None:
    published, tokens = trm.tiny(no_ACT_continue=alone), _tokens()
    with torch.no_grad():  # about as ready to halt as not
        published.inner.q_head.bias.copy_(torch.tensor([-0.35, 0.6]))
    model, stops = _adapted_trm(published), []
    for n_loops in (2, 4, 6, 8):
        outputs = trm.segments(published, tokens, n_loops)
        other = 0 if alone else outputs["q_continue_logits"]
        stops.append(outputs["q_halt_logits"] > other)
        state = model(tokens, n_loops=n_loops, return_type="state")
        assert torch.equal((model.exit_probability(state) > 0.5).all(-1), stops[-1])
    assert 0 < torch.stack(stops).float().mean() < 1  # it does both
