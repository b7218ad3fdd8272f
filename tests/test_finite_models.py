"""A model whose states between loops are a few: every study takes it, though nothing moves a bit.

What a loop makes of such a state does not change with small changes of it: derivatives are 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loopinterp.core.results import load_result
from loopinterp.zoo import load_pretrained
from tests.test_default_dtype import _result
from tests.test_study_arguments import STUDIES


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_a_study_takes_a_finite_state_model(name: str, tmp_path: Path) -> None:
    result = _result(name, load_pretrained("addition-finite"))
    assert load_result(result.save(tmp_path)).data.equals(result.data)
    assert all("nan" not in finding.text.lower() for finding in result.findings())
