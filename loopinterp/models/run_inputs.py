"""What a run is given: its inputs, and how many loops it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import MOST_LOOPS, HookError, InputError, check_integer
from loopinterp.models.addresses import flat_names
from loopinterp.models.positions import check_length, grid_width

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig

TOKEN_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of token tensors: widening one of them loses nothing."""


@dataclass(frozen=True)
class LoopRule:
    """How many loops a model was made for: what a run makes where the caller sets no number.

    Attributes:
        shown: Loops of the hook names, layers and blocks that the model shows.
        of_length: From the input's positions to T(n), the loops that its task asks for. None:
            always ``shown``, as for an ordinary transformer, which has its depth.
        scale: With ``of_length``: the model answers after ``ceil(scale T(n)) + extra`` loops.
        extra: With ``of_length``: loops more than that, or fewer where negative.

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
        """Loops of a run over so many positions."""
        if self.of_length is None:
            return self.shown
        return int(self.loops_for(torch.tensor(self.of_length(n_pos))))

    def loops_for(self, n_loops: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Loops after which the model answers what its task asks for after T(n)."""
        if self.of_length is None:
            return torch.full_like(n_loops, self.shown)
        return shifted_loops(n_loops, scale=self.scale, extra=self.extra)

    def __str__(self) -> str:
        """The number of loops in words: ``4``, ``T(n)``, ``ceil(2 T(n)) + 3``."""
        if self.of_length is None:
            return str(self.shown)
        scaled = "T(n)" if self.scale == 1 else f"ceil({self.scale:g} T(n))"
        sign = "+" if self.extra > 0 else "-"
        return f"{scaled} {sign} {abs(self.extra)}" if self.extra else scaled


def shifted_loops(
    n_loops: Int[Tensor, "*batch"], *, scale: float, extra: int
) -> Int[Tensor, "*batch"]:
    """``max(1, ceil(scale T) + extra)``: other numbers of loops than T; T where nothing is set.

    Example:
        >>> shifted_loops(torch.tensor([1, 4, 10]), scale=1.1, extra=-2).tolist()
        [1, 3, 9]
    """
    if (scale, extra) == (1.0, 0):
        return n_loops
    # Rounded first: 1.1 times 10 is 11 and no more, whatever it is in binary.
    scaled = (n_loops.double() * scale).round(decimals=6).ceil().long()
    return (scaled + extra).clamp(min=1)


@dataclass(eq=False)
class _Unrolled:
    """A ``with model.unrolled(n_loops)``; closed for every thread once the block has ended."""

    model: object
    n_loops: int
    closed: bool = False


# Those of this thread, the innermost first.
_UNROLLED: ContextVar[tuple[_Unrolled, ...]] = ContextVar("unrolled models", default=())


