"""Direct logit attribution: the parts are what ablating each of them says, and sum to the logit."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from loopinterp.compiler import compile_program, rotate
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import (
    LoopedCache,
    LoopedTransformer,
    LoopedTransformerConfig,
    fold_final_norm,
    for_logit_attribution,
)
from loopinterp.models.config import Injection, Norm, NormType
from tests.models.variants import VARIANTS, build, some_inputs
from tests.refusals import naming

SURROUND = {"n_prelude": 1, "n_coda": 2, "n_layers": 2}

ALTERNATE = [
    (norm, norm_type, injection)
    for norm, norm_type, injection in itertools.product(
        get_args(Norm), get_args(NormType), get_args(Injection)
    )
    if (get_args(Norm).index(norm) + get_args(Injection).index(injection)) % 2
    == get_args(NormType).index(norm_type)
]
"""Every norm with every injection, and with either type of norm by turns."""


def jittered(model: LoopedTransformer) -> LoopedTransformer:
    """In float64, every weight off its initial value; weights of norms of both signs."""
    generator = torch.Generator().manual_seed(1)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter *= torch.randn(parameter.shape, generator=generator).sign()
    return model


def small(norm: str, norm_type: str, injection: str, **options: Any) -> LoopedTransformer:
    """A narrow model on one place of the grid."""
    settings: dict[str, Any] = {
        "d_model": 8,
        "n_heads": 2,
        "d_mlp": 8,
        "d_vocab": 6,
        "d_vocab_out": 3,
    }
    settings |= {"norm": norm, "norm_type": norm_type, "injection": injection} | options
    return jittered(LoopedTransformer(LoopedTransformerConfig(**settings)))


def inputs(model: LoopedTransformer) -> Tensor:
    """Tokens, or features in the model's type."""
    x = some_inputs(model)
    return x.to(model.dtype) if x.is_floating_point() else x


def answers() -> tuple[Tensor, Tensor]:
    """A right and a wrong class for each place, never the same."""
    right = torch.randint(0, 3, (3, 7), generator=torch.Generator().manual_seed(2))
    return right, (right + 1) % 3


