"""Samplers, their arguments, and the data of studies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.tasks import (
    IGNORE,
    Addition,
    FullOutput,
    Parity,
    PrefixSum,
    as_batch,
    as_prompts,
    get_task,
)
from tests.tasks.answers import SETTINGS

TASKS = [get_task(name, **settings) for name, settings in SETTINGS]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("task", TASKS, ids=repr)
@pytest.mark.parametrize("n", [0, -1, 1.5, "8", True, None])
def test_a_bad_length_is_refused(task, n):
    generator = rng()
    for attempt in (
        lambda: task.sample(n, batch_size=2, generator=generator),
        lambda: task.n_loops(n),
        lambda: task.n_positions(n),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        assert caught.value.what == "n"


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("n", "batch_size", "what"),
    [
        (8, None, "batch_size"),
        (8, 0, "batch_size"),
        (torch.tensor([3.0, 4.0]), None, "n"),
        (torch.tensor([[3, 4]]), None, "n"),
        (torch.tensor([], dtype=torch.int64), None, "n"),
        (torch.tensor([3, 0]), None, "n"),
        (torch.tensor([3, 4]), 3, "batch_size"),
    ],
)
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_bad_lengths_and_batch_sizes_say_what_is_wrong(task, n, batch_size, what):
    with pytest.raises(InputError) as caught:
        task.sample(n, batch_size=batch_size, generator=rng())
    assert caught.value.what == what


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_an_unknown_distribution_and_a_bad_generator_are_refused(task):
    with pytest.raises(InputError) as caught:
        task.sample(4, batch_size=2, generator=rng(), distribution="unifrom")
    assert caught.value.what == f"distribution of task {task.name}"
    with pytest.raises(InputError) as caught:
        task.sample(4, batch_size=2, generator=7)
    assert caught.value.what == "generator"


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_mixed_lengths_are_padded_and_answered_as_if_alone(task):
    n = torch.tensor([3, 9, 1, 6])
    batch = task.sample(n, generator=rng())
    assert batch.n.tolist() == n.tolist()
    assert batch.n_loops.tolist() == [task.n_loops(int(k)) for k in n]
    assert batch.inputs.shape[1] == task.n_positions(9)
    for row, length in enumerate(n.tolist()):
        columns = list(task.unpadded(range(batch.inputs.shape[1]), length))
        assert len(columns) == task.n_positions(length)
        single = task.targets(batch.inputs[row : row + 1, columns])
        assert torch.equal(batch.targets[row, columns], single[0])
        rest = set(range(batch.inputs.shape[1])) - set(columns)
        beyond = task.d_vocab_out - 1 if isinstance(task, FullOutput) else IGNORE
        assert {int(batch.targets[row, at]) for at in rest} <= {beyond}


def test_mixed_lengths_draw_from_the_same_distribution_as_one_length():
    n = torch.randint(1, 13, (4000,), generator=rng(5))
    batch = Addition().sample(n, generator=rng(6), distribution="uniform")
    bits = batch.inputs[batch.targets != IGNORE]
    share = torch.bincount(bits, minlength=4) / bits.numel()
    # 26,000 draws of four equally likely pairs: 0.015 is more than five standard errors.
    assert (share - 0.25).abs().max() < 0.015


def test_propagate_draws_each_examples_probability_from_the_three():
    task = Addition()
    batch = task.sample(400, batch_size=600, generator=rng(2))
    share = task.propagate(batch)[:, 1:].double().mean(dim=1)
    nearest = (share[:, None] - torch.tensor([0.5, 0.8, 0.95])).abs()
    # 400 bits: a standard error of at most 0.025, so 0.125 is five of them.
    assert nearest.min(dim=1).values.max() < 0.125
    counts = torch.bincount(nearest.argmin(dim=1), minlength=3)
    assert counts.min() > 140
    carry_free = ~task.propagate(batch)[:, 1:]
    generated = task.generate(batch)[:, 1:][carry_free].double().mean()
    assert abs(float(generated) - 0.5) < 0.02


@pytest.mark.parametrize("task", [Parity(), PrefixSum()], ids=repr)
def test_biased_bits_draw_each_examples_bias_from_the_three(task):
    batch = task.sample(400, batch_size=300, generator=rng(2), distribution="biased")
    share = (batch.inputs == 1).sum(dim=1) / 400
    nearest = (share[:, None] - torch.tensor([0.05, 0.5, 0.95])).abs()
    assert nearest.min(dim=1).values.max() < 0.125
    assert torch.bincount(nearest.argmin(dim=1), minlength=3).min() > 60


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_examples_are_drawn_on_the_generators_device(task):
    generator = torch.Generator(device="cuda").manual_seed(0)
    batch = task.sample(9, batch_size=4, generator=generator)
    assert batch.inputs.device.type == batch.targets.device.type == "cuda"
    assert torch.equal(task.targets(batch).cpu(), task.targets(batch.to("cpu")))
    with pytest.raises(InputError) as caught:
        task.sample(torch.tensor([3, 4]), generator=generator)
    assert caught.value.what == "n"


def test_the_right_output_of_a_token_is_the_next_one() -> None:
    tokens = torch.tensor([[5, 3, 8, 3], [1, 2, 3, 4]])
    batch = as_prompts(tokens, n_loops=6)
    assert batch.targets.tolist() == [[3, 8, 3, -100], [2, 3, 4, -100]]
    assert torch.equal(batch.inputs, tokens)
    assert batch.n_loops.tolist() == [6, 6] and batch.n.tolist() == [4, 4]
    listed: Any = tokens.tolist()
    assert torch.equal(as_prompts(listed, n_loops=6).inputs, tokens)


@pytest.mark.parametrize(
    "tokens", [torch.ones(2, 3), torch.tensor([1, 2]), torch.tensor([[1]]), [[1, 2], [3]]]
)
def test_what_is_no_prompts_is_refused(tokens: Any, no_type_checks: None) -> None:
    with pytest.raises(InputError) as caught:
        as_prompts(tokens, n_loops=2)
    assert caught.value.what == "tokens"


def test_more_than_can_be_drawn_is_refused_before_it_is_drawn() -> None:
    with pytest.raises(InputError) as caught:
        as_batch(Addition(), n=10**8, batch_size=512)
    assert caught.value.what == "n, batch_size"


def test_a_seed_stands_for_a_generator() -> None:
    task = Addition()
    drawn = task.sample(8, batch_size=4, seed=3)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(drawn.inputs, task.sample(8, batch_size=4, generator=generator).inputs)
    assert not torch.equal(drawn.inputs, task.sample(8, batch_size=4).inputs)
