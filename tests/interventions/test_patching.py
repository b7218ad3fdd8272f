"""The patching sweep against patches made by hand, and what must hold of any patch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.interventions import patching
from loopinterp.interventions.base_and_source import chosen_positions, unrelated
from loopinterp.interventions.patching import MEASURES, PatchingSweep, patching_sweep
from loopinterp.models import LoopedCache, LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.tasks import IGNORE, Addition, Parity, as_batch
from tests.models.variants import VARIANTS, build, some_inputs
from tests.refusals import naming

LOOPS, BATCH, POS = 3, 5, 4
READ_TOKENS = ("abacus on q and k", "abacus window")  # a step needs the input
COMPONENTS = ("resid_pre", "attn_out", "mlp_out", "z", "pattern", "state", "hook_state_post")
SMALL = {"d_model": 8, "n_heads": 2, "d_vocab": 5, "d_vocab_out": 3, "init_std": 0.8}


def tokens(seed: int = 0, *, n: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(5, (n, BATCH, POS), generator=generator))


def without_injection(seed: int = 0, **changes: Any) -> LoopedTransformer:
    return LoopedTransformer(LoopedTransformerConfig(**{**SMALL, **changes}), seed=seed)


@torch.no_grad()
def by_hand(patched: torch.Tensor, base: torch.Tensor, source: torch.Tensor) -> tuple[float, float]:
    """Recovered answers and logit difference of a patched run, answer by answer."""
    taken, now, before, after = 0, 0.0, 0.0, 0.0
    count = 0
    for b in range(len(base)):
        for p in range(base.shape[1]):
            old, new = int(base[b, p].argmax()), int(source[b, p].argmax())
            if old == new:
                continue
            count += 1
            taken += int(patched[b, p].argmax()) == new
            now += float(patched[b, p, new] - patched[b, p, old])
            before += float(base[b, p, new] - base[b, p, old])
            after += float(source[b, p, new] - source[b, p, old])
    return taken / count, (now - before) / (after - before)


def untied(model: LoopedTransformer) -> LoopedTransformer:
    """The same run as an ordinary transformer of T * L layers of its own, and no loop."""
    config = model.config
    deep = LoopedTransformer(config.replace(n_layers=LOOPS * config.n_layers), seed=1)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("block.")}
    for k in range(LOOPS * config.n_layers):
        for name, value in model.block[k % config.n_layers].state_dict().items():
            weights[f"block.{k}.{name}"] = value
    deep.load_state_dict(weights)
    return deep


def patch_untied(
    deep: LoopedTransformer,
    name: str,
    inputs: tuple[torch.Tensor, LoopedCache],
    head: int | None,
    place: int | None,
) -> torch.Tensor:
    """One patch of what another run did, from the first token on."""
    base, cache = inputs

    def put(activation: torch.Tensor, hook: object) -> torch.Tensor:
        at = slice(None) if place is None else slice(place, place + 1)
        if head is None:
            activation[:, at] = cache[name][:, at]
        elif name.endswith("pattern"):
            activation[:, head, at] = cache[name][:, head, at]
        else:
            activation[:, at, head] = cache[name][:, at, head]
        return activation

    return deep.run_with_hooks(base, n_loops=1, fwd_hooks=[(name, put)])


IN_LAYERS = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "hook_z": "attn.hook_z",
    "q": "attn.hook_q",
    "pattern": "attn.hook_pattern",
    "mlp.hook_post": "mlp.hook_post",
    "ln2.hook_scale": "ln2.hook_scale",
}
HEADS = ("hook_z", "q", "pattern")


@pytest.mark.parametrize(
    ("component", "each"),
    [
        *((name, each) for name in ("resid_pre", "hook_z") for each in (False, True)),
        *(("attn_out", True), ("mlp_out", False), ("q", False), ("pattern", True)),
        *(("mlp.hook_post", False), ("ln2.hook_scale", True)),
    ],
)
def test_every_patch_is_that_of_the_unrolled_untied_model(component, each):
    model = without_injection(n_layers=2, n_prelude=1, n_coda=1)
    base, source, other = tokens()
    result = patching_sweep(
        model,
        base,
        source,
        n_loops=LOOPS,
        component=component,
        positions="each" if each else None,
        other=other,
    )
    deep = untied(model)
    ends = deep(base, n_loops=1), deep(source, n_loops=1)
    donors = [deep.run_with_cache(donor, n_loops=1)[1] for donor in (source, other)]
    full = IN_LAYERS[component]
    heads = range(2) if component in HEADS else [None]
    places = range(POS) if each else [None]
    assert result.data["recovered"].shape == (LOOPS, 2, len(heads), len(places))
    around = result.around()
    assert {name: part.sizes["layer"] for name, part in around.items()} == {"prelude": 1, "coda": 1}
    for k in range(2 + LOOPS * 2):
        for h, head in enumerate(heads):
            for p, place in enumerate(places):
                expected = []
                for donor in donors:
                    run = patch_untied(deep, f"blocks.{k}.{full}", (base, donor), head, place)
                    expected += by_hand(run, *ends)
                if k in (0, 1 + LOOPS * 2):
                    section = around["coda" if k else "prelude"].sel(layer=0)
                else:
                    loop, layer = divmod(k - 1, 2)
                    section = result.data.sel(loop=loop, layer=layer)
                cell = section.isel(head=h, pos=p)
                measured = [float(cell[name]) for name in MEASURES]
                np.testing.assert_allclose(measured, expected, atol=1e-4)


@pytest.mark.parametrize("variant", ["demo", "surround", "post rms"])
def test_a_patch_of_the_state_is_that_of_the_plain_iteration(variant):
    model = build(variant, init_std=0.8)
    base, source, other = (some_inputs(model, seed=k) for k in range(3))
    chosen = torch.arange(len(base)) % base.shape[1]
    result = patching_sweep(
        model, base, source, n_loops=LOOPS, component="state", positions=chosen, other=other
    )
    runs = []
    for inputs in (base, source, other):
        it = bind(model, inputs)
        passed = [it.h0]
        for _ in range(LOOPS):
            passed.append(it.step(passed[-1]))
        runs.append(passed)
    it = bind(model, base)
    ends = it.readout(runs[0][-1]), bind(model, source).readout(runs[1][-1])
    axes = {axis: values.values.tolist() for axis, values in result.data.coords.items()}
    assert axes == {"loop": [0, 1, 2, 3], "layer": ["state"], "head": ["all"], "pos": ["chosen"]}
    assert result.around() == {}
    for t in range(LOOPS + 1):
        expected = []
        for donor in runs[1:]:
            h = runs[0][t].clone()
            for b, p in enumerate(chosen.tolist()):
                h[b, p] = donor[t][b, p]
            for _ in range(t, LOOPS):
                h = it.step(h)
            expected += by_hand(it.readout(h), *ends)
        measured = [result.data[name].sel(loop=t).item() for name in MEASURES]
        np.testing.assert_allclose(measured, expected, atol=1e-4)


@pytest.mark.parametrize("variant", ["demo", "surround"])
def test_what_happens_once_per_loop_is_patched_by_loop(variant):
    model = build(variant, init_std=1.0)
    base, source = some_inputs(model, seed=1), some_inputs(model, seed=2)
    args = {"n_loops": LOOPS, "positions": "each"}
    states = patching_sweep(model, base, source, component="state", **args)
    before = patching_sweep(model, base, source, component="state_pre", **args)
    after = patching_sweep(model, base, source, component="hook_state_post", **args)
    assert before.data["layer"].values.tolist() == ["loop"] and not before.around()
    for measure in MEASURES:
        full = states.data[measure].values
        np.testing.assert_allclose(before.data[measure].values, full[:-1], atol=1e-4)
        np.testing.assert_allclose(after.data[measure].values, full[1:], atol=1e-4)
    assert "`state_pre` in loop" in before.findings()[0].text
    assert before.figures()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    component=st.sampled_from(COMPONENTS),
    positions=st.sampled_from([None, "each"]),
    variant=st.sampled_from(sorted(VARIANTS)),
)
def test_patching_clean_into_clean_changes_nothing(seed, component, positions, variant):
    """The control's activations are here the base's own."""
    model = build(variant, seed=seed % 97, init_std=1.0)
    base, source = some_inputs(model, seed=seed), some_inputs(model, seed=seed + 1)
    assume(bool((model(base, n_loops=2).argmax(-1) != model(source, n_loops=2).argmax(-1)).any()))
    result = patching_sweep(
        model, base, source, n_loops=2, component=component, positions=positions, other=base
    )
    for section in (result.data, *result.around().values()):
        np.testing.assert_array_equal(section["control_recovered"], 0)
        np.testing.assert_allclose(section["control_effect"], 0, atol=1e-3)


@pytest.mark.parametrize("component", ["resid_pre", "state"])
def test_the_whole_stream_carries_everything_where_nothing_is_injected(component):
    model = without_injection(n_layers=2)
    base, source, _ = tokens()
    result = patching_sweep(model, base, source, n_loops=LOOPS, component=component)
    np.testing.assert_array_equal(result.data["recovered"], 1)
    np.testing.assert_allclose(result.data["effect"], 1, atol=1e-5)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in READ_TOKENS])
def test_the_last_state_carries_everything_whatever_is_injected(variant):
    """The readout sees the state alone: the source's input no longer counts."""
    model = build(variant, init_std=0.8)
    base, source = some_inputs(model, seed=1), some_inputs(model, seed=2)
    result = patching_sweep(model, base, source, n_loops=LOOPS, component="state")
    cells = result.data.squeeze(["layer", "head", "pos"])
    assert cells["recovered"].sel(loop=LOOPS) == 1
    assert float(cells["effect"].sel(loop=LOOPS)) == pytest.approx(1, abs=1e-6)
    if model.config.initial_state != "embedding":  # the start knows nothing of the input
        assert cells["recovered"].sel(loop=0) == 0
        assert float(cells["effect"].sel(loop=0)) == pytest.approx(0, abs=1e-5)


