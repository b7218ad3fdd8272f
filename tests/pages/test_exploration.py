from __future__ import annotations

import base64
import gzip
import json
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np

from loopinterp.pages import Exploration
from loopinterp.pages.assets import script
from loopinterp.pages.exploration import SHARE, page_data, page_json
from tests.refusals import naming

HOSTILE = ["</script><script>alert(1)</script>", "\u202eabc", "\x00", "<!--", "é"]


def test_arrays_come_back(exploration: Exploration) -> None:
    data = page_data(exploration)
    raw = gzip.decompress(base64.b64decode(data["bytes"]))
    for name, packed in data["arrays"].items():
        kind = np.dtype(f"<{packed['type'][0]}{int(packed['type'][1:]) // 8}")
        count = int(np.prod(packed["shape"]))
        values = np.frombuffer(raw, kind, count, packed["start"]).reshape(packed["shape"])
        own = exploration.data[name].values
        if name in ("probability", "inner_probability", "attention"):
            np.testing.assert_allclose(values / SHARE, np.nan_to_num(own), atol=1e-5)
        else:
            np.testing.assert_array_equal(values, own)
    assert set(data["arrays"]) == {k for k, x in exploration.data.items() if x.ndim > 1}


def test_a_notebook_shows_the_explorer_in_a_frame(exploration: Exploration) -> None:
    shown = replace(exploration, asks=HOSTILE[0])
    start, frame = shown._repr_html_().split("<iframe ")
    assert "<li>" in start and HOSTILE[0] not in start
    source = frame.split('srcdoc="')[1].split('"')[0]
    page = unescape(source)
    data = page.split('class="exploration-json">')[1].split("</script>")[0]
    assert json.loads(data) == page_data(shown)
    assert page.count("<script") == 2 and "Content-Security-Policy" in page


def test_hostile_words_stay_in_their_strings(exploration: Exploration) -> None:
    tokens = [HOSTILE[: len(row)] for row in exploration.tokens]
    text = page_json(replace(exploration, tokens=tokens, asks=HOSTILE[0]))
    assert "<" not in text and text.isascii()
    again = json.loads(text)
    assert again["asks"] == HOSTILE[0]
    assert [one["tokens"] for one in again["examples"]] == tokens


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


def test_an_explorer_saves_its_page_by_its_ending(exploration: Exploration, tmp_path: Path) -> None:
    page = exploration.save(tmp_path / "one.html", title="A page <of> mine")
    assert page == tmp_path / "one.html"
    text = page.read_text()
    assert "A page &lt;of&gt; mine" in text and page_json(exploration) in text
    exploration.save(page)  # a page of ours is replaced
    (tmp_path / "mine.html").write_text("not a page of ours")
    with naming("output file .*mine.html"):
        exploration.save(tmp_path / "mine.html")


def test_an_explorer_is_saved_as_a_result_too(exploration: Exploration, tmp_path: Path) -> None:
    path = exploration.save(tmp_path, "some")
    assert path == tmp_path / "some.safetensors"
    assert Exploration.load(path).tokens == exploration.tokens
    with naming("title"):
        exploration.save(tmp_path, "some", title="A page")
