"""The explorer in JupyterLab: a notebook is opened and run there, and its widget used.

Screenshots are left in ``build/artefacts``, for whoever wants to see what was tested.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
ARTEFACTS = ROOT / "build" / "artefacts"
CELL = """
from loopinterp.pages import ExplorerWidget
from loopinterp.tasks import Addition
from loopinterp.zoo import load_pretrained

batch = Addition().encode([(1, 126), (1, 127), (5, 9), (64, 64)], n=8)
ExplorerWidget(load_pretrained("addition"), batch, programs=["ripple"], examples=4)
"""

# A notebook's own style reaches into what it shows: the facts of a place must stay in their cells.
_OVERLAPS = """(node) => {
  const cells = [...node.querySelectorAll('.x-facts dt, .x-facts dd')]
    .map((cell) => [cell.textContent, cell.getBoundingClientRect()]);
  return cells.flatMap(([a, one], k) => cells.slice(k + 1)
    .filter(([, two]) => one.right > two.left + 1 && two.right > one.left + 1
      && one.bottom > two.top + 1 && two.bottom > one.top + 1)
    .map(([b]) => `${a} | ${b}`));
}"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves one notebook."""
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": CELL.strip()}
    notebook = {
        "cells": [cell | {"execution_count": None, "outputs": []}],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "explorer.ipynb").write_text(json.dumps(notebook))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *(f"--port={port}", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token="),
        f"--ServerApp.root_dir={tmp_path}",
    ]
    with open(tmp_path / "lab.txt", "wb") as said:
        server = subprocess.Popen(
            command,
            env=os.environ | own | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)},
            cwd=tmp_path,
            stdout=said,
            stderr=said,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api", server, tmp_path / "lab.txt")
        yield f"{address}/lab/tree/explorer.ipynb?reset"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_for(address: str, server: subprocess.Popen[bytes], said: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, said.read_text()
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(said.read_text())


@pytest.fixture
def page(browser: Browser, lab: str) -> Iterator[Page]:
    page = browser.new_context(viewport={"width": 1440, "height": 1000}).new_page()
    page.set_default_timeout(120_000)
    page.goto(lab)
    yield page
    page.context.close()


def keep(page: Page, name: str) -> None:
    """Leave a picture of what was tested."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"jupyter-{name}.png")


def run_until_shown(page: Page, shown: Locator) -> None:
    """Run the cell; again if its key came before the notebook had its kernel."""
    from playwright.sync_api import TimeoutError as NotYet

    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    prompt = "document.querySelector('.jp-CodeCell .jp-InputPrompt').innerText"
    for _ in range(10):
        cell.click()
        before = page.evaluate(prompt)
        page.keyboard.press("Control+Enter")
        try:
            # It has a star while it runs and then a new number.
            page.wait_for_function(f"(before) => {prompt} !== before", arg=before, timeout=1500)
            done = f"(before) => {prompt} !== before && /\\d/.test({prompt})"
            page.wait_for_function(done, arg=before, timeout=45_000)
            shown.wait_for(timeout=45_000)
            return
        except NotYet:
            page.reload()
    shown.wait_for()


def test_the_widget_is_stepped_chosen_in_and_asked_in_jupyterlab(page: Page) -> None:
    first = page.locator(".explorer").first
    run_until_shown(page, first)
    state = "(node) => [node.explorer.state.loop, node.explorer.state.pos]"

    first.evaluate("(node) => node.explorer.select({ example: 0, loop: 3, pos: 4 })")
    first.locator(".x-scroll").press("ArrowDown")
    assert first.evaluate(state) == [4, 4]
    assert first.evaluate(_OVERLAPS) == []
    keep(page, "stepped")

    page.get_by_label("Example", exact=True).fill("77 + 51")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("01001101 + 00110011 = 10000000").first.wait_for()
    keep(page, "typed")

    first.evaluate("(node) => node.explorer.select({ example: 0, loop: 5, pos: 3 })")
    page.get_by_label("At the chosen place").select_option("zero")
    page.get_by_role("button", name="Put in here").click()
    second = page.locator(".explorer").nth(1)
    second.wait_for()
    page.get_by_text("After loop 5, position 3 is given zeros.").first.wait_for()
    first.locator(".x-scroll").press("ArrowDown")
    assert first.evaluate(state) == second.evaluate(state) == [6, 3]
    second.scroll_into_view_if_needed()
    keep(page, "side-by-side")
    claim = page.get_by_text("ripple makes no claim")
    assert claim.is_visible()

    page.get_by_label("Example", exact=True).scroll_into_view_if_needed()
    run_until_shown(page, first)
    first.evaluate("(node) => node.explorer.select({ example: 0, loop: 3, pos: 4 })")
    page.get_by_role("button", name="Put in here").click()
    third = page.locator(".explorer").nth(2)
    third.wait_for()
    third.get_by_text("The run of ripple with the same interchange").wait_for()
    assert third.evaluate(state) == [3, 4]
    third.locator(".x-scroll").press("ArrowDown")
    assert first.evaluate(state) == second.evaluate(state) == third.evaluate(state) == [4, 4]
    page.locator(".x-beside").scroll_into_view_if_needed()
    keep(page, "with-the-prediction")
