"""Aligned addition against Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, Addition, Batch

PAIRS, FEATURES = Addition(), Addition(format="features")
FORMATS = [PAIRS, FEATURES]


def read(target_row: torch.Tensor) -> int:
    """The integer whose bits a row of targets holds."""
    bits = [b for b in target_row.tolist() if b != IGNORE]
    return sum(b << i for i, b in enumerate(bits))


def read_operands(task: Addition, batch: Batch, row: int) -> tuple[int, int]:
    """The operands of a row, read from its raw inputs."""
    n = int(batch.n[row])
    if task.format == "features":
        pairs = [(int(x), int(y)) for x, y in batch.inputs[row, :n].tolist()]
    else:
        assert batch.inputs[row, 0] == 4
        pairs = [(t % 2, t // 2) for t in batch.inputs[row, 1 : n + 1].tolist()]
    return sum(a << i for i, (a, _) in enumerate(pairs)), sum(
        b << i for i, (_, b) in enumerate(pairs)
    )


@pytest.mark.parametrize("task", FORMATS, ids=repr)
@pytest.mark.parametrize("n", range(1, 6))
def test_all_sums_of_short_operands(task, n):
    every = [(x, y) for x in range(2**n) for y in range(2**n)]
    batch = task.encode(every, n=n)
    for row, (x, y) in enumerate(every):
        assert read_operands(task, batch, row) == (x, y)
        assert read(batch.targets[row]) == (x + y) % 2**n


@pytest.mark.parametrize("task", FORMATS, ids=repr)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sums_of_up_to_five_hundred_bits(task, data):
    n = data.draw(st.integers(1, 500))
    numbers = st.integers(0, 2**n - 1)
    operands = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3))
    batch = task.encode(operands, n=n)
    assert [read(row) for row in batch.targets] == [(x + y) % 2**n for x, y in operands]


@pytest.mark.parametrize("task", FORMATS, ids=repr)
@pytest.mark.parametrize("distribution", PAIRS.distributions)
def test_samples_of_mixed_lengths_are_right(task, distribution):
    generator = torch.Generator().manual_seed(0)
    n = torch.randint(1, 80, (64,), generator=generator)
    batch = task.sample(n, generator=generator, distribution=distribution)
    for row, length in enumerate(n.tolist()):
        x, y = read_operands(task, batch, row)
        assert read(batch.targets[row]) == (x + y) % 2**length
        assert int((batch.targets[row] != IGNORE).sum()) == length
        if distribution == "chain":
            assert x ^ y == 2**length - 2
            assert x & y == 1


def test_both_formats_hold_the_same_examples_for_the_same_seed():
    pairs, features = (
        task.sample(torch.tensor([5, 3]), generator=torch.Generator().manual_seed(0))
        for task in FORMATS
    )
    assert torch.equal(pairs.targets[:, 1:], features.targets)
    for mine, theirs in zip(PAIRS.operands(pairs), FEATURES.operands(features)):
        assert torch.equal(mine[:, 1:], theirs)


def test_bos_and_padding_count_as_zero_bits_in_the_analyses():
    batch = PAIRS.from_bits(torch.ones(2, 3).long(), torch.ones(2, 3).long(), torch.tensor([3, 1]))
    assert batch.inputs.tolist() == [[4, 3, 3, 3], [4, 3, 5, 5]]
    assert PAIRS.carries(batch).tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert PAIRS.carry_in(batch).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert PAIRS.generate(batch).tolist() == [
        [False, True, True, True],
        [False, True, False, False],
    ]


@pytest.mark.parametrize("task", FORMATS, ids=repr)
def test_the_analyses_follow_the_chain(task):
    # bits 0..6 of (a, b): propagate, propagate, kill, generate, propagate, propagate, generate
    a, b = torch.tensor([[1, 0, 0, 1, 1, 0, 1]]), torch.tensor([[0, 1, 0, 1, 0, 1, 1]])
    batch = task.from_bits(a, b, torch.tensor([7]))
    bos = [0] * task.offset
    no, yes = [False] * task.offset, [True] * task.offset
    assert task.propagate(batch).tolist() == [[*no, *(i in (0, 1, 4, 5) for i in range(7))]]
    assert task.carries(batch).tolist() == [[*bos, 0, 0, 0, 1, 1, 1, 1]]
    assert task.carry_in(batch).tolist() == [[*bos, 0, 0, 0, 0, 1, 1, 1]]
    assert task.chain_length(batch).tolist() == [[*bos, 1, 2, 0, 0, 1, 2, 0]]
    assert task.chain_length_in(batch).tolist() == [[*bos, 0, 1, 2, 0, 0, 1, 2]]
    assert task.chain_reaches_start(batch).tolist() == [[*no, True, True] + [False] * 5]
    assert task.chain_in_reaches_start(batch).tolist() == [[*yes, True, True, True] + [False] * 4]


@pytest.mark.parametrize("task", FORMATS, ids=repr)
def test_a_chain_in_that_reaches_the_start_is_what_no_bit_decides(task):
    batch = task.sample(24, batch_size=200, generator=torch.Generator().manual_seed(3))
    p, reaches = task.propagate(batch), task.chain_in_reaches_start(batch)
    for i in range(p.shape[1]):
        assert torch.equal(reaches[:, i], p[:, task.offset : i].all(dim=1))
    assert not bool(task.carry_in(batch)[reaches].any())


def test_a_batch_can_be_sliced_and_moved():
    batch = PAIRS.sample(4, batch_size=6, generator=torch.Generator().manual_seed(0))
    assert len(batch) == 6
    part = batch[torch.tensor([4, 1])].to("cpu")
    assert torch.equal(part.inputs, batch.inputs[[4, 1]])
    assert part.n_loops.tolist() == [5, 5]


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError) as caught:
        Addition(format="pair")  # type: ignore[arg-type]
    assert caught.value.what == "format" and "'pairs'" in caught.value.fix


@pytest.mark.usefixtures("no_type_checks")
def test_operands_may_be_the_rows_of_an_array():
    pairs = [(3, 5), (1, 2)]
    assert torch.equal(PAIRS.encode(np.array(pairs), 4).inputs, PAIRS.encode(pairs, 4).inputs)  # type: ignore


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "operands", [[(4, 0)], [(0, -1)], [(True, 0)], [("1", 0)], [], [(1, 2, 3)], [1, 2], 3]
)
def test_integers_that_do_not_fit_are_refused(operands):
    with pytest.raises(InputError):
        PAIRS.encode(operands, n=2)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("a", "b", "n", "what"),
    [
        (torch.tensor([[2, 0]]), torch.tensor([[0, 0]]), torch.tensor([2]), "bits a"),
        (torch.tensor([[-1, 0]]), torch.tensor([[0, 0]]), torch.tensor([2]), "bits a"),
        (torch.tensor([[1, 0]]), torch.tensor([[1]]), torch.tensor([2]), "bits b"),
        (torch.tensor([[1, 0]]), torch.tensor([[1, 0]]), torch.tensor([3]), "n"),
        (torch.tensor([[1, 0]]), torch.tensor([[1, 0]]), torch.tensor([0]), "n"),
        (torch.tensor([[1, 0]]), torch.tensor([[1, 0]]), torch.tensor([2, 2]), "n"),
        (torch.tensor([[1.0]]), torch.tensor([[1]]), torch.tensor([1]), "bits a"),
    ],
)
def test_bad_bits_are_refused(a, b, n, what):
    with pytest.raises(InputError) as caught:
        PAIRS.from_bits(a, b, n)
    assert caught.value.what == what


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        (PAIRS, torch.zeros(2, 4, 2)),
        (PAIRS, torch.zeros(4).long()),
        (PAIRS, torch.full((1, 3), 6)),
        (FEATURES, torch.zeros(2, 4).long()),
        (FEATURES, torch.zeros(2, 4, 3)),
        (FEATURES, torch.full((1, 3, 2), 0.5)),
    ],
)
def test_the_oracle_refuses_inputs_of_another_kind(task, inputs):
    for analysis in (task.targets, task.carries, task.chain_reaches_start):
        with pytest.raises(InputError) as caught:
            analysis(inputs)
        assert caught.value.what == "inputs"
