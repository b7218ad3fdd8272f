"""Hook sites of the modules in a loop, and the base of models whose own code runs the loop."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loopinterp.adapters.module_calls import Call, Layout, Slot, Watch
from loopinterp.adapters.published_model import PublishedModel
from loopinterp.models.addresses import Axes, SiteMap
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Taps

if TYPE_CHECKING:
    from torch import Tensor

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
