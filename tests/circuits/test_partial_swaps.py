from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopinterp.circuits import SubspaceSwaps, subspace_study
from loopinterp.results import load_result

SMALL: dict[str, Any] = {"n": 12, "per_place": 10, "max_chain": 5, "ranks": (1, 2, 4)}


@pytest.fixture(scope="module")
def ripple(program_model) -> SubspaceSwaps:
    return subspace_study(program_model("ripple"), "ripple", **SMALL)


def test_a_probe_finds_the_direction_that_a_known_model_uses(ripple):
    probe = ripple.subspaces.index("probe of carry")
    assert ripple.ranks[probe] == 1
    assert ripple.iia[probe, -1].tolist() == [1.0, 1.0, 1.0]
    assert ripple.control[probe, -1, 1] < 0.6
    assert "read and used" in ripple.summary()[0].text


def test_a_variable_of_three_values_needs_two_directions(program_model):
    result = subspace_study(program_model("latched_chain"), "latched_chain", **SMALL)
    probe = result.subspaces.index("probe of carry")
    assert result.ranks[probe] == 2
    assert result.iia[probe, -1, 1] == 1.0


def test_the_whole_state_is_its_own_control(ripple):
    assert ripple.subspaces[-1] == "the whole state"
    np.testing.assert_array_equal(ripple.iia[-1], ripple.control[-1])
    assert ripple.iia[-1, -1, 1] == 1.0


def test_one_principal_direction_is_enough_for_one_bit(ripple):
    one = ripple.subspaces.index("principal directions, 1")
    assert ripple.iia[one, -1, 1] == 1.0
    assert ripple.control[one, -1, 1] < 0.6


def test_variables_that_do_not_depend_on_the_input_are_not_probed(program_model):
    result = subspace_study(program_model("lookahead"), "lookahead", **SMALL)
    probes = [name for name in result.subspaces if name.startswith("probe of")]
    assert probes == ["probe of makes", "probe of passes"]


def test_a_probe_of_a_model_that_computes_nothing_does_what_random_directions_do(untrained):
    result = subspace_study(untrained, "ripple", **SMALL)
    probe = result.subspaces.index("probe of carry")
    assert result.iia_low[probe, -1, 1] <= result.control_high[probe, -1, 1]
    assert "not what is used" in result.summary()[0].text


def test_results_go_to_disk_and_back(ripple, tmp_path):
    read = load_result(ripple.save(tmp_path))
    assert isinstance(read, SubspaceSwaps)
    np.testing.assert_array_equal(read.iia, ripple.iia)
    assert {"subspace", "place", "delay", "iia", "control"} <= set(read.to_frame().columns)
