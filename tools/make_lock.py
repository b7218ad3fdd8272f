"""Write requirements.lock: ``python tools/make_lock.py python3.11 python3.10``.

Resolves the project with each Python given, in an empty environment and without installing
anything. The first one's versions hold everywhere; where an older Python cannot have them, a
second line with an environment marker gives it its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = ["torch==2.13.0"]
# Exactly pinned by torch's own metadata, and different on each platform.
TORCH_ONLY = re.compile(r"nvidia-|cuda-|triton$")
HEADER = "# Exact versions, used as constraints by `make env`. Made by tools/make_lock.py.\n"


def resolve(python: str) -> tuple[tuple[int, int], dict[str, str]]:
    """The version of a Python, and the version of each package it would get."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        binary, report = Path(folder, "bin", "python"), Path(folder, "report.json")
        pip = [str(binary), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        wanted = [*PINNED, "--editable", f"{ROOT}[dev,docs,browser,kokoro]"]
        subprocess.run([*pip, "--dry-run", "--report", str(report), *wanted], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        code = "import sys; print(*sys.version_info[:2])"
        version = subprocess.run([binary, "-c", code], capture_output=True, text=True, check=True)
    major, minor = map(int, version.stdout.split())
    packages = {
        re.sub(r"[-_.]+", "-", m["name"]).lower(): m["version"].split("+")[0] for m in found
    }
    ignored = {"loopinterp", "setuptools"}
    return (major, minor), {
        name: version
        for name, version in packages.items()
        if name not in ignored and not TORCH_ONLY.match(name)
    }


def main(pythons: list[str]) -> None:
    (_, newest), *older = [resolve(python) for python in pythons]
    lines = []
    for name in sorted({name for _, packages in [(0, newest), *older] for name in packages}):
        markers = []
        for (major, minor), packages in older:
            if packages.get(name) != newest.get(name):
                below = f'python_version < "{major}.{minor + 1}"'
                markers.append(f'python_version >= "{major}.{minor + 1}"')
                if name in packages:
                    lines.append(f"{name}=={packages[name]} ; {below}")
        if name in newest:
            tail = f" ; {' and '.join(markers)}" if markers else ""
            lines.append(f"{name}=={newest[name]}{tail}")
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
