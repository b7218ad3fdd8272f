"""Wilson's interval against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from loopinterp.intervals import wilson_interval


@pytest.mark.parametrize("trials", [1, 5, 20, 300])
def test_it_is_that_of_scipy(trials: int) -> None:
    hits = np.arange(trials + 1)
    low, high = wilson_interval(hits, trials)
    expected = [binomtest(int(k), trials).proportion_ci(method="wilson") for k in hits]
    np.testing.assert_allclose(low, [e.low for e in expected], atol=1e-6)
    np.testing.assert_allclose(high, [e.high for e in expected], atol=1e-6)
    assert ((low <= hits / trials) & (hits / trials <= high)).all()
