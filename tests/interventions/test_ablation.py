"""Ablations against models whose weights are zeroed, hooks, and circuits that are known."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.compiler import compile_program, distract
from loopinterp.core.errors import InputError
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.results import load_result
from loopinterp.interventions import AblationStudy, ablation_study
from loopinterp.interventions.engine import random_change
from loopinterp.models import LoopedTransformer
from loopinterp.tasks import IGNORE, Addition, Batch, as_batch, get_task
from tests.interventions.test_patching import LOOPS, untied, without_injection
from tests.models.variants import build, some_inputs

BATCH, POS, CLASSES = 6, 5, 3


def batch_of(inputs: torch.Tensor, n_loops: Any = LOOPS, classes: int = CLASSES) -> Batch:
    """Random answers to some inputs; at the first position nothing is asked."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(classes, inputs.shape[:2], generator=generator)
    targets[:, 0] = IGNORE
    ends = torch.full((len(inputs),), LOOPS) if n_loops is LOOPS else torch.as_tensor(n_loops)
    return Batch(inputs, targets, torch.full((len(inputs),), POS), ends)


def tokens() -> torch.Tensor:
    return torch.randint(5, (BATCH, POS), generator=torch.Generator().manual_seed(0))


def margin(logits: torch.Tensor, batch: Batch) -> float:
    """Right answer less the largest other, answer by answer."""
    examples = []
    for b in range(len(batch)):
        margins = []
        for p in range(batch.targets.shape[1]):
            right = int(batch.targets[b, p])
            if right != IGNORE:
                others = [float(x) for c, x in enumerate(logits[b, p]) if c != right]
                margins.append(float(logits[b, p, right]) - max(others))
        examples.append(sum(margins) / len(margins))
    return sum(examples) / len(examples)


def cell(found: AblationStudy, name: str, **where: Any) -> float:
    return found.data[name].sel(pos=where.pop("pos", "all"), estimate="value", **where).item()


@cache
def zeroed() -> tuple[LoopedTransformer, Batch, AblationStudy]:
    """A model, some examples, and both without each of its parts."""
    model, batch = without_injection(n_layers=2, d_mlp=8), batch_of(tokens())
    result = ablation_study(
        model,
        batch,
        components=("z", "attn_out", "mlp_out"),
        kinds=("zero",),
        when=("all", "one", "from", "upto"),
    )
    return model, batch, result


@pytest.mark.parametrize("part", ["head 1.0", "head 0.1", "MLP 0", "attention 1"])
def test_zero_is_the_untied_model_whose_weights_of_that_part_are_zero(part):
    model, batch, result = zeroed()
    kind, _, where = part.partition(" ")
    layer = int(where.split(".")[0])
    for name, (first, last) in zip(result.data["when"].values, result.spans):
        deep = untied(model)
        with torch.no_grad():
            for loop in range(first, last + 1):
                own: Any = deep.block[loop * 2 + layer]
                attn, mlp = own.attn, own.mlp
                if kind == "head":
                    width, head = attn.d_head, int(where.split(".")[1])
                    attn.out.weight[:, head * width : (head + 1) * width] = 0
                for linear in {"MLP": [mlp.fc_out], "attention": [attn.out]}.get(kind, []):
                    linear.weight.zero_()
                    linear.bias.zero_()
            logits = deep(batch.inputs, n_loops=1)
        at = {"part": part, "ablation": "zero", "when": name}
        assert cell(result, "margin", **at) == pytest.approx(margin(logits, batch), abs=1e-5)
        plain = model(batch.inputs, n_loops=LOOPS).argmax(-1)
        same = (logits.argmax(-1) == plain) | (batch.targets == IGNORE)
        assert cell(result, "agreement", **at) == pytest.approx(float(same.all(1).double().mean()))


