"""What may stand in the stream, against what does."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.compiler import Compiled, compile_program, distract, rotate
from loopinterp.compiler.circuit import orthonormal
from loopinterp.compiler.disguises import weights_of
from loopinterp.compiler.stream_features import StreamFeatures
from loopinterp.compiler.superposition import unlisted_directions
from tests.compiler.small_models import cached, section_of, small_model

LOOPS = 3


def contents(compiled: Compiled, inputs: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Everything that stands at each site in a run [vector, d_model]."""
    recorded: dict[tuple[str, int], list[torch.Tensor]] = {}
    for sublayer, hook in enumerate(("hook_resid_pre", "hook_resid_mid")):
        for number, x in cached(compiled, inputs, LOOPS, hook).items():
            section, layer = section_of(compiled, number, LOOPS)
            recorded.setdefault((section, 2 * layer + sublayer), []).append(x.flatten(0, 1))
    return {site: torch.cat(x).double() for site, x in recorded.items()}


@pytest.mark.parametrize("program", ["one_shot", "unique_set", "binary_sum", "abacus_ripple"])
def test_nothing_else_stands_anywhere(program):
    plain = small_model(program)
    turned = rotate(plain.compiled, seed=0)
    features = StreamFeatures(turned.circuit)
    for (section, sublayer), x in contents(turned, plain.inputs).items():
        basis = orthonormal(features.at(section, sublayer).span)
        assert (x - x @ basis.mT @ basis).abs().max() < 1e-4, (section, sublayer)


def test_all_of_it_does():
    compiled = compile_program("ripple", max_length=5)
    tokens = torch.tensor([[4, *bits] for bits in itertools.product(range(6), repeat=4)])
    features = StreamFeatures(compiled.circuit)
    for (section, sublayer), x in contents(compiled, tokens).items():
        assert len(orthonormal(x)) == len(orthonormal(features.at(section, sublayer).span))


def test_bounds_hold_for_what_stands_there():
    plain = small_model("one_shot")
    rows = torch.randn(
        20, plain.compiled.model.config.d_model, generator=torch.Generator().manual_seed(0)
    ).double()
    features = StreamFeatures(plain.compiled.circuit)
    for (section, sublayer), x in contents(plain.compiled, plain.inputs).items():
        low, high = features.at(section, sublayer).extremes(rows)
        read = x @ rows.mT
        assert (read > low - 1e-5).all() and (read < high + 1e-5).all()


def test_directions_of_distractors_are_found_behind_a_rotation():
    plain = small_model("one_shot").compiled
    for seed, width in ((0, 1), (1, 5)):
        turned = rotate(distract(plain, width=width, seed=seed), seed=seed)
        assert len(unlisted_directions(weights_of(turned), turned.circuit)) == width
    assert len(unlisted_directions(weights_of(plain), plain.circuit)) == 0
