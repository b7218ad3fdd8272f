"""We read the autoencoders and transcoders that SAELens saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.features.make_sae_lens_files import CASES, write
from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def answer(folder: Path) -> list[str]:
    for case in CASES:
        write(case, folder)
    return list(CASES)


@torch.no_grad()
def test_features_and_reconstructions_are_its_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from loopinterp.features import load_autoencoder

    for case in ask("older", __name__, tmp_path):
        recorded = load_file(tmp_path / case / "recorded.safetensors")
        loaded = load_autoencoder(tmp_path / case)
        features, written = loaded.encode(recorded["x"]), loaded(recorded["x"])
        assert 0 < (features > 0).double().mean() < 1
        torch.testing.assert_close(features, recorded["features"], atol=1e-5, rtol=0)
        torch.testing.assert_close(written, recorded["reconstruction"], atol=1e-5, rtol=0)
