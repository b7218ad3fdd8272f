"""The pictures of the guide: all there, those of ideas show what the page says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyses import pictures
from analyses.tables_in_pages import PAGES, put
from tests.warm_python import WarmPython


def test_every_picture_is_there_and_the_gallery_shows_them() -> None:
    shown = (*pictures.PHOTOGRAPHED, *pictures.GALLERY)
    for name in (*pictures.IDEAS, *(one.name for one in shown)):
        picture = (pictures.PICTURES / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 260_000
    page = (PAGES / "gallery.md").read_text()
    assert put(page, {"gallery": pictures.as_cards(shown)}) == page
    assert all((PAGES / f"{one.page}.md").is_file() for one in shown)


@torch.no_grad()
def test_a_change_gets_one_position_a_loop_and_no_farther() -> None:
    figure: Any = pictures.light_cone()
    cells = np.array(figure.data[0].z)  # [loop, position]
    loops, positions = np.indices(cells.shape)
    outside = (positions < 6) | (positions > 6 + loops)
    assert np.abs(cells[outside]).max() < 1e-5
    front = (positions == 6 + loops) & (positions < cells.shape[1])
    assert cells[front].min() > 0.5


@torch.no_grad()
def test_planted_carries_live_as_long_as_their_programs_hold_them() -> None:
    figure: Any = pictures.hold_times()
    lives = {trace.name.split()[0]: sum(trace.y) for trace in figure.data}
    assert lives == {"ripple": 1, "held": 3, "sticky": 8}


@pytest.mark.browser
def test_figures_and_pages_are_drawn_as_still_pictures(
    chromium: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    # In a process of its own: Playwright takes one browser driver a process.
    names = ("fates", "circuit-graph")
    command = ["-m", "analyses.pictures", "--only", *names, "--out", str(tmp_path)]
    warm_python.run(*command, cwd=PAGES.parent).check_returncode()
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
