"""The benchmark at published sizes runs what it says it runs; tried on small ones."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from analyses.benchmarks import published_scale, timing
from analyses.benchmarks.published_scale import SMALL, forwards, generations, main, random_model
from analyses.published_settings import SHAPES
from loopinterp.adapters import adapt


@pytest.mark.parametrize("kind", list(SMALL))
def test_all_ways_compute_the_same(kind: str) -> None:
    published = random_model(kind, SMALL[kind], "cpu")
    model, tokens = adapt(published), torch.arange(12)[None]
    with torch.no_grad():
        ways = {name: way() for name, way in forwards(kind, published, model, tokens).items()}
        made = {name: way() for name, way in generations(model, tokens, 3).items()}
    torch.testing.assert_close(ways["no hooks"], ways["its own forward"], atol=1e-4, rtol=1e-4)
    logits, cache = ways["residuals of all (loop, layer)"]
    assert torch.equal(logits, ways["no hooks"])
    assert len(cache) == {"ouro": 4 * 2, "huginn": 2 + 3 * 4 + 2}[kind]
    assert torch.equal(made["the whole again"], made["no hooks"])


def test_the_numbers_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = ["published_scale", "--small", "--models", "ouro-1.4B", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(path)])
    monkeypatch.setattr(published_scale, "compare", partial(timing.compare, least=0.001))
    try:
        main()
    finally:
        torch.set_default_dtype(torch.float32)
    tables = json.loads(path.read_text())["tables"]
    timed = tables["ouro-1.4B, 4 new tokens"]
    told = tables["ouro-1.4B, tokens a second"]["value"]
    assert told["no hooks"] == pytest.approx(4e3 / timed["no hooks"]["milliseconds"])
    assert tables["ouro-1.4B, GiB"]["value"]["cache"] == 3 * 4 * 2 * 16 * 64 * 2 / 2**30


def test_the_shapes_have_the_published_numbers_of_weights() -> None:
    for name, (kind, sizes) in SHAPES.items():
        with torch.device("meta"):
            weights = sum(w.numel() for w in random_model(kind, sizes, "meta").parameters())
        assert weights / 1e9 == pytest.approx(float(name.split("-")[1][:-1]), rel=0.05)
