"""Every Python block of the README and the guide runs, in order, page by page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, barely_trained: Path) -> None:
    shutil.copytree(barely_trained, tmp_path / "runs" / "demo")
    blocks = BLOCK.findall(page.read_text())
    script = "import torch\ntorch.set_num_threads(1)\n" + "\n".join(blocks)
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", script]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_relative_links_of_the_readme_lead_somewhere() -> None:
    for page in PAGES[:2]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"
