"""Taps: where a run lets hooks at its activations, and where nobody listens; what is recorded.

The forward pass is written once and passes every activation that has a name through the tap of
its place. Where nobody listens the tap hands it back. Nothing that it has seen is written in
place afterwards, so a cache need not clone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.utilities import Slice

from loopinterp.errors import HookError, InputError
from loopinterp.models.run_readout import RunReadout

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint

    from loopinterp.models.sites import Address, Place


class Tap:
    """The hooks of one layer, one loop, or the top of the model: here, none."""

    def __call__(self, component: str, x: Tensor) -> Tensor:
        """The activation, as the hooks there leave it."""
        return x

    def listens(self, *components: str) -> bool:
        """Whether any of the components has a hook or is recorded."""
        return False

    def edits(self, *components: str) -> bool:
        """Whether any of the components has a hook, which may change it, or needs a gradient."""
        return False


SILENT = Tap()
"""The tap of a place where nobody listens."""


class ChangingTap(Tap):
    """A tap that changes activations, and neither copies nor keeps any.

    Args:
        changes: From what an activation is to what it becomes, by component.
    """

    def __init__(self, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._changes = changes

    def __call__(self, component: str, x: Tensor) -> Tensor:
        change = self._changes.get(component)
        return x if change is None else change(x)

    def listens(self, *components: str) -> bool:
        return any(c in self._changes for c in components)

    edits = listens


class _OpenTap(Tap):
    """A tap at which activations pass through hook points, and are recorded where wanted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.points: dict[str, list[HookPoint]] = {}
        self.wanted: dict[str, Address] = {}  # both by component

    def __call__(self, component: str, x: Tensor) -> Tensor:
        for point in self.points.get(component, ()):
            # Hooks of TransformerLens write in place; what they get must be nobody else's.
            x = point(x.clone())
        address = self.wanted.get(component)
        if address is not None:
            self._recorder(address, x)
        return x

    def listens(self, *components: str) -> bool:
        return any(c in self.points or c in self.wanted for c in components)

    def edits(self, *components: str) -> bool:
        needed = self.wanted if self._recorder.gradients else ()
        return any(c in self.points or c in needed for c in components)


class Taps:
    """The taps of a run, by place.

    Args:
        points: The hook points of the run that carry functions, with their addresses.
        wanted: Addresses to record.
        recorder: What keeps them.
    """

    def __init__(
        self,
        points: Iterable[tuple[Address, HookPoint]] = (),
        wanted: Iterable[Address] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._taps: dict[Place, Tap] = {}
        self._recorder = recorder
        opened: defaultdict[Place, _OpenTap] = defaultdict(lambda: _OpenTap(recorder or Recorder()))
        for address, point in points:
            opened[address.place].points.setdefault(address.component, []).append(point)
        for address in wanted:
            opened[address.place].wanted[address.component] = address
        self._taps.update(opened)

    @classmethod
    def changing(cls, changes: Mapping[Place, Mapping[str, Callable[[Tensor], Tensor]]]) -> Taps:
        """Changes of activations, by place and component."""
        taps = cls()
        taps._taps.update({place: ChangingTap(these) for place, these in changes.items()})
        return taps

    def at(self, section: str, loop: int | None = None, layer: int | None = None) -> Tap:
        """The tap at a place."""
        return self._taps.get((section, loop, layer), SILENT)

    def end(self, state: Tensor, logits: Tensor | None) -> None:
        """Note where a run ended, and what was read there."""
        if self._recorder is not None:
            self._recorder.last = (state, logits)

    def listen(self, *components: str) -> bool:
        """Whether anybody listens to one of the components, at any place."""
        return any(tap.listens(*components) for tap in self._taps.values())


NO_TAPS = Taps()


class Recorder:
    """Keeps activations during a run, sliced, cast and moved as ``run_with_cache`` is asked to.

    With ``gradients``, :meth:`backward` will be called.
    """

    def __init__(
        self,
        *,
        pos_slice: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gradients: bool = False,
    ) -> None:
        self.kept: dict[str, Tensor] = {}
        self.last: tuple[Tensor, Tensor | None] | None = None  # state and logits
        self._slice = None if pos_slice is None else Slice.unwrap(pos_slice)
        self._device, self._dtype, self.gradients = device, dtype, gradients
        self._live: dict[Address, Tensor] = {}

    def __call__(self, address: Address, x: Tensor) -> None:
        if self.gradients:
            self._live[address] = x
        self.kept[address.name] = self._keep(address, x)

    def kept_positions(self, n_pos: int) -> int:
        """How many of so many positions are kept."""
        if self._slice is None:
            return n_pos
        try:
            return self._slice.apply(torch.arange(n_pos)).numel()
        except IndexError:  # none, which is refused where the first is kept
            return 0

    def readout(self, *, by_example: bool) -> RunReadout:
        """How the run ended that was recorded."""
        assert self.last is not None
        state, logits = self.last
        positions = torch.arange(state.shape[1])
        return RunReadout(
            state.detach().to(device=self._device),
            positions if self._slice is None else self._slice.apply(positions),
            torch.tensor(by_example),
            None if logits is None else logits.detach().to(device=self._device),
        )

    def backward(self, loss: Tensor) -> None:
        """Add ``d loss / d activation`` for everything kept, as ``NAME_grad``."""
        if loss.numel() != 1 or not loss.requires_grad:
            given, fix = self._no_gradient(loss)
            raise InputError("loss", expected="a scalar with a gradient", given=given, fix=fix)
        live = {address: x for address, x in self._live.items() if x.requires_grad}
        gradients = torch.autograd.grad(
            loss, list(live.values()), allow_unused=True, materialize_grads=True
        )
        for address, gradient in zip(live, gradients):
            self.kept[f"{address.name}_grad"] = self._keep(address, gradient)

    def _no_gradient(self, loss: Tensor) -> tuple[str, str]:
        """Why a loss has no gradient, and what to do."""
        if loss.numel() != 1:
            shape = f"shape {tuple(loss.shape)}"
            return shape, "Pass loss_fn=, from what the run returns to a scalar."
        if not torch.is_grad_enabled():
            return "gradients switched off", "Leave torch.no_grad, or torch.set_grad_enabled(True)."
        if not any(x.requires_grad for x in self._live.values()):
            return "a run of frozen weights", "Call model.requires_grad_(True) before the run."
        return (
            "a loss that is detached from the run",
            "Return from loss_fn what PyTorch can differentiate: no .detach(), .item() or argmax.",
        )

    def _keep(self, address: Address, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.detach()
        axis = address.pos_axis
        if self._slice is not None and axis is not None:
            try:
                # Cloned, or the part kept would hold the whole activation in memory.
                kept = self._slice.apply(x, dim=axis).clone()
            except IndexError:
                kept = x[:0]
            if not kept.numel():
                raise HookError(
                    "pos_slice",
                    expected=f"some of the {x.shape[axis]} positions",
                    given="none of them",
                    fix="Name positions inside the sequence.",
                )
            x = kept
        if self._device is not None or self._dtype is not None:
            x = x.to(device=self._device, dtype=self._dtype)
        return x
