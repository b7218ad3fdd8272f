"""A sweep whose cells take a tenth of a second."""

from __future__ import annotations

from loopinterp.training import Sweep, SweepEvaluation
from tests.training.tiny_run import TINY

SMALL = Sweep(
    about="Do noise and norm matter?",
    config=TINY.replace(steps=4, log_every=1, checkpoint_every=2, ema=0.0),
    settings={"base": (), "no noise": ("state_noise=0",)},
    seeds=(0, 1),
    evaluation=SweepEvaluation(lengths=(2, 4), samples=8),
)
"""Two settings, two seeds, two lengths."""
