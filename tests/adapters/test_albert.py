"""ALBERT: padding, groups of layers, the model without a head, and any sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.adapters import AlbertAdapter, adapt, load_published
from loopinterp.core.errors import InputError
from loopinterp.dynamics import convergence_study
from loopinterp.interventions import patching_sweep
from loopinterp.models import bind, iterate
from loopinterp.models.protocol import takes_loop
from loopinterp.tasks import Batch
from tests.adapters.published import albert

PAD = 5


def _tokens(n_pos: int = 7, batch: int = 3, seed: int = 1) -> Tensor:
    """Random tokens other than the padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(63, (batch, n_pos), generator=generator)
    return tokens + (tokens >= PAD)


def _padded() -> tuple[Tensor, Tensor]:
    """Examples with padding behind, before and inside, and one without; and where tokens are."""
    tokens = _tokens(batch=4)
    tokens[0, 5:] = tokens[1, :2] = tokens[2, 3] = PAD
    return tokens, tokens != PAD


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 5, "num_hidden_groups": 3, "inner_group_num": 2},
        {"num_hidden_layers": 2, "num_hidden_groups": 3},
        {"hidden_act": "relu", "num_attention_heads": 4},
        {"embedding_size": 32, "num_hidden_layers": 1},
        {"layer_norm_eps": 0.1},
        {"attn_implementation": "eager"},
    ],
)
@pytest.mark.parametrize("head", [True, False])
def test_any_sizes(head: bool, sizes: dict[str, Any]) -> None:
    published, tokens = albert.tiny(head=head, **sizes), _tokens()
    model = adapt(published)
    own = published(tokens)
    expected = own.logits if head else own.last_hidden_state
    logits, cache = model.run_with_cache(tokens)
    assert (model(tokens) - expected).abs().max() <= 1e-5
    assert (logits - expected).abs().max() <= 1e-5
    assert cache.nbytes == model.cache_nbytes(*tokens.shape)


def test_states_are_the_published_models_hidden_states() -> None:
    published, tokens = albert.tiny(), _tokens()
    expected = torch.stack(published(tokens, output_hidden_states=True).hidden_states)
    states = adapt(published)(tokens, return_type="states")
    assert states.shape == expected.shape
    assert (states - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_is_the_published_attention_mask(implementation: str) -> None:
    published = albert.tiny(inner_group_num=2, attn_implementation=implementation)
    tokens, real = _padded()
    model = adapt(published, pad=PAD)
    expected = published(tokens, attention_mask=real.long()).logits
    assert (model(tokens) - expected)[real].abs().max() <= 1e-5
    logits, cache = model.run_with_cache(tokens)
    assert (logits - expected)[real].abs().max() <= 1e-5
    patterns = cache.stack("attn.hook_pattern", layer=slice(None))  # [loop, layer, batch, head, …]
    hidden = ~real[:, None, None].expand(patterns.shape[2:])
    assert (patterns[:, :, hidden] == 0).all()
    assert (patterns[:, :, ~hidden] > 0).all()
    # Without the option the token is a token, and the answers are others.
    assert (adapt(published)(tokens) - expected)[real].abs().max() > 1e-3


def test_more_padding_changes_nothing() -> None:
    model, tokens = adapt(albert.tiny(), pad=PAD), _tokens()
    longer = torch.cat((tokens, torch.full((3, 4), PAD)), dim=1)
    for n_loops in (1, 6):
        states = model(tokens, n_loops=n_loops, return_type="states")
        padded = model(longer, n_loops=n_loops, return_type="states")[:, :, :7]
        assert (states - padded).abs().max() <= 1e-5


def test_padding_holds_in_every_way_to_step() -> None:
    model, (tokens, real) = adapt(albert.tiny(), pad=PAD), _padded()
    states = model(tokens, return_type="states")
    for loop, state in iterate(model, tokens, model.n_loops):
        assert torch.equal(state, states[loop])
    bound = bind(model, tokens)
    for rows in (torch.tensor([2, 0, 2]), slice(1, 3), torch.tensor([1])):
        some = bound.select(rows)
        assert (some.step(some.h0) - states[1, rows]).abs().max() <= 1e-5
    with pytest.raises(InputError, match="bind"):
        model.step(bound.h0, bound.e)
    each = torch.full((4,), model.n_loops)
    batch = Batch(tokens, model(tokens).argmax(-1), each, each)
    study = convergence_study(model, batch, n_loops=12, limit_steps=2, n_spectral=1)
    assert study.data.sizes
    # Of two prompts that differ at one position, the padding is the same for both.
    source = tokens.clone()
    source[:, 4] = (source[:, 4] + 1) % 64
    source[~real] = PAD
    swept = patching_sweep(model, tokens[:2], source[:2], n_loops=2, component="state", loops=[0])
    assert swept.data["effect"].sel(pos="all").squeeze().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("pad", [64, -1])
def test_padding_is_a_token(pad: int) -> None:
    with pytest.raises(InputError, match="pad"):
        adapt(albert.tiny(), pad=pad)


def test_an_example_of_padding_alone_is_refused() -> None:
    model, tokens = adapt(albert.tiny(), pad=PAD), _tokens()
    tokens[1] = PAD
    with pytest.raises(InputError, match="example 1"):
        model(tokens)


def test_layers_of_groups_take_turns() -> None:
    published = albert.tiny(num_hidden_layers=5, num_hidden_groups=3)
    model, tokens = adapt(published), _tokens()
    assert isinstance(model, AlbertAdapter)
    assert takes_loop(model) and not takes_loop(adapt(albert.tiny()))
    groups = list(published.albert.encoder.albert_layer_groups)
    order = [groups.index(next(g for g in groups if g.albert_layers is model.layers_at(t)))
             for t in range(8)]  # fmt: skip
    assert order == [0, 0, 1, 1, 2, 2, 2, 2]
    e = model.embed(tokens)
    with pytest.raises(InputError, match="loop"):
        model.step(e, e)
    states, bound = model(tokens, n_loops=7, return_type="states"), bind(model, tokens)
    for t in range(7):
        assert (model.step(states[t], e, loop=t) - states[t + 1]).abs().max() <= 1e-5
        assert (bound.at(t).step(states[t]) - states[t + 1]).abs().max() <= 1e-5
    assert (bound.at(0).step(states[4]) - states[5]).abs().max() > 1e-3


def test_the_readout_of_a_model_without_a_head_is_its_state() -> None:
    model, tokens = adapt(albert.tiny(head=False)), _tokens()
    state = model(tokens, return_type="state")
    assert torch.equal(model(tokens), state)
    assert model.config.d_vocab_out == state.shape[-1] == model.site_map.d_model
    assert not model.site_map.final


@pytest.mark.parametrize("head", [True, False])
def test_a_folder_is_loaded_with_the_head_that_it_holds(head: bool, tmp_path: Path) -> None:
    published, tokens = albert.tiny(head=head), _tokens()
    published.save_pretrained(tmp_path)
    model = load_published(str(tmp_path), pad=PAD)
    assert torch.equal(model(tokens), adapt(published)(tokens))
    assert load_published(str(tmp_path), dtype="float64").dtype == torch.float64
