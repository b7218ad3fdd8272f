from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.stats import norm

from loopinterp.core.errors import InputError
from loopinterp.lenses import AttentionResult, attention_study
from loopinterp.lenses.figures import place
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig


def model(**changes: object) -> LoopedTransformer:
    settings: dict[str, object] = {"d_model": 16, "n_heads": 2, "d_vocab": 5, "d_vocab_out": 2}
    return LoopedTransformer(LoopedTransformerConfig(**(settings | changes)), seed=0)  # pyright: ignore


def tokens(n_examples: int = 3, n_pos: int = 6) -> torch.Tensor:
    return torch.randint(0, 5, (n_examples, n_pos), generator=torch.Generator().manual_seed(0))


def test_patterns_are_those_of_the_cache() -> None:
    looped = model(n_layers=2)
    result = attention_study(looped, tokens(), n_loops=3, example=1)
    _, cache = looped.run_with_cache(tokens(), n_loops=3)
    for loop in range(3):
        for layer in range(2):
            pattern = cache[f"loops.{loop}.blocks.{layer}.attn.hook_pattern"][1]
            np.testing.assert_allclose(
                result.data["patterns"].sel(loop=loop, layer=layer), pattern.detach(), atol=1e-7
            )


def test_mass_by_distance_is_the_mean_along_diagonals() -> None:
    looped = model()
    result = attention_study(looped, tokens(), n_loops=2, max_distance=2)
    _, cache = looped.run_with_cache(tokens(), n_loops=2)
    pattern = cache.stack("attn.hook_pattern").detach()[1, :, 0]
    assert result.data["distance"].values.tolist() == [0, 1, 2]
    for distance in range(3):
        cells = [float(p[q, q - distance]) for p in pattern for q in range(distance, 6)]
        mass = result.data["mass"].sel(loop=1, layer=0, head=0, distance=distance)
        assert float(mass.sel(estimate="value")) == pytest.approx(np.mean(cells))


def test_a_model_that_attends_evenly_equals_its_control() -> None:
    looped = model(causal=False)
    for parameter in looped.parameters():
        torch.nn.init.zeros_(parameter)
    result = attention_study(looped, tokens(), n_loops=2, max_distance=5)
    assert result.data["distance"].values.tolist() == list(range(-5, 6))
    np.testing.assert_allclose(result.data["mass"] - result.data["mass_even"], 0, atol=1e-7)
    np.testing.assert_allclose(result.data["mass"], 1 / 6, rtol=1e-6)
    np.testing.assert_allclose(result.data["entropy"], math.log2(6))
    assert result.findings()[0].value == "no preference"
    np.testing.assert_allclose(result.data["entropy_even"], math.log2(6))


def test_distances_outside_the_window_are_left_out() -> None:
    looped = model(attention_window=1, positions="relative", relative_window=1)
    result = attention_study(looped, tokens(), n_loops=2)
    assert result.data["distance"].values.tolist() == [0, 1]
    # The first of six positions sees itself alone, the others see two.
    np.testing.assert_allclose(result.data["mass_even"], [[(1 + 5 / 2) / 6, 1 / 2]] * 2)


def test_each_head_has_the_even_control_of_what_it_may_see() -> None:
    looped = model(attention_window=1, windowed_heads=1)
    for parameter in looped.parameters():
        torch.nn.init.zeros_(parameter)
    result = attention_study(looped, tokens(3, 12), n_loops=2)
    data = result.data
    assert data["distance"].values.tolist() == list(range(9))
    near, far = data.sel(head=0), data.sel(head=1)
    assert near["mass"].sel(distance=slice(2, None)).isnull().all()
    assert near["received_even"].isnull().all()  # it sees no place from afar
    np.testing.assert_allclose(near["mass_even"][:2], [(1 + 11 / 2) / 12, 1 / 2])
    cells = [1 / (query + 1) for query in range(5, 12)]
    assert float(far["mass_even"].sel(distance=5)) == pytest.approx(np.mean(cells))
    for name in ("mass", "received"):
        share, even = data[name].sel(estimate="value"), data[f"{name}_even"]
        np.testing.assert_allclose((share - even).fillna(0), 0, atol=1e-7)
        assert (share.isnull() == even.isnull()).all()
    np.testing.assert_allclose(data["entropy"] - data["entropy_even"], 0, atol=1e-6)
    assert result.strongest_sink() is not None
    names = [trace.name for trace in cast("Any", result.figures()[1].plot).data]
    assert {f"even attention, head {head}" for head in (0, 1)} <= set(names)
    table = result.figures()[1].data
    assert table is not None and table["entropy_even"].nunique() == 2


