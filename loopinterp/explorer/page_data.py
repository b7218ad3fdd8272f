"""An exploration as the page takes it, JSON with bytes; and the script that shows it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from loopinterp.explorer.exploration import Exploration

SHARE = 65535
"""A share of 1 as the page has it: shares are 16-bit integers."""

_MODULES = (
    "explorer_data.js",
    "explorer_state.js",
    "explorer_drawing.js",
    "explorer_files.js",
    "explorer.js",
)
"""The component's modules, each after those that it imports."""


def page_data(result: Exploration) -> dict[str, Any]:
    """What the component reads: texts, arrays by type and shape, and the bytes of all of them.

    Example:
        >>> from loopinterp.explorer import explore
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> found = page_data(explore(model, Addition(), n=5, examples=2))
        >>> found["arrays"]["answer"]["shape"], found["arrays"]["answer"]["type"]
        ([2, 7, 6, 2], 'u8')
    """
    data = result.data
    examples = [
        {
            "reason": result.reasons[k],
            "detail": result.details[k],
            "said": result.said[k],
            "tokens": result.tokens[k],
            "loops": int(data["n_loops"][k]),
            "askedAfter": int(data["asked_after"][k]),
        }
        for k in range(data.sizes["example"])
    ]
    shares = ("probability", "inner_probability", "attention")
    arrays, raw = {}, b""
    for name, array in data.data_vars.items():
        if array.ndim > 1:
            values = _packed(array.values, share=name in shares)
            kind = f"{values.dtype.kind}{8 * values.dtype.itemsize}"
            arrays[str(name)] = {"type": kind, "shape": list(values.shape), "start": len(raw)}
            raw += values.astype(values.dtype.newbyteorder("<")).tobytes()
    return {
        "asks": result.asks,
        "examples": examples,
        "classes": result.n_classes,
        "symbols": result.symbols,
        "axes": result.axes,
        "missing": result.missing,
        "names": [str(name) for name in data["name"].values] if "variable" in data else [],
        "arrays": arrays,
        "bytes": base64.b64encode(gzip.compress(raw, mtime=0)).decode(),
    }


def page_json(result: Exploration) -> str:
    """:func:`page_data` as JSON in ASCII that cannot end its own script tag."""
    return json.dumps(page_data(result), separators=(",", ":")).replace("<", "\\u003c")


def _packed(values: np.ndarray, *, share: bool) -> np.ndarray:
    """An array in as few bits as it needs."""
    if share:
        return np.rint(np.nan_to_num(values.astype(np.float64)) * SHARE).astype(np.uint16)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    kinds = (np.uint8, np.int8, np.int16, np.int32)
    return values.astype(
        next(t for t in kinds if np.iinfo(t).min <= least and most <= np.iinfo(t).max)
    )


def read_asset(name: str) -> str:
    """The text of a file of the component."""
    return (files("loopinterp.explorer") / "assets" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The component's modules as one, in which ``mount`` is defined and nothing is imported."""
    texts = [re.sub(r"^import [^;]*;\n", "", read_asset(name), flags=re.M) for name in _MODULES]
    return "\n".join(re.sub(r"^export ", "", text, flags=re.M) for text in texts)
