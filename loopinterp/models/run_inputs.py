"""The inputs of a run, and rules for its number of loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import MOST_LOOPS, InputError, check_integer

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

TOKEN_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # widen exactly


@dataclass(frozen=True)
class LoopRule:
    """The number of loops of a model's runs where the caller sets none.

    Attributes:
        shown: Loops of the hook names, layers and blocks that the model shows.
        of_length: From the number of positions to T(n), the required number of loops. None:
            always ``shown``.
        scale: With ``of_length``, the model answers after ``ceil(scale T(n)) + extra`` loops.

    Example:
        >>> LoopRule(13, of_length=lambda n_pos: n_pos - 1)(5), LoopRule(1)(5)
        (4, 1)
        >>> LoopRule(14, of_length=lambda n_pos: n_pos - 1, extra=1)(5)
        5
    """

    shown: int
    of_length: Callable[[int], int] | None = None
    scale: float = 1.0
    extra: int = 0

    def __call__(self, n_pos: int) -> int:
        """Loops of a run over ``n_pos`` positions."""
        if self.of_length is None:
            return self.shown
        return int(self.loops_for(torch.tensor(self.of_length(n_pos))))

    def loops_for(self, n_loops: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Loops after which the model answers, given T(n)."""
        if self.of_length is None:
            return torch.full_like(n_loops, self.shown)
        return shifted_loops(n_loops, scale=self.scale, extra=self.extra)

    def __str__(self) -> str:
        """``4``, ``T(n)``, ``ceil(2 T(n)) + 3``."""
        if self.of_length is None:
            return str(self.shown)
        scaled = "T(n)" if self.scale == 1 else f"ceil({self.scale:g} T(n))"
        sign = "+" if self.extra > 0 else "-"
        return f"{scaled} {sign} {abs(self.extra)}" if self.extra else scaled


def shifted_loops(
    n_loops: Int[Tensor, "*batch"], *, scale: float, extra: int
) -> Int[Tensor, "*batch"]:
    """``max(1, ceil(scale T) + extra)``."""
    if (scale, extra) == (1.0, 0):
        return n_loops
    # Rounded first: in binary, 1.1 times 10 is above 11.
    scaled = (n_loops.double() * scale).round(decimals=6).ceil().long()
    return (scaled + extra).clamp(min=1)


def check_loops(n_loops: int) -> int:
    return check_integer("n_loops", n_loops, least=1, far=MOST_LOOPS)


def check_ends(n_loops: Tensor, inputs: Any) -> Tensor:
    if isinstance(inputs, torch.Tensor):
        need_examples(inputs)
        check_each("n_loops", n_loops, inputs)
        for end in n_loops.aminmax():
            check_integer("n_loops", int(end), least=0, far=MOST_LOOPS)
    return n_loops


def loop_span(start: int, stop: int | None, n_loops: int, state: Tensor | None) -> range:
    """The loops to run, out of ``n_loops``; a later start needs a state."""
    stop = check_integer("stop_at_loop", n_loops if stop is None else stop, least=0, most=n_loops)
    start = check_integer("start_at_loop", start, least=0, most=stop)
    if start > 0 and state is None:
        fix = "Pass state=, from model(inputs, stop_at_loop=..., return_type='state')."
        raise InputError("state", expected=f"that before loop {start}", given="None", fix=fix)
    return range(start, stop)


def check_features(inputs: Tensor, d_features: int | None) -> None:
    is_batch = isinstance(inputs, torch.Tensor) and inputs.dim() == 3
    fits = is_batch and inputs.shape[-1] == d_features and inputs.is_floating_point()
    _check_kind(inputs, fits, f"floats [batch, pos, d_features={d_features}]")


def check_tokens(inputs: Tensor, d_vocab: int, fix: str = "Use the model's own task.") -> None:
    tokens = isinstance(inputs, torch.Tensor) and inputs.dtype in TOKEN_TYPES and inputs.dim() == 2
    _check_kind(inputs, tokens, "integers [batch, pos] (uint8 or int8 to int64)")
    low, high = int(inputs.min()), int(inputs.max())
    if low < 0 or high >= d_vocab:
        expected = f"tokens from 0 to {d_vocab - 1}"
        raise InputError("inputs", expected=expected, given=f"{low} to {high}", fix=fix)


def _check_kind(inputs: Any, fits: bool, expected: str) -> None:
    if not fits or inputs.shape[1] == 0:
        fix = "Pass the inputs of the task's sampler: task.sample(...).inputs."
        raise InputError("inputs", expected=expected, given=spell(inputs), fix=fix)
    need_examples(inputs)


def need_examples(inputs: Any) -> None:
    if isinstance(inputs, torch.Tensor) and inputs.dim() and not len(inputs):
        fix = "Leave empty batches out."
        raise InputError("inputs", expected="an example or more", given="an empty batch", fix=fix)


def check_each(name: str, values: Tensor, inputs: Tensor) -> None:
    """Raise unless there is one integer per example, on its device."""
    shape, device = inputs.shape[:1], inputs.device
    if values.dtype not in TOKEN_TYPES or values.shape != shape or values.device != device:
        expected, fix = f"integers {list(shape)} on {device}", "Pass one for each example."
        raise InputError(name, expected=expected, given=spell(values), fix=fix)


def check_dtype(dtype: Any) -> torch.dtype | None:
    """A floating-point type, or its name; None stays None."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(kind, torch.dtype) and kind.is_floating_point):
        return kind
    expected, fix = "a floating-point type or its name", "Pass e.g. dtype='float32'."
    raise InputError("dtype", expected=expected, given=repr(dtype), fix=fix)


def check_logits(logits: Float[Tensor, "batch ..."], after: str) -> None:
    """Raise on NaN logits, which an argmax would choose."""
    bad = logits.isnan().flatten(1).any(1)
    if bool(bad.any()):
        got = f"NaN in examples {bad.nonzero().flatten().tolist()[:8]} of {len(logits)}"
        fix = "Run fewer loops, or check the model's weights and inputs."
        raise InputError(f"logits {after}", expected="numbers", given=got, fix=fix)


def spell(x: Any) -> str:
    """Shape, type and device of a tensor; the class of anything else."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{list(x.shape)} of {x.dtype} on {x.device}"


def refuse(options: Mapping[str, Any], expected: str, fix: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(name, expected=expected, given=repr(value), fix=fix)
