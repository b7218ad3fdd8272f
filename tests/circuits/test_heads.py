from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from loopinterp.circuits import HeadMatch, head_study, match_heads
from loopinterp.errors import InputError
from loopinterp.results import load_result

LOOPS, BATCH, POS = 3, 40, 6


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
    assert found.assigned_by_loop == [["head 2", "head 1"]] * LOOPS
    assert found.mass[:, 2, 0].tolist() == [1.0] * LOOPS
    assert found.mass[:, 1, 1].tolist() == [1.0] * LOOPS


def test_even_attention_is_what_an_even_head_gives(parts):
    found = match_heads(*parts)
    np.testing.assert_allclose(found.even, found.mass[:, 0], atol=1e-6)
    # Query q sees q + 1 keys; the shift selects one of them for q >= 1.
    expected = np.mean([1 / (q + 1) for q in range(1, POS)])
    np.testing.assert_allclose(found.even[:, 0], expected, atol=1e-6)


def test_the_mean_pattern_tells_content_from_position(parts):
    found = match_heads(*parts)
    assert found.by_position[:, 2, 0].tolist() == [1.0] * LOOPS  # the shift is a position
    assert found.by_position[:, 1, 1].max() < 0.6  # the lookup is not
    assert found.other_input[:, 2, 0].tolist() == [1.0] * LOOPS
    assert found.other_input[:, 1, 1].max() < 0.7


def test_the_assignment_is_the_best_of_all(generator):
    patterns = torch.rand(LOOPS, BATCH, 3, POS, POS, generator=generator).tril()
    patterns = patterns / patterns.sum(-1, keepdim=True)
    selectors = {
        name: torch.rand(LOOPS, BATCH, POS, POS, generator=generator).tril() > 0.6 for name in "abc"
    }
    found = match_heads(patterns, selectors)
    gain = (found.mass - found.even[:, None]).mean(0)
    best = max(permutations(range(3)), key=lambda heads: gain[list(heads), range(3)].sum())
    assert found.assigned == [f"head {h}" for h in best]


def test_more_selectors_than_heads_leaves_some_without(parts):
    patterns, selectors = parts
    found = match_heads(patterns[:, :, 2:], selectors)
    assert found.assigned == ["head 2", ""] or found.assigned == ["head 0", ""]


def test_heads_of_a_model_are_matched_to_all_programs(untrained, additions, tmp_path):
    short = additions[torch.arange(8)]
    found = head_study(untrained, short, ["ripple", "sticky_ripple", "lookahead"])
    assert found.selectors == ["shift_1", "span_back"]
    assert found.heads == ["head 0", "head 1"]
    assert found.mass.shape == (int(short.n_loops.max()), 2, 2)
    np.testing.assert_allclose(found.even[:, 0], 0.5, atol=1e-6)  # a window of two keys
    read = load_result(found.save(tmp_path))
    assert isinstance(read, HeadMatch)
    assert read.assigned == found.assigned


@pytest.mark.usefixtures("no_type_checks")
def test_shapes_must_fit(parts):
    patterns, selectors = parts
    with pytest.raises(InputError, match="selector 'shift'"):
        match_heads(patterns, {"shift": selectors["shift"][:2]})
    with pytest.raises(InputError, match="at least one selector"):
        match_heads(patterns, {})
