"""The component's own tests, run by node; and the modules as one script."""

from __future__ import annotations

import subprocess
from pathlib import Path

from loopinterp.explorer.page_data import script

HERE = Path(__file__).parent


def test_javascript_tests_pass(node: str) -> None:
    files = sorted(map(str, HERE.glob("*.test.mjs")))
    assert len(files) == 4
    # Files by name: any version of node that has a test runner takes them.
    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# fail 0" in done.stdout and "# skipped 0" in done.stdout


def test_the_script_imports_nothing_and_is_well_formed(node: str, tmp_path: Path) -> None:
    text = script()
    assert "import " not in text.replace("imports", "") and "\nexport " not in text
    assert "</script" not in text
    (tmp_path / "one.mjs").write_text(text)
    done = subprocess.run(
        [node, "--check", tmp_path / "one.mjs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
