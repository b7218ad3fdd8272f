"""Whether a model repeats itself: asked twice the same, each of its methods says the same."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.hooked_run import HookedRun
from loopinterp.models.looped_model import bind
from loopinterp.models.mapped_vocabulary import WithVocabulary

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = {torch.float32: 64, torch.float64: 64}
"""Units of rounding by which two runs of one computation may differ, as on GPUs; else 4."""

_BESIDE_OTHERS = 8
"""So many times as far may a run be rounded otherwise where other examples are beside it."""

_QUIET = 1e-3
"""A channel that is smaller than this share of the largest counts as one of that size."""

_LOOPS = 8
"""Loops that are run and then repeated, the last first."""

_FIX = (
    "Call .eval() first, and draw nothing by chance; where a start is random, draw that of each "
    "example by itself from a seed of its own, in initial_state. A step that counts its loops "
    "takes their index instead: def step(self, h, e, loop). Keep nothing from call to call, and "
    "let no example depend on the others."
)


@torch.no_grad()
def need_repeatable(model: Any, inputs: Tensor) -> None:
    """Raise if a method of a model is no function of what it is given, on some of the inputs.

    Studies run a model again and again from kept states, in batches of any make. What counts its
    calls, keeps a state from call to call, draws by chance or reads the other examples gives them
    numbers of another model. Embedding and start are made twice. Eight loops are run, and each is
    repeated from its kept state, the last first, after the model was bound to another input; so
    is the readout. Then one example is compared with itself beside another one. A
    ``LoopedTransformer`` and adapters, whose methods are known, are not asked.

    Raises:
        InputError: If one of the four methods differs by more than rounding; it names the method.
    """
    inner = model
    while isinstance(inner, WithVocabulary):
        inner = inner.model
    if isinstance(inner, HookedRun) or not len(inputs):
        return
    one = inputs[:1]
    unlike = int((inputs != one).flatten(1).sum(1).argmax())
    other = inputs[unlike : unlike + 1] if unlike else inputs.flip(1)
    first, again = (bind(model, one) for _ in range(2))
    _compare(inner, "embed", first.e, again.e)
    _compare(inner, "initial_state", first.h0, again.h0)
    only = first.at(0)  # a table of timing signals may hold one loop alone
    states = [first.h0]
    for _ in range(_LOOPS):
        states.append(only.step(states[-1]))
    logits = first.readout(states[1])
    first.readout(states[-1])
    beside = bind(model, other)
    other_state = beside.at(0).step(beside.h0)
    other_logits = beside.readout(other_state)
    for before, after in reversed([*pairwise(states)]):
        _compare(inner, "step", after, only.step(before))
    _compare(inner, "readout", logits, first.readout(states[1]))
    both = bind(model, torch.cat([one, other]))
    together = both.at(0).step(both.h0)
    for name, alone, part in (
        ("embed", (first.e, beside.e), both.e),
        ("initial_state", (first.h0, beside.h0), both.h0),
        ("step", (states[1], other_state), together),
        ("readout", (logits, other_logits), both.readout(together)),
    ):
        _compare(inner, name, torch.cat(alone), part, times=_BESIDE_OTHERS)


def _compare(model: Any, name: str, first: Tensor, again: Tensor, times: int = 1) -> None:
    if first.shape == again.shape:
        units = times * _ROUNDING.get(first.dtype, 4) * torch.finfo(first.dtype).eps
        # Rounding goes with the size of a channel: one that is large hides no other.
        size = first.abs().masked_fill(~first.isfinite(), 0).flatten(0, -2).amax(0)
        alike = (first - again).abs() <= units * size.clamp(min=_QUIET * float(size.max()))
        same = (first == again) | (first.isnan() & again.isnan())
        if bool((alike | same).all()):
            return
    apart = "another shape"
    if first.shape == again.shape:
        apart = f"values that differ by up to {float((first - again).abs().nan_to_num().max()):.2g}"
    beside = times > 1
    raise InputError(
        f"{name} of {type(model).__name__}",
        expected="the same whenever it is given the same" + ", whatever stands beside it" * beside,
        given=f"{apart} " + ("beside another example" if beside else "at a repeated call"),
        fix=_FIX,
    )