def test_a_state_before_the_last_does_not_where_the_input_is_injected():
    model = build("demo", init_std=0.8)
    base, source = some_inputs(model, seed=1), some_inputs(model, seed=2)
    result = patching_sweep(model, base, source, n_loops=LOOPS, component="state")
    assert (abs(result.data["effect"].isel(loop=slice(-1)) - 1) > 1e-3).all()


def test_only_the_heads_of_a_compiled_circuit_carry_anything():
    compiled = compile_program("ripple", max_length=8)
    batch, other = (
        Addition().sample(7, batch_size=32, generator=torch.Generator().manual_seed(k))
        for k in range(2)
    )
    result = patching_sweep(compiled.model, batch.inputs, other.inputs, n_loops=7, component="z")
    used = {(node.layer, node.head) for node in compiled.circuit.heads}
    sizes = result.data.sizes
    for layer, head in np.ndindex(sizes["layer"], sizes["head"]):
        cells = result.data.sel(layer=layer, head=head, pos="all")
        patched = cells["effect"]
        if (layer, head) in used:  # early carries are made anew: late ones decide
            assert patched[-1] > 0.1
            assert cells["control_effect"][-1] < patched[-1]
        else:
            np.testing.assert_allclose(patched, 0, atol=1e-5)


def test_scored_positions_are_the_only_ones_that_count():
    model = without_injection()
    base, source, other = tokens(seed=4)
    scored = torch.zeros(BATCH, POS, dtype=torch.bool)
    scored[:, -1] = True
    result = patching_sweep(
        model, base, source, n_loops=2, positions="each", scored=scored, other=other
    )
    differ = model(base, n_loops=2).argmax(-1) != model(source, n_loops=2).argmax(-1)
    assert result.n_scored == int(differ[:, -1].sum()) > 0
    # Attention is causal, so only the last position still matters to the last answer in a late
    # layer; a patch of the first position after the last attention does nothing.
    late = patching_sweep(
        model, base, source, n_loops=2, component="mlp_out", positions="each", scored=scored
    )
    early = late.data["recovered"].sel(loop=1, layer=0, head="all", pos=slice(0, POS - 2))
    assert early.values.tolist() == [0.0] * (POS - 1)


