"""Every script runs and writes its figure or its page; the notebook runs from top to bottom."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopinterp.app.runs import compile_run
from tests.warm_python import Started, WarmPython

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {
    "convergence": ["--n", "8", "--samples", "4"],
    "carry_wavefront": ["--n", "12", "--pairs", "8"],
    "circuit_vs_program": ["--n", "12", "--n", "16", "--samples", "32"],
}
OWN_MODELS = {
    "ground_truth": ["--program", "prefix_xor"],
    "own_program": ["--n", "3", "--steps", "30", "--samples", "8"],
}
"""Scripts that need no run: they compile or train what they look at."""

TABLES = {
    "near_misses": ["--program", "prefix_xor", "--misses", "1"],
    "seeds": [
        "--seeds",
        "2",
        "--lengths",
        "16",
        "--set",
        "steps=20",
        "--set",
        "curriculum.max_n=3",
    ],
}
"""Scripts of many models, which print a table."""

TINY = ["--set", "steps=5", "--set", "model.d_model=8", "--set", "model.n_heads=2"]
TABLES["published_loss"] = ["--steps", "2"]
TABLES["notebook_models"] = ["--steps", "2", "--samples", "2", "--to", "8", *TINY]

COMPARING = {"circuit_vs_program", "ground_truth", "near_misses", "own_program", "seeds"}
"""Scripts that run with small studies: most of their time went into comparisons of programs."""

ELSEWHERE = (
    *(
        "ablated_circuits",
        "alignment",
        "circuit_benchmark",
        "decompiled_models",
        "decompiled_seeds",
        "edge_recovery",
        "gpu",
        "make_zoo",
        "measure_recipes",
        "outside_eap_ig",
        "trained_circuits",
    ),
    *("build_site", "pictures", "run_notebooks", "still_pictures"),
    *("published_code", "published_settings", "reproductions"),
    *("budget_law", "fixed_point_grid", "grid_claims", "long_addition", "settled_but_wrong"),
    *(
        "state_geometry",
        "stopping_rules",
        "tables_in_pages",
        "unstable_points",
        "zoo_tables",
        "lenses",
        "exits",
    ),
    "abacus_addition",
    "spare_loops",
    "unknown_loops",
    "nested_loops",
    "five_times",
    "abacus_carries",
    "finite_models",
    "reduced_models",
    "decompiling_benchmark",
    "trained_albert",
    "half_precision",
    "sparse_features",
    *("trained_edges", "training_steps"),
    *("ouro_small_edges", "ouro_small_results", "train_ouro_small", "small_language_models"),
    *("huginn_small_models", "huginn_small_results", "huginn_small_tables", "train_huginn_small"),
    *("claims", "learned_gates", "second_order_exits", "lens_ranks", "forced_depth"),
    *("cyclic_fixed_points", "stages_of_inference", "doubling"),
    *("state_regimes", "path_independence", "huginn_lenses", "query_handoff", "albert_orbits"),
    *("failed_puzzles", "stable_failures", "one_blank", "locality"),
    *("train_trm_small", "trained_reasoners", "trained_reasoners_page"),
    *("reasoner_models", "cell_relations"),
)
"""With tests of their own, here or in a file of their name."""

NOTEBOOKS = ROOT / "analyses" / "notebooks"
DEAR = {"carry_probing", "first_look", "interchange", "limits", "model_to_program", "own_model"}
"""Notebooks that run with small studies."""

NO_IRIS = "import sys; sys.modules['rfc3987_syntax'] = None"
"""nbformat's schemas name no IRIs, and the grammar that checks them takes seconds to build."""

FEWER = {"steered_generation": {"(2000,)": "(400,)", "arange(2000) < 1000": "arange(400) < 200"}}
"""Numbers of examples that a notebook writes, and those of its test."""

FOLDERS = (ROOT / "analyses", ROOT / "analyses" / "papers")
SCRIPTS = sorted(path.stem for folder in FOLDERS for path in folder.glob("*.py"))


Run = Callable[[str, list[str], Path], list[str]]


