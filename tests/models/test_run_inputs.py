"""Spans of loops and numbers of loops; what runs refuse is tested with the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loopinterp.core.errors import MOST_LOOPS, HookError, InputError
from loopinterp.models import LoopedTransformer, LoopRule, bind, iterate, run_until
from loopinterp.models.protocol import check_dtype, check_ends, loop_span
from loopinterp.models.stopping import Fixed
from tests.models.variants import VARIANTS, build, some_inputs
from tests.refusals import naming


def test_spans() -> None:
    assert loop_span(0, None, 4, None) == range(4)
    assert loop_span(2, 3, 4, torch.zeros(1, 1, 8)) == range(2, 3)
    assert loop_span(4, None, 4, torch.zeros(1, 1, 8)) == range(4, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (3, 2), (0, 5), (5, None)])
def test_spans_outside_the_run(start: int, stop: int | None) -> None:
    with pytest.raises(InputError, match=r"^(start|stop)_at_loop:"):
        loop_span(start, stop, 4, torch.zeros(1, 1, 8))


@pytest.mark.parametrize("given", [0, -1, True])
def test_numbers_of_loops_that_are_none(given: int) -> None:
    with pytest.raises(InputError, match=r"^n_loops:"):
        build("plain").n_loops = given


@pytest.mark.parametrize("wrong", [-1, MOST_LOOPS + 1, 10**9])
def test_no_example_makes_more_loops_than_a_run_can(wrong: int) -> None:
    x = some_inputs(build("plain"))
    ends = torch.tensor([1, wrong, 2])
    for run in (check_ends, lambda ends, x: build("plain")(x, n_loops=ends)):
        with pytest.raises(InputError, match=rf"n_loops: expected an integer .*, got {wrong}"):
            run(ends, x)
    assert torch.equal(check_ends(ends.clamp(0, MOST_LOOPS), x), ends.clamp(0, MOST_LOOPS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", ["demo", "abacus on q and k"])
@torch.no_grad()
def test_tokens_of_any_integer_type_are_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    model = build(name)
    x = some_inputs(model)
    assert torch.equal(model(x.to(dtype), n_loops=3), model(x, n_loops=3))
    assert torch.equal(model.run_with_cache(x.to(dtype))[0], model.run_with_cache(x)[0])


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float32, torch.uint16])
def test_other_types_are_no_tokens(dtype: torch.dtype) -> None:
    model = build("demo")
    with pytest.raises(InputError, match="integers"):
        model(some_inputs(model).to(dtype))


def test_empty_batches_are_refused_alike() -> None:
    model = build("demo")
    x = some_inputs(model)[:0]
    for run in (
        lambda: model(x),
        lambda: model.run_with_cache(x, pos_slice=0),
        lambda: model.run_with_hooks(x, fwd_hooks=[]),
        lambda: model(x, n_loops=x[:, 0]),
        lambda: bind(model, x),
        lambda: next(iterate(model, x, 2)),
        lambda: run_until(model, x, Fixed(2)),
    ):
        with naming("inputs") as caught:
            run()
        assert "empty" in caught.value.given


def test_types_by_name() -> None:
    model = build("demo")
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, names_filter="resid_post", dtype="bfloat16")
    assert cache["resid_post", 0].dtype == torch.bfloat16
    size = model.cache_nbytes(3, 7, names_filter="resid_post", dtype="bfloat16")
    assert size == cache.nbytes
    assert cache.to(dtype="float64")["resid_post", 0].dtype == torch.float64
    for wrong in ("float31", "int64", "Tensor", torch.int64, 32):
        with pytest.raises(InputError, match=r"^dtype:"):
            check_dtype(wrong)


ENDS = torch.tensor([3, 0, 5])


def ruled(name: str = "demo") -> LoopedTransformer:
    """A model that makes a loop less than its input has positions, and shows names of 4 loops."""
    model = build(name)
    model.loop_rule = LoopRule(4, lambda n_pos: n_pos - 1)
    return model


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_each_example_is_read_as_if_run_alone(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    single = torch.cat(
        [model(x[i : i + 1], n_loops=5, stop_at_loop=int(end)) for i, end in enumerate(ENDS)]
    )
    torch.testing.assert_close(model(x, n_loops=ENDS), single, atol=1e-5, rtol=0)
    cached, cache = model.run_with_cache(x, n_loops=ENDS)
    torch.testing.assert_close(cached, single, atol=1e-5, rtol=0)
    assert cache.n_loops == 5
    states = model(x, n_loops=5, return_type="states")
    read = model(x, n_loops=ENDS, return_type="state")
    torch.testing.assert_close(read, states[ENDS, torch.arange(3)], atol=1e-5, rtol=0)


@torch.no_grad()
def test_hooks_of_each_example_count_up_to_its_own_end() -> None:
    model = build("demo")
    x = some_inputs(model)
    hooks = [("loops.3.blocks.0.hook_mlp_out", lambda a, hook: a * 0)]
    actual = model.run_with_hooks(x, n_loops=ENDS, fwd_hooks=hooks)
    plain = model(x, n_loops=ENDS)
    assert torch.equal(actual[:2], plain[:2])  # both end before the hook's loop
    single = model.run_with_hooks(x[2:], n_loops=5, fwd_hooks=hooks)
    torch.testing.assert_close(actual[2:], single, atol=1e-5, rtol=0)
    assert (actual[2] - plain[2]).abs().max() > 1e-3


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_type": "states"}, "^n_loops:"),
        ({"return_type": "all_logits"}, "^n_loops:"),
        ({"stop_at_loop": 2}, "^n_loops:"),
        ({"stop_at_loop": 0}, "^n_loops:"),
        ({"start_at_loop": 2, "state": torch.zeros(3, 7, 16)}, "^n_loops:"),
        ({"n_loops": ENDS[:2]}, "^n_loops:"),
        ({"n_loops": ENDS.float()}, "^n_loops:"),
        ({"n_loops": -ENDS}, "^n_loops:.*-5"),
    ],
)
def test_what_does_not_go_with_loops_by_example_is_refused(
    options: dict[str, Any], message: str
) -> None:
    model = build("plain")
    with pytest.raises(InputError, match=message):
        model(some_inputs(model), **{"n_loops": ENDS, **options})


@torch.no_grad()
def test_a_run_that_is_not_told_makes_the_loops_of_its_length() -> None:
    model = ruled()
    for n_pos in (3, 5, 7):
        x = some_inputs(model, n_pos=n_pos)
        explicit = model(x, n_loops=n_pos - 1)
        assert torch.equal(model(x), explicit)
        assert not torch.allclose(explicit, model(x, n_loops=1), atol=1e-3)
        logits, cache = model.run_with_cache(x)
        torch.testing.assert_close(logits, explicit, atol=1e-5, rtol=0)
        assert cache.n_loops == n_pos - 1
        size = model.cache_nbytes(3, n_pos, names_filter="resid_post")
        assert size == cache.stack("resid_post").nbytes


def test_what_is_shown_is_of_one_number_of_loops() -> None:
    model = ruled()
    assert model.n_loops == 4 and model.cfg.n_layers == len(model.blocks) == 4
    assert "blocks.3.hook_resid_post" in model.hook_dict
    assert "blocks.4.hook_resid_post" not in model.hook_dict
    assert model.site("z", loop=-1) == "blocks.3.attn.hook_z"
    assert len(model.W_Q) == 4


@torch.no_grad()
def test_numbered_names_need_the_number_that_they_are_of() -> None:
    model, hits = ruled(), []
    short, fits = some_inputs(model, n_pos=3), some_inputs(model, n_pos=5)

    def hit(activation: torch.Tensor, hook: Any) -> None:
        hits.append(hook.name)

    last = model.site("z", loop=-1)
    model.run_with_hooks(fits, fwd_hooks=[(last, hit)])
    for run in (
        lambda x: model.run_with_hooks(x, fwd_hooks=[(last, hit)]),
        lambda x: model.run_with_hooks(x, fwd_hooks=[(["blocks.0.hook_resid_pre"], hit)]),
        lambda x: model.run_with_cache(x, names_filter=[last]),
    ):
        with pytest.raises(HookError, match="Pass n_loops=2"):
            run(short)
    with pytest.raises(HookError, match=r"^n_loops:"), model.hooks([(last, hit)]):
        model(short)
    assert hits == ["blocks.3.attn.hook_z"]
    names = ["loops.-1.blocks.0.attn.hook_z"]
    model.run_with_hooks(short, fwd_hooks=[(names, hit)])
    model.unroll(2).run_with_hooks(short, fwd_hooks=[("blocks.1.attn.hook_z", hit)])
    model.run_with_hooks(short, n_loops=2, fwd_hooks=[("blocks.1.attn.hook_z", hit)])
    assert hits[1:] == ["blocks.1.attn.hook_z"] * 3
    with model.hooks([("blocks.1.attn.hook_z", hit)]):
        model(short, n_loops=6)


@torch.no_grad()
def test_a_number_that_is_said_does_away_with_the_rule() -> None:
    model = ruled()
    x = some_inputs(model, n_pos=3)
    three = model(x, n_loops=3)
    assert torch.equal(model.unroll(3)(x), three)
    assert model.n_loops == 4
    model.n_loops = 3
    assert model.loop_rule is None
    assert torch.equal(model(x), three)


def in_another_thread(function: Callable[[], Any]) -> Any:
    """What a function returns when another thread calls it."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start()
    thread.join(60)
    return seen[0]


@torch.no_grad()
def test_threads_do_not_change_each_others_number_of_loops() -> None:
    model = build("surround", n_loops=2)
    x = some_inputs(model)
    two = model(x)
    seen: list[Any] = []

    def record(activation: torch.Tensor, hook: Any) -> None:
        seen.append(in_another_thread(torch.no_grad()(lambda: (model.n_loops, model(x)))))

    actual = model.run_with_hooks(
        x, n_loops=5, fwd_hooks=[("loops.4.blocks.0.hook_resid_pre", record)]
    )
    torch.testing.assert_close(actual, model(x, n_loops=5), atol=1e-5, rtol=0)
    assert seen[0][0] == 2 and torch.equal(seen[0][1], two)
    assert model.n_loops == 2
