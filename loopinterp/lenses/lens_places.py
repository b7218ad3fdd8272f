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
from loopinterp.models.recorded_gradients import recording_gradients

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
        ended: What the loop leaves if its last layer puts this out: the residual with what comes
            after the layers (an injection that is added to the output, the loop norm); of a state,
            the state itself.
    """

    loop: int
    layer: Layer
    residual: Tensor
    ended: Tensor


def places(
    model: LoopedModel | Any,
    inputs: Tensor,
    n_loops: int,
    *,
    inside: bool = False,
    ended: bool = True,
) -> Iterator[Place]:
    """The residuals of a run, one loop at a time, in the order in which they are made.

    Args:
        model: Any looped model.
        inputs: Its inputs.
        n_loops: Loops to run.
        inside: Whether to read after each layer too, which takes a model with hooks.
        ended: Whether to make :attr:`Place.ended` of layers; else it is the residual again. Of a
            model that has no ``end_loop(h, e)``, which says it, each takes a loop more.

    Raises:
        InputError: As :func:`~loopinterp.models.iterate`; if ``inside`` and there are no hooks.
    """
    if not inside:
        for loop, h in iterate(model, inputs, n_loops):
            yield Place(loop, None, h, h)
        return
    hooked = _hooked(model)
    iteration = bind(model, inputs)  # refuses hooks that are on
    h, end_loop = iteration.h0, getattr(model, "end_loop", None)
    yield Place(0, None, h, h)
    for loop in range(n_loops):
        layers = layer_hooks(model, loop, n_loops)
        span = {"n_loops": n_loops, "start_at_loop": loop, "stop_at_loop": loop + 1, "state": h}
        after, cache = hooked.run_with_cache(
            inputs, names_filter=layers, return_type="state", **span
        )
        for layer, name in enumerate(layers):
            x = end = cache[name]
            if name == layers[-1]:
                end = after
            elif ended and end_loop is not None:
                end = end_loop(x, iteration.e)
            elif ended:
                end = end_by_hook(model, inputs, x, layers[-1], span)
            yield Place(loop + 1, layer, x, end)
        yield Place(loop + 1, None, after, after)
        h = after


def _hooked(model: Any) -> Any:
    need_hooks(model)
    return model


def layer_hooks(model: Any, loop: int, n_loops: int) -> list[str]:
    """The hooks after each layer of one loop."""
    return _listed(model.site("resid_post", loop=loop, n_loops=n_loops))


def layers_around(model: Any, section: str) -> list[str]:
    """The hooks after each layer of prelude or coda in a run of 1 loop; none without hooks."""
    if not hasattr(model, "site"):
        return []
    return _listed(model.site("resid_post", section=section, n_loops=1))


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def end_by_hook(model: Any, inputs: Tensor, x: Tensor, last: str, span: dict[str, Any]) -> Tensor:
    """What a loop leaves where the hook ``last`` puts out x, of whatever model: by running it."""
    hooks = [(last, lambda residual, hook: x)]
    return model.run_with_hooks(inputs, fwd_hooks=hooks, return_type="state", **span)


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
    with recording_gradients():
        iteration = bind(model, inputs)
        start = iteration.h0.detach().clone().requires_grad_()
        if not inside:
            for loop, h in iteration.run(n_loops, state=start, start_at_loop=0):
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


def readout_without_coda(
    model: LoopedModel | Any, inputs: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """What a model reads where its coda is left out; None if it has none.

    Final norm and unembedding, by a run of no loop in which the last layer of the coda puts out
    what is to be read. What has the four methods alone shows one readout, whatever is in it.
    """
    whole: Any = model
    coda = layers_around(model, "coda")
    if not coda:
        return None
    name = coda[-1]

    def read(h: Tensor) -> Tensor:
        hooks = [(name, lambda residual, hook: h)]
        return whole.run_with_hooks(inputs, n_loops=1, start_at_loop=1, state=h, fwd_hooks=hooks)

    return read


def as_wide(x: Tensor, width: int) -> Tensor:
    """A residual with zeros behind it, where a layer is narrower than the state of several parts.

    Example:
        >>> as_wide(torch.ones(1, 2), 3)
        tensor([[1., 1., 0.]])
    """
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def layer_label(layer: Layer) -> str:
    """A layer as a coordinate of a result: "layer 0", or :data:`STATE`."""
    return STATE if layer is None else f"layer {layer}"