def difference(logits: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    """Logit difference at each place."""
    at = [logits.gather(-1, classes.unsqueeze(-1)) for classes in (right, wrong)]
    return (at[0] - at[1]).squeeze(-1).detach()


def check_sums(model: LoopedTransformer, n_loops: int) -> None:
    """At every loop, from every loop on, the parts sum to the logit difference read there."""
    (right, wrong), x = answers(), inputs(model)
    _, cache = model.run_with_cache(x, n_loops=n_loops)
    at_every_loop = model(x, n_loops=n_loops, return_type="all_logits")
    for loop in range(n_loops):
        expected = difference(at_every_loop[loop + 1], right, wrong).numpy()
        for from_loop in range(loop + 1):
            parts = cache.logit_attribution(
                right, incorrect_tokens=wrong, loop=loop, from_loop=from_loop
            )
            assert abs(parts.sum("component") - expected).max() < 1e-10 * (1 + abs(parts).max())
            assert len(set(parts.component.values)) == len(parts)


@pytest.mark.parametrize(("norm", "norm_type", "injection"), ALTERNATE)
def test_parts_sum_to_the_logit_at_every_loop(norm: str, norm_type: str, injection: str) -> None:
    # Both norms of a loop and of the end, one or neither, by turns: each norm, type of norm and
    # injection is tried with all four.
    k = get_args(Norm).index(norm) + 3 * get_args(Injection).index(injection) // 2
    loop_norm, final_norm = [(False, False), (False, True), (True, True), (True, False)][k % 4]
    options = {"loop_norm": loop_norm, "final_norm": final_norm}
    check_sums(small(norm, norm_type, injection, **SURROUND, **options), n_loops=2)


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_sum_to_the_logit_of_every_kind_of_model(name: str) -> None:
    check_sums(jittered(build(name)), n_loops=3)


class RunOutputs:
    """A run whose norms keep their scales and whose sublayers keep what they put out.

    What is left is linear in the stream: an oracle for direct effects, part by part.
    """

    def __init__(self, model: LoopedTransformer, x: Tensor, cache: LoopedCache) -> None:
        self.model, self.x = model, x
        ends = ("hook_scale", "hook_attn_gate", "hook_mlp_gate", "hook_z", "mlp.hook_post")
        ends += ("hook_injection",)
        self.kept = {name: cache[name] for name in cache if name.endswith(ends)}

    def without(self, site: str, part: Any = slice(None)) -> Tensor:
        """The logits once a part of an activation is zero."""

        def hook(x: Tensor, hook: Any) -> Tensor:
            return self.kept[hook.name]

        def ablate(x: Tensor, hook: Any) -> Tensor:
            x = self.kept.get(hook.name, x).clone()
            x[:, :, part] = 0
            return x

        site = self.model.addresses().resolve_name(site)
        hooks: list[Any] = [(name, hook) for name in self.kept if name != site]
        return self.model.run_with_hooks(self.x, fwd_hooks=[*hooks, (site, ablate)])


SITE = {"mlp": "hook_mlp_out", "head": "attn.hook_z", "injection": "hook_injection"}


def site_of(part: Any) -> tuple[str, Any]:
    """Where to ablate one component of an attribution."""
    kind, loop, layer = part.part.item(), part.loop.item(), part.layer.item()
    if kind == "state":
        return "loops.0.hook_state_pre", slice(None)
    if kind == "injection":
        return f"loops.{loop}.hook_injection", slice(None)
    place = f"coda.{layer}" if loop == -1 else f"loops.{loop}.blocks.{layer}"
    return f"{place}.{SITE[kind]}", part["head"].item() if kind == "head" else slice(None)


@pytest.mark.parametrize(("norm", "norm_type", "injection"), ALTERNATE)
@torch.no_grad()
def test_a_part_is_what_its_ablation_takes_away(norm: str, norm_type: str, injection: str) -> None:
    model = small(norm, norm_type, injection, loop_norm=True, n_loops=2, n_coda=1)
    x, (right, wrong) = inputs(model), answers()
    logits, cache = model.run_with_cache(x)
    outputs, kinds = RunOutputs(model, x, cache), set()
    for part in cache.logit_attribution(right, incorrect_tokens=wrong, from_loop=0):
        if part.part.item().endswith("bias"):
            continue
        kinds.add(part.part.item())
        change = difference(logits - outputs.without(*site_of(part)), right, wrong)
        torch.testing.assert_close(torch.from_numpy(part.values), change, atol=1e-9, rtol=1e-9)
    injected = injection in ("input", "concat", "gated_output")
    assert kinds == {"state", "head", "mlp"} | ({"injection"} if injected else set())


def cached(name: str = "demo", **options: Any) -> LoopedCache:
    """What a jittered model did in four loops."""
    model = jittered(build(name))
    return model.run_with_cache(some_inputs(model), n_loops=4, **options)[1]


def test_components_say_where_they_stand() -> None:
    parts = cached("surround").logit_attribution(1, from_loop=2)
    assert parts.dims == ("component", "batch", "pos")
    labels = parts.component.values.tolist()
    first = ["state before loop 2", "loop 2, injection"]
    first += [f"loop 2, layer 0, head {head}" for head in (0, 1)]
    assert labels[:4] == first
    assert labels[-2:] == ["final norm bias", "unembedding bias"]
    head = parts.sel(component="loop 3, layer 1, head 0")
    where = [head[name].item() for name in ("part", "loop", "layer", "head")]
    assert where == ["head", 3, 1, 0]
    coda = parts.sel(component="coda layer 1, mlp")
    assert [coda[name].item() for name in ("part", "loop", "layer", "head")] == ["mlp", -1, 1, -1]
    by_loop = parts.groupby("loop").sum()
    assert by_loop.loop.values.tolist() == [-1, 2, 3]
    assert abs(by_loop.sum("loop") - parts.sum("component")).max() < 1e-10


def test_classes_broadcast_as_in_transformer_lens() -> None:
    cache = cached()
    each = torch.tensor([0, 2, 1])
    place = each[:, None].expand(3, 7)
    expected = cache.logit_attribution(place)
    for dtype in (torch.int64, torch.int8, torch.uint8):
        assert cache.logit_attribution(each.to(dtype)).identical(expected)
    shared = cache.logit_attribution(torch.tensor([[0, 1, 2, 0, 1, 2, 0]]))
    assert shared[:, 2, 1].identical(cache.logit_attribution(1)[:, 2, 1])
    difference = expected - cache.logit_attribution(0)
    result = cache.logit_attribution(each, incorrect_tokens=0)
    assert abs(result - difference).max() < 1e-10


@pytest.mark.parametrize("name", ["demo", "surround"])
def test_a_cache_without_batch_axis(name: str) -> None:
    model = jittered(build(name))
    x = some_inputs(model)[:1]
    full = model.run_with_cache(x, n_loops=4)[1].logit_attribution(1, loop=1)
    _, cache = model.run_with_cache(x, n_loops=4, remove_batch_dim=True)
    single = cache.logit_attribution(torch.ones(7, dtype=torch.long), loop=1)
    assert single.dims == ("component", "pos")
    assert abs(single - full[:, 0]).max() < 1e-10


@pytest.mark.parametrize("positions", [slice(2, 5), -1])
def test_a_cache_of_some_positions(positions: Any) -> None:
    full, part = cached().logit_attribution(1), cached(pos_slice=positions).logit_attribution(1)
    here = positions if isinstance(positions, slice) else [positions]
    assert abs(part.values - full.values[:, :, here]).max() < 1e-10
    with pytest.raises(InputError, match="pos_slice"):
        cached("surround", pos_slice=positions).logit_attribution(1)


def test_a_run_that_stopped_early_is_read_where_it_stopped() -> None:
    model = jittered(build("surround"))
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, n_loops=4, stop_at_loop=2)
    logits = model(x, n_loops=4, return_type="all_logits")[2, ..., 1].detach().numpy()
    assert abs(cache.logit_attribution(1, loop=1).sum("component") - logits).max() < 1e-10
    with pytest.raises(HookError, match="hook_state_post"):
        cache.logit_attribution(1)


