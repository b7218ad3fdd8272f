from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.dynamics import attention_change, attention_stabilisation_study
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.saved_results import load_result
from loopinterp.tasks import Addition, Batch

CONFIG = LoopedTransformerConfig(
    d_model=8,
    n_heads=2,
    n_layers=2,
    d_vocab=6,
    d_vocab_out=2,
    injection="input",
    initial_state="zeros",
    loop_norm=True,
)


@pytest.fixture
def batch(generator: torch.Generator) -> Batch:
    return Addition().sample(3, batch_size=5, generator=generator)


def test_change_is_the_frobenius_norm_per_head() -> None:
    patterns = torch.rand(4, 2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    change = attention_change(patterns)
    assert change.shape == (3, 2, 3)
    expected = math.sqrt(((patterns[2, 1, 2] - patterns[1, 1, 2]) ** 2).sum().item())
    assert change[1, 1, 2].item() == pytest.approx(expected, rel=1e-5)


def test_bad_patterns_are_refused() -> None:
    with pytest.raises(InputError, match="two loops"):
        attention_change(torch.zeros(1, 2, 3, 3))
    with pytest.raises(InputError, match="index 1"):
        attention_change(torch.stack([torch.zeros(2, 2), torch.full((2, 2), float("nan"))]))


def test_a_pattern_that_is_not_finite_is_named_by_its_loop(batch: Batch) -> None:
    class Spoiled(LoopedTransformer):
        """Its state is lost after the third of its loops."""

        def _loop(self, h: Any, *rest: Any) -> Any:
            return super()._loop(h, *rest) * (float("nan") if rest[-1] == 2 else 1.0)

    with pytest.raises(InputError, match="first at index 3 of the loop axis"):
        attention_stabilisation_study(Spoiled(CONFIG, seed=0), batch, n_loops=6)


def test_the_study_against_patterns_and_logits_of_the_model(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    model = LoopedTransformer(CONFIG, seed=0)
    result = attention_stabilisation_study(model, batch, n_loops=6)
    change, exact = result.data["change"], result.data["exact"]
    assert dict(change.sizes) == {"loop": 6, "layer": 2, "batch": 5, "head": 2}
    _, cache = model.run_with_cache(batch.inputs, n_loops=6)
    for layer in range(2):
        patterns = cache.stack("attn.hook_pattern", layer=layer)
        expected = (patterns[3] - patterns[2]).square().sum((-1, -2)).sqrt()
        found = change.sel(loop=3, layer=layer).values
        torch.testing.assert_close(torch.from_numpy(found), expected.detach())
    assert change.sel(loop=0).isnull().all()
    right = model(batch.inputs, n_loops=4).argmax(-1) == batch.targets
    expected = (right | (batch.targets < 0)).all(dim=1)
    assert exact.sel(loop=3).values.tolist() == expected.tolist()

    monkeypatch.setattr("loopinterp.dynamics.state_trajectories.CHUNK_BYTES", 1)
    parts = attention_stabilisation_study(model, batch, n_loops=6)
    np.testing.assert_allclose(parts.data["change"], change, atol=1e-6)
    loaded = load_result(result.save(tmp_path))
    assert isinstance(loaded, type(result)) and loaded.data.identical(result.data)


def test_heads_freeze_when_their_change_stays_small(batch: Batch) -> None:
    result = attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=5)
    change = np.zeros((5, 2, 5, 2))
    change[:, 0, :, 0] = np.array([np.nan, 1, 0.5, 0.01, 0.01])[:, None]
    change[:, 0, :, 1] = np.array([np.nan, 1, 0.01, 0.01, 0.5])[:, None]
    change[:, 1, :, 0] = np.array([np.nan, 1, 0.01, 0.01, 0.01])[:, None]
    change[:, 1, :, 1] = 1.0
    made = dataclasses.replace(
        result, data=result.data.assign(change=result.data["change"].copy(data=change))
    )
    assert made.frozen_at().values.tolist() == [[3, -1], [2, -1]]
    (finding,) = made.findings()
    assert "2 of 4 heads freeze by loops 2 to 3" in finding.text and "; 2 do not" in finding.text
    assert finding.value == "2 of 4 heads freeze"
    (figure,) = made.figures()
    traces: list[Any] = list(figure.plot.select_traces())
    line = next(t for t in traces if t.name == "head 1.0")
    assert list(line.y) == [1, 0.01, 0.01, 0.01]


def test_heads_that_move_to_the_end_are_not_said_to_freeze(batch: Batch) -> None:
    result = attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=2)
    (finding,) = result.findings()
    assert finding.value == "no head freezes" and "None of the 4 heads" in finding.text


def test_a_head_that_never_changes_is_frozen_from_the_first_change_on(batch: Batch) -> None:
    result = attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=4)
    change = result.data["change"].copy(deep=True)
    change[1:, 0, :, 0] = 0.0
    made = dataclasses.replace(result, data=result.data.assign(change=change))
    assert made.frozen_at().sel(layer=0, head=0) == 1


def test_a_single_loop_is_refused(batch: Batch) -> None:
    with pytest.raises(InputError, match="n_loops"):
        attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=1)
