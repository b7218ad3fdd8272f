"""Evaluation against models whose answers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer
from loopinterp.results import load_result
from loopinterp.tasks import IGNORE, Addition, Parity
from loopinterp.training import EvaluationResult, TrainingConfig, evaluate
from loopinterp.training.evaluation import judged_distributions, shares_right


class Ripple:
    """Adds by carrying one position per loop: exactly right from T(n) - 1 loops on.

    The state is (carry out of each position); the readout needs the input and finds it there.
    """

    def embed(self, inputs: Tensor) -> Tensor:
        a, b = Addition().operands(inputs)
        return torch.stack([a, b], -1).float()

    def initial_state(self, e: Tensor) -> Tensor:
        a, b = e.unbind(-1)
        return torch.stack([a, b, torch.zeros_like(a)], -1)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        a, b, carry = h.unbind(-1)
        before = F.pad(carry, (1, -1))
        return torch.stack([a, b, ((a + b + before) >= 2).float()], -1)

    def readout(self, h: Tensor) -> Tensor:
        a, b, carry = h.unbind(-1)
        bit = (a + b + F.pad(carry, (1, -1))) % 2
        return torch.stack([1 - bit, bit], -1)


class Constant(Ripple):
    """Answers 0 everywhere."""

    def readout(self, h: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0]).expand(*h.shape[:2], 2)


def test_a_right_program_is_right_everywhere() -> None:
    result = evaluate(Ripple(), Addition(), [3, 9, 17], n_samples=40, trained_up_to=3)
    assert result.distributions == ["uniform", "chain"]
    assert (result.exact_match == 1).all()
    assert (result.bit_accuracy == 1).all()
    assert (result.exact_match_high == 1).all()
    assert (result.exact_match_low < 1).all()


def test_too_few_loops_leave_chains_unfinished() -> None:
    result = evaluate(Ripple(), Addition(), [8], n_samples=20, extra_loops=[-9, -4, 0, 6])
    chain = result.distributions.index("chain")
    assert result.extra_loops == [-9, -4, 0, 6]
    # n - 1 loops carry through the chain; T(n) = n + 1, so 4 fewer leave bits 6 and 7 open.
    assert result.exact_match[:, chain, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert result.bit_accuracy[:, chain, 0].tolist() == [1 / 8, 6 / 8, 1.0, 1.0]


def test_the_constant_answer_is_the_control() -> None:
    result = evaluate(Constant(), Addition(), [6], n_samples=300)
    # All sum bits of a full chain are 0: a constant is right there, and nowhere else.
    chain = result.cell(6, "chain")
    assert chain["exact_match"] == chain["constant_exact_match"] == 1.0
    uniform = result.cell(6, "uniform")
    assert uniform["constant_exact_match"] < 0.1
    assert uniform["exact_match"] <= uniform["constant_exact_match"]
    assert 0.4 < uniform["bit_accuracy"] <= uniform["constant_bit_accuracy"] < 0.6


def test_scores_are_those_of_the_plain_model(tiny: TrainingConfig) -> None:
    model, task = LoopedTransformer(tiny.model), Addition()
    result = evaluate(model, task, [4], n_samples=50, distributions=["uniform"], seed=3)
    again = evaluate(model, task, [4], n_samples=50, distributions=["uniform"], seed=3)
    assert np.array_equal(result.bit_accuracy, again.bit_accuracy)
    from loopinterp.training.seeding import stream

    batch = task.sample(
        4, batch_size=50, generator=stream(3, "evaluation uniform 4"), distribution="uniform"
    )
    answer = model(batch.inputs, n_loops=5).argmax(-1)[:, 1:]
    right = answer == batch.targets[:, 1:]
    assert result.exact_match[0, 0, 0] == pytest.approx(right.all(1).double().mean().item())
    assert result.bit_accuracy[0, 0, 0] == pytest.approx(right.double().mean().item())


def test_ignored_positions_are_not_scored() -> None:
    targets = torch.tensor([[IGNORE, 1, 0], [IGNORE, 1, IGNORE]])
    answer = torch.tensor([[0, 1, 1], [0, 1, 1]])
    assert shares_right(answer, targets) == (0.5, 0.75)


def test_judged_distributions_leave_out_the_one_made_for_training() -> None:
    assert judged_distributions(Addition()) == ("uniform", "chain")
    assert judged_distributions(Parity()) == ("uniform",)


def test_a_result_goes_to_disk_and_back(tmp_path: Path) -> None:
    result = evaluate(Ripple(), Addition(), [2, 5], n_samples=10, extra_loops=[0, 1])
    loaded = load_result(result.save(tmp_path))
    assert isinstance(loaded, EvaluationResult)
    for name in EvaluationResult.AXES:
        assert np.array_equal(getattr(loaded, name), getattr(result, name))
    assert loaded.lengths == [2, 5]
    frame = result.to_frame()
    assert len(frame) == 2 * 2 * 2
    assert {"extra_loop", "distribution", "length", "exact_match"} <= set(frame.columns)


def test_provenance_names_model_and_task(tiny: TrainingConfig) -> None:
    result = evaluate(LoopedTransformer(tiny.model), Addition(), [2], n_samples=2)
    assert result.provenance.config["task"] == {"name": "addition", "format": "pairs"}
    assert result.provenance.config["model"]["d_model"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "lengths: expected at least one value"),
        ({"distributions": []}, "distributions: expected at least one value"),
        ({"extra_loops": []}, "extra_loops: expected at least one value"),
        ({"n_samples": 0}, "n_samples"),
        ({"distributions": ["uniforms"]}, "Did you mean 'uniform'"),
        ({"extra_loops": [-5]}, "at least -4, as length 3"),
        ({"lengths": [0]}, "n: expected an integer >= 1"),
    ],
)
def test_wrong_arguments_are_explained(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"lengths": [3], "n_samples": 4, **changes}
    with pytest.raises(InputError, match=message):
        evaluate(Ripple(), Addition(), **arguments)  # type: ignore[arg-type]


def test_cells_that_were_not_evaluated_are_named() -> None:
    result = evaluate(Ripple(), Addition(), [3], n_samples=4)
    with pytest.raises(InputError, match="length: expected one of 3, got 4"):
        result.cell(4, "uniform")
    with pytest.raises(InputError, match="extra_loop: expected one of 0"):
        result.cell(3, "uniform", extra_loop=2)