def test_what_cannot_be_right_is_refused() -> None:
    cache = cached()
    for wrong, shown in (
        (3, "3"),
        (-1, "-1"),
        (torch.zeros(2, dtype=torch.long), "tensor"),
        (torch.zeros(3, 7), "tensor"),
        (True, "True"),
    ):
        with naming("tokens") as caught:
            cache.logit_attribution(wrong)
        assert "0 to 2" in caught.value.expected and caught.value.given.startswith(shown)
    with pytest.raises(InputError, match=r"^from_loop:"):
        cache.logit_attribution(1, loop=1, from_loop=2)
    with pytest.raises(HookError, match=r"^loop:"):
        cache.logit_attribution(1, loop=4)
    with naming("logit_attribution"):
        cached(dtype=torch.bfloat16).logit_attribution(1)
    with pytest.raises(HookError, match="names_filter"):
        cached(names_filter=["z", "hook_state_post"]).logit_attribution(1)


@pytest.mark.parametrize("site", ["hook_attn_out", "hook_resid_mid", "hook_state_post"])
def test_a_stream_that_a_hook_changed_is_refused(site: str) -> None:
    model = jittered(build("plain", n_loops=4))
    place = "loops.2" if "state" in site else "loops.2.blocks.0"
    with model.hooks([(f"{place}.{site}", add_one)]):
        _, cache = model.run_with_cache(some_inputs(model))
    assert len(cache.logit_attribution(1))  # the last loop is unchanged
    with pytest.raises(InputError, match=r"^logit_attribution:"):
        cache.logit_attribution(1, from_loop=0)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("wrong", ["a", None, [[0], [1, 2]], 1.0, {}])
def test_what_is_no_class_at_all_is_refused_in_words(wrong: Any) -> None:
    cache = cached()
    with pytest.raises(InputError, match=rf"^tokens: .* 0 to 2.* got {re.escape(repr(wrong))}"):
        cache.logit_attribution(wrong)
    if wrong is not None:
        with pytest.raises(InputError, match=r"^incorrect_tokens:"):
            cache.logit_attribution(1, incorrect_tokens=wrong)


def add_one(x: Tensor, hook: Any) -> Tensor:
    return x + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


def test_the_loop_and_part_that_write_an_answer_of_a_known_program() -> None:
    compiled = compile_program("prefix_xor", max_length=6)
    model, x = compiled.model, torch.tensor([[2, 1, 0, 1, 1, 1], [2, 0, 1, 0, 1, 0]])
    logits, cache = model.run_with_cache(x, n_loops=6)
    states = model(x, n_loops=6, return_type="states")
    answer = logits.argmax(-1)
    parts = cache.logit_attribution(answer, incorrect_tokens=1 - answer, from_loop=0)
    # Heads write what the MLP reads, not the answer.
    assert not parts[parts.part == "head"].any()
    writes = parts.groupby("loop").sum().sel(loop=range(6)).values != 0
    value = compiled.circuit.decode("prefix", states)  # [loop, batch, pos]
    assert (torch.from_numpy(writes) == (value[1:] != value[:-1])).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cache_of_what_is_read_is_enough(name: str) -> None:
    model = jittered(build(name))
    caches = (
        model.run_with_cache(inputs(model), n_loops=3, names_filter=chosen)[1]
        for chosen in (for_logit_attribution, None)
    )
    actual, expected = (cache.logit_attribution(1, from_loop=0) for cache in caches)
    assert (actual.component == expected.component).all() and abs(actual - expected).max() < 1e-9


def test_rounding_where_a_difference_is_zero_is_no_fault() -> None:
    model = rotate(compile_program("prefix_mod_5", max_length=6), seed=0).model
    _, cache = model.run_with_cache(torch.tensor([[5, 0, 0, 0, 0, 0]]), n_loops=6)
    parts = cache.logit_attribution(3, incorrect_tokens=4, from_loop=0)
    # Neither class is the answer at any position: the difference is rounding alone.
    assert 0 < abs(parts.sum("component")).max() < 1e-5


