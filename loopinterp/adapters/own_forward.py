"""Models whose own code runs the loop: hook sites of their modules, one loop of their forward."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.adapters.module_calls import (
    Call,
    Layout,
    Modules,
    Place,
    Slot,
    Watch,
    another_size,
    is_floats,
    record_calls,
)
from loopinterp.adapters.published_model import PublishedModel
from loopinterp.core.errors import InputError
from loopinterp.models.addresses import Axes, SiteMap
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import spell
from loopinterp.models.taps import NO_TAPS, SILENT, Taps
from loopinterp.models.weights import stored

if TYPE_CHECKING:
    from torch import Tensor, nn


Tapping = Callable[[Watch], Watch]  # adds the taps of a loop to what is watched in a run


def axes_of(
    first: Sequence[int], second: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> Axes | None:
    """The axes of an activation after the batch, from its shapes at two sizes of the input.

    ``sizes`` are batch and positions of both. None if the first axis is not the batch, or another
    axis follows neither.
    """
    (batch, n_pos), (other_batch, other_pos) = sizes
    if len(first) < 2 or len(first) != len(second):
        return None
    if (first[0], second[0]) != (batch, other_batch):
        return None
    axes: list[int | str] = []
    for k, pair in enumerate(zip(first[1:], second[1:])):
        moves = pair == (n_pos, other_pos)
        # At one length only, the axis after the batch that is as long as the input.
        if moves and (n_pos != other_pos or (k == 0 and len(first) > 2)):
            axes.append("key" if "pos" in axes else "pos")
        elif pair[0] == pair[1]:
            axes.append(pair[0])
        else:
            return None
    return None if axes.count("key") > 1 else tuple(axes)


def laid_out(
    first: Sequence[int], second: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> tuple[Layout, Axes] | None:
    """Layout and axes of an activation, from its shapes at two sizes, if known."""
    if (axes := axes_of(first, second, sizes)) is not None:
        return "batch", axes
    x, y = tuple(first), tuple(second)
    if len(x) > 1 and len(y) > 1 and (x[0], y[0]) == tuple(b * p for b, p in sizes):
        axes = axes_of((*sizes[0], *x[1:]), (*sizes[1], *y[1:]), sizes)
        return None if axes is None else ("flat", axes)
    if len(x) > 2 and len(y) > 2 and [x[1::-1], y[1::-1]] == list(sizes):
        axes = axes_of((*sizes[0], *x[2:]), (*sizes[1], *y[2:]), sizes)
        return None if axes is None else ("pos", axes)
    return None


def slots_of(
    calls: Sequence[Call],
    other: Sequence[Call],
    sizes: Sequence[tuple[int, int]],
    layers: Sequence[str] = (),
) -> list[Slot]:
    """The slots of one loop, in the order in which they fire.

    ``other`` are the same calls for an input of another size; ``sizes`` are batch and positions of
    both. ``layers`` are paths of layers, around which the stream is.
    """
    often = Counter(call.path for call in calls)
    seen: Counter[str] = Counter()
    ends: list[tuple[int, Slot]] = []
    for call, twin in zip(calls, other):
        index = seen[call.path]
        seen[call.path] += 1
        name = call.path if often[call.path] == 1 else f"{call.path}.calls.{index}"
        layer = layers.index(call.path) if call.path in layers else None
        for is_input, x, y in (
            (True, call.given, twin.given),
            (False, call.returned, twin.returned),
        ):
            placed = None if x is None or y is None else laid_out(x.shape, y.shape, sizes)
            if placed is None:
                continue
            layout, axes = placed
            component = f"{name}.hook_{'in' if is_input else 'out'}"
            if layer is not None:
                component = "hook_resid_pre" if is_input else "hook_resid_post"
            slot = Slot(call.path, index, is_input, component, layer, axes, layout)
            ends.append((call.entered if is_input else call.left, slot))
    return [slot for _, slot in sorted(ends, key=lambda end: end[0])]


def outermost_layers(calls: Sequence[Call], state: Tensor) -> list[str]:
    """Modules called once that map a state to a state, inside no other such."""
    often = Counter(call.path for call in calls)
    layers: list[Call] = []
    for call in sorted(calls, key=lambda call: call.entered):
        ends = [None if x is None else x.shape for x in (call.given, call.returned)]
        inside = any(call.left < layer.left for layer in layers)
        if often[call.path] == 1 and ends == [state.shape] * 2 and not inside:
            layers.append(call)
    return [layer.path for layer in layers]


class TappedModel(PublishedModel):
    """A model whose own code runs each loop, with hooks on the modules that it calls.

    A loop without layers is one layer itself.

    Args:
        slots: Inputs and outputs of modules in a loop.
        e_axes: Axes of the injected input after the batch; ``state_axes`` those of the state.
    """

    keeps_keys = False
    several_devices = False  # taps would see activations where the model's own code has them

    def __init__(
        self,
        published: Any,
        slots: Sequence[Slot],
        *,
        e_axes: Axes,
        state_axes: Axes,
        **settings: Any,
    ) -> None:
        stream = {"hook_resid_pre": "residual", "hook_resid_post": "residual"}
        n_layers = max((slot.layer + 1 for slot in slots if slot.layer is not None), default=0)
        axes: dict[str, Axes] = {"residual": state_axes, "state": state_axes, "embedding": e_axes}
        modules: dict[str, str] = {}
        for slot in slots:
            if slot.layer is None:
                kind = f"module {list(slot.axes)}"
                axes[kind], modules[slot.component] = slot.axes, kind
        widths = [int(x) for x in (e_axes[-1], state_axes[-1])]
        sites = SiteMap(
            d_model=widths[0],
            d_state=widths[1],
            n_heads=0,
            d_head=0,
            d_mlp=0,
            embedding={"hook_embed": "embedding"},
            opening={"hook_state_pre": "state"},
            block=(stream,) * max(1, n_layers),
            closing={**modules, "hook_state_post": "state"},
            more_axes=axes,
        )
        super().__init__(published, sites, **settings)
        self.slots, self._is_one_layer = list(slots), n_layers == 0

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, batch = taps.at("block", loop), len(h)
        layer = taps.at("block", loop, 0) if self._is_one_layer else SILENT
        h = layer("hook_resid_pre", tap("hook_state_pre", h))
        h = self.own_loop(h, e, context, loop, lambda x: x.tapping(self.slots, taps, loop, batch))
        return tap("hook_state_post", layer("hook_resid_post", h))

    @abstractmethod
    def own_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, loop: int, tapping: Tapping
    ) -> Tensor:
        """One loop, by the model's own code."""


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
        if self.start == "zeros":
            return zeros
        path, _, name = self.start.rpartition(".")
        return stored(native.by_path[path], name).expand_as(zeros)

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
