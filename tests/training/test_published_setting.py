"""Training at the published setting is what a few lines of plain PyTorch make of the same batches.

Only rounding is between the two: the weights they begin with, the examples and T(n) are the same;
the model, the loss, the gradient, clipping, AdamW and its schedule are each other's own.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from analyses.published_loss import LIMIT, Curves, both, stretches
from analyses.published_settings import paper_config
from loopinterp.training import CurriculumConfig, Trainer, apply_settings

SHORT = ["batch_size=4", "steps=20", "curriculum.interval=4", "curriculum.max_n=4"]
SETTINGS: dict[str, tuple[str, list[str], int]] = {
    "as published": ("parity", [], 12),
    "64 heads, to the end of the cosine": ("parity", SHORT, 20),
    "several layers": ("copy", SHORT, 20),
}
"""The published curriculum is at length 1 for 500 steps, so short ones stand beside it."""


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_follows_plain_pytorch_step_by_step(name: str) -> None:
    task, changes, n_steps = SETTINGS[name]
    curves = both(apply_settings(paper_config(task, device="cpu"), changes), n_steps)
    assert curves.differences().max() < LIMIT
    assert curves.longest_n[-1] == (4 if changes else 1)
    losses = np.array(curves.ours)[:, 0]
    assert losses.min() < 0.5 * losses[0], "it learns"


FEW = ["batch_size=4", "steps=40", "curriculum.interval=2", "curriculum.max_n=3"]


@cache
def most_off(wrong: str | None) -> float:
    changes = FEW if wrong is None else [*FEW, wrong]
    return (
        both(apply_settings(paper_config("parity", device="cpu"), changes), 8).differences().max()
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "optimiser.betas=[0.9,0.99]",
        "optimiser.clip=none",
        "optimiser.schedule=constant",
        "optimiser.weight_decay=0",
        "model.act_fn=gelu",
        "model.initial_state=embedding",
    ],
)
def test_another_setting_is_told_apart_within_a_few_steps(wrong: str) -> None:
    assert most_off(wrong) > 20 * most_off(None)


@pytest.mark.parametrize("task", ["parity", "copy"])
def test_an_example_is_asked_after_as_many_loops_as_it_has_bits(task: str) -> None:
    config = paper_config(task, device="cpu").replace(
        curriculum=CurriculumConfig(kind="none", max_n=9)
    )
    drawn = Trainer(config).draw()
    n_bits = (drawn.inputs < 2).sum(1)
    assert len(n_bits.unique()) > 5 and torch.equal(drawn.questions.loops, n_bits[None])


def test_the_table_says_where_the_losses_part() -> None:
    rows = [[1.0 + 0.01 * (step == 2), 2.0, 3.0] for step in range(4)]
    curves = Curves(ours=rows, plain=[[1.0, 2.0, 3.0]] * 4, longest_n=[1, 1, 2, 2])
    last = stretches(curves).iloc[-1]
    assert (last["from_step"], last["to_step"], last["longest_n"]) == (2, 4, 2)
    # The losses of the last step.
    assert (last["ours"], last["plain"]) == (1, 1)
    assert last["loss_most_off"] == pytest.approx(0.01) and last["grad_norm_most_off"] == 0
    assert last["steps_over"] == 1