def test_another_metric_is_scaled_from_base_to_source():
    model = without_injection()
    base, source, other = tokens()

    def first_logit(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, 0]

    result = patching_sweep(
        model, base, source, n_loops=2, component="mlp_out", metric=first_logit, other=other
    )
    assert result.metric == "first_logit"
    with torch.no_grad():
        ends = [float(model(x, n_loops=2)[:, -1, 0].mean()) for x in (base, source)]
    assert [result.metric_base, result.metric_source] == pytest.approx(ends)
    full = patching_sweep(model, base, source, n_loops=2, metric=first_logit)
    np.testing.assert_allclose(full.data["effect"], 1, atol=1e-5)


def test_side_by_side_is_one_by_one(monkeypatch):
    model = without_injection(n_layers=2, n_coda=1)
    base, source, _ = tokens()
    args = {"n_loops": 2, "component": "z", "positions": "each"}
    many = patching_sweep(model, base, source, **args)
    monkeypatch.setattr(patching, "_AT_A_TIME", 1)
    one = patching_sweep(model, base, source, **args)
    assert many.data.keys() == one.data.keys() and "coda_effect" in many.data
    for name in many.data:
        np.testing.assert_allclose(many.data[name], one.data[name], atol=1e-5)


def test_some_loops_are_those_of_all():
    model = without_injection()
    base, source, _ = tokens()
    args = {"n_loops": 4, "component": "attn_out"}
    every = patching_sweep(model, base, source, **args)
    some = patching_sweep(model, base, source, **args, loops=[1, -1])
    assert some.data["loop"].values.tolist() == [1, 3]
    expected = every.data["effect"].sel(loop=[1, 3])
    np.testing.assert_allclose(some.data["effect"], expected, atol=1e-6)


