from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import extrapolation_study, relative_residual, run_loops
from loopinterp.dynamics.extrapolation import AnswerFate
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.tasks import IGNORE, Addition
from tests.dynamics.toys import LinearModel, MapModel, batch_of_ones


def test_an_answer_that_is_right_for_some_loops_only() -> None:
    # h_t = t, and the answer is 1 where 3.5 < h < 6.5: lost after loop 6.
    model = MapModel(lambda h, e: h + e)
    model.readout = lambda h: torch.stack([(h[..., 0] - 5).abs() - 1.5, 0 * h[..., 0]], dim=-1)
    result = extrapolation_study(model, batch_of_ones(), n_loops=12)
    assert result.data["exact"].isel(batch=0).values.tolist() == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    assert result.at_answer().values.tolist() == [True, True]
    assert result.fates()[AnswerFate.LOST] == 2
    (finding,) = result.findings()
    assert finding.good is False and finding.value.startswith("0%")


def test_an_answer_that_is_lost_and_comes_back_has_not_stayed() -> None:
    # h_t = t, and the answer is 1 at loops 4 and 12 (h / 4 is an odd number, or far along).
    model = MapModel(lambda h, e: h + e)
    model.readout = lambda h: torch.stack([((h[..., 0] - 4) % 8) - 0.5, 0 * h[..., 0]], dim=-1)
    result = extrapolation_study(model, batch_of_ones(), n_loops=12)
    assert result.data["exact"].isel(batch=0).values.nonzero()[0].tolist() == [4, 12]
    assert result.fates()[AnswerFate.LOST_BETWEEN] == 2
    (finding,) = result.findings()
    assert finding.good is False and finding.value.startswith("100%")


def test_each_example_is_scored_at_its_own_loop() -> None:
    # h_t = t (token 1): right from loop 3 on.
    model = MapModel(lambda h, e: h + e)
    model.threshold = 2.5
    batch = dataclasses.replace(batch_of_ones(), n_loops=torch.tensor([2, 5]))
    result = extrapolation_study(model, batch, n_loops=8)
    assert result.at_answer().values.tolist() == [False, True]
    assert result.fates() == {
        AnswerFate.STABLE: 1,
        AnswerFate.LOST_BETWEEN: 0,
        AnswerFate.LOST: 0,
        AnswerFate.GAINED: 1,
        AnswerFate.WRONG: 0,
    }


def test_fates_are_counted_each_by_itself() -> None:
    # Right or wrong after loops 4 = T(n), 5 and 6; what is before does not count.
    fates = {
        AnswerFate.STABLE: (1, 1, 1),
        AnswerFate.LOST_BETWEEN: (1, 0, 1),
        AnswerFate.LOST: (1, 1, 0),
        AnswerFate.GAINED: (0, 0, 1),
        AnswerFate.WRONG: (0, 1, 0),
    }
    counts = dict(zip(fates, (1, 2, 3, 4, 5)))
    result = extrapolation_study(LinearModel(torch.eye(2)), batch_of_ones(15), n_loops=6)
    data = result.data.copy(deep=True)
    data["exact"][4:] = np.repeat(list(fates.values()), list(counts.values()), axis=0).T
    for before in (False, True):
        data["exact"][:4] = before
        assert dataclasses.replace(result, data=data).fates() == counts


def test_against_the_models_own_run() -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config, seed=0)
    lengths = torch.tensor([1, 2, 4, 4])
    batch = Addition().sample(lengths, generator=torch.Generator().manual_seed(0))
    result = extrapolation_study(model, batch, n_loops=10, trained_loops=3)
    assert result.data["length"].values.tolist() == [1, 2, 4, 4]
    answers = model(batch.inputs, n_loops=result.n_loops, return_type="all_logits").argmax(-1)
    is_asked = batch.targets != IGNORE
    right = (answers == batch.targets) & is_asked
    np.testing.assert_array_equal(result.data["exact"], (right | ~is_asked).all(-1))
    expected = right.sum(-1) / is_asked.sum(-1)
    np.testing.assert_allclose(result.data["accuracy"], expected.numpy(), atol=1e-6)
    residual = relative_residual(run_loops(bind(model, batch.inputs), result.n_loops))
    mean = (residual * is_asked).sum(-1) / is_asked.sum(-1)
    np.testing.assert_allclose(result.data["residual"][1:], mean.numpy(), atol=1e-5)
    assert result.data["residual"][0].isnull().all()


def test_parts_of_the_batch_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = LinearModel(0.5 * torch.eye(2), threshold=1.9)
    full = extrapolation_study(model, batch_of_ones(n_examples=5))
    assert full.n_loops == 10 * 4
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 2 * 4 * 3 * 2 * 4)
    parts = extrapolation_study(model, batch_of_ones(n_examples=5))
    assert parts.data.equals(full.data)
    loaded = load_result(full.save(tmp_path))
    assert isinstance(loaded, type(full)) and loaded.fates() == full.fates()


def test_a_run_that_diverges_is_scored_all_the_same() -> None:
    result = extrapolation_study(LinearModel(4.0 * torch.eye(2)), batch_of_ones(), n_loops=100)
    assert result.data["exact"].shape == (101, 2)
    assert result.data["exact"].sel(loop=10).all()


def test_a_position_where_nothing_is_asked_does_not_spoil_the_mean_residual() -> None:
    # The first position triples until it leaves all bounds; the others halve their way.
    model = MapModel(lambda h, e: h * torch.where(e[..., :1] > 5, 3.0, 0.5) + e)
    batch = dataclasses.replace(batch_of_ones(1), inputs=torch.tensor([[9, 1, 1]]))
    residual = extrapolation_study(model, batch, n_loops=100).data["residual"][1:, 0]
    state = 2 - 2.0 ** (1 - np.arange(101))
    expected = (state[1:] - state[:-1]) / state[1:]
    np.testing.assert_allclose(residual, expected, rtol=1e-4, atol=1e-6)


def test_bad_loops_are_refused() -> None:
    model, batch = LinearModel(torch.eye(2)), batch_of_ones()
    for options, name in [
        ({"n_loops": 3}, "n_loops"),
        ({"trained_loops": 0}, "trained_loops"),
    ]:
        with pytest.raises(InputError, match=name):
            extrapolation_study(model, batch, **options)
    with pytest.raises(InputError, match="examples"):
        extrapolation_study(model, batch_of_ones(ignored=3))
