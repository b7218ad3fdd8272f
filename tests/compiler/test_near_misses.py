"""Near misses: right answers at T(n), another mechanism, and models that run them."""

from __future__ import annotations

import functools

import pytest

from loopinterp.compiler import compile_program, near_misses, near_misses_by_kind
from loopinterp.compiler.disguises import _STORED_OTHERWISE
from loopinterp.core.errors import InputError
from loopinterp.programs import equivalence, get_program, list_programs
from loopinterp.tasks import IGNORE
from tests.compiler.compiled_properties import agrees
from tests.programs.inputs import every_input, task_of

pytestmark = pytest.mark.usefixtures("quick")

all_kinds = functools.partial(functools.cache(near_misses_by_kind), most=16)
some_misses = functools.cache(near_misses)

ALIKE = ("abacus_ripple", "multiplication", "unique_set")
"""They take long, and read other positions as the binary sum does."""

PROGRAMS = [name for name in list_programs() if name not in ALIKE]


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_inputs_are_answered_at_t_of_n_and_names_speak(name):
    program = get_program(name)
    (miss,) = some_misses(name, most=1)
    assert miss.name.startswith(f"{name}, ")
    assert miss.doc.endswith(".")
    assert (miss.task, miss.inputs, miss.n_loops) == (
        program.task,
        program.inputs,
        program.n_loops,
    )
    for n in (1, 2, 3, 5):
        batch = every_input(task_of(program), n)[:1024]
        outputs = miss.trace(batch.inputs, program.n_loops(n)).outputs[-1]
        assert ((outputs == batch.targets) | (batch.targets == IGNORE)).all(), (miss.name, n)


@pytest.mark.parametrize(
    "name",
    [
        "ripple",
        "latched_ripple",
        "prefix_xor",
        "parity",
        "copy",
        "binary_sum",
    ],
)
def test_their_models_run_them(name):
    program = get_program(name)
    inputs = every_input(task_of(program), 3).inputs[:64]
    (miss,) = some_misses(name, most=1)
    compiled = compile_program(miss, max_length=inputs.shape[1])
    agrees(compiled, inputs, n_loops=program.n_loops(3) + 2)


@pytest.mark.parametrize("name", ["ripple", "prefix_xor"])
def test_what_is_stored_otherwise_is_equivalent_and_what_is_held_is_not(name):
    kinds = all_kinds(name)
    decided = {
        kind: [equivalence(name, miss, lengths=(3,)).equivalent for miss in kinds[kind]]
        for kind in (*_STORED_OTHERWISE, "held", "delayed", "forgetting", "faster", "slower")
    }
    for kind, equivalent in decided.items():
        assert set(equivalent) == {kind in _STORED_OTHERWISE}, kind


def test_a_copy_of_what_is_read_is_the_program_a_loop_ahead_with_late_answers():
    misses = all_kinds("prefix_xor")["read from a copy"]
    [copy] = [miss for miss in misses if miss.name.endswith("read from a copy")]
    result = equivalence("prefix_xor", copy, lengths=(1, 4))
    assert result.equivalent
    assert (result.program_offset.shift, result.program_offset.lag) == (1, 1)


def test_they_are_the_same_for_a_seed_and_others_for_another():
    first, again, other = (
        [miss.name for miss in near_misses("prefix_xor", most=4, seed=seed)] for seed in (0, 0, 1)
    )
    assert first == again
    assert set(first) != set(other)


def test_at_most_so_many_are_spread_over_kinds():
    kinds = near_misses_by_kind("ripple", most=8)
    assert sum(map(len, kinds.values())) == len(kinds) == 8
    assert near_misses("ripple", most=0) == []
    with pytest.raises(InputError) as caught:
        near_misses("ripple", most=-1)
    assert caught.value.what == "most"


def test_a_mutation_that_needs_more_loops_is_none():
    for name in ("ripple", "prefix_xor"):
        slower = all_kinds(name)["slower"]
        assert slower
        assert all("once settled" in miss.name for miss in slower)
