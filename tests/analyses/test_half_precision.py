from __future__ import annotations

import pandas as pd
import pytest

from analyses import half_precision
from loopinterp.tasks import as_batch
from loopinterp.zoo import pretrained_run


def test_a_model_has_a_row_for_each_study_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: half_precision.STUDIES[name] for name in ("extrapolation", "frozen heads")}
    monkeypatch.setattr(half_precision, "STUDIES", chosen)
    run = pretrained_run("parity")
    batch = as_batch(run.task, n=5, batch_size=4)
    known = pd.DataFrame([*half_precision.measure("parity", run.model(), batch)])
    assert len(known) == 6 and not known["says rounding"].any()
    assert (known.groupby("study")["value"].nunique() == 1).all()
    known.loc[known.index[-1], "says rounding"] = True
    last = half_precision.as_table(known).splitlines()[-1].strip("| ").split(" | ")
    assert last[:2] == ["parity", "frozen heads ‡"] and last[4].endswith(" †")
    assert last[2] == last[3] == known["value"].iloc[-1]
