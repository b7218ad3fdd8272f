from __future__ import annotations

import subprocess
import sys

import pytest

from loopinterp.core import text
from loopinterp.core.text import bar, showing, track


@pytest.fixture
def visible_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars as outside the tests, but from the first moment on."""
    monkeypatch.delenv("LOOPINTERP_PROGRESS")
    monkeypatch.setattr(text, "_DELAY", 0.0)


@pytest.mark.usefixtures("visible_bars")
def test_a_long_loop_has_a_bar_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(3), "counting")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == "" and "counting" in captured.err
    list(track(iter("ab"), "letters", total=2))
    assert "letters" in capsys.readouterr().err


@pytest.mark.usefixtures("visible_bars")
def test_of_loops_inside_loops_the_outermost_has_the_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in track(range(2), "outer"):
        list(track(range(2), "inner"))
    shown = capsys.readouterr().err
    assert "outer" in shown and "inner" not in shown
    next(track(range(2), "left early")).bit_length()
    list(track(range(2), "next"))
    assert "next" in capsys.readouterr().err


@pytest.mark.usefixtures("visible_bars")
def test_a_loop_that_fails_leaves_the_next_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        [1 // k for k in track(range(2), "fails")]
    list(track(range(2), "next"))
    assert "next" in capsys.readouterr().err


@pytest.mark.usefixtures("visible_bars")
def test_a_short_loop_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_DELAY", 60.0)
    assert list(track(range(3), "short")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_bars_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_DELAY", 0.0)
    list(track(range(3), "by the environment"))
    list(bar("and one's own", items=range(3)))
    monkeypatch.delenv("LOOPINTERP_PROGRESS")
    with showing(False):
        list(track(range(3), "by a part of a program"))
    assert capsys.readouterr().err == ""
    list(track(range(3), "after it"))
    assert "after it" in capsys.readouterr().err


@pytest.mark.usefixtures("visible_bars")
def test_a_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("steps", total=10_000) as shown:
        for _ in range(10_000):
            shown.update()
    assert 1 <= capsys.readouterr().err.count("steps") <= 3


def test_importing_it_imports_no_tqdm() -> None:
    code = "import sys, loopinterp.core.text; assert 'tqdm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
