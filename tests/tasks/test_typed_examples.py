from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ArgumentError, InputError
from loopinterp.tasks import (
    Addition,
    Multiplication,
    Parity,
    Sudoku,
    TokenAddition,
    get_task,
    list_tasks,
    token_words,
    typed_example,
    words_at,
)
from loopinterp.tasks.chess import ChessPuzzles, read_fen, squares_of
from loopinterp.tasks.task import IGNORE
from loopinterp.tasks.task_registry import _read_words, answer_words
from tests.refusals import naming


@settings(max_examples=30)
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_numbers_are_added(a: int, b: int) -> None:
    batch = typed_example(Addition(), f" {a} +{b} =")
    bits = batch.targets[0, 1:].tolist()
    assert sum(bit << k for k, bit in enumerate(bits)) == a + b  # with room for the last carry
    assert batch.n_loops.tolist() == [Addition().n_loops(int(batch.n[0]))]


@settings(max_examples=12)
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


BOARD = "6k1/p4ppp/8/8/8/8/5PPP/3R2K1"

SHOWN = [(name, {}) for name in list_tasks() if name not in ("chess_puzzles", "next_token")]

SHOWN += [("next_token", {"of": "multiplication"}), ("next_token", {"of": "parity", "n_pause": 2})]

SHOWN += [
    ("prefix_sum", {"modulus": 12}),
    ("regular_language", {"language": "dyck_3"}),
    ("sudoku", {"box": 3}),
    ("abacus_sorting", {"n_digits": 1}),
]


@settings(max_examples=5)
@pytest.mark.parametrize(("name", "options"), SHOWN)
@given(data=st.data())
def test_what_decode_shows_is_read_as_it_is_meant(
    name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    task, n = get_task(name, **options), data.draw(st.integers(1, 6))
    kind = data.draw(st.sampled_from(task.distributions))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    drawn = task.sample(n, batch_size=1, generator=generator, distribution=kind)
    (text,) = task.decode(drawn)
    assert task.decode(typed_example(task, text)) == [text]


@pytest.mark.parametrize("to_move", ["w", "b"])
def test_a_board_and_a_fen_are_one_position(to_move: str) -> None:
    task = ChessPuzzles()
    line = "a7a6 d1d8" if to_move == "b" else "d1d8 g8h8"
    puzzle = task.encode([(f"{BOARD} {to_move} - - 0 1", line, 640)]) if to_move == "b" else None
    fen = typed_example(task, f"{BOARD} {to_move} - - 0 1")
    assert fen.inputs.tolist() == [squares_of(read_fen(f"{BOARD} {to_move} - -"))]
    if puzzle is not None:
        (text,) = task.decode(puzzle)
        shown = typed_example(task, text)
        assert torch.equal(shown.inputs, puzzle.inputs)
        assert torch.equal(shown.targets, puzzle.targets)


@settings(max_examples=30)
@given(st.integers(0, 2**20), st.integers(0, 2**20))
def test_decimal_numbers_are_read_where_they_are_no_tokens(a: int, b: int) -> None:
    a, b = a + 2, b + 9  # no word of bits alone, or one with another digit
    assume({*str(a), *str(b)} - {"0", "1"})
    for task, sign, right in ((Multiplication(), "*", a * b), (TokenAddition(), "+", a + b)):
        (said,) = task.decode(typed_example(task, f"{a}{sign}{b}"))
        assert int(said.rpartition("= ")[2], 2) == right


def test_a_grid_without_one_solution_can_be_looked_at() -> None:
    batch = typed_example(Sudoku(), "1.../..../..../....")
    assert batch.inputs[0, 0] == 1 and set(batch.targets[0].tolist()) == {IGNORE}


@pytest.mark.parametrize(
    ("name", "text"),
    [("sudoku", "1../..2"), ("maze", "###/#S#"), ("chess_puzzles", "8/8/8 w - -")],
)
def test_half_a_grid_is_refused(name: str, text: str) -> None:
    with pytest.raises(InputError):
        typed_example(get_task(name), text)


def test_the_longest_word_is_read() -> None:
    assert _read_words("1+10+1", ["1", "+", "0+1", "1+1"]) == [3, 2]
    assert typed_example(Addition(), "1+1").inputs.tolist() == [[4, 3]]


def test_what_is_no_word_is_refused_with_its_place() -> None:
    for task, text, said in [
        (TokenAddition(), "10 + x", "'x' at place 5"),
        (Addition(), "</script>", "'</script>' at place 0"),
        (Parity(), "  ", "a token"),
        (Addition(format="features"), "1", "a task that reads tokens"),
    ]:
        with pytest.raises(InputError, match=said):
            typed_example(task, text)


def test_of_half_an_example_no_answer_is_known() -> None:
    batch = typed_example(get_task("abacus_addition"), "12+")
    assert bool((batch.targets == IGNORE).all())


def test_decimal_numbers_have_their_most_significant_digit_first() -> None:
    """With or without "=" and spaces; tokens, which have the "=", are read as they stand."""
    task = get_task("abacus_addition")
    for text in ("194 + 7", "194+7", " 194 +7 ", "194 + 7 ="):
        assert task.decode(typed_example(task, text)) == ["194 + 7 = 201"]
    assert task.decode(typed_example(task, "491+7=102$")) == ["194 + 7 = 201"]
    product = get_task("abacus_multiplication")
    assert product.decode(typed_example(product, "12*30")) == ["12 * 30 = 360"]


@pytest.mark.parametrize("name", list_tasks())
def test_there_is_a_word_for_each_token_or_for_none(name: str) -> None:
    task = get_task(name)
    words, answers = token_words(task), answer_words(task)
    assert words is None or len(words) == len(set(words)) == task.d_vocab
    assert answers is None or len(answers) == len(set(answers)) == task.d_vocab_out


def test_features_are_their_numbers_and_unknown_tokens_too() -> None:
    task = Addition(format="features")
    assert token_words(task) is None
    assert words_at(task.encode([(1, 2)], n=2).inputs[0], None) == ["1 0", "0 1"]
    assert words_at(torch.tensor([3, 9]), token_words(Addition())) == ["1+1", "9"]


@pytest.mark.parametrize("name", [n for n in list_tasks() if n != "chess_puzzles"])
def test_what_decode_shows_encode_takes(name: str) -> None:
    task = get_task(name)
    batch = task.sample(3, batch_size=4, generator=torch.Generator().manual_seed(0))
    for text in task.decode(batch):
        typed = task.encode(text)
        same = typed_example(task, text)
        assert torch.equal(typed.inputs, same.inputs) and torch.equal(typed.targets, same.targets)
        assert torch.equal(typed.n, same.n)


def test_encode_takes_numbers_as_text_or_listed() -> None:
    task = Addition()
    assert task.decode(task.encode("13 + 9")) == task.decode(task.encode([(13, 9)], n=5))


def test_a_text_says_its_own_length_and_a_list_needs_one() -> None:
    with naming("encode") as caught:
        Addition().encode("13 + 9", n=8)
    assert "'13 + 9'" in caught.value.given
    with naming("n", ArgumentError):
        Addition().encode([(13, 9)])
    with naming("text"):
        Parity().encode([(1, 0)])  # type: ignore[arg-type]
