"""Compiled programs: settling loops, regimes, limits and their number are the interpreter's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.compiler import Compiled, compile_program
from loopinterp.dynamics import (
    Regime,
    Status,
    classify_regimes,
    find_limits,
    reachability_study,
    relative_residual,
    run_loops,
    settling_time,
)
from loopinterp.dynamics.limits import around
from loopinterp.models import Iteration, bind
from loopinterp.programs import get_program, list_programs, tokens, var
from loopinterp.programs.interpreter import Trace
from loopinterp.tasks import Batch, get_task
from tests.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("no_type_checks")  # which cost most of the time

N_LOOPS = 20
OTHERS = 3
LARGE = {"abacus_ripple", "binary_sum", "multiplication", "token_addition", "unique_set"}
"""Programs whose models are large; their inputs are shorter."""


@dataclass(frozen=True)
class Known:
    """A compiled program on a few inputs, and what the interpreter says of them."""

    compiled: Compiled
    batch: Batch
    trace: Trace

    @property
    def iteration(self) -> Iteration:
        return bind(self.compiled.model, self.batch.inputs)

    def end_from(self, start: dict[str, Tensor] | None = None) -> Tensor:
        """Values of all variables at the end of a run, [batch, number]."""
        run = self.compiled.program.run(self.batch.inputs, n_loops=N_LOOPS, variables=start)
        return torch.cat([values[-1] for values in run.variables.values()], dim=1)


@cache
def known(name: str) -> Known:
    source = get_program(name)
    task = get_task(source.task, **source.task_settings)
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(2 if name in LARGE else 5, batch_size=6, generator=generator)
    compiled = compile_program(source, max_length=batch.inputs.shape[1])
    return Known(compiled, batch, source.trace(batch.inputs, N_LOOPS))


@pytest.mark.parametrize("name", list_programs())
def test_each_position_settles_with_the_program_and_is_a_fixed_point(name: str) -> None:
    it = known(name)
    states = run_loops(it.iteration, N_LOOPS)
    settled = settling_time(relative_residual(states))  # the first loop that moves nothing
    last_change = torch.stack([it.trace.converged(v) for v in it.trace.variables]).amax(dim=0)
    assert last_change.max() < N_LOOPS
    assert torch.equal(settled, last_change + 1)
    assert (classify_regimes(states).regime == Regime.FIXED_POINT).all()


@pytest.mark.parametrize("name", list_programs())
def test_the_limit_holds_the_programs_final_values(name: str) -> None:
    it = known(name)
    iteration = it.iteration
    end = find_limits(iteration, iteration.h0, max_loops=N_LOOPS)
    assert (end.status == Status.CONVERGED).all() and (end.period == 1).all()
    for variable, values in it.trace.variables.items():
        assert torch.equal(it.compiled.circuit.decode(variable, end.state), values[-1]), variable
    answers = iteration.read(end.state, N_LOOPS).argmax(-1)
    decided = it.trace.outputs[-1] >= 0
    assert torch.equal(answers[decided], it.trace.outputs[-1][decided])


@pytest.mark.parametrize("name", list_programs())
def test_an_input_has_as_many_limits_as_the_program_has_ends(name: str) -> None:
    it = known(name)
    result = reachability_study(
        it.compiled.model,
        it.batch,
        n_loops=N_LOOPS,
        n_noise=0,
        n_others=OTHERS,
        kicks=(0.01,),
        n_draws=1,
        positions="all",
    )
    # What the program comes to from its own start, and from the ends of other inputs.
    final = {name: values[-1] for name, values in it.trace.variables.items()}
    starts = [None, *({v: x.roll(-k, 0) for v, x in final.items()} for k in range(1, OTHERS + 1))]
    ends = torch.stack([it.end_from(start) for start in starts], dim=1)
    expected = [len({*map(tuple, of_one.tolist())}) for of_one in ends]
    # Zeros hold no value of any variable. From there the model comes to the one limit if every
    # variable is made anew of the tokens, and else where some variable has no value still: to a
    # limit more, which is no state of the program.
    of_zeros = result.data["distance"].sel(start="zeros").values > result.same
    assert (result.data["n_limits"].values - of_zeros).tolist() == expected
    own = it.end_from()
    for k in range(1, OTHERS + 1):
        same = (ends[:, k] == own).all(dim=1)
        reached = result.data["distance"].sel(start=f"other {k}").values <= result.same
        assert reached.tolist() == same.tolist()
    assert (result.data["kick_distance"] < 1e-4).all()  # units are flat: a small kick is wiped
    iteration = it.iteration
    from_zeros = find_limits(iteration, torch.zeros_like(iteration.h0), max_loops=200)
    circuit = it.compiled.circuit
    held = [from_zeros.state @ circuit.directions_of(v).read.mT for v in it.trace.variables]
    empty = torch.stack([(values.amax(-1) < 0.5).any(dim=1) for values in held]).any(dim=0)
    assert empty.tolist() == of_zeros.tolist()


def test_what_the_programs_say_of_their_limits_is_not_always_the_same() -> None:
    # Or the tests above could hold with a count that is always 1.
    ends = {name: known(name).end_from() for name in ("ripple", "parity", "latched_ripple")}
    for name, one in (("ripple", True), ("parity", False), ("latched_ripple", False)):
        it = known(name)
        final = {v: x[-1].roll(-1, 0) for v, x in it.trace.variables.items()}
        assert bool((it.end_from(final) == ends[name]).all()) == one


@pytest.mark.parametrize("period", [2, 3])
def test_a_variable_that_turns_for_ever_is_a_cycle_of_its_period(period: int) -> None:
    """At tokens that are not 0 ``x`` counts on modulo the period; elsewhere it stays."""
    moves = (tokens > 0) & 1
    counts = program(
        {"x": tokens % period}, {"x": (var("x") + moves) % period}, var("x"), n_tokens=3
    )
    inputs = every_input(counts, 3)
    compiled = compile_program(counts, max_length=3)
    trace = counts.trace(inputs, N_LOOPS)
    iteration = bind(compiled.model, inputs)
    regimes = classify_regimes(run_loops(iteration, N_LOOPS))
    turns = inputs > 0
    assert (regimes.regime[turns] == Regime.ORBIT).all()
    np.testing.assert_allclose(regimes.period[turns], period, atol=1e-4)
    assert (regimes.regime[~turns] == Regime.FIXED_POINT).all()

    end = find_limits(iteration, iteration.h0, max_loops=100)
    some = turns.any(dim=1)
    assert torch.equal(end.status == Status.CYCLE, some)
    assert torch.equal(end.period, torch.where(some, period, 1))
    # All around the cycle, the states are the program's last ones, whichever comes first.
    held = [compiled.circuit.decode("x", state) for state in around(iteration, end)]
    found, expected = torch.stack(held, 1), trace.variables["x"][-period:].transpose(0, 1)
    for of_model, of_program in zip(found.tolist(), expected.tolist()):
        assert {*map(tuple, of_model)} == {*map(tuple, of_program)}


def test_cycles_are_as_many_as_the_program_has() -> None:
    counts = program({"x": tokens}, {"x": (var("x") + 1) % 3}, var("x"), n_tokens=3)
    inputs = torch.tensor([[0, 0], [1, 1], [0, 1], [2, 1]])
    compiled = compile_program(counts, max_length=2)
    each = torch.full((4,), 2)
    batch = Batch(inputs, torch.zeros_like(inputs), each, each)
    result = reachability_study(
        compiled.model, batch, n_noise=0, n_others=3, kicks=(0.01,), n_draws=1, positions="all"
    )
    # The sum turns with both; their difference modulo 3 stays, and tells cycles apart: 0, 0, 1, 2.
    difference = (inputs[:, 1] - inputs[:, 0]) % 3
    expected = difference.unique().numel()
    of_zeros = result.data["distance"].sel(start="zeros").values > result.same
    assert (result.data["n_limits"].values - of_zeros).tolist() == [expected] * 4
    for k in (1, 2, 3):
        same = difference.roll(-k) == difference
        reached = result.data["distance"].sel(start=f"other {k}").values <= result.same
        # An input's cycle holds its tokens too; those are not the start's but its own.
        assert reached.tolist() == same.tolist()
