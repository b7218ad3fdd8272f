"""A few examples, with all that is shown of them at each loop and position."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, ClassVar

import numpy as np

from loopinterp.core.results import Finding, Result, findings_of
from loopinterp.figures.circuit_graph import security_policy

_FRAME_STYLE = "width: 100%; height: 40rem; border: 0"
_FIT = """new ResizeObserver(() => {
  if (frameElement) frameElement.style.height = `${document.body.offsetHeight + 8}px`;
}).observe(document.body);"""
_FRAMED = """<!doctype html><meta charset="utf-8">{policy}
<meta name="color-scheme" content="light dark">
<style>body {{ margin: 0; font-family: system-ui, sans-serif }} {style}</style>
<div class="explorer"></div><script type="application/json" class="exploration-json">{data}</script>
<script>{script}</script>"""

NOT_SAID = -32768
"""In place of a variable's value that an answer leaves open, and outside an example."""


class Missing(Enum):
    """What an explorer does not show, and why, as a clause that goes on after "as"."""

    NO_HOOKS = ("attention", "{model} has no hooks inside its loops")
    UNREADABLE_PATTERNS = ("attention", "its patterns cannot be read ({error})")
    WEAK_ATTENTION = (
        "attention below the strongest",
        "of each head and position the {kept} largest of up to {seen} weights are kept",
    )
    WHOLE_LOOP_LENS = ("readings within the loop", "the lens was fitted to what whole loops leave")
    NO_PROGRAM = (
        "variables",
        "no program is given that reads these tokens and solves the task",
    )
    CHANGED_RUN = ("attention", "it is shown of the run without the change alone")


def spell_missing(missing: Mapping[str, Any]) -> dict[str, str]:
    """What is not shown, and why.

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
    """What :func:`explore` returns, of a model, or of a program, which has answers and variables.

    Beyond ``n_pos`` positions and ``n_loops`` loops of an example, and where a program leaves it
    open, an answer is -1; targets are then -1, numbers NaN and attention 0. Loop 0 is the initial
    state; attention at loop t is that by which the state after t loops was made, and 0 at loop 0.

    Arrays:
        row: Of each example, in the batch that it was chosen from.
        n_pos: Its positions.
        n_loops: Loops that are shown of it.
        asked_after: The loop after which it is asked.
        target: The right class; -1 where nothing is asked.
        answer: The classes that the reading finds likeliest, likeliest first.
        probability: Of these classes.
        entropy: Of the reading, in bits.
        moved: Relative residual of the loop that leads there, ``|h_t - h_{t-1}| / |h_t|``.
        plane: The state in the plane that is shown.
        inner_answer: Where the block has several layers, the likeliest class if the loop ended
            after each of them but the last; -1 at loop 0.
        inner_probability: Its probability.
        key: The positions that a head looks at most, most first.
        attention: How much.
        variable: What each variable of each program is, of one that solves the task.
        implied: The value with which the program would answer as the model does;
            :data:`NOT_SAID` where none, or more than one, is.

    Attributes:
        asks: What the task asks, in a sentence.
        by_hand: How the first example is done by hand, in sentences.
        reasons: Why each example was chosen, in a few words; ``details`` in a sentence.
        said: Each example in words ("" where the task has none).
        tokens: What stands at each position of each example.
        n_classes: Classes of the readout.
        symbols: A word for each class that is shown, by its number.
        axes: What the two axes of the plane are, where there is one.
        missing: What the model cannot give: values by code (:func:`spell_missing` has the words).
        n_examples: Examples among which these were chosen.
        lens: What answers are read through: "coda" is the model's own readout.
        of_other_weights: Whether the lens was fitted on other weights than those that it reads.
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

    def _repr_html_(self) -> str:
        """In a notebook: the findings, and the explorer in a frame of its own."""
        script = page_script() + _FIT
        parts = {"policy": security_policy([script]), "style": read_asset("explorer.css")}
        page = _FRAMED.format(data=page_json(self), script=script, **parts)
        frame = f'<iframe title="Explorer" srcdoc="{escape(page)}" style="{_FRAME_STYLE}"></iframe>'
        return super()._repr_html_() + frame


@findings_of.register
def _(result: Exploration) -> list[Finding]:
    """What is asked, how the first example is done by hand, and when the model has it."""
    task = " ".join(text for text in (result.asks, result.by_hand) if text)
    findings = [Finding(task, kind="explorer")] if task else []
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
        return [*findings, Finding(f"{reader} reads the state after each loop.", kind="explorer")]
    # [loop, pos], at the positions that are asked about
    right = (first["answer"].isel(rank=0) == first["target"]).values[: n_loops + 1, is_asked]
    n_asked, all_right, after = int(is_asked.sum()), right.all(1), right.sum(1)
    start = f"{reader} has {after[1]} of the {n_asked} symbols right after 1 loop"
    if n_loops == loop == 1:
        text = f"{start}, when it is asked."
    elif all_right[-1]:
        # The loop after the last at which something was wrong.
        since = n_loops - all_right[::-1].tolist().index(False) + 1 if not all_right.all() else 0
        until = "on" if n_loops >= loop else f"to {n_loops}, the last that is shown"
        text = f"{start}, and all of them from loop {since} {until} (it is asked after {loop})."
    elif n_loops >= loop and not all_right[loop]:
        text = f"{start}, and {after[loop]} after {loop}, when it is asked: it gets this one wrong."
    else:
        text = f"{start}, and {after[-1]} after {n_loops} (it is asked after {loop})."
    return [*findings, Finding(text, kind="explorer")]


SHARE = 65535
"""A share of 1 as the page has it: shares are 16-bit integers."""


def page_data(result: Exploration) -> dict[str, Any]:
    """What the component reads: texts, arrays by type and shape, and the bytes of all of them.

    Example:
        >>> from loopinterp.pages import explore
        >>> from loopinterp.compiler import compile_program
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


def page_json(result: Exploration) -> str:
    """What :func:`page_data` gives, as JSON in ASCII that cannot end its own script tag."""
    return json.dumps(page_data(result), separators=(",", ":")).replace("<", "\\u003c")


def read_asset(name: str) -> str:
    """The text of a file of the component."""
    return (files("loopinterp.pages") / "explorer" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The component's modules as one, in which ``mount`` is defined and nothing is imported."""
    # Each after those that it imports.
    names = ("explorer_data", "explorer_state", "explorer_drawing", "explorer_files", "explorer")
    texts = [re.sub(r"^import [^;]*;\n", "", read_asset(f"{n}.js"), flags=re.M) for n in names]
    return "\n".join(re.sub(r"^export ", "", text, flags=re.M) for text in texts)


def page_script() -> str:
    """The script that shows the explorations of a page; nothing of it is a global of the page."""
    return f'(() => {{\n"use strict";\n{script()}\n{read_asset("explorer_page.js")}}})();'
