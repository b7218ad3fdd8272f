"""Prefix sums: after t loops, the XOR of the last t bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.programs import get_program
from loopinterp.programs.prefix_programs import prefix_automaton, prefix_mod
from loopinterp.tasks import PrefixSum, RegularLanguage, get_automaton, list_languages
from tests.compiler.compiled_properties import agrees


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