class RunLength:
    """The number of loops of a model's runs, and of the names that it shows."""

    _n_loops: int
    _rule: LoopRule | None = None

    @property
    def n_loops(self) -> int:
        """Loops of the hook names, layers and blocks shown, and of a run by default.

        Where there is a :attr:`loop_rule`, that of the run's input decides for the run. Setting
        the number removes the rule.
        """
        unrolled = self._unrolled_loops()
        return self._n_loops if unrolled is None else unrolled

    @n_loops.setter
    def n_loops(self, value: int) -> None:
        self._n_loops, self._rule = check_loops(value), None

    @property
    def loop_rule(self) -> LoopRule | None:
        """How many loops an input takes, as for the model of a run; None without a rule."""
        return self._rule

    @loop_rule.setter
    def loop_rule(self, rule: LoopRule | None) -> None:
        if rule is not None:
            self._n_loops = check_loops(rule.shown)
        self._rule = rule

    @contextmanager
    def unrolled(self, n_loops: int | None) -> Iterator[None]:
        """Another default number of loops for a while, for this thread."""
        if n_loops is None:
            yield
            return
        entry = _Unrolled(self, check_loops(n_loops))
        _UNROLLED.set((entry, *_UNROLLED.get()))
        try:
            yield
        finally:
            entry.closed = True
            _UNROLLED.set(tuple(other for other in _UNROLLED.get() if not other.closed))

    def _unrolled_loops(self) -> int | None:
        """The number of loops of the innermost ``unrolled`` that is open; None outside of them."""
        opened = (x.n_loops for x in _UNROLLED.get() if x.model is self and not x.closed)
        return next(opened, None)

    def _loops(self, n_loops: int | None) -> int:
        return self.n_loops if n_loops is None else check_loops(n_loops)

    def _run_loops(self, n_loops: int | Tensor | None, inputs: Any) -> int:
        """Loops of a run over an input; those of the example that takes most."""
        if isinstance(n_loops, torch.Tensor):
            return max(1, int(check_ends(n_loops, inputs).max()))
        # An input of another kind is refused where it is read.
        return self._loops_at(n_loops, inputs.shape[1] if getattr(inputs, "ndim", 0) > 1 else None)

    def _loops_at(self, n_loops: int | None, n_pos: int | None) -> int:
        """Loops of a run over so many positions."""
        if self._rule is None or n_pos is None or self._is_set(n_loops):
            return self._loops(n_loops)
        return check_loops(self._rule(n_pos))

    def _is_set(self, n_loops: object) -> bool:
        """Whether a run's number of loops is set, by its caller or around it, and not a rule's."""
        return n_loops is not None or self._rule is None or self._unrolled_loops() is not None

    def _need_number(self, n_loops: object, loops: int, names: Any) -> None:
        """Raise on names numbered for another number of loops than the model's rule gives a run."""
        if n_loops is not None or loops == self.n_loops or names is None or callable(names):
            return
        for name in flat_names(names, "name of a hook"):
            if name.startswith("blocks."):
                expected = f"n_loops, as the name is one of a run of {self.n_loops} loops"
                got = f"none, and an input that takes {loops}"
                fix = f"Pass n_loops={loops}, or say loops.{{t}}.blocks.{{layer}}.… instead."
                raise HookError(f"hook {name!r}", expected=expected, given=got, fix=fix)


def check_loops(n_loops: int) -> int:
    """The number of loops of a run, if it is one that can be run."""
    return check_integer("n_loops", n_loops, least=1, far=MOST_LOOPS)


def check_ends(n_loops: Tensor, inputs: Any) -> Tensor:
    """Numbers of loops, one for each example, on its device; raise unless they can be run."""
    if isinstance(inputs, torch.Tensor):  # others are refused where they are read
        need_examples(inputs)
        check_each("n_loops", n_loops, inputs)
        for end in n_loops.aminmax():
            check_integer("n_loops", int(end), least=0, far=MOST_LOOPS)
    return n_loops


def loop_span(start: int, stop: int | None, n_loops: int, state: Tensor | None) -> range:
    """The loops to run, out of ``n_loops``; beginning with a later one takes a state.

    Example:
        >>> loop_span(2, None, 5, torch.zeros(1, 1, 8))
        range(2, 5)
    """
    stop = check_integer("stop_at_loop", n_loops if stop is None else stop, least=0, most=n_loops)
    start = check_integer("start_at_loop", start, least=0, most=stop)
    if start > 0 and state is None:
        fix = "Pass state=, from model(inputs, stop_at_loop=..., return_type='state')."
        raise InputError("state", expected=f"that before loop {start}", given="None", fix=fix)
    return range(start, stop)


# Inputs


def check_inputs(
    inputs: Tensor,
    config: LoopedTransformerConfig,
    device: torch.device,
    position_offset: int | Tensor,
    *,
    checked: bool = False,
) -> None:
    """Raise unless a model of this configuration can read the inputs.

    With ``checked``, tokens and offsets are taken to be in range: to look at them on a GPU is to
    wait for it.
    """
    need_weights(device)
    if config.d_vocab is None:
        is_batch = isinstance(inputs, torch.Tensor) and inputs.dim() == 3
        fits = is_batch and inputs.shape[-1] == config.d_features and inputs.is_floating_point()
        _check_kind(inputs, fits, f"floats [batch, pos, d_features={config.d_features}]")
    elif checked:
        _check_kind(inputs, _are_tokens(inputs))
    else:
        check_tokens(inputs, config.d_vocab)
    check_device(inputs, device)
    if config.positions == "absolute" and config.n_ctx is not None:
        check_length(inputs.shape[1], config.n_ctx, "sequence length")
    if config.positions == "grid":
        grid_width(inputs.shape[1])
    each = isinstance(position_offset, torch.Tensor)
    if each:
        check_each("position_offset", position_offset, inputs)
    if config.positions == "abacus" and not (checked and each):
        least = int(position_offset.min()) if each else position_offset
        check_integer("position_offset", least, least=0)
    elif config.positions != "abacus" and (each or position_offset):
        refuse({"position_offset": position_offset}, "0 without abacus positions", "Leave it out.")


