"""A script that is run in a warm process sees what one sees that Python was started for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

SEEN = """\
import json, os, sys
own = sorted(name for name in sys.modules if name.split(".")[0] in ("loopinterp", "tests"))
seen = [__name__, sys.argv[1:], os.getcwd(), os.environ.get("SAID"), os.environ.get("HOME"), own]
print(json.dumps([*seen, globals() is vars(sys.modules["__main__"]), sys.stdin.read()]))
import beside
print(beside.__file__)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_script_finds_what_it_was_given(
    kind: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text(SEEN)
    folder = tmp_path / "elsewhere" if kind == "script" else tmp_path
    folder.mkdir(exist_ok=True)
    (tmp_path / "beside.py").touch()
    begun = {"-c": ["-c", SEEN], "-m": ["-m", "one"], "script": [str(tmp_path / "one.py")]}[kind]
    done = warm_python.run(*begun, "a", "b c", cwd=folder, env={"SAID": "x"})
    assert (done.returncode, done.stderr) == (0, "")
    seen, peer = done.stdout.splitlines()
    assert json.loads(seen) == ["__main__", ["a", "b c"], str(folder), "x", None, [], True, ""]
    assert Path(peer) == tmp_path / "beside.py"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no such thing')", 1, "no such thing\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'the end\\n')", 0, "the end\n"),
        ("import os; os.abort()", -6, ""),
        ("import time; time.sleep(60)", -14, ""),
    ],
)  # fmt: skip
def test_it_ends_as_it_would(code: str, status: int, said: str, warm_python: WarmPython) -> None:
    done = warm_python.run("-c", code, timeout=1 if status == -14 else 60)
    assert done.returncode == status
    assert done.stderr.endswith(said) and bool(done.stderr) == bool(said)


def test_one_leaves_nothing_to_the_next(warm_python: WarmPython, tmp_path: Path) -> None:
    leaving = "import os, sys, torch; torch.left = 1; os.environ['LEFT'] = '1'; os.chdir('/')"
    warm_python.run("-c", leaving, cwd=tmp_path).check_returncode()
    after = "import os, torch; print(os.getcwd(), hasattr(torch, 'left'), os.environ.get('LEFT'))"
    assert warm_python.run("-c", after, cwd=tmp_path).stdout == f"{tmp_path} False None\n"
    assert os.environ.get("LEFT") is None


def test_what_is_run_first_is_there_for_each_and_for_no_other(warm_python: WarmPython) -> None:
    other = WarmPython("import torch; torch.first = 1")
    code = "import torch; print(getattr(torch, 'first', 0)); torch.first = 2"
    assert [other.run("-c", code).stdout for _ in range(2)] == ["1\n", "1\n"]
    assert warm_python.run("-c", code).stdout == "0\n"
    other.close()
