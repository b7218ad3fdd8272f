"""A model's own forward with a loop inside: one loop of it, its readout, and a recording of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.adapters.module_calls import (
    Call,
    Layout,
    Modules,
    Place,
    Watch,
    another_size,
    is_floats,
    record_calls,
)
from loopinterp.adapters.module_sites import Tapping, laid_out
from loopinterp.core.errors import InputError
from loopinterp.models.addresses import Axes
from loopinterp.models.placement import stored
from loopinterp.models.run_inputs import spell

if TYPE_CHECKING:
    from torch import Tensor, nn

Forward = Callable[[Any, Any], Any]  # from a model and its inputs to logits [batch, pos, class]
Block = tuple[str, ...]  # paths of the modules that a model repeats together


class OwnForward(Modules):
    """A model's own forward, whose module outputs can be put in and taken out."""

    def __init__(self, model: nn.Module, forward: Forward | None = None) -> None:
        super().__init__(model)
        self._forward = forward

    def logits(self, inputs: Tensor) -> Tensor:
        output = self.model(inputs) if self._forward is None else self._forward(self.model, inputs)
        for name in ("logits", "last_hidden_state"):
            output = getattr(output, name, output)
        parts = output if isinstance(output, (tuple, list)) else [output]
        wide = (x for x in parts if is_floats(x) and x.dim() == 3)
        logits = next(wide, None)
        if logits is None:
            expected = "floats [batch, pos, class]"
            fix = "Pass forward=lambda model, inputs: …, which returns them."
            got = ", ".join(map(spell, parts)) or "nothing"
            raise InputError("output of the model", expected=expected, given=got, fix=fix)
        return logits

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def tensor(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        return stored(self.by_path[path], attribute)

    def run(self, inputs: Tensor, watch: Watch) -> Tensor:
        logits = None
        with self.watching(watch):
            logits = self.logits(inputs)
        if not watch.is_complete:
            expected = "the calls that the example's forward made"
            fix = "Let the number of loops depend on no input, or write the four methods."
            raise InputError("forward of the model", expected=expected, given="fewer", fix=fix)
        taken = watch.taken if logits is None else logits
        assert taken is not None
        return taken


@dataclass(frozen=True, kw_only=True)
class RepeatedLoop:
    """The loop in a model's own forward.

    Attributes:
        block: Paths of the repeated modules.
        entry: The call whose output is the injected input ``e``; None: the model's input is.
        ends: The call of each loop whose output is the state after it.
        injects: Whether a loop reads ``e`` beside the state; else a state takes the place of
            ``e`` in the first loop.
        start: Name of the parameter or buffer that is the initial state at every position;
            "zeros" without one; None if the initial state is ``e``.
        reads_inputs: Whether a loop also reads the inputs directly, as in a mask of padding.
        blank: Repeated modules that may return their input before the state is put in, with an
            output of theirs.
        n_ends: Calls of the state's module in one forward.
        flat: Whether that module returns ``[batch * pos, width]``, as a recurrent cell does.
    """

    block: Block
    n_loops: int
    entry: Place | None
    ends: tuple[Place, ...]
    injects: bool
    start: str | None = None
    reads_inputs: bool = False
    blank: Mapping[str, Any] = field(default_factory=dict, repr=False)
    n_ends: int = 0
    flat: bool = False

    def embed(self, native: OwnForward, inputs: Tensor) -> Tensor:
        return inputs if self.entry is None else native.run(inputs, Watch(take=self.entry))

    def initial_state(self, native: OwnForward, e: Tensor, width: int) -> Tensor:
        if self.start is None:
            return e
        zeros = e.new_zeros(*e.shape[:-1], width)
        return zeros if self.start == "zeros" else native.tensor(self.start).expand_as(zeros)

    def step(
        self,
        native: OwnForward,
        h: Tensor,
        e: Tensor,
        inputs: Tensor,
        tapping: Tapping | None = None,
        early: Mapping[Place, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """One loop, in the model's own forward; ``early`` replaces outputs of the loop before."""
        entering, put = (e if self.injects else h), dict(early)
        if self.entry is None:
            inputs = entering
        else:
            put[self.entry] = entering
        if self.injects:
            put[self.ends[0]] = self._returned(h)
        watch = Watch(
            put=put,
            take=self.ends[1 if self.injects else 0],
            opens=self.ends[0] if self.injects else self.entry,
            blank=self.blank if self.injects else {},
        )
        after = native.run(inputs, watch if tapping is None else tapping(watch))
        return after.unflatten(0, (len(h), -1)) if self.flat else after

    def _returned(self, h: Tensor) -> Tensor:
        return h.flatten(0, 1) if self.flat else h

    def read(self, native: OwnForward, h: Tensor, inputs: Tensor) -> Tensor:
        """Logits of a state, in the model's own forward; ``inputs`` only have the right shape."""
        watch = Watch(put={self.ends[-1]: self._returned(h)}, blank=self.blank)
        logits = native.run(inputs, watch)
        if watch.counts[self.ends[-1][0]] != self.n_ends:
            expected = f"{self.n_loops} loops for every input"
            fix = "Let the number of loops depend on no input, or write the four methods."
            raise InputError("forward of the model", expected=expected, given="more", fix=fix)
        return logits


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A model's own forward on an example, and on another of another size."""

    inputs: Tensor
    calls: list[Call]
    logits: Tensor
    other_inputs: Tensor
    other_calls: list[Call]
    one_length: bool  # the model takes no other

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(x.shape[0], x.shape[1]) for x in (self.inputs, self.other_inputs)]

    def placed(self, call: Call) -> tuple[Layout, Axes] | None:
        """Layout and axes of the output of a call; None for another order of axes."""
        twin = self.other_calls[self.calls.index(call)]
        if call.returned is None or twin.returned is None:
            return None
        return laid_out(call.returned.shape, twin.returned.shape, self.sizes)

    def state(self, call: Call) -> Tensor | None:
        """The output of a call as ``[batch, pos, width]``; None if it is no such tensor."""
        placed, x = self.placed(call), call.returned
        if placed is None or x is None or len(placed[1]) != 2 or placed[0] == "pos":
            return None
        return x.unflatten(0, (len(self.inputs), -1)) if placed[0] == "flat" else x


@torch.no_grad()
def record(native: OwnForward, inputs: Tensor) -> Recording:
    """Record a model's own forward, twice on the example and once on another size of it.

    Raises:
        InputError: If a second run has other numbers, or the other size other calls.
    """
    (calls, logits), (_, again) = (
        record_calls(native.model, lambda: native.logits(inputs)) for _ in range(2)
    )
    if not torch.equal(logits, again):
        fix = "Call model.eval(), and seed noise or leave it out."
        expected = "the same logits when it is run again"
        raise InputError("forward of the model", expected=expected, given="others", fix=fix)
    other, more = another_size(inputs), torch.cat([inputs, inputs[:1]])
    try:
        other_calls, _ = record_calls(native.model, lambda: native.logits(other))
    except Exception:  # the model's own code may raise anything at a length that it does not take
        other = more
        other_calls, _ = record_calls(native.model, lambda: native.logits(other))
    if [call.path for call in calls] != [call.path for call in other_calls]:
        expected, got = "the same calls for inputs of every size", "others for another size"
        fix = "Let the number of loops depend on no input, or write the four methods."
        raise InputError("forward of the model", expected=expected, given=got, fix=fix)
    return Recording(
        inputs=inputs,
        calls=calls,
        logits=logits,
        other_inputs=other,
        other_calls=other_calls,
        one_length=other.shape[1] == inputs.shape[1],
    )
