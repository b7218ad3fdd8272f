"""What needs gradients has them, whatever a notebook switched off; or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp import circuits, dynamics, lenses, rasp, training
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition, as_batch
from loopinterp.training import RECIPES, CurriculumConfig, Trainer, train, train_seeds

TINY = RECIPES["addition"].replace(
    steps=2, log_every=1, device="cpu", curriculum=CurriculumConfig(max_n=3)
)
BATCH = as_batch(Addition(), n=3, batch_size=16)
OTHER = as_batch(Addition(), n=3, batch_size=16, seed=1)


def _model() -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config, seed=0).eval()


def _ripple() -> LoopedTransformer:
    return rasp.compile_program("ripple", max_length=4).model


CALLS: dict[str, Callable[[Path], Any]] = {
    "train": lambda out: train(TINY, out / "run", progress=False),
    "train_seeds": lambda out: train_seeds(TINY, [0, 1], out / "seeds", progress=False),
    "trainer": lambda out: Trainer(TINY).step(),
    "tuned lens": lambda out: lenses.fit_tuned_lens(_model(), BATCH, n_loops=3),
    "jacobian lens": lambda out: lenses.fit_jacobian_lens(_model(), BATCH, n_loops=2),
    "subspaces": lambda out: circuits.search_subspaces(_ripple(), BATCH, "ripple", steps=1),
    "edges": lambda out: circuits.edge_study(_ripple(), BATCH, OTHER),
    "vjp": lambda out: dynamics.vjp(lambda h: h * h, torch.ones(1, 2, 3), torch.ones(1, 2, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_recorded_where_they_were_switched_off(name: str, tmp_path: Path) -> None:
    with torch.no_grad():
        assert CALLS[name](tmp_path) is not None
        assert not torch.is_grad_enabled()


def test_a_training_without_gradients_around_it_has_the_same_numbers(tmp_path: Path) -> None:
    train(TINY, tmp_path / "plain", progress=False)
    torch.set_grad_enabled(False)
    try:
        train(TINY, tmp_path / "off", progress=False)
    finally:
        torch.set_grad_enabled(True)
    plain, off = (training.Run.load(tmp_path / name) for name in ("plain", "off"))
    assert off.metrics()["loss"].tolist() == plain.metrics()["loss"].tolist()
    for a, b in zip(off.model().parameters(), plain.model().parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_is_what_is_refused(name: str, tmp_path: Path) -> None:
    with torch.inference_mode(), pytest.raises(InputError) as refused:
        CALLS[name](tmp_path)
    assert refused.value.what == "gradients"
    assert not list(tmp_path.iterdir())