def test_attribution_along_the_unembedding_alone_is_refused_behind_another_norm() -> None:
    cache = cached("demo")
    parts, _ = cache.decompose_loop(3)
    with pytest.raises(InputError, match=r"cache\.logit_attribution"):
        cache.logit_attrs(parts, tokens=1)
    with pytest.raises(InputError, match="norm='post'"):
        cached("post rms").logit_attrs(parts, tokens=1)
    with pytest.raises(InputError, match=r"fold_final_norm"):
        cached("plain").logit_attrs(parts, tokens=1)
    x = some_inputs(build("plain"))
    _, folded = fold_final_norm(jittered(build("plain"))).run_with_cache(x, n_loops=4)
    assert folded.logit_attrs(parts, tokens=1).shape == (len(parts), 3, 7)


ENDS = torch.tensor([1, 4, 2])


def test_a_run_of_other_loops_for_each_example_has_no_last_one() -> None:
    model = jittered(build("surround"))
    x = some_inputs(model)
    logits, cache = model.run_with_cache(x, n_loops=ENDS)
    with pytest.raises(InputError, match=r"^loop:"):
        cache.logit_attribution(1)
    with pytest.raises(InputError, match=r"^loop:"):
        cache.apply_slice_to_batch_dim(slice(1)).logit_attribution(1)
    # Asked for by its number, a loop is that of every example.
    for loop in range(4):
        ended_here = ENDS.eq(loop + 1).numpy()
        result = cache.logit_attribution(1, loop=loop).sum("component").values
        expected = model(x, n_loops=4, return_type="all_logits")[loop + 1, ..., 1].detach().numpy()
        assert abs(result - expected).max() < 1e-10
        assert abs(result - logits[..., 1].detach().numpy())[ended_here].max(initial=0) < 1e-10


@pytest.mark.parametrize(
    "site", ["coda.1.hook_mlp_out", "coda.0.attn.hook_z", "ln_final.hook_scale"]
)
def test_a_readout_that_a_hook_changed_is_refused(site: str) -> None:
    model = jittered(build("surround", n_loops=4))

    def last_example(activation: Tensor, hook: Any) -> Tensor:
        return torch.cat([activation[:-1], activation[-1:] * 1.5])

    with model.hooks([(site, last_example)]):
        _, cache = model.run_with_cache(some_inputs(model))
    for loop in (None, 1):
        with pytest.raises(InputError, match=r"^logit_attribution:"):
            cache.logit_attribution(1, loop=loop)


@pytest.mark.parametrize(
    "weight", ["unembedding.weight", "coda.0.mlp.fc_in.weight", "ln_final.bias"]
)
def test_weights_that_have_changed_since_are_refused(weight: str, tmp_path: Path) -> None:
    model = jittered(build("surround"))
    _, cache = model.run_with_cache(some_inputs(model), n_loops=4, loops=[1])
    cache.save(tmp_path)
    assert len(LoopedCache.load(tmp_path, model).logit_attribution(1, loop=1))
    with torch.no_grad():
        model.get_parameter(weight).mul_(1.1)
    for each in (cache, LoopedCache.load(tmp_path, model)):
        with pytest.raises(InputError, match=r"^logit_attribution:"):
            each.logit_attribution(1, loop=1)


def test_positions_in_another_order_are_refused_where_a_coda_looks_at_them() -> None:
    backwards = [6, 5, 4, 3, 2, 1, 0]
    with pytest.raises(InputError, match=r"^cache:"):
        cached("surround", pos_slice=backwards).logit_attribution(1)
    full = cached("surround", pos_slice=slice(0, 7)).logit_attribution(1)
    assert full.identical(cached("surround").logit_attribution(1))
    turned = cached(pos_slice=backwards).logit_attribution(1)
    assert abs(turned.values - cached().logit_attribution(1).values[:, :, ::-1]).max() < 1e-10


def test_a_cache_on_disk_knows_how_its_run_ended(tmp_path: Path) -> None:
    model = jittered(build("surround"))
    runs: list[dict[str, Any]]
    runs = [{"n_loops": 3}, {"n_loops": ENDS}, {"n_loops": 3, "return_type": "states"}]
    for options in runs:
        _, cache = model.run_with_cache(some_inputs(model), **options)
        cache.save(tmp_path)
        again = LoopedCache.load(tmp_path, model)
        assert list(again) == list(cache)
        expected = cache.logit_attribution(1, loop=2, from_loop=0)
        assert again.logit_attribution(1, loop=2, from_loop=0).identical(expected)
        assert again.readout is not None and cache.readout is not None
        assert again.readout.tensors().keys() == cache.readout.tensors().keys()
    by_hand = LoopedCache(dict(cache.items()), cache.model)
    by_hand.save(tmp_path)
    for unknown in (by_hand, LoopedCache.load(tmp_path, model)):
        with pytest.raises(InputError, match=r"^cache:"):
            unknown.logit_attribution(1)
