from __future__ import annotations

import plotly.graph_objects as go
import pytest

from loopinterp.compiler import draw_program
from loopinterp.core.results import Figure, Finding
from loopinterp.pages import RunRecord
from loopinterp.pages.sections import SectionView, section_views
from loopinterp.programs import get_program
from tests.pages import synthetic


def shown(monkeypatch: pytest.MonkeyPatch, **said: list[Finding]) -> dict[str, SectionView]:
    """The sections of a run whose studies, by name, say so much."""
    for name, findings in said.items():
        monkeypatch.setitem(synthetic._FINDINGS, name, findings)
        monkeypatch.setitem(synthetic._FIGURES, name, list)
    results = {name: synthetic.made_up(name) for name in said}
    views, problems = section_views(RunRecord(name="run", results=results))
    assert not problems
    return {view.section.key: view for view in views}


def test_the_study_named_as_the_section_or_naming_the_program_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = shown(
        monkeypatch,
        another=[Finding("Theirs.", section="wavefront"), Finding("Held.", section="program")],
        named=[Finding("It is.", section="verdict"), Finding("By how much.", section="program")],
        wavefront=[Finding("Ours.", section="wavefront")],
    )
    assert [f.text for f in views["wavefront"].findings] == ["Ours."]
    assert [f.text for f in views["program"].findings] == ["It is.", "By how much."]
    folded = [f.text for view in views.values() for fold in view.folds for f in fold.findings]
    assert folded == ["Theirs.", "Held."]


@pytest.mark.parametrize("good", [True, None])
def test_a_circuit_is_seen_at_once_where_the_model_runs_it(
    good: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no comparison but a decompilation found the program."""
    figures = [
        Figure(
            title="Evidence",
            plot=go.Figure(go.Scatter(x=[1], y=[1])),
            caption="",
            section="program",
        ),
        Figure(
            title="Circuit", plot=draw_program(get_program("ripple")), caption="", section="program"
        ),
    ]
    finding = Finding("A program.", section="program", good=good)
    monkeypatch.setitem(synthetic._FINDINGS, "read", [finding])
    monkeypatch.setitem(synthetic._FIGURES, "read", lambda: figures)
    record = RunRecord(name="run", results={"read": synthetic.made_up("read")})
    (view,), _ = section_views(record)
    assert [one.figure.title for one in view.figures] == ["Evidence", "Circuit"][: 1 + bool(good)]
    assert len(view.all_figures) == 2