@torch.no_grad()
def test_without_any_component_the_residual_alone_holds_the_state():
    model, batch = without_injection(n_layers=2), batch_of(tokens())
    result = ablation_study(
        model, batch, components=("attn_out", "mlp_out"), kinds=("zero",), together=True
    )
    assert result.data["part"].values[-1] == "all of them"
    logits = model.readout(model.embed(batch.inputs))
    at = {"part": "all of them", "ablation": "zero", "when": "all loops"}
    assert cell(result, "margin", **at) == pytest.approx(margin(logits, batch), abs=1e-5)


@pytest.mark.parametrize(
    ("variant", "component"),
    [
        *(("demo", "z"), ("demo", "mlp_out"), ("demo", "post")),
        *(("surround", "z"), ("post rms", "mlp_out"), ("features", "post"), ("fire", "z")),
    ],
)
@torch.no_grad()
def test_a_mean_at_one_position_is_a_hook_that_puts_it_there(variant, component):
    model = build(variant, init_std=0.8)
    batch = batch_of(some_inputs(model, batch=BATCH, n_pos=POS))
    result = ablation_study(
        model, batch, components=(component,), kinds=("mean",), when=("one",), positions="each"
    )
    layer, head, pos = model.config.n_layers - 1, 1, 2
    for loop in range(LOOPS):
        name = model.site(component, loop=loop, layer=layer, n_loops=LOOPS)

        def put(x: torch.Tensor, hook: object) -> torch.Tensor:
            index = (slice(None), pos, *([head] if component == "z" else []))
            x[index] = x[index].mean(0)
            return x

        logits = model.run_with_hooks(batch.inputs, n_loops=LOOPS, fwd_hooks=[(name, put)])
        part = {"z": f"head {layer}.{head}", "mlp_out": f"MLP {layer}"}.get(
            component, f"post {layer}"
        )
        at = {"part": part, "ablation": "mean", "when": f"loop {loop}", "pos": pos}
        assert cell(result, "margin", **at) == pytest.approx(margin(logits, batch), abs=1e-5)


@torch.no_grad()
def test_a_group_of_neurons_at_the_mean_of_each_token():
    model, batch = without_injection(), batch_of(tokens())
    result = ablation_study(
        model,
        batch,
        components=(),
        neurons={"some": [1, 4]},
        kinds=("mean",),
        when=("one",),
        loops=[1],
        mean_over="token",
    )

    def put(x: torch.Tensor, hook: object) -> torch.Tensor:
        new = x.clone()
        for b in range(BATCH):
            for p in range(POS):
                alike = batch.inputs == batch.inputs[b, p]
                new[b, p, [1, 4]] = x[alike].mean(0)[[1, 4]]
        return new

    name = model.site("mlp.hook_post", loop=1, layer=0, n_loops=LOOPS)
    logits = model.run_with_hooks(batch.inputs, n_loops=LOOPS, fwd_hooks=[(name, put)])
    at = {"part": "some 0", "ablation": "mean", "when": "loop 1"}
    assert cell(result, "margin", **at) == pytest.approx(margin(logits, batch), abs=1e-5)


def test_among_examples_that_are_alike_mean_and_resample_change_nothing():
    model = build("demo", init_std=0.8)
    batch = batch_of(some_inputs(model, batch=1, n_pos=POS).expand(4, -1))
    result = ablation_study(model, batch, kinds=("mean", "resample"), when=("all", "one"))
    assert (result.data["agreement"].sel(estimate="value") == 1).all()
    same = result.reference("margin").sel(estimate="value").item()
    np.testing.assert_allclose(result.data["margin"].sel(estimate="value"), same, atol=1e-5)
    assert set(result.roles().values()) == {"idle"}  # nothing is needed where nothing is changed


