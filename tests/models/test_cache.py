"""The cache: loop axis, slices, size, saving, gradients, decomposition."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.core.errors import CheckpointError, HookError, InputError
from loopinterp.core.storage import write_tensors
from loopinterp.models import LoopedCache, LoopedTransformer
from loopinterp.models.cache import MissingActivationError
from tests.models.variants import VARIANTS, build, some_inputs
from tests.refusals import naming

T = 4


each_variant = pytest.mark.parametrize("name", VARIANTS)


def cached(name: str, n_loops: int = T, **options: Any) -> LoopedCache:
    """What a model did on some inputs."""
    model = build(name)
    return model.run_with_cache(some_inputs(model), n_loops=n_loops, **options)[1]


@each_variant
def test_size_is_known_before_the_run(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=T)
    assert cache.nbytes == model.cache_nbytes(3, 7, n_loops=T)
    _, some = model.run_with_cache(
        x,
        n_loops=T,
        names_filter=["attn.hook_z", "pattern"],
        loops=slice(1, 3),
        pos_slice=slice(2, 5),
        dtype=torch.bfloat16,
    )
    expected = model.cache_nbytes(
        3,
        7,
        n_loops=T,
        names_filter=["attn.hook_z", "pattern"],
        loops=slice(1, 3),
        n_kept=3,
        dtype=torch.bfloat16,
    )
    assert some.nbytes == expected
    assert some.stack("z", loops=[1, 2]).dtype == torch.bfloat16


@each_variant
def test_stack_is_what_hooks_see(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=T)
    for component in ("resid_post", "attn.hook_pattern", "z", "mlp.hook_post"):
        stacked = cache.stack(component, layer=slice(None))
        assert stacked.shape[:2] == (T, model.config.n_layers)
        seen: dict[str, torch.Tensor] = {}

        def keep(activation: torch.Tensor, hook: Any, seen=seen) -> None:
            seen[hook.name] = activation

        layers = range(model.config.n_layers)
        where = [
            [model.site(component, loop=loop, layer=layer, n_loops=T) for layer in layers]
            for loop in range(T)
        ]
        model.run_with_hooks(x, n_loops=T, fwd_hooks=[(names, keep) for names in where])
        for of_loop, names in zip(stacked, where):
            for of_layer, name in zip(of_loop, map(str, names)):
                torch.testing.assert_close(of_layer, seen[name], atol=1e-5, rtol=0)
    states = model(x, n_loops=T, return_type="states")
    torch.testing.assert_close(cache.stack("hook_state_pre"), states[:-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(cache.stack("hook_state_post"), states[1:], atol=1e-5, rtol=0)


def test_every_way_to_name_an_activation() -> None:
    cache = cached("surround")
    by_alias = cache["loops.2.blocks.1.attn.hook_pattern"]
    assert by_alias is cache["blocks.6.attn.hook_pattern"]
    assert by_alias is cache["pattern", 6]
    assert cache["resid_post", -1] is cache["blocks.10.hook_resid_post"]
    assert torch.equal(cache.stack("pattern", layer=1, loops=2)[0], by_alias)


def test_a_component_is_taken_by_its_indices() -> None:
    model = build("surround") if "surround" in VARIANTS else build("demo")
    config = model.config.replace(n_layers=2, n_prelude=1, n_coda=1)
    model = LoopedTransformer(config)
    _, cache = model.run_with_cache(some_inputs(model), n_loops=T)
    for loop, layer in ((0, 0), (2, 1), (-1, -1)):
        whole = cache[f"loops.{loop % T}.blocks.{layer % 2}.attn.hook_z"]
        for name in ("z", "hook_z", "attn.hook_z"):
            assert cache[name, loop, layer] is whole
            assert cache[name, 1 + 2 * (loop % T) + layer % 2] is whole  # after the prelude
    assert cache["hook_resid_post", -1] is cache["coda.0.hook_resid_post"]
    for loop in (1, -1):
        whole = cache[f"loops.{loop % T}.hook_state_post"]
        assert cache["state_post", loop] is cache["hook_state_post", loop] is whole


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("resid_pst", "resid_post"),
        (("resid_pst", 3), "resid_post"),
        (("patern", 1, 0), "pattern"),
        ("blocks.2.hook_resid_pst", "blocks.2.hook_resid_post"),
        (("state_pots", 1), "state_post"),
    ],
)
def test_a_mistyped_activation_gets_the_nearest_name(key: Any, near: str) -> None:
    with naming("activation", MissingActivationError) as caught:
        _ = cached("plain")[key]
    assert isinstance(caught.value, KeyError) and repr(near) in caught.value.fix


def test_positions_are_sliced_on_the_right_axis() -> None:
    model = build("demo")
    x = some_inputs(model)
    _, full = model.run_with_cache(x, n_loops=T)
    _, part = model.run_with_cache(x, n_loops=T, pos_slice=slice(1, 3))
    for name, activation in part.items():
        axis = {"q": 1, "k": 1, "v": 1, "z": 1}.get(name.rsplit("_", 1)[-1], -2)
        expected = full[name].narrow(axis, 1, 2)
        torch.testing.assert_close(activation, expected, atol=0, rtol=0)


def test_a_cache_keeps_its_own_number_of_loops() -> None:
    model = build("plain", n_loops=2)
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=5)
    model(x, n_loops=9)
    assert cache.n_loops == 5
    assert cache.model.cfg.n_layers == 5  # type: ignore[union-attr]
    assert len(cache.accumulated_resid()) == 6
    assert model.cfg.n_layers == 2


def test_a_partial_run_caches_its_own_loops() -> None:
    model = build("demo")
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=T, stop_at_loop=2, names_filter="hook_state_post")
    assert cache.stack("hook_state_post").shape[0] == 2
    with pytest.raises(HookError, match="hook_state_post"):
        cache.stack("hook_state_post", loops=3)
    with pytest.raises(HookError, match=r"^names_filter:"):
        model.run_with_cache(
            x, n_loops=T, stop_at_loop=2, names_filter="loops.3.blocks.0.hook_resid_post"
        )


def test_what_was_not_cached_is_an_error_and_a_key_error() -> None:
    cache = cached("plain", names_filter="resid_post")
    with pytest.raises(HookError, match=r"attn.hook_z"):
        cache["loops.1.blocks.0.attn.hook_z"]
    with pytest.raises(KeyError):
        cache["blocks.0.attn.hook_z"]
    with pytest.raises(HookError, match=r"^component"):
        cache.stack("nonsense")


@each_variant
def test_saved_and_read_back(name: str, tmp_path: Path) -> None:
    cache = cached(name)
    cache.save(tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = build(name)
    assert model.n_loops != T  # how many loops the run had, the files say
    again = LoopedCache.load(tmp_path, model)
    assert list(again) == list(cache)
    assert again.n_loops == T
    for key in cache:
        assert torch.equal(again[key], cache[key])


def test_an_activation_with_two_names_is_written_once(tmp_path: Path) -> None:
    cache = cached("plain")
    cache.save(tmp_path)
    index = json.loads((tmp_path / "cache.json").read_text())
    assert index["names"]["blocks.1.hook_resid_pre"] == "blocks.0.hook_resid_post"


def test_a_damaged_or_foreign_cache_is_refused(tmp_path: Path) -> None:
    cache = cached("plain", n_loops=2)
    cache.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"^cache "):
        LoopedCache.load(tmp_path, build("demo"))
    shard = next(tmp_path.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        LoopedCache.load(tmp_path, cache.model)
    write_tensors(shard, {"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"^cache "):
        LoopedCache.load(tmp_path, cache.model)
    shard.unlink()
    with naming(f".*{shard.name}", CheckpointError) as caught:
        LoopedCache.load(tmp_path, cache.model)
    assert caught.value.given == os.strerror(errno.ENOENT)


@pytest.mark.parametrize("elsewhere", ["../shard.safetensors", "{far}/shard.safetensors"])
def test_an_index_that_names_files_of_other_folders_is_refused(
    elsewhere: str, tmp_path: Path
) -> None:
    cache = cached("plain", n_loops=2)
    cache.save(tmp_path / "cache")
    index = json.loads((tmp_path / "cache" / "cache.json").read_text())
    ((shard, names),) = index["files"].items()
    (tmp_path / "cache" / shard).rename(tmp_path / "shard.safetensors")
    changed = {**index, "files": {elsewhere.format(far=tmp_path): names}}
    (tmp_path / "cache" / "cache.json").write_text(json.dumps(changed))
    path = tmp_path / "cache" / "cache.json"
    with naming(f"file in cache {path}", CheckpointError):
        LoopedCache.load(tmp_path / "cache", cache.model)


@pytest.mark.parametrize("part", [{"files": {"a": 3}}, {"names": {"a": []}}, {"files": [1]}])
def test_an_index_of_other_types_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    cache = cached("plain", n_loops=2)
    cache.save(tmp_path)
    index = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(index | part))
    with pytest.raises(CheckpointError, match=r"^cache "):
        LoopedCache.load(tmp_path, cache.model)


@pytest.mark.parametrize("name", ["plain", "demo", "sandwich rotary", "post rms"])
def test_gradients_equal_finite_differences(name: str) -> None:
    model = build(name).double()
    x = some_inputs(model)
    where = model.site("resid_post", loop=1, layer=0, n_loops=T)
    scale = "loops.2.blocks.0.ln1.hook_scale"
    _, cache = model.run_with_cache(x, n_loops=T, incl_bwd=True, loss_fn=lambda y: y.square().sum())
    step = 1e-6
    for site in (where, model.addresses(T).resolve_name(scale)):
        gradient = cache.cache_dict[f"{site}_grad"]
        direction = torch.randn(
            gradient.shape, dtype=gradient.dtype, generator=torch.Generator().manual_seed(0)
        )
        losses = [
            model.run_with_hooks(
                x,
                n_loops=T,
                fwd_hooks=[(site, lambda a, hook, d=sign * step * direction: a + d)],
            )
            .square()
            .sum()
            for sign in (1, -1)
        ]
        numeric = (losses[0] - losses[1]) / (2 * step)
        assert numeric.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-5)


def test_gradients_need_a_scalar() -> None:
    model = build("plain")
    with pytest.raises(InputError, match="Pass loss_fn="):
        model.run_with_cache(some_inputs(model), n_loops=2, incl_bwd=True)
    with pytest.raises(InputError, match=r"^loss_fn:"):
        model.run_with_cache(some_inputs(model), n_loops=2, loss_fn=torch.sum)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("post rms",)])
def test_the_parts_of_a_loop_sum_to_it(name: str) -> None:
    cache = cached(name)
    parts, labels = cache.decompose_loop(2)
    assert len(parts) == len(labels)
    total = cache[f"loops.2.blocks.{cache.model.config.n_layers - 1}.hook_resid_post"]
    if cache.model.config.injection == "gated_output":
        total = total + cache["loops.2.hook_injection"]
    torch.testing.assert_close(parts.sum(0), total, atol=1e-5, rtol=0)


def test_sums_that_do_not_hold_are_refused() -> None:
    demo, post, bare = build("demo"), build("post rms"), build("no norm, both ways")
    _, cache = demo.run_with_cache(some_inputs(demo), n_loops=2)
    for method in ("decompose_resid", "get_full_resid_decomposition"):
        with pytest.raises(InputError, match="loop_norm=True"):
            getattr(cache, method)()
    with pytest.raises(InputError, match="all_logits"):
        cache.logit_lens()
    _, cache = post.run_with_cache(some_inputs(post), n_loops=2)
    with pytest.raises(InputError, match="norm='post'"):
        cache.decompose_loop(0)
    _, cache = bare.run_with_cache(some_inputs(bare), n_loops=2)
    with pytest.raises(InputError, match="W_U"):
        cache.apply_ln_to_stack(cache.stack_activation("resid_post"))


def test_the_lens_of_transformer_lens_is_the_readout_of_each_loop() -> None:
    model = build("plain")
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=T)
    lens = cache.logit_lens(positions=None).values
    expected = model(x, n_loops=T, return_type="all_logits")
    torch.testing.assert_close(lens[-T:], expected[-T:], atol=1e-5, rtol=0)
    without = build("plain", final_norm=False)
    _, cache = without.run_with_cache(x, n_loops=T)
    with pytest.raises(InputError, match="all_logits"):
        cache.logit_lens(positions=None)


def test_moves_casts_slices_and_drops_the_batch_axis() -> None:
    model = build("plain")
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=T)
    size = cache.nbytes
    some = cache.apply_slice_to_batch_dim(slice(0, 2))
    assert isinstance(some, LoopedCache)
    assert some.stack("resid_post").shape == (T, 2, 7, 16)
    assert cache.to(dtype=torch.float16).nbytes == size // 2
    assert f"{len(cache)} activations of {T} loops" in repr(cache)
    _, one = model.run_with_cache(x[:1], n_loops=T, remove_batch_dim=True)
    assert one.stack("resid_post").shape == (T, 7, 16)
    with pytest.raises(InputError, match=r"^batch size:"):
        model.run_with_cache(x, n_loops=T, remove_batch_dim=True)


def test_what_only_the_readout_computes_is_not_cached_without_it() -> None:
    model = build("surround")
    x = some_inputs(model)
    for name in ("ln_final.hook_scale", "blocks.9.hook_resid_post"):
        with pytest.raises(HookError, match=r"^names_filter:"):
            model.run_with_cache(x, n_loops=T, names_filter=name, return_type="state")
        _, cache = model.run_with_cache(x, n_loops=T, names_filter=name)
        assert list(cache) == [name]
    _, cache = model.run_with_cache(x, n_loops=T, return_type="states")
    assert "ln_final.hook_scale" not in cache.cache_dict
    assert "blocks.0.hook_resid_post" in cache.cache_dict


def test_no_positions_is_an_error() -> None:
    model = build("demo")
    for nothing in (99, slice(50, 60)):
        with pytest.raises(HookError, match=r"^pos_slice:"):
            model.run_with_cache(some_inputs(model), n_loops=2, pos_slice=nothing)


def test_a_slice_does_not_hold_the_whole() -> None:
    cache = cached("demo", n_loops=2, pos_slice=slice(1, 2))
    n_bytes = sum(x.untyped_storage().nbytes() for x in cache.values())
    assert n_bytes == cache.nbytes


def test_layers_where_there_are_none() -> None:
    cache = cached("demo", n_loops=2)
    with pytest.raises(HookError, match=r"^layer of"):
        cache.stack("hook_state_post", layer=3)
    with pytest.raises(HookError, match=r"^layer of"):
        cache.stack("resid_post", layer=[])


@pytest.mark.parametrize("name", ["sandwich rotary", "post rms"])
def test_heads_behind_a_norm_have_no_direct_writes(name: str) -> None:
    cache = cached(name, n_loops=2)
    calls = (
        cache.compute_head_results,
        cache.stack_head_results,
        lambda: cache.get_neuron_results(0),
        cache.get_full_resid_decomposition,
        lambda: cache.model.accumulated_bias(1),  # type: ignore[operator]
    )
    for call in calls:
        with pytest.raises(InputError, match="norm="):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"n_loops": 2},
        {"n_loops": "four"},
        {"files": None},
        {"names": {"blocks.0.hook_resid_pre": "nowhere"}},
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    cache = cached("plain")
    cache.save(tmp_path)
    path = tmp_path / "cache.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=r"^cache "):
        LoopedCache.load(tmp_path, cache.model)
    path.write_text("[]")
    with naming(f".*{path.name}", CheckpointError):
        LoopedCache.load(tmp_path, cache.model)


def test_a_notebook_shows_a_row_for_each_kind_of_activation() -> None:
    few, many = cached("demo", n_loops=2), cached("demo", n_loops=6)
    rows = few._repr_html_().count("<tr>")
    assert rows == many._repr_html_().count("<tr>") < len(few)
    assert "blocks.*.attn.hook_q × 6" in many._repr_html_()


def test_a_cache_of_what_each_head_reads_goes_to_disk_and_back(tmp_path: Path) -> None:
    model = build("demo")
    model.set_use_split_qkv_input(True)
    _, cache = model.run_with_cache(some_inputs(model), n_loops=2, names_filter="q_input")
    cache.save(tmp_path)
    again = LoopedCache.load(tmp_path, build("demo"))
    assert torch.equal(again.stack("q_input"), cache.stack("q_input"))
    assert again.stack("q_input").shape == (2, 3, 7, 2, 16)
