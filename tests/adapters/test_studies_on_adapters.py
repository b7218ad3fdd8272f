"""Every study that needs no task of its own runs on every adapter, with no special case in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp import dynamics, edges, interventions, lenses, pages, probing
from loopinterp.core.errors import InputError
from loopinterp.edges.unrolled_graph import layout_of
from loopinterp.models import ResidualBelow, iterate, run_until
from loopinterp.models.protocol import takes_loop
from loopinterp.tasks import Batch
from tests.adapters.kinds import FAMILIES, KINDS, adapted, every, tokens_of

STUDIES: dict[str, Callable[[Any, Any], Any]] = {
    "convergence": lambda m, d: dynamics.convergence_study(
        m, d, n_loops=12, limit_steps=2, n_spectral=0
    ),
    "extrapolation": lambda m, d: dynamics.extrapolation_study(m, d, n_loops=4),
    "geometry": lambda m, d: dynamics.geometry_study(m, d, n_loops=12, limit_steps=2),
    "reachability": lambda m, d: dynamics.reachability_study(
        m, d, n_loops=4, kicks=(0.1,), n_noise=1, n_others=1, n_draws=1
    ),
    "basin_map": lambda m, d: dynamics.basin_map(m, d, n_loops=3, points=3),
    "input_dependence": lambda m, d: dynamics.input_dependence_study(
        m, d, n_loops=3, n_sensitivity=1, n_probes=1
    ),
    "local_stability": lambda m, d: dynamics.local_stability_study(
        m,
        d[:1],
        n_loops=12,
        k=1,
        tol=0.3,
        max_vectors=4,
        max_products=4,
        growth_loops=1,
        lyapunov_loops=8,
    ),
    "attention_stabilisation": lambda m, d: dynamics.attention_stabilisation_study(m, d, n_loops=3),
    "attention": lambda m, d: lenses.attention_study(m, d, n_loops=2),
    "explore": lambda m, d: pages.explore(m, d, examples=3),
    "probes": lambda m, d: probing.probe_study(
        m, d.inputs, {"token": d.inputs}, n_loops=2, sites=("hook_state_post", "resid_mid")
    ),
    "ablation": lambda m, d: interventions.ablation_study(m, d[:2], kinds=("zero",), when=("all",)),
}


def _batch(name: str) -> Batch:
    tokens = tokens_of(name, batch=4, n_pos=5)
    model = adapted(name)
    n_loops = torch.full((4,), model.n_loops)
    targets = model(tokens).argmax(-1)
    targets[0] = (targets[0] + 1) % model.config.d_vocab  # one is wrong
    return Batch(tokens, targets, torch.full((4,), 5), n_loops)


ONE_MAP = {"reachability", "basin_map", "input_dependence", "local_stability"}
"""Studies of a step that is the same at every loop."""


BY_TURNS = [
    (family[k % len(family)], study)
    for k, study in enumerate(sorted(STUDIES))
    for family in FAMILIES
]
"""Each study on every family, and on its members by turns: no study knows which it has."""


def test_every_adapter_has_its_turn() -> None:
    assert {name for name, _ in BY_TURNS} | {"ouro-grouped"} == {*KINDS}


@pytest.mark.parametrize(("name", "study"), BY_TURNS)
def test_a_study_runs(name: str, study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopinterp.dynamics.local_stability.LIMIT_LOOPS", 8)  # random: no limit
    if takes_loop(adapted(name)) and study in ONE_MAP:
        with pytest.raises(InputError, match="one map"):
            STUDIES[study](adapted(name), _batch(name))
        return
    result = STUDIES[study](adapted(name), _batch(name))
    assert result.data.sizes


def _metric(logits: Tensor) -> Tensor:
    return logits[..., 0].mean(-1)


PATCHED = [(name, part) for name in KINDS for part in ("state", "resid_pre", "z")]
PATCHED += [("ouro-grouped", "k"), ("huginn", "pattern")]


@pytest.mark.parametrize(("name", "component"), PATCHED)
def test_a_patching_sweep_is_what_hooks_do(name: str, component: str) -> None:
    model, base, source = adapted(name), tokens_of(name, 2, 3), tokens_of(name, 2, 3, seed=1)
    n_loops, loop = 2, 1
    ends = model(base, n_loops=n_loops), model(source, n_loops=n_loops)
    result = interventions.patching_sweep(
        model, base, source, n_loops=n_loops, component=component, loops=[loop], metric=_metric
    )
    states = model(source, n_loops=n_loops, return_type="states")
    kind = "hook_state_pre" if component == "state" else component
    _, cache = model.run_with_cache(source, n_loops=n_loops, names_filter=kind, loops=[loop])
    measured_ends = [float(_metric(x.detach()).mean()) for x in ends]
    at = {"loop": loop, "pos": "all"}
    for layer in result.data["layer"].values:
        site = model.site(
            kind,
            loop=loop,
            layer=None if component == "state" else int(layer),
            n_loops=n_loops,
        )
        for head in result.data["head"].values:
            if component == "state":
                put = states[loop]
                hooks = [(site, lambda x, hook, put=put: put)]
            else:
                given = cache[site]

                def swap(x: Any, hook: Any, given: Any = given, head: Any = head) -> Any:
                    x = x.clone()
                    if head == "all":
                        return given
                    of_pattern = component == "pattern"
                    part = (slice(None), int(head)) if of_pattern else (..., int(head), slice(None))
                    x[part] = given[part]
                    return x

                hooks = [(site, swap)]
            logits = model.run_with_hooks(base, n_loops=n_loops, fwd_hooks=hooks)
            before, after = measured_ends
            effect = (float(_metric(logits.detach()).mean()) - before) / (after - before)
            swept = result.data["effect"].sel(**at, layer=layer, head=head).item()
            assert swept == pytest.approx(effect, abs=1e-3)


@every
def test_a_state_of_one_prompt_in_the_run_of_another(name: str) -> None:
    model, tokens, n_loops = adapted(name), tokens_of(name, batch=4, n_pos=5), 3
    each = torch.full((4,), n_loops)
    batch = Batch(tokens, model(tokens, n_loops=n_loops).argmax(-1), each, each)
    places, loops = torch.tensor([[1], [4]]), torch.tensor([1, 2])
    pairs = interventions.InterchangePairs.of(
        batch,
        base=torch.tensor([0, 1]),
        source=torch.tensor([2, 3]),
        positions=places,
        loop=loops,
    )
    run = interventions.InterchangeRun(model, pairs)
    changed = run.interchange()
    states = model(tokens, n_loops=n_loops, return_type="states")
    for k, (base, source) in enumerate(((0, 2), (1, 3))):
        loop, place = int(loops[k]), int(places[k])
        state = states[loop, base : base + 1].clone()
        state[:, place] = states[loop, source, place]
        by_hand = model(
            tokens[base : base + 1],
            n_loops=n_loops,
            start_at_loop=loop,
            state=state,
            return_type="all_logits",
        )
        answers = by_hand.argmax(-1)[:, 0]  # [delay, pos]
        assert torch.equal(changed[k, : n_loops - loop + 1], answers)
        assert torch.equal(run.base[k, n_loops - loop], batch.targets[base])


@every
def test_without_what_one_loop_writes_it_is_the_run_in_which_hooks_write_nothing(name: str) -> None:
    model, batch = adapted(name), _batch(name)
    parts = [part for part in ("attn_out", "mlp_out") if f"hook_{part}" in model.addresses().kinds]
    ends = (0, model.n_loops - 1)
    result = interventions.ablation_study(
        model, batch, components=parts, kinds=("zero",), when=("one",), loops=ends, together=True
    )
    agrees = result.data["agreement"].sel(part="all of them", pos="all", estimate="value").squeeze()
    clean = model(batch.inputs).argmax(-1)
    for loop in ends:
        sites = [model.site(part, loop=loop, layer=slice(None)) for part in parts]
        hooks = [(sites, lambda x, hook: torch.zeros_like(x))]
        answers = model.run_with_hooks(batch.inputs, fwd_hooks=hooks).argmax(-1)
        share = (answers == clean).all(1).double().mean().item()
        assert agrees.sel(when=f"loop {loop}").item() == pytest.approx(share)


@every
def test_layers_of_a_block_have_their_limits(name: str) -> None:
    from loopinterp.dynamics.inside_loop import layer_limits

    model = adapted(name)
    if model.site_map.n_layers == 1:
        with pytest.raises(InputError, match="convergence_study"):
            layer_limits(model, tokens_of(name), n_loops=3)
        return
    limits = layer_limits(model, tokens_of(name), n_loops=3)
    assert limits.residual.shape[:2] == (3, model.site_map.n_layers)


@every
def test_rules_that_read_states_stop_it(name: str) -> None:
    model, tokens = adapted(name), tokens_of(name)
    stopped = run_until(model, tokens, ResidualBelow(0.5), max_loops=6)
    states = torch.stack([h for _, h in iterate(model, tokens, 6)])
    assert torch.allclose(stopped.state[0], states[stopped.loop[0], 0], atol=1e-5)


@every
def test_transformer_lens_patches_every_loop_of_it(name: str) -> None:
    from transformer_lens import patching

    base, source = tokens_of(name, 1, 2), tokens_of(name, 1, 2, seed=1)
    model: Any = adapted(name)
    unrolled = model.unroll(2)
    _, cache = unrolled.run_with_cache(source)
    result = patching.get_act_patch_resid_pre(unrolled, base, cache, lambda x: x[0, -1, 0])
    assert result.shape == (model.site_map.layers_total(2), 2)
    site = model.site("resid_pre", loop=1, layer=0, n_loops=2)

    def put(x: Any, hook: Any) -> Any:
        x[:, -1] = cache[site][:, -1]
        return x

    by_hand = unrolled.run_with_hooks(base, fwd_hooks=[(site, put)])[0, -1, 0]
    number = int(site.split(".")[1])
    assert result[number, -1].item() == pytest.approx(by_hand.item(), abs=1e-5)


@every
@pytest.mark.parametrize("stream_norms", ["edges", "nodes"])
def test_all_paths_from_the_input_together_are_the_source_s_run(
    name: str, stream_norms: Any
) -> None:
    model, base, source = adapted(name), tokens_of(name, 2, 4), tokens_of(name, 2, 4, seed=1)
    layout = layout_of(model.site_map, stream_norms)
    everywhere = edges.UnrolledGraph(layout, 2).receiver_names
    patched = edges.path_patching(
        model, base, source, senders="input", receivers=everywhere, n_loops=2,
        stream_norms=stream_norms,
    )  # fmt: skip
    torch.testing.assert_close(patched, model(source, n_loops=2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ouro", "huginn"])
def test_what_a_loop_makes_of_its_last_layer_is_what_the_run_makes_of_it(name: str) -> None:
    model: Any = adapted(name)
    tokens = tokens_of(name)
    states = model(tokens, n_loops=3, return_type="states")
    x = states.flip(-1)[1]  # no output of a layer
    site = model.site("resid_post", loop=1, layer=-1, n_loops=3)
    span = {"n_loops": 3, "start_at_loop": 1, "stop_at_loop": 2, "state": states[1]}
    hooks = [(site, lambda residual, hook: x)]
    ended = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="state", **span)
    assert torch.allclose(model.end_loop(x, model.embed(tokens)), ended, atol=1e-6)