def test_hooks_of_the_model_stay_and_none_is_left():
    model = without_injection()
    base, source, _ = tokens()
    before = model(base, n_loops=2)
    patching_sweep(model, base, source, n_loops=2, component="z")
    assert torch.equal(model(base, n_loops=2), before)
    assert not any(point.fwd_hooks for point in model.hook_points())


def test_no_source_meets_itself_in_the_control():
    source = torch.tensor([[0, 1], [0, 1], [2, 3], [4, 4]])
    assert not (unrelated(source) == source).all(1).any()
    for few in (source[:2], source[:1]):
        with pytest.raises(InputError) as caught:
            unrelated(few)
        assert caught.value.what == "other"


def test_the_table_the_files_and_the_words(tmp_path):
    model = without_injection(n_layers=2, n_prelude=1, n_coda=2)
    base, source, _ = tokens()
    result = patching_sweep(model, base, source, n_loops=2, component="z", positions="each")
    read = load_result(result.save(tmp_path))
    assert isinstance(read, PatchingSweep)
    frame = read.to_dataframe()
    assert frame.columns.tolist()[:5] == ["section", "loop", "layer", "head", "pos"]
    assert frame["section"].value_counts().to_dict() == {"block": 32, "coda": 16, "prelude": 8}
    assert frame["loop"].isna().sum() == 24
    row = frame.query("section == 'block' and loop == 1 and layer == 0 and head == 1 and pos == 2")
    cell = result.data["effect"].sel(loop=1, layer=0, head=1, pos=2)
    assert row["effect"].tolist() == [cell.item()]
    row = frame.query("section == 'coda' and layer == 1 and head == 0 and pos == 3")
    cell = result.around()["coda"]["control_effect"].sel(layer=1, head=0, pos=3)
    assert row["control_effect"].tolist() == [cell.item()]
    assert len(read.to_dataframe("effect")) == 32
    (finding,) = read.findings()
    assert finding.text.endswith("%.") and finding.value.endswith("%") and "head" in finding.text


def test_the_summary_says_where_a_patch_does_most():
    model = without_injection()
    base, source, _ = tokens()
    full = patching_sweep(model, base, source, n_loops=2)
    assert full.findings()[0].value == "100%"
    text = full.findings()[0].text
    assert all(part in text for part in ("in loop 0,", "layer 0", "at all positions"))
    state = patching_sweep(model, base, source, n_loops=2, component="state")
    assert "after 0 loops" in state.findings()[0].text


class Foreign:
    """A looped model of someone else: four methods, and no hooks."""

    def __init__(self, model: LoopedTransformer) -> None:
        self.embed, self.initial_state = model.embed, model.initial_state
        self.step, self.readout = model.step, model.readout


def test_states_of_a_model_without_hooks_are_patched_like_those_of_one_with():
    model, (base, source, _) = without_injection(), tokens()
    result = patching_sweep(model, base, source, n_loops=LOOPS, component="state", positions="each")
    foreign = patching_sweep(
        Foreign(model), base, source, n_loops=LOOPS, component="state", positions="each"
    )
    xr.testing.assert_allclose(result.data, foreign.data, atol=1e-5)
    with pytest.raises(InputError, match="hooks"):
        patching_sweep(Foreign(model), base, source, n_loops=LOOPS)


