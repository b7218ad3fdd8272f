"""Patches in the cone against plain runs of the whole with a hook, over many configurations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopinterp.interventions.light_cone import Change, LightCone
from loopinterp.interventions.patching import patching_sweep
from loopinterp.models import LoopedTransformer, WithVocabulary, bind
from loopinterp.models.layers import attend_near
from loopinterp.models.positions import attention_context
from tests.models.variants import VARIANTS, build, some_inputs

LOOPS, N_POS, CELLS = 3, 9, 4

WINDOWED: dict[str, dict[str, Any]] = {
    "window of 1": {"attention_window": 1},
    "window of 2, two layers, rotary": {
        "attention_window": 2,
        "n_layers": 2,
        "positions": "rotary",
        "injection": "sublayer",
    },
    "window of 3, relative bias": {
        "attention_window": 3,
        "positions": "relative",
        "relative_window": 2,
    },
    "window of 1, learned positions, prelude": {
        "attention_window": 1,
        "positions": "absolute",
        "n_ctx": 12,
        "n_prelude": 1,
        "injection": "concat",
        "initial_state": "noise",
        "loop_norm": True,
    },
    "window of 0": {"attention_window": 0},
    "wider than the sequence": {"attention_window": 12},
    "window of 1, abacus": {
        "attention_window": 1,
        "positions": "abacus",
        "abacus_target": "qk",
        "n_ctx": 30,
        "digit_tokens": (1, 2, 3),
    },
}
COMPONENTS = ("resid_pre", "z", "k", "mlp.hook_post", "state_post", "pattern", "mlp_out", "rot_k")


def configured(name: str, seed: int = 0) -> LoopedTransformer:
    changes = {"init_std": None if name == "tied" else 0.6, **WINDOWED.get(name, {})}
    # In double precision: a model that magnifies rounding would hide what is wrong.
    return build("plain" if name in WINDOWED else name, seed=seed, **changes).double()


def inputs_of(model: LoopedTransformer, seed: int = 0, batch: int = 3) -> torch.Tensor:
    inputs = some_inputs(model, batch=batch, n_pos=N_POS, seed=seed)
    return inputs.double() if inputs.is_floating_point() else inputs


@torch.no_grad()
def check(model: LoopedTransformer, component: str, seed: int, positions: Any = "each") -> None:
    """Some cells of a sweep, each against runs of the whole with one hook that patches it."""
    base, source, other = (inputs_of(model, seed + k) for k in range(3))
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(N_POS, model.config.d_vocab_out, generator=generator)
    weights = weights.double() / weights.norm()

    def metric(logits: torch.Tensor) -> torch.Tensor:  # no change of any logit leaves it alone
        return (logits.double() * weights).sum((1, 2))

    result = patching_sweep(
        model,
        base,
        source,
        n_loops=LOOPS,
        component=component,
        positions=positions,
        metric=metric,
        other=other,
    )
    span = result.metric_source - result.metric_base
    cells = result.data.stack(cell=("loop", "layer", "head", "pos"), create_index=False)
    names = {}
    for cell in torch.randperm(cells.sizes["cell"], generator=generator)[:CELLS].tolist():
        one = cells.isel(cell=cell)
        loop, layer = int(one["loop"]), one["layer"].item()
        name = model.site(
            component, loop=loop, layer=None if layer == "loop" else layer, n_loops=LOOPS
        )
        assert isinstance(name, str)
        for donor, measure in ((source, "effect"), (other, "control_effect")):
            if (name, measure) not in names:
                given = model.run_with_cache(donor, n_loops=LOOPS, names_filter=name)[1][name]
                names[name, measure] = given
            given = names[name, measure]

            def put(x: torch.Tensor, hook: object, given=given, one=one) -> torch.Tensor:
                pattern = component == "pattern"
                index: list[Any] = [slice(None)] * x.ndim
                if one["pos"] != "all":
                    index[2 if pattern else 1] = int(one["pos"])
                if one["head"] != "all":
                    index[1 if pattern else 2] = int(one["head"])
                x[tuple(index)] = given[tuple(index)]
                return x

            patched = model.run_with_hooks(base, n_loops=LOOPS, fwd_hooks=[(name, put)])
            expected = float(metric(patched).mean())
            measured = float(one[measure]) * span + result.metric_base
            assert measured == pytest.approx(expected, rel=1e-7, abs=1e-7)


SITES = ("resid_pre", "z", "pattern")


# Where a patch is made and what else a model has are independent, but for a window.
@pytest.mark.parametrize(
    ("name", "component"),
    [
        *itertools.product(WINDOWED, SITES),
        *zip(VARIANTS, itertools.cycle(SITES)),
    ],
)
def test_a_patch_is_a_run_of_the_whole_with_a_hook(name, component):
    check(configured(name), component, seed=1)


@given(
    seed=st.integers(0, 10**6),
    component=st.sampled_from(COMPONENTS),
    positions=st.sampled_from([None, "each"]),
    name=st.sampled_from([*VARIANTS, *WINDOWED]),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_patch_is_a_run_of_the_whole_with_a_hook(seed, component, positions, name):
    model = configured(name, seed=seed % 89)
    assume(component != "rot_k" or model.config.positions == "rotary")
    base, source = (model(inputs_of(model, seed + k), n_loops=LOOPS) for k in range(2))
    assume((base.argmax(-1) != source.argmax(-1)).any())  # a sweep needs answers that differ
    check(model, component, seed, positions)


def test_a_sequence_so_long_that_attention_goes_block_by_block(monkeypatch):
    """There the mask of a plain run is that of blocks; a coda keeps the cone away."""
    monkeypatch.setattr("tests.interventions.test_light_cone.N_POS", 70)
    monkeypatch.setattr("tests.interventions.test_light_cone.LOOPS", 2)
    for changes in ({}, {"n_coda": 1}):
        model = build("demo", init_std=0.6, **changes).double()
        check(model, "pattern", seed=3, positions=None)
        check(model, "resid_pre", seed=3)


@pytest.mark.parametrize("name", [*VARIANTS, *WINDOWED])
@torch.no_grad()
def test_a_changed_state_goes_on_as_the_plain_iteration(name):
    model = configured(name)
    inputs = inputs_of(model, batch=4)
    bound = bind(model, inputs)
    states = torch.stack([h for _, h in bound.run(LOOPS)])
    row, loop = torch.tensor([2, 0, 2, 3]), torch.tensor([0, 1, 1, LOOPS])
    pos, noise = torch.tensor([3, 0, N_POS - 1, 5]), torch.randn(4, states.shape[-1]).double()

    def put_in(new: slice, place: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.where((place == pos[new, None])[..., None], noise[new, None], h)

    for keep_keys in (False, True):
        for kind in (model, *([WithVocabulary(model)] if model.config.token_input else [])):
            cone = LightCone(kind, bind(kind, inputs), states, keep_keys=keep_keys)
            front = cone.finish(row, loop, pos, pos, Change(state=put_in))
            logits = cone.read(front, row, bound.readout(states[-1]))
            for k in range(4):
                one = bound.select(row[k : k + 1])
                h = states[loop[k], row[k : k + 1]].clone()
                h[0, pos[k]] = noise[k]
                for _ in range(int(loop[k]), LOOPS):
                    h = one.step(h)
                torch.testing.assert_close(logits[k], one.readout(h)[0], atol=1e-7, rtol=1e-7)


@torch.no_grad()
def test_what_a_patch_cannot_reach_is_not_run():
    """Positions that are stepped, counted: the cone of one, and those from the patch on."""
    for name, expected in (("window of 1", 2 + 3), ("plain", 2 * (N_POS - 4))):
        model, stepped = configured(name), []
        bound = bind(model, inputs_of(model))
        states = torch.stack([h for _, h in bound.run(LOOPS)])
        one, four = torch.tensor([1]), torch.tensor([4])

        def counted(h, *rest, advance=bound.advance, stepped=stepped):
            stepped.append(h.shape[1])
            return advance(h, *rest)

        cone = LightCone(model, bound, states, keep_keys=True)
        cone.iteration = replace(bound, advance=counted)
        cone.finish(one, one, four, four, Change(state=lambda new, place, h: h + 1))
        assert sum(stepped) == expected


def test_a_donor_that_has_the_same_is_not_run(monkeypatch):
    model = configured("window of 1")
    base, source = inputs_of(model), inputs_of(model, seed=1)
    source[:, 0] = base[:, 0]
    rows = []
    finish = LightCone.finish

    def counted(self: LightCone, row: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(row))
        return finish(self, row, *rest)

    monkeypatch.setattr(LightCone, "finish", counted)
    result = patching_sweep(
        model, base, source, n_loops=1, component="state", loops=[0], positions="each", other=base
    )
    assert sum(rows) == int((base != source).sum()) < base.numel()
    assert result.data["effect"].sel(loop=0, pos=0).item() == 0.0


@pytest.mark.parametrize("window", [1, 2, 4])
def test_attention_distance_by_distance_is_that_under_the_mask(window):
    config = configured("plain").config.replace(
        attention_window=window, positions="relative", relative_window=2
    )
    model = LoopedTransformer(config, seed=1)
    with torch.no_grad():
        context = attention_context(
            config, N_POS, bias=model.relative_bias, device=model.device, dtype=model.dtype
        )
        q, k, v = torch.randn(3, 5, 2, N_POS, 8)
        full = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=context.mask)
        start = torch.arange(5) % 4
        held = start[:, None] + torch.arange(-window, 4)
        each = torch.arange(5)[:, None]
        k, v = (x[each, :, held.clamp(min=0)].transpose(1, 2) for x in (k, v))
        q = q[each, :, held[:, window:]].transpose(1, 2)
        assert context.mask is not None
        bias = context.mask[0, :, -1].flip(-1)[:, : window + 1].T[:, None, :, None]
        # [distance, row, head, pos]: no key lies before position 0.
        barred = held[:, None, window:] < torch.arange(window + 1)[:, None, None, None]
        output = attend_near(q, k, v, bias.masked_fill(barred, float("-inf")))
        expected = full[each, :, held[:, window:]].transpose(1, 2)
    torch.testing.assert_close(output, expected)
