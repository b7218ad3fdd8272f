from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import (
    InputDependenceResult,
    dense_jacobian,
    find_fixed_point,
    input_dependence_study,
    limit_sensitivity,
)
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.tasks import Batch
from tests.dynamics.toys import LinearModel, MapModel, batch_of_ones, rotation


def batch(n_examples: int = 6) -> Batch:
    ones = batch_of_ones(n_examples)
    ones.inputs.copy_(torch.arange(n_examples)[:, None] + torch.arange(3))
    return ones


class Shifting(MapModel):
    """Each position's limit is its own token plus half of the limit to its left."""

    def __init__(self) -> None:
        super().__init__(lambda h, e: e + 0.5 * torch.nn.functional.pad(h, (0, 0, 1, 0))[:, :-1])


def value(result: InputDependenceResult) -> float:
    return float(result.share_of_input().sel(estimate="value"))


def test_all_the_spread_of_a_contraction_is_the_inputs() -> None:
    result = input_dependence_study(LinearModel(0.5 * torch.eye(2)), batch())
    assert value(result) == pytest.approx(1, abs=1e-6)
    assert result.findings()[0].good is True
    limits = LinearModel(0.5 * torch.eye(2)).limit(batch().inputs)[:, 1:].flatten(1)
    squared = ((limits - limits.mean(0)) ** 2).sum(1) / (limits**2).sum(1).mean()
    np.testing.assert_allclose(result.data["over_inputs"], squared, rtol=1e-3)


def test_tokens_are_changed_for_so_many_examples() -> None:
    every, two, none = (
        input_dependence_study(LinearModel(0.5 * torch.eye(2)), batch(), n_substituted=number)
        for number in (None, 2, 0)
    )
    assert every.data["effect"].notnull().any(["source", "pos"]).all()
    assert two.data["effect"][:2].equals(every.data["effect"][:2])
    assert two.data["effect"][2:].isnull().all() and (two.data["answer_changes"][2:] == -1).all()
    assert none.share_of_input().equals(every.share_of_input())
    assert len(every.figures()) == 2 and none.figures() == [] and len(none.findings()) == 1


def test_none_is_where_the_start_alone_decides() -> None:
    class FromHalf(MapModel):
        def initial_state(self, e: Tensor) -> Tensor:
            return 0.5 * torch.ones_like(e)

    result = input_dependence_study(FromHalf(lambda h, e: h - 0.3 * (h**3 - h)), batch())
    assert value(result) < 1e-3
    assert result.findings()[0].good is False
    assert (result.data["sensitivity"][:4] == 0).all()
    assert result.data["sensitivity"][4:].isnull().all()


def test_a_limit_that_all_share_has_no_spread_to_divide() -> None:
    result = input_dependence_study(MapModel(lambda h, e: h / 2 + 1), batch())
    (finding,) = result.findings()
    assert finding.good is False and finding.value.startswith("one limit")
    assert result.spread() < 1e-4


def test_a_token_is_felt_where_the_loop_carries_it() -> None:
    model = Shifting()
    result = input_dependence_study(model, batch(), positions="all", n_probes=8)
    inputs = batch().inputs
    effect = result.data["effect"].values
    for example, other in ((0, 1), (5, 0)):  # the next example gives the new token
        for source in range(3):
            changed = inputs[example].clone()
            changed[source] = inputs[other, source]
            old, new = (_shifted_limit(x) for x in (inputs[example], changed))
            expected = (new - old).norm(dim=-1) / old.norm(dim=-1)
            np.testing.assert_allclose(effect[example, source], expected, atol=1e-4)
    by_distance = result.by_distance("effect")
    assert (by_distance.sel(distance=[-1, -2]) == 0).all()
    assert by_distance.sel(distance=0) > by_distance.sel(distance=1) > 0
    # The readout asks whether the first feature is above 0: token 0 at the left end alone.
    changes = result.data["answer_changes"].values
    assert changes[0, 0].tolist() == [1, 0, 0] and (changes[1:-1] == 0).all()
    assert "2 positions" in result.findings()[1].value


def _shifted_limit(tokens: Tensor) -> Tensor:
    e = torch.stack([tokens.float(), torch.ones(3)], dim=-1)
    rows = [e[0]]
    for own in e[1:]:
        rows.append(own + 0.5 * rows[-1])
    return torch.stack(rows)


def test_sensitivity_is_that_of_the_dense_implicit_function_theorem() -> None:
    torch.manual_seed(0)
    config = LoopedTransformerConfig(
        d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2, injection="input", initial_state="zeros",
        loop_norm=True,
    )  # fmt: skip
    model = LoopedTransformer(config).double().eval()
    inputs = torch.randint(0, 6, (2, 3))
    with torch.no_grad():
        iteration = bind(model, inputs)
        limit = find_fixed_point(iteration.step, iteration.h0, tol=1e-12)
        assert limit.converged.all()
        h, e = limit.state, iteration.e
        jacobian = dense_jacobian(iteration.step, h)
        into = dense_jacobian(lambda x: iteration.advance(h, x, iteration.context), e)
        full = torch.linalg.solve(torch.eye(24).to(jacobian) - jacobian, into)
        # Blocks [pos, feature, source, feature].
        blocks = full.unflatten(1, (3, 8)).unflatten(3, (3, 8)).pow(2).sum(dim=(2, 4)).sqrt()
        scale = e.norm(dim=-1)[:, None, :] / 8**0.5 / h.norm(dim=-1)[:, :, None]
        expected = (blocks * scale).mT
        sensitivity = limit_sensitivity(iteration, h, n_probes=100, tol=1e-6)
    torch.testing.assert_close(sensitivity, expected, rtol=0.2, atol=1e-6)
    assert (sensitivity[:, 1, 0] == 0).all() and (
        sensitivity[:, 2, :2] == 0
    ).all()  # a causal model


def test_without_a_limit_nothing_is_claimed() -> None:
    result = input_dependence_study(LinearModel(rotation(1.0)), batch(), n_loops=40)
    (finding,) = result.findings()
    assert finding.good is False and finding.value == "not known"
    assert result.data["effect"].isnull().all() and result.figures() == []


def test_the_figures_are_of_saved_numbers(tmp_path: Path) -> None:
    result = input_dependence_study(Shifting(), batch(), positions="all")
    distance, tokens = load_result(result.save(tmp_path)).figures()
    assert distance.data is not None and set(distance.data["distance"]) == {-2, -1, 0, 1, 2}
    assert tokens.data is not None and {"token changed", "derivative"} <= {*tokens.data}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"n_probes": 0}, "n_probes"),
        ({"n_sensitivity": -1}, "n_sensitivity"),
        ({"n_others": 6}, "n_others"),
        ({"n_loops": 0}, "n_loops"),
        ({"tol": 0.0}, "tol"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        input_dependence_study(Shifting(), batch(), **options)


def test_two_examples_are_too_few() -> None:
    with pytest.raises(InputError) as caught:
        input_dependence_study(Shifting(), batch(2))
    assert caught.value.what == "len(data)"
