"""Steering against forwards written by hand, and what it may not change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.adapters import adapt
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.interventions import SteeringSweep, mean_difference, steer, steering_sweep
from loopinterp.interventions.steering import Mode
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.probing import RidgeProbe
from loopinterp.tasks import IGNORE, Batch
from tests.adapters.kinds import KINDS

N_LOOPS = 5
MODES: tuple[Mode, ...] = ("add", "project", "clamp")


def transformer(n_layers: int = 1) -> LoopedTransformer:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "n_heads": 2,
        "d_vocab": 6,
        "d_vocab_out": 3,
        "n_layers": n_layers,
    }
    return LoopedTransformer(LoopedTransformerConfig(**sizes, injection="input"), seed=0).eval()


def tokens(batch: int = 6, n_pos: int = 7) -> Tensor:
    return torch.randint(6, (batch, n_pos), generator=torch.Generator().manual_seed(1))


def vector(width: int = 16, seed: int = 2) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def by_hand(x: list[float], v: list[float], s: float, mode: str) -> list[float]:
    """One activation, in plain Python."""
    size = sum(c * c for c in v) ** 0.5
    along = sum(a * c / size for a, c in zip(x, v, strict=True))
    part = [along * c / size for c in v]
    return {
        "add": [a + s * c for a, c in zip(x, v, strict=True)],
        "project": [a - s * p for a, p in zip(x, part, strict=True)],
        "clamp": [a + s * c - p for a, c, p in zip(x, v, part, strict=True)],
    }[mode]


@given(seed=st.integers(0, 2**20), strength=st.floats(-4, 4), mode=st.sampled_from(MODES))
def test_a_hook_does_to_each_place_what_the_formula_says(
    seed: int, strength: float, mode: Mode
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
    v = torch.randn(4, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 3, generator=generator) < 0.5
    new = steer(v, strength, mode=mode, head=-1, positions=mask)(x, None)
    for b, p, h in np.ndindex(2, 3, 2):
        here = x[b, p, h].tolist()
        if h == 1 and mask[b, p]:
            expected = by_hand(here, v.tolist(), strength, mode)
            assert new[b, p, h].tolist() == pytest.approx(expected, abs=1e-12)
        else:
            assert new[b, p, h].tolist() == here


@given(seed=st.integers(0, 2**20), strength=st.floats(-4, 4), mode=st.sampled_from(MODES))
def test_what_is_at_right_angles_stays(seed: int, strength: float, mode: Mode) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    v = torch.randn(5, generator=generator, dtype=torch.float64)
    unit = v / v.norm()
    new = steer(v, strength, mode=mode)(x, None)
    rest, kept = (y - (y @ unit)[..., None] * unit for y in (new, x))
    torch.testing.assert_close(rest, kept)
    if mode == "clamp":
        torch.testing.assert_close(new @ unit, strength * v.norm().expand(2, 3))
    if mode == "project":
        gone = steer(v, mode="project")(x, None)
        torch.testing.assert_close(gone @ unit, torch.zeros(2, 3).double())
        torch.testing.assert_close(steer(v, mode="project")(gone, None), gone)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", range(N_LOOPS))
def test_a_steered_run_is_the_forward_by_hand(mode: Mode, loop: int) -> None:
    """Earlier loops are the same bits; later ones follow from the steered state alone."""
    model, x, v = transformer(), tokens(), vector()
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[:, 2:4] = True
    hook = (f"loops.{loop}.hook_state_post", steer(v, 1.5, mode=mode, positions=mask))
    steered = model.run_with_hooks(x, n_loops=N_LOOPS, fwd_hooks=[hook], return_type="states")
    clean = model(x, n_loops=N_LOOPS, return_type="states")
    assert torch.equal(steered[: loop + 1], clean[: loop + 1])
    h = clean[loop + 1].clone()
    for b, p in mask.nonzero().tolist():
        h[b, p] = torch.tensor(by_hand(h[b, p].tolist(), v.tolist(), 1.5, mode))
    bound = model.bind(x)
    for state in steered[loop + 1 :]:
        torch.testing.assert_close(state, h)
        h = bound.step(h)
    again = model(x, n_loops=N_LOOPS, start_at_loop=loop + 1, state=steered[loop + 1])
    assert torch.equal(model.run_with_hooks(x, n_loops=N_LOOPS, fwd_hooks=[hook]), again)


def batch() -> Batch:
    x = tokens()
    targets = torch.full_like(x, IGNORE)
    targets[:, 3:] = 1
    n = torch.full((len(x),), N_LOOPS)
    return Batch(x, targets, n, n)


@torch.no_grad()
def test_a_sweep_is_its_runs_one_by_one() -> None:
    model, data, v = transformer(), batch(), vector()
    sweep = steering_sweep(model, data, v, strengths=(0.0, 60.0), loops=[1, 4], n_draws=2, seed=7)
    clean = model(data.inputs, n_loops=N_LOOPS)
    answers, asked = clean.argmax(-1), data.targets != IGNORE

    def by_one(loop: int, strength: float, along: Tensor) -> tuple[float, float]:
        bound = model.bind(data.inputs)
        h = bound.h0
        for t in range(N_LOOPS):
            h = bound.step(h)
            h = h + strength * along if t == loop else h
        logits = model.readout(h)
        changed = ((logits.argmax(-1) != answers) & asked).any(1).double().mean()
        of_clean = torch.nn.functional.one_hot(answers, 3) == 1  # [batch, pos, class]
        rise = (logits.double().softmax(-1) - clean.double().softmax(-1))[of_clean]
        by_example = (rise.view(answers.shape) * asked).sum(1) / asked.sum(1)
        return float(changed), float(by_example.mean())

    draws = torch.randn(2, 16, generator=torch.Generator().manual_seed(7))
    draws = draws / draws.norm(dim=1, keepdim=True) * v.norm()
    for loop in (1, 4):
        for strength in (0.0, 60.0):
            cell = sweep.data.sel(loop=loop, strength=strength)
            expected = by_one(loop, strength, v)
            found = [float(cell[name].sel(estimate="value")) for name in ("changed", "effect")]
            assert found == pytest.approx(expected, abs=1e-6)
            for k, draw in enumerate(draws):
                found = [float(cell[f"control_{name}"][k]) for name in ("changed", "effect")]
                assert found == pytest.approx(by_one(loop, strength, draw), abs=1e-6)
    nothing = sweep.data.sel(strength=0.0)
    assert (nothing["changed"].sel(estimate="value") == 0).all()
    assert not sweep.beyond_control().sel(strength=0.0).any()
    assert sweep.data["changed"].sel(strength=60.0, estimate="value").max() > 0


def test_the_finding_is_of_the_loop_and_strength_of_the_largest_gain() -> None:
    sweep = steering_sweep(
        transformer(), batch(), vector(), strengths=(0.0, 60.0), loops=[1, 4], n_draws=2
    )
    changed, control = sweep.data["changed"], sweep.data["control_changed"]
    changed[:], control[:] = 0.0, 0.1
    assert sweep.findings()[0].value == "no more than random"
    for loop, value in ((1, 0.9), (4, 0.8)):
        changed.loc[{"loop": loop, "strength": 60.0}] = [value, value - 0.1, value + 0.1]
    control.loc[{"loop": 1}] = 0.5  # the gain is .4 there, and .7 in loop 4
    (finding,) = sweep.findings()
    assert finding.value == "80% in loop 4" and "60" in finding.text and "70–90" in finding.text


@torch.no_grad()
def test_the_direction_of_a_class_moves_answers_to_it_and_random_ones_do_not() -> None:
    """At the last loop only the readout follows: the unembedding's own direction does most."""
    config = LoopedTransformerConfig(
        d_model=64, n_heads=2, d_vocab=6, d_vocab_out=6, final_norm=False
    )
    model = LoopedTransformer(config, seed=0).eval()
    x = tokens(64)
    toward = model.unembedding.weight[1] - model.unembedding.weight.mean(0)
    share = lambda logits: (logits.argmax(-1) == 1).double().mean(1)  # noqa: E731
    sweep = steering_sweep(
        model, x, toward.detach(), n_loops=3, loops=[2], strengths=(0.0, 30.0), metric=share
    )
    effect = sweep.data["effect"].sel(loop=2, strength=30.0)
    assert float(effect.sel(estimate="low")) > float(
        sweep.control("effect").sel(loop=2, strength=30.0, estimate="high")
    )
    assert float(effect.sel(estimate="value")) + sweep.metric_clean == pytest.approx(1, abs=0.05)


