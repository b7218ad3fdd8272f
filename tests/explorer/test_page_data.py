"""What the page is given, read back in Python."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace

import numpy as np

from loopinterp.explorer import Exploration, page_data
from loopinterp.explorer.page_data import SHARE, page_json

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


def test_hostile_words_stay_in_their_strings(exploration: Exploration) -> None:
    tokens = [HOSTILE[: len(row)] for row in exploration.tokens]
    text = page_json(replace(exploration, tokens=tokens, asks=HOSTILE[0]))
    assert "<" not in text and text.isascii()
    again = json.loads(text)
    assert again["asks"] == HOSTILE[0]
    assert [one["tokens"] for one in again["examples"]] == tokens
