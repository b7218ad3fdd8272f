"""Every adapter: the native forward's numbers, and our addresses, hooks, caches and protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.adapters import adapt, load_published
from loopinterp.core.errors import CheckpointError, HookError, InputError
from loopinterp.models import (
    GateAbove,
    LoopedCache,
    LoopedModel,
    LoopedTransformer,
    LoopedTransformerConfig,
    ResidualBelow,
    bind,
    describe_model,
    generate,
    generate_with_cache,
    iterate,
    run_rules,
    run_until,
)
from loopinterp.models.protocol import takes_loop
from tests.adapters.kinds import KINDS, adapted, native, tokens_of

CAUSAL = [name for name in KINDS if adapted(name).config.causal]
GATED = [name for name in KINDS if KINDS[name].halts]

every = pytest.mark.parametrize("name", list(KINDS))


def close(a: Tensor, b: Tensor) -> bool:
    """Equal to 1e-5, in float32."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5)


# The numbers


@every
@pytest.mark.parametrize("more", [-1, 0, 3])
def test_logits_are_the_native_forwards_at_its_own_and_at_other_loop_counts(
    name: str, more: int
) -> None:
    model, tokens = adapted(name), tokens_of(name)
    n_loops = model.n_loops + more
    expected = native(name, tokens, n_loops)
    assert close(model(tokens, n_loops=n_loops), expected)
    logits, _ = model.run_with_cache(tokens, n_loops=n_loops)  # every hook listens
    assert close(logits, expected)
    assert (model(tokens, n_loops=n_loops + 1) - expected).abs().max() > 1e-3  # loops matter


