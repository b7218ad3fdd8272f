"""Dynamics of known models: what is asked only of programs that settle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import one_hot

from loopinterp.benchmark import known_models
from loopinterp.benchmark.mechanism_scores import (
    _LEAST_BITS,
    _accuracy,
    score_dynamics,
    score_probes,
    score_wavefront,
)
from loopinterp.programs import full, get_program, tokens, var


def test_no_stability_at_the_end_is_asked_where_some_input_never_settles():
    bit = (tokens < 2) & tokens
    flips = dataclasses.replace(
        get_program("prefix_xor"),
        name="flips_at_ones",
        prepare={"u": full(0)},
        step={"u": var("u") ^ bit},
        finish=var("u"),
    )
    (known,) = known_models([flips], n=3, examples=32)
    settles = torch.tensor([1 not in row for row in known.batch.inputs.tolist()])
    assert settles.any() and not settles.all()
    (settled,) = known_models([dataclasses.replace(flips, step={"u": bit})], n=3, examples=32)
    assert score_dynamics(settled)["stability"].value < 0.01
    scores = score_dynamics(known)
    assert "stability" not in scores
    # What flips to the end never settles, in the model as in the program.
    assert scores["settling loop"].value == 1.0


def test_with_its_directions_in_place_a_variable_is_found_beyond_what_the_rest_says():
    (known,) = known_models(["prefix_xor"], n=4, examples=64)
    scores = score_probes(known)
    assert scores["probe finds"].value == 1
    # A share that is found beyond another share: never more than all, less the best guess.
    prefix = get_program("prefix_xor").trace(known.batch.inputs, n_loops=4).variables["prefix"]
    guessed = min(float(max(v.float().mean(), 1 - v.float().mean())) for v in prefix[1:])
    selectivity = "probe finds nothing else"
    assert 0 < scores[selectivity].control < 1 - guessed + 0.1


def test_a_probe_is_scored_on_other_examples_and_only_on_labels_that_it_has_seen():
    train = torch.tensor([True, True, False, False])
    labels = torch.tensor([[0, 1], [1, 0], [0, 1], [2, 0]])
    places = one_hot(labels, 3).float()
    assert _accuracy(places, labels, train) == 1
    wrong = places.clone()
    wrong[2] = places[2].flip(0)
    assert _accuracy(wrong, labels, train) == pytest.approx(1 / 3)


def test_the_shortest_addition_that_the_study_can_be_made_of_is_asked():
    (known,) = known_models(["ripple"], n=_LEAST_BITS, examples=8)
    score = score_wavefront(known)["wavefront"]
    assert score.value >= 0.95 > score.control
    (shorter,) = known_models(["ripple"], n=_LEAST_BITS - 1, examples=8)
    assert score_wavefront(shorter) == {}
