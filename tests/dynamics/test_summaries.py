from __future__ import annotations

import torch

from loopinterp.dynamics import convergence_study, extrapolation_study
from tests.dynamics.toys import LinearModel, batch_of_ones

MODEL = LinearModel(0.5 * torch.eye(2), threshold=1.8)


def test_a_settled_and_right_model_is_good() -> None:
    settling, stability = convergence_study(MODEL, batch_of_ones(), n_loops=20).summary()
    assert settling.value == "100% settle" and settling.good is True
    assert "half of them by loop 6" in settling.text and "100% of the answers" in settling.text
    assert stability.good is True and "0.50 to 0.50 over 2 examples" in stability.text


def test_settled_on_wrong_answers_says_so() -> None:
    wrong = LinearModel(0.5 * torch.eye(2), threshold=5.0)
    text = convergence_study(wrong, batch_of_ones(), n_loops=20).summary()[0].text
    assert "100% of the tokens settle" in text and "0% of the answers are right" in text


def test_answers_that_survive_are_good() -> None:
    (finding,) = extrapolation_study(MODEL, batch_of_ones()).summary()
    assert finding.good is True and finding.value == "100% after 40 loops"
