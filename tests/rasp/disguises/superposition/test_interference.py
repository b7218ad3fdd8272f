"""Measured errors are below their bounds, and proofs hold, on every input."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from loopinterp.rasp import (
    Compiled,
    compare_with_program,
    compile_program,
    permute,
    rotate,
    superpose,
)
from tests.rasp.disguises.subjects import cached, place_of

LOOPS = 4
CASES = {"ripple": (5, 11), "prefix_mod_5": (4, 16), "parity": (7, 13)}
"""Program -> positions, and dimensions, fewer than are exact, in which it is proven."""


@functools.cache
def pair(program: str) -> tuple[Compiled, Compiled, torch.Tensor]:
    """A model, the same behind a proven superposition, and every input."""
    length, width = CASES[program]
    plain = permute(compile_program(program, max_length=length), seed=0)
    dense = superpose(rotate(plain, seed=1), d_model=width, seed=0)
    return plain, dense, inputs(program, length)


def inputs(program: str, length: int) -> torch.Tensor:
    if program == "parity":
        bits = itertools.product(range(2), repeat=length - 3)
        return torch.tensor([[4, *x, 2, 3] for x in bits])
    first, others = {"ripple": (4, range(4)), "prefix_mod_5": (5, range(5))}[program]
    return torch.tensor([[first, *x] for x in itertools.product(others, repeat=length - 1)])


def largest_error(program: str, site: str, which: str) -> float:
    """Largest difference at a site, over what belongs to the program."""
    plain, dense, tokens = pair(program)
    before, after = (cached(c, tokens, LOOPS, site) for c in (plain, dense))
    error = 0.0
    for number, x in before.items():
        place = place_of(plain, number, LOOPS)
        if which == "heads":
            nodes = [n.head for n in plain.circuit.heads if (n.section, n.layer) == place]
            seen = x[:, nodes] > -1e9
            differ = (after[number][:, nodes] - x[:, nodes])[seen]
        else:
            groups = [g for g in plain.circuit.neurons if (g.section, g.layer) == place]
            nodes = [n for g in groups if g.how != "wipe" for n in g.neurons]
            differ = after[number][..., nodes] - x[..., nodes]
        error = max(error, float(differ.abs().max()) if differ.numel() else 0.0)
    return error


@pytest.mark.parametrize("program", CASES)
def test_every_measured_error_is_below_its_bound(program):
    plain, dense, tokens = pair(program)
    record = dense.circuit.superposition
    assert record is not None and record.proven and not record.exact
    units = largest_error(program, "mlp.hook_pre", "neurons")
    scores = largest_error(program, "attn.hook_attn_scores", "heads")
    assert units < record.unit_error + 1e-4 and scores < record.score_error + 1e-3
    states, logits = (
        [c.model(tokens, n_loops=LOOPS, return_type=kind).detach() for c in (plain, dense)]
        for kind in ("states", "all_logits")
    )
    assert (logits[0] - logits[1]).abs().max() < record.logit_error + 1e-4
    reads = [
        torch.cat([h @ c.circuit.of(name).read.mT for name in c.circuit.variables], -1)
        for h, c in zip(states, (plain, dense))
    ]
    assert (reads[0] - reads[1]).abs().max() < record.read_error + 1e-4
    # And the bounds say something: some input comes near.
    assert max(units / record.unit_error, scores / record.score_error) > 0.2


@pytest.mark.parametrize("program", CASES)
def test_what_is_proven_holds_for_every_input_at_every_loop(program):
    plain, dense, tokens = pair(program)
    agreement = compare_with_program(dense, tokens, n_loops=LOOPS)
    assert agreement.exact
    answers = [
        c.model(tokens, n_loops=LOOPS, return_type="all_logits").argmax(-1) for c in (plain, dense)
    ]
    decided = compile_logits(plain, tokens)
    assert torch.equal(answers[0][decided], answers[1][decided])


def compile_logits(plain: Compiled, tokens: torch.Tensor) -> torch.Tensor:
    """Where the plain model decides for a class [loop, batch, pos]."""
    logits = plain.model(tokens, n_loops=LOOPS, return_type="all_logits")
    return logits.amax(-1) > 5


@pytest.mark.parametrize("program", CASES)
def test_inexact_reads_do_not_drift_in_500_loops(program):
    _, dense, tokens = pair(program)
    some = tokens[:: max(len(tokens) // 8, 1)]
    with torch.no_grad():
        states = dense.model(some, n_loops=500, return_type="states")
    settled = states[20:]
    assert (settled - settled[0]).abs().max() < 1e-3
    assert compare_with_program(dense, some, n_loops=500).exact


def test_wipes_that_cannot_be_exact_become_units():
    plain, dense, _ = pair("ripple")
    for group in dense.circuit.neurons:
        bias = dense.model.state_dict()[f"{group.section}.{group.layer}.mlp.fc_in.bias"]
        assert max(group.neurons, default=0) < len(bias)
        assert len(set(group.neurons)) == len(group.neurons)
    wipes = [
        sum(len(g.neurons) for g in c.circuit.neurons if g.how == "wipe") for c in (plain, dense)
    ]
    assert wipes[1] > wipes[0]
