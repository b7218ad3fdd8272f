"""matplotlib draws the arrays of a result, with the names of their axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def drawn() -> Any:
    """Divergence of the logit lens by loop: an array with one named axis."""
    import loopinterp
    from loopinterp.lenses import lens_study

    model = loopinterp.load_pretrained("addition")
    result = lens_study(model, model.task, lens="logit", n=4, n_loops=5, batch_size=16)
    return result.data["kl"].sel(layer="state").mean(["batch", "pos"])


def answer(folder: Path) -> dict[str, Any]:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("svg")
    (line,) = drawn().plot()
    line.figure.savefig(folder / "kl.svg")
    points = torch.tensor(line.get_xydata().T.copy())  # [x and y, loop]
    return {"points": points, "label": line.axes.get_xlabel()}


def test_the_points_are_the_values(tmp_path: Path) -> None:
    seen, data = ask("current", __name__, tmp_path), drawn()
    expected = torch.tensor([data["loop"].values.tolist(), data.values.tolist()])
    assert seen["label"] == "loop" and expected[1].max() > 0.01
    torch.testing.assert_close(seen["points"].float(), expected.float())
    assert "<svg" in (tmp_path / "kl.svg").read_text()
