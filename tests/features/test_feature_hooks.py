"""Reading, splicing, ablating and steering features against forwards made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.adapters import adapt
from loopinterp.core.errors import InputError
from loopinterp.features import (
    AutoencoderConfig,
    SparseAutoencoder,
    read_features,
    splice_hooks,
)
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from tests.adapters.kinds import KINDS
from tests.features.test_autoencoder import by_hand

N_LOOPS = 4


def transformer(n_layers: int = 1) -> LoopedTransformer:
    sizes: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 3}
    config = LoopedTransformerConfig(**sizes, n_layers=n_layers, injection="input")
    return LoopedTransformer(config, seed=0).eval().double()


def tokens(batch: int = 3, n_pos: int = 5) -> Tensor:
    return torch.randint(6, (batch, n_pos), generator=torch.Generator().manual_seed(1))


def drawn(width: int = 16, **settings: Any) -> SparseAutoencoder:
    settings = {"activation": "topk", "k": 6, **settings}
    config = AutoencoderConfig(d_in=width, n_features=24, **settings)
    return SparseAutoencoder(config, seed=3).double()


def identity(width: int) -> SparseAutoencoder:
    """Features are the positive and the negative parts of an activation."""
    config = AutoencoderConfig(d_in=width, n_features=2 * width)
    autoencoder, eye = SparseAutoencoder(config), torch.eye(width)
    with torch.no_grad():
        autoencoder.W_dec.copy_(torch.cat([eye, -eye]))
        autoencoder.W_enc.copy_(torch.cat([eye, -eye]).T)
    return autoencoder


@torch.no_grad()
def test_features_are_those_of_each_state() -> None:
    model, x, autoencoder = transformer(), tokens(), drawn()
    read = read_features(model, x, autoencoder, loops=[0, 3], n_loops=N_LOOPS)
    assert read.dims == ("loop", "batch", "pos", "feature")
    states = model(x, n_loops=N_LOOPS, return_type="states")
    for loop, b, p in np.ndindex(2, 3, 5):
        expected = by_hand(autoencoder, states[1 + (0, 3)[loop], b, p].numpy())[0]
        np.testing.assert_allclose(read.values[loop, b, p], expected, atol=1e-6)
    assert read["loop"].values.tolist() == [0, 3]


@torch.no_grad()
def test_heads_are_read_side_by_side() -> None:
    model, x, autoencoder = transformer(2), tokens(), drawn()
    read = read_features(model, x, autoencoder, component="z", layer=1, n_loops=2)
    _, cache = model.run_with_cache(x, n_loops=2)
    z = cache["loops.1.blocks.1.attn.hook_z"].flatten(2)
    np.testing.assert_allclose(read.sel(loop=1), autoencoder.encode(z), atol=1e-6)
    hooks = splice_hooks(model, autoencoder, component="z", layer=1, n_loops=2, error=True)
    assert torch.equal(model.run_with_hooks(x, n_loops=2, fwd_hooks=hooks), model(x, n_loops=2))


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("component", ["state_post", "resid_post"])
def test_an_identity_changes_nothing(kind: str, component: str) -> None:
    """In every adapter, at all loops: the splice of a perfect reconstruction."""
    model = adapt(KINDS[kind].build().eval())
    x = torch.randint(4, (2, 6), generator=torch.Generator().manual_seed(0))
    names = model.site(component, loop=[0, 1], layer=None, n_loops=2)
    layer = None if len(names) == 2 else 0
    _, cache = model.run_with_cache(x, n_loops=2, names_filter=names[:1])
    width = cache[names[0]].shape[-1]
    hooks = splice_hooks(model, identity(width), component=component, layer=layer, n_loops=2)
    clean = model(x, n_loops=2)
    spliced = model.run_with_hooks(x, n_loops=2, fwd_hooks=hooks)
    torch.testing.assert_close(spliced, clean, atol=1e-6, rtol=0)
    other = [(name, lambda y, hook: 0.5 * y) for name, _ in hooks]  # the comparison can fail
    halved = model.run_with_hooks(x, n_loops=2, fwd_hooks=other)
    assert not torch.allclose(halved, clean, atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("loop", range(N_LOOPS))
def test_a_change_at_one_loop_reaches_others_through_the_state_alone(
    loop: int, error: bool
) -> None:
    model, x, autoencoder = transformer(), tokens(), drawn()
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[:, 1:4] = True
    clean = model(x, n_loops=N_LOOPS, return_type="states")
    busiest = int(autoencoder.encode(clean[loop + 1]).sum((0, 1)).argmax())
    options: dict[str, Any] = {"ablate": [busiest], "steer": {2: 1.5}, "positions": mask}
    hooks = splice_hooks(model, autoencoder, loops=[loop], n_loops=N_LOOPS, error=error, **options)
    changed = model.run_with_hooks(x, n_loops=N_LOOPS, fwd_hooks=hooks, return_type="states")
    assert torch.equal(changed[: loop + 1], clean[: loop + 1])
    decoder, bias = (w.detach().numpy() for w in (autoencoder.W_dec, autoencoder.b_dec))
    h = clean[loop + 1].clone()
    for b, p in mask.nonzero().tolist():
        state = h[b, p].numpy()
        features, made = by_hand(autoencoder, state)
        features[busiest] = 0
        features[2] += 1.5
        new = features @ decoder + bias
        h[b, p] = torch.from_numpy(state + new - made if error else new)
    bound = model.bind(x)
    for state in changed[loop + 1 :]:  # no hook is on: each state follows from the one before
        torch.testing.assert_close(state, h, atol=1e-9, rtol=0)
        h = bound.step(h)
    assert not torch.allclose(changed[-1], clean[-1])


@torch.no_grad()
def test_the_error_kept_leaves_the_run_as_it_was() -> None:
    model, x = transformer(), tokens()
    hooks = splice_hooks(model, drawn(), n_loops=N_LOOPS, error=True)
    clean = model(x, n_loops=N_LOOPS)
    assert torch.equal(model.run_with_hooks(x, n_loops=N_LOOPS, fwd_hooks=hooks), clean)
    hooks = splice_hooks(model, drawn(), n_loops=N_LOOPS)
    assert not torch.allclose(model.run_with_hooks(x, n_loops=N_LOOPS, fwd_hooks=hooks), clean)


@torch.no_grad()
def test_a_transcoder_reads_one_site_and_writes_another() -> None:
    model, x = transformer(), tokens()
    transcoder = drawn(d_out=16, skip=True)
    transcoder.W_skip.copy_(0.1 * torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))
    options: dict[str, Any] = {"component": "ln2.hook_normalized", "output": "mlp_out"}
    hooks = splice_hooks(model, transcoder, **options, loops=[1], n_loops=3, ablate=[4])
    run = {"n_loops": 3, "names_filter": ["hook_mlp_out", "ln2.hook_normalized"]}
    with model.hooks(hooks, n_loops=3):
        _, cache = model.run_with_cache(x, **run)
    read, written = cache["ln2.hook_normalized", 1, 0], cache["mlp_out", 1, 0]
    features = transcoder.encode(read)
    features[..., 4] = 0
    expected = features @ transcoder.W_dec + transcoder.b_dec + read @ transcoder.W_skip.T
    torch.testing.assert_close(written, expected, atol=1e-9, rtol=0)
    _, clean = model.run_with_cache(x, **run)
    assert torch.equal(cache["mlp_out", 0, 0], clean["mlp_out", 0, 0])
    hooks = splice_hooks(model, transcoder, **options, n_loops=3, error=True)
    spliced = model.run_with_hooks(x, n_loops=3, fwd_hooks=hooks)
    assert torch.equal(spliced, model(x, n_loops=3))


def test_gradients_reach_features() -> None:
    model, autoencoder = transformer(), drawn()
    hooks = splice_hooks(model, autoencoder, loops=[1], n_loops=2)
    model.run_with_hooks(tokens(), n_loops=2, fwd_hooks=hooks).sum().backward()
    assert autoencoder.W_dec.grad is not None and autoencoder.W_dec.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ablate": [24]}, "ablate"),
        ({"steer": {-1: 1.0}}, "steer"),
        ({"output": "mlp_out"}, "output"),
        ({"component": "resid_postt"}, "component"),
        ({"component": "resid_post"}, "layer"),
        ({"loops": [9]}, "loop"),
    ],
)
def test_wrong_names_and_features_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as caught:
        splice_hooks(transformer(2), drawn(), n_loops=2, **options)
    assert caught.value.what == name


@pytest.mark.parametrize("component", ["resid_mid", "ln2.hook_normalized"])
def test_a_transcoder_writes_after_it_has_read(component: str) -> None:
    options: dict[str, Any] = {"component": component, "output": "attn_out", "loops": [1]}
    with pytest.raises(InputError) as caught:
        splice_hooks(transformer(), drawn(d_out=16), n_loops=3, **options)
    assert caught.value.what == "output"


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (2, 5)])
def test_positions_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    model, places = transformer(), torch.ones(shape, dtype=torch.bool)
    hooks = splice_hooks(model, drawn(), n_loops=2, positions=places)
    with pytest.raises(InputError) as caught:
        model.run_with_hooks(tokens(), n_loops=2, fwd_hooks=hooks)  # [3, 5]
    assert caught.value.what == "positions"


def test_a_site_of_another_width_is_refused() -> None:
    model = transformer()
    hooks = splice_hooks(model, drawn(), component="mlp.hook_post", n_loops=1)
    with pytest.raises(InputError) as caught:
        model.run_with_hooks(tokens(), n_loops=1, fwd_hooks=hooks)
    assert caught.value.what == "activation"