@pytest.mark.usefixtures("no_type_checks")
def test_what_cannot_be_patched_is_said():
    model = without_injection()
    base, source, _ = tokens()

    def refused(what: str, **changes: Any) -> None:
        args = {"model": model, "base": base, "source": source, "n_loops": 2, **changes}
        with pytest.raises(InputError) as caught:
            patching_sweep(**args)
        assert caught.value.what == what

    refused("component", component="resid_pr")
    refused("model", model=torch.nn.Linear(2, 2))
    refused("source", source=source[:, 1:])
    refused("other", other=source[1:])
    refused("inputs", base=base[:0], source=source[:0])
    refused("source", source=None)
    refused("n_loops", n_loops=0)
    refused("loop", loops=[2])
    refused("loops", loops=[])
    refused("loops", loops=[0], component="loops.1.blocks.0.attn.hook_z")
    refused("positions", positions="every")
    refused("positions", positions=torch.full((BATCH,), POS))
    refused("positions", positions=torch.zeros(2, dtype=torch.long))
    refused("scored", scored=torch.ones(BATCH, POS))
    refused("base and source", source=base, other=source)
    refused("metric", metric=lambda logits: torch.zeros(()))
    for shape in ((BATCH, POS), (BATCH, 1), (BATCH + 1,)):
        refused("metric", metric=lambda logits, shape=shape: logits.mean() * torch.ones(shape))
    refused("metric", metric=lambda logits: None)
    refused("metric", metric=lambda logits: logits.mean() * torch.nan)
    refused("inputs", source=source + 5)


def test_between_batches_only_what_is_asked_is_scored():
    task, model = Parity(), compile_program("parity", max_length=8).model
    base, source = (as_batch(task, n=4, batch_size=16, seed=k) for k in (0, 1))
    is_asked = base.targets != IGNORE
    assert not is_asked.all()
    result = patching_sweep(model, base, source)
    by_hand = patching_sweep(model, base.inputs, source.inputs, n_loops=4, scored=is_asked)
    assert result.data.equals(by_hand.data) and result.n_scored == by_hand.n_scored
    everywhere = patching_sweep(model, base.inputs, source.inputs, n_loops=4)
    assert everywhere.n_scored > result.n_scored
    assert patching_sweep(model, base, source, scored=~is_asked).n_scored > 0  # where one says so


def test_examples_of_several_lengths_want_a_number_of_loops():
    task, model = Addition(), build("plain", d_vocab=6, d_vocab_out=2, init_std=0.8)
    n = torch.tensor([3, 4, 5, 5])
    mixed = [task.sample(n, generator=torch.Generator().manual_seed(k)) for k in (0, 1)]
    for pair in (mixed, (mixed[0][-2:], mixed[1][:2])):
        with pytest.raises(InputError) as caught:
            patching_sweep(model, *pair)
        assert caught.value.what == "base and source"
    asked = (mixed[0].targets != IGNORE) & (mixed[1].targets != IGNORE)
    result = patching_sweep(model, *mixed, n_loops=4)
    inputs = [batch.inputs for batch in mixed]
    assert result.data.equals(patching_sweep(model, *inputs, n_loops=4, scored=asked).data)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("positions", [[-1], [0] * 8, 3, torch.tensor([-1] * 8), 1.5])
def test_positions_that_are_no_tensor_of_one_each_are_refused(positions: object) -> None:
    base = torch.zeros(8, 5, dtype=torch.int64)
    with pytest.raises(InputError) as refused:
        chosen_positions(positions, base)  # type: ignore[arg-type]
    assert refused.value.what == "positions"


def test_a_sweep_of_zeros_has_no_best_place_and_one_of_ties_counts_them():
    model = without_injection()
    base, source, _ = tokens()
    full = patching_sweep(model, base, source, n_loops=2)
    n_places = len(full.to_dataframe())
    full.data["recovered"][:] = full.data["control_recovered"][:] = 0
    (finding,) = full.findings()
    assert finding.value == "none" and f"({n_places} patches)" in finding.text
    full.data["recovered"][:] = 1
    (finding,) = full.findings()
    assert finding.value == "100%" and f"{n_places} of {n_places}" in finding.text


