"""Addresses: numbering, aliases, slices, filters, and errors that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.core.errors import HookError
from loopinterp.models.addresses import AddressBook, SiteMap, resolve_index
from tests.models.variants import VARIANTS, build, some_inputs
from tests.refusals import naming


def _book(name: str = "surround", n_loops: int = 3) -> AddressBook:
    return AddressBook(build(name).site_map, n_loops)


def test_prelude_comes_first_and_coda_last() -> None:
    book = _book()  # 1 prelude, 2 layers in the block, 2 coda
    assert book.site("hook_resid_post", loop=0, layer=0) == "blocks.1.hook_resid_post"
    assert book.site("hook_resid_post", loop=2, layer=1) == "blocks.6.hook_resid_post"
    last = [a for a in book.addresses.values() if a.name == "blocks.8.hook_resid_post"]
    assert last[0].loop is None and last[0].layer == 1
    assert "blocks.9.hook_resid_post" not in book.addresses


def test_slices_lists_and_negative_indices() -> None:
    book = _book()
    assert book.site("pattern", loop=-1, layer=-1) == "blocks.6.attn.hook_pattern"
    assert book.site("z", loop=slice(0, 2), layer=1) == [
        "blocks.2.attn.hook_z",
        "blocks.4.attn.hook_z",
    ]
    assert len(book.site("z")) == 6
    assert book.site("hook_state_pre", loop=[0, 2]) == [
        "loops.0.hook_state_pre",
        "loops.2.hook_state_pre",
    ]


def test_the_alias_names_the_same_place() -> None:
    book = _book()
    assert book.resolve_name("loops.2.blocks.1.attn.hook_pattern") == "blocks.6.attn.hook_pattern"
    assert book.resolve_name("loops.-1.blocks.-1.attn.hook_pattern") == "blocks.6.attn.hook_pattern"
    assert book.resolve_name("blocks.6.attn.hook_pattern") == "blocks.6.attn.hook_pattern"
    assert book.resolve_name("loops.-1.hook_state_post") == "loops.2.hook_state_post"


def test_the_surround_has_addresses_of_its_own() -> None:
    book = _book()
    assert book.site("pattern", section="prelude") == "blocks.0.attn.hook_pattern"
    assert book.site("pattern", section="coda", layer=-1) == "blocks.8.attn.hook_pattern"
    assert book.site("z", section="coda") == ["blocks.7.attn.hook_z", "blocks.8.attn.hook_z"]
    assert book.resolve_name("prelude.0.attn.hook_z") == "blocks.0.attn.hook_z"
    assert book.resolve_name("coda.-2.hook_resid_post") == "blocks.7.hook_resid_post"
    assert _book("plain").site("z", section="coda") == []


def test_the_surround_is_hooked_and_cached_by_its_alias() -> None:
    model = build("surround")
    inputs, names = some_inputs(model), ["prelude.0.hook_resid_post", "coda.1.attn.hook_pattern"]
    _, cache = model.run_with_cache(inputs, n_loops=3, names_filter=names)
    assert list(cache) == ["blocks.0.hook_resid_post", "blocks.8.attn.hook_pattern"]
    torch.testing.assert_close(cache[names[0]], model.embed(inputs))
    changed = model.run_with_hooks(
        inputs, n_loops=3, fwd_hooks=[("coda.1.hook_resid_post", lambda h, hook: h * 0)]
    )
    torch.testing.assert_close(changed[0, 0], changed[1, 1])


@pytest.mark.parametrize(
    ("address", "what", "given"),
    [
        ({"section": "coda", "loop": 0}, "site 'attn.hook_pattern'", "loop=0"),
        ({"section": "coda", "layer": 2}, "layer of the coda", "2"),
        ({"section": "middle"}, "section", "'middle'"),
        (
            {"component": "hook_state_pre", "section": "coda"},
            "site 'hook_state_pre'",
            "section='coda'",
        ),
    ],
)
def test_wrong_addresses_in_the_surround(address: dict[str, Any], what: str, given: str) -> None:
    with naming(what, HookError) as caught:
        AddressBook.site(_book(), **{"component": "pattern", **address})
    assert given in caught.value.given


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("coda.2.attn.hook_pattern", ["-2", "1"]),
        ("loops.3.blocks.0.attn.hook_pattern", ["-3", "2"]),
        ("loops.0.blocks.2.attn.hook_pattern", ["-2", "1"]),
        ("blocks.9.hook_resid_post", ["blocks.0", "blocks.8"]),
        ("loops.7.hook_state_pre", ["-3", "2"]),
        ("loops.7.nonsense", ["loops.0", "loops.2"]),
    ],
)
def test_indices_out_of_range_are_refused_with_the_range(name: str, ends: list[str]) -> None:
    with pytest.raises(HookError) as caught:
        _book().resolve_name(name)
    assert " to ".join(ends) in caught.value.expected


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with naming("component", HookError) as caught:
        _book().resolve_name("loops.0.blocks.0.attn.hook_patern")
    assert "'attn.hook_pattern'" in caught.value.fix
    with naming("hook", HookError):
        _book().resolve_name("nonsense")


def test_a_layer_makes_no_sense_once_per_loop() -> None:
    with pytest.raises(HookError, match="hook_state_pre"):
        _book().site("hook_state_pre", loop=0, layer=0)


def test_filters() -> None:
    book = _book()
    assert len(book.select("resid_post")) == 1 + 3 * 2 + 2
    assert len(book.select("resid_post", loops=[0, 2])) == 4
    assert book.select(["loops.1.blocks.0.attn.hook_z", "hook_embed"]) == [
        "hook_embed",
        "blocks.3.attn.hook_z",
    ]
    assert book.select(None) == list(book.addresses)
    assert all(book.addresses[n].loop == 1 for n in book.select(None, loops=1))
    with pytest.raises(HookError, match=r"^names_filter:"):
        book.select("hook_embed", loops=0)
    with pytest.raises(HookError, match=r"^names_filter:"):
        book.select(lambda name: False)
    with pytest.raises(HookError, match=r"^names_filter:"):
        book.select(3)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_address_fires_once_with_the_shape_it_promises(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    fired: list[str] = []

    def note(activation, hook) -> None:
        fired.append(hook.name)
        address = model.addresses(3).addresses[hook.name]
        assert activation.shape == address.shape(3, 7)

    model.run_with_hooks(x, n_loops=3, fwd_hooks=[(lambda name: True, note)])
    assert sorted(fired) == sorted(model.addresses(3).addresses)
    # Addresses are listed in the order they fire.
    assert fired == list(model.addresses(3).addresses)


def test_resolve_index_errors() -> None:
    assert resolve_index(None, 2, "loop") == ([0, 1], False)
    with pytest.raises(HookError, match=r"^loop:"):
        resolve_index([0, 5], 3, "loop")


@pytest.mark.usefixtures("no_type_checks")
def test_a_component_is_named_by_text() -> None:
    with pytest.raises(HookError, match="component"):
        build("surround").addresses(2).site(None)  # type: ignore[arg-type]


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
    plain = book.resolve_name(f"loops.{loop}.blocks.{layer}.hook_resid_pre")
    assert book.resolve_name(f"loops.{loop}.{other}.hook_resid_pre") == plain
    assert plain == f"blocks.{3 * loop + layer}.hook_resid_pre"
    assert book.resolve_name(f"loops.{loop - 2}.{other}.hook_resid_pre") == plain


def test_a_name_that_only_begins_like_one_is_none() -> None:
    for name in ("loops.0.inner.1.blocks.1.hook_resid_pre", "loops.0.inner.2.hook_resid_pre"):
        with pytest.raises(HookError):
            _nested().resolve_name(name)


def test_a_site_that_some_layers_have_is_refused_of_the_others() -> None:
    book = _nested()
    assert book.site("hook_end", loop=1, layer=2) == "blocks.5.hook_end"
    with pytest.raises(HookError, match=r"^site"):
        book.site("hook_end", loop=0, layer=slice(None))


def test_what_fires_at_a_readout_alone_is_known() -> None:
    at = _nested().addresses
    reading = [name for name, address in at.items() if address.in_readout]
    assert reading[0] == "ln_coda.hook_scale"
    assert all(name.startswith("blocks.6.") for name in reading[1:]) and len(reading) == 4
