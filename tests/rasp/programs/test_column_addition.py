"""Multiplication: the columns of the product at once, their carries by a front."""

from __future__ import annotations

from loopinterp.rasp import UNKNOWN, get_program
from loopinterp.tasks import IGNORE, Multiplication

PROGRAM = get_program("multiplication")


def test_columns_and_carries_are_those_of_schoolbook_multiplication():
    n, equals = 7, 2 + 7 + 2
    operands = [(a, b) for a in range(4) for b in range(0, 2**n, 5)]
    batch = Multiplication().encode(operands, n=n)
    trace = PROGRAM.trace(batch.inputs, n_loops=n + 3)
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
    outputs = PROGRAM.trace(batch.inputs, n_loops=6).outputs[-1]
    assert ((outputs == batch.targets) | (batch.targets == IGNORE)).all()
