from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.dynamics import convergence_study
from loopinterp.models import LoopedTransformer, LoopRule, WithVocabulary
from loopinterp.models.study_examples import (
    examples_for,
    fit_to_model,
    inputs_and_loops,
    makes_one_loop,
    need_model_of,
)
from loopinterp.probing import probe_study
from loopinterp.tasks import Addition, Batch, Copy, NextToken, Parity, as_batch
from tests.models.variants import build
from tests.refusals import naming

TASK = Addition()


def adder(depth: int | None = None, **changes: Any) -> LoopedTransformer:
    model = build("plain", d_vocab=6, d_vocab_out=2, **changes)
    model.loop_rule = None if depth is None else LoopRule(depth)
    return model


class Foreign(torch.nn.Module):
    """The four methods, and no word on what they speak."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, classes)

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table(inputs)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return (h + e) / 2

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return self.out(h)


def test_a_model_is_asked_after_its_own_depth_and_others_after_t_of_n():
    batch = as_batch(TASK, n=5, batch_size=3)
    assert examples_for(adder(), batch) is batch
    drawn = examples_for(adder(4), TASK, n=5, batch_size=3)
    assert drawn.n_loops.tolist() == [4] * 3 and torch.equal(drawn.inputs, batch.inputs)
    assert fit_to_model(WithVocabulary(adder(4)), batch).n_loops.tolist() == [4] * 3
    by_length = adder()
    by_length.loop_rule = LoopRule(3, of_length=lambda n_pos: n_pos)
    assert torch.equal(examples_for(by_length, batch).n_loops, batch.n_loops)
    by_length.loop_rule = LoopRule(3, of_length=lambda n_pos: n_pos, scale=2, extra=-1)
    assert torch.equal(examples_for(by_length, batch).n_loops, 2 * batch.n_loops - 1)


def test_a_model_of_one_loop_is_not_followed_from_loop_to_loop():
    batch = as_batch(TASK, n=3, batch_size=2)
    with naming("model") as caught:
        fit_to_model(adder(1), batch, needs_loops=True)
    assert "one loop" in caught.value.given
    assert fit_to_model(adder(1), batch).n_loops.tolist() == [1, 1]
    assert fit_to_model(adder(2), batch, needs_loops=True).n_loops.tolist() == [2, 2]
    assert [makes_one_loop(adder(depth)) for depth in (None, 1, 2)] == [False, True, False]


@pytest.mark.parametrize("data", [TASK, as_batch(TASK, n=3, batch_size=2)], ids=["task", "batch"])
@pytest.mark.parametrize(
    "model",
    [
        build("plain", d_vocab=16, d_vocab_out=2),
        build("plain", d_vocab=6, d_vocab_out=16),
        build("features", d_vocab_out=2),
        WithVocabulary(build("plain", d_vocab=9, d_vocab_out=2), tokens=[1, 2, 3, 4, 5]),
        WithVocabulary(adder(), answers=[0, 1, 0]),
        Foreign(16),
    ],
    ids=["tokens", "answers", "features", "mapped tokens", "mapped answers", "readout"],
)
def test_a_model_of_other_tokens_is_refused(model: Any, data: Any):
    with naming("model") as caught:
        examples_for(model, data)
    sizes = [f"{name}={getattr(TASK, name)}" for name in ("d_vocab", "d_vocab_out")]
    assert all(size in caught.value.expected for size in (repr(TASK.name), *sizes))


def test_a_model_that_speaks_the_tokens_is_taken():
    mapped = WithVocabulary(Foreign(16), tokens=[8, 7, 6, 5, 4, 3], answers=[9, 12])
    features = build("features", d_vocab_out=2)
    for model, task in (
        (adder(), TASK),
        (Foreign(2), TASK),
        (mapped, TASK),
        (features, Addition(format="features")),
    ):
        assert examples_for(model, task, n=3, batch_size=2).task == task


def test_a_model_of_another_task_in_the_same_tokens_is_refused():
    model = compile_program("parity", max_length=6).model
    assert model.task == Parity()
    with pytest.raises(InputError, match=r"'copy', .*'parity'"):
        need_model_of(Copy(), model)
    model.task = None
    need_model_of(Copy(), model)


def test_a_task_in_another_form_is_the_one_that_it_asks():
    copy, parity = NextToken(of="copy"), NextToken(of="parity")
    model = build("plain", d_vocab=copy.d_vocab, d_vocab_out=copy.d_vocab_out)
    model.task = copy
    need_model_of(NextToken(of="copy"), model)
    with pytest.raises(InputError, match=r"'next_token of"):
        need_model_of(parity, model)


def test_a_model_of_the_task_need_not_have_what_it_never_answers():
    model = build("plain", d_vocab=6, d_vocab_out=1)
    with pytest.raises(InputError, match=r"^model: .*d_vocab_out=1"):
        need_model_of(TASK, model)
    model.task = TASK
    need_model_of(TASK, model)
    more = build("plain", d_vocab=6, d_vocab_out=3)
    more.task = TASK
    with pytest.raises(InputError, match="d_vocab_out=3"):
        need_model_of(TASK, more)


def test_a_batch_knows_its_task_wherever_it_goes():
    batch = as_batch(TASK, n=3, batch_size=4)
    assert batch.task == batch.to("cpu").task == batch[:2].task == TASK
    of_nobody = replace(batch, task=None)
    assert examples_for(build("plain", d_vocab=16), of_nobody) is of_nobody

    class Renamed(Addition):
        """A task of a user's own, whose batches do not say so."""

        def sample(self, *args: Any, **options: Any) -> Batch:
            return replace(super().sample(*args, **options), task=None)

    task = Renamed()
    assert as_batch(task, n=3, batch_size=2).task is task


def test_inputs_alone_want_loops_but_of_a_model_with_a_depth():
    inputs = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match=r"^n_loops:"):
        inputs_and_loops(adder(), inputs, None)
    assert inputs_and_loops(adder(3), inputs, None)[1] == 3
    assert inputs_and_loops(adder(3), inputs, 5)[1] == 5
    with pytest.raises(InputError, match=r"^data:"):
        inputs_and_loops(adder(), inputs[0], 3)
    with pytest.raises(InputError, match=r"^inputs:"):
        inputs_and_loops(adder(), inputs[:0], 3)
    drawn, n_loops = inputs_and_loops(adder(2), TASK, None, n=4, batch_size=2)
    assert (tuple(drawn.shape), n_loops) == ((2, 5), 2)


def test_a_configuration_that_says_nothing_of_tokens_is_no_other_vocabulary():
    model: Any = Foreign(2)
    model.config = {"hidden_size": 4}
    assert examples_for(model, TASK, n=3, batch_size=2).task == TASK


def test_a_model_without_numbers_is_refused():
    with pytest.raises(InputError, match=r"^model: .*meta"):
        convergence_study(adder().to("meta"), Addition(), n=4, batch_size=8)
    with pytest.raises(InputError, match=r"^inputs: .*meta"):  # as on any other device
        adder().to("meta")(as_batch(Addition(), n=4, batch_size=8).inputs)


def test_loops_without_end_and_seeds_that_are_none_are_refused():
    model, batch = adder(), as_batch(Addition(), n=4, batch_size=8)
    for n_loops in (10**9, 0, True):
        with pytest.raises(InputError) as error:
            probe_study(model, batch, {"carry": Addition().carries}, n_loops=n_loops)
        assert error.value.what == "n_loops"
    for seed in (True, -1):
        with pytest.raises(InputError) as error:
            convergence_study(model, Addition(), n=4, batch_size=8, seed=seed)
        assert error.value.what == "seed"
