"""Loop programs are checked when they are built, and print as code."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import product

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.programs import (
    CeilLog2,
    Linear,
    LoopProgram,
    aggregate,
    full,
    indices,
    select,
    shift_right,
    tokens,
    var,
)
from loopinterp.programs.program import ProgramOffset, alignments

x, y = var("x"), var("y")


def build(**changes) -> LoopProgram:
    parts = {
        "name": "mine",
        "task": "prefix_sum",
        "inputs": ("0", "1", "BOS", "PAD"),
        "prepare": {"x": full(0), "y": tokens},
        "step": {"x": shift_right(x) + y},
        "finish": x,
        "n_loops": Linear(),
    }
    return LoopProgram(**{**parts, **changes})


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"step": {"x": x + var("z")}}, "step, x = var('x') + var('z'): variable"),
        ({"step": {"z": x}}, "step, z = var('x'): variable"),
        ({"finish": var("xx")}, "finish var('xx'): variable"),
        ({"prepare": {"x": full(0), "y": x}}, "prepare, y of program mine"),
        ({"prepare": {}}, "prepare of program mine"),
        ({"step": {}}, "step of program mine"),
        (
            {"step": {"x": select(x, y, "==")}},
            "step, x",
        ),
        ({"finish": select(x, y, "==")}, "finish"),
        ({"finish": 3}, "finish"),
        ({"step": {"x": lambda v: v}}, "step, x"),
        ({"n_loops": 5}, "n_loops of program mine"),
    ],
)
def test_bad_programs_name_the_expression_and_the_fix(changes, what):
    with pytest.raises(InputError) as caught:
        build(**changes)
    assert caught.value.what == what


def test_two_selectors_of_one_name_are_refused():
    one = aggregate(select(indices, indices - 1, "==", name="left"), x)
    other = aggregate(select(indices, indices - 2, "==", name="left"), x)
    with pytest.raises(InputError, match=r"^selector 'left'"):
        build(step={"x": one + other})
    assert list(build(step={"x": one + one}).selectors) == ["left"]


def test_equal_programs_are_equal_and_changed_ones_are_not():
    assert build() == build()
    assert hash(build()) == hash(build())
    assert build() != build(finish=x + 1)
    assert build() != build(n_loops=Linear(offset=1))


def test_copies_and_pickles_are_equal():
    program = build(task_settings={"modulus": 2})
    for copied in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert copied == program and copied.doc == program.doc


def test_a_program_cannot_be_changed_afterwards():
    with pytest.raises(TypeError):
        build().step["x"] = tokens  # type: ignore[index]


def test_a_program_prints_as_code():
    lines = [
        "program mine for prefix_sum: T(n) = n",
        "  prepare",
        "    x = full(0)",
        "    y = tokens",
        "  loop",
        "    x = shift_right(x, 1, default=0) + y",
        "  finish",
        "    x",
    ]
    assert str(build()).splitlines() == lines


def test_assignments_are_simultaneous_and_unset_variables_keep_their_value():
    swap = build(prepare={"x": tokens, "y": full(7)}, step={"x": y, "y": x}, finish=x)
    trace = swap.trace(torch.tensor([[1, 0]]), 2)
    assert trace.variables["x"][:, 0].tolist() == [[1, 0], [7, 7], [1, 0]]
    assert trace.variables["y"][:, 0].tolist() == [[7, 7], [1, 0], [7, 7]]
    kept = build().trace(torch.tensor([[1, 0]]), 2)
    assert kept.variables["y"][:, 0].tolist() == [[1, 0]] * 3


def test_selectors_without_a_name_go_by_their_code():
    mine = build(step={"x": aggregate(select(tokens, x, "=="), x)})
    assert list(mine.selectors) == ["select(tokens, var('x'), '==')"]


def test_a_logarithm_is_the_rounded_up_one():
    for inside in (-1, 0, 2):
        for n in range(1, 300):
            expected = math.ceil(math.log2(n + inside)) if n + inside >= 1 else 0
            assert CeilLog2(inside=inside)(n) == expected


def test_a_line_never_goes_below_zero():
    assert [Linear(slope=2, offset=-3)(n) for n in (1, 2, 3)] == [0, 1, 3]


def test_counts_print_as_formulas_and_compare():
    formulas = {
        "n": Linear(),
        "n + 1": Linear(offset=1),
        "2 n - 3": Linear(slope=2, offset=-3),
        "1": Linear(slope=0, offset=1),
        "ceil(log2(n))": CeilLog2(),
    }
    for formula, count in formulas.items():
        assert repr(count) == formula
    assert Linear(offset=1) == Linear(offset=1) != Linear()


def test_the_alignments_are_the_plain_one_and_all_its_neighbours():
    offsets = list(alignments())
    assert offsets[0] == ProgramOffset()
    neighbours = {ProgramOffset(*one) for one in product((-1, 0, 1), (0, 1), (0, 1))}
    assert set(offsets) == neighbours and len(offsets) == len(neighbours)
    assert len({str(one) for one in offsets}) == len(offsets)
