"""What an exploration says in words; what it shows is the explorer's own page."""

from __future__ import annotations

from loopinterp.explorer.exploration import Exploration
from loopinterp.results import Finding, findings_of

SECTION = "explorer"

READERS = {
    "coda": "The model",
    "logit": "The logit lens (final norm and unembedding, a coda left out)",
    "tuned": "The tuned lens (the model's readout, behind an affine map fitted to each loop)",
    "jacobian": "The Jacobian lens (the model's readout of a state's mean effect on the end)",
}
"""Who says what is read, by lens."""


@findings_of.register
def _(result: Exploration) -> list[Finding]:
    """What is asked, how the first example is done by hand, and when the model has it."""
    task = " ".join(text for text in (result.asks, result.by_hand) if text)
    said = [Finding(task)] if task else []
    elsewhere = ", fitted to other weights than these," if result.of_other_weights else ""
    reader = READERS[result.lens] + elsewhere
    first = result.data.isel(example=0)
    n_loops, loop = int(first["n_loops"]), int(first["asked_after"])
    asked = (first["target"] >= 0).values
    if not asked.any():
        return [*said, Finding(f"{reader} reads the state after each loop.")]
    right = (first["answer"].isel(rank=0) == first["target"]).values[: n_loops + 1, asked]
    n_asked, whole, after = int(asked.sum()), right.all(1), right.sum(1)
    start = f"{reader} has {after[1]} of the {n_asked} symbols right after 1 loop"
    if n_loops == loop == 1:
        text = f"{start}, when it is asked."
    elif whole[-1]:
        since = n_loops - whole[::-1].tolist().index(False) + 1 if not whole.all() else 0
        until = "on" if n_loops >= loop else f"to {n_loops}, the last that is shown"
        text = f"{start}, and all of them from loop {since} {until} (it is asked after {loop})."
    elif n_loops >= loop and not whole[loop]:
        text = f"{start}, and {after[loop]} after {loop}, when it is asked: it gets this one wrong."
    else:
        text = f"{start}, and {after[-1]} after {n_loops} (it is asked after {loop})."
    return [*said, Finding(text)]
