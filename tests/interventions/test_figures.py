"""Every kind of sweep can be drawn from a saved result, with its control beside it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.interventions.patching import PatchingSweep, patching_sweep
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

LOOPS, POS = 3, 4
LAYERS = [(1, 1), (2, 0), (2, 1)]
"""Of the loop and of the prelude: one or several, with and without."""
CASES = [
    (n_layers, n_prelude, component, positions)
    for n_layers, n_prelude in LAYERS
    for component in ("resid_pre", "z", "state")
    for positions in (None, "each")
    if n_layers != 2 or n_prelude == (positions is None)
]


@cache
def drawn(
    n_layers: int,
    n_prelude: int,
    component: str,
    positions: str | None,
    metric: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PatchingSweep:
    """A sweep, read back from the disk."""
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=5,
        d_vocab_out=5,
        init_std=1.5,
        n_layers=n_layers,
        n_prelude=n_prelude,
    )
    generator = torch.Generator().manual_seed(0)
    base, source = torch.randint(5, (2, 12, POS), generator=generator)
    result = patching_sweep(
        LoopedTransformer(config, seed=0),
        base,
        source,
        n_loops=LOOPS,
        component=component,
        positions=positions,
        metric=metric,
    )
    with tempfile.TemporaryDirectory() as folder:
        return PatchingSweep.load(result.save(folder))


@pytest.mark.parametrize(("n_layers", "n_prelude", "component", "positions"), CASES)
def test_all_kinds_are_drawn_and_explained(n_layers, n_prelude, component, positions):
    result = drawn(n_layers, n_prelude, component, positions)
    figures = result.figures()
    assert len(figures) == (2 if n_prelude and component != "state" else 1)
    assert len({figure.title for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.section == "program"
        assert figure.plot.data and figure.plot.to_json()
        assert len(figure.caption) > 80 and "unrelated" in figure.control
        assert figure.data is not None and len(figure.data)
        plot: Any = figure.plot
        annotations = plot.layout.annotations
        traces = plot.data
        shown = [a.text for a in annotations] + [trace.name for trace in traces]
        assert any("unrelated" in str(text) for text in shown)


def first_logit(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., 0].mean(-1)


@pytest.mark.parametrize(("n_layers", "component"), [(1, "resid_pre"), (2, "z")])
@pytest.mark.parametrize("name", ["loop", "pos", "layer", "site", "recovered", "unrelated input"])
def test_a_metric_may_have_any_name(name, n_layers, component):
    result = drawn(n_layers, 1, component, None, first_logit)
    assert result.metric == "first_logit"
    result = dataclasses.replace(result, metric=name)
    for figure in result.figures():
        plot: Any = figure.plot
        assert len([x for x in plot.data if getattr(x, "fill", None) != "toself"]) == 4
        assert name in f"{plot.layout.annotations} {[x.name for x in plot.data]}"


def test_maps_show_each_measure_with_its_control_beside_it():
    result = drawn(2, 1, "z", None)
    shown = ("recovered", "control_recovered", "effect", "control_effect")
    for figure, data in zip(result.figures(), (result.data, result.around()["prelude"])):
        plot: Any = figure.plot
        for panel, title, name in zip(plot.data, plot.layout.annotations, shown):
            assert name.startswith("control") == ("unrelated input" in title.text)
            cells = data[name].sel(pos="all").transpose(..., "layer", "head").values
            np.testing.assert_array_equal(np.ravel(panel.z), cells.ravel())


def test_cells_are_those_of_the_result():
    result = drawn(2, 0, "z", None)
    panel: Any = result.figures()[0].plot.data[0]
    assert list(panel.x) == ["head 0.0", "head 0.1", "head 1.0", "head 1.1"]
    recovered = result.data["recovered"].sel(pos="all")
    assert panel.z[2][1] == recovered.sel(loop=2, layer=0, head=1)
    assert panel.z[0][2] == recovered.sel(loop=0, layer=1, head=0)


def test_positions_are_drawn_where_a_patch_does_most():
    result = drawn(2, 0, "z", "each")
    figure = result.figures()[0]
    recovered = result.data["recovered"]
    gain = (recovered - result.data["control_recovered"]).max(["loop", "pos"])
    layer, head = divmod(int(gain.values.argmax()), 2)
    plot: Any = figure.plot
    assert plot.layout.annotations[0].text == f"<b>head {layer}.{head}</b>"
    panel = plot.data[0]
    assert panel.z.tolist() == recovered.sel(layer=layer, head=head).values.tolist()


@pytest.mark.parametrize(("most", "end"), [(0.25, 0.25), (0.0, 1.0), (1.5, 1.0), (-0.5, 1.0)])
def test_maps_are_drawn_up_to_the_most_that_is_in_them(most, end):
    result = drawn(2, 0, "z", None)
    measures = ("recovered", "control_recovered", "effect", "control_effect")
    data = result.data.copy(deep=True)
    for name in measures:
        data[name][:] = min(most, 0)
    data["control_effect"][{"loop": 1, "layer": 1, "head": 0}] = most
    plot: Any = dataclasses.replace(result, data=data).figures()[0].plot
    assert (plot.layout.coloraxis.cmin, plot.layout.coloraxis.cmax) == (0, end)
