"""Linear maps and norms; detection of changed layers.

A run calls its layers, so adapters, hooks, parametrisations and pruning masks take effect. Code
that reads weights instead checks here first.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from loopinterp.core.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class LinearMap(nn.Linear):
    """``x W^T + b``, also of several models ``[model, d_out, d_in]``."""

    def forward(self, input: Float[Tensor, "*row d_in"]) -> Float[Tensor, "*row d_out"]:
        weight, bias = self.weight, self.bias
        if weight.dim() == 2:
            return F.linear(input, weight, bias)
        # Of several models: [model, row, d_in] times [model, d_in, d_out].
        if bias is None:
            return torch.bmm(input, weight.transpose(1, 2))
        # [model, row, d_out]: one product of matrices for each model.
        return torch.baddbmm(bias[:, None], input, weight.transpose(1, 2))


def apply_norm(
    x: Float[Tensor, "*row d_model"],
    weight: Float[Tensor, "*model d_model"],
    bias: Float[Tensor, "*model d_model"] | None,
    eps: float,
) -> Float[Tensor, "*row d_model"]:
    """LayerNorm, or RMSNorm without a bias, also of several models."""
    width = weight.shape[-1:]
    if weight.dim() == 1:
        if bias is None:
            return F.rms_norm(x, width, weight, eps)
        return F.layer_norm(x, width, weight, bias, eps)
    if bias is None:
        return F.rms_norm(x, width, None, eps) * weight[:, None]
    ones = torch.ones_like(weight[0])  # on a CPU quicker than none at all
    # Normed rows [model, row, d_model], scaled and shifted by each model's own weights.
    return torch.addcmul(bias[:, None], F.layer_norm(x, width, ones, None, eps), weight[:, None])


_Change = Literal["wrapped", "placed", "hooked", "parametrised", "missing", "tensors"]
_Layer = TypeVar("_Layer", bound=nn.Module)


def change_of(layer: nn.Module) -> _Change | None:
    inside, attributes = layer._modules, vars(layer)
    if "base_layer" in inside or "forward" in attributes:  # PEFT's mark; a patched method
        # Accelerate's hook around the forward of the class moves tensors, and computes the same.
        before = attributes.get("_old_forward")
        around = getattr(attributes.get("forward"), "__wrapped__", None) is before
        is_own = around and getattr(before, "__func__", None) is type(layer).forward
        return "placed" if is_own and "base_layer" not in inside else "wrapped"
    if "parametrizations" in inside:
        return "parametrised"
    return "hooked" if layer._forward_hooks or layer._forward_pre_hooks else None


def with_weights(layer: _Layer, *, uncalled: bool = False) -> _Layer:
    """The layer, if its output is that of the weights it shows; else raise.

    Parametrised layers compute their weights when read, pruned ones in a hook before each call.
    With ``uncalled``, the weights replace a call, so hooks are refused too. A layer placed by
    accelerate shows its weights only inside ``placement.placed``.
    """
    change = change_of(layer)
    hooked = layer._forward_pre_hooks or (uncalled and change == "hooked")
    weight = getattr(layer, "weight", None)
    away = change == "placed" and weight is not None and weight.device == torch.device("meta")
    if change == "wrapped" or away or hooked or not hasattr(layer, "weight"):
        raise _changed(f"weights of a {type(layer).__name__}", change or "wrapped")
    return layer


def weights_of(layer: str, weight: str, doc: str) -> property:
    """A property of a layer's tensor, through :func:`with_weights`."""
    read = attrgetter(weight)
    return property(lambda self: read(with_weights(getattr(self, layer))), doc=doc)


def need_unchanged(model: nn.Module, what: str) -> None:
    for name, module in model.named_modules():
        if (change := change_of(module)) is not None:
            raise _changed(f"{what}: {name}", change)


def _changed(what: str, change: _Change) -> InputError:
    got = {
        "wrapped": "another module in its place or around it",
        "placed": "a hook of accelerate, which moves its weights",
        "hooked": "hooks of PyTorch on it, as pruning and the older weight norm put there",
        "parametrised": "a parametrisation",
        "missing": "none of that name",
        "tensors": "other tensors than its configuration has",
    }
    expected = "layers that compute what their own weights say"
    fix = "Merge the adapter (PEFT: merge_and_unload), remove the parametrisation "
    fix += "(remove_parametrizations), make the pruning permanent (prune.remove), or unhook it."
    if change == "placed":
        fix = "Load it on one device, without device_map."
    return InputError(what, expected=expected, given=got[change], fix=fix)


def need_plain(model: nn.Module, what: str, *, saved: bool = False) -> None:
    """Raise for the call ``what`` unless all layers compute with their own weights.

    A model to be ``saved`` may have hooks, but no parametrisation.
    """
    for name, change in _changed_layers(model):
        if change != ("hooked" if saved else "parametrised"):
            raise _changed(f"{what}: {name}", change)


def _changed_layers(model: Any) -> Iterator[tuple[str, _Change]]:
    """The changed layers of a model by name, the outermost first.

    A model with a ``plain_twin`` is compared with it; in a published model, only hooks,
    parametrisations and PEFT's mark are found.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    twin = model.plain_twin() if hasattr(model, "plain_twin") else None
    expected = {} if twin is None else {name: x for name, x in twin.named_modules() if name}
    for name in expected.keys() - modules.keys():
        yield name, "missing"
    for name, module in modules.items():
        change = change_of(module)
        if twin is None and change == "placed":
            continue  # an adapter enters the hook
        if change is not None:
            yield name, change
        elif twin is None or "parametrizations" in name.split("."):
            continue  # of a layer that was named before
        else:
            plain = expected.get(name)
            kinds = (LinearMap, nn.Linear) if type(plain) is LinearMap else (type(plain),)
            act_fn = getattr(plain, "act_fn", None)
            if type(module) not in kinds or vars(module).get("act_fn") is not act_fn:
                yield name, "wrapped"
    if twin is None:
        return
    shapes = {name: x.shape for name, x in twin.state_dict().items()}
    for name, x in model.state_dict().items():
        # The tensors of a parametrised layer have other names.
        if ".parametrizations." not in name and x.shape != shapes.get(name):
            yield name, "tensors"
