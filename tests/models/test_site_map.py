"""Sizes of activations, heads by kind, and layers of a loop that have names of their own."""

from __future__ import annotations

import pytest

from loopinterp.errors import HookError
from loopinterp.models.site_map import SiteMap
from loopinterp.models.sites import AddressBook


def _nested() -> AddressBook:
    plain = {"hook_resid_pre": "residual", "attn.hook_k": "kv_head", "hook_resid_post": "residual"}
    last = {**plain, "hook_end": "gate"}
    names = ("inner.0.blocks.0", "inner.1.blocks.0", "inner.1.blocks.10")
    site_map = SiteMap(
        d_model=8,
        n_heads=4,
        n_kv_heads=2,
        d_head=3,
        d_mlp=5,
        d_state=16,
        opening={"hook_state_pre": "state"},
        block=(plain, plain, last),
        entry={"ln_coda.hook_scale": "scale"},
        coda=(plain,),
        layer_names=names,
        more_axes={"halt": (2,)},
        closing={"hook_halt": "halt"},
    )
    return AddressBook(site_map, 2)


def test_a_shape_is_that_of_the_kind_with_positions_kept_or_not() -> None:
    at = _nested().addresses
    assert at["loops.1.hook_state_pre"].shape(2, 7) == (2, 7, 16)
    assert at["blocks.4.attn.hook_k"].shape(2, 7, 3) == (2, 3, 2, 3)
    assert at["blocks.2.hook_end"].shape(2, 7) == (2, 7, 1)
    assert at["loops.0.hook_halt"].shape(2, 7, 3) == (2, 2)  # of no position
    assert at["loops.0.hook_halt"].pos_axis is None
    assert at["blocks.4.attn.hook_k"].pos_axis == -3


def test_heads_are_those_of_the_kind() -> None:
    sizes = _nested().site_map
    kinds = ("head", "kv_head", "pattern", "residual")
    assert [sizes.heads(kind) for kind in kinds] == [4, 2, 4, None]


@pytest.mark.parametrize(("loop", "layer"), [(0, 0), (1, 1), (1, 2)])
def test_a_layer_is_found_by_its_own_name_in_the_loop(loop: int, layer: int) -> None:
    book = _nested()
    other = book.site_map.layer_names[layer]
    plain = book.resolve(f"loops.{loop}.blocks.{layer}.hook_resid_pre")
    assert book.resolve(f"loops.{loop}.{other}.hook_resid_pre") == plain
    assert plain == f"blocks.{3 * loop + layer}.hook_resid_pre"
    assert book.resolve(f"loops.{loop - 2}.{other}.hook_resid_pre") == plain


def test_a_name_that_only_begins_like_one_is_none() -> None:
    for name in ("loops.0.inner.1.blocks.1.hook_resid_pre", "loops.0.inner.2.hook_resid_pre"):
        with pytest.raises(HookError):
            _nested().resolve(name)


def test_a_site_that_some_layers_have_is_refused_of_the_others() -> None:
    book = _nested()
    assert book.site("hook_end", loop=1, layer=2) == "blocks.5.hook_end"
    with pytest.raises(HookError, match="layer 0 of the block"):
        book.site("hook_end", loop=0, layer=slice(None))


def test_what_fires_at_a_readout_alone_is_known() -> None:
    at = _nested().addresses
    reading = [name for name, address in at.items() if address.in_readout]
    assert reading[0] == "ln_coda.hook_scale"
    assert all(name.startswith("blocks.6.") for name in reading[1:]) and len(reading) == 4
