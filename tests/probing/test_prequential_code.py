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
    x, y = data(100, 0.5, n_classes)
    bits, ends = 12 * np.log2(n_classes), [12, 25, 50, 100]
    for start, end in pairwise(ends):
        oracle = LogisticRegression(tol=1e-10, max_iter=5000).fit(x[:start], y[:start])
        probability = oracle.predict_proba(x[start:end])
        bits -= np.log2(probability[np.arange(end - start), y[start:end]]).sum()
    assert float(online_code_length(x, y)) == pytest.approx(bits / 100, abs=1e-5)


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
    # One class only up to the last block: everything is sent uniformly.
    assert float(online_code_length(x, late)) == 1.0


def test_blocks_double_from_a_few_samples_on() -> None:
    x, y = data(5, 0.5)
    assert float(online_code_length(x, y)) == 1.0  # a single block, sent uniformly


def test_no_labels_have_no_code() -> None:
    x, y = data(5, 0.5)
    with pytest.raises(InputError, match="at least one label to send, got none"):
        online_code_length(x[:0], y[:0])
