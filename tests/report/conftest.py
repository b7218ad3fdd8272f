from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import synthetic


@pytest.fixture(scope="session")
def synthetic_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with results of every section; not to be changed."""
    return synthetic.write_run(tmp_path_factory.mktemp("runs") / "demo")
