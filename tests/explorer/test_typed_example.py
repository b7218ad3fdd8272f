"""Examples that are typed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.explorer import token_words, typed_example
from loopinterp.explorer.typed_example import read_words
from loopinterp.tasks import Addition, Parity, TokenAddition, get_task
from loopinterp.tasks.task import IGNORE


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_numbers_are_added(a: int, b: int) -> None:
    batch = typed_example(Addition(), f" {a} +{b} =")
    bits = batch.targets[0, 1:].tolist()
    assert sum(bit << k for k, bit in enumerate(bits)) == a + b  # with room for the last carry
    assert batch.n_loops.tolist() == [Addition().n_loops(int(batch.n[0]))]


@settings(max_examples=25)
@pytest.mark.parametrize("name", ["addition", "token_addition", "parity", "copy", "unique_set"])
@given(data=st.data())
def test_what_a_task_draws_can_be_typed_in_its_words(name: str, data: st.DataObject) -> None:
    task, n = get_task(name), data.draw(st.integers(1, 6))
    seed = data.draw(st.integers(0, 99))
    drawn = task.sample(n, batch_size=1, generator=torch.Generator().manual_seed(seed))
    words = token_words(task)
    assert words
    text = data.draw(st.sampled_from([" ", "  "])).join(words[t] for t in drawn.inputs[0].tolist())
    typed = typed_example(task, text)
    width = drawn.inputs.shape[1]
    assert torch.equal(typed.inputs[:, :width], drawn.inputs)
    assert torch.equal(typed.targets[:, :width], drawn.targets)
    assert typed.n.tolist() == [n] and torch.equal(typed.n_loops, drawn.n_loops)


def test_the_longest_word_is_read() -> None:
    assert read_words("1+10+1", ["1", "+", "0+1", "1+1"]) == [3, 2]
    assert typed_example(Addition(), "1+1").inputs.tolist() == [[4, 3]]


def test_what_is_no_word_is_refused_with_its_place() -> None:
    for task, text, said in [
        (TokenAddition(), "10 + 2", "'2' at place 5"),
        (Addition(), "</script>", "'</script>' at place 0"),
        (Parity(), "  ", "a token"),
        (Addition(format="features"), "1", "a task that reads tokens"),
    ]:
        with pytest.raises(InputError, match=said):
            typed_example(task, text)


def test_of_half_an_example_no_answer_is_known() -> None:
    task = get_task("abacus_addition")
    batch = typed_example(task, "12+3")
    assert bool((batch.targets == IGNORE).all())
