from __future__ import annotations

import pytest
import torch

from loopinterp.circuits import program_swaps
from loopinterp.circuits.program_swaps import ProgramSwaps
from loopinterp.rasp import counterfactual, get_program

LOOPS = 8


@pytest.fixture(scope="module")
def places() -> tuple[torch.Tensor, ...]:
    """Base, source, position, loop and two readings of some swaps, all different."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(most, (24,), generator=generator) for most in (64, 64, 16, LOOPS)]
    base, source, position, loop = drawn
    return base, source, position + 1, loop, torch.stack([LOOPS - loop, torch.ones_like(loop)])


def outputs(swaps, names, places, **more):
    base, source, position, loop, steps = places
    return swaps.outputs(
        names, base=base, source=source, position=position, loop=loop, steps=steps, **more
    )


@pytest.mark.parametrize(("name", "variable"), [("ripple", "carry"), ("carry_save", "sum")])
def test_swaps_are_counterfactuals_pair_by_pair(name, variable, additions, places):
    program = get_program(name)
    swaps = ProgramSwaps(program, additions.inputs, n_loops=LOOPS)
    said = outputs(swaps, (variable,), places)
    for k, (base, source, position, loop) in enumerate(zip(*(p.tolist() for p in places[:4]))):
        mask = torch.zeros(1, additions.inputs.shape[1], dtype=torch.bool)
        mask[0, position] = True
        one, other = (additions.inputs[row : row + 1] for row in (base, source))
        trace = counterfactual(program, one, other, variable, loop, mask, n_loops=LOOPS + 1)
        assert torch.equal(said[0, k], trace.outputs[LOOPS, 0])
        assert torch.equal(said[1, k], trace.outputs[loop + 1, 0])


def test_no_variables_are_no_swap(additions, places):
    swaps = ProgramSwaps(get_program("lookahead"), additions.inputs, n_loops=LOOPS)
    base, loop = places[0], places[3]
    assert torch.equal(outputs(swaps, (), places)[0], swaps.trace.outputs[LOOPS, base])
    assert torch.equal(outputs(swaps, (), places)[1], swaps.trace.outputs[loop + 1, base])


def test_values_may_come_from_another_loop(additions, places):
    program = get_program("ripple")
    swaps = ProgramSwaps(program, additions.inputs, n_loops=LOOPS)
    base, source, position, loop, _ = places
    early = torch.zeros_like(loop)
    taken = outputs(swaps, ("carry",), places, source_loop=early)
    state = swaps.trace.variables["carry"][loop, base]
    state[torch.arange(len(base)), position] = swaps.trace.variables["carry"][0, source, position]
    run = program.run(additions.inputs[base], n_loops=1, variables={"carry": state})
    assert torch.equal(taken[1], run.outputs[1])


def test_many_pairs_are_run_a_few_at_a_time(additions, places, monkeypatch):
    swaps = ProgramSwaps(get_program("ripple"), additions.inputs, n_loops=LOOPS)
    whole = outputs(swaps, ("carry",), places)
    monkeypatch.setattr(program_swaps, "_AT_A_TIME", 1000)
    assert torch.equal(outputs(swaps, ("carry",), places), whole)
