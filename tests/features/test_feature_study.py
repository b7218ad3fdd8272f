"""The study of features by loop against counts and runs made by hand, and planted features."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.features import (
    AutoencoderConfig,
    FeatureStudy,
    SparseAutoencoder,
    feature_study,
    read_features,
)
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

N_LOOPS, WIDTH = 3, 16


@cache
def transformer() -> LoopedTransformer:
    sizes: dict[str, Any] = {"d_model": WIDTH, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 3}
    config = LoopedTransformerConfig(**sizes, injection="input", init_std=0.5)
    return LoopedTransformer(config, seed=0).eval()


def tokens() -> Tensor:
    return torch.randint(6, (24, 5), generator=torch.Generator().manual_seed(1))


def drawn(seed: int = 3) -> SparseAutoencoder:
    config = AutoencoderConfig(d_in=WIDTH, n_features=24, activation="topk", k=4)
    return SparseAutoencoder(config, seed=seed)


@cache
def result() -> FeatureStudy:
    by_loop = {t: drawn(seed=10 + t) for t in range(N_LOOPS)}
    return feature_study(
        transformer(), tokens(), drawn(), by_loop=by_loop, n_loops=N_LOOPS, n_top=4
    )


def held_out() -> Tensor:
    """The examples that a result measured, as it stores them."""
    return torch.from_numpy(result().data["tokens"].values)


@torch.no_grad()
def states() -> Tensor:
    return transformer()(held_out(), n_loops=N_LOOPS, return_type="states")


def test_activity_and_effective_loops_are_counts() -> None:
    data = result().data
    features = read_features(transformer(), held_out(), drawn(), n_loops=N_LOOPS)
    active = (features > 0).sum(["batch", "pos"]).values  # [loop, feature]
    n_places = held_out().numel()
    np.testing.assert_allclose(data["activity"], active / n_places)
    for feature, effective in enumerate(data["effective_loops"].values):
        counts = active[:, feature].astype(float)
        if counts.sum() < 20:
            assert np.isnan(effective)
            continue
        p = counts[counts > 0] / counts.sum()
        assert effective == pytest.approx(np.prod(p**-p))
    assert result().n_dead == int((active.sum(0) == 0).sum())
    assert result().n_active == pytest.approx(active.sum() / n_places / N_LOOPS)
    # Permuting loops keeps the total, so features known there are known here.
    known = data["effective_loops"].notnull().values
    assert (data["effective_loops_shuffled"].notnull().values == known).all()


def counting() -> LoopedTransformer:
    """A model whose state counts the loops: all it writes is 1 in the first direction."""
    config = LoopedTransformerConfig(d_model=WIDTH, n_heads=2, d_vocab=6, d_vocab_out=3)
    model = LoopedTransformer(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("block") or name == "embedding.weight":
                weight.zero_()
        model.block[0].mlp.fc_out.bias[0] = 1.0  # type: ignore[union-attr]
    return model.eval()


@torch.no_grad()
def test_planted_features_of_one_loop_of_two_and_of_all_are_told_apart() -> None:
    planted = SparseAutoencoder(AutoencoderConfig(d_in=WIDTH, n_features=5))
    planted.W_enc.zero_()
    # Features of a state c after c loops: 1.5 - c, c - 2.5, 2.5 - c, 1, and one that is never on.
    planted.W_enc[0, :3] = torch.tensor([-1.0, 1.0, -1.0])
    planted.b_enc.copy_(torch.tensor([1.5, -2.5, 2.5, 1.0, -1.0]))
    found = feature_study(counting(), tokens(), planted, n_loops=N_LOOPS)
    on = found.data["activity"].values.T.tolist()  # [feature, loop]
    assert on == [[1, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]
    effective = found.data["effective_loops"].values
    np.testing.assert_allclose(effective, [1, 1, 2, 3, np.nan])
    assert found.n_dead == 1
    # With loops permuted no feature knows its loop: none but the rare one is near 1.
    assert (found.data["effective_loops_shuffled"].values[:4] > 1.9).all()


@torch.no_grad()
def test_variance_explained_is_that_by_hand() -> None:
    data, held = result().data, states()[1:].double().numpy()
    shared = drawn()
    for loop in range(N_LOOPS):
        x = held[loop]
        made = shared(torch.from_numpy(x).float()).double().numpy()
        expected = 1 - ((x - made) ** 2).sum() / ((x - x.mean((0, 1))) ** 2).sum()
        estimate = data["fve"].sel(dictionary="shared", loop=loop)
        assert float(estimate.sel(estimate="value")) == pytest.approx(expected, abs=1e-5)
        assert (np.diff(estimate.sel(estimate=["low", "value", "high"])) >= 0).all()
        for trained in range(N_LOOPS):
            made = drawn(10 + trained)(torch.from_numpy(x).float()).double().numpy()
            expected = 1 - ((x - made) ** 2).sum() / ((x - x.mean((0, 1))) ** 2).sum()
            cell = data["fve_across"].sel(trained_loop=trained, loop=loop)
            assert float(cell) == pytest.approx(expected, abs=1e-5)
            moved = x - x.mean((0, 1)) + held[trained].mean((0, 1))
            made = drawn(10 + trained)(torch.from_numpy(moved).float()).double().numpy()
            expected = 1 - ((moved - made) ** 2).sum() / ((x - x.mean((0, 1))) ** 2).sum()
            cell = data["fve_recentred"].sel(trained_loop=trained, loop=loop)
            assert float(cell) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_answers_kept_and_loss_are_those_of_a_forward_by_hand() -> None:
    model, data, shared = transformer(), result().data, drawn()
    bound = model.bind(held_out())
    clean = model.readout(states()[-1])
    answers = clean.argmax(-1)

    def scores(replaced: set[int]) -> tuple[float, float]:
        h = bound.h0
        for loop in range(N_LOOPS):
            h = bound.step(h)
            h = shared(h) if loop in replaced else h
        logits = model.readout(h)
        log_p = logits.log_softmax(-1).gather(-1, answers[..., None])
        return float((logits.argmax(-1) == answers).float().mean()), -float(log_p.mean())

    for loop in range(N_LOOPS):
        cell = {"dictionary": "shared", "loop": loop, "estimate": "value"}
        got = float(data["kept"].sel(cell)), float(data["loss"].sel(cell))
        assert got == pytest.approx(scores({loop}), abs=1e-5)
    cell = {"dictionary": "shared", "estimate": "value"}
    got = float(data["kept_all"].sel(cell)), float(data["loss_all"].sel(cell))
    assert got == pytest.approx(scores({*range(N_LOOPS)}), abs=1e-5)
    assert result().loss_clean == pytest.approx(scores(set())[1], abs=1e-5)
    recovered = result().recovered
    assert (recovered.sel(dictionary="mean") == 0).all()


@torch.no_grad()
def test_directions_are_compared_with_the_closest_of_the_other_loop() -> None:
    data, held = result().data, states()[1:]
    live = []
    for loop in range(N_LOOPS):
        own = drawn(10 + loop)
        live.append(own.W_dec[(own.encode(held[loop]) > 0).any(0).any(0)].double().numpy())
    assert data["live"].values.tolist() == [len(x) for x in live]
    for i, j in np.ndindex(N_LOOPS, N_LOOPS):
        cell = float(data["cosine_across"].sel(trained_loop=i, loop=j))
        if i == j:  # no second seed was given
            assert np.isnan(cell)
        else:
            expected = np.mean([max(float(a @ b) for b in live[j]) for a in live[i]])
            assert cell == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_repeats_are_the_ceiling_of_similarity() -> None:
    by_loop = {t: drawn(seed=10 + t) for t in range(N_LOOPS)}
    found = feature_study(
        transformer(), tokens(), drawn(), by_loop=by_loop, repeats=by_loop, n_loops=N_LOOPS
    )
    diagonal = np.diagonal(found.data["cosine_across"])
    np.testing.assert_allclose(diagonal, 1, atol=1e-5)


def test_top_examples_are_the_strongest_of_each_example() -> None:
    features = read_features(transformer(), held_out(), drawn(), n_loops=N_LOOPS)
    inputs = held_out().tolist()
    for feature in (0, 5, 11):
        values = features.isel(feature=feature).values  # [loop, batch, pos]
        best = sorted(((values[:, b].max(), b) for b in range(values.shape[1])), reverse=True)
        expected = [(v, b) for v, b in best[:4] if v > 0]
        table = result().top_examples(feature, 4, window=1)
        assert len(table) == len(expected)
        for row, (value, _) in zip(table.to_dict("records"), expected, strict=True):
            assert row["activation"] == pytest.approx(value, abs=1e-5)
            place = row["loop"], row["example"], row["pos"]
            assert values[place] == pytest.approx(value, abs=1e-5)
            sequence, pos = inputs[row["example"]], row["pos"]
            assert row["token"] == sequence[pos]
            shown = [str(x) for x in sequence[max(0, pos - 1) : pos]]
            shown += [f"[{sequence[pos]}]", *(str(x) for x in sequence[pos + 1 : pos + 2])]
            assert row["context"] == " ".join(shown)


def test_a_feature_that_never_fires_has_no_examples() -> None:
    silent = SparseAutoencoder(AutoencoderConfig(d_in=WIDTH, n_features=2))
    with torch.no_grad():
        silent.b_enc.fill_(-1e6)
    found = feature_study(transformer(), tokens(), silent, n_loops=2)
    assert len(found.top_examples(1)) == 0
    assert found.n_dead == 2 and found.figures() and found.findings()


def test_a_result_is_saved_shown_and_read_back(tmp_path: Path) -> None:
    saved = load_result(result().save(tmp_path))
    assert isinstance(saved, FeatureStudy) and saved.data.equals(result().data)
    figures = saved.figures()
    assert len(figures) == 5 and all(figure.caption for figure in figures)
    assert len(saved.findings()) == 3
    activity = figures[0].plot.data[0].z
    np.testing.assert_allclose(np.asarray(activity).sum(1), 1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"by_loop": {0: drawn()}}, "by_loop"),
        ({"repeats": {t: drawn() for t in range(2)}}, "repeats"),
        ({"loops": [5]}, "loop"),
    ],
)
def test_autoencoders_of_other_loops_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as caught:
        feature_study(transformer(), tokens(), drawn(), n_loops=2, **options)
    assert caught.value.what == name


def test_transcoders_and_single_examples_are_refused() -> None:
    transcoder = SparseAutoencoder(AutoencoderConfig(d_in=WIDTH, n_features=4, d_out=WIDTH))
    with pytest.raises(InputError) as caught:
        feature_study(transformer(), tokens(), transcoder, n_loops=2)
    assert caught.value.what == "shared"
    with pytest.raises(InputError) as caught:
        feature_study(transformer(), tokens()[:1], drawn(), n_loops=2)
    assert caught.value.what == "data"