def test_one_example_has_no_interval_but_its_mean() -> None:
    result = attention_study(model(), tokens(1), n_loops=2)
    mass = result.data["mass"]
    np.testing.assert_allclose(mass.sel(estimate="low"), mass.sel(estimate="value"))


@pytest.mark.parametrize("n_examples", [2, 5])
def test_intervals_are_those_of_a_mean_over_examples(n_examples: int) -> None:
    inputs = tokens(n_examples)
    result = attention_study(model(n_layers=2), inputs, n_loops=3, max_distance=9)
    assert result.data["distance"].values.tolist() == list(range(6))  # five places away at most
    each = [attention_study(model(n_layers=2), x[None], n_loops=3).data for x in inputs]
    for name in ("mass", "received"):
        values = np.stack([data[name].sel(estimate="value") for data in each])
        half = norm.ppf(0.975) * values.std(0, ddof=1) / math.sqrt(n_examples)
        ends = [values.mean(0), values.mean(0) - half, values.mean(0) + half]
        expected = np.stack(ends, -1).clip(0, 1)
        np.testing.assert_allclose(result.data[name], expected, atol=1e-5)


def test_the_strongest_preference_is_found() -> None:
    result = attention_study(model(n_layers=2), tokens(), n_loops=2)
    data = result.data.copy(deep=True)
    data["mass"].loc[{"layer": 1, "head": 0, "distance": 2}] = 0.99
    changed = dataclasses.replace(result, data=data)
    assert changed.strongest() == {"layer": 1, "head": 0, "distance": 2}
    finding = changed.findings()[0]
    assert finding.text.startswith("Head 1.0")
    assert finding.value.split(" on ") == ["99%", place(2)]


def test_what_a_key_receives_is_the_mean_over_all_others_that_see_it() -> None:
    looped = model()
    result = attention_study(looped, tokens(), n_loops=2)
    _, cache = looped.run_with_cache(tokens(), n_loops=2)
    pattern = cache.stack("attn.hook_pattern").detach()[1, :, 0]
    cells = [float(p[q, 2]) for p in pattern for q in range(3, 6)]
    received = result.data["received"].sel(loop=1, layer=0, head=0, key=2, estimate="value")
    assert float(received) == pytest.approx(np.mean(cells))
    assert float(result.data["received_even"][0, 2]) == pytest.approx(
        np.mean([1 / 4, 1 / 5, 1 / 6])
    )
    assert result.data["received"].sel(key=3).isnull().all()  # two positions are no crowd


def test_a_sink_is_told_from_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    to_bos = torch.eye(12) * 0.52
    to_bos[:, 0] += 0.48
    to_left = torch.eye(12).roll(-1, 1).tril()
    to_left[0, 0] = 1
    patterns = torch.stack([to_bos, to_left]).expand(3, 4, 1, 2, 12, 12).double()
    monkeypatch.setattr("loopinterp.lenses.attention_by_loop._patterns", lambda *_: patterns)
    inputs = tokens(4, 12)
    inputs[:, 0] = 4
    labels = ["BOS", *map(str, range(1, 12))]
    result = attention_study(model(), inputs, n_loops=3, labels=labels)
    assert result.strongest_sink() == {"layer": 0, "head": 0, "key": 0}
    distance, sink = result.findings()
    assert distance.value.split(" on ") == ["100%", place(1)]
    assert sink.value == "48% on BOS" and sink.text.startswith("Head 0")
    titles = [note.text for note in cast("Any", result.figures()[1].plot.layout).annotations]
    assert any("BOS" in title for title in titles)


