"""Whether a model repeats itself: asked twice the same, each of its methods says the same."""

from __future__ import annotations

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

_FIX = (
    "Call .eval() first, and draw nothing by chance; where a start is random, seed it in "
    "initial_state. A step that counts its loops takes their index instead: def step(self, h, e, "
    "loop)."
)


@torch.no_grad()
def need_repeatable(model: Any, inputs: Tensor) -> None:
    """Raise if a method of a model does not repeat, on the first of some inputs.

    Studies run a model again and again from kept states. What counts its calls, keeps a state from
    call to call or draws by chance gives them numbers of another model. Embedding and start are
    made twice, a loop three times from the start, the last after others, and the readout is read
    twice. A ``LoopedTransformer`` and adapters, whose methods are known, are not asked.

    Raises:
        InputError: If one of the four methods differs by more than rounding; it names the method.
    """
    inner = model
    while isinstance(inner, WithVocabulary):
        inner = inner.model
    if isinstance(inner, HookedRun) or not len(inputs):
        return
    first, again = (bind(model, inputs[:1]) for _ in range(2))
    _compare(inner, "embed", first.e, again.e)
    _compare(inner, "initial_state", first.h0, again.h0)
    only = first.at(0)  # a table of timing signals may hold one loop alone
    h = only.step(first.h0)
    logits = first.readout(h)
    _compare(inner, "step", h, only.step(first.h0))
    later = only.step(only.step(h))
    _compare(inner, "step", h, only.step(first.h0))
    first.readout(later)
    _compare(inner, "readout", logits, first.readout(h))


def _compare(model: Any, name: str, first: Tensor, again: Tensor) -> None:
    alike = first.shape == again.shape
    if alike:
        units = _ROUNDING.get(first.dtype, 4) * torch.finfo(first.dtype).eps
        known = first[first.isfinite()]
        size = float(known.abs().max()) if known.numel() else 0.0
        alike = torch.allclose(first, again, rtol=0, atol=units * size, equal_nan=True)
    if alike:
        return
    apart = "another shape" if first.shape != again.shape else None
    if apart is None:
        apart = f"values that differ by up to {float((first - again).abs().nan_to_num().max()):.2g}"
    raise InputError(
        f"{name} of {type(model).__name__}",
        expected="the same whenever it is given the same",
        given=f"{apart} at a repeated call",
        fix=_FIX,
    )