def test_examples_that_end_sooner_are_read_there():
    model, inputs = build("demo", init_std=0.8), None
    inputs = some_inputs(model, batch=BATCH, n_pos=POS)
    ends = torch.tensor([1, 3, 2, 3, 1, 2])
    args: dict[str, Any] = {"kinds": ("zero",), "when": ("all", "one")}
    mixed = ablation_study(model, batch_of(inputs, ends), **args)
    full = batch_of(inputs, ends)
    alone = [ablation_study(model, full[row : row + 1], **args) for row in range(BATCH)]
    for part in mixed.data["part"].values:
        for when in ("all loops", "loop 1"):
            expected = 0.0
            for result in alone:
                names = result.data["when"].values
                measure = result.data["margin"] if when in names else result.reference("margin")
                at = {"part": part, "ablation": "zero", "when": when, "pos": "all"}
                at = at if when in names else {}
                expected += measure.sel(**at, estimate="value").item() / BATCH
            at = {"part": part, "ablation": "zero", "when": when}
            assert cell(mixed, "margin", **at) == pytest.approx(expected, abs=1e-5)


def test_of_a_compiled_circuit_used_heads_are_needed_and_distractors_are_not():
    compiled = distract(compile_program("ripple", max_length=6), heads=2, neurons=4, seed=0)
    result = ablation_study(compiled.model, Addition(), n=5, batch_size=32, when=("all",))
    used = {f"head {node.layer}.{node.head}" for node in compiled.circuit.heads}
    assert result.reference().sel(estimate="value") == 1
    heads = [str(x) for x in result.data["part"].values if str(x).startswith("head")]
    assert used < set(heads)
    for head in heads:
        effect = result.data.sel(part=head, when="all loops", pos="all", estimate="value")
        if head in used:
            assert (effect["exact_match"] < 1).all() and (effect["agreement"] < 1).all()
        else:
            assert (effect["agreement"] == 1).all() and (effect["control_agreement"] == 1).all()
            undisturbed = result.reference("margin").sel(estimate="value").item()
            np.testing.assert_allclose(effect["margin"], undisturbed, rtol=1e-3)


@pytest.mark.parametrize("name", ["sticky_ripple", "ripple", "carry_save", "parity"])
def test_the_head_that_all_depends_on_is_needed_also_where_noise_does_the_same(name: str) -> None:
    compiled = compile_program(name, max_length=8)
    task = get_task(compiled.program.task)
    result = ablation_study(compiled.model, task, n=5, batch_size=64, when=("all",))
    (used,) = (f"head {h.layer}.{h.head}" for h in compiled.circuit.heads if h.section == "block")
    judged = result.judged().set_index(["part", "ablation"])
    for kind in ("zero", "mean", "resample"):
        assert judged.loc[(used, kind), "need"] == "needed"
    assert result.roles()[used] == "information"
    # Noise of the norm of zero ablation destroys the answers too, and denies nothing.
    assert judged.loc[(used, "zero"), "noise"] > 0.5
    others = [part for part in result.roles() if part.startswith("head") and part != used]
    assert {result.roles()[part] for part in others} <= {"idle"}


def test_a_part_that_says_nothing_of_the_input_is_a_constant() -> None:
    # The first MLP of lookahead counts loops: the same in all inputs, and needed.
    compiled = compile_program("lookahead", max_length=7)
    result = ablation_study(compiled.model, Addition(), n=6, batch_size=64, when=("all",))
    assert result.roles()["MLP 0"] == "constant"
    needs = result.judged().set_index(["part", "ablation"])["need"]
    assert needs["MLP 0", "zero"] == "needed"
    assert needs["MLP 0", "mean"] == needs["MLP 0", "resample"] == "idle"
    only = dataclasses.replace(result, data=result.data.sel(part=["MLP 0"]))
    (finding,) = only.findings()  # zero ablation does change answers
    assert finding.value == "0 of 1" and "no resample ablation at all loops" in finding.text
    assert finding.text.endswith("Needed as a constant only: MLP 0.")


