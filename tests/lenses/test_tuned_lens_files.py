"""Files of tuned-lens, read by a module list that is written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.lenses import FittedLens, fit_tuned_lens, read_tuned_lens, write_tuned_lens
from loopinterp.lenses.fitted_lens import EVERYWHERE, places
from tests.lenses.lens_toys import tokens, transformer

KEYS = {
    "base_model_name_or_path", "d_model", "num_hidden_layers", "bias", "base_model_revision",
    "unembed_hash", "lens_type",
}  # fmt: skip


def translators(folder: Path) -> nn.ModuleList:
    """What ``TunedLens`` of tuned-lens holds: layer i maps h to h + translator(h)."""
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == KEYS  # it warns of others
    width = config["d_model"]
    layers = nn.ModuleList([nn.Linear(width, width) for _ in range(config["num_hidden_layers"])])
    layers.load_state_dict(torch.load(folder / "params.pt", weights_only=True))
    return layers


def fitted(**options: Any) -> FittedLens:
    lens = fit_tuned_lens(
        transformer(n_layers=2), tokens(), n_loops=3, steps=3, learning_rate=0.1, **options
    )
    lens.offset.normal_(generator=torch.Generator().manual_seed(0))
    return lens


@pytest.mark.parametrize("options", [{}, {"shared": True}])
def test_translators_of_loops(options: Any, tmp_path: Path) -> None:
    lens = fitted(**options)
    layers = translators(write_tuned_lens(lens, tmp_path))
    again, h = read_tuned_lens(tmp_path), torch.randn(4, 8)
    assert len(layers) == lens.n_loops == again.n_loops and not again.shared
    for loop, layer in enumerate(layers):
        torch.testing.assert_close(h + layer(h), lens.transport(h, loop), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            again.transport(h, loop), lens.transport(h, loop), atol=1e-6, rtol=0
        )


def test_translators_of_layers_read_the_states_before_them(tmp_path: Path) -> None:
    """Translator i reads what has passed i layers, as hidden_states[i] of transformers."""
    lens, model = fitted(inside=True), transformer(n_layers=2)
    layers = translators(write_tuned_lens(lens, tmp_path))
    assert len(layers) == 6
    again = read_tuned_lens(tmp_path, n_layers=2)
    run = list(places(model, tokens(), 3, inside=True))
    states = [place for place in run if place.layer is None]
    flat = [place for t in range(3) for place in (states[t], run[1 + 3 * t])]
    for place, layer in zip(flat, layers, strict=True):
        torch.testing.assert_close(
            place.ended + layer(place.ended), lens.transport(place.ended, *place[:2]),
            atol=1e-6, rtol=0,
        )  # fmt: skip
    assert {place[:2] for place in run[:-2]} == set(again.places)
    for place in run:
        loop, last = place.loop, place.layer == 1
        expected = lens.transport(place.ended, loop, None if last else place.layer)
        read = again.transport(place.ended, loop, place.layer)
        torch.testing.assert_close(read, expected, atol=1e-6, rtol=0)


def test_half_precision_and_missing_biases_are_read(tmp_path: Path) -> None:
    write_tuned_lens(fitted(), tmp_path)
    state = torch.load(tmp_path / "params.pt", weights_only=True)
    halved = {k: v.half() for k, v in state.items() if "weight" in k}
    torch.save(halved, tmp_path / "params.pt")
    lens = read_tuned_lens(tmp_path)
    assert lens.matrix.dtype == torch.float32 and not lens.offset.any()
    assert torch.equal(lens.matrix[1], halved["1.weight"].float() + torch.eye(8))


def test_other_lenses_are_not_written(tmp_path: Path) -> None:
    jacobian = FittedLens(
        kind="jacobian", matrix=torch.eye(3)[None], offset=torch.zeros(1, 3),
        places=[EVERYWHERE], n_loops=2,
    )  # fmt: skip
    gap = FittedLens(
        kind="tuned", matrix=torch.eye(3)[None], offset=torch.zeros(1, 3), places=[(0, None)],
        n_loops=2,
    )  # fmt: skip
    for lens in (jacobian, gap):
        with pytest.raises(InputError) as caught:
            write_tuned_lens(lens, tmp_path)
        assert caught.value.what == "lens" and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"d_model": 8}'),
        ("config.json", b'{"d_model": 8, "num_hidden_layers": true}'),
        ("config.json", b'{"d_model": 8, "num_hidden_layers": 3, "lens_type": "other"}'),
        ("params.pt", b""),
        ("params.pt", b"PK\x03\x04 cut"),
        ("params.pt", [torch.zeros(2)]),
        ("params.pt", {}),
        ("params.pt", {f"{i}.weight": torch.zeros(8, 8) for i in range(2)}),
        ("params.pt", {f"{i}.weight": torch.zeros(8, 4) for i in range(3)}),
        ("params.pt", {f"{i}.weight": "text" for i in range(3)}),
        ("params.pt", {"0.weight": Path}),
    ],
)
def test_a_bad_file_is_named(file: str, content: Any, tmp_path: Path) -> None:
    write_tuned_lens(fitted(), tmp_path)
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        torch.save(content, tmp_path / file)
    with pytest.raises(CheckpointError) as caught:
        read_tuned_lens(tmp_path)
    assert caught.value.what == f"file {tmp_path / file}"


def test_missing_files_and_loops_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_tuned_lens(tmp_path)
    write_tuned_lens(fitted(), tmp_path)
    with pytest.raises(InputError) as caught:
        read_tuned_lens(tmp_path, n_layers=2)
    assert caught.value.what == "n_layers"
    (tmp_path / "params.pt").unlink()
    with pytest.raises(CheckpointError):
        read_tuned_lens(tmp_path)
