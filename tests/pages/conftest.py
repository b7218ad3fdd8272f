from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.pages import Exploration, explore
from loopinterp.tasks import Addition, Batch
from tests.pages import synthetic


@pytest.fixture(scope="session")
def synthetic_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with results of every section; not to be changed."""
    return synthetic.write_run(tmp_path_factory.mktemp("runs") / "demo")


LENGTHS = (3, 5)


@pytest.fixture(scope="session")
def model() -> LoopedTransformer:
    """An untrained model of two layers, which is wrong here and there."""
    config = LoopedTransformerConfig(
        d_model=16, n_heads=2, n_layers=2, d_vocab=6, d_vocab_out=2, loop_norm=True
    )
    torch.manual_seed(1)
    return LoopedTransformer(config).eval()


@pytest.fixture(scope="session")
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [Addition().sample(n, batch_size=16, generator=generator) for n in LENGTHS]


@pytest.fixture(scope="session")
def exploration(model: LoopedTransformer, batches: list[Batch]) -> Exploration:
    return explore(model, batches, programs=["ripple", "lookahead"], examples=5)
