from __future__ import annotations

import dataclasses
from typing import Any

import torch

from loopinterp.dynamics import extrapolation_study
from loopinterp.dynamics.extrapolation import AnswerFate
from tests.dynamics.toys import LinearModel, batch_of_ones

MODEL = LinearModel(0.5 * torch.eye(2), threshold=1.8)


def test_answers_that_survive_are_good() -> None:
    (finding,) = extrapolation_study(MODEL, batch_of_ones()).findings()
    assert finding.good is True and finding.value.split(" after ") == ["100%", "40 loops"]


def test_what_is_kept_is_what_is_right_after_the_very_last_loop() -> None:
    # Right from loop 4 = T(n) on, and no loop runs after it.
    (finding,) = extrapolation_study(MODEL, batch_of_ones(), n_loops=4).findings()
    assert finding.good is True and finding.value.split(" after ") == ["100%", "4 loops"]


def test_there_is_a_line_for_each_length() -> None:
    batch = dataclasses.replace(batch_of_ones(n_examples=4), n=torch.tensor([2, 2, 3, 3]))
    for n_loops in (40, 80):
        (figure,) = extrapolation_study(MODEL, batch, n_loops=n_loops, trained_loops=9).figures()
        plot: Any = figure.plot
        lines = {trace.name: trace for trace in plot.data[:4] if trace.fill != "toself"}
        assert list(lines["n = 2"].y) == [0.0] * 3 + [1.0] * (n_loops - 3)
        assert "n = 3" in lines and f"{AnswerFate.STABLE.value}: 4" in figure.control
        assert {"T(n)", "longest training run"} <= {a.text for a in plot.layout.annotations}
        assert (plot.layout.xaxis.type == "log") == (n_loops == 80)
        assert figure.data is not None and set(figure.data["n"]) == {2, 3}
