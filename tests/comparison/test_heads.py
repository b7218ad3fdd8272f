"""Heads against selectors: of patterns made by hand, and of whole models with their programs."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.comparison.heads import HeadMatch, head_name, head_study, match_heads
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.programs import Linear, LoopProgram, full, get_program, kqv, tokens, var
from loopinterp.tasks import get_task
from loopinterp.tasks.task import Batch

LOOPS, BATCH, POS = 3, 40, 6
EVERYTHING = kqv(full(0), full(0), tokens, "true", mode="max", name="everything")


def one_hot_pattern(keys: torch.Tensor) -> torch.Tensor:
    """Keys [loop, batch, query] -> a pattern that looks at them alone [loop, batch, query, key]."""
    return torch.nn.functional.one_hot(keys, POS).float()


@pytest.fixture
def parts(generator):
    """A shift, a selector that depends on the input, and heads for each and for none."""
    before = (torch.arange(POS) - 1).clamp(min=0).expand(LOOPS, BATCH, POS)
    lookup = torch.stack(
        [torch.randint(q + 1, (LOOPS, BATCH), generator=generator) for q in range(POS)], -1
    )
    even = torch.ones(POS, POS).tril() / torch.arange(1, POS + 1)[:, None]
    selectors = {"shift": one_hot_pattern(before).bool(), "lookup": one_hot_pattern(lookup).bool()}
    selectors["shift"][:, :, 0] = False
    heads = [even.expand(LOOPS, BATCH, POS, POS), one_hot_pattern(lookup), one_hot_pattern(before)]
    return torch.stack(heads, 2), selectors


def test_heads_are_matched_to_what_they_select(parts):
    patterns, selectors = parts
    found = match_heads(patterns, selectors)
    assert found.assigned == ["head 2", "head 1"]
    assert found.data["mass"][:, 2, 0].values.tolist() == [1.0] * LOOPS
    assert found.data["mass"][:, 1, 1].values.tolist() == [1.0] * LOOPS
    assert found.computes == [["head 2"], ["head 1"]]
    assert found.data["overlap"][:, 2, 0].values.tolist() == [1.0] * LOOPS
    assert found.data["overlap"][:, 1, 1].values.tolist() == [1.0] * LOOPS


def test_overlap_and_mass_are_what_the_definitions_say(generator):
    """Every query by itself, in Python floats."""
    patterns = torch.rand(2, 4, 2, POS, POS, generator=generator).tril()
    patterns = patterns / patterns.sum(-1, keepdim=True)
    selector = torch.rand(2, 4, POS, POS, generator=generator).tril() > 0.7
    found = match_heads(patterns, {"some": selector})
    for t in range(2):
        for h in range(2):
            overlaps, masses = [], []
            for b in range(4):
                for q in range(POS):
                    keys = selector[t, b, q].nonzero().flatten().tolist()
                    if not keys:
                        continue
                    row = patterns[t, b, h, q].tolist()
                    goal = [1 / len(keys) if k in keys else 0 for k in range(POS)]
                    overlaps.append(1 - sum(abs(a - g) for a, g in zip(row, goal)) / 2)
                    masses.append(sum(row[k] for k in keys))
            assert found.data["overlap"][t, h, 0].item() == pytest.approx(
                np.mean(overlaps), abs=1e-6
            )
            assert found.data["mass"][t, h, 0].item() == pytest.approx(np.mean(masses), abs=1e-6)


def test_a_wider_or_narrower_head_is_not_taken_for_the_selector(generator):
    before = (torch.arange(POS) - 1).clamp(min=0).expand(LOOPS, BATCH, POS)
    one = one_hot_pattern(before)
    two = (one + one_hot_pattern((before - 1).clamp(min=0))) / 2
    selectors = {"one": one.bool(), "two": two > 0}
    found = match_heads(torch.stack([one, two], 2), selectors)
    assert found.data["mass"][:, 0, 1].values.tolist() == [1.0] * LOOPS  # mass alone cannot tell
    assert found.data["overlap"][:, 0, 1].max() < 0.75
    assert found.data["overlap"][:, 1, 0].max() < 0.75
    assert found.computes == [["head 0"], ["head 1"]]
    assert found.assigned == ["head 0", "head 1"]


def test_several_heads_may_compute_one_selector(parts):
    patterns, selectors = parts
    found = match_heads(torch.cat([patterns, patterns[:, :, 1:]], 2), selectors)
    assert found.computes == [["head 2", "head 4"], ["head 1", "head 3"]]


def test_a_head_that_computes_at_some_loops_only_does_not(parts):
    patterns, selectors = parts
    patterns = patterns.clone()
    patterns[1, :, 2] = patterns[1, :, 0]
    assert match_heads(patterns, selectors).computes == [[], ["head 1"]]


def test_a_head_that_computes_goes_before_a_larger_total():
    """Selector b asks at the last query only: there head 0 has it half, and head 1 not at all."""
    a = one_hot_pattern(torch.zeros(1, 100, POS, dtype=torch.long))
    last = torch.arange(POS)[:, None] == POS - 1
    b = torch.where(last, a, 0)
    b[:, :50] = b[:, :50].roll(1, -1)
    nearly_a = torch.where(last, a.roll(2, -1), a)
    found = match_heads(torch.stack([a, nearly_a], 2), {"a": a.bool(), "b": b.bool()})
    gain = (found.data["overlap"] - found.data["overlap_even"]).isel(loop=0).values
    assert gain[0, 0] + gain[1, 1] < gain[1, 0] + gain[0, 1]
    assert found.assigned == ["head 0", "head 1"]


def test_a_selector_that_selects_nothing_says_nothing(parts):
    patterns, selectors = parts
    never = torch.zeros(LOOPS, BATCH, POS, POS, dtype=torch.bool)
    late = selectors["shift"].clone()
    late[0] = False
    found = match_heads(patterns, {**selectors, "never": never, "late": late})
    assert found.nothing == ["never"]
    assert found.data[["overlap", "mass"]].sel(selector="never").isnull().all().to_array().all()
    assert found.assigned[2] == "" and found.computes[2] == []
    assert found.data["overlap"].sel(loop=0, selector="late").isnull().all()
    assert found.computes[3] == ["head 2"]  # at every loop at which it selects anything
    assert "“never”" in found.findings()[-1].text
    none = match_heads(patterns, {"never": never})
    assert [finding.value for finding in none.findings()] == [""]
    assert none.assigned == [""]
    assert none.figures()[0].plot.data


def test_selectors_that_coincide_are_listed_once(parts):
    patterns, selectors = parts
    found = match_heads(patterns, {**selectors, "before": selectors["shift"].clone()})
    assert found.selectors == ["shift = before", "lookup"]
    assert found.names == [["shift", "before"], ["lookup"]]
    assert found.data["overlap"].shape == (LOOPS, 3, 2)


def test_even_attention_is_what_an_even_head_gives(parts):
    found = match_heads(*parts)
    for name in ("mass", "overlap"):
        idle = found.data[name][:, :1].values.repeat(3, 1)
        np.testing.assert_allclose(found.data[f"{name}_even"], idle, atol=1e-6)
    # Query q sees q + 1 keys; the shift selects one of them for q >= 1.
    expected = np.mean([1 / (q + 1) for q in range(1, POS)])
    np.testing.assert_allclose(found.data["mass_even"][:, :, 0], expected, atol=1e-6)


def test_even_attention_is_over_what_can_be_seen(parts):
    patterns, selectors = parts
    visible = torch.ones(POS, POS, dtype=torch.bool)
    found = match_heads(patterns, selectors, visible=visible)
    np.testing.assert_allclose(found.data["overlap_even"], 1 / POS, atol=1e-6)


def test_the_mean_pattern_tells_content_from_position(parts):
    found = match_heads(*parts)
    assert (
        found.data["mass_by_position"][:, 2, 0].values.tolist() == [1.0] * LOOPS
    )  # the shift is a position
    assert found.data["mass_by_position"][:, 1, 1].max() < 0.6  # the lookup is not
    assert found.data["mass_other_input"][:, 2, 0].values.tolist() == [1.0] * LOOPS
    assert found.data["mass_other_input"][:, 1, 1].max() < 0.7
    for name in ("by_position", "other_input"):  # one key is selected: the two measures agree
        mass, overlap = found.data[f"mass_{name}"], found.data[f"overlap_{name}"]
        np.testing.assert_allclose(overlap, mass, atol=1e-6)


def test_the_assignment_is_the_best_of_all(generator):
    patterns = torch.rand(LOOPS, BATCH, 3, POS, POS, generator=generator).tril()
    patterns = patterns / patterns.sum(-1, keepdim=True)
    selectors = {
        name: torch.rand(LOOPS, BATCH, POS, POS, generator=generator).tril() > 0.6 for name in "abc"
    }
    found = match_heads(patterns, selectors)
    gain = (found.data["overlap"] - found.data["overlap_even"]).mean("loop").values
    best = max(permutations(range(3)), key=lambda heads: gain[list(heads), range(3)].sum())
    assert found.assigned == [f"head {h}" for h in best]


def test_more_selectors_than_heads_leaves_some_without(parts):
    patterns, selectors = parts
    found = match_heads(patterns[:, :, 2:], selectors)
    assert found.assigned == ["head 2", ""] or found.assigned == ["head 0", ""]


def test_the_summary_names_the_heads_that_compute(parts):
    patterns, selectors = parts
    said = match_heads(patterns, selectors).findings()
    assert [finding.value for finding in said] == ["2 of 2"]
    assert re.search(r"“shift”\D+\b2\b", said[0].text)
    blurred = (patterns[:, :, :1] + patterns[:, :, 2:3]) / 2
    [closest] = match_heads(blurred, selectors).findings()
    assert closest.value == "64%" and "“shift”" in closest.text


def test_heads_that_look_evenly_come_nearest_to_nothing(parts):
    patterns, selectors = parts
    found = match_heads(patterns[:, :, :1], selectors)
    found.data["overlap"][:] = found.data["overlap_even"]
    assert found.findings()[0].value == "none"


def test_what_an_idle_head_looks_at_is_no_finding(parts):
    patterns, selectors = parts
    everything = torch.ones(LOOPS, BATCH, POS, POS, dtype=torch.bool).tril()
    found = match_heads(patterns, {"all": everything, "shift": selectors["shift"]})
    assert found.computes[0] == ["head 0"] and found.everything == ["all"]
    computed, idle = found.findings()
    assert computed.value == "1 of 1" and "“all”" not in computed.text
    assert "“all”" in idle.text and idle.value == ""


def test_the_figure_shows_the_means_over_loops(parts):
    found = match_heads(*parts)
    (figure,) = found.figures()
    plot: Any = figure.plot
    panels = [trace for trace in plot.data if trace.type == "heatmap"]
    np.testing.assert_array_equal(panels[0].z, found.data["overlap"].mean("loop"))
    matched = "shift: head 2 (exactly)"
    assert matched in figure.caption
    assert figure.data is not None and len(figure.data) == LOOPS * 3 * 2


def test_a_saved_result_is_the_same(parts, tmp_path):
    found = match_heads(*parts)
    read = HeadMatch.load(found.save(tmp_path))
    assert read.computes == found.computes and read.names == found.names
    frame = read.to_dataframe()
    assert {"overlap", "mass", "overlap_other_input"} <= set(frame)
    one = frame.query("loop == 1 and head == 'head 2' and selector == 'shift'")
    assert one["overlap"].tolist() == [1.0]


@pytest.mark.usefixtures("no_type_checks")
def test_shapes_must_fit(parts):
    patterns, selectors = parts
    for wrong, what in (
        (([patterns], selectors), "patterns"),
        ((patterns[:, :, 0], selectors), "patterns"),
        ((patterns, {"shift": selectors["shift"][:2]}), "selector 'shift'"),
        ((patterns, {}), "selectors and patterns"),
        ((patterns[:, :1], selectors), "selectors and patterns"),
    ):
        with pytest.raises(InputError) as refused:
            match_heads(*wrong)  # type: ignore[arg-type]
        assert refused.value.what == what


@pytest.fixture
def program() -> LoopProgram:
    """Looks everywhere before the loop; at what is new in each loop; at what is left after it."""
    x = var("x")
    return LoopProgram(
        name="three_parts",
        task="prefix_sum",
        inputs=("0", "1", "2", "3", "4"),
        prepare={"x": tokens, "most": EVERYTHING},
        step={"x": kqv(x, x - 1, x - 1, ">=", mode="max", name="at least as much")},
        finish=kqv(x, full(1), x, "==", mode="max", name="ones that are left"),
        n_loops=Linear(),
    )


@pytest.fixture
def batch(generator) -> Batch:
    inputs = torch.randint(5, (12, 6), generator=generator)
    return Batch(inputs, torch.zeros_like(inputs), torch.full((12,), 6), torch.full((12,), 3))


def build(**settings: Any) -> LoopedTransformer:
    config: dict[str, Any] = {
        "d_model": 16,
        "n_heads": 2,
        "d_vocab": 5,
        "d_vocab_out": 5,
        "init_std": 1.0,
    }
    return LoopedTransformer(LoopedTransformerConfig(**config, **settings), seed=0)


def look_everywhere(layer: Any) -> None:
    with torch.no_grad():
        layer.attn.qkv.weight.zero_()
        layer.attn.qkv.bias.zero_()


@pytest.mark.parametrize("section", ["prelude", "block", "coda"])
def test_heads_of_every_section_are_found(program, batch, section):
    model = build(n_prelude=1, n_layers=2, n_coda=2)
    look_everywhere(getattr(model, section)[-1])
    found = head_study(model, batch, [program])
    assert found.heads[:4] == ["prelude 0.0", "prelude 0.1", "head 0.0", "head 0.1"]
    assert found.heads[4:] == [
        "head 1.0",
        "head 1.1",
        "coda 0.0",
        "coda 0.1",
        "coda 1.0",
        "coda 1.1",
    ]
    k = found.selectors.index("everything")
    last = len(getattr(model, section)) - 1
    assert found.computes[k] == [head_name(section, last, h, n_layers=2) for h in range(2)]


def test_selectors_of_finish_are_those_after_the_last_loop(program, batch):
    found = head_study(build(n_coda=1), batch, [program])
    x = program.trace(batch.inputs, n_loops=3).variables["x"][-1].tolist()
    shares = [
        sum(key == 1 for key in row[: q + 1]) / (q + 1)
        for row in x
        for q in range(6)
        if 1 in row[: q + 1]
    ]
    k = found.selectors.index("ones that are left")
    np.testing.assert_allclose(found.data["mass_even"][..., k], np.mean(shares), atol=1e-6)


def test_each_head_is_held_against_what_it_may_see(batch):
    """Of two idle heads one sees its neighbour only, and overlaps less with a look at all."""
    program = LoopProgram(
        name="all",
        task="prefix_sum",
        inputs=("0", "1", "2", "3", "4"),
        prepare={"x": tokens},
        step={"x": EVERYTHING},
        finish=var("x"),
        n_loops=Linear(),
    )
    model = build(n_layers=2, attention_window=1, windowed_heads=1)
    for layer in model.block:
        look_everywhere(layer)
    found = head_study(model, batch, [program])
    even = found.data["overlap_even"].sel(selector="everything")
    share = float(np.mean([min(1, 2 / (q + 1)) for q in range(batch.inputs.shape[1])]))
    np.testing.assert_allclose(even[0], [share, 1.0, share, 1.0], atol=1e-6)
    np.testing.assert_allclose(found.data["overlap"].sel(selector="everything"), even, atol=1e-6)
    assert found.everything == ["everything"]
    assert found.computes == [["head 0.1", "head 1.1"]]


def test_a_selection_of_finish_that_step_makes_too_has_its_own_name(batch):
    x = var("x")
    both = kqv(x, full(1), x, "==", mode="max", name="ones")
    program = LoopProgram(
        name="twice",
        task="prefix_sum",
        inputs=("0", "1", "2", "3", "4"),
        prepare={"x": tokens},
        step={"x": (both + x) % 5},
        finish=both,
        n_loops=Linear(),
    )
    found = head_study(build(n_coda=1), batch, [program])
    assert found.names == [["ones"], ["finish.ones"]]


def test_heads_of_a_model_are_matched_to_all_programs(untrained, additions, tmp_path):
    short = additions[torch.arange(8)]
    found = head_study(untrained, short, ["ripple", "sticky_ripple", "lookahead"])
    assert found.selectors == ["shift_1", "span_back"] or found.selectors == [
        "span_back",
        "shift_1",
    ]
    assert found.heads == ["head 0", "head 1"]
    assert found.data["mass"].shape == (int(short.n_loops.max()), 2, 2)
    shift = found.selectors.index("shift_1")
    np.testing.assert_allclose(
        found.data["mass_even"][..., shift], 0.5, atol=1e-6
    )  # a window of two keys
    read = load_result(found.save(tmp_path))
    assert isinstance(read, HeadMatch)
    assert read.assigned == found.assigned


@pytest.mark.parametrize("name", ["ripple", "lookahead", "binary_sum", "one_shot", "abacus_ripple"])
def test_every_head_that_computes_a_selector_is_identified(name):
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    batch = task.sample(3, batch_size=32, generator=torch.Generator().manual_seed(0))
    compiled = compile_program(name, max_length=batch.inputs.shape[1])
    found = head_study(compiled.model, batch, [program])
    n_layers = compiled.model.config.n_layers
    known = {selector: k for k, names in enumerate(found.names) for selector in names}
    for node in compiled.circuit.heads:
        head = head_name(node.section, node.layer, node.head, n_layers=n_layers)
        assert head in found.computes[known[node.selector]], (head, node.selector)
    for k, heads in enumerate(found.computes):
        assert found.assigned[k] in heads