def check_device(inputs: Tensor, device: torch.device) -> None:
    """Raise unless the inputs lie where the model does."""
    if inputs.device != device:
        got, fix = str(inputs.device), f"Pass inputs.to({str(device)!r})."
        raise InputError("inputs", expected=f"a tensor on {device}", given=got, fix=fix)


def _are_tokens(inputs: Any) -> bool:
    return isinstance(inputs, torch.Tensor) and inputs.dtype in TOKEN_TYPES and inputs.dim() == 2


def check_tokens(inputs: Tensor, d_vocab: int, fix: str = "Use the model's own task.") -> None:
    """Raise unless the inputs are tokens of a vocabulary."""
    _check_kind(inputs, _are_tokens(inputs))
    low, high = int(inputs.min()), int(inputs.max())
    if low < 0 or high >= d_vocab:
        expected = f"tokens from 0 to {d_vocab - 1}"
        raise InputError("inputs", expected=expected, given=f"{low} to {high}", fix=fix)


def _check_kind(
    inputs: Any,
    fits: bool,
    expected: str = "integers [batch, pos] (uint8 or int8 to int64)",  # tokens
) -> None:
    if not fits or inputs.shape[1] == 0:
        fix = "Give what the task's sampler gives: task.sample(...).inputs."
        raise InputError("inputs", expected=expected, given=spell(inputs), fix=fix)
    need_examples(inputs)


def need_weights(device: torch.device) -> None:
    """Raise where weights lie on the meta device, which keeps shapes and no numbers."""
    if device == torch.device("meta"):
        fix = "Call model.to_empty(device='cpu') and load its weights."
        raise InputError("model", expected="weights", given="none, on the meta device", fix=fix)


def need_examples(inputs: Any) -> None:
    """Raise on a batch without examples: a run has one at least, and so has every study."""
    if isinstance(inputs, torch.Tensor) and inputs.dim() and not len(inputs):
        fix = "Leave empty batches out."
        expected = "at least one example"
        raise InputError("inputs", expected=expected, given="an empty batch", fix=fix)


def check_each(name: str, values: Tensor, inputs: Tensor) -> None:
    """Raise unless there is one integer for each example, on its device."""
    shape, device = inputs.shape[:1], inputs.device
    if values.dtype not in TOKEN_TYPES or values.shape != shape or values.device != device:
        expected, fix = f"integers {list(shape)} on {device}", "Pass one for each example."
        raise InputError(name, expected=expected, given=spell(values), fix=fix)


def check_dtype(dtype: Any) -> torch.dtype | None:
    """A floating-point type, or its name; None stays None.

    Example:
        >>> check_dtype("bfloat16"), check_dtype(torch.float32)
        (torch.bfloat16, torch.float32)
    """
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(kind, torch.dtype) and kind.is_floating_point):
        return kind
    expected, fix = "a floating-point type or its name", "Pass e.g. dtype='float32'."
    raise InputError("dtype", expected=expected, given=repr(dtype), fix=fix)


def check_logits(logits: Float[Tensor, batch * rest], after: str) -> None:
    """Raise if a model's answer is NaN in some example: an argmax would take it for the likeliest.

    ``after`` is the place in the run, in words.
    """
    bad = logits.isnan().flatten(1).any(1)
    if bool(bad.any()):
        got = f"NaN in examples {bad.nonzero().flatten().tolist()[:8]} of {len(logits)}"
        fix = "Run fewer loops, or check the model's weights and inputs."
        raise InputError(f"logits {after}", expected="numbers", given=got, fix=fix)


def spell(x: Any) -> str:
    """Shape, type and device of a tensor, for messages; the class of anything else."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{list(x.shape)} of {x.dtype} on {x.device}"


def refuse(options: Mapping[str, Any], expected: str, fix: str) -> None:
    """Raise on the first of some options that is given, not None, where it has no effect."""
    for name, value in options.items():
        if value is not None:
            raise InputError(name, expected=expected, given=repr(value), fix=fix)
