"""Online code length against a hand-made code with scikit-learn's probes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from loopinterp.errors import InputError
from loopinterp.probing import online_code_length


def data(n: int, noise: float, n_classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    scores = x[:, :n_classes] + noise * torch.randn(n, n_classes, generator=generator).double()
    return x, scores.argmax(-1)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_it_is_the_code_one_gets_by_hand(n_classes: int) -> None:
    x, y = data(320, 0.5, n_classes)
    bits, ends = 40 * np.log2(n_classes), [40, 160, 320]
    for start, end in pairwise(ends):
        oracle = LogisticRegression(tol=1e-10, max_iter=5000).fit(x[:start], y[:start])
        probability = oracle.predict_proba(x[start:end])
        bits -= np.log2(probability[np.arange(end - start), y[start:end]]).sum()
    ours = online_code_length(x, y, block_ends=(40, 160, 320))
    assert float(ours) == pytest.approx(bits / 320, abs=1e-6)


def test_a_grid_is_its_cells_and_harder_data_cost_more() -> None:
    x, y = data(512, 0.0)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    cells = torch.stack([x, x + 0.7 * noise, torch.zeros_like(x)])
    bits = online_code_length(cells, y)
    assert bits.shape == (3,)
    for cell, value in zip(cells, bits):
        torch.testing.assert_close(online_code_length(cell, y), value)
    assert bits[0] < 0.3 < bits[1] < bits[2]
    assert float(bits[2]) == pytest.approx(1.0, abs=0.02)


def test_blocks_before_every_class_has_occurred_cost_the_uniform_code() -> None:
    x, y = data(128, 0.0)
    late = torch.cat([y[y == 0], y[y == 1]])
    bits = online_code_length(x, late, block_ends=(8, 16, 128))
    assert float(bits) == 1.0  # one class only up to the last block: everything is sent uniformly


def test_blocks_double_from_a_few_samples_on() -> None:
    x, y = data(100, 0.5)
    torch.testing.assert_close(
        online_code_length(x, y), online_code_length(x, y, block_ends=(12, 25, 50, 100))
    )
    assert float(online_code_length(x[:5], y[:5])) == 1.0


def test_blocks_must_hold_something_and_end_with_the_samples() -> None:
    x, y = data(20, 0.0)
    for ends in ((), (0, 20), (10, 10, 20), (10, 15), (10, 30)):
        with pytest.raises(InputError, match="end at 20"):
            online_code_length(x, y, block_ends=ends)
