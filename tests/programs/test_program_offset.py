"""Ways in which a program may lie over a model: one loop, position or answer to each side."""

from itertools import product

from loopinterp.programs.program_offset import ProgramOffset, alignments


def test_the_alignments_are_the_plain_one_and_all_its_neighbours():
    offsets = list(alignments())
    assert offsets[0] == ProgramOffset()
    neighbours = {ProgramOffset(*one) for one in product((-1, 0, 1), (0, 1), (0, 1))}
    assert set(offsets) == neighbours and len(offsets) == len(neighbours)
    assert len({str(one) for one in offsets}) == len(offsets)