def test_under_a_window_no_place_is_seen_from_afar() -> None:
    looped = model(attention_window=1, positions="relative", relative_window=1)
    result = attention_study(looped, tokens(3, 12), n_loops=2)
    assert result.strongest_sink() is None
    (figure,) = result.figures()  # shares by offset, a panel for each head
    lines = [t for t in cast("Any", figure.plot).data if t.line.width]
    assert {t.name for t in lines} == {place(0), place(1), "even attention"}
    shares = result.data["mass"].sel(layer=0, head=1, distance=1, estimate="value")
    (left,) = [t.y for t in lines if t.name == place(1) and t.xaxis == "x2"]
    np.testing.assert_allclose(left, shares)
    sharp = attention_study(model(), tokens(3, 12), n_loops=2)
    sharp.data["patterns"][:] = np.eye(12)  # without a window, whatever a head prefers
    assert len(sharp.figures()) == 2


def test_the_result_comes_back_from_disk_and_draws_itself(tmp_path: Path) -> None:
    result = attention_study(model(), tokens(), n_loops=3, labels=list("abcdef"))
    back = AttentionResult.load(result.save(tmp_path))
    assert back.data.identical(result.data)
    figures = back.figures()
    assert [f.section for f in figures] == ["attention", "attention"]
    assert all(f.caption and f.control and f.data is not None for f in figures)
    assert "Even attention would give" in back.findings()[0].text
    assert [frame.name for frame in figures[0].plot.frames] == ["0", "1", "2"]


def test_places_that_hold_the_same_word_stay_apart() -> None:
    for labels, shown in (
        (None, ["0", "1", "2", "3", "4", "5"]),
        (list("aabbcc"), ["0 · a", "1 · a", "2 · b", "3 · b", "4 · c", "5 · c"]),
    ):
        result = attention_study(model(), tokens(), n_loops=2, labels=labels)
        for trace in cast("Any", result.figures()[0].plot).data:
            assert list(trace.x) == list(trace.y) == shown


def test_each_panel_has_its_even_control_as_a_dashed_line() -> None:
    result = attention_study(model(), tokens(), n_loops=3)
    distance, sink = result.strongest()["distance"], result.strongest_sink()
    assert sink is not None
    expected = [
        result.data["mass_even"].sel(head=0, distance=distance),
        result.data["received_even"].sel(head=0, key=sink["key"]),
        result.data["entropy_even"].sel(head=0),
    ]
    lines = [t for t in cast("Any", result.figures()[1].plot).data if t.line.width]
    controls = [t for t in lines if t.line.dash != "solid"]
    assert [t.name for t in controls] == ["even attention"] * 3
    np.testing.assert_allclose([t.y for t in controls], np.repeat(expected, 3).reshape(3, 3))
    assert {t.name for t in lines if t.line.dash == "solid"} == {"head 0", "head 1"}


def test_bad_arguments_are_explained() -> None:
    with pytest.raises(InputError) as caught:
        attention_study(model(), tokens(), n_loops=2, example=3)
    assert caught.value.what == "example"
    with pytest.raises(InputError) as caught:
        attention_study(model(), tokens(), n_loops=2, labels=["a"])
    assert caught.value.what == "labels"
    broken: Any = model()
    with torch.no_grad():
        broken.block[0].attn.W_Q.mul_(1e30)  # scores beyond the finite numbers
        broken.block[0].attn.W_K.mul_(1e30)
    with pytest.raises(InputError) as caught:
        attention_study(broken, tokens(), n_loops=2)
    assert caught.value.what == "patterns"
