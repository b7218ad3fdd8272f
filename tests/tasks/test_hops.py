"""p-hop induction."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, Batch, PHop, token_words, typed_example
from loopinterp.tasks.task_registry import answer_words
from tests.tasks.answers import hop_back


def in_letters(task: PHop, batch: Batch) -> list[str]:
    """The right answers of each example, without the first position and PAD."""
    rows = batch.targets.tolist()
    return ["".join(task.answer_symbols[x] for x in row if x != IGNORE) for row in rows]


@pytest.mark.parametrize(("n_symbols", "n"), [(2, 8), (3, 6), (4, 5)])
def test_all_short_strings_are_answered_by_the_definition(n_symbols: int, n: int) -> None:
    task = PHop(n_symbols=n_symbols, most_hops=5)
    every = ["".join(word) for word in itertools.product("abcd"[:n_symbols], repeat=n)]
    for hops in range(1, 6):
        batch = task.encode(every, hops=hops)
        assert in_letters(task, batch) == [hop_back(word, hops) for word in every]
        assert (batch.targets[:, 0] == IGNORE).all()
        assert task.hops(batch).tolist() == [hops] * len(every)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text("abcdef", min_size=1, max_size=60), st.integers(1, 9))))
def test_mixed_lengths_and_hops_are_answered_one_by_one(rows: list[tuple[str, int]]) -> None:
    task, rows = PHop(n_symbols=6, most_hops=9), rows or [("a", 1)]
    width = max(len(word) for word, _ in rows)
    symbols = torch.tensor(
        [["abcdef".index(x) for x in word.ljust(width, "a")] for word, _ in rows]
    )
    n, hops = (
        torch.tensor(list(x)) for x in ([len(word) for word, _ in rows], [p for _, p in rows])
    )
    batch = task.from_symbols(symbols, n, hops)
    assert in_letters(task, batch) == [hop_back(word, p) for word, p in rows]
    for row, (word, p) in enumerate(rows):
        padding = [task.d_vocab - 1] * (width - len(word))
        assert batch.inputs[row].tolist() == [5 + p, *symbols[row, : len(word)].tolist(), *padding]
    assert batch.n.tolist() == n.tolist() and set(batch.n_loops.tolist()) == {10}


@given(st.integers(0, 99), st.integers(1, 7), st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_hops_add_up(seed: int, p: int, more: int) -> None:
    """p + q hops from a position are q hops from the position where p hops arrive."""
    task = PHop(n_symbols=3, most_hops=14)
    find = task._find(task.sample(40, batch_size=4, seed=seed).inputs)

    def arrive(hops: int, at: torch.Tensor) -> torch.Tensor:
        for _ in range(hops):
            at = find.gather(1, at)
        return at

    batch = task.sample(40, batch_size=4, seed=seed)
    batch = task.with_hops(batch, torch.full((4,), p + more))
    start = torch.arange(41).expand(4, -1)
    ends = arrive(more, arrive(p, start))
    letters = batch.inputs.gather(1, ends).masked_fill(ends == 0, 3)
    assert torch.equal(letters[:, 1:], batch.targets[:, 1:])


def test_other_hops_keep_the_symbols_and_the_lengths() -> None:
    task, g = PHop(most_hops=4), torch.Generator().manual_seed(0)
    batch = task.sample(torch.tensor([5, 12, 9]), generator=g)
    hops = torch.tensor([4, 1, 2])
    other = task.with_hops(batch, hops)
    assert torch.equal(other.inputs[:, 1:], batch.inputs[:, 1:])
    assert torch.equal(task.hops(other), hops) and torch.equal(other.n, batch.n)
    for row, p in enumerate([4, 1, 2]):
        word = "".join("abcd"[x] for x in batch.inputs[row, 1 : int(batch.n[row]) + 1])
        assert in_letters(task, other)[row] == hop_back(word, p)


def test_drawn_neighbours_differ_and_every_symbol_and_hop_is_drawn() -> None:
    task = PHop(n_symbols=5, most_hops=3)
    batch = task.sample(40, batch_size=600)
    symbols = batch.inputs[:, 1:]
    assert (symbols.diff(dim=1) != 0).all()
    counts = torch.bincount(symbols.flatten(), minlength=5) / symbols.numel()
    assert len(counts) == 5 and (counts - 0.2).abs().max() < 0.01
    # Given one symbol, each other one follows as often.
    follows = torch.zeros(5, 5).index_put_(
        (symbols[:, :-1].flatten(), symbols[:, 1:].flatten()), torch.tensor(1.0), accumulate=True
    )
    shares = follows / follows.sum(1, keepdim=True)
    assert (shares - (1 - torch.eye(5)) / 4).abs().max() < 0.02
    drawn = torch.bincount(task.hops(batch), minlength=4)
    assert drawn[0] == 0 and drawn[1:].min() > 150
    deepest = task.sample(10, batch_size=20, distribution="deepest")
    assert task.hops(deepest).tolist() == [3] * 20


def test_words_name_tokens_and_classes() -> None:
    task = PHop(n_symbols=3, most_hops=1)
    assert token_words(task) == ["a", "b", "c", "1", "PAD"]
    assert answer_words(task) == ["a", "b", "c", "-"]
    typed = typed_example(PHop(), "12 a b a b")
    assert torch.equal(typed.inputs, PHop().encode(["abab"], hops=12).inputs)
    assert torch.equal(typed.inputs, PHop().encode("12-hop from each of abab =").inputs)


@pytest.mark.parametrize("setting", [{"n_symbols": 1}, {"n_symbols": 27}, {"most_hops": 0}])
def test_bad_settings_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        PHop(**setting)
    assert caught.value.what in setting


@pytest.mark.parametrize("row", [[0, 1], [8, 0], [5, 6, 0], [5, 0, 8, 0], [4, 9], []], ids=str)
def test_rows_of_another_form_are_refused(row: list[int]) -> None:
    task = PHop(most_hops=4)  # tokens 0..3, p = 4..7, PAD = 8
    with pytest.raises(InputError) as caught:
        task.targets(torch.tensor([row], dtype=torch.int64))
    assert caught.value.what == "inputs"


@pytest.mark.usefixtures("no_type_checks")
def test_bad_hops_symbols_and_words_are_refused() -> None:
    task, one = PHop(most_hops=4), torch.tensor([1])
    for hops in (torch.tensor([5]), torch.tensor([0]), torch.tensor([1, 1]), torch.tensor([1.0])):
        with pytest.raises(InputError) as caught:
            task.from_symbols(torch.tensor([[0]]), one, hops)
        assert caught.value.what == "hops"
    with pytest.raises(InputError, match="symbols"):
        task.from_symbols(torch.tensor([[4]]), one, one)
    for words in ([], ["ae"], [""]):
        with pytest.raises(InputError, match="words"):
            task.encode(words, hops=1)
