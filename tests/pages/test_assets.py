from __future__ import annotations

import base64
import gzip
import io
import json
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs_version

from loopinterp.pages.assets import FLAT, figure_json, plotly_scripts, table_download


def content(href: str) -> bytes:
    return base64.b64decode(href.partition(",")[2])


def test_a_table_comes_back_from_its_link() -> None:
    table = pd.DataFrame({"length": [8, 96], "exact, match": [1.0, 0.25]})
    download = table_download(table, "Exact match")
    back = pd.read_csv(io.BytesIO(content(download.href)))
    pd.testing.assert_frame_equal(back, table)
    assert (download.filename, download.rows) == ("exact-match.csv", 2)


def test_a_long_table_is_compressed() -> None:
    table = pd.DataFrame({"a": range(100_000)})
    download = table_download(table, "long")
    assert download.filename == "long.csv.gz"
    back = pd.read_csv(io.BytesIO(gzip.decompress(content(download.href))))
    pd.testing.assert_frame_equal(back, table)


def test_a_table_beyond_all_bounds_is_not_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopinterp.pages.assets._LARGEST", 10)
    download = table_download(pd.DataFrame({"a": range(100)}), "huge")
    assert download.href == "" and download.rows == 100


def test_no_cell_is_a_formula_for_a_spreadsheet() -> None:
    harmful = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "plain", "a=b"]
    table = pd.DataFrame({"=name": harmful, "x": [-1.5] * 8, "k": [-2] * 8, "ok": [True] * 8})
    back = pd.read_csv(
        io.BytesIO(content(table_download(table, "t").href)), lineterminator="\n", dtype={"k": int}
    )
    assert back.columns.tolist() == ["'=name", "x", "k", "ok"]
    assert back["'=name"].tolist() == [f"'{cell}" for cell in harmful[:6]] + harmful[6:]
    assert back["x"].tolist() == [-1.5] * 8 and back["k"].tolist() == [-2] * 8
    assert table.columns[0] == "=name" and table["=name"].tolist() == harmful


def test_a_figure_cannot_end_its_own_script_tag() -> None:
    figure = go.Figure(go.Scatter(x=[1], y=[1], name="</script><script>alert(1)</script>"))
    assert "</script" not in figure_json(figure)


class AsWithOrjson(go.Figure):
    """Its JSON as Plotly writes it where orjson is installed: with ``<`` left as it is."""

    def to_json(self, *args: Any, **kwargs: Any) -> str:
        return json.dumps(json.loads(str(super().to_json(*args, **kwargs))))


@pytest.mark.parametrize("kind", [go.Figure, AsWithOrjson])
def test_no_text_of_a_figure_is_a_link(kind: type[go.Figure]) -> None:
    figure = kind(go.Scatter(x=[1], y=["<a href='https://example.org'>y</a>"], name="<b>n</b>"))
    [trace] = json.loads(figure_json(figure))["data"]
    assert trace["y"] == ["&lt;a href='https://example.org'>y&lt;/a>"]
    assert trace["name"] == "<b>n</b>"


def test_flat_figures_have_the_smaller_script_of_the_same_plotly() -> None:
    flat, whole = plotly_scripts([True, False]).values()
    version = get_plotlyjs_version().partition(".")[0]
    assert f"v{version}." in flat[:200] and f"v{version}." in whole[:200]
    assert len(flat) < len(whole) / 3 and "</script" not in flat
    assert [*plotly_scripts([True])] == ["plotly-flat"]
    for kind in FLAT:  # each is there under its own name
        assert f'name:"{kind}"' in flat, kind
    assert 'name:"scatter3d"' in whole and 'name:"scatter3d"' not in flat
