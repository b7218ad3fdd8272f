from __future__ import annotations

import pytest

from loopinterp.core.results import Finding
from loopinterp.pages import RunRecord
from loopinterp.pages.sections import SectionView, section_views
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
        another=[Finding("Theirs.", kind="wavefront"), Finding("Held.", kind="program")],
        named=[Finding("It is.", kind="verdict"), Finding("By how much.", kind="program")],
        wavefront=[Finding("Ours.", kind="wavefront")],
    )
    assert [f.text for f in views["wavefront"].findings] == ["Ours."]
    assert [f.text for f in views["program"].findings] == ["It is.", "By how much."]
    folded = [f.text for view in views.values() for fold in view.folds for f in fold.findings]
    assert folded == ["Theirs.", "Held."]
