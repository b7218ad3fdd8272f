"""A run with a state put in, by hand on the four methods, and what programs say of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.explorer.changed_run import PutIn, explore_change
from loopinterp.models import LoopedTransformer, bind
from loopinterp.rasp import compile_program, get_program
from loopinterp.tasks import Addition, Batch


@torch.no_grad()
@pytest.mark.parametrize("put_in", ["interchange", "mean", "zero"])
@pytest.mark.parametrize(("loop", "pos"), [(0, 2), (3, 1), (6, 5)])
def test_it_goes_on_from_the_changed_state(
    model: LoopedTransformer, batches: list[Batch], put_in: PutIn, loop: int, pos: int
) -> None:
    batch = batches[1][:4]
    found = explore_change(model, batch, loop=loop, pos=pos, put_in=put_in, source=2)
    bound = bind(model, batch.inputs)
    every = [h for _, h in bound.run(6)]
    there = every[loop][:, pos]
    value = {"interchange": there[2], "mean": there.mean(0), "zero": there[0] * 0}[put_in]
    own, states = bound.select(slice(0, 1)), [h[:1] for h in every[:loop]]
    h = every[loop][:1].clone()
    h[0, pos] = value
    for t in range(loop, 7):
        h = own.step(h) if t > loop else h
        states.append(h)
    for t, h in enumerate(states):
        shares = own.readout(h)[0].softmax(-1)
        here = found.data.isel(example=0, loop=t)
        assert (here["answer"][:, 0].values == shares.argmax(-1).numpy()).all()
        np.testing.assert_allclose(here["probability"][:, 0], shares.amax(-1), atol=1e-3)
    assert found.details[0].startswith(f"After loop {loop}, position {pos} is given")


def test_a_compiled_model_does_what_its_program_predicts() -> None:
    model = compile_program("ripple", max_length=6).model
    batch = Addition().encode([(1, 14), (1, 15)], n=5)
    programs = [get_program("ripple"), get_program("latched_chain")]
    changed = 0
    for loop in range(7):
        for pos in range(2, 6):  # at which both have the same token
            found = explore_change(model, batch, loop=loop, pos=pos, programs=programs)
            said = found.data.isel(example=0, pos=slice(1, None))
            ours = said.sel(name="ripple predicts", loop=slice(max(loop, 1), None))
            assert (ours["variable"] == ours["implied"]).all()
            other = said.sel(name="latched_chain predicts", loop=slice(max(loop, 1), None))
            changed += int((other["variable"] != other["implied"]).sum())
    assert changed > 0  # so the check could have failed


def test_without_an_interchange_programs_say_nothing(model: LoopedTransformer) -> None:
    batch = Addition().encode([(1, 2)], n=3)
    found = explore_change(
        model, batch, loop=1, pos=1, put_in="zero", programs=[get_program("ripple")]
    )
    assert "variable" not in found.data and "attention" in found.missing


def test_places_that_there_are_not_are_refused(model: LoopedTransformer) -> None:
    batch = Addition().encode([(1, 2), (2, 2)], n=3)
    for loop, pos, source, name in [(5, 1, 1, "loop"), (1, 4, 1, "pos"), (1, 1, 2, "source")]:
        with pytest.raises(InputError, match=f"^{name}: expected"):
            explore_change(model, batch, loop=loop, pos=pos, source=source)
