"""Linear maps and norms, and whether a layer computes what its own weights say.

A run calls its layers, so an adapter, a hook, a parametrisation or a pruning mask around one takes
part in it. Code that reads weights instead (to take heads apart, attribute a logit, write a folder)
would go past them, and asks here first.
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
    """``x W^T + b`` of one model, or of several whose weights are stacked ``[model, d_out, d_in]``.

    As a module, so that it is called: whatever others put in its place or around it (an adapter, a
    hook, a parametrisation) is then part of what the model computes.
    """

    def forward(self, input: Float[Tensor, "*row d_in"]) -> Float[Tensor, "*row d_out"]:
        weight, bias = self.weight, self.bias
        if weight.dim() == 2:
            return F.linear(input, weight, bias)
        # Of several models: [model, row, d_in] times [model, d_in, d_out].
        if bias is None:
            return torch.bmm(input, weight.transpose(1, 2))
        # [model, row, d_out]: one product of matrices for each model.
        return torch.baddbmm(bias[:, None], input, weight.transpose(1, 2))


def norm(
    x: Float[Tensor, "*row d_model"],
    weight: Float[Tensor, "*model d_model"],
    bias: Float[Tensor, "*model d_model"] | None,
    eps: float,
) -> Float[Tensor, "*row d_model"]:
    """LayerNorm, or RMSNorm where there is no bias; with weights ``[model, d_model]``, of each."""
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


Change = Literal["wrapped", "hooked", "parametrised", "missing", "tensors"]
"""How a layer differs from what its configuration makes of it."""

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
    it is called, by a hook before it, and may be old. With ``uncalled``, they are used in place of
    a call, so that no hook may be on it either.
    """
    change = change_of(layer)
    hooked = layer._forward_pre_hooks or (uncalled and change == "hooked")
    if change == "wrapped" or hooked or not hasattr(layer, "weight"):
        raise _changed(f"weights of a {type(layer).__name__}", change or "wrapped")
    return layer


def weights_of(layer: str, weight: str, doc: str) -> property:
    """A property that reads a tensor of a layer (both by name), if the layer computes with it."""
    read = attrgetter(weight)
    return property(lambda self: read(with_weights(getattr(self, layer))), doc=doc)


def need_unchanged(model: nn.Module, what: str) -> None:
    """Raise if a layer of a model is wrapped, hooked or parametrised: a look that costs little."""
    for name, module in model.named_modules():
        if (change := change_of(module)) is not None:
            raise _changed(f"{what}: {name}", change)


def _changed(what: str, change: Change) -> InputError:
    """What is raised of a layer that has been changed."""
    got = {
        "wrapped": "another module in its place or around it",
        "hooked": "hooks of PyTorch on it, as pruning and the older weight norm put there",
        "parametrised": "a parametrisation",
        "missing": "none of that name",
        "tensors": "other tensors than its configuration has",
    }
    expected = "layers that compute what their own weights say"
    fix = "Merge the adapter (PEFT: merge_and_unload), remove the parametrisation "
    fix += "(remove_parametrizations), make the pruning permanent (prune.remove), or unhook it."
    return InputError(what, expected=expected, given=got[change], fix=fix)


def need_plain(model: nn.Module, what: str, *, saved: bool = False) -> None:
    """Raise unless all layers of a model compute what their own weights say.

    ``what`` is the call that reads the weights. Where they are ``saved``, hooks may be on, which
    no file holds, and there may be no parametrisation, which no file could be read back into.
    """
    for name, change in _changed_layers(model):
        if change != ("hooked" if saved else "parametrised"):
            raise _changed(f"{what}: {name}", change)


def _changed_layers(model: Any) -> Iterator[tuple[str, Change]]:
    """The layers of a model that have been changed, by name, the outermost first.

    A model with a ``plain_twin``, as a ``LoopedTransformer``, is compared with it. Of a published
    model only hooks, parametrisations, and the mark of PEFT can be known.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    twin = model.plain_twin() if hasattr(model, "plain_twin") else None
    expected = {} if twin is None else {name: x for name, x in twin.named_modules() if name}
    for name in expected.keys() - modules.keys():
        yield name, "missing"
    for name, module in modules.items():
        if (change := change_of(module)) is not None:
            yield name, change
        elif twin is None or "parametrizations" in name.split("."):
            continue  # of a layer that was named before
        elif name not in expected or not _alike(module, expected[name]):
            yield name, "wrapped"
    if twin is None:
        return
    # The tensors of a parametrised layer have other names, which says nothing more.
    shapes, expected_shapes = (
        {name: x.shape for name, x in each.state_dict().items()} for each in (model, twin)
    )
    odd = [
        name for name in shapes.keys() - expected_shapes.keys() if ".parametrizations." not in name
    ]
    both = shapes.keys() & expected_shapes.keys()
    if odd or any(shapes[name] != expected_shapes[name] for name in both):
        yield (odd or ["the model"])[0], "tensors"


def _alike(module: nn.Module, twin: nn.Module) -> bool:
    """Whether a module is of the kind that the twin is, a plain ``nn.Linear`` included."""
    kinds = (LinearMap, nn.Linear) if type(twin) is LinearMap else (type(twin),)
    return type(module) in kinds and vars(module).get("act_fn") is vars(twin).get("act_fn")
