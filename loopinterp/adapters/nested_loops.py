r"""Loops within loops: a slow stack, and a fast one that runs several times between its steps.

.. math::
    z_L \leftarrow \operatorname{fast}(z_L + (z_H + e)) \quad \text{n times}, \qquad
    z_H \leftarrow \operatorname{slow}(z_H + z_L)

One loop is one slow cycle. The layers of its fast cycles are layers of its block, one after the
other, and those of the slow stack the last: ``loops.{t}.blocks.{l}`` is also
``loops.{t}.inner.{s}.blocks.{k}``, with s the fast cycle, or their number for the slow stack. The
state is both parts side by side, ``[z_H, z_L]``, and logits are read from the first. Each part also
has a hook of its own where the loop ends, ``hook_z_H`` and ``hook_z_L``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.adapters.published_model import PublishedModel
from loopinterp.errors import unknown_name
from loopinterp.models.positions import AttentionContext
from loopinterp.models.site_map import Axes, SiteMap, Sites
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.way_back import WayBack


def nested_sites(
    fast: Sequence[Sites],
    slow: Sequence[Sites],
    n_fast: int,
    *,
    d_model: int,
    n_heads: int,
    d_head: int,
    d_mlp: int,
    embedding: Sites | None = None,
    injects: bool = True,
    closing: Sites | None = None,
    more_axes: Mapping[str, Axes] | None = None,
) -> SiteMap:
    """The sites of a model with a slow cycle as its loop.

    Args:
        fast: Sites of the layers of the fast stack.
        slow: Sites of the layers of the slow stack.
        n_fast: How often the fast stack is run in a loop.
        d_model: Width of each part of the state.
        n_heads: Heads of each layer.
        d_head: Width of each.
        d_mlp: Neurons of each MLP.
        embedding: What happens once, before the first loop.
        injects: Whether the input is injected into the fast cycles.
        closing: What happens once per loop, at its end, beside the state.
        more_axes: Axes of kinds that no other model has.

    Example:
        >>> sites = {"hook_resid_pre": "residual"}
        >>> sizes = {"d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 16}
        >>> nested_sites([sites] * 2, [sites], 2, **sizes).layer_names[2:]
        ('inner.1.blocks.0', 'inner.1.blocks.1', 'inner.2.blocks.0')
    """
    stacks = [fast] * n_fast + [slow]
    names = (f"inner.{s}.blocks.{k}" for s, stack in enumerate(stacks) for k in range(len(stack)))
    return SiteMap(
        d_model=d_model,
        d_state=2 * d_model,
        n_heads=n_heads,
        d_head=d_head,
        d_mlp=d_mlp,
        embedding=embedding or {"hook_embed": "residual"},
        opening={"hook_state_pre": "state", **({"hook_injection": "residual"} if injects else {})},
        block=tuple(chain.from_iterable(stacks)),
        closing={
            "hook_z_H": "residual",
            "hook_z_L": "residual",
            "hook_state_post": "state",
            **(closing or {}),
        },
        layer_names=tuple(names),
        state_parts={"z_H": slice(d_model), "z_L": slice(d_model, 2 * d_model)},
        more_axes=more_axes or {},
    )


class NestedModel(PublishedModel):
    """A published model with a slow cycle as its loop. What it says besides: stacks and layers."""

    @property
    @abstractmethod
    def _stacks(self) -> tuple[Any, Any, int]:
        """The fast stack, the slow one, and how often the fast one runs in a loop."""

    @abstractmethod
    def _layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """One layer of either stack."""

    def _after_stack(self, stack: Any, h: Tensor, tap: Tap) -> Tensor:
        """What becomes of the stream at the end of a stack, past the tap of its last layer."""
        return h

    def part(
        self, state: Float[Tensor, "*place d_state"], name: str
    ) -> Float[Tensor, "*place d_model"]:
        """One part of a state, ``z_H`` or ``z_L``.

        Raises:
            InputError: If there is no such part.
        """
        if name not in self.site_map.state_parts:
            raise unknown_name("part of the state", name, self.site_map.state_parts)
        return state[..., self.site_map.state_parts[name]]

    def _loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, (fast, slow, n_fast) = taps.at("block", loop), self._stacks
        h = tap("hook_state_pre", h)
        z_H, z_L = (self.part(h, name) for name in ("z_H", "z_L"))
        injects = "hook_injection" in self.site_map.opening
        e = tap("hook_injection", e) if injects else e
        inside = (taps.at("block", loop, k) for k in range(self.site_map.n_layers))
        for _ in range(n_fast):
            z_L = self._run_stack(fast, z_L + (z_H + e if injects else z_H), context, inside)
        z_H = self._run_stack(slow, z_H + z_L, context, inside)
        z_H, z_L = tap("hook_z_H", z_H), tap("hook_z_L", z_L)
        h = tap("hook_state_post", torch.cat((z_H, z_L), dim=-1))
        self._at_end(h, tap)
        return h

    def _run_stack(
        self, stack: Any, h: Tensor, context: AttentionContext, taps: Iterable[Tap]
    ) -> Tensor:
        tap = SILENT
        for layer, tap in zip(stack.layers, taps):
            h = self._layer(layer, h, context, tap)
        return self._after_stack(stack, h, tap)

    # The way back of a logit's direction, which is of both parts side by side

    @property
    @abstractmethod
    def _head(self) -> Any:
        """What logits are read with from z_H."""

    @abstractmethod
    def _layer_back(self, layer: Any, way: WayBack) -> None:
        """From after a layer to before it."""

    def _after_stack_back(self, way: WayBack) -> None:
        """From the end of a stack to after its last layer."""

    def _readout_back(self, way: WayBack) -> None:
        way.through_unembedding(self._head.weight, self._head.bias)
        way.direction = torch.cat((way.direction, torch.zeros_like(way.direction)), dim=-1)

    def _loop_back(self, way: WayBack, loop: int) -> None:
        fast, slow, n_fast = self._stacks
        numbers = reversed(range(self.site_map.n_layers))
        z_H, z_L = (self.part(way.direction, name) for name in ("z_H", "z_L"))
        z_H = self._stack_back(slow, z_H, way, loop, numbers)
        z_L, injected = z_L + z_H, torch.zeros_like(z_L)
        for _ in range(n_fast):
            z_L = self._stack_back(fast, z_L, way, loop, numbers)
            z_H, injected = z_H + z_L, injected + z_L
        way.stand(loop=loop)
        if "hook_injection" in self.site_map.opening:
            way.direction = injected
            way.write("injection", way.read("hook_injection"))
        way.direction = torch.cat((z_H, z_L), dim=-1)

    def _stack_back(
        self, stack: Any, direction: Tensor, way: WayBack, loop: int, numbers: Iterator[int]
    ) -> Tensor:
        way.direction = direction
        for nth, layer in enumerate(reversed(stack.layers)):
            way.stand(loop=loop, layer=next(numbers))
            if nth == 0:
                self._after_stack_back(way)
            self._layer_back(layer, way)
        return way.direction

    def _at_end(self, h: Tensor, tap: Tap) -> None:
        """What a loop says besides its state."""

    def _start(self, slow: Tensor, fast: Tensor, e: Tensor) -> Tensor:
        """A state of two parts, each given for every position or for all."""
        return torch.cat((slow.expand_as(e), fast.expand_as(e)), dim=-1).to(e)