@torch.no_grad()
def test_means_differ_by_what_was_added_and_only_where_counted() -> None:
    model, x, v = transformer(2), tokens(), vector()
    hook = "loops.2.blocks.1.hook_resid_post"
    with model.hooks([("loops.2.blocks.1.hook_resid_post", steer(v, 2.0))], n_loops=N_LOOPS):
        _, cache = model.run_with_cache(x, n_loops=N_LOOPS, names_filter=hook)
        (moved,) = cache.values()
    found = mean_difference(model, x, tokens(4), hook=hook, n_loops=N_LOOPS)
    _, cache = model.run_with_cache(tokens(4), n_loops=N_LOOPS, names_filter=hook)
    (other,) = cache.values()
    torch.testing.assert_close(found, (moved - 2 * v).mean((0, 1)) - other.mean((0, 1)))
    mask = torch.zeros(1, 7, dtype=torch.bool)
    mask[:, 3] = True
    at = mean_difference(model, x, tokens(4), hook=hook, n_loops=N_LOOPS, positions=mask)
    torch.testing.assert_close(at, (moved - 2 * v)[:, 3].mean(0) - other[:, 3].mean(0))


@torch.no_grad()
def test_a_probe_gives_its_row() -> None:
    model, data = transformer(), batch()
    states = model(data.inputs, n_loops=N_LOOPS, return_type="states")[2].flatten(0, 1)
    probe = RidgeProbe().fit(states, data.inputs.flatten() % 2)
    options = {"strengths": (1.0,), "loops": [1], "n_draws": 2}
    by_probe, by_row = (
        steering_sweep(model, data, given, **options) for given in (probe, probe.coef_[0])
    )
    np.testing.assert_array_equal(by_probe.data["effect"], by_row.data["effect"])


