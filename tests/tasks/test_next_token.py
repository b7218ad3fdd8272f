"""The next-token form of full-output tasks against the wrapped task's own answers."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, Copy, FullOutput, NextToken, Task, TokenAddition, get_task
from tests.tasks.answers import ANSWERS, SETTINGS, spelled

WRAPPED = [(name, given) for name, given in SETTINGS if isinstance(get_task(name), FullOutput)]


@pytest.mark.parametrize("n_pause", [0, 1, 4])
@pytest.mark.parametrize(("of", "of_settings"), WRAPPED)
def test_examples_are_those_of_the_wrapped_task_token_by_token(of, of_settings, n_pause):
    task = NextToken(of=of, of_settings=of_settings, n_pause=n_pause)
    inner = task.task
    spelling = [*spelled(inner), "P"]
    n = torch.randint(1, 12, (25,), generator=torch.Generator().manual_seed(1))
    for distribution in task.distributions:
        batch, whole = (
            x.sample(n, generator=torch.Generator().manual_seed(2), distribution=distribution)
            for x in (task, inner)
        )
        assert torch.equal(batch.n, whole.n) and torch.equal(batch.n_loops, whole.n_loops)
        assert batch.inputs.shape == (25, task.n_positions(int(n.max())))
        assert torch.equal(task.targets(batch), batch.targets)
        for tokens, targets, given in zip(
            batch.inputs.tolist(), batch.targets.tolist(), whole.inputs.tolist()
        ):
            prompt = "".join(spelling[t] for t in given[1 : given.index(inner.equals)])
            answer = ANSWERS[of](prompt)
            text = "".join(spelling[t] for t in tokens)
            assert text.rstrip(".") == f"^{prompt}={'P' * n_pause}{answer}"
            assert text.endswith(".")
            before = len(prompt) + 1 + n_pause
            asked = "".join(spelling[t] for t in targets[before:] if t != IGNORE)
            assert asked == answer + "."
            assert targets[:before] == [IGNORE] * before
            # Shifted by one: what is asked for at a position is what stands at the next.
            end = before + len(asked)
            assert targets[before:end] == tokens[before + 1 : end + 1]
            assert targets[end:] == [IGNORE] * (len(targets) - end)
        assert task.decode(batch) == inner.decode(whole)


def test_it_has_the_wrapped_tasks_words_for_what_is_wrong() -> None:
    task = NextToken(of="copy", n_pause=1)
    batch = task.from_batch(Copy().from_bits(torch.tensor([[1, 0, 1]]), torch.tensor([3])))
    answers = batch.targets.clone()
    answers[0, 5:9] = torch.tensor([1, 2, 0, 3])  # 2 is the '=', which no answer has
    assert task.decode(batch) == ["copy of 101 = 101"]
    assert task.decode(batch, answers) == ["copy of 101 = 1?0"]


def test_a_batch_of_python_integers() -> None:
    task = NextToken(of="token_addition")
    assert task.decode(task.encode([(3, 5)], n=3)) == ["011 + 101 = 1000"]
    assert isinstance(task, Task)
    assert get_task(task.name, **task.config()) == task


def test_what_is_shown_of_it() -> None:
    task = NextToken(of="unique_set", of_settings={"n_symbols": 9}, n_pause=2)
    assert task.describe().startswith("Token by token after 2 pause tokens: The distinct ones")
    assert task.d_vocab == task.d_vocab_out == 13
    assert NextToken(of="unique_set", of_settings={"n_symbols": 9}).d_vocab == 12


def test_a_task_of_ones_own_with_full_output_can_be_wrapped() -> None:
    class Flipped(Copy):
        name = "flipped"

        def _solve(
            self, prompt: torch.Tensor, n: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return 1 - prompt, n

    own = Flipped().from_bits(torch.tensor([[1, 0, 1]]), torch.tensor([3]))
    task = NextToken(of="flipped", n_pause=1)
    assert task.from_batch(own).inputs.tolist() == [[4, 1, 0, 1, 2, 5, 0, 1, 0, 3]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"of": "addition"}, "^of: expected one of binary_sum, copy"),
        ({"of": "next_token"}, "^of: expected one of binary_sum, copy"),
        ({"of": "copi"}, "Did you mean 'copy'"),
        ({"of": "copy", "of_settings": {"m": 3}}, "setting of Copy"),
        ({"of": "multiplication", "of_settings": {"m": 0}}, "m: expected an integer >= 1"),
        ({"n_pause": -1}, "n_pause: expected an integer >= 0"),
    ],
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        NextToken(**values)


PAUSED = NextToken(of="copy", n_pause=2)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: PAUSED.encode([(1, 2)], n=2), "a wrapped task that has encode"),
        (lambda: PAUSED.sample_operands(1, 2, batch_size=1, generator=torch.Generator()), "'copy'"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 2, 5, 0]])), "2 pause tokens after the '='"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 2, 5]])), "2 pause tokens after the '='"),
        (lambda: PAUSED.targets(torch.tensor([[4, 5, 2, 5, 5]])), r"symbols 0\.\.1 alone"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 6, 5, 5]])), r"tokens in 0\.\.5"),
        (lambda: PAUSED.targets(torch.tensor([[4, 0, 1, 5, 5]])), "one '='"),
        (
            lambda: PAUSED.from_batch(TokenAddition().encode([(1, 1)], n=1)),
            r"tokens in 0\.\.4",
        ),
    ],
)
def test_bad_inputs_are_refused(attempt, message):
    with pytest.raises(InputError, match=message):
        attempt()
