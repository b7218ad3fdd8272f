"""Shared by all tests: run-time type checks, a rule against silent skips, and small fixtures."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import runtime_types
from tests.small_studies import BEFORE_SCRIPTS
from tests.warm_python import WarmPython

gc.disable()  # until all tests are collected: next to nothing of what that makes is garbage
runtime_types.install()
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the workers, which begin after this, and of scripts
os.environ["LOOPINTERP_PROGRESS"] = "0"  # however slow the machine, tests print nothing
# No test is timed: how long one example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

SLOWEST = ("end_to_end", "analyses", "test_documentation.py", "browser", "benchmark", "circuits")
SLOWEST += ("edges", "decompiler", "comparison", "compiler", "programs", "test_devices.py")
"""The slowest files and rooms: they go first, so that processes that share files end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    @cache
    def rank(path: Path) -> int:
        room = path.relative_to(here).parts[0] if path.is_relative_to(here) else ""
        return SLOWEST.index(room) if room in SLOWEST else len(SLOWEST)

    items.sort(key=lambda item: rank(item.path))


def pytest_collection_finish() -> None:
    """What is there once all tests are collected stays, so it is not looked through for garbage."""
    gc.freeze()
    gc.enable()


def _no_silent_skip(report: Any) -> None:
    """In CI a skipped test is a failed one: whatever it needs, CI must install."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be skipped: {reason}"


def pytest_runtest_setup() -> None:
    runtime_types.start_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _no_silent_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    _no_silent_skip(report)
    return report


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def barely_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small addition run of a second's training. Shared: copy it before writing into it."""
    from loopinterp.training import RECIPES, apply_settings, train

    small = ["steps=60", "curriculum.max_n=3", "model.d_model=32", "model.n_heads=2"]
    folder = tmp_path_factory.mktemp("runs") / "addition"
    train(apply_settings(RECIPES["addition"], small), folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs scripts in processes of their own, without the time that imports take."""
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def small_studies() -> Iterator[WarmPython]:
    """The same with small studies; the package is imported."""
    python = WarmPython(BEFORE_SCRIPTS)
    yield python
    python.close()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium that Playwright can drive; skips where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    return path


@pytest.fixture(scope="session")
def node() -> str:
    """The path of node, which runs the tests of scripts; skips where there is none."""
    path = shutil.which("node") or shutil.which("nodejs")
    if path is None:
        pytest.skip("no node on this machine (Debian: apt-get install nodejs)")
    return path


@pytest.fixture
def no_type_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that pass what the annotations forbid, to see the library's own error for it."""
    from jaxtyping import config

    monkeypatch.setattr(config, "jaxtyping_disable", True)
