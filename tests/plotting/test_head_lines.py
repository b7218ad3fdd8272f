from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from loopinterp.dynamics import attention_stabilisation_study
from loopinterp.lenses import attention_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.plotting import PALETTE, head_lines
from loopinterp.tasks import Addition


def test_colours_of_heads_differ_and_are_never_a_controls() -> None:
    for n_layers, n_heads in ((1, 5), (3, 4)):
        values = xr.DataArray(np.zeros((n_layers, n_heads, 7)), dims=("layer", "head", "loop"))
        lines = head_lines(values)
        colours = [line.colour for line in lines]
        assert len(set(colours)) == n_layers * n_heads and PALETTE["grey"] not in colours
    assert [line.name for line in lines[:2]] == ["head 0.0", "head 0.1"]


def test_a_head_has_one_colour_in_all_figures(generator: torch.Generator) -> None:
    config = LoopedTransformerConfig(d_model=9, n_heads=3, n_layers=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config, seed=0)
    batch = Addition().sample(5, batch_size=4, generator=generator)
    seen: dict[str, set[str]] = {}
    for result in (
        attention_study(model, batch.inputs, n_loops=4),
        attention_stabilisation_study(model, batch, n_loops=4),
    ):
        for figure in result.figures():
            for line in figure.plot.select_traces({"type": "scatter"}):
                if line.name.startswith("head ") and line.line.color:
                    seen.setdefault(line.name, set()).add(line.line.color)
    assert len(seen) == 6 and all(len(colours) == 1 for colours in seen.values())
