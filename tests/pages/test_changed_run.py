from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.interventions.engine import answers_by_loop
from loopinterp.models import LoopedTransformer, bind
from loopinterp.pages.exploration import NOT_SAID, Missing
from loopinterp.pages.notebook_widget import PutIn, explore_change
from loopinterp.programs import get_program
from loopinterp.tasks import Addition, Batch, token_words, words_at


@torch.no_grad()
@pytest.mark.parametrize("put_in", ["interchange", "mean", "zero"])
@pytest.mark.parametrize(("loop", "pos"), [(0, 2), (3, 1), (6, 5)])
def test_it_goes_on_from_the_changed_state(
    model: LoopedTransformer, batches: list[Batch], put_in: PutIn, loop: int, pos: int
) -> None:
    batch = batches[1][:4]
    found, _ = explore_change(model, batch, loop=loop, pos=pos, put_in=put_in, source=2)
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
    otherwise = 0
    for loop in range(7):
        for pos in range(2, 6):  # at which both have the same token
            run, predicted = explore_change(model, batch, loop=loop, pos=pos, programs=programs)
            answered = run.data["answer"].isel(example=0, rank=0, pos=slice(1, None))
            since = slice(max(loop, 1), None)
            ours = predicted["ripple"].data.isel(example=0, pos=slice(1, None)).sel(loop=since)
            assert (ours["answer"].isel(rank=0) == answered.sel(loop=since)).all()
            assert (ours["variable"] == ours["implied"]).all()  # its carry, answer and claim
            rival = predicted["latched_chain"].data.isel(example=0, pos=slice(1, None))
            otherwise += int((rival["answer"].isel(rank=0) != answered).sel(loop=since).sum())
    assert otherwise > 0  # so the check could have failed


def test_a_prediction_is_the_programs_own_run_with_its_variables_exchanged(
    model: LoopedTransformer, batches: list[Batch]
) -> None:
    program, batch, loop, pos = get_program("sticky_ripple"), batches[1][:3], 2, 4
    _, predicted = explore_change(model, batch, loop=loop, pos=pos, source=2, programs=[program])
    found = predicted["sticky_ripple"]
    trace = program.trace(batch.inputs, n_loops=6)
    state = {name: values[loop, :1].clone() for name, values in trace.variables.items()}
    for name, values in state.items():
        values[0, pos] = trace.variables[name][loop, 2, pos]
    after = program.run(batch.inputs[:1], n_loops=6, start_at_loop=loop, variables=state)
    answers = found.data["answer"].isel(example=0, rank=0).values
    np.testing.assert_array_equal(answers[:loop], trace.outputs[:loop, 0])
    np.testing.assert_array_equal(answers[loop:], after.outputs[:, 0])
    for name, values in after.variables.items():
        shown = found.data["variable"].sel(name=f"sticky_ripple.{name}").isel(example=0)
        np.testing.assert_array_equal(shown[loop:], values[:, 0])
    assert found.tokens == [words_at(batch.inputs[0], token_words(batch.task))]


def test_a_claim_is_what_the_verdict_counts(model: LoopedTransformer, batches: list[Batch]) -> None:
    batch, loop = batches[1][:2], 2
    programs = [get_program("ripple"), get_program("lookahead")]
    run, predicted = explore_change(model, batch, loop=loop, pos=3, programs=programs)
    answers = run.data["answer"].isel(example=0, rank=0)
    natural = answers_by_loop(model, batch.inputs, 6)[:, 0].numpy()
    for program in programs:
        data = predicted[program.name].data.isel(example=0)
        said = data.sel(name=f"{program.name}'s claim")
        base = program.trace(batch.inputs, n_loops=6).outputs[:, 0].numpy()
        own = data["answer"].isel(rank=0).values
        asked = data["target"].values >= 0
        expected = np.where(own == base, natural, np.where(own < 0, NOT_SAID, own))
        expected[:loop], expected[:, ~asked] = NOT_SAID, NOT_SAID
        np.testing.assert_array_equal(said["variable"], expected)
        np.testing.assert_array_equal(
            said["implied"], np.where(expected == NOT_SAID, NOT_SAID, answers)
        )


def test_without_an_interchange_programs_say_nothing(model: LoopedTransformer) -> None:
    batch = Addition().encode([(1, 2)], n=3)
    found, predicted = explore_change(
        model, batch, loop=1, pos=1, put_in="zero", programs=[get_program("ripple")]
    )
    assert predicted == {} and found.missing == {Missing.CHANGED_RUN.name: {}}


def test_places_that_there_are_not_are_refused(model: LoopedTransformer) -> None:
    batch = Addition().encode([(1, 2), (2, 2)], n=3)
    for loop, pos, source, name in [(5, 1, 1, "loop"), (1, 4, 1, "pos"), (1, 1, 2, "source")]:
        with pytest.raises(InputError, match=f"^{name}: expected"):
            explore_change(model, batch, loop=loop, pos=pos, source=source)