@pytest.mark.parametrize("changes", [{}, {"attention_window": 1, "positions": "none"}])
def test_all_heads_together_are_the_attention_output(changes: dict[str, Any]) -> None:
    model, inputs = without_injection(n_layers=2, **changes), tokens()
    options: Any = {"n_loops": LOOPS, "other": inputs[2]}
    heads = patching_sweep(model, *inputs[:2], component="z", heads=[1, 0], **options)
    whole = patching_sweep(model, *inputs[:2], component="attn_out", **options)
    assert heads.data["head"].values.tolist() == ["0+1"]
    for name in MEASURES:
        np.testing.assert_allclose(heads.data[name].values, whole.data[name].values, atol=1e-5)


@torch.no_grad()
def test_heads_together_are_patched_in_one_run() -> None:
    model, (base, source, other) = without_injection(n_heads=4, n_prelude=1), tokens()
    clean = [model(x, n_loops=LOOPS) for x in (base, source)]
    _, cache = model.run_with_cache(source, n_loops=LOOPS)
    sweep = patching_sweep(
        model, base, source, n_loops=LOOPS, component="z", heads=[0, -2], other=other
    )
    for loop in range(LOOPS):

        def put(z: torch.Tensor, hook: Any) -> torch.Tensor:
            z = z.clone()
            z[:, :, [0, 2]] = cache[hook.name][:, :, [0, 2]]
            return z

        hooks = [(f"loops.{loop}.blocks.0.attn.hook_z", put)]
        patched = model.run_with_hooks(base, n_loops=LOOPS, fwd_hooks=hooks)
        at = sweep.data.sel(loop=loop, layer=0, head="0+2", pos="all")
        expected = by_hand(patched, *clean)
        assert (float(at["recovered"]), float(at["effect"])) == pytest.approx(expected, abs=1e-4)
    assert sweep.data["prelude_recovered"].sizes["head"] == 1
    assert "head 0+2" in sweep.findings()[0].text or sweep.findings()[0].value == "none"


@pytest.mark.parametrize(
    ("component", "heads"), [("z", []), ("z", [2]), ("attn_out", [0]), ("state", [0])]
)
def test_heads_that_are_not_there_are_refused(component: str, heads: list[int]) -> None:
    model, inputs = without_injection(), tokens()
    with naming("heads"):
        patching_sweep(model, *inputs[:2], n_loops=LOOPS, component=component, heads=heads)


def test_the_name_of_a_hook_is_that_place_of_the_sweep() -> None:
    model, (base, source, other) = without_injection(n_layers=2), tokens()
    options: Any = {"n_loops": LOOPS, "other": other}
    whole = patching_sweep(model, base, source, component="attn.hook_z", **options)
    for name in ("loops.1.blocks.1.attn.hook_z", "blocks.3.attn.hook_z"):
        one = patching_sweep(model, base, source, component=name, **options)
        assert one.component == "z"
        xr.testing.assert_allclose(one.data, whole.data.sel(loop=[1], layer=[1]), atol=1e-6)
    state = patching_sweep(model, base, source, component="loops.2.hook_state_post", **options)
    assert state.data["loop"].values.tolist() == [2] and not state.by_layer
    with naming("component"):
        patching_sweep(
            without_injection(n_prelude=1), base, source, component="prelude.0.attn.hook_z",
            **options,
        )  # fmt: skip


def test_positions_are_one_choice_or_one_number_for_each_example() -> None:
    model, (base, source, other) = without_injection(), tokens()
    options: Any = {"n_loops": LOOPS, "other": other}
    numbers: Any = [0, 1, 2, 3, 0]
    listed = patching_sweep(model, base, source, positions=numbers, **options)
    same = patching_sweep(model, base, source, positions=torch.tensor(numbers), **options)
    xr.testing.assert_identical(listed.data, same.data)
    whole = patching_sweep(model, base, source, positions="all", **options)
    xr.testing.assert_identical(whole.data, patching_sweep(model, base, source, **options).data)
    for wrong in ("every", [3], [0, 1, 2, 3, 9], 3):
        with naming("positions"):
            patching_sweep(model, base, source, positions=wrong, **options)  # type: ignore[arg-type]
