"""The looped transformer against its own unrolled self, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import HookError, InputError
from loopinterp.models import LoopedModel, LoopedTransformer, LoopedTransformerConfig, bind
from tests.models.variants import VARIANTS, build, some_inputs

T = 4


each_variant = pytest.mark.parametrize("name", VARIANTS)


def _leave(activation: Tensor, hook: Any) -> None:
    """A hook that changes nothing, but makes the explicit path run."""


@each_variant
def test_hooked_and_fast_path_agree(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    fast = model(x, n_loops=T)
    hooked = model.run_with_hooks(x, n_loops=T, fwd_hooks=[(lambda name: True, _leave)])
    recorded, _ = model.run_with_cache(x, n_loops=T)
    torch.testing.assert_close(hooked, fast, atol=1e-5, rtol=0)
    torch.testing.assert_close(recorded, fast, atol=1e-5, rtol=0)


@each_variant
def test_gradients_of_hooked_and_fast_path_agree(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    model(x, n_loops=T).square().sum().backward()
    fast = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    hooks = [(lambda name: True, _leave)]
    model.run_with_hooks(x, n_loops=T, fwd_hooks=hooks).square().sum().backward()
    for n, p in model.named_parameters():
        if fast[n] is None:
            assert p.grad is None
        else:
            assert p.grad is not None
            torch.testing.assert_close(p.grad, fast[n], atol=1e-3, rtol=1e-3)


@each_variant
def test_protocol_methods_run_the_same_loops(name: str) -> None:
    model = build(name)
    assert isinstance(model, LoopedModel)
    x = some_inputs(model)
    states = model(x, n_loops=T, return_type="states")
    run = bind(model, x)
    h = run.h0
    for loop in range(T):
        torch.testing.assert_close(h, states[loop], atol=1e-5, rtol=0)
        if name not in ("abacus on q and k", "abacus window"):
            stepped = model.step(h, run.e)
            torch.testing.assert_close(stepped, states[loop + 1], atol=1e-5, rtol=0)
        h = run.step(h)
    torch.testing.assert_close(run.readout(h), model(x, n_loops=T), atol=1e-5, rtol=0)
    all_logits = model(x, n_loops=T, return_type="all_logits")
    assert all_logits.shape == (T + 1, 3, 7, model.config.d_vocab_out)
    torch.testing.assert_close(all_logits[2], run.readout(states[2]), atol=1e-5, rtol=0)


@each_variant
def test_a_run_can_stop_and_go_on(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    full = model(x, n_loops=T)
    middle = model(x, n_loops=T, stop_at_loop=2, return_type="state")
    rest = model(x, n_loops=T, start_at_loop=2, state=middle)
    torch.testing.assert_close(rest, full, atol=1e-5, rtol=0)
    states = model(x, n_loops=T, start_at_loop=2, state=middle, return_type="states")
    assert len(states) == T - 2 + 1


@each_variant
def test_batch_equals_one_by_one(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    one_by_one = torch.cat([model(row[None], n_loops=T) for row in x])
    torch.testing.assert_close(model(x, n_loops=T), one_by_one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("no norm, both ways",)])
def test_what_comes_later_changes_nothing_before_it(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    if model.config.initial_state == "noise":
        return  # noise is drawn for a length
    short = model(x[:, :4], n_loops=T)
    torch.testing.assert_close(model(x, n_loops=T)[:, :4], short, atol=1e-5, rtol=0)


@each_variant
def test_selected_examples_run_as_before(name: str) -> None:
    model = build(name)
    x = some_inputs(model)
    run, rows = bind(model, x), torch.tensor([2, 0])
    some = run.select(rows)
    torch.testing.assert_close(some.step(some.h0), run.step(run.h0)[rows], atol=1e-6, rtol=0)


def test_a_hook_changes_its_loop_and_no_other() -> None:
    model = build("demo")
    x = some_inputs(model)
    clean = model(x, n_loops=T, return_type="states")

    def zero(activation: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(activation)

    hooks = [("loops.2.blocks.0.hook_mlp_out", zero)]
    states = model.run_with_hooks(x, n_loops=T, fwd_hooks=hooks, return_type="states")
    torch.testing.assert_close(states[:3], clean[:3], atol=1e-6, rtol=0)
    assert not torch.allclose(states[3], clean[3], atol=1e-2)
    after = model(x, n_loops=T, start_at_loop=3, state=states[3])
    torch.testing.assert_close(after, model.readout(states[4]), atol=1e-5, rtol=0)
    torch.testing.assert_close(model(x, n_loops=T), model.readout(clean[4]), atol=1e-5, rtol=0)


@each_variant
def test_hooks_that_write_in_place_touch_nothing_else(name: str) -> None:
    model = build(name)
    x = some_inputs(model)

    def spoil(activation: Tensor, hook: Any) -> Tensor:
        activation[:] = 7.0
        return activation

    first = "loops.1.hook_state_pre"
    with torch.no_grad():
        clean = model(x, n_loops=T, return_type="states")
        states = model.run_with_hooks(
            x, n_loops=T, fwd_hooks=[(first, spoil)], return_type="states"
        )
    torch.testing.assert_close(states[:2], clean[:2], atol=1e-6, rtol=0)
    restart = model(x, n_loops=T, start_at_loop=1, state=torch.full_like(clean[1], 7.0))
    torch.testing.assert_close(model.readout(states[-1]), restart, atol=1e-5, rtol=0)


def test_permanent_hooks_stay_until_reset() -> None:
    model = build("plain", n_loops=2)
    x = some_inputs(model)
    clean = model(x)
    model.add_hook("loops.1.blocks.0.hook_attn_out", lambda a, hook: a * 0)
    assert not torch.allclose(model(x), clean)
    model.reset_hooks()
    torch.testing.assert_close(model(x), clean)


def test_backward_hooks_see_gradients() -> None:
    model = build("plain")
    x = some_inputs(model)
    seen: list[Tensor] = []
    name = model.site("hook_resid_post", loop=0, n_loops=T)
    with model.hooks(bwd_hooks=[(name, lambda g, hook: seen.append(g))], n_loops=T):
        model(x, n_loops=T).sum().backward()
    assert [g.shape for g in seen] == [(3, 7, 16)]
    assert seen[0].abs().sum() > 0


def test_silent_and_unknown_hooks_are_errors() -> None:
    model = build("plain")
    x = some_inputs(model)
    with pytest.raises(HookError, match=r"^hook"):
        model.run_with_hooks(
            x, n_loops=T, stop_at_loop=2, fwd_hooks=[("loops.3.blocks.0.hook_resid_post", _leave)]
        )
    with pytest.raises(HookError, match=r"'blocks\.0\.hook_resid_post'"):
        model.run_with_hooks(x, n_loops=T, fwd_hooks=[("blocks.0.hook_resid_pots", _leave)])
    with pytest.raises(HookError, match=r"blocks\.3"):
        model.run_with_hooks(x, n_loops=T, fwd_hooks=[("blocks.4.hook_resid_post", _leave)])
    with pytest.raises(HookError, match=r"^names_filter:"):
        model.run_with_hooks(x, n_loops=T, fwd_hooks=[(lambda name: False, _leave)])
    assert not any(point.has_hooks() for point in model.hook_points())


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (torch.zeros(2, 3), {}, "integers"),
        ([[1, 2]], {}, "tokenizer"),
        ([[1, 2]], {"n_loops": torch.tensor([3])}, "tokenizer"),
        (torch.zeros(3, dtype=torch.long), {}, r"\[batch, pos\]"),
        (torch.zeros(2, 3, dtype=torch.bool), {}, "integers"),
        (torch.full((2, 3), 6), {}, "^inputs: .*6 to 6"),
        (torch.zeros(2, 0, dtype=torch.long), {}, "integers"),
        (torch.zeros(2, 3, dtype=torch.long), {"n_loops": 0}, "^n_loops: .*got 0"),
        (torch.zeros(2, 3, dtype=torch.long), {"n_loops": 2.0}, r"^n_loops: .*2\.0"),
        (torch.zeros(2, 3, dtype=torch.long), {"n_loops": 2, "stop_at_loop": 3}, "^stop_at_loop:"),
        (torch.zeros(2, 3, dtype=torch.long), {"n_loops": 2, "start_at_loop": 1}, "^state:"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            {"n_loops": 2, "start_at_loop": 1, "state": torch.zeros(2, 4, 16)},
            r"^state: .*\[2, 3, 16\]",
        ),
        (torch.zeros(2, 3, dtype=torch.long), {"return_type": "logit"}, "^return_type: .*'logits'"),
        (torch.zeros(2, 3, dtype=torch.long), {"position_offset": 1}, "^position_offset:"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            {"position_offset": torch.tensor([1, 1])},
            "^position_offset:",
        ),
    ],
)
def test_bad_input_is_refused(inputs: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build("plain")(inputs, **options)


def test_sequences_longer_than_learned_positions_are_refused() -> None:
    model = build("surround")
    with pytest.raises(InputError, match="n_ctx=20"):
        model(some_inputs(model, n_pos=21))
    abacus = build("abacus on input")
    with pytest.raises(InputError, match="abacus positions"):
        abacus(torch.ones(1, 5, dtype=torch.long), position_offset=29)


def test_step_without_its_context_is_refused_where_it_needs_one() -> None:
    model = build("abacus on q and k")
    e = model.embed(some_inputs(model))
    with pytest.raises(InputError, match="bind"):
        model.step(e, e)


def test_abacus_offset_moves_the_positions() -> None:
    model = build("abacus on q and k")
    x = torch.tensor([[0, 1, 2, 0, 3]])
    assert not torch.allclose(model(x, n_loops=2), model(x, n_loops=2, position_offset=5))


@pytest.mark.parametrize("name", ["abacus on q and k", "abacus on input"])
@torch.no_grad()
def test_an_offset_for_each_example_is_each_example_with_its_own(name: str) -> None:
    model = build(name, n_prelude=1)
    x, offsets = some_inputs(model, batch=4), torch.tensor([0, 7, 3, 7])
    offset: dict[str, Any] = {"n_loops": 2, "position_offset": offsets}
    each = [model(row[None], n_loops=2, position_offset=int(k)) for row, k in zip(x, offsets)]
    expected = torch.cat(each)
    logits, cache = model.run_with_cache(x, **offset)
    bound = model.bind(x, position_offset=offsets)
    rows = torch.tensor([3, 1])
    state = dict(bound.select(rows).run(2))[2]
    result = {
        "fast": model(x, **offset),
        "cached": logits,
        "hooked": model.run_with_hooks(x, fwd_hooks=[("hook_embed", lambda e, hook: e)], **offset),
        "bound": bound.readout(dict(bound.run(2))[2]),
    }
    for how, values in result.items():
        torch.testing.assert_close(values, expected, msg=lambda text, how=how: f"{how}: {text}")
    torch.testing.assert_close(model.readout(state), expected[rows])
    torch.testing.assert_close(model.embed(x, position_offset=offsets), bound.e)
    assert not torch.allclose(model(x, n_loops=2), expected)
    site = "loops.1.blocks.0.hook_resid_post"
    single = model.run_with_cache(x[1:2], n_loops=2, position_offset=7)[1]
    torch.testing.assert_close(cache[site][1:2], single[site])


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (-1, "^position_offset: .*-1"),
        (torch.tensor([1, -2, 0]), "^position_offset: .*-2"),
        (torch.tensor([1, 2]), r"^position_offset: .*\[2\]"),
        (torch.tensor([1, 2, 30]), "^abacus positions: .*n_ctx=30"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_offsets_that_are_none_are_refused(offset: Any, message: str) -> None:
    model = build("abacus on input")
    tokens = torch.ones(3, 5, dtype=torch.long)
    with pytest.raises(InputError, match=message):
        model(tokens, position_offset=offset)
    for wrong in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor(1)):
        with pytest.raises(InputError, match=r"^position_offset:"):
            model.check_inputs(tokens, position_offset=wrong)


def test_same_seed_same_weights_and_no_global_seeding() -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    one, two, other = build("plain"), build("plain"), build("plain", seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(one.W_E, other.W_E)


def test_no_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generator would not be put back: the user's next random numbers would be others."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    build("plain", seed=3)
    assert seeds == []
    torch.manual_seed(3)
    assert seeds == [3]


def test_weights_are_drawn_where_they_are_put() -> None:
    with torch.device("meta"):
        assert build("plain").W_E.device.type == "meta"


def test_each_weight_is_held_once() -> None:
    model = build("demo")
    model(some_inputs(model), n_loops=9)
    pointers = [x.data_ptr() for x in model.state_dict().values()]
    assert len(pointers) == len(set(pointers))
    assert sum(p.numel() for p in model.parameters()) == sum(
        x.numel() for x in model.state_dict().values()
    )


def test_initial_weights_of_a_given_size() -> None:
    model = build("plain", init_std=0.02, d_model=64)
    assert model.W_E.std().item() == pytest.approx(0.02, rel=0.2)
    assert model.blocks[0].attn.b_O.abs().sum() == 0


def test_initial_positions_of_a_given_size() -> None:
    plain, small, large = (
        build("plain", positions="absolute", n_ctx=64, d_model=64, init_std=every, position_std=own)
        for every, own in ((None, None), (0.02, None), (None, 1.0))
    )
    sizes = [model.W_pos.std().item() for model in (plain, small, large)]
    assert sizes == pytest.approx([0.1, 0.02, 1.0], rel=0.1)
    # No other weight depends on it.
    differ = {k for k, x in plain.state_dict().items() if not x.equal(large.state_dict()[k])}
    assert differ == {"position_embedding.weight"}


def test_double_precision_narrows_the_gap_between_the_paths() -> None:
    model = build("demo").double()
    x = some_inputs(model)
    hooked = model.run_with_hooks(x, n_loops=T, fwd_hooks=[(lambda name: True, _leave)])
    torch.testing.assert_close(hooked, model(x, n_loops=T), atol=1e-12, rtol=0)


def test_one_loop_and_many_layers_is_an_ordinary_transformer() -> None:
    looped = build("plain", n_layers=1, n_loops=3)
    deep = build("plain", n_layers=3, n_loops=1)
    weights = looped.state_dict()
    copied = {
        k: weights[
            k.replace(f"block.{k.split('.')[1]}", "block.0") if k.startswith("block.") else k
        ]
        for k in deep.state_dict()
    }
    deep.load_state_dict(copied)
    x = some_inputs(looped)
    torch.testing.assert_close(deep(x), looped(x), atol=1e-6, rtol=0)


def test_inputs_checked_elsewhere_can_be_bound_without_a_look() -> None:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=5,
        d_vocab_out=2,
        positions="abacus",
        n_ctx=6,
        digit_tokens=(0, 1),
    )
    model, tokens = LoopedTransformer(config, seed=0), torch.tensor([[0, 1, 2, 1]])
    model.check_inputs(tokens, position_offset=3)
    seen = model.bind(tokens, position_offset=3).e
    assert torch.equal(model.bind(tokens, position_offset=3, checked=True).e, seen)
    for wrong, offset in ((tokens + 3, 0), (tokens.float(), 0), (tokens, 4), (tokens, -1)):
        with pytest.raises(InputError):
            model.check_inputs(wrong, position_offset=offset)
