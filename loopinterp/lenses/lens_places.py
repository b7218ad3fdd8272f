"""What lenses read: the state after each loop, and inside a loop the residual after each layer.

A *place* is ``(loop, layer)``. ``loop`` is the number of loops made, 0 for the initial state, and
``layer`` the layer of the last of them, ``None`` for the state that the loop leaves. The layers of
loop ``t`` have their hooks at index ``t - 1``: ``loops.{t-1}.blocks.{layer}.hook_resid_post``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loopinterp.models.iteration import iterate
from loopinterp.models.looped_model import bind, need_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import LoopedModel

STATE = "state"
"""The layer coordinate of the state that a loop leaves."""

Layer = int | None


class Place(NamedTuple):
    """A residual of a run, ``[batch, pos, d_model]``.

    Attributes:
        loop: Loops made.
        layer: Layer of the last of them; None for the state after it.
        residual: What stands there.
        ended: What the loop would leave if that layer were its last: the residual with what comes
            after the layers (an injection that is added to the output, the loop norm); of a state,
            the state itself.
    """

    loop: int
    layer: Layer
    residual: Tensor
    ended: Tensor


def places(
    model: LoopedModel | Any, inputs: Tensor, n_loops: int, *, inside: bool = False
) -> Iterator[Place]:
    """The residuals of a run, one loop at a time, in the order in which they are made.

    Args:
        model: Any looped model.
        inputs: Its inputs.
        n_loops: Loops to run.
        inside: Whether to read after each layer too, which takes a model with hooks.

    Raises:
        InputError: As :func:`~loopinterp.models.iterate`; if ``inside`` and there are no hooks.
    """
    if not inside:
        for loop, h in iterate(model, inputs, n_loops):
            yield Place(loop, None, h, h)
        return
    hooked = _hooked(model)
    h = bind(model, inputs).h0  # refuses hooks that are on
    yield Place(0, None, h, h)
    for loop in range(n_loops):
        layers = layer_hooks(model, loop, n_loops)
        gated = getattr(model, "gate", None) is not None
        injection = hooked.site("hook_injection", loop=loop, n_loops=n_loops) if gated else None
        after, cache = hooked.run_with_cache(
            inputs,
            n_loops=n_loops,
            start_at_loop=loop,
            stop_at_loop=loop + 1,
            state=h,
            names_filter=[*layers, *([injection] if injection else [])],
            return_type="state",
        )
        for layer, name in enumerate(layers):
            x = cache[name]
            yield Place(loop + 1, layer, x, _end(model, x, cache[injection] if injection else None))
        yield Place(loop + 1, None, after, after)
        h = after


def _hooked(model: Any) -> Any:
    need_hooks(model)
    return model


def layer_hooks(model: Any, loop: int, n_loops: int) -> list[str]:
    """The hooks after each layer of one loop."""
    names = model.site("resid_post", loop=loop, n_loops=n_loops)
    return [names] if isinstance(names, str) else names


def _end(model: Any, x: Tensor, injected: Tensor | None) -> Tensor:
    """What a loop does to the output of its last layer."""
    x = x if injected is None else x + injected
    norm = getattr(model, "ln_loop", None)
    return x if norm is None else norm(x)


def live_places(
    model: LoopedModel | Any, inputs: Tensor, n_loops: int, *, inside: bool = False
) -> tuple[Tensor, dict[tuple[int, Layer], Tensor]]:
    """The last state of a run, and the residuals before it, all in one graph of derivatives.

    Args:
        model: As for :func:`places`.
        inputs: Its inputs.
        n_loops: Loops to run.
        inside: As for :func:`places`.

    Returns:
        The state after ``n_loops``; and at each earlier place the tensor itself that the run went
        on from, so that the former can be differentiated by it.
    """
    kept: dict[tuple[int, Layer], Tensor] = {}
    with torch.enable_grad():
        iteration = bind(model, inputs)
        start = iteration.h0.detach().clone().requires_grad_()
        if not inside:
            for loop, h in iteration.run(n_loops, state=start):
                kept[loop, None] = h
            return kept.pop((n_loops, None)), kept
        hooked = _hooked(model)

        def keep(place: tuple[int, Layer]) -> Callable[..., None]:
            def hook(x: Tensor, hook: Any) -> None:
                kept[place] = x

            return hook

        hooks: list[tuple[str, Any]] = []
        for loop in range(n_loops):
            names = layer_hooks(model, loop, n_loops)
            hooks += [(name, keep((loop + 1, layer))) for layer, name in enumerate(names)]
            state = hooked.site("hook_state_post", loop=loop, n_loops=n_loops)
            hooks.append((state, keep((loop + 1, None))))
        end = hooked.run_with_hooks(
            inputs, n_loops=n_loops, state=start, fwd_hooks=hooks, return_type="state"
        )
    del kept[n_loops, None]
    return end, {(0, None): start, **kept}


def readout_without_coda(model: LoopedModel | Any) -> Callable[[Tensor], Tensor] | None:
    """Final norm and unembedding of a model that has a coda before them; None if it has none.

    What has the four methods alone shows one readout, whatever is in it: that is then both.
    """
    whole: Any = model
    if not len(getattr(whole, "coda", ())):
        return None

    def read(h: Tensor) -> Tensor:
        return whole.unembedding(h if whole.ln_final is None else whole.ln_final(h))

    return read


def layer_label(layer: Layer) -> str:
    """A layer as a coordinate of a result: "layer 0", or :data:`STATE`."""
    return STATE if layer is None else f"layer {layer}"
