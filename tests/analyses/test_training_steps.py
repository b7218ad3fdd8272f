"""Pages of training steps and trained edges: what their files say."""

from __future__ import annotations

from types import ModuleType

import pandas as pd
import pytest
import torch

from analyses import trained_edges, training_steps
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.tasks import IGNORE, get_task


@pytest.mark.parametrize("script", [training_steps, trained_edges])
def test_the_page_says_what_was_measured(script: ModuleType) -> None:
    text = (PAGES / script.PAGE).read_text()
    tables = script.as_tables(*(pd.read_csv(RESULTS / file) for file in script.FILES))
    assert put(text, tables) == text, f"run python -m {script.__name__} --page"


def test_the_running_parity_ends_in_the_answer() -> None:
    task = get_task("parity")
    batch = task.sample(7, batch_size=16, generator=torch.Generator().manual_seed(0))
    labels = training_steps.running_parity(batch.inputs)
    known = labels != IGNORE
    assert known.sum(1).tolist() == [7] * 16
    last = labels.gather(1, (known * torch.arange(known.shape[1])).argmax(1)[:, None])[:, 0]
    asked = batch.targets.masked_fill(batch.targets == IGNORE, -1)
    answer = asked.gather(1, (asked >= 0).int().argmax(1)[:, None])[:, 0]
    assert last.equal(answer)
