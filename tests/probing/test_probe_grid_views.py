"""Figures of a grid of probes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.probing import probe_study
from loopinterp.tasks.addition import Addition


def test_a_grid_of_probes_is_drawn_by_loop_and_by_group() -> None:
    model = LoopedTransformer(
        LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    )
    batch = Addition().sample(5, batch_size=40, generator=torch.Generator().manual_seed(0))
    position = torch.arange(6).expand(40, 6)
    groups = {"all": position > 0, "late": position > 3}
    targets = {"digit": batch.inputs, "carry": Addition().carry_in(batch)}
    result = probe_study(model, batch.inputs, targets, n_loops=2, groups=groups)
    lines, by_group = result.figures()
    for figure in (lines, by_group):
        assert figure.control and figure.data is not None and len(figure.data) == 8
        json.loads(str(figure.plot.to_json()))
    plot: Any = by_group.plot
    maps = [t for t in plot.data if t.type == "heatmap"]
    gain = result.data["accuracy"] - result.chance
    assert len(maps) == 2
    np.testing.assert_allclose(maps[1].z, gain.sel(target="carry").isel(site=0).T)
    # No gain has the colour in the middle of the scale, and no gain is greater than 1.
    assert (plot.layout.coloraxis.cmin, plot.layout.coloraxis.cmax) == (-1, 1)
