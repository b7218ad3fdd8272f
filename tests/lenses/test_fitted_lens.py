from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.errors import CheckpointError, InputError
from loopinterp.lenses import FittedLens, fit_jacobian_lens
from loopinterp.lenses.fitted_lens import EVERYWHERE
from tests.lenses.lens_toys import tokens, transformer


def lens(**changes: Any) -> FittedLens:
    g = torch.Generator().manual_seed(0)
    settings: dict[str, Any] = {
        "kind": "tuned",
        "matrix": torch.randn(2, 3, 3, generator=g),
        "offset": torch.randn(2, 3, generator=g),
        "places": [(0, None), (1, None)],
        "n_loops": 2,
        "n_examples": 7,
        "made": {"seed": 3, "model": {"weights_sha256": "cafe"}},
    }
    return FittedLens(**(settings | changes))


def test_a_place_has_its_own_map_and_the_end_none() -> None:
    made, h = lens(), torch.randn(4, 5, 3)
    for loop in (0, 1):
        expected = torch.einsum("oi,bpi->bpo", made.matrix[loop], h) + made.offset[loop]
        torch.testing.assert_close(made.transport(h, loop), expected)
    assert made.transport(h, 2) is h


def test_one_map_may_serve_all_places() -> None:
    shared = lens(matrix=2 * torch.eye(3)[None], offset=torch.ones(1, 3), places=[EVERYWHERE])
    h = torch.randn(2, 3)
    assert shared.shared and not lens().shared
    for place in ((0, None), (1, 0), (1, None)):
        torch.testing.assert_close(shared.transport(h, *place), 2 * h + 1)


@pytest.mark.parametrize(("loop", "layer", "width"), [(3, None, 3), (1, 0, 3), (1, None, 4)])
def test_a_place_or_width_that_was_not_fitted_is_refused(
    loop: int, layer: int | None, width: int
) -> None:
    with pytest.raises(InputError, match="place: expected one of the 2 places"):
        lens().transport(torch.zeros(width), loop, layer)


def test_a_layer_may_be_narrower_than_the_state() -> None:
    made, x = lens(kind="jacobian", places=[(1, 0), (1, None)], n_layers=1), torch.randn(4, 2)
    expected = x @ made.matrix[0, :, :2].T + made.offset[0]
    torch.testing.assert_close(made.transport(x, 1, 0), expected)
    with pytest.raises(InputError, match="width 2"):
        made.transport(x, 1)


def test_states_keep_their_type() -> None:
    assert lens().transport(torch.zeros(3, dtype=torch.bfloat16), 0).dtype == torch.bfloat16


def test_maps_and_places_fit_each_other() -> None:
    with pytest.raises(InputError, match="a place for each map"):
        lens(places=[(0, None)])


@pytest.mark.parametrize("places", [[(0, None), (1, 1)], [(1, 0), (1, None)]])
def test_a_file_gives_back_the_lens(places: list[Any], tmp_path: Path) -> None:
    made = lens(places=places, n_layers=2)
    again = FittedLens.load(made.save(tmp_path / "lens.safetensors"))
    assert torch.equal(again.matrix, made.matrix) and torch.equal(again.offset, made.offset)
    for name in ("kind", "places", "n_loops", "n_layers", "n_examples", "made"):
        assert getattr(again, name) == getattr(made, name)


def test_another_file_is_no_lens(tmp_path: Path) -> None:
    path = lens().save(tmp_path / "lens.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError):
        FittedLens.load(path)
    transformer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"a lens that FittedLens.save wrote"):
        FittedLens.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("kind", ["plain", "prelude and coda"])
def test_layers_have_the_numbers_of_transformer_lens(kind: str, tmp_path: Path) -> None:
    from transformer_lens.tools.analysis import JacobianLens

    model = transformer(kind, n_layers=2)
    made = fit_jacobian_lens(model, tokens(), n_loops=3, inside=True)
    theirs = made.to_transformer_lens()
    theirs.save(str(tmp_path / "lens.pt"), dtype=torch.float32)
    read = JacobianLens.load(str(tmp_path / "lens.pt"))
    before = model.config.n_prelude
    assert read.source_layers == list(range(before, before + 5))
    assert read.metadata["target_layer"] == before + 5
    assert read.n_prompts == 6
    for flat in read.source_layers:
        (loop, layer), *_ = [
            (t, k) for t in range(3) for k in range(2)
            if model.site("resid_post", loop=t, layer=k, n_loops=3)
            == f"blocks.{flat}.hook_resid_post"
        ]  # fmt: skip
        own = made.matrix[made.places.index((loop + 1, layer))]
        assert torch.equal(read.jacobians[flat], own)
    h = torch.randn(2, 8)
    again = FittedLens.from_transformer_lens(read, n_loops=3, n_layers=2, n_before=before)
    for loop, layer in again.places:
        torch.testing.assert_close(
            again.transport(h, loop, layer), made.transport(h, loop, layer), atol=1e-6, rtol=0
        )


def test_states_of_loops_may_stand_for_layers() -> None:
    made = fit_jacobian_lens(transformer(), tokens(), n_loops=3)
    theirs = made.to_transformer_lens()
    assert theirs.source_layers == [0, 1] and theirs.metadata["source"] == "states of loops"
    again = FittedLens.from_transformer_lens(theirs, n_loops=3)
    assert again.places == [(1, None), (2, None)]
    assert torch.equal(again.matrix, made.matrix[1:])


def test_what_its_format_does_not_have_is_refused() -> None:
    shared = lens(matrix=torch.eye(3)[None], offset=torch.zeros(1, 3), places=[EVERYWHERE])
    for made in (lens(), shared):
        with pytest.raises(InputError, match="no offset"):
            made.to_transformer_lens()
    with pytest.raises(InputError, match="after the first loop"):
        fit_jacobian_lens(transformer(), tokens(), n_loops=1).to_transformer_lens()
    theirs = fit_jacobian_lens(transformer(), tokens(), n_loops=3).to_transformer_lens()
    with pytest.raises(InputError, match=r"layers 0 to 0, .*got layer 1"):
        FittedLens.from_transformer_lens(theirs, n_loops=1)
