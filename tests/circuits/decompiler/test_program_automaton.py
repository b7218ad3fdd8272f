"""Programs as tables, and which program a table is, against runs and interchanges of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopinterp.circuits.decompiler.automaton_program import with_first_guess
from loopinterp.circuits.decompiler.coded_states import Surroundings
from loopinterp.circuits.decompiler.program_automaton import (
    is_local,
    same_algorithm,
    same_program,
    tabulate_program,
)
from loopinterp.rasp import get_program, list_programs
from loopinterp.rasp.language import UNKNOWN, full, tok_map, tokens
from loopinterp.rasp.mutations import equivalence, near_misses_by_kind
from loopinterp.rasp.program_alignment import Alignment
from loopinterp.tasks import get_task

INPUTS = Surroundings.of(get_task("addition"), (1, 2, 3))
LOCAL = [name for name in list_programs("addition") if is_local(get_program(name))]


def test_which_programs_are_local():
    assert "ripple" in LOCAL and "carry_save" in LOCAL
    assert "lookahead" not in LOCAL  # reads farther in every loop
    assert not is_local(get_program("copy"))  # reads its place


@pytest.mark.parametrize("name", LOCAL)
def test_a_table_runs_as_its_program(name):
    program = get_program(name)
    table = tabulate_program(program, INPUTS.pairs)
    assert table is not None
    inputs = (
        get_task("addition")
        .sample(8, batch_size=32, generator=torch.Generator().manual_seed(0))
        .inputs
    )
    trace = program.trace(inputs, n_loops=10)
    for loop, values in enumerate(table.automaton.run(inputs, 10)):
        said = table.automaton.read(inputs, values)
        outputs = trace.outputs[loop]
        assert torch.equal(said, outputs.where(outputs >= 0, UNKNOWN))


@pytest.mark.parametrize("name", LOCAL)
def test_a_stock_program_is_itself_and_no_other(name):
    table = tabulate_program(get_program(name), INPUTS.pairs)
    assert table is not None
    found = [other for other in LOCAL if same_program(table.automaton, get_program(other), INPUTS)]
    assert found == [name]


@pytest.mark.parametrize("name", ["ripple", "sticky_ripple"])
def test_it_agrees_with_every_interchange(name):
    """Mutations are the program exactly where no interchange to length 5 tells the two apart."""
    original, seen = get_program(name), set()
    for mutations in near_misses_by_kind(name).values():
        for program in filter(is_local, mutations[:2]):
            table = tabulate_program(program, INPUTS.pairs)
            assert table is not None
            same = same_program(table.automaton, original, INPUTS)
            told = equivalence(original, program, lengths=(2, 4, 5))
            # A program that lies a loop off is another table.
            plain = told.laid == Alignment()
            assert (same is not None and same.starts_alike) == (told.equivalent and plain), program
            seen.add(told.equivalent and plain)
    assert seen == {True, False}


def test_a_first_guess_of_its_own_is_found():
    ripple = get_program("ripple")
    guess = tok_map(tokens, {1: 1, 2: 1}, default=0)
    other = replace(ripple, name="ripple from propagate", prepare={"carry": guess})
    table = tabulate_program(other, INPUTS.pairs)
    assert table is not None
    same = same_program(table.automaton, ripple, INPUTS)
    assert same is not None and not same.starts_alike
    assert {own: values for (_, own), values in same.first_guess.items()} == {
        0: (0,), 1: (1,), 2: (1,), 3: (0,), 4: (0,),
    }  # fmt: skip
    named = with_first_guess(same)
    assert named is not None
    assert equivalence(named, other, lengths=(1, 2, 3, 4)).equivalent
    assert not equivalence(named, "ripple", lengths=(1, 2, 3, 4)).equivalent


def test_two_automata_are_one_up_to_their_first_guess():
    def table(program):
        found = tabulate_program(program, INPUTS.pairs)
        assert found is not None
        return found.automaton

    ripple = get_program("ripple")
    other = replace(ripple, prepare={"carry": full(1)})
    assert same_algorithm(table(ripple), table(other), INPUTS.asked)
    for name in ("sticky_ripple", "ripple_held_2"):
        assert not same_algorithm(table(ripple), table(get_program(name)), INPUTS.asked)


def test_a_program_that_keeps_its_start_is_another():
    """Where the first guess lasts, it is part of the algorithm."""
    ripple = get_program("ripple")
    stuck = replace(
        ripple,
        name="ripple with a switch",
        prepare={"carry": full(0), "switch": full(1)},
        step={**ripple.step, "carry": ripple.step["carry"] & full(1)},
    )
    table = tabulate_program(stuck, INPUTS.pairs)
    assert table is not None and same_program(table.automaton, ripple, INPUTS) is not None
    for name in ("sticky_ripple", "carry_save"):
        assert same_program(table.automaton, get_program(name), INPUTS) is None
