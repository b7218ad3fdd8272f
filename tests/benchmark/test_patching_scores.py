"""Patching sweeps on known models: what is asked of them."""

import dataclasses

from loopinterp.benchmark import known_models
from loopinterp.benchmark.patching_scores import score_patching
from loopinterp.tasks.task import IGNORE


def test_answers_of_0_are_asked_like_any_other():
    (known,) = known_models(["prefix_xor"], n=4, examples=64)
    bases, targets = known.batch.inputs.clone(), known.batch.targets.clone()
    bases[:32, 1:] = 0
    targets[:32, 1:] = 0
    assert (targets[:, 0] == IGNORE).all()
    zeros = dataclasses.replace(known.batch, inputs=bases, targets=targets)
    scores = score_patching(dataclasses.replace(known, batch=zeros))
    assert scores["patched states"].value == 1
    assert scores["patched heads"].value < 1e-3 < scores["patched heads"].control
