"""What keeps activations while a model runs, and their gradients afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.utilities import Slice

from loopinterp.errors import HookError, InputError

if TYPE_CHECKING:
    from torch import Tensor


class Recorder:
    """Keeps activations during a run, sliced, cast and moved as asked.

    Args:
        pos_slice: Positions to keep.
        device: Where to keep them; None leaves them where they are.
        dtype: Type to keep floats in; None leaves it.
        gradients: Whether :meth:`backward` will be called.
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
        self._slice = None if pos_slice is None else Slice.unwrap(pos_slice)
        self._device, self._dtype = device, dtype
        self._live: dict[str, Tensor] | None = {} if gradients else None

    def __call__(self, name: str, x: Tensor) -> None:
        if self._live is not None:
            self._live[name] = x
        self.kept[name] = self._keep(name, x)

    def backward(self, loss: Tensor) -> None:
        """Add ``d loss / d activation`` for everything kept, as ``NAME_grad``."""
        if loss.numel() != 1 or not loss.requires_grad:
            raise InputError(
                "loss",
                expected="a scalar with a gradient",
                given=f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}",
                fix="Pass loss_fn=, from what the run returns to a scalar, and do not use no_grad.",
            )
        assert self._live is not None
        live = {name: x for name, x in self._live.items() if x.requires_grad}
        gradients = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        for (name, x), gradient in zip(live.items(), gradients):
            full = torch.zeros_like(x) if gradient is None else gradient
            self.kept[f"{name}_grad"] = self._keep(name, full)

    def _keep(self, name: str, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.detach()
        if self._slice is not None:
            heads = name.endswith(("hook_q", "hook_k", "hook_v", "hook_z", "rot_q", "rot_k"))
            axis = -3 if heads else -2
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
