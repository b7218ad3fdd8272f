"""Dynamics of known models: what is asked only of programs that settle."""

import dataclasses

import torch

from loopinterp.benchmark import known_models
from loopinterp.benchmark.dynamics_scores import score_dynamics
from loopinterp.rasp import full, get_program, tokens, var


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
