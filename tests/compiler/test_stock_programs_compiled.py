"""Every program, compiled: each variable, answer and selector is the program's, at every loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from loopinterp.compiler import (
    compare_with_program,
    compile_program,
    distract,
    permute,
    rotate,
    superpose,
)
from loopinterp.programs import get_program, list_programs
from loopinterp.programs.stock_programs import unique_set
from loopinterp.tasks import UniqueSet
from tests.compiler.compiled_properties import agrees, loops_until_a_state_returns
from tests.compiler.small_models import logits_of, small_model, stock_model
from tests.programs.inputs import every_input, task_of

pytestmark = pytest.mark.usefixtures("quick")

PROGRAMS = list_programs()
MOST = {"abacus_ripple": 64, "token_addition": 256, "unique_set": 64}
"""Inputs of one length that are tried where models are large; else, all are, or 1024 of them."""

LONG = {
    "abacus_ripple": 6,
    "binary_sum": 10,
    "multiplication": 6,
    "token_addition": 7,
    "unique_set": 6,
}
"""Lengths of long inputs of programs whose models are large."""

LONGEST = ("one_shot", "parity", "ripple")
"""Programs whose long inputs are of 64; those of all others are of 16."""


def compared(name: str, inputs: Tensor, n_loops: int, max_length: int | None = None) -> None:
    compiled = stock_model(name, max_length or inputs.shape[1])
    agrees(compiled, inputs, n_loops=n_loops)


def lengths(name: str) -> list[int]:
    """Lengths of which all inputs are tried.

    Shorter inputs of aligned tasks are how longer ones begin, and no position sees what follows.
    Where models are large, longer inputs are those of the test of mixed lengths.
    """
    if get_program(name).task in ("addition", "prefix_sum", "regular_language"):
        return [1, 5]
    return [1, 2, 4] if name in (*MOST, "multiplication") else [1, 3, 6]


@pytest.mark.parametrize(("name", "n"), [(name, n) for name in PROGRAMS for n in lengths(name)])
def test_all_inputs_run_as_the_program_does(name, n):
    program = get_program(name)
    inputs = every_input(task_of(program), n).inputs
    if len(inputs) > MOST.get(name, 1_024):
        chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(n))
        inputs = inputs[chosen[: MOST.get(name, 1_024)]]
    # One model reads inputs of all lengths.
    longest = task_of(program).n_positions(lengths(name)[-1])
    compared(name, inputs, program.n_loops(n) + 1, max_length=max(longest, 7))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_sets_of_a_small_alphabet_run_as_the_program_does(n):
    program = unique_set(3)
    symbols = torch.tensor(list(itertools.product(range(3), repeat=n)))
    inputs = UniqueSet(n_symbols=3).from_symbols(symbols, torch.full((len(symbols),), n)).inputs
    compiled = compile_program(program, max_length=inputs.shape[1])
    agrees(compiled, inputs, n_loops=program.n_loops(n) + 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_inputs_of_mixed_lengths_run_as_the_program_does(name):
    program = get_program(name)
    task = task_of(program)
    generator = torch.Generator().manual_seed(0)
    longest = LONG.get(name, 64 if name in LONGEST else 16)
    inputs = []
    for distribution in task.distributions:
        n = torch.cat(
            [torch.tensor([longest]), torch.randint(1, longest, (5,), generator=generator)]
        )
        inputs.append(task.sample(n, generator=generator, distribution=distribution).inputs)
    compared(name, torch.cat(inputs), program.n_loops(longest) + 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_sequences_that_are_no_prompts_run_as_the_program_does(name):
    n_tokens = len(get_program(name).inputs)
    shortest, longest = 1, 7
    generator = torch.Generator().manual_seed(0)
    for length, max_length in ((shortest, shortest), (4, longest), (longest, longest)):
        inputs = torch.randint(n_tokens, (64, length), generator=generator).unique(dim=0)
        compared(name, inputs, 6, max_length=max_length)


@pytest.mark.parametrize("name", PROGRAMS)
def test_after_500_loops_the_state_is_still_exact(name):
    program = get_program(name)
    n = 1 if name in LONG else 4  # their models are large
    inputs = every_input(task_of(program), n).inputs[:32]
    compiled, settled = stock_model(name, inputs.shape[1]), program.n_loops(n)
    n_loops = max(loops_until_a_state_returns(compiled, inputs, most=500), settled + 1)
    agrees(compiled, inputs, n_loops=n_loops)
    trace = program.trace(inputs, n_loops)
    states = compiled.model(inputs, n_loops=n_loops, return_type="states")
    for variable, values in trace.variables.items():
        assert torch.equal(compiled.circuit.decode(variable, states), values)
    if bool((trace.outputs[settled:] == trace.outputs[-1]).all()):
        logits = compiled.model.readout(states)
        assert (logits[settled:] - logits[-1]).abs().max() < 1e-3


@pytest.mark.parametrize("program", list_programs())
def test_a_disguised_model_does_the_same_and_its_circuit_says_where(program):
    plain = small_model(program)
    # It is exact for any directions, so that a short search for them is enough.
    superposed = superpose(plain.compiled, seed=0, steps=5)
    hidden = permute(rotate(distract(superposed, seed=2), seed=3), seed=4)
    logits = logits_of(hidden, plain.inputs, plain.n_loops)
    assert (logits - plain.logits).abs().max() < 1e-4
    agreement = compare_with_program(hidden, plain.inputs, n_loops=plain.n_loops)
    assert agreement.exact
    assert agreement.state_error < 1e-3
    assert max(agreement.attention_error.values()) < 1e-3
    assert set(agreement.attention_error) == {node.selector for node in hidden.circuit.heads}
