"""Every figure script runs on a run and writes its figure; the notebook runs from top to bottom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {
    "length_generalisation": ["--samples", "4"],
    "convergence": ["--n", "8", "--samples", "4"],
    "carry_wavefront": ["--n", "12", "--pairs", "8"],
    "circuit_vs_program": ["--n", "12", "--pairs", "4"],
}
SCRIPTS = sorted(path.stem for path in (ROOT / "analyses").glob("*.py"))


def test_no_script_is_left_out() -> None:
    assert sorted(SMALL) == SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_draws_its_figure(name: str, barely_trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "figure.html"
    script = ROOT / "analyses" / f"{name}.py"
    command = [sys.executable, str(script), "--run", str(barely_trained), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *SMALL[name]], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Plotly.newPlot" in out.read_text()
    assert len(done.stdout.splitlines()) > 1, "it says in words what it found"


@pytest.mark.slow
def test_the_notebook_runs(
    barely_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", str(barely_trained))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    path = ROOT / "analyses" / "notebooks" / "carry_probing.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
