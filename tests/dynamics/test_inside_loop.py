"""Layers' limits against a block that adds known vectors, and against the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import attention_stabilisation_study, layer_limits
from loopinterp.dynamics.inside_loop import NoLayers, no_layers
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition, Batch
from tests.dynamics.toys import LinearModel

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


def test_a_pattern_that_is_not_finite_is_named_by_its_loop(batch: Batch) -> None:
    class Spoiled(LoopedTransformer):
        """Its state is lost after the third of its loops."""

        def run_loop(self, h: Any, *rest: Any) -> Any:
            return super().run_loop(h, *rest) * (float("nan") if rest[-1] == 2 else 1.0)

    with pytest.raises(InputError, match="index 3") as caught:
        attention_stabilisation_study(Spoiled(CONFIG, seed=0), batch, n_loops=6)
    assert caught.value.what == "patterns"


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

    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 1)
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
    changed = dataclasses.replace(
        result, data=result.data.assign(change=result.data["change"].copy(data=change))
    )
    assert changed.frozen_at().values.tolist() == [[3, -1], [2, -1]]
    (finding,) = changed.findings()
    assert "2 to 3" in finding.text and finding.value.startswith("2 of 4")
    (figure,) = changed.figures()
    traces: list[Any] = list(figure.plot.select_traces())
    line = next(t for t in traces if t.name == "head 1.0")
    assert list(line.y) == [1, 0.01, 0.01, 0.01]


def test_heads_that_move_to_the_end_are_not_said_to_freeze(batch: Batch) -> None:
    result = attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=2)
    (finding,) = result.findings()
    assert finding.value == "no head freezes"


def test_a_head_that_never_changes_is_frozen_from_the_first_change_on(batch: Batch) -> None:
    result = attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=4)
    change = result.data["change"].copy(deep=True)
    change[1:, 0, :, 0] = 0.0
    changed = dataclasses.replace(result, data=result.data.assign(change=change))
    assert changed.frozen_at().sel(layer=0, head=0) == 1
    assert len(changed.figures()) == 1
    change[1:] = 0.0  # of all heads: nothing to draw on a logarithmic axis
    assert not dataclasses.replace(changed, data=changed.data.assign(change=change)).figures()


def test_a_single_loop_is_refused(batch: Batch) -> None:
    with pytest.raises(InputError, match="n_loops"):
        attention_stabilisation_study(LoopedTransformer(CONFIG), batch, n_loops=1)


TOKENS = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])


def block(n_layers: int = 2, **options: object) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        n_layers=n_layers,
        d_vocab=5,
        d_vocab_out=2,
        loop_norm=True,
        **options,  # pyright: ignore[reportArgumentType]
    )
    return LoopedTransformer(config, seed=1)


def adding(*vectors: torch.Tensor) -> LoopedTransformer:
    """A block whose layers add one vector each, whatever the state."""
    model = block(len(vectors))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.startswith("block."):
                weight.zero_()
        for k, vector in enumerate(vectors):
            weights[f"block.{k}.mlp.fc_out.bias"].copy_(vector)
    return model


def centred(vector: torch.Tensor) -> torch.Tensor:
    return vector - vector.mean()


def test_layers_that_add_known_vectors_have_known_limits() -> None:
    first, second = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    limits = layer_limits(adding(first, second), TOKENS, n_loops=60)
    # The loop norm leaves the direction of what is added, at a norm of the root of the width.
    entering = centred(first + second)
    entering = entering / entering.norm() * 8**0.5
    after = torch.stack([entering + first, entering + first + second])
    cosine = torch.cosine_similarity(*after, dim=0)
    torch.testing.assert_close(
        limits.cosine[0, 1], cosine.expand_as(limits.cosine[0, 1]), atol=1e-4, rtol=0
    )
    distance = second.norm() / (after.norm(dim=1).sum() / 2)
    torch.testing.assert_close(
        limits.distance[1, 0], distance.expand_as(limits.distance[1, 0]), atol=1e-4, rtol=0
    )
    assert (limits.residual[-1] < 1e-5).all() and (limits.residual[1] > 1e-3).any()


def test_a_layer_that_does_nothing_has_the_limit_of_the_one_before() -> None:
    vector = torch.randn(8, generator=torch.Generator().manual_seed(0))
    limits = layer_limits(adding(vector, torch.zeros(8)), TOKENS, n_loops=20)
    assert (limits.distance == 0).all() and (limits.cosine > 1 - 1e-6).all()


def test_against_the_cache() -> None:
    model, n_loops = block(3, injection="input"), 5
    _, cache = model.run_with_cache(TOKENS, n_loops=n_loops)
    states = torch.stack([cache.stack("resid_post", layer=k) for k in range(3)], dim=1).detach()
    counted = torch.tensor([[False, True, True, True], [True, True, False, True]])
    limits = layer_limits(model, TOKENS, n_loops=n_loops, counted=counted)
    assert limits.residual.shape == (5, 3, 2) and limits.residual[0].isnan().all()
    kept = states * counted[..., None]
    moved = (kept[1:] - kept[:-1]).flatten(3).norm(dim=3) / kept[1:].flatten(3).norm(dim=3)
    torch.testing.assert_close(limits.residual[1:], moved)
    a, b = states[-1, 0], states[-1, 2]
    torch.testing.assert_close(limits.cosine[0, 2], torch.cosine_similarity(a, b, dim=-1))
    apart = 2 * (a - b).norm(dim=-1) / (a.norm(dim=-1) + b.norm(dim=-1))
    torch.testing.assert_close(limits.distance[2, 0], apart)


def test_what_has_no_layers_to_compare_is_refused() -> None:
    assert no_layers(block(1)) == NoLayers.ONE_LAYER and not no_layers(block(2))
    assert no_layers(LinearModel(torch.eye(2))) == NoLayers.NO_HOOKS
    with pytest.raises(InputError, match="model"):
        layer_limits(block(1), TOKENS, n_loops=4)
    with pytest.raises(InputError, match="n_loops"):
        layer_limits(block(2), TOKENS, n_loops=1)


@pytest.mark.usefixtures("no_type_checks")
def test_a_model_without_hooks_is_refused() -> None:
    with pytest.raises(InputError, match="model"):
        layer_limits(LinearModel(torch.eye(2)), TOKENS, n_loops=4)  # type: ignore[arg-type]
