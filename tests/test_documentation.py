"""The guide holds: its Python runs, page by page, and its map is that of the package."""

from __future__ import annotations

import ast
import os
import re
import shutil
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


BEFORE = """\
import warnings
warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
import torch
torch.set_num_threads(1)
del warnings, torch
"""
SMALL_STUDIES = re.compile(
    r"compare_programs|decompil|local_stability|carry_study|edge_study|autoencoder"
)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    barely_trained: Path,
    warm_python: WarmPython,
    small_studies: WarmPython,
) -> None:
    shutil.copytree(barely_trained, tmp_path / "runs" / "demo")
    blocks = BLOCK.findall(page.read_text())
    code = "\n".join(blocks)
    python = small_studies if SMALL_STUDIES.search(code) else warm_python
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = python.run("-c", BEFORE + code, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


def test_relative_links_of_the_readme_lead_somewhere() -> None:
    for page in PAGES[:2]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


MAP = (ROOT / "docs" / "map.md").read_text()


def test_files_on_the_map_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", MAP))
    assert named
    assert not [name for name in named if not (ROOT / "loopinterp" / name).is_file()]


def test_rooms_import_no_others_than_the_map_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", MAP, re.MULTILINE)
    allowed = {room: set(re.findall(r"`(\w+)`", others)) for room, others in rows}
    rooms = {path.parent.name for path in (ROOT / "loopinterp").glob("*/__init__.py")}
    assert set(allowed) == rooms
    list(TopologicalSorter(allowed).static_order())  # raises where there is a circle
    for room, others in allowed.items():
        for path in (ROOT / "loopinterp" / room).rglob("*.py"):
            names = {name.split(".")[1] for name in _imported(path) if "loopinterp." in name}
            known = names & rooms - {room, "core"}  # on which all of them stand
            assert known <= others, f"{path} imports {known - others}"


def test_no_module_imports_itself_through_others() -> None:
    """No circles, imports inside functions and for types alone included."""
    modules = {_name(path): path for path in (ROOT / "loopinterp").rglob("*.py")}
    exported = {}  # name that a package exports -> the module that defines it
    for stub in (ROOT / "loopinterp").rglob("__init__.pyi"):
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (f"{_name(stub)}.{alias.name}" for alias in node.names)
                exported |= dict.fromkeys(names, f"{_name(stub)}.{node.module}")
    imports = {}
    for module, path in modules.items():
        imported = (exported.get(name, name) for name in _imported(path))
        known = (name if name in modules else name.rpartition(".")[0] for name in imported)
        imports[module] = {name for name in known if name in modules} - {module}
    assert sum(map(len, imports.values())) > len(modules)
    list(TopologicalSorter(imports).static_order())  # raises where there is a circle


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path) -> set[str]:
    """Full names of what a file imports, at its top or later: modules, and names in modules."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    return names | {f"{n.module}.{a.name}" for n in froms for a in n.names}
