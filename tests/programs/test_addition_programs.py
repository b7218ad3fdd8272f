"""The plain ripple: right by chain length, and nothing held."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.programs import UNKNOWN, Intervention, get_program
from loopinterp.programs.addition_programs import _HELD_RIPPLES, FOR_EVER, held_ripple
from loopinterp.tasks import Addition
from tests.programs.injected_carries import HOLDS, simulated
from tests.programs.inputs import chains_through_bit_4, every_input

TASK, RIPPLE = Addition(), get_program("ripple")


def test_a_carry_counts_the_bits_that_a_loop_has_let_it_see():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    trace = RIPPLE.trace(batch.inputs, n_loops=21)
    a, b = TASK.operands(batch)
    for t in range(22):
        # The carry made by the t bits before each position alone, in Python integers.
        for row in range(0, 200, 20):
            for pos in range(21):
                window = range(max(pos - t, 0), pos)
                x = sum(int(a[row, j]) << k for k, j in enumerate(window))
                y = sum(int(b[row, j]) << k for k, j in enumerate(window))
                expected = (x + y) >> len(window)
                assert trace.variables["carry"][t, row, pos] == expected


def test_a_changed_carry_is_mended_and_the_change_runs_on():
    x = chains_through_bit_4(last=10)
    clean = RIPPLE.trace(x, n_loops=12)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    change = Intervention("carry", 6, 1 - clean.variables["carry"][6], mask)
    patched = RIPPLE.run(x, n_loops=12, interventions=[change])
    differs = patched.outputs != clean.outputs
    for t in range(6, 13):
        wrong = differs[t].any(dim=0).nonzero().flatten().tolist()
        assert wrong == ([5 + t - 6] if 5 + t - 6 <= 12 else [])
        assert differs[t][:, wrong].all()


@pytest.mark.parametrize("program", _HELD_RIPPLES, ids=lambda p: p.name)
def test_in_clean_runs_it_does_what_the_plain_ripple_does_at_every_loop(program):
    for n in (1, 2, 5):
        inputs = every_input(TASK, n).inputs
        plain = get_program("ripple").trace(inputs, n + 1)
        mine = program.trace(inputs, n + 1)
        assert torch.equal(mine.variables["carry"], plain.variables["carry"])
        assert torch.equal(mine.outputs, plain.outputs)
        assert not mine.variables.get("age", torch.zeros(1)).any()


@pytest.mark.parametrize("name", HOLDS)
def test_a_carry_taken_whole_from_where_it_is_supported_lives_as_plain_python_says(name):
    program, n, n_loops = get_program(name), 5, 9
    inputs = every_input(TASK, n).inputs
    sources = program.trace(inputs, n_loops).variables
    for position, loop in itertools.product((2, 4), (1, 3)):
        # A source with the same token there and a carry; the same one for all of that token.
        source = {
            int(inputs[row, position]): row
            for row in sources["carry"][loop, :, position].nonzero()[:, 0].tolist()
        }
        base = inputs[[int(t) in source for t in inputs[:, position]]]
        rows = [source[int(t)] for t in base[:, position]]
        state = program.trace(base, loop).variables
        injected = {v: x[loop].clone() for v, x in state.items()}
        for v, x in injected.items():
            x[:, position] = sources[v][loop, rows, position]
        run = program.run(base, n_loops=n_loops, start_at_loop=loop, variables=injected)
        for row in range(0, len(base), 7):
            expected = simulated(name, base[row].tolist(), n_loops=n_loops, inject=(loop, position))
            assert run.variables["carry"][:, row].tolist() == expected[loop:]


@pytest.mark.parametrize("hold", [1, 2, 3, 5])
def test_a_carry_that_nothing_feeds_lives_exactly_its_hold(hold):
    program = held_ripple(f"held_{hold}", hold, doc="Held.")
    tokens = torch.tensor([[4, 0, 0, 0, 0]])
    injected = {name: torch.zeros_like(tokens) for name in program.variables}
    injected["carry"][0, 3] = 1
    run = program.run(tokens, n_loops=8, variables=injected)
    assert run.variables["carry"][:, 0, 3].tolist() == [1] * hold + [0] * (9 - hold)


def test_a_reset_takes_the_age_with_the_carry():
    # The sum bit of an injected carry at a propagating bit is 0: it is taken back at once.
    answers_0 = ~get_program("ripple").finish
    program = held_ripple("held_3_reset", 3, reset=answers_0, doc="Held, and reset.")
    tokens, carry = torch.tensor([[4, 0, 1, 0]]), torch.tensor([[0, 0, 1, 0]])
    run = program.run(tokens, n_loops=3, interventions=[Intervention("carry", 0, carry)])
    assert run.variables["carry"][:, 0, 2].tolist() == [1, 0, 0, 0]
    assert not run.variables["age"][:, 0, 2].any()


@pytest.mark.parametrize("program", _HELD_RIPPLES, ids=lambda p: p.name)
def test_a_carry_that_is_taken_away_is_filled_in_again_at_once(program):
    tokens = torch.tensor([[4, 3, 1, 1, 2, 0]])
    clean = program.trace(tokens, 9).variables["carry"]
    assert clean[5, 0].tolist() == [0, 0, 1, 1, 1, 1]
    taken = clean[5].clone()
    taken[0, 3] = 0
    run = program.run(tokens, n_loops=9, interventions=[Intervention("carry", 5, taken)])
    erased = (run.variables["carry"] != clean)[:, 0]
    assert erased[5].nonzero().tolist() == [[3]]
    # The neighbour loses its support for one loop: a ripple that holds it does not notice.
    holds = HOLDS[program.name](2, 1) > 1
    assert erased[6].nonzero().tolist() == ([] if holds else [[4]])
    assert not erased[6:, 3].any()


def test_a_late_ripple_is_the_plain_one_two_loops_later():
    inputs = every_input(TASK, 5).inputs
    late, plain = (
        get_program(name).trace(inputs, 8).variables["carry"] for name in ("late_ripple", "ripple")
    )
    assert torch.equal(late[2:], plain[:-2])
    assert not late[:2].any()


@pytest.mark.parametrize("hold", [0, -1, True, {1: 0}])
def test_a_hold_below_one_loop_is_refused(hold):
    with pytest.raises(InputError) as caught:
        held_ripple("none", hold, doc="No.")
    assert caught.value.what == "hold"
    assert held_ripple("ever", FOR_EVER, doc="Ever.").variables == ("carry",)


def test_sum_and_pending_carries_always_add_up():
    task = Addition()
    n = 40
    batch = task.sample(n, batch_size=60, generator=torch.Generator().manual_seed(0))
    trace = get_program("carry_save").trace(batch.inputs, n_loops=n)
    a, b = task.operands(batch)

    def integers(bits: torch.Tensor) -> list[int]:
        return [sum(bit << i for i, bit in enumerate(row)) for row in bits[:, 1:].tolist()]

    totals = [x + y for x, y in zip(integers(a), integers(b))]
    for t in range(n + 1):
        partial = integers(trace.variables["sum"][t])
        pending = integers(trace.variables["carry"][t])
        for total, s, c in zip(totals, partial, pending):
            assert (s + 2 * c) % 2**n == total % 2**n
    assert not trace.variables["carry"][n - 1, :, 1:n].any()


LATCHED = get_program("latched_ripple")


def changed_outputs(loop: int) -> torch.Tensor:
    """Which outputs change [loop, pos] when the carry into position 5 is flipped at a loop."""
    x = chains_through_bit_4(last=11)
    clean = LATCHED.trace(x, n_loops=13)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    flipped = 1 - clean.variables["carry"][-1]
    patched = LATCHED.run(x, n_loops=13, interventions=[Intervention("carry", loop, flipped, mask)])
    differs = patched.outputs != clean.outputs
    assert torch.equal(differs.any(dim=1), differs.all(dim=1))
    return differs.all(dim=1)


def test_position_i_is_known_after_i_loops_and_right_from_then_on():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    trace = LATCHED.trace(batch.inputs, n_loops=21)
    right = TASK.carry_in(batch)
    position = torch.arange(21)
    for t in range(22):
        carry = trace.variables["carry"][t]
        assert torch.equal(carry != UNKNOWN, (position <= t).expand_as(carry))
        assert torch.equal(carry[:, : t + 1], right[:, : t + 1])
        assert torch.equal(trace.outputs[t] == UNKNOWN, carry == UNKNOWN)


def test_a_carry_changed_behind_the_front_is_held_and_touches_nothing_else():
    for loop in (6, 9):
        differs = changed_outputs(loop)
        assert differs[loop:, 5].all()
        assert not differs[:, [i for i in range(13) if i != 5]].any()


def test_a_carry_changed_at_the_front_is_taken_over_by_the_whole_chain():
    differs = changed_outputs(5)
    for t in range(5, 14):
        assert differs[t].nonzero().flatten().tolist() == list(range(5, min(t, 12) + 1))


def test_a_carry_set_ahead_of_the_front_counts_as_known_and_starts_a_front_of_its_own():
    differs = changed_outputs(2)
    assert differs[2].nonzero().flatten().tolist() == [5]
    assert differs[3].nonzero().flatten().tolist() == [5, 6]


CHAIN = get_program("latched_chain")


def test_a_carry_fed_by_a_chain_of_k_is_known_after_k_plus_1_loops_and_right_from_then_on():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    trace = CHAIN.trace(batch.inputs, n_loops=21)
    right, known_at = TASK.carry_in(batch), TASK.chain_length_in(batch) + 1
    known_at[:, 0] = 0  # BOS
    for t in range(22):
        carry = trace.variables["carry"][t]
        assert torch.equal(carry != UNKNOWN, known_at <= t)
        assert torch.equal(carry[known_at <= t], right[known_at <= t])
        assert torch.equal(trace.outputs[t] == UNKNOWN, carry == UNKNOWN)
    assert torch.equal(trace.converged("carry"), known_at)


def test_what_is_known_is_held_and_only_the_front_passes_a_change_on():
    x = chains_through_bit_4(last=11)
    clean = CHAIN.trace(x, n_loops=13)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    flipped = 1 - clean.variables["carry"][-1]
    for loop, reach in ((2, 13), (3, 6), (8, 6)):  # known after 2 loops, right neighbour after 3
        patched = CHAIN.run(
            x, n_loops=13, interventions=[Intervention("carry", loop, flipped, mask)]
        )
        differs = (patched.outputs != clean.outputs).all(dim=1)
        assert differs[-1].nonzero().flatten().tolist() == list(range(5, reach))
        assert differs[loop].nonzero().flatten().tolist() == [5]


def test_it_differs_from_the_front_from_bos_before_the_end_and_not_at_the_end():
    batch = TASK.sample(16, batch_size=64, generator=torch.Generator().manual_seed(1))
    mine = CHAIN.trace(batch.inputs, n_loops=16).outputs
    other = get_program("latched_ripple").trace(batch.inputs, n_loops=16).outputs
    assert torch.equal(mine[-1], other[-1])
    known, other_known = mine != UNKNOWN, other != UNKNOWN
    assert (known | ~other_known).all()
    assert (known[1:8] & ~other_known[1:8]).flatten(1).any(dim=1).all()


def test_spans_double_and_say_what_their_bits_do():
    task = Addition()
    batch = task.sample(20, batch_size=40, generator=torch.Generator().manual_seed(0))
    trace = get_program("lookahead").trace(batch.inputs, n_loops=6)
    a, b = task.operands(batch)
    for t in range(7):
        for pos in range(21):
            assert trace.variables["span"][t, 0, pos] == min(2**t, pos + 1)
            bits = range(max(pos - 2**t, 0), pos)
            for row in range(0, 40, 8):
                x = sum(int(a[row, j]) << k for k, j in enumerate(bits))
                y = sum(int(b[row, j]) << k for k, j in enumerate(bits))
                assert trace.variables["makes"][t, row, pos] == (x + y) >> len(bits)
                full = len(bits) == 2**t
                passes = int(full and x ^ y == 2 ** len(bits) - 1)
                assert trace.variables["passes"][t, row, pos] == passes


ONE_SHOT = get_program("one_shot")


def test_every_carry_is_unknown_before_the_loop_and_right_after_it():
    batch = TASK.sample(40, batch_size=100, generator=torch.Generator().manual_seed(0))
    trace = ONE_SHOT.trace(batch.inputs, n_loops=3)
    assert (trace.variables["carry"][0] == UNKNOWN).all()
    for t in (1, 2, 3):
        assert torch.equal(trace.variables["carry"][t], TASK.carry_in(batch))


def test_a_carry_looks_past_its_whole_chain_and_at_nothing_else():
    batch = TASK.sample(20, batch_size=50, generator=torch.Generator().manual_seed(0))
    trace = ONE_SHOT.trace(batch.inputs, n_loops=1)
    start = torch.arange(21) - 1 - TASK.chain_length_in(batch)
    start[:, 0] = 0
    looks_at = trace.selectors["chain_start"][0]
    assert (looks_at.sum(dim=-1) == 1).all()
    assert torch.equal(looks_at.long().argmax(dim=-1), start.clamp(min=0))


def test_a_changed_carry_is_mended_in_the_next_loop_and_changes_no_other():
    batch = TASK.sample(9, batch_size=50, generator=torch.Generator().manual_seed(0))
    clean = ONE_SHOT.trace(batch.inputs, n_loops=3)
    flipped = Intervention("carry", 2, 1 - clean.variables["carry"][2])
    patched = ONE_SHOT.run(batch.inputs, n_loops=3, interventions=[flipped])
    assert (patched.outputs[2] != clean.outputs[2]).all()
    assert torch.equal(patched.outputs[3], clean.outputs[3])
