"""Tasks with next-token prediction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    Batch,
    Copy,
    FullOutput,
    NextToken,
    Task,
    TokenAddition,
    TokenByToken,
    get_task,
)
from tests.tasks.answers import ANSWERS, SETTINGS, spelled

EVERY_TASK = [get_task(name, **settings) for name, settings in SETTINGS]
TASKS = [task for task in EVERY_TASK if isinstance(task, TokenByToken)]


def drawn(task: TokenByToken, seed: int, distribution: str | None = None) -> Batch:
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(1, 5, (8,), generator=g)
    return task.sample(n, generator=g, distribution=distribution)


def decoded(task: TokenByToken, batch: Batch) -> torch.Tensor:
    """What a perfect model makes, one token at a time, of prompts of different lengths."""
    prompt, mask = task.prompt_of(batch)
    rows = [row[known].tolist() for row, known in zip(prompt, mask)]
    steps = []
    for _ in range(batch.inputs.shape[1]):
        tokens = []
        for row in rows:
            # A position after the last one that is asked about is one after the end.
            target = int(task.targets(torch.tensor([row]))[0, -1])
            tokens.append(task.end if target == IGNORE else target)
            row.append(tokens[-1])
        steps.append(tokens)
        if all(task.end in generated for generated in zip(*steps)):
            break
    return torch.tensor(steps).T


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_decoding_by_the_oracle_makes_the_inputs_again_and_is_right(task):
    for distribution in task.distributions:
        batch = drawn(task, 0, distribution)
        generated = decoded(task, batch)
        assert task.is_right(batch, generated).all()
        prompt, mask = task.prompt_of(batch)
        length = mask.sum(1)
        answer, steps = task.answers(batch)
        for row, full in enumerate(batch.inputs.tolist()):
            start, n_steps = int(length[row]), int(steps[row])
            assert prompt[row, :start].tolist() == full[:start]
            assert set(prompt[row, start:].tolist()) <= {task.end}
            assert answer[row, :n_steps].tolist() == generated[row, :n_steps].tolist()
            assert answer[row, n_steps - 1 :].tolist() == [task.end] * (
                answer.shape[1] - n_steps + 1
            )
            rest = generated[row].tolist()
            padded = rest + [task.end] * (len(full) - start - len(rest))
            assert full[start:] == padded[: len(full) - start]
            targets = batch.targets[row][batch.targets[row] != IGNORE].tolist()
            assert targets == answer[row, :n_steps].tolist()


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
    generated = torch.where(share < 0.05, noise, wide[:, : shape[1]])
    right = task.is_right(batch, generated).tolist()
    for row, (tokens, expected) in enumerate(zip(generated.tolist(), answer.tolist())):
        ended = tokens[: tokens.index(task.end) + 1] if task.end in tokens else None
        assert right[row] == (ended == expected[: expected.index(task.end) + 1])


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_answers_follow_from_prompts_alone(task):
    batch = drawn(task, 3)
    prompt, mask = task.prompt_of(batch)
    for one, other in zip(task.answers(prompt), task.answers(batch)):
        assert torch.equal(one, other)
    again, known = task.prompt_of(prompt)
    assert torch.equal(again, prompt) and torch.equal(known, mask)


def test_bad_generated_tokens_and_a_batch_with_wrong_lengths_are_refused():
    task = AbacusAddition()
    batch = task.encode([(95, 8)])
    with pytest.raises(InputError) as caught:
        task.is_right(batch, torch.tensor([[15]]))
    assert caught.value.what == "generated"
    copy = get_task("copy").sample(5, batch_size=2, generator=torch.Generator())
    short = Batch(copy.inputs, copy.targets, copy.n - 3, copy.n_loops)
    with pytest.raises(InputError) as caught:
        get_task("next_token").from_batch(short)  # type: ignore[attr-defined]
    assert caught.value.what == "n"


WRAPPED = [(name, given) for name, given in SETTINGS if isinstance(get_task(name), FullOutput)]


@pytest.mark.parametrize("n_pause", [0, 1, 4])
@pytest.mark.parametrize(("of", "of_settings"), WRAPPED)
def test_examples_are_those_of_the_wrapped_task_token_by_token(of, of_settings, n_pause):
    task = NextToken(of=of, of_settings=of_settings, n_pause=n_pause)
    inner = task.task
    spelling = [*spelled(inner), "P"]
    n = torch.randint(1, 12, (12,), generator=torch.Generator().manual_seed(1))
    for distribution in task.distributions:
        batch, wrapped = (
            x.sample(n, generator=torch.Generator().manual_seed(2), distribution=distribution)
            for x in (task, inner)
        )
        assert torch.equal(batch.n, wrapped.n) and torch.equal(batch.n_loops, wrapped.n_loops)
        assert batch.inputs.shape == (12, task.n_positions(int(n.max())))
        assert torch.equal(task.targets(batch), batch.targets)
        for tokens, targets, full in zip(
            batch.inputs.tolist(), batch.targets.tolist(), wrapped.inputs.tolist()
        ):
            prompt = "".join(spelling[t] for t in full[1 : full.index(inner.equals)])
            answer = ANSWERS[of](prompt)
            text = "".join(spelling[t] for t in tokens)
            assert text.rstrip(".") == f"^{prompt}={'P' * n_pause}{answer}"
            assert text.endswith(".")
            before = len(prompt) + 1 + n_pause
            answer_text = "".join(spelling[t] for t in targets[before:] if t != IGNORE)
            assert answer_text == answer + "."
            assert targets[:before] == [IGNORE] * before
            # Shifted by one: what is asked for at a position is what stands at the next.
            end = before + len(answer_text)
            assert targets[before:end] == tokens[before + 1 : end + 1]
            assert targets[end:] == [IGNORE] * (len(targets) - end)
        assert task.decode(batch) == inner.decode(wrapped)


def test_it_has_the_wrapped_tasks_words_for_what_is_wrong() -> None:
    task = NextToken(of="copy", n_pause=1)
    batch = task.from_batch(Copy().from_bits(torch.tensor([[1, 0, 1]]), torch.tensor([3])))
    answers = batch.targets.clone()
    answers[0, 5:9] = torch.tensor([1, 2, 0, 3])  # 2 is the '=', which no answer has
    right, wrong = "copy of 101 = 101", "copy of 101 = 1?0"
    assert task.decode(batch) == [right]
    assert task.decode(batch, answers) == [wrong]


def test_a_batch_of_python_integers() -> None:
    task = NextToken(of="token_addition")
    text = "011 + 101 = 1000"
    assert task.decode(task.encode([(3, 5)], n=3)) == [text]
    assert isinstance(task, Task)
    assert get_task(task.name, **task.config()) == task


def test_what_is_shown_of_it() -> None:
    task = NextToken(of="unique_set", of_settings={"n_symbols": 9}, n_pause=2)
    assert "2 pause tokens" in task.describe()
    assert task.describe().endswith(get_task("unique_set", n_symbols=9).describe())
    assert task.d_vocab == task.d_vocab_out == 13
    assert NextToken(of="unique_set", of_settings={"n_symbols": 9}).d_vocab == 12


def test_a_task_of_ones_own_with_full_output_can_be_wrapped() -> None:
    class Flipped(Copy):
        name = "flipped"

        def _solve(
            self, prompt: torch.Tensor, n: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return 1 - prompt, n

    flipped = Flipped().from_bits(torch.tensor([[1, 0, 1]]), torch.tensor([3]))
    task = NextToken(of="flipped", n_pause=1)
    assert task.from_batch(flipped).inputs.tolist() == [[4, 1, 0, 1, 2, 5, 0, 1, 0, 3]]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"of": "addition"}, "of"),
        ({"of": "next_token"}, "of"),
        ({"of": "copi"}, "of"),
        ({"of": "copy", "of_settings": {"m": 3}}, "setting of Copy"),
        ({"of": "multiplication", "of_settings": {"m": 0}}, "m"),
        ({"n_pause": -1}, "n_pause"),
    ],
)
def test_bad_settings_are_refused(values, what):
    with pytest.raises(ConfigError) as caught:
        NextToken(**values)
    assert caught.value.what == what


PAUSED = NextToken(of="copy", n_pause=2)


@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (lambda: PAUSED.encode([(1, 2)]), "text"),
        (lambda: PAUSED.sample_operands(1, 2, batch_size=1, generator=torch.Generator()), "of"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 2, 5, 0]])), "inputs"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 2, 5]])), "inputs"),
        (lambda: PAUSED.targets(torch.tensor([[4, 5, 2, 5, 5]])), "inputs"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 6, 5, 5]])), "inputs"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 1, 5, 5]])), "inputs"),
        (
            lambda: PAUSED.from_batch(TokenAddition().encode([(1, 1)], n=1)),
            "inputs",
        ),
    ],
)
def test_bad_inputs_are_refused(attempt, what):
    with pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what