@pytest.mark.parametrize("name", ["ouro", "huginn", "hrm", "albert"])
def test_adapters_are_steered_and_results_are_kept(name: str, tmp_path) -> None:
    model = adapt(KINDS[name].build())
    x = torch.randint(4, (3, 6), generator=torch.Generator().manual_seed(0))
    width = model.bind(x).h0.shape[-1]
    sweep = steering_sweep(model, x, vector(width), n_loops=2, strengths=(1.0, 8.0), n_draws=2)
    kept = load_result(sweep.save(tmp_path / "steering.safetensors"))
    assert isinstance(kept, SteeringSweep)
    assert [f.text for f in kept.findings()] == [f.text for f in sweep.findings()]
    (figure,) = kept.figures()
    assert figure.data is not None and len(figure.data) == 4


def test_one_place_has_one_address() -> None:
    model, data = transformer(2), batch()
    options = {"strengths": (2.0,), "n_draws": 2}
    by_name = steering_sweep(
        model, data, vector(), component="loops.2.blocks.1.hook_resid_pre", **options
    )
    by_parts = steering_sweep(
        model, data, vector(), component="resid_pre", layer=1, loops=[2], **options
    )
    np.testing.assert_array_equal(by_name.data["effect"], by_parts.data["effect"])
    assert by_name.data["loop"].values.tolist() == [2]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"direction": torch.zeros(16)}, "direction"),
        ({"direction": torch.ones(2, 16)}, "direction"),
        ({"direction": torch.ones(15)}, "direction"),
        ({"direction": SimpleNamespace(coef_=torch.ones(3, 16))}, "direction"),
        ({"component": "resid_pre"}, "layer"),
        ({"component": "nothing"}, "component"),
        ({"component": "loops.1.blocks.1.hook_resid_pre", "layer": 0}, "layer"),
        ({"component": "loops.1.blocks.1.hook_resid_pre", "loops": [0]}, "loops"),
        ({"positions": "each"}, "positions"),
        ({"strengths": ()}, "strengths"),
        ({"metric": lambda logits: logits[..., 0]}, "metric"),
        ({"metric": lambda logits: None}, "metric"),
    ],
)
def test_what_cannot_be_steered_is_refused(options: dict[str, object], what: str) -> None:
    given = {"direction": vector(), "n_draws": 2} | options
    with pytest.raises(InputError, match=what):
        steering_sweep(transformer(2), batch(), **given)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("head", [-2, -1, 0, 1])
def test_a_head_is_steered_by_its_number_from_either_end(head: int) -> None:
    x = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    changed = (steer(vector(8), head=head)(x, None) != x).flatten(3).any(3)  # [batch, pos, head]
    assert changed[..., head].all() and changed.sum() == 2 * 3


@pytest.mark.parametrize("head", [2, 7, -3])
def test_a_head_that_is_not_there_is_refused(head: int) -> None:
    with pytest.raises(InputError) as caught:
        steer(vector(8), head=head)(torch.zeros(1, 1, 2, 8), None)
    assert caught.value.what == "head"
    options: dict[str, Any] = {"component": "z", "layer": 0, "n_draws": 2, "strengths": (1.0,)}
    with pytest.raises(InputError) as caught:
        steering_sweep(transformer(2), batch(), vector(8), head=head, **options)
    assert caught.value.what == "head"


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (5, 7), (7,)])
def test_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model, x = transformer(), tokens()  # [6, 7]
    places = torch.ones(shape, dtype=torch.bool)
    hooks = [("loops.1.hook_state_post", steer(vector(), positions=places))]
    with pytest.raises(InputError) as caught:
        model.run_with_hooks(x, n_loops=2, fwd_hooks=hooks)
    assert caught.value.what == "positions"
    with pytest.raises(InputError) as caught:
        mean_difference(model, x, x, hook="loops.1.hook_state_post", n_loops=2, positions=places)
    assert caught.value.what == "positions"


def test_a_mean_difference_is_of_one_activation_and_some_positions() -> None:
    model, x = transformer(), tokens()
    none = torch.zeros(1, 7, dtype=torch.bool)
    for hook, positions, what in (
        ("hook_state_post", None, "hook"),  # of each loop
        ("loops.1.hook_state_post", none, "positions"),
    ):
        with pytest.raises(InputError) as caught:
            mean_difference(model, x, x, hook=hook, n_loops=2, positions=positions)
        assert caught.value.what == what


@pytest.mark.parametrize("twice", [{"strengths": [1.0, 1]}, {"loops": [1, 1]}, {"loops": [1, -4]}])
def test_a_strength_or_a_loop_named_twice_is_refused(twice: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        steering_sweep(transformer(), tokens(), vector(), n_loops=N_LOOPS, **twice)
    assert error.value.what == next(iter(twice))
