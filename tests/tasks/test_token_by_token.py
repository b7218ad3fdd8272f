"""What a decoder is given and should make, of all tasks with next-token prediction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import IGNORE, AbacusAddition, Batch, TokenByToken, get_task
from tests.tasks.answers import SETTINGS

MADE = [get_task(name, **settings) for name, settings in SETTINGS]
TASKS = [task for task in MADE if isinstance(task, TokenByToken)]


def drawn(task: TokenByToken, seed: int, distribution: str | None = None) -> Batch:
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(1, 5, (8,), generator=g)
    return task.sample(n, generator=g, distribution=distribution)


def decoded(task: TokenByToken, batch: Batch) -> torch.Tensor:
    """What a perfect model makes, one token at a time, of prompts of different lengths."""
    prompt, length = task.prompt_of(batch)
    rows = [row[:k].tolist() for row, k in zip(prompt, length.tolist())]
    steps = []
    for _ in range(batch.inputs.shape[1]):
        made = []
        for row in rows:
            # A position after the last one that is asked about is one after the end.
            target = int(task.targets(torch.tensor([row]))[0, -1])
            made.append(task.end if target == IGNORE else target)
            row.append(made[-1])
        steps.append(made)
        if all(task.end in said for said in zip(*steps)):
            break
    return torch.tensor(steps).T


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_decoding_by_the_oracle_makes_the_inputs_again_and_is_right(task):
    for distribution in task.distributions:
        batch = drawn(task, 0, distribution)
        made = decoded(task, batch)
        assert task.is_right(batch, made).all()
        prompt, length = task.prompt_of(batch)
        answer, steps = task.answers(batch)
        for row, whole in enumerate(batch.inputs.tolist()):
            start, n_steps = int(length[row]), int(steps[row])
            assert prompt[row, :start].tolist() == whole[:start]
            assert set(prompt[row, start:].tolist()) <= {task.end}
            assert answer[row, :n_steps].tolist() == made[row, :n_steps].tolist()
            assert answer[row, n_steps - 1 :].tolist() == [task.end] * (
                answer.shape[1] - n_steps + 1
            )
            rest = made[row].tolist()
            padded = rest + [task.end] * (len(whole) - start - len(rest))
            assert whole[start:] == padded[: len(whole) - start]
            asked = batch.targets[row][batch.targets[row] != IGNORE].tolist()
            assert asked == answer[row, :n_steps].tolist()


@settings(max_examples=40, deadline=None)
@given(task=st.sampled_from(TASKS), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_an_answer_is_right_if_and_only_if_it_is_python_equal_up_to_its_end(task, seed, data):
    batch = drawn(task, seed)
    answer, _ = task.answers(batch)
    shape = (8, data.draw(st.integers(0, answer.shape[1] + 2)))
    g = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, task.d_vocab, shape, generator=g)
    # Most of the right answer, so that some are right.
    wide = torch.nn.functional.pad(answer, (0, max(0, shape[1] - answer.shape[1])), value=0)
    share = torch.rand(shape, generator=g)
    made = torch.where(share < 0.05, noise, wide[:, : shape[1]])
    right = task.is_right(batch, made).tolist()
    for row, (said, expected) in enumerate(zip(made.tolist(), answer.tolist())):
        ended = said[: said.index(task.end) + 1] if task.end in said else None
        assert right[row] == (ended == expected[: expected.index(task.end) + 1])


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_answers_follow_from_prompts_alone(task):
    batch = drawn(task, 3)
    prompt, length = task.prompt_of(batch)
    for one, other in zip(task.answers(prompt), task.answers(batch)):
        assert torch.equal(one, other)
    again, n = task.prompt_of(prompt)
    assert torch.equal(again, prompt) and torch.equal(n, length)


def test_bad_generated_tokens_and_a_batch_with_wrong_lengths_are_refused():
    task = AbacusAddition()
    batch = task.encode([(95, 8)])
    with pytest.raises(InputError, match=r"generated: expected tokens in 0\.\.14"):
        task.is_right(batch, torch.tensor([[15]]))
    copy = get_task("copy").sample(5, batch_size=2, generator=torch.Generator())
    short = Batch(copy.inputs, copy.targets, copy.n - 3, copy.n_loops)
    with pytest.raises(InputError, match="lengths of examples with room for 12 positions"):
        get_task("next_token").from_batch(short)  # type: ignore[attr-defined]