@pytest.fixture(scope="module")
def script(warm_python: WarmPython, small_studies: WarmPython) -> Run:
    """Runs a script in a folder; the lines that it prints."""

    def run(name: str, arguments: list[str], folder: Path) -> list[str]:
        python = small_studies if name in COMPARING else warm_python
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        path = str(ROOT / "analyses" / f"{name}.py")
        done = python.run(path, *arguments, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_no_script_is_left_out() -> None:
    assert sorted([*SMALL, *OWN_MODELS, *TABLES, *ELSEWHERE]) == SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_script_draws_its_figure(
    name: str, barely_trained: Path, tmp_path: Path, script: Run
) -> None:
    out = tmp_path / "figure.html"
    lines = script(name, ["--run", str(barely_trained), "--out", str(out), *SMALL[name]], tmp_path)
    assert "Plotly.newPlot" in out.read_text()
    assert len(lines) > 1  # the path, and a finding


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OWN_MODELS))
def test_a_script_with_models_of_its_own_writes_a_page(
    name: str, tmp_path: Path, script: Run
) -> None:
    lines = script(name, ["--out", str(tmp_path / "out"), *OWN_MODELS[name]], tmp_path)
    assert "Plotly" in (tmp_path / "out" / f"{name}.html").read_text()
    assert list((tmp_path / "out" / "results").glob("*.safetensors"))
    assert len(lines) > 1  # the path, and a finding


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_script_of_many_models_prints_its_table(name: str, tmp_path: Path, script: Run) -> None:
    lines = script(name, ["--out", str(tmp_path / "out"), *TABLES[name]], tmp_path)
    said_first = {"near_misses": "wrong names", "seeds": "followed for", "notebook_models": "bits"}
    said_first["published_loss"] = "looped"
    assert said_first[name] in lines[0]
    assert str(tmp_path / "out") in lines[-1] and Path(lines[-1]).is_file()


@pytest.mark.slow
def test_an_entry_of_the_zoo_is_made_and_replaced(tmp_path: Path, script: Run) -> None:
    zoo = tmp_path / "zoo"
    (zoo / "parity").mkdir(parents=True)
    (zoo / "parity" / "old").touch()
    small = ["--samples", "2", "--set", "steps=5", "--set", "curriculum.max_n=2"]
    lines = script("make_zoo", ["--name", "parity", "--zoo", str(zoo), *small], tmp_path)
    assert lines[-1].startswith("parity: exact match") and " at 16; " in lines[-1]
    files = {path.name for path in (zoo / "parity").iterdir()}
    assert files == {"card.json", "config.json", "metrics.jsonl", "model"}


@pytest.mark.slow
def test_the_alignment_of_a_known_model_has_one_direction(tmp_path: Path, script: Run) -> None:
    compile_run("ripple", tmp_path / "ripple", max_length=9)
    small = ["--n", "8", "--rank", "1", "--pairs", "64", "--samples", "64", "--steps", "20"]
    lines = script("alignment", ["--run", str(tmp_path / "ripple"), *small], tmp_path)
    (learned,) = (line for line in lines if line.strip().startswith("learned, 1"))
    # 64 pairs, but of 32 inputs.
    assert learned.split()[2:] == ["1.000", "(0.893-1.000)", "0.000"]
    assert (tmp_path / "alignment.html").is_file()


def test_the_guide_shows_the_task_and_the_programs_of_the_script() -> None:
    code = (ROOT / "analyses" / "own_program.py").read_text()
    page = (ROOT / "docs" / "write-a-program.md").read_text()
    for first, end in (
        ("DIGITS = 5\n", "digit = tok_map"),
        ("digit = tok_map", "GUESS = max_program"),
        ("GUESS = max_program", "PROGRAMS = ["),
        ("def check(", "def ground_truth("),
        ("def recipe(", "def conflicts("),
    ):
        shared = code[code.index(first) : code.index(end)].rstrip()
        assert shared in page, first


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs(
    name: str,
    barely_trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: WarmPython,
    small_studies: WarmPython,
) -> None:
    monkeypatch.setitem(sys.modules, "rfc3987_syntax", None)  # as NO_IRIS
    import nbformat
    from jupyter_client.provisioning import local_provisioner

    from analyses import run_notebooks

    monkeypatch.setenv("RUN", str(barely_trained))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("STEPS", "30")  # of the notebook that trains a model

    python = small_studies if name in DEAR else warm_python

    def warm_kernel(command: list[str], *, cwd: str, env: dict[str, str], **_: Any) -> Started:
        streams = [tmp_path / "stdout", tmp_path / "stderr"]
        return python.start(command[1:], streams, cwd=cwd, env=env, own_group=True)

    monkeypatch.setattr(local_provisioner, "launch_kernel", warm_kernel)
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    notebook = copy.deepcopy(stored)
    for cell in notebook.cells:
        for number, fewer in FEWER.get(name, {}).items():
            cell.source = cell.source.replace(number, fewer)
    if name in FEWER:
        assert "2000" not in "".join(cell.source for cell in notebook.cells)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(NO_IRIS))
    notebook = run_notebooks.execute(notebook, tmp_path)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    # Where they differ, analyses.run_notebooks makes the outputs of this code.
    assert stored.metadata["loopinterp"]["code"] == run_notebooks.digest(stored)
    kinds = {kind for output in run_notebooks.outputs(stored) for kind in output.get("data", ())}
    assert "image/png" in kinds and "application/vnd.plotly.v1+json" not in kinds
