"""How many loops a run makes: what it was told, else what the model's rule says of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import MOST_LOOPS, HookError, check_integer
from loopinterp.models.run_inputs import check_ends, refuse
from loopinterp.models.sites import flat_names

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@dataclass(eq=False)
class _Unrolled:
    """A ``with model.unrolled(n_loops)``; closed for every thread once the block has ended."""

    model: object
    n_loops: int
    closed: bool = False


_UNROLLED: ContextVar[tuple[_Unrolled, ...]] = ContextVar("unrolled models", default=())
"""Those of this thread, the innermost first."""


@dataclass(frozen=True)
class LoopRule:
    """How many loops a model was made for: what a run makes that is not told.

    Attributes:
        shown: Loops of the hook names, layers and blocks that the model shows.
        of_length: From the input's positions to T(n), the loops that its task asks for. None:
            always ``shown``, whatever the input, as for an ordinary transformer, which has its
            depth.
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
        return int(self.of(torch.tensor(self.of_length(n_pos))))

    def of(self, n_loops: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Loops after which the model answers what its task asks for after T(n)."""
        if self.of_length is None:
            return torch.full_like(n_loops, self.shown)
        return shifted_loops(n_loops, scale=self.scale, extra=self.extra)

    def __str__(self) -> str:
        """The number of loops in words: ``4``, ``T(n)``, ``ceil(2 T(n)) + 3``."""
        if self.of_length is None:
            return str(self.shown)
        scaled = "T(n)" if self.scale == 1 else f"ceil({self.scale:g} T(n))"
        return (
            f"{scaled} {'+' if self.extra > 0 else '-'} {abs(self.extra)}" if self.extra else scaled
        )


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


def rule_of(model: Any) -> LoopRule | None:
    """What says how many loops a model of any class was made for; None where nothing does."""
    rule = getattr(model, "loop_rule", None)
    return rule if isinstance(rule, LoopRule) else None


def own_depth(model: Any) -> int | None:
    """Loops of a model whose :attr:`loop_rule` says as many whatever the input; None of others."""
    rule = rule_of(model)
    return rule.shown if rule is not None and rule.of_length is None else None


class LoopCount:
    """The number of loops of a model's runs, and of the names that it shows."""

    _n_loops: int
    _rule: LoopRule | None = None

    @property
    def n_loops(self) -> int:
        """Loops of the hook names, layers and blocks shown, and of a run that is not told.

        Where there is a :attr:`loop_rule`, that of the run's input decides for the run. Setting
        the number does away with the rule.
        """
        said = self._said_around()
        return self._n_loops if said is None else said

    @n_loops.setter
    def n_loops(self, value: int) -> None:
        self._n_loops, self._rule = check_loops(value), None

    @property
    def loop_rule(self) -> LoopRule | None:
        """What says how many loops an input takes, as for the model of a run; None: nothing."""
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

    def _said_around(self) -> int | None:
        """The number of loops of the innermost ``unrolled`` that is open; None outside of them."""
        opened = (x.n_loops for x in _UNROLLED.get() if x.model is self and not x.closed)
        return next(opened, None)

    def _loops(self, n_loops: int | None) -> int:
        return self.n_loops if n_loops is None else check_loops(n_loops)

    def _loops_of(self, n_loops: int | Tensor | None, inputs: Any) -> int:
        """Loops of a run over an input; those of the example that takes most."""
        if isinstance(n_loops, torch.Tensor):
            return max(1, int(check_ends(n_loops, inputs).max()))
        # What is no input at all is refused where it is read.
        return self._loops_at(n_loops, inputs.shape[1] if getattr(inputs, "ndim", 0) > 1 else None)

    def _loops_at(self, n_loops: int | None, n_pos: int | None) -> int:
        """Loops of a run over so many positions."""
        if self._rule is None or n_pos is None or self._told(n_loops):
            return self._loops(n_loops)
        return check_loops(self._rule(n_pos))

    def _told(self, n_loops: object) -> bool:
        """Whether a run's number of loops was said, here or around, and is not the rule's."""
        return n_loops is not None or self._rule is None or self._said_around() is not None

    def _need_number(self, n_loops: object, loops: int, names: Any) -> None:
        """Raise on names numbered for another number of loops than the model's rule gives a run."""
        if n_loops is not None or loops == self.n_loops or names is None or callable(names):
            return
        for name in flat_names(names, "name of a hook"):
            if name.startswith("blocks."):
                raise HookError(
                    f"hook {name!r}",
                    expected="n_loops with a numbered name, which the model numbers for "
                    f"{self.n_loops} loops",
                    given=f"none, and an input that takes {loops}",
                    fix=f"Pass n_loops={loops}, take names and runs from model.unroll({loops}), "
                    "or say loops.{t}.blocks.{layer}.… instead.",
                )


def check_loops(n_loops: int) -> int:
    """The number of loops of a run, if it is one that can be run."""
    return check_integer("n_loops", n_loops, least=1, far=MOST_LOOPS)


def ends_of(n_loops: object, span: range, return_type: str) -> Tensor | None:
    """The number of loops of each example, where there is one for each; None where there is not.

    Raises:
        InputError: If not all loops are run, or more is returned than each example's last.
    """
    if not isinstance(n_loops, torch.Tensor):
        return None
    options = {
        "start_at_loop": span.start or None,
        "stop_at_loop": span.stop if span.stop < int(n_loops.max()) else None,
        "return_type": return_type if return_type in ("states", "all_logits") else None,
    }
    refuse(
        options,
        expected="none beside a number of loops for each example, which is read after its own",
        fix="Pass one n_loops for all; or leave it out, and return 'logits' or 'state'.",
    )
    return n_loops
