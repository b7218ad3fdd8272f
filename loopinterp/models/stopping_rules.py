"""When to stop looping: the rules. :func:`~loopinterp.models.run_until` runs a model by one.

A rule gives every example a score after every loop; lower means readier to stop. There are
two kinds, told apart by ``tolerance``:

* *Online* rules have one. An example stops at the first loop where its score is at or below it,
  and leaves the computation. The rule has seen the past only, so it could run in deployment.
* *Offline* rules have none. Every example runs all the loops, and the loop of least score is
  picked afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import torch

from loopinterp.errors import InputError, check_choice, check_integer, check_number
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

Per = Literal["sample", "batch"]


@dataclass(frozen=True, repr=False)
class LoopView(ShortRepr):
    """What a rule sees after ``loop`` loops.

    Attributes:
        loop: Loops done; 0 is the initial state.
        state: h_t of the examples that still run.
        mask: Positions that count.
        n_loops: T(n) of each example, where it is known.
        read: The model's readout; :attr:`logits` calls it once, and only if a rule asks.
        previous: The same examples one loop earlier; None at loop 0.
        past: How many earlier loops are remembered, one behind the other.
        notes: What a rule writes down of each example, to find it in :attr:`previous` next time.
    """

    loop: int
    state: Float[Tensor, "batch pos d_model"]
    mask: Bool[Tensor, "batch pos"]
    n_loops: Int[Tensor, " batch"] | None
    read: Callable[[Tensor], Tensor]
    previous: LoopView | None
    past: int = 1
    notes: dict[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def logits(self) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The readout of the state."""
        return self.read(self.state)

    @cached_property
    def answers(self) -> Int[Tensor, "batch pos"]:
        """The most probable class at each position."""
        return self.logits.argmax(-1)

    @cached_property
    def log_probs(self) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Log-probabilities of the readout, at least float32."""
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        return self.logits.log_softmax(-1, dtype=dtype)

    def next(self, state: Float[Tensor, "batch pos d_model"]) -> LoopView:
        """The view one loop on. It remembers this one, and no more before it than asked for."""
        before = self._since(self.past)
        return replace(self, loop=self.loop + 1, state=state, previous=before, notes={})

    def _since(self, past: int) -> LoopView:
        """The view, with this and the loops before it: ``past`` in all."""
        before = self.previous._since(past - 1) if self.previous and past > 1 else None
        return self._copy(lambda read: read, previous=before)

    def select(self, rows: Bool[Tensor, " batch"]) -> LoopView:
        """The view of some examples; what was already read is kept."""
        return self._copy(
            lambda read: read[rows],
            state=self.state[rows],
            mask=self.mask[rows],
            n_loops=None if self.n_loops is None else self.n_loops[rows],
            previous=self.previous.select(rows) if self.previous and self.past > 1 else None,
        )

    def updates(self) -> Iterator[tuple[LoopView, Float[Tensor, "batch pos d_model"]]]:
        """The views that are remembered with ``D_t = h_t - h_{t-1}``, the last loop first."""
        view = self
        while view.previous is not None:
            yield view, (view.state - view.previous.state).float()
            view = view.previous

    def _copy(self, change: Callable[[Tensor], Tensor], **fields: Any) -> LoopView:
        """A changed copy, with the readouts that were already computed."""
        notes = {rule: change(note) for rule, note in self.notes.items()}
        other = replace(self, **fields, notes=notes)
        for name in vars(self).keys() & {"logits", "answers", "log_probs"}:
            vars(other)[name] = change(vars(self)[name])
        return other

    def worst(self, per_position: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """The largest value over the positions that count."""
        return per_position.masked_fill(~self.mask, -math.inf).amax(-1)

    def constant(self, value: float) -> Float[Tensor, " batch"]:
        """The same score for every example."""
        return torch.full(
            (self.state.shape[0],), value, dtype=torch.float32, device=self.state.device
        )


@runtime_checkable
class StoppingRule(Protocol):
    """A score per example and loop, and what to do with it.

    A rule that looks back further than one loop says how far, in an attribute ``past``.
    """

    @property
    def tolerance(self) -> float | None:
        """Stop at the first score at or below it; None for an offline rule."""
        ...

    def horizon(self, max_loops: int | None, n_loops: Int[Tensor, " batch"] | None) -> int:
        """The last loop worth running, given the caller's limit and T(n)."""
        ...

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """Lower is readier to stop."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Stop every example after ``n`` loops (online).

    Raises:
        InputError: If ``n`` is negative.
    """

    n: int
    tolerance = 0.0

    def __post_init__(self) -> None:
        check_integer("Fixed(n)", self.n, least=0)

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return self.n if max_loops is None else min(self.n, max_loops)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """Loops left: ``n - t``."""
        return view.constant(float(self.n - view.loop))


