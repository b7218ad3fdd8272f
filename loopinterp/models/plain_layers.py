"""Layers that compute what their own weights say, told from those that somebody has changed.

A run calls its layers, so an adapter, a hook, a parametrisation or a pruning mask around one takes
part in it. What reads weights instead (heads taken apart, a logit carried back, a folder written)
would go past them, and asks here first.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import nn

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping


Change = Literal["wrapped", "hooked", "parametrised", "missing", "tensors"]
"""How a layer is not what its configuration makes of it."""

_GIVEN: Mapping[Change, str] = {
    "wrapped": "another module in its place or around it",
    "hooked": "hooks of PyTorch on it, as pruning and the older weight norm put there",
    "parametrised": "a parametrisation",
    "missing": "none of that name",
    "tensors": "other tensors than its configuration has",
}
_FIX = (
    "Merge the adapter (PEFT: merge_and_unload), remove the parametrisation "
    "(torch.nn.utils.parametrize.remove_parametrizations), make the pruning permanent "
    "(torch.nn.utils.prune.remove), or take the hooks off."
)

_Layer = TypeVar("_Layer", bound=nn.Module)


def change_of(layer: nn.Module) -> Change | None:
    """How a layer has been changed; None where its weights alone say what it computes."""
    inside = layer._modules
    if "base_layer" in inside or "forward" in vars(layer):  # PEFT's mark; a patched method
        return "wrapped"
    if "parametrizations" in inside:
        return "parametrised"
    return "hooked" if layer._forward_hooks or layer._forward_pre_hooks else None


def with_weights(layer: _Layer, *, uncalled: bool = False) -> _Layer:
    """The layer, if the weights that it shows are those that it computes with.

    Those of a parametrised layer are made when they are read. Those of a pruned one are made when
    it is called, by a hook before it, and may be old.

    Args:
        layer: A layer.
        uncalled: Whether they are used in place of a call, so that no hook may be on it either.

    Raises:
        InputError: If they may be others.
    """
    change = change_of(layer)
    hooked = layer._forward_pre_hooks or (uncalled and change == "hooked")
    if change == "wrapped" or hooked or not hasattr(layer, "weight"):
        raise changed_layer_error(f"weights of a {type(layer).__name__}", change or "wrapped")
    return layer


def weights_of(layer: str, weight: str, doc: str) -> property:
    """A property that reads a tensor of a layer, if the layer computes what it says.

    Args:
        layer: Attribute that holds the layer.
        weight: Attribute of the layer, with dots.
        doc: The property's docstring.
    """
    read = attrgetter(weight)
    return property(lambda self: read(with_weights(getattr(self, layer))), doc=doc)


def need_unchanged(model: nn.Module, what: str) -> None:
    """Raise if a layer of a model is wrapped, hooked or parametrised: a look that costs little.

    Raises:
        InputError: Naming the first such layer, and how it has been changed.
    """
    for name, module in model.named_modules():
        if (change := change_of(module)) is not None:
            raise changed_layer_error(f"{what}: {name}", change)


def changed_layer_error(what: str, change: Change) -> InputError:
    """What is raised of a layer that has been changed."""
    return InputError(
        what,
        expected="layers that compute what their own weights say",
        given=_GIVEN[change],
        fix=_FIX,
    )
