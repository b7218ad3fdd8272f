"""What the studies of circuits are given: names and programs that fit, and each fault by itself."""

from __future__ import annotations

import pytest

from loopinterp.comparison.pair_strategies import check_programs, named_models
from loopinterp.core.errors import InputError


def test_models_have_the_names_they_are_given_or_numbers(untrained):
    assert named_models(untrained, None) == {"model 0": untrained}
    assert list(named_models([untrained] * 2, None)) == ["model 0", "model 1"]
    assert named_models((untrained,), ["a"]) == {"a": untrained}


@pytest.mark.parametrize(
    ("count", "names"), [(0, None), (2, ["a"]), (1, ["a", "b"]), (2, ["a"] * 2)]
)
def test_names_that_do_not_fit_their_models_are_refused(untrained, count, names):
    with pytest.raises(InputError) as refused:
        named_models([untrained] * count, names)
    assert refused.value.what == "names"


def test_rivals_are_programs_of_one_task_each_with_its_own_name():
    assert [p.name for p in check_programs(["sticky_ripple", "ripple"])] == [
        "sticky_ripple",
        "ripple",
    ]
    for fault in ([], ["ripple", "ripple"], ["ripple", "parity"]):
        with pytest.raises(InputError) as refused:
            check_programs(fault)
        assert refused.value.what == "programs"
