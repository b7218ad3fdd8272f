"""The explorer's result: a few examples, at each loop and position."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup

from loopinterp.core.results import Finding, Result, findings_of
from loopinterp.figures.circuit_graph import script_json, security_policy
from loopinterp.models.protocol import refuse
from loopinterp.pages.assets import page_script, read_asset

_FIT = """new ResizeObserver(() => {
  if (frameElement) frameElement.style.height = `${document.body.offsetHeight + 8}px`;
}).observe(document.body);"""
_FRAMED = """<!doctype html><meta charset="utf-8">{policy}
<meta name="color-scheme" content="light dark">
<style>body {{ margin: 0; font-family: system-ui, sans-serif }} {style}</style>
<div class="explorer"></div><script type="application/json" class="exploration-json">{data}</script>
<script>{script}</script>"""

NOT_SAID = -32768
"""Stands for an implied value that is undetermined, and for cells outside an example."""


class Missing(Enum):
    """What the explorer does not show, and the reason as a clause that follows "as"."""

    NO_HOOKS = ("attention", "{model} has no hooks inside its loops")
    UNREADABLE_PATTERNS = ("attention", "its patterns cannot be read ({error})")
    WEAK_ATTENTION = (
        "attention below the strongest",
        "only the {kept} largest of up to {seen} weights are kept for each head and position",
    )
    WHOLE_LOOP_LENS = (
        "readings within the loop",
        "the lens was fitted to states after whole loops",
    )
    NO_PROGRAM = (
        "variables",
        "no program is given that reads these tokens and solves the task",
    )
    CHANGED_RUN = ("attention", "it is shown for the clean run only")


def spell_missing(missing: Mapping[str, Any]) -> dict[str, str]:
    """What is not shown, with the reason in words.

    Example:
        >>> spell_missing({"NO_HOOKS": {"model": "Mine"}})
        {'attention': 'Mine has no hooks inside its loops'}
    """
    clauses = {}
    for code, values in missing.items():
        if isinstance(values, str):  # the clause itself, in results of earlier versions
            clauses[code] = values
        else:
            what, why = Missing[code].value
            clauses[what] = why.format(**values)
    return clauses


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Exploration(Result, kind="exploration"):
    """What the explorer shows of a model, or of a program (answers and variables only).

    Beyond an example's ``n_pos`` positions or ``n_loops`` loops, answers and targets are -1,
    numbers NaN and attention 0. Loop 0 is the initial state. Attention at loop t made the state
    h_t; at loop 0 it is 0.

    Arrays:
        row, n_pos, n_loops: The example's row in its batch; positions and loops.
        asked_after: The loop after which the answer is scored.
        target: The right class; -1 where nothing is asked.
        answer, probability: The likeliest classes, best first; -1 where a program leaves it open.
        entropy: Entropy of the reading, in bits.
        moved: Relative residual, ``|h_t - h_{t-1}| / |h_t|``.
        plane: Coordinates in the shown plane.
        inner_answer, inner_probability: The likeliest class if the loop ended after each of its
            layers but the last; -1 at loop 0.
        key, attention: The positions that a head attends to most, strongest first, and their
            weights.
        variable: Values of the programs' variables.
        implied: The only value with which the program would give the model's answer; else
            :data:`NOT_SAID`.

    Attributes:
        asks: The task's question.
        by_hand: The first example solved by hand.
        reasons: Why each example was chosen, in a few words; ``details``: in a sentence.
        said: Each example in words.
        tokens: Words of the tokens of each example.
        symbols: A word for each class shown.
        missing: Codes and values of what is not shown (:func:`spell_missing`).
        n_examples: Examples that these were chosen from.
        lens: "coda" is the model's own readout.
    """

    VARIABLES: ClassVar = {
        **dict.fromkeys(("row", "n_pos", "n_loops", "asked_after"), "example"),
        "target": "example pos",
        **dict.fromkeys(("answer", "probability"), "example loop pos rank"),
        **dict.fromkeys(("entropy", "moved"), "example loop pos"),
        "plane": "example loop pos axis",
        **dict.fromkeys(("inner_answer", "inner_probability"), "example loop inner pos"),
        **dict.fromkeys(("key", "attention"), "example loop layer head pos nth"),
        **dict.fromkeys(("variable", "implied"), "name example loop pos"),
    }
    OPTIONAL: ClassVar = frozenset(
        {"probability", "entropy", "moved", "plane", "inner_answer", "inner_probability"}
        | {"key", "attention", "variable", "implied"}
    )

    asks: str = ""
    by_hand: str = ""
    reasons: list[str]
    details: list[str]
    said: list[str]
    tokens: list[list[str]]
    n_classes: int
    symbols: dict[str, str]
    axes: list[str] = field(default_factory=list)
    missing: dict[str, Any] = field(default_factory=dict)
    n_examples: int
    lens: str = "coda"
    of_other_weights: bool = False

    def save(self, folder: str | Path, name: str | None = None, *, title: str = "") -> Path:
        """Save as every result; a path that ends in ``.html`` is a page with the explorer instead.

        ``name`` is that of the file in a folder, ``title`` that of the page.

        Raises:
            InputError: If the page is a file that is no such page, or cannot be written.
        """
        if name is None and Path(folder).suffix == ".html":
            # By name, as the report imports this module.
            write_results = importlib.import_module("loopinterp.pages.report").write_results
            return write_results({"explorer": self}, folder, title=title or self.asks or "Explorer")
        refuse({"title": title or None}, "none of a result in a folder", "Leave it out.")
        return super().save(folder, name)

    def _repr_html_(self) -> str:
        """The findings, and the explorer in a frame of its own."""
        script = page_script() + _FIT
        parts = {"policy": security_policy([script]), "style": read_asset("explorer/explorer.css")}
        page = _FRAMED.format(data=page_json(self), script=script, **parts)
        look = "width: 100%; height: 40rem; border: 0"
        frame = f'<iframe title="Explorer" srcdoc="{escape(page)}" style="{look}"></iframe>'
        return super()._repr_html_() + frame


@findings_of.register
def _(result: Exploration) -> list[Finding]:
    """The question, the first example by hand, and when the model solves it."""
    task = " ".join(text for text in (result.asks, result.by_hand) if text)
    findings = [Finding(task, section="explorer")] if task else []
    reader = {
        "coda": "The model",
        "logit": "The logit lens (final norm and unembedding, a coda left out)",
        "tuned": "The tuned lens (the model's readout, behind an affine map fitted to each loop)",
        "jacobian": "The Jacobian lens (the model's readout of a state's mean effect on the end)",
    }[result.lens]
    reader += ", fitted to other weights than these," if result.of_other_weights else ""
    first = result.data.isel(example=0)
    n_loops, loop = int(first["n_loops"]), int(first["asked_after"])
    is_asked = (first["target"] >= 0).values
    if not is_asked.any():
        return [*findings, Finding(_final_readings(result, reader), section="explorer")]
    # [loop, pos], at the positions that are asked about
    right = (first["answer"].isel(rank=0) == first["target"]).values[: n_loops + 1, is_asked]
    n_asked, all_right, after = int(is_asked.sum()), right.all(1), right.sum(1)
    start = f"{reader} has {after[1]} of the {n_asked} symbols correct after 1 loop"
    if n_loops == loop == 1:
        text = f"{start}, when it is scored."
    elif all_right[-1]:
        # The loop after the last at which something was wrong.
        since = n_loops - all_right[::-1].tolist().index(False) + 1 if not all_right.all() else 0
        until = "on" if n_loops >= loop else f"to {n_loops}, the last that is shown"
        start = f"{start}, and all" if since > 1 else f"{reader} has all {n_asked} symbols correct"
        text = f"{start} from loop {since} {until} (scored after loop {loop})."
    elif n_loops >= loop and not all_right[loop]:
        text = f"{start}, and {after[loop]} after {loop}, when it is scored: this one is wrong."
    else:
        text = f"{start}, and {after[-1]} after {n_loops} (scored after loop {loop})."
    return [*findings, Finding(text, section="explorer")]


def _final_readings(result: Exploration, reader: str) -> str:
    """From which loop on the first example's positions have their last reading."""
    n_pos, first = len(result.tokens[0]), result.data.isel(example=0)
    # [loop, pos]
    answer = first["answer"].isel(rank=0).values[: int(first["n_loops"]) + 1, :n_pos]
    since = np.sort([np.max(np.nonzero(a != a[-1])[0], initial=-1) + 1 for a in answer.T])
    half, last = since[(n_pos - 1) // 2], since[-1]
    if half == last:
        return f"{reader} has its final reading from loop {last} on at all positions."
    return (
        f"{reader} has its final reading at half of the {n_pos} positions from loop {half} on, and "
        f"at all of them from loop {last} on."
    )


SHARE = 65535
"""A share of 1 in the page, where shares are 16-bit integers."""


def page_data(result: Exploration) -> dict[str, Any]:
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
    arrays, raw = {}, b""
    for name, array in data.data_vars.items():
        if array.ndim > 1:
            values = array.values
            if name in ("probability", "inner_probability", "attention"):
                values = np.rint(np.nan_to_num(values.astype(np.float64)) * SHARE)
                values = values.astype(np.uint16)
            elif values.dtype.kind == "f":
                values = values.astype(np.float32)
            else:  # whole numbers in as few bits as they need
                low, high = int(values.min(initial=0)), int(values.max(initial=0))
                sizes = (np.uint8, np.int8, np.int16, np.int32)
                fits = (t for t in sizes if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
                values = values.astype(next(fits))
            kind = f"{values.dtype.kind}{8 * values.dtype.itemsize}"
            arrays[str(name)] = {"type": kind, "shape": list(values.shape), "start": len(raw)}
            raw += values.astype(values.dtype.newbyteorder("<")).tobytes()
    return {
        "asks": result.asks,
        "examples": examples,
        "classes": result.n_classes,
        "symbols": result.symbols,
        "axes": result.axes,
        "missing": spell_missing(result.missing),
        "names": [str(name) for name in data["name"].values] if "variable" in data else [],
        "arrays": arrays,
        "bytes": base64.b64encode(gzip.compress(raw, mtime=0)).decode(),
    }


def page_json(result: Exploration) -> Markup:
    """:func:`page_data` as ASCII JSON that is safe inside a script tag."""
    return script_json(json.dumps(page_data(result), separators=(",", ":")))
