"""Probes on known models: the scores and their controls, against what must come out."""

import pytest
import torch
from torch.nn.functional import one_hot

from loopinterp.benchmark import known_models
from loopinterp.benchmark.probe_scores import _accuracy, score_probes
from loopinterp.rasp import get_program


def test_with_its_directions_in_place_a_variable_is_found_beyond_what_the_rest_says():
    (known,) = known_models(["prefix_xor"], n=4, examples=64)
    scores = score_probes(known)
    assert scores["probe finds"].value == 1
    # A share that is found beyond another share: never more than all, less the best guess.
    prefix = get_program("prefix_xor").trace(known.batch.inputs, n_loops=4).variables["prefix"]
    guessed = min(float(max(v.float().mean(), 1 - v.float().mean())) for v in prefix[1:])
    assert 0 < scores["probe finds nothing else"].control < 1 - guessed + 0.1


def test_a_probe_is_scored_on_other_examples_and_only_on_labels_that_it_has_seen():
    train = torch.tensor([True, True, False, False])
    labels = torch.tensor([[0, 1], [1, 0], [0, 1], [2, 0]])
    places = one_hot(labels, 3).float()
    assert _accuracy(places, labels, train) == 1
    wrong = places.clone()
    wrong[2] = places[2].flip(0)
    assert _accuracy(wrong, labels, train) == pytest.approx(1 / 3)
