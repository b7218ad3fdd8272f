"""Noise on weights: as large as it is said to be, and on matrices only."""

from __future__ import annotations

import math

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import add_noise, compare_with_program, rotate
from tests.rasp.disguises.small_models import small_model


@pytest.mark.parametrize("turned", [False, True])
def test_noise_is_as_large_as_said_against_every_matrix_in_every_basis(turned):
    plain = small_model("unique_set").compiled
    plain = rotate(plain, seed=1) if turned else plain
    before = plain.model.state_dict()
    after = add_noise(plain, relative=0.1, seed=0).model.state_dict()
    for name, old in before.items():
        parts = zip(old.chunk(3), after[name].chunk(3)) if "qkv" in name else [(old, after[name])]
        for w, noisy in parts:
            if name.endswith("bias"):
                assert torch.equal(w, noisy)
            else:
                # Of n entries, the size is known to 1 / sqrt(2 n).
                size = float((noisy - w).norm() / w.norm().clamp(min=1e-9))
                expected = 0.1 if w.any() else 0.0
                assert abs(size - expected) < 0.5 / math.sqrt(w.numel()), name


def test_noise_of_nothing_is_nothing():
    plain = small_model("ripple").compiled
    same = add_noise(plain, relative=0, seed=0).model.state_dict()
    assert all(torch.equal(w, same[name]) for name, w in plain.model.state_dict().items())


def test_a_little_noise_is_borne_and_much_is_not():
    plain = small_model("ripple")
    wrong = []
    for relative in (1e-3, 1.0):
        noisy = add_noise(plain.compiled, relative=relative, seed=0)
        agreement = compare_with_program(noisy, plain.inputs, n_loops=plain.n_loops)
        wrong.append(sum(agreement.wrong_values.values()) + agreement.wrong_answers)
    assert wrong[0] == 0 and wrong[1] > 50


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("relative", [-0.1, math.inf, math.nan, True, "0.1", None])
def test_bad_sizes_of_noise(relative):
    with pytest.raises(InputError, match="relative: expected a number >= 0"):
        add_noise(small_model("ripple").compiled, relative=relative, seed=0)
