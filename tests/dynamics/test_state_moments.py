from __future__ import annotations

import pytest
import torch

from loopinterp.dynamics.state_moments import StateMoments, StateSets
from tests.dynamics.toys import random_state


def test_parts_add_up_to_the_whole() -> None:
    states = random_state(3, 20, 5) + 50
    moments = StateMoments.of(states[:, :4])
    moments.add(states[:, 4:11])
    moments.add(states[:, 11:])
    assert moments.count == 20
    centred = states - states.mean(dim=1, keepdim=True)
    expected = torch.linalg.svdvals(centred).flip(-1)
    torch.testing.assert_close(moments.singular_values(), expected)
    far = torch.linalg.svdvals(states).flip(-1)
    torch.testing.assert_close(moments.singular_values(about_zero=True), far)
    spread = centred.norm(dim=(1, 2)) / states.norm(dim=(1, 2))
    torch.testing.assert_close(moments.spread(), spread)


def test_what_is_not_finite_has_no_values_and_spoils_no_other_set() -> None:
    states = random_state(2, 10, 3)
    states[1, 4, 0] = float("inf")
    found = StateMoments.of(states).singular_values()
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_a_small_spread_far_from_zero_is_measured() -> None:
    states = 1e6 + 1e-3 * random_state(50, 4)
    centred = states - states.mean(dim=0)
    found = StateMoments.of(states[:7])
    found.add(states[7:])
    expected = torch.linalg.svdvals(centred).flip(0)
    torch.testing.assert_close(found.singular_values(), expected, rtol=1e-4, atol=0.0)


def test_the_control_has_as_many_vectors() -> None:
    sets = StateSets()
    sets.add("loops", random_state(3, 6, 40))
    sets.add("few", random_state(3, 40))
    sets.add("none", random_state(0, 40))
    made = sets.measures("loops", ["few", "none"], torch.Generator().manual_seed(0))
    assert made["set_size"].tolist() == [3, 0] and made["rank"].shape == (3,)
    # Three vectors about their mean span two dimensions, however many features there are.
    assert made["control_rank"][0].mean().item() == pytest.approx(2, abs=0.05)
    assert made["set_rank"][1].isnan() and made["control_participation"][1].isnan().all()