@every
def test_a_run_that_is_told_nothing_makes_the_models_own_loops(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    assert torch.equal(model(tokens), model(tokens, n_loops=model.config.n_loops))


@every
def test_an_adapter_is_found_by_what_the_model_is_and_shares_its_weights(name: str) -> None:
    kind = KINDS[name]
    published = kind.build()
    model = adapt(published)
    assert type(model) is kind.adapter
    assert {id(x) for x in model.parameters()} == {id(x) for x in published.parameters()}
    assert isinstance(model, LoopedModel)


@every
def test_an_example_alone_gives_what_it_gives_in_a_batch(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    joint = model(tokens)
    for k in range(len(tokens)):
        assert close(model(tokens[k : k + 1]), joint[k : k + 1])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_later_token_changes_nothing_before_it(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % model.config.d_vocab
    before, after = model(tokens), model(other)
    assert close(before[:, :4], after[:, :4])
    assert not close(before[:, 4:], after[:, 4:])


@every
def test_half_precision_gives_half_precision(name: str) -> None:
    model, tokens = adapt(KINDS[name].build().bfloat16()), tokens_of(name)
    expected = adapted(name)(tokens, n_loops=2)
    logits = model(tokens, n_loops=2).float()
    assert (logits - expected).abs().mean() < 0.1 * expected.abs().mean()


@every
def test_recording_its_norms_leaves_a_run_in_half_precision_as_it_is(name: str) -> None:
    model, tokens = adapt(KINDS[name].build().bfloat16()), tokens_of(name)
    norms = [x for x in model.addresses().addresses if ".ln" in x or x.startswith("ln")]
    logits, cache = model.run_with_cache(tokens, names_filter=norms)
    assert torch.equal(logits, model(tokens)) and len(cache) == len(norms) > 0


# Hooks


@every
def test_each_hook_fires_once_per_loop_with_the_shape_it_promises(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    fired: dict[str, int] = {}

    def count(x: Tensor, hook: Any) -> None:
        fired[hook.name] = fired.get(hook.name, 0) + 1
        assert x.shape == model.addresses(2).addresses[hook.name].shape(*tokens.shape), hook.name

    names = list(model.addresses(2).addresses)
    model.run_with_hooks(tokens, n_loops=2, fwd_hooks=[(names, count)])
    assert fired == dict.fromkeys(names, 1)
    assert {address.loop for address in model.addresses(2).addresses.values()} >= {0, 1}


@every
@pytest.mark.parametrize("loop", [0, 1])
def test_a_change_at_one_loop_is_that_of_the_native_forward_at_that_loop(
    name: str, loop: int
) -> None:
    kind, model, tokens = KINDS[name], adapted(name), tokens_of(name)
    path, component, layer, before, per_loop = kind.written
    n_loops, change = model.n_loops, torch.linspace(-1, 1, model.site_map.d_model)
    module, calls = model.published.get_submodule(path), 0

    def edit(module: Any, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output + change if calls - 1 == loop * per_loop + before else output

    handle = module.register_forward_hook(edit)
    try:
        expected = native(name, tokens, n_loops)
    finally:
        handle.remove()
    assert calls == (kind.runs or n_loops) * per_loop
    site = model.site(component, loop=loop, layer=layer)
    hooks = [(site, lambda x, hook: x + change)]
    assert close(model.run_with_hooks(tokens, fwd_hooks=hooks), expected)
    assert not close(expected, native(name, tokens, n_loops))
    clean = model(tokens, return_type="states")
    states = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="states")
    changed = [not torch.equal(a, b) for a, b in zip(states, clean)]
    assert changed == [False] * (loop + 1) + [True] * (n_loops - loop)


@every
def test_putting_back_what_was_there_changes_nothing(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    logits, cache = model.run_with_cache(tokens, n_loops=2)
    for component in sorted(model.addresses(2).components):
        sites = [x for x in cache if x.endswith(f".{component}")]
        put = [(site, lambda x, hook: cache[hook.name].clone()) for site in sites]
        assert close(model.run_with_hooks(tokens, n_loops=2, fwd_hooks=put), logits), component


@every
def test_every_activation_that_is_no_reading_is_part_of_the_computation(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    logits = model(tokens, n_loops=2)
    for component in sorted(model.addresses(2).components):
        if component == KINDS[name].halts:
            continue
        there = [x for x in model.addresses(2).at if x[3] == component and x[1] == 0]
        section, loop, layer, _ = there[0] if there else (None, None, None, None)
        address = model.addresses(2).at[section, loop, layer, component]  # type: ignore[index]

        def other(x: Tensor, hook: Any) -> Tensor:
            noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
            return x * (1 + noise) + 0.1 * noise

        hooks = [(address.name, other)]
        result = model.run_with_hooks(tokens, n_loops=2, fwd_hooks=hooks)
        assert (result - logits).abs().max() > 1e-4, component


@every
def test_names_and_aliases_are_of_one_place(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    _, cache = model.run_with_cache(tokens, n_loops=3)
    sizes = model.site_map
    flat = f"blocks.{sizes.n_prelude + 2 * sizes.n_layers + sizes.n_layers - 1}.hook_resid_post"
    assert model.site("resid_post", loop=2, layer=-1, n_loops=3) == flat
    assert cache[f"loops.2.blocks.{sizes.n_layers - 1}.hook_resid_post"] is cache[flat]
    for layer, other in enumerate(sizes.layer_names):
        inner = cache[f"loops.1.{other}.hook_resid_post"]
        assert inner is cache[f"loops.1.blocks.{layer}.hook_resid_post"]
    for section, n_layers in (("prelude", sizes.n_prelude), ("coda", sizes.n_coda)):
        names = model.site("resid_post", section=section, layer=slice(None), n_loops=3)
        assert len(names) == n_layers and {*names} <= {*cache}
    with pytest.raises(HookError):
        model.site("resid_post", loop=3, layer=0, n_loops=3)


@every
def test_a_hook_that_is_nowhere_is_refused(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    with pytest.raises(HookError):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_nothing", lambda x, hook: x)])
    with pytest.raises(HookError, match="larger n_loops"):
        model.run_with_cache(tokens, n_loops=2, names_filter="loops.2.hook_state_post")


# Caches


@every
def test_the_memory_of_a_cache_is_known_before_it_is_made(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    batch, n_pos = tokens.shape
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"names_filter": "resid_post"},
        {"names_filter": ["hook_state_post", "pattern"], "loops": [0, -1]},
        {"names_filter": "attn_out", "dtype": torch.float64},
    )
    for options in ways:
        _, cache = model.run_with_cache(tokens, n_loops=3, **options)
        assert model.cache_nbytes(batch, n_pos, n_loops=3, **options) == cache.nbytes
    selection: dict[str, Any] = {"names_filter": ["resid_mid", "z", "attn_scores"]}
    _, cache = model.run_with_cache(tokens, n_loops=2, pos_slice=slice(1, 3), **selection)
    assert model.cache_nbytes(batch, n_pos, n_loops=2, n_kept=2, **selection) == cache.nbytes


@every
def test_filters_keep_what_they_name(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    _, full = model.run_with_cache(tokens, n_loops=3)
    chosen: dict[str, Any] = {"names_filter": "hook_resid_post", "loops": slice(1, None)}
    _, cache = model.run_with_cache(tokens, n_loops=3, pos_slice=[0, -1], **chosen)
    assert len(cache) == 2 * model.site_map.n_layers
    for key in cache:
        assert close(cache[key], full[key][:, [0, -1]])
    stacked = full.stack("resid_post", layer=slice(None))
    assert stacked.shape[:2] == (3, model.site_map.n_layers)
    states = model(tokens, n_loops=3, return_type="states")
    assert close(full.stack("hook_state_post"), states[1:])
    assert close(full.stack("hook_state_pre"), states[:-1])


@every
def test_a_cache_is_read_back_for_its_own_model_only(name: str, tmp_path: Path) -> None:
    model, tokens = adapted(name), tokens_of(name)
    _, cache = model.run_with_cache(tokens, n_loops=2)
    folder = cache.save(tmp_path / "cache", max_shard_bytes=200_000)
    again = LoopedCache.load(folder, model)
    assert {*again} == {*cache} and all(torch.equal(again[k], cache[k]) for k in cache)
    other = LoopedTransformer(
        LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
    )
    with pytest.raises(CheckpointError):
        LoopedCache.load(folder, other)
    with pytest.raises(InputError):  # what needs weights of ours says so
        cache.decompose_resid()


# Gradients


@every
def test_gradients_reach_the_first_loop(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    _, cache = model.run_with_cache(
        tokens,
        n_loops=model.n_loops,
        names_filter=["hook_state_post", "hook_attn_out", "mlp.hook_post"],
        incl_bwd=True,
        loss_fn=lambda logits: logits.square().mean(),
    )
    gradients = {key: x for key, x in cache.items() if key.endswith("_grad")}
    first = [k for k in gradients if model.addresses().addresses[k[:-5]].loop == 0]
    assert first and all(gradients[k].abs().sum() > 0 for k in first)


@every
def test_the_gradient_of_the_first_loop_is_the_slope_of_the_native_forward(name: str) -> None:
    kind, tokens = KINDS[name], tokens_of(name)
    model = adapted(name)
    path, component, layer, before, _ = kind.written
    n_loops = model.n_loops
    way = torch.linspace(-1, 1, model.site_map.d_model)
    site = model.site(component, loop=0, layer=layer)
    _, cache = model.run_with_cache(
        tokens,
        names_filter=site,
        incl_bwd=True,
        loss_fn=lambda logits: logits.square().mean(),
    )
    slope = float((cache[f"{site}_grad"] * way).sum())
    module = model.published.get_submodule(path)

    def loss(step: float) -> float:
        calls = 0

        def edit(module: Any, inputs: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return output + step * way if calls - 1 == before else output

        handle = module.register_forward_hook(edit)
        try:
            return float(native(name, tokens, n_loops).detach().double().square().mean())
        finally:
            handle.remove()

    step = 1e-2
    assert slope == pytest.approx((loss(step) - loss(-step)) / (2 * step), rel=0.02, abs=1e-5)


# The protocol


@every
def test_the_four_methods_are_the_run(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    states = model(tokens, n_loops=3, return_type="states")
    logits = model(tokens, n_loops=3, return_type="all_logits")
    e = model.embed(tokens)
    h = model.initial_state(e)
    for loop, state in iterate(model, tokens, 3):
        assert close(state, states[loop]) and close(h, states[loop])
        assert close(model.readout(state), logits[loop])
        index: dict[str, Any] = {"loop": loop} if takes_loop(model) else {}
        h = model.step(h, e, **index)
    assert close(model.readout(states), logits)
    some = bind(model, tokens).select(slice(1, 2))
    assert close(some.step(some.h0, 0), states[1][1:2])


@every
def test_a_run_goes_on_from_where_another_stopped(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    state = model(tokens, n_loops=4, stop_at_loop=2, return_type="state")
    logits = model(tokens, n_loops=4, start_at_loop=2, state=state)
    assert close(logits, model(tokens, n_loops=4))
    with pytest.raises(InputError, match="state"):
        model(tokens, n_loops=4, start_at_loop=1, state=state[..., :-1])


@every
def test_each_example_may_have_its_own_number_of_loops(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    ends = torch.tensor([1, 3, 2])
    logits = model(tokens, n_loops=ends)
    for k, end in enumerate(ends.tolist()):
        assert close(logits[k], model(tokens, n_loops=end)[k])


@every
def test_what_is_wrong_is_refused_with_the_fix(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    with pytest.raises(InputError, match="tokenizer"):
        model(tokens + model.config.d_vocab)
    with pytest.raises(InputError, match="position_offset"):
        model(tokens, position_offset=1)
    with pytest.raises(InputError, match="n_loops"):
        model(tokens, n_loops=0)


def test_a_model_is_loaded_from_a_folder_by_its_name(tmp_path: Path) -> None:
    model, tokens = adapted("hrm_text"), tokens_of("hrm_text")
    model.published.save_pretrained(tmp_path)
    assert torch.equal(load_published(str(tmp_path))(tokens), model(tokens))
    assert load_published(str(tmp_path), dtype="float64").dtype == torch.float64


def test_a_cache_is_read_back_for_its_model_from_another_folder(tmp_path: Path) -> None:
    model, tokens = adapted("hrm_text"), tokens_of("hrm_text")
    _, cache = model.run_with_cache(tokens, n_loops=1, names_filter="resid_post")
    folder = cache.save(tmp_path / "cache")
    model.published.save_pretrained(tmp_path / "model")
    again = load_published(str(tmp_path / "model"))
    assert {*LoopedCache.load(folder, again)} == {*cache}
    other = adapt(KINDS["hrm_text"].build())
    other.config.published["hidden_act"] = "gelu"  # type: ignore[index]
    with pytest.raises(CheckpointError):
        LoopedCache.load(folder, other)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("wrong", [torch.nn.Linear(2, 2), None, "ouro", torch.nn.ModuleDict()])
def test_what_no_adapter_knows_is_refused_by_a_list_of_what_they_know(wrong: Any) -> None:
    with pytest.raises(InputError, match="Ouro, Huginn"):
        adapt(wrong)


@every
def test_an_option_that_its_adapter_does_not_have_is_refused(name: str) -> None:
    options = {"huginn": "seed", "retrofitted": "seed", "hrm_text": "n_prefix", "albert": "pad"}
    known = options.get(name.partition("-")[0], "(none)")
    with pytest.raises(InputError) as refused:
        adapt(KINDS[name].build(), sed=3)
    assert known in refused.value.expected and refused.value.given == "'sed'"


@every
def test_a_model_is_described_by_its_configuration_and_its_weights(name: str) -> None:
    model = adapted(name)
    described = describe_model(model)
    assert isinstance(described, dict)
    assert json.loads(json.dumps(described)) == described
    assert described["architecture"] == type(model.published).__name__
    other = adapt(KINDS[name].build())
    assert describe_model(other) == described
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    assert describe_model(other)["weights_sha256"] != described["weights_sha256"]  # type: ignore[index]
    assert len(repr(model)) < 200 and "n_loops" in model._repr_html_()


# Generation


@pytest.mark.parametrize("name", CAUSAL)
def test_decoding_with_a_slot_for_each_loop_and_layer_is_running_the_whole_again(name: str) -> None:
    model = adapted(name)
    prompts = [[1, 2, 3], [7], [4, 5]]
    for n_loops in (2, torch.tensor([3, 1, 2])):
        how: dict[str, Any] = {"n_loops": n_loops, "max_new_tokens": 3}
        cached = generate(model, prompts, **how)
        assert torch.equal(cached, generate(model, prompts, use_cache=False, **how))
    single = generate(model, [prompts[0]], n_loops=2, max_new_tokens=3)
    by_hand = torch.tensor([prompts[0]])
    for _ in range(3):
        token = model(by_hand, n_loops=2)[:, -1].argmax(-1)
        by_hand = torch.cat((by_hand, token[:, None]), 1)
    assert torch.equal(single, by_hand[:, 3:])


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_hooks_and_cache_of_a_generation_are_those_of_the_whole(name: str) -> None:
    model, prompts = adapted(name), [[1, 2, 3], [7], [4, 5]]
    sites = model.addresses(2).addresses.values()
    hooked = next(a.name for a in sites if a.loop == 1 and a.kind == "residual")
    hooks = [(hooked, lambda x, hook: 2 * x), (f"tokens.2.{hooked}", lambda x, hook: -x)]
    options: dict[str, Any] = {"n_loops": 2, "max_new_tokens": 3, "fwd_hooks": hooks}
    new, kept = generate_with_cache(model, prompts, **options)
    again, recomputed = generate_with_cache(model, prompts, use_cache=False, **options)
    assert torch.equal(new, again) and set(kept) == set(recomputed)
    for site, values in recomputed.items():
        torch.testing.assert_close(kept[site], values, atol=1e-5, rtol=1e-5)
    # Without the hook of one token, the cache is that of one run of the whole sequence.
    options["fwd_hooks"] = hooks[:1]
    new, kept = generate_with_cache(model, prompts[:1], **options)
    tokens = torch.cat((torch.tensor(prompts[:1]), new), 1)[:, :-1]
    with model.hooks(hooks[:1], n_loops=2):
        whole = model.run_with_cache(tokens, n_loops=2)[1]
    for address in sites:
        if address.axes[-1] != "key":
            theirs = whole[address.name].narrow(address.pos_axis or 0, 2, 3)
            torch.testing.assert_close(kept[address.name], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_padded_prompts_are_continued_as_single_ones(name: str, left: bool) -> None:
    model, rows = adapted(name), ([5, 1], [3, 1, 2, 4])
    padded = [[0, 0, 5, 1] if left else [5, 1, 0, 0], rows[1]]
    tokens = torch.tensor(padded)
    options: dict[str, Any] = {"n_loops": 2, "max_new_tokens": 3}
    new, kept = generate_with_cache(model, tokens, attention_mask=(tokens > 0).long(), **options)
    for row, prompt in enumerate(rows):
        single, alone = generate_with_cache(model, [prompt], **options)
        assert torch.equal(new[row], single[0])
        states, theirs = kept.stack("hook_state_post"), alone.stack("hook_state_post")
        torch.testing.assert_close(states[:, row], theirs[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(set(KINDS) - set(CAUSAL)))
def test_what_sees_the_whole_input_does_not_go_on_with_it(name: str) -> None:
    with pytest.raises(InputError, match="causal"):
        generate(adapted(name), [[1, 2]], n_loops=1, max_new_tokens=1)


# Gates and heads


@pytest.mark.parametrize("name", GATED)
def test_a_gate_is_cached_and_stops_a_run_at_its_cumulative_probability(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    n_loops = 5
    states = model(tokens, n_loops=n_loops, return_type="states")[1:]
    stop = torch.stack([model.exit_probability(h) for h in states])  # [loop, batch, pos]
    assert close(model.exit_probability(states), stop)
    component = KINDS[name].halts
    assert component is not None
    _, cache = model.run_with_cache(tokens, n_loops=n_loops, names_filter=component)
    assert len(cache) == n_loops
    if component == "hook_exit_gate":
        assert torch.equal(cache.stack(component).squeeze(-1), stop)
    stopped, gate = 1 - (1 - stop).cumprod(0), model.exit_probability
    for threshold in (0.3, 0.6, 0.9):
        enough = (stopped >= threshold).all(-1)  # at every position
        expected = [
            next((t + 1 for t in range(n_loops) if enough[t, k]), n_loops)
            for k in range(len(tokens))
        ]
        rule = GateAbove(gate, threshold, cumulated=True)
        single = run_until(model, tokens, rule, max_loops=n_loops)
        assert single.loop.tolist() == expected
    rules = [GateAbove(gate, 0.3, cumulated=True), ResidualBelow(0.5), GateAbove(gate, 0.6)]
    joint = run_rules(model, tokens, rules, max_loops=n_loops)
    for rule, loops in zip(rules, joint):
        assert torch.equal(run_until(model, tokens, rule, max_loops=n_loops).loop, loops)


@pytest.mark.parametrize("name", sorted(set(KINDS) - set(GATED)))
def test_a_model_without_a_gate_says_so(name: str) -> None:
    model = adapted(name)
    with pytest.raises(InputError, match="ResidualBelow"):
        run_until(model, tokens_of(name), GateAbove(model.exit_probability), max_loops=2)
