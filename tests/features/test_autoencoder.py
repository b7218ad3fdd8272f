"""Autoencoders against encoders and decoders written in NumPy, and their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from loopinterp.core.errors import CheckpointError, ConfigError, InputError
from loopinterp.features import AutoencoderConfig, SparseAutoencoder, load_autoencoder
from tests.features.make_sae_lens_files import CASES, FOLDER

KINDS: dict[str, dict[str, Any]] = {
    "relu": {},
    "topk": {"activation": "topk", "k": 3},
    "topk by norm": {"activation": "topk", "k": 3, "scale_by_norm": True},
    "jumprelu": {"activation": "jumprelu", "subtract_bias": False},
    "gated": {"activation": "gated"},
    "layer norm": {"normalise": "layer_norm"},
    "constant norm": {"normalise": "constant_norm_rescale"},
    "transcoder": {"d_out": 3},
    "skip": {"d_out": 3, "skip": True, "activation": "jumprelu"},
}


def drawn(kind: str, seed: int = 0, d_in: int = 5, n_features: int = 7) -> SparseAutoencoder:
    """An autoencoder with random weights in double precision."""
    config = AutoencoderConfig(d_in=d_in, n_features=n_features, **KINDS[kind])
    autoencoder = SparseAutoencoder(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in autoencoder.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return autoencoder


def by_hand(autoencoder: SparseAutoencoder, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features and reconstruction of one activation [d_in]."""
    config = autoencoder.config
    w = {name: value.detach().numpy() for name, value in autoencoder.named_parameters()}
    z, shift, scale = x, 0.0, 1.0
    if config.normalise == "layer_norm":
        shift, scale = x.mean(), x.std(ddof=1)
        z = (x - shift) / (scale + 1e-5)
    elif config.normalise == "constant_norm_rescale":
        scale = np.sqrt((x**2).sum() / len(x))
        z = x / scale
    if config.d_out is None and config.subtract_bias:
        z = z - w["b_dec"]
    features, norms = np.zeros(config.n_features), np.sqrt((w["W_dec"] ** 2).sum(1))
    if config.activation == "gated":
        for f in range(config.n_features):
            gate = z @ w["W_enc"][:, f] + w["b_gate"][f]
            size = z @ w["W_enc"][:, f] * np.exp(w["r_mag"][f]) + w["b_mag"][f]
            features[f] = max(size, 0) if gate > 0 else 0
    else:
        pre = z @ w["W_enc"] + w["b_enc"]
        pre = pre * norms if config.scale_by_norm else pre
        chosen = range(config.n_features)
        if config.activation == "topk":
            chosen = np.argsort(-pre)[: config.k]
        for f in chosen:
            least = w["threshold"][f] if config.activation == "jumprelu" else 0
            features[f] = max(pre[f], 0) if pre[f] > least else 0
    of_decoder = features / norms if config.scale_by_norm else features
    made = of_decoder @ w["W_dec"] + w["b_dec"]
    if config.skip:
        return features, made + w["W_skip"] @ x
    return features, made * scale + shift


@torch.no_grad()
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**20))
def test_features_and_reconstruction_are_those_by_hand(kind: str, seed: int) -> None:
    autoencoder = drawn(kind, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = 1 + 2 * torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    features, made = autoencoder.encode(x), autoencoder(x)
    for place in np.ndindex(2, 3):
        expected = by_hand(autoencoder, x[place].numpy())
        np.testing.assert_allclose(features[place], expected[0], atol=1e-10)
        np.testing.assert_allclose(made[place], expected[1], atol=1e-10)
    if autoencoder.config.activation == "topk":
        assert int((features > 0).sum(-1).max()) <= 3


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_saved_autoencoder_is_read_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    saved = drawn(kind)
    saved.about = {"site": "state_post", "loops": [0, 1]}
    again = load_autoencoder(saved.save(tmp_path / "a.safetensors"))
    assert (again.config, again.about) == (saved.config, saved.about)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(again.encode(x), saved.encode(x)) and torch.equal(again(x), saved(x))


@torch.no_grad()
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_sae_lens_saved_gives_its_recorded_activations(case: str) -> None:
    recorded = load_file(FOLDER / case / "recorded.safetensors")
    loaded = load_autoencoder(FOLDER / case)
    assert loaded.about["hook_name"] == "loops.1.hook_state_post"
    assert 0 < (recorded["features"] > 0).double().mean() < 1
    torch.testing.assert_close(
        loaded.encode(recorded["x"]), recorded["features"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(loaded(recorded["x"]), recorded["reconstruction"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "temporal"},
        {"normalize_activations": "expected_average_only_in"},
        {"d_sae": 9},
        {"activation_fn_str": "relu"},
        {"d_in": "four"},
    ],
)
def test_a_folder_that_is_not_understood_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(FOLDER / "standard", tmp_path / "a"))
    settings = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(settings | changes))
    with pytest.raises(CheckpointError):
        load_autoencoder(folder)


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"W_enc": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    for path in (tmp_path / "other.safetensors", tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError):
            load_autoencoder(path)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"activation": "topk"}, "k"),
        ({"activation": "topk", "k": 9}, "k"),
        ({"k": 2}, "k"),
        ({"skip": True}, "skip"),
        ({"d_out": 3, "normalise": "layer_norm"}, "normalise"),
        ({"d_out": 3, "subtract_bias": False}, "subtract_bias"),
        ({"scale_by_norm": True}, "scale_by_norm"),
    ],
)
def test_settings_without_effect_or_meaning_are_refused(
    settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoencoderConfig(d_in=4, n_features=8, **settings)
    assert caught.value.what == name


def test_an_activation_of_another_width_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        drawn("relu").encode(torch.zeros(2, 4, dtype=torch.float64))
    assert caught.value.what == "activation"
