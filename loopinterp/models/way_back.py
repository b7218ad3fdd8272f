r"""A logit's direction on its way back through a run, and what each writer met there adds to it.

With the scale of every norm and gate held where the run had it, whatever lies between a writer
and the logit is a linear map of the stream, and its transpose carries the direction back:

.. math::
    x \mapsto D x + b: \qquad d \cdot (D x + b) = (D^\top d) \cdot x + d \cdot b

So ``logit = direction . stream here + the parts met so far`` holds at every place. A model says
its own way, beside its loop and its readout (:class:`WalksBack`); the steps of all are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8
    from torch import Tensor

    from loopinterp.models.site_map import SiteMap
    from loopinterp.models.sites import AddressBook
    from loopinterp.models.taps import Taps

    Read = Callable[[str], Tensor]
    """An activation of the run, by name or alias."""

# The loop, layer and head of a part that has none; NaN would fall out of groupby("loop").sum().
_NOWHERE = {"loop": -1, "layer": -1, "head": -1}


_READ = ("hook_scale", "hook_z", "gate", "hook_mlp_out", "hook_mix_out", "hook_injection")
_READ += ("hook_state_pre", "hook_state_post", "hook_code_pre")


def for_logit_attribution(name: str) -> bool:
    """Whether ``cache.logit_attribution`` reads an activation: a filter of names for its runs.

    Example:
        >>> [for_logit_attribution(f"blocks.0.{x}") for x in ("attn.hook_z", "attn.hook_pattern")]
        [True, False]
    """
    return name.endswith(_READ)


class WayBack:
    """A logit's direction, on its way back through the run, and the parts met so far.

    The walk begins at the logits and ends at the state before a loop. It stands at one place at
    a time, of which it reads activations by their component names and notes parts.

    Args:
        read: The run's activations.
        dtype: Type that is reckoned in.
        plus: Class whose logit is attributed, at each place.
        minus: Class whose logit is taken off; None for the logit itself.
    """

    direction: Float[Tensor, "*batch pos d_state"]
    """By its product with the stream here, the logit less the parts met so far."""

    def __init__(
        self,
        read: Read,
        dtype: torch.dtype,
        plus: Int[Tensor, "*batch pos"],
        minus: Int[Tensor, "*batch pos"] | None = None,
    ) -> None:
        self._read, self._dtype = read, dtype
        self._classes = (plus,) if minus is None else (plus, minus)
        self._place: dict[str, int] = {}
        self.parts: list[tuple[dict[str, Any], Float[Tensor, "*batch pos"]]] = []

    def stand(self, **place: int) -> None:
        """Go to a loop, to a layer of one (``loop=``, ``layer=``), to a coda layer, or to the top.

        Args:
            place: ``loop``, ``layer``, both, or neither.
        """
        self._place = place

    def read(self, component: str) -> Tensor:
        """An activation at this place, in the type that is reckoned in."""
        words = (("loop", "loops"), ("layer", "blocks" if "loop" in self._place else "coda"))
        steps = [f"{word}.{self._place[axis]}" for axis, word in words if axis in self._place]
        return self._wide(self._read(".".join([*steps, component])))

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)

    # Parts

    def add(self, name: str, logit: Tensor, part: str = "", *, head: int | None = None) -> None:
        """Note what a part adds to the logit; ``part`` is its kind, where not its name."""
        place = self._place if head is None else {**self._place, "head": head}
        words = {"loop": "loop", "layer": "layer" if "loop" in place else "coda layer"}
        where = [f"{word} {place[axis]}" for axis, word in words.items() if axis in place]
        about = {"component": ", ".join([*where, name]), "part": part or name, **_NOWHERE, **place}
        self.parts.append((about, logit))

    def write(self, name: str, x: Tensor, part: str = "") -> None:
        """Note what a vector written to the stream here adds to the logit."""
        self.add(name, (self._wide(x) * self.direction).sum(-1), part)

    def write_heads(
        self,
        weight: Float[Tensor, "d_model width"],
        bias: Float[Tensor, " d_model"] | None,
        *,
        gate: str | None = None,
    ) -> None:
        """Note what each head writes, and the bias of them all: ``sum_h (gate z)_h W_O[h] + b``.

        Args:
            weight: Output weights of all heads side by side, as a linear map has them.
            bias: The bias after them.
            gate: The component that each head's ``z`` is multiplied with, where there is one.
        """
        z = self.read("attn.hook_z")  # [batch, pos, head, d_head]
        if gate is not None:
            z = z * self.read(gate)
        if bias is not None:
            self.write("attention bias", bias)
        wanted = (self.direction @ self._wide(weight)).unflatten(-1, z.shape[-2:])
        heads = (z * wanted).sum(-1)  # [batch, pos, head]
        for head in reversed(range(z.shape[-2])):
            self.add(f"head {head}", heads[..., head], "head", head=head)

    # Maps of the stream

    def through_unembedding(self, weight: Tensor, bias: Tensor | None) -> None:
        """``logits = W x + b``: the way begins with the rows of the classes."""
        if bias is not None:
            self.stand()
            self.add("unembedding bias", self._of_classes(bias))
        self.direction = self._of_classes(weight)

    def _of_classes(self, rows: Tensor) -> Tensor:
        chosen = [self._wide(rows[classes]) for classes in self._classes]
        return chosen[0] if len(chosen) == 1 else chosen[0] - chosen[1]

    def through_norm(
        self,
        site: str,
        weight: Float[Tensor, " d_model"] | None = None,
        bias: Float[Tensor, " d_model"] | None = None,
        *,
        name: str = "",
    ) -> None:
        """``x -> (x - mean) / scale * weight + bias``, or ``x -> x / scale * weight``.

        Args:
            site: The norm, as hooks name it.
            weight: None where it has none.
            bias: None for a root mean square norm, which takes off no mean.
            name: Of the part that its bias is; the site's if empty.
        """
        if bias is not None:
            self.write(f"{name or site} bias", bias, "norm bias")
        weighted = self.direction if weight is None else self.direction * self._wide(weight)
        self.direction = weighted / self.read(f"{site}.hook_scale")
        if bias is not None:
            self.direction = self.direction - self.direction.mean(-1, keepdim=True)

    def through_scale(self, factor: Tensor) -> None:
        """``x -> factor * x``, feature by feature."""
        self.direction = self.direction * factor

    def through_linear(self, weight: Float[Tensor, "d_out d_in"]) -> None:
        """``x -> W x``."""
        self.direction = self.direction @ self._wide(weight)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A branch that is added to the stream, which goes on past it as before."""
        stream = self.direction
        yield
        self.direction = stream


@runtime_checkable
class WalksBack(Protocol):
    """A model that says how a logit's direction comes back through its readout and a loop."""

    @property
    def site_map(self) -> SiteMap:
        """The sites of the model, and their sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        ...

    def addresses(self, n_loops: int | None = None) -> AddressBook:
        """All addresses of a run, and the ways to name them."""
        ...

    def _readout(self, h: Tensor, taps: Taps = ...) -> Tensor: ...

    def _digest_of_readout(self) -> UInt8[Tensor, " byte"] | None: ...

    def _readout_back(self, way: WayBack) -> None:
        """From the logits to the state that they are read from."""

    def _loop_back(self, way: WayBack, loop: int) -> None:
        """From the state after a loop to the state before it."""
