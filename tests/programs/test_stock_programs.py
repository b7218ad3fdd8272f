"""What every program must hold: exact at T(n) and after it as promised, and not before."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.programs import UNKNOWN, LoopProgram, get_program, list_programs, register_program
from loopinterp.programs import stock_programs as registry_module
from loopinterp.programs.stock_programs import prefix_automaton, prefix_mod, unique_set
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    Batch,
    BinarySum,
    Copy,
    Multiplication,
    Parity,
    PrefixSum,
    RegularLanguage,
    TokenAddition,
    UniqueSet,
    get_automaton,
    list_languages,
)
from loopinterp.tasks.abacus import ALPHABET
from tests.compiler.compiled_properties import agrees
from tests.programs.inputs import answer, every_input, task_of

PROGRAMS = list_programs()


def exact(program: LoopProgram, batch: Batch, n_loops: int) -> torch.Tensor:
    """Whether each example is answered right at every position that is asked for, by loop."""
    right = []
    for first in range(0, len(batch), 4096):
        part = batch[slice(first, first + 4096)]
        outputs = program.trace(part.inputs, n_loops).outputs  # [loop, batch, pos]
        right.append(((outputs == part.targets) | (part.targets == IGNORE)).all(dim=2))
    return torch.cat(right, dim=1)


@pytest.mark.parametrize("n", [1, 2, 4, 6])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_inputs_are_answered_at_t_of_n_and_some_not_a_loop_before(name, n):
    program = get_program(name)
    batch = every_input(task_of(program), n)
    needed = program.n_loops(n)
    right = exact(program, batch, needed + 3)
    assert right[needed].all()
    assert right[needed + 3].all()
    always_one = n == 1 and name in ("late_ripple", "tomita3")  # and right from the start
    if needed > 0 and not always_one:
        assert not right[needed - 1].all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_inputs_of_mixed_lengths_are_answered_at_t_of_the_longest(name):
    program = get_program(name)
    task = task_of(program)
    generator = torch.Generator().manual_seed(0)
    for distribution in task.distributions:
        n = torch.cat([torch.tensor([64]), torch.randint(1, 65, (15,), generator=generator)])
        batch = task.sample(n, generator=generator, distribution=distribution)
        outputs = program.trace(batch.inputs, program.n_loops(64)).outputs[-1]
        for row in range(len(batch)):
            answers = outputs[row][batch.targets[row] != IGNORE].tolist()
            assert answers == answer(task, batch.inputs[row].tolist(), int(batch.n[row]))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("n", [1, 2, 8, 13])
def test_each_example_is_answered_at_its_own_t_of_n_whatever_the_padding(name, n):
    program = get_program(name)
    task = task_of(program)
    generator = torch.Generator().manual_seed(n)
    batch = task.sample(torch.tensor([n] * 20 + [16]), generator=generator)[:20]
    assert exact(program, batch, program.n_loops(n))[-1].all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tasks_own_number_of_loops_is_enough(name):
    program = get_program(name)
    task = task_of(program)
    for n in (1, 2, 5, 64):
        assert program.n_loops(n) <= task.n_loops(n)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_answer_is_a_class_of_the_task_or_unknown(name):
    program = get_program(name)
    task = task_of(program)
    batch = task.sample(9, batch_size=30, generator=torch.Generator().manual_seed(0))
    outputs = program.trace(batch.inputs, task.n_loops(9)).outputs
    assert set(outputs.unique().tolist()) <= {UNKNOWN, *range(task.d_vocab_out)}
    assert len(program.inputs) == task.d_vocab


def test_after_t_loops_a_position_holds_the_xor_of_the_last_t_bits():
    batch = PrefixSum().sample(10, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = get_program("prefix_xor").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        bits = [int(token == 1) for token in tokens]
        for t in range(13):
            for pos in range(len(bits)):
                last = bits[max(pos + 1 - t, 0) : pos + 1]
                assert trace.variables["prefix"][t, row, pos] == sum(last) % 2


@pytest.mark.parametrize("modulus", [2, 3, 10])
def test_after_t_loops_a_position_holds_the_sum_of_the_last_t_digits(modulus):
    task = PrefixSum(modulus=modulus)
    batch = task.sample(10, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = prefix_mod(modulus).trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        digits = [token % modulus if token < modulus else 0 for token in tokens]
        for t in range(13):
            for pos in range(len(digits)):
                last = digits[max(pos + 1 - t, 0) : pos + 1]
                assert trace.variables["prefix"][t, row, pos] == sum(last) % modulus
    assert torch.equal(trace.outputs[-1][:, 1:], batch.targets[:, 1:])


@pytest.mark.parametrize("language", list_languages())
def test_after_t_loops_a_position_holds_the_state_that_the_last_t_symbols_lead_to(language):
    transitions, task = get_automaton(language).transitions, RegularLanguage(language=language)
    batch = task.sample(
        torch.arange(1, 11), generator=torch.Generator().manual_seed(0), distribution="steered"
    )
    trace = prefix_automaton(language).trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        for t, pos in itertools.product(range(13), range(len(tokens))):
            state = 0
            for token in tokens[max(pos + 1 - t, 0) : pos + 1]:
                state = transitions[state][token] if token < 2 else state
            assert trace.variables["state"][t, row, pos] == state
    is_asked = batch.targets >= 0
    assert torch.equal(trace.outputs[-1][is_asked], batch.targets[is_asked])
    assert torch.equal(trace.variables["state"][-1], task.states(batch))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("language", list_languages())
def test_every_language_compiles_to_a_model_that_runs_as_the_program_does(language):
    task, program = RegularLanguage(language=language), prefix_automaton(language)
    words = map("".join, itertools.product(task.automaton.alphabet, repeat=6))
    inputs = task.encode(list(words)).inputs
    agrees(compile_program(program, max_length=inputs.shape[1]), inputs, n_loops=8)


def test_after_t_loops_a_position_has_added_the_t_bits_before_it():
    batch = Parity().sample(10, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = get_program("parity").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        bits = [int(token == 1) for token in tokens]
        for t in range(13):
            for pos in range(len(bits)):
                seen = sum(bits[max(pos - t, 0) : pos]) % 2
                assert trace.variables["parity"][t, row, pos] == seen
                moved = bits[pos - t] if pos >= t else 0
                assert trace.variables["bit"][t, row, pos] == moved


def test_symbols_move_one_position_a_loop_until_they_are_where_they_belong():
    n = torch.tensor([4, 7, 7, 1])
    batch = Copy().sample(n, generator=torch.Generator().manual_seed(0))
    trace = get_program("copy").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        symbols = [min(token, 2) for token in tokens]
        length = int(n[row])
        for t in range(13):
            moved = min(t, length)
            assert (trace.variables["left"][t, row, : length + 1] == -1).all()
            for pos in range(length + 1, len(symbols)):
                assert trace.variables["symbol"][t, row, pos] == symbols[pos - moved]
                assert trace.variables["left"][t, row, pos] == length - moved


def test_after_t_loops_the_carry_at_the_equals_sign_is_that_of_the_t_lowest_digits():
    n, g = 9, torch.Generator().manual_seed(0)
    operands = torch.randint(2**n, (50, 2), generator=g).tolist()
    batch = TokenAddition().encode([(a, b) for a, b in operands], n=n)
    trace = get_program("token_addition").trace(batch.inputs, n_loops=n + 4)
    equals = 2 * n + 2
    for row, (a, b) in enumerate(operands):
        for t in range(n + 5):
            seen = 2 ** min(t, n)
            assert trace.variables["carry"][t, row, equals] == (a % seen + b % seen) // seen


def test_everything_behind_the_plus_stands_still_after_n_loops():
    n = 6
    batch = TokenAddition().sample(n, batch_size=50, generator=torch.Generator().manual_seed(0))
    trace = get_program("token_addition").trace(batch.inputs, n_loops=n + 9)
    for values in trace.variables.values():
        assert (values[n:, :, n + 1 :] == values[n, :, n + 1 :]).all()


MULTIPLICATION = get_program("multiplication")


def test_columns_and_carries_are_those_of_schoolbook_multiplication():
    n, equals = 7, 2 + 7 + 2
    operands = [(a, b) for a in range(4) for b in range(0, 2**n, 5)]
    batch = Multiplication().encode(operands, n=n)
    trace = MULTIPLICATION.trace(batch.inputs, n_loops=n + 3)
    for row, (a, b) in enumerate(operands):
        carry = 0
        for place in range(n + 2):
            column = sum((a >> i & 1) * (b >> place - i & 1) for i in (0, 1) if place >= i)
            assert trace.variables["column"][0, row, equals + place] == column
            for t in range(n + 4):
                expected = carry if t >= place else UNKNOWN
                assert trace.variables["carry"][t, row, equals + place] == expected
            carry = (column + carry) // 2


def test_a_factor_of_one_bit_needs_no_program_of_its_own():
    task = Multiplication()
    batch = task.encode([(a, b) for a in range(2) for b in range(32)], n=5, m=1)
    outputs = MULTIPLICATION.trace(batch.inputs, n_loops=6).outputs[-1]
    assert ((outputs == batch.targets) | (batch.targets == IGNORE)).all()


def test_after_t_loops_a_position_has_counted_the_first_t_bits_that_it_can_see():
    batch = BinarySum().sample(9, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = get_program("binary_sum").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        for t in range(13):
            for pos in range(len(tokens)):
                seen = tokens[1 : min(t, pos) + 1]
                assert trace.variables["count"][t, row, pos] == seen.count(1)


def test_every_position_looks_at_the_same_bit_in_each_loop():
    batch = BinarySum().sample(5, batch_size=2, generator=torch.Generator().manual_seed(0))
    looks_at = get_program("binary_sum").trace(batch.inputs, n_loops=5).selectors["next_bit"]
    for loop in range(5):
        query, key = looks_at[loop, 0].nonzero().T
        assert set(key.tolist()) == {loop + 1}
        assert query.tolist() == list(range(loop + 1, batch.inputs.shape[1]))


def test_after_t_loops_the_distinct_ones_of_the_first_t_symbols_are_in_place():
    task = UniqueSet()
    for distribution in task.distributions:
        g = torch.Generator().manual_seed(0)
        batch = task.sample(9, batch_size=30, generator=g, distribution=distribution)
        outputs = get_program("unique_set").trace(batch.inputs, n_loops=11).outputs
        for row, tokens in enumerate(batch.inputs.tolist()):
            for t in range(12):
                distinct = list(dict.fromkeys(tokens[1 : min(t, 9) + 1]))
                room = len(tokens) - 10
                assert outputs[t, row, 10:].tolist() == (distinct + [50] * room)[:room]


def test_another_alphabet_has_a_program_of_its_own():
    batch = UniqueSet(n_symbols=3).sample(
        6, batch_size=20, generator=torch.Generator().manual_seed(0)
    )
    outputs = unique_set(3).trace(batch.inputs, n_loops=6).outputs[-1]
    assert torch.equal(outputs[:, 7:], batch.targets[:, 7:])


TASK, ABACUS = AbacusAddition(), get_program("abacus_ripple")


def test_a_carry_counts_the_places_that_a_loop_has_let_it_see():
    g = torch.Generator().manual_seed(0)
    batch = TASK.sample(7, batch_size=40, generator=g, distribution="chain")
    trace = ABACUS.trace(batch.inputs, n_loops=9)
    for row, tokens in enumerate(batch.inputs.tolist()):
        text = "".join(ALPHABET[t] for t in tokens)
        a, b = (x[::-1] for x in text.split("=")[0].split("+"))
        for t in range(10):
            for place in range(8):
                last = slice(7 - place, 7 - max(place - t, 0))
                seen = (int(x[last] or 0) for x in (a, b))
                carry = sum(seen) >= 10 ** min(t, place)
                assert trace.variables["carry"][t, row, text.index("=") + place] == (
                    carry and place > 0 and t > 0
                )


def test_a_wrong_sum_in_the_input_changes_no_prediction():
    batch = TASK.sample(6, batch_size=100, generator=torch.Generator().manual_seed(0))
    answered = (batch.inputs == 13).cumsum(dim=1).bool() & (batch.inputs < 10)
    wrong = torch.where(answered, (batch.inputs + 3) % 10, batch.inputs)
    outputs = ABACUS.trace(wrong, n_loops=6).outputs[-1]
    assert ((outputs == batch.targets) | (batch.targets == IGNORE)).all()


def test_the_sum_can_be_written_token_by_token():
    for a, b in [(95, 8), (999, 1), (0, 0), (12, 34)]:
        tokens = [ALPHABET.index(c) for c in f"{str(a)[::-1]}+{str(b)[::-1]}="]
        while tokens[-1] != ALPHABET.index("$"):
            outputs = ABACUS.trace(torch.tensor([tokens]), n_loops=4).outputs
            tokens.append(int(outputs[-1, 0, -1]))
        text = "".join(ALPHABET[t] for t in tokens)
        assert text.split("=")[1] == str(a + b)[::-1] + "$"


def test_every_program_goes_by_its_own_name_and_task():
    for name in list_programs():
        program = get_program(name)
        assert program.name == name
        assert name in list_programs(task=program.task)
        assert program.doc.endswith(".")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InputError, match="'ripple'"):
        get_program("riple")
    with pytest.raises(InputError, match=r"^task of"):
        list_programs(task="sorting")


@pytest.mark.usefixtures("no_type_checks")
def test_a_registered_program_is_found_and_its_name_is_protected(monkeypatch):
    import dataclasses

    monkeypatch.setattr(registry_module, "_PROGRAMS", dict(registry_module._PROGRAMS))
    mine = register_program(dataclasses.replace(get_program("ripple"), name="mine"))
    assert get_program("mine") is mine
    assert "mine" in list_programs(task="addition")
    with pytest.raises(InputError, match=r"^program name:"):
        register_program(mine)
    register_program(mine, replace=True)
    with pytest.raises(InputError, match=r"^program:"):
        register_program("ripple")  # type: ignore[arg-type]
