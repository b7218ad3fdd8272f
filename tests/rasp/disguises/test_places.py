"""What may stand in the stream, against what does."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.rasp import Compiled, compile_program, distract, rotate
from loopinterp.rasp.disguises.places import Places, orthonormal, unlisted_directions
from loopinterp.rasp.disguises.weights import weights_of
from tests.rasp.disguises.subjects import cached, place_of, subject

LOOPS = 3


def contents(compiled: Compiled, inputs: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Everything that stands at each place in a run [vector, d_model]."""
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    for moment, site in enumerate(("hook_resid_pre", "hook_resid_mid")):
        for number, x in cached(compiled, inputs, LOOPS, site).items():
            section, layer = place_of(compiled, number, LOOPS)
            found.setdefault((section, 2 * layer + moment), []).append(x.flatten(0, 1))
    return {place: torch.cat(x).double() for place, x in found.items()}


@pytest.mark.parametrize("program", ["one_shot", "unique_set", "binary_sum", "abacus_ripple"])
def test_nothing_else_stands_anywhere(program):
    plain = subject(program)
    turned = rotate(plain.compiled, seed=0)
    places = Places(turned.circuit)
    for (section, moment), x in contents(turned, plain.inputs).items():
        basis = orthonormal(places.at(section, moment).span)
        assert (x - x @ basis.mT @ basis).abs().max() < 1e-4, (section, moment)


def test_all_of_it_does():
    compiled = compile_program("ripple", max_length=5)
    tokens = torch.tensor([[4, *bits] for bits in itertools.product(range(6), repeat=4)])
    places = Places(compiled.circuit)
    for (section, moment), x in contents(compiled, tokens).items():
        assert len(orthonormal(x)) == len(orthonormal(places.at(section, moment).span))


def test_bounds_hold_for_what_stands_there():
    plain = subject("one_shot")
    rows = torch.randn(
        20, plain.compiled.model.config.d_model, generator=torch.Generator().manual_seed(0)
    ).double()
    places = Places(plain.compiled.circuit)
    for (section, moment), x in contents(plain.compiled, plain.inputs).items():
        low, high = places.at(section, moment).extremes(rows)
        read = x @ rows.mT
        assert (read > low - 1e-5).all() and (read < high + 1e-5).all()


def test_directions_of_distractors_are_found_behind_a_rotation():
    plain = subject("one_shot").compiled
    for seed, width in ((0, 1), (1, 5)):
        turned = rotate(distract(plain, width=width, seed=seed), seed=seed)
        assert len(unlisted_directions(weights_of(turned), turned.circuit)) == width
    assert len(unlisted_directions(weights_of(plain), plain.circuit)) == 0