def test_few_changed_answers_are_unclear_and_none_are_idle() -> None:
    model = without_injection()
    result = ablation_study(model, batch_of(tokens()), kinds=("resample",), when=("all",))
    kept = result.data["agreement"].copy()
    parts = result.data["part"].values.tolist()
    for part, n_changed, need in zip(parts, (0, 1, 5), ("idle", "unclear", "needed")):
        n = 64
        estimate = wilson_estimate(n - n_changed, n)
        kept.loc[{"part": part}] = estimate
        changed = dataclasses.replace(result, data=result.data.assign(agreement=kept))
        row = changed.judged().set_index("part").loc[part]
        assert row["need"] == need
        assert row["low"] == pytest.approx(wilson_estimate(n_changed, n)[1])


def test_noise_is_as_long_as_the_change_and_inside_the_part(generator):
    change = torch.randn(3, 4, 2, 6, generator=generator)
    inside = torch.zeros(4, 2, 6, dtype=torch.bool)
    inside[1, 0], inside[2, 1, :3] = True, True
    noise = random_change(torch.where(inside, change, 0), generator, within=inside)
    assert not noise[:, ~inside].any()
    expected = torch.where(inside, change, 0).norm(dim=-1)
    torch.testing.assert_close(noise.norm(dim=-1), expected)


def test_an_ablation_is_what_it_is_again_and_is_saved(tmp_path):
    model, batch = without_injection(), batch_of(tokens())
    args: dict[str, Any] = {"when": ("all", "one"), "loops": [0, -1], "seed": 3}
    result = ablation_study(model, batch, **args)
    assert result.data.equals(ablation_study(model, batch, **args).data)
    assert result.data["when"].values.tolist() == ["all loops", "loop 0", "loop 2"]
    read = load_result(result.save(tmp_path))
    assert isinstance(read, AblationStudy) and read.data.equals(result.data)
    assert read.spans == [[0, 2], [0, 0], [2, 2]]
    assert read.findings()[0].value.endswith("of 3") and read.figures()[0].control
    assert not any(point.fwd_hooks for point in model.hook_points())


@pytest.mark.usefixtures("no_type_checks")
def test_what_cannot_be_ablated_is_said():
    model, batch = without_injection(), batch_of(tokens())

    def refused(what: str, model: Any = model, data: Batch = batch, **changes: Any) -> None:
        with pytest.raises(InputError) as caught:
            ablation_study(model, data, **changes)
        assert caught.value.what == what

    refused("component", components=("mlp_ou",))
    refused("components", components=("pattern",))
    refused("components", components=("state_post",))
    refused("components", components=())
    refused("components", neurons={"none": []})
    refused("neurons['far']", neurons={"far": [99]})
    refused("kinds", kinds=("noise",))
    refused("kinds", kinds=())
    refused("when", when=("never",))
    refused("when", when=())
    refused("loops", when=("all",), loops=[0])
    refused("loop", loops=[LOOPS])
    refused("positions", positions="every")
    refused("mean_over", mean_over="head")
    refused("data", data=batch[:1])
    # Two of one name could not be told apart in the result, and ended its roles in a ValueError.
    refused("kinds", kinds=("zero", "mean", "zero"))
    refused("components, neurons", components=("z", "attn.hook_z"))
    refused("components, neurons", components=("mlp_out",), neurons={"MLP": [0]})
    features = build("features")
    refused("mean_over", features, batch_of(some_inputs(features)), mean_over="token")


def test_spans_of_loops() -> None:
    when = ("all", "one", "from", "upto")
    result = ablation_study(
        without_injection(), batch_of(tokens()), kinds=("zero",), when=when, loops=[1]
    )
    names = ["all loops", "loop 1", "from loop 1", "up to loop 1"]
    assert result.data["when"].values.tolist() == names
    assert result.spans == [[0, LOOPS - 1], [1, 1], [1, LOOPS - 1], [0, 1]]


def test_a_model_without_hooks_is_refused() -> None:
    model = without_injection()

    class Foreign:
        embed, initial_state = model.embed, model.initial_state
        step, readout = model.step, model.readout

    with pytest.raises(InputError, match="hooks"):
        ablation_study(Foreign(), as_batch(Addition(), n=3, batch_size=4))
    assert isinstance(model, LoopedTransformer)