@dataclass(frozen=True)
class Oracle:
    """Stop each example after its own T(n) loops (online; T(n) comes from the task).

    Source: arXiv 2409.15647, section 4.
    """

    tolerance = 0.0

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        if n_loops is None:
            raise InputError(
                "n_loops",
                expected="T(n) of each example, a tensor [batch], for the Oracle rule",
                given="None",
                fix="Pass n_loops=batch.n_loops.",
            )
        longest = int(n_loops.max())
        return longest if max_loops is None else min(longest, max_loops)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """Loops left: ``T(n) - t``."""
        assert view.n_loops is not None  # horizon() has checked it
        return (view.n_loops - view.loop).float()


@dataclass(frozen=True)
class LengthLine:
    """Stop every example after a number of loops that grows with the length of its input (online).

    ``T = round(slope * n_pos + offset)``, at least 0, where ``n_pos`` is the number of positions
    of the input. :func:`loopinterp.training.calibrate_stopping` fits the two numbers to examples
    of training lengths, from which the rule extrapolates.

    Args:
        slope: Loops for each position.
        offset: Loops at no position.

    Raises:
        InputError: If a number is not finite.
    """

    slope: float
    offset: float
    tolerance = 0.0

    def __post_init__(self) -> None:
        check_number("LengthLine(slope)", self.slope)
        check_number("LengthLine(offset)", self.offset)

    def loops(self, n_positions: int) -> int:
        """Where an input of so many positions stops.

        Example:
            >>> LengthLine(1.0, -2.0).loops(22)
            20
        """
        return max(round(self.slope * n_positions + self.offset), 0)

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=0)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """Loops left: ``T - t``."""
        return view.constant(float(self.loops(view.state.shape[1]) - view.loop))


@dataclass(frozen=True, kw_only=True)
class MaxConfidence:
    r"""The loop whose readout is surest of itself (offline).

    ``t* = argmin_t mean CE(logits_t, argmax logits_t)``, the mean taken over the scored
    positions of an example, or of the whole batch; the earliest loop of equals.

    Sure is not right: a model can be confidently wrong early on, so measure it beside the oracle.

    Args:
        per: One loop for each example (``sample``), or one for all (``batch``).
        min_loop: First loop that may be chosen.

    Raises:
        InputError: If ``per`` is unknown or ``min_loop`` is negative.

    Source: arXiv 2409.15647, equation 5 and section 6.4.
    """

    per: Per = "sample"
    min_loop: int = 1
    tolerance = None

    def __post_init__(self) -> None:
        check_choice("MaxConfidence(per)", self.per, get_args(Per))
        check_integer("MaxConfidence(min_loop)", self.min_loop, least=0)

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=self.min_loop)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """Mean cross-entropy of the readout against its own argmax."""
        if view.loop < self.min_loop:
            return view.constant(math.inf)
        doubt = -view.log_probs.amax(-1) * view.mask
        if self.per == "sample":
            return doubt.sum(-1) / view.mask.sum(-1)
        return (doubt.sum() / view.mask.sum()).expand(doubt.shape[0])
