"""Hooks belong to the run that they were given to; what they return is checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from loopinterp.core.errors import HookError
from loopinterp.models import WithVocabulary, bind, iterate
from tests.models.test_run_inputs import in_another_thread
from tests.models.variants import build, some_inputs
from tests.refusals import naming

SITE = "loops.1.blocks.0.hook_mlp_out"


def zero(activation: Tensor, hook: Any) -> Tensor:
    return activation * 0


@torch.no_grad()
def test_hooks_are_seen_by_the_thread_that_opened_them() -> None:
    model = build("demo")
    x = some_inputs(model)
    run = torch.no_grad()(partial(model, x, n_loops=3))
    clean = run()
    with model.unroll(3).hooks(fwd_hooks=[(SITE, zero)]):
        assert torch.equal(in_another_thread(run), clean)
        hooked = run()
    assert (hooked - clean).abs().max() > 1e-3
    seen = []

    def meanwhile(activation: Tensor, hook: Any) -> None:
        seen.append(in_another_thread(run))  # in the midst of a run with hooks

    model.run_with_hooks(
        x, n_loops=3, fwd_hooks=[("loops.0.hook_state_pre", meanwhile), (SITE, zero)]
    )
    assert torch.equal(seen[0], clean)
    assert torch.equal(run(), clean)


@torch.no_grad()
def test_threads_with_hooks_at_one_place_each_have_their_own() -> None:
    model = build("demo")
    x = some_inputs(model)

    def scaled(factor: float) -> Tensor:
        hooks = [(SITE, lambda a, hook: a * factor)]
        return model.run_with_hooks(x, n_loops=3, fwd_hooks=hooks)

    by_factor = {factor: scaled(factor) for factor in (0.0, 3.0)}
    inner = []

    def outer(activation: Tensor, hook: Any) -> Tensor:
        inner.append(in_another_thread(torch.no_grad()(lambda: scaled(3.0))))
        return activation * 0.0

    logits = model.run_with_hooks(x, n_loops=3, fwd_hooks=[(SITE, outer)])
    assert torch.equal(logits, by_factor[0.0]) and torch.equal(inner[0], by_factor[3.0])


@torch.no_grad()
def test_hooks_that_stay_are_for_every_thread() -> None:
    model = build("demo", n_loops=3)
    x = some_inputs(model)
    hooked = model.run_with_hooks(x, fwd_hooks=[(SITE, zero)])
    model.add_hook(SITE, zero)
    assert torch.equal(in_another_thread(torch.no_grad()(lambda: model(x))), hooked)
    model.reset_hooks()
    model.run_with_hooks(x, fwd_hooks=[(SITE, zero)], reset_hooks_end=False)
    assert torch.equal(model(x), hooked)
    model.reset_hooks()
    assert not torch.allclose(model(x), hooked, atol=1e-3)


@torch.no_grad()
def test_hooks_share_a_context_and_an_order() -> None:
    model = build("demo", n_loops=3)
    x = some_inputs(model)
    model.add_hook(SITE, lambda a, hook: a + 1)

    def keep(activation: Tensor, hook: Any) -> Tensor:
        hook.ctx["seen"] = activation.clone()
        return activation * 2

    model.run_with_hooks(x, fwd_hooks=[(SITE, keep)])
    seen = model.hook_dict[model.addresses().resolve_name(SITE)].ctx["seen"]
    _, cache = model.run_with_cache(x)
    # The hook that stays comes first.
    torch.testing.assert_close(seen, cache[SITE], atol=1e-5, rtol=0)
    model.run_with_hooks(x, fwd_hooks=[(SITE, keep)], clear_contexts=True)
    assert not model.hook_dict[model.addresses().resolve_name(SITE)].ctx


def test_backward_hooks_of_a_run_see_its_gradients_only() -> None:
    model = build("demo")
    x = some_inputs(model)
    seen: list[Tensor] = []
    with model.unroll(3).hooks(bwd_hooks=[(SITE, lambda g, hook: seen.append(g))]):
        in_another_thread(lambda: model(x, n_loops=3).sum().backward())
        assert seen == []
        model(x, n_loops=3).sum().backward()
    assert [g.shape for g in seen] == [(3, 7, 16)]


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        (lambda a: a[:, :1], r"\[3, 1, 16\]"),
        (lambda a: a.double(), "float64"),
        (lambda a: a.to("meta"), "on meta"),
        (lambda a: "zero", "str"),
        (lambda a: (a,), "tuple"),
    ],
    ids=["shape", "type", "device", "text", "tuple"],
)
@torch.no_grad()
def test_a_hook_that_returns_the_wrong_thing_fails_by_its_name(wrong: Any, given: str) -> None:
    model = build("demo", n_loops=3)
    x, name = some_inputs(model), model.addresses().resolve_name(SITE)
    message = rf"^hook '{name}': .*got .*{given}"

    def hook(tensor: Tensor, *, hook: Any) -> Any:
        return wrong(tensor)

    with pytest.raises(HookError, match=message):
        model.run_with_hooks(x, fwd_hooks=[(SITE, hook), (SITE, zero)])
    model.add_hook(SITE, hook)
    with pytest.raises(HookError, match=message):
        model(x)
    model.reset_hooks()
    model.hook_dict[name].add_hook(hook)
    with pytest.raises(HookError, match=message):
        model(x)


def test_a_gradient_hook_that_returns_the_wrong_thing_fails_by_its_name() -> None:
    model = build("demo", n_loops=3)
    with model.hooks(bwd_hooks=[(SITE, lambda g, hook: g[:, :1])]):
        loss = model(some_inputs(model)).sum()
    with pytest.raises(HookError, match=r"hook 'blocks\.1\.hook_mlp_out'"):
        loss.backward()


@torch.no_grad()
def test_lists_of_sites_are_hooks_and_filters() -> None:
    model = build("sandwich rotary", n_loops=4)  # two layers
    x, hits = some_inputs(model), []
    sites = model.site("z", loop=slice(1, 3), layer=slice(None))
    assert isinstance(sites, list) and len(sites) == 4

    def hit(activation: Tensor, hook: Any) -> None:
        hits.append(hook.name)

    model.run_with_hooks(x, fwd_hooks=[(sites, hit)])
    assert hits == sites
    _, cache = model.run_with_cache(x, names_filter=[sites, "hook_state_post"])
    assert len(cache) == 4 + 4
    model.add_hook([sites, "loops.0.hook_state_pre"], hit)
    model(x)
    assert hits[4:] == ["loops.0.hook_state_pre", *sites]
    model.reset_hooks()
    nothing = model.site("hook_resid_post", section="prelude")
    with pytest.raises(HookError, match=r"^name"):
        model.run_with_hooks(x, fwd_hooks=[(nothing, hit)])
    with pytest.raises(HookError, match=r"^name"):
        model.add_hook([3], hit)


@torch.no_grad()
def test_hooks_end_with_their_block_also_for_a_task_that_began_inside_it() -> None:
    model = build("demo").unroll(3)
    x = some_inputs(model)
    clean = model(x)

    async def later(block_ended: asyncio.Event) -> Tensor:
        await block_ended.wait()
        with torch.no_grad():
            return model(x)

    async def main() -> tuple[Tensor, Tensor]:
        block_ended = asyncio.Event()
        with model.hooks(fwd_hooks=[(SITE, zero)]):
            task = asyncio.create_task(later(block_ended))
            hooked = model(x)
        block_ended.set()
        return hooked, await task

    with ThreadPoolExecutor(1) as pool:  # where no event loop is running, as one may be here
        hooked, after = pool.submit(asyncio.run, main()).result()
    assert not torch.equal(hooked, clean)
    assert torch.equal(after, clean)


@torch.no_grad()
def test_hooks_end_with_their_block_whichever_thread_ends_it() -> None:
    model = build("demo").unroll(3)
    x = some_inputs(model)
    clean = model(x)

    block = model.hooks(fwd_hooks=[(SITE, zero)])
    block.__enter__()
    assert not torch.equal(model(x), clean)  # so the hook has fired
    in_another_thread(partial(block.__exit__, None, None, None))
    assert torch.equal(model(x), clean)


def test_hooks_of_a_suspended_generator_are_refused() -> None:
    model = build("demo")
    x = some_inputs(model)
    clean = model(x, n_loops=3)

    def steps() -> Generator[Tensor, None, None]:
        with model.unroll(3).hooks(fwd_hooks=[(SITE, zero)]):
            yield model(x, n_loops=3)
            yield model(x, n_loops=3)

    running = steps()
    hooked = next(running)
    with pytest.raises(HookError, match="steps"):
        model(x, n_loops=3)
    assert torch.equal(next(running), hooked)
    running.close()
    assert torch.equal(model(x, n_loops=3), clean)
    assert all(torch.equal(each, hooked) for each in steps())


def test_a_context_manager_of_ones_own_keeps_its_hooks_on() -> None:
    model = build("demo")
    x = some_inputs(model)
    clean = model(x, n_loops=3)

    @contextlib.contextmanager
    def ablated() -> Generator[None, None, None]:
        with model.unroll(3).hooks(fwd_hooks=[(SITE, zero)]):
            yield

    with ablated():
        hooked = model(x, n_loops=3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.unroll(3).hooks(fwd_hooks=[(SITE, zero)]))
        assert torch.equal(model(x, n_loops=3), hooked)
    assert not torch.allclose(hooked, clean, atol=1e-3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_runs_have_the_gradients_of_their_hooks(use_reentrant: bool) -> None:
    model = build("demo")
    tokens = some_inputs(model)
    weight = model.embedding.weight
    assert isinstance(weight, Tensor)

    def run(_: Tensor) -> Tensor:
        return model(tokens, n_loops=3)

    def run_hooked(_: Tensor) -> Tensor:
        return model.run_with_hooks(tokens, n_loops=3, fwd_hooks=[(SITE, zero)])

    def gradient(output: Tensor) -> Tensor:
        model.zero_grad()
        output.square().sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    needs = torch.ones(1, requires_grad=True)
    expected = gradient(run_hooked(needs))
    inside = checkpoint(run_hooked, needs, use_reentrant=use_reentrant)
    assert torch.allclose(gradient(inside), expected, atol=1e-6)
    with model.unroll(3).hooks(fwd_hooks=[(SITE, zero)]):
        model(tokens, n_loops=3)
        with pytest.raises(HookError):
            checkpoint(run, needs, use_reentrant=use_reentrant)
    model.unroll(3).add_hook(SITE, zero)
    stays = checkpoint(run, needs, use_reentrant=use_reentrant)
    assert torch.allclose(gradient(stays), expected, atol=1e-6)


@pytest.mark.usefixtures("no_type_checks")  # whose code cannot be traced, and which count calls
@pytest.mark.parametrize("first", ["a clean run", "a hook", "a look at the points"])
@torch.no_grad()
def test_a_compiled_model_fires_the_hooks_that_are_on(first: str) -> None:
    torch._dynamo.reset()
    model = build("plain", n_layers=1).unroll(2)
    x, other = some_inputs(model), "loops.0.blocks.0.hook_attn_out"
    compiled = torch.compile(model, backend="eager")
    clean, double = model(x), lambda x, hook: 2 * x

    def need_same(*, changed: bool) -> None:
        expected = model(x)
        assert torch.allclose(expected, clean, atol=1e-5) != changed
        assert torch.allclose(compiled(x), expected, atol=1e-5)

    if first == "a look at the points":
        assert model.hook_dict
    if first != "a hook":
        need_same(changed=False)
    model.add_hook(SITE, zero)
    need_same(changed=True)
    model.add_hook(other, double)
    need_same(changed=True)
    model.reset_hooks()
    need_same(changed=False)
    model.add_hook(SITE, double)  # at the same site another
    need_same(changed=True)
    model.reset_hooks()
    for site, hook in ((other, zero), (SITE, zero)):
        with model.hooks(fwd_hooks=[(site, hook)]):
            need_same(changed=True)
    need_same(changed=False)
    torch._dynamo.reset()


def test_hooks_stay_when_the_number_of_loops_changes() -> None:
    model = build("surround", n_loops=2)
    hits: list[str] = []
    model.add_hook("blocks.5.hook_resid_post", lambda a, hook: hits.append(hook.name))
    model(some_inputs(model))
    model(some_inputs(model), n_loops=4)
    # blocks.5 is the first coda layer of a run of 2 loops, and blocks.9 that of a run of 4.
    assert hits == ["blocks.5.hook_resid_post", "blocks.9.hook_resid_post"]


def test_a_hook_beyond_the_run_does_not_fall_on_the_coda() -> None:
    model = build("surround", n_loops=4)  # blocks.5 is a loop's layer here, and the coda of 2 loops
    hits: list[str] = []
    model.add_hook("blocks.5.hook_resid_post", lambda a, hook: hits.append(hook.name))
    model(some_inputs(model), n_loops=2)
    assert hits == []
    model(some_inputs(model))
    assert hits == ["blocks.5.hook_resid_post"]


def test_hooks_for_another_number_of_loops_leave_those_that_are_on() -> None:
    model = build("plain", n_loops=2)
    unrolled, x, outer, inner = model.unroll(3), some_inputs(model), [], []
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda a, hook: outer.append(0))]):
        unrolled.run_with_hooks(
            x, fwd_hooks=[("blocks.2.hook_resid_post", lambda a, hook: inner.append(0))]
        )
        model(x, n_loops=3)
    assert (len(outer), len(inner)) == (2, 1)
    assert model.n_loops == 2 and unrolled.cfg.n_layers == 3


def test_a_model_with_hooks_is_not_stepped_past_them() -> None:
    model = build("demo", n_loops=3)
    x, twin = some_inputs(model), model.unroll(5)
    states = list(iterate(model, x, 2))[-1][1]

    def refused() -> None:
        for other in (model, twin, WithVocabulary(model)):
            with pytest.raises(HookError, match=r"^model: .*blocks\.1\.attn"):
                bind(other, x)

    with model.hooks([("loops.1.blocks.0.attn.hook_z", lambda z, hook: z * 0)]):
        refused()
        assert in_another_thread(lambda: bind(model, x).h0.shape) == (3, 7, 16)
        model(x)  # fires
    model.add_hook("loops.1.blocks.0.attn.hook_z", lambda z, hook: z * 0)
    refused()
    model.reset_hooks()
    assert (list(iterate(model, x, 2))[-1][1] == states).all()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "hooks",
    ["hook_embed", ["hook_embed"], [("hook_embed",)], [("hook_embed", 3)], lambda x, hook: x, [7]],
)
@pytest.mark.parametrize("way", ["fwd_hooks", "bwd_hooks"])
def test_hooks_that_are_no_pairs_are_refused(way: str, hooks: Any) -> None:
    model = build("plain")
    with pytest.raises(HookError) as refused:
        model.run_with_hooks(some_inputs(model), n_loops=2, **{way: hooks})
    assert refused.value.what == way
    with pytest.raises(HookError), model.hooks(**{way: hooks}):
        pass


@pytest.mark.parametrize("function", [lambda z: z, lambda z, point: z, lambda: None])
def test_a_function_that_takes_no_hook_is_refused_before_the_run(function: Any) -> None:
    model = build("demo")
    with naming("hook function", HookError):
        model.run_with_hooks(some_inputs(model), n_loops=3, fwd_hooks=[(SITE, function)])
    with naming("hook function", HookError):
        model.add_hook(SITE, function)
    with naming("hook function", HookError), model.hooks(bwd_hooks=[(SITE, function)]):
        pass


@pytest.mark.parametrize(
    "function", [lambda z, hook: z, lambda z, **more: z, lambda *z, hook=None: z[0], partial(zero)]
)
def test_every_function_that_takes_a_hook_is_taken(function: Any) -> None:
    model = build("demo")
    model.run_with_hooks(some_inputs(model), n_loops=3, fwd_hooks=[(SITE, function)])
