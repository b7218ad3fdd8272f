"""With its weights copied in, our model gives the logits of each published one.

Every parameter of a peer is first moved off its initial value, norms and biases included, so
that none can be left out unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from analyses.benchmarks import notebook_peer as notebook
from tests.models.peers import abacus, gpt2

if TYPE_CHECKING:
    from loopinterp.models import LoopedTransformer

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _pytorchs_slow_path() -> Iterator[None]:
    """PyTorch's own fast path of the encoder layer gives NaN with a bias that is not 0 or -inf."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def shaken(peer: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if "wpe" not in name:
                parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return peer.eval()


@torch.no_grad()
def assert_equal_logits(expected: torch.Tensor, given: torch.Tensor) -> None:
    assert expected.isfinite().all() and expected.std() > 0.1, "the comparison would be empty"
    # Logits reach 20, where one rounding of float32 is 2e-6.
    torch.testing.assert_close(given, expected, atol=TOLERANCE, rtol=1e-6)


def hooked(model: LoopedTransformer, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same run on the explicit path, every hook listening."""
    return model.run_with_cache(inputs, **options)[0]


@pytest.mark.parametrize("n_pos", [8, 24])
@torch.no_grad()
def test_the_notebooks_standard_model(n_pos: int, generator: torch.Generator) -> None:
    peer = shaken(notebook.Standard(), generator)
    ours = notebook.standard_as_ours(peer)  # type: ignore[arg-type]
    bits = torch.randint(0, 2, (5, n_pos, 2), generator=generator).float()
    assert_equal_logits(peer(bits), ours(bits))
    assert_equal_logits(peer(bits), hooked(ours, bits))


@pytest.mark.parametrize("n_loops", [1, 2, 12, 29])
@torch.no_grad()
def test_the_notebooks_looped_model(n_loops: int, generator: torch.Generator) -> None:
    peer = shaken(notebook.Looped(), generator)
    ours = notebook.looped_as_ours(peer)  # type: ignore[arg-type]
    bits = torch.randint(0, 2, (5, 24, 2), generator=generator).float()
    assert_equal_logits(peer(bits, n_loops), ours(bits, n_loops=n_loops))
    assert_equal_logits(peer(bits, n_loops), hooked(ours, bits, n_loops=n_loops))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n_loops", [1, 5, 20])
@torch.no_grad()
def test_the_looped_gpt2(depth: int, n_loops: int, generator: torch.Generator) -> None:
    peer = shaken(gpt2.LoopedGPT2(6, 4, d_model=32, n_heads=8, depth=depth), generator)
    ours = gpt2.as_ours(peer)  # type: ignore[arg-type]
    tokens = torch.randint(0, 6, (4, 17), generator=generator)
    assert_equal_logits(peer(tokens, n_loops), ours(tokens, n_loops=n_loops))
    assert_equal_logits(peer(tokens, n_loops), hooked(ours, tokens, n_loops=n_loops))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n_loops", [1, 4, 16])
@pytest.mark.parametrize("offset", [0, 37])
@torch.no_grad()
def test_the_abacus_decoder(
    depth: int, n_loops: int, offset: int, generator: torch.Generator
) -> None:
    peer = shaken(abacus.AbacusDecoder(d_model=32, n_heads=4, d_mlp=64, depth=depth), generator)
    ours = abacus.as_ours(peer)  # type: ignore[arg-type]
    tokens = abacus.encode(["321+654=975$", "99+1=001$$$$", "7*8=65$$-123"])
    expected = peer(tokens, n_loops, offset)
    assert_equal_logits(expected, ours(tokens, n_loops=n_loops, position_offset=offset))
    assert_equal_logits(expected, hooked(ours, tokens, n_loops=n_loops, position_offset=offset))


@torch.no_grad()
def test_an_abacus_offset_moves_the_digits_only(generator: torch.Generator) -> None:
    peer = shaken(abacus.AbacusDecoder(d_model=32, n_heads=4, d_mlp=64, depth=1), generator)
    ours = abacus.as_ours(peer)  # type: ignore[arg-type]
    digits, signs = abacus.encode(["12+34="]), abacus.encode(["-+*=$$"])
    at = [ours(tokens, n_loops=3, position_offset=k) for tokens in (digits, signs) for k in (0, 9)]
    assert (at[0] - at[1]).abs().max() > 0.01
    assert torch.equal(at[2], at[3])


@torch.no_grad()
def test_the_fast_path_of_pytorchs_layer_is_not_to_be_trusted(generator: torch.Generator) -> None:
    """Why it is off above: under eval() it is wrong for the notebook's looped model."""
    peer = shaken(notebook.Looped(), generator)
    bits = torch.randint(0, 2, (5, 8, 2), generator=generator).float()
    right = peer(bits, 4)
    torch.backends.mha.set_fastpath_enabled(True)
    assert not torch.allclose(peer(bits, 4), right, atol=1e-2)


def test_the_notebooks_looped_model_cannot_tell_its_first_two_positions_apart() -> None:
    """Where they hold the same pair: so 1 + 1 twice, an input in 16, is wrong with any weights."""
    generator = torch.Generator().manual_seed(0)
    peer = shaken(notebook.Looped(), generator)
    bits = torch.randint(2, (32, 8, 2), generator=generator).float()
    logits = peer(bits, 13)
    alike = (bits[:, 0] == bits[:, 1]).all(-1)
    same = torch.isclose(logits[:, 0], logits[:, 1], atol=TOLERANCE).all(-1)
    assert 0 < alike.sum() < 32 and torch.equal(same, alike)
