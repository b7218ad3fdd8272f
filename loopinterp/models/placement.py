"""Weights that are placed by accelerate, or quantised: how a run enters modules, and reads them.

``accelerate`` moves inputs and loads weights in a hook on each module. An adapter computes layers
itself, so it enters these hooks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.core.errors import InputError
from loopinterp.models.taps import SILENT, Tap

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.positions import AttentionContext


def _hooks_of(module: nn.Module) -> list[Any]:
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def execution_device(module: nn.Module) -> torch.device | None:
    """Where accelerate lets a module compute, if it says so."""
    places = (getattr(hook, "execution_device", None) for hook in _hooks_of(module))
    return next((torch.device(place) for place in places if place is not None), None)


def is_dispatched(model: nn.Module) -> bool:
    return any(map(_hooks_of, model.modules()))


def first_device(model: nn.Module) -> torch.device | None:
    """Where the first weights of a dispatched model compute: its inputs belong there."""
    for module in model.modules():
        if module._parameters and (place := execution_device(module)) is not None:
            return place
    return None


class _MovedTap(Tap):
    """A tap inside a layer on another device: hooks see activations on ``home``."""

    def __init__(self, tap: Tap, home: torch.device) -> None:
        self._tap, self._home = tap, home
        self.listens, self.edits = tap.listens, tap.edits

    def __call__(self, component: str, x: Tensor) -> Tensor:
        if not self._tap.listens(component):
            return x
        return self._tap(component, x.to(self._home)).to(x.device)


def placed(
    compute: Callable[[Any, Tensor, Any, Tap], Tensor],
    module: nn.Module,
    x: Tensor,
    context: AttentionContext | None = None,
    tap: Tap = SILENT,
) -> Tensor:
    """``compute(module, x, context, tap)``, inside accelerate's hook on the module, if any.

    The hook moves ``x`` and the context, and loads weights. Taps and output are on the device of
    ``x``.
    """
    hook = vars(module).get("_hf_hook")
    if hook is None:
        return compute(module, x, context, tap)
    (there, context), _ = hook.pre_forward(module, x, context)
    tap = tap if there.device == x.device else _MovedTap(tap, x.device)
    try:
        with torch.no_grad() if hook.no_grad else nullcontext():
            y = compute(module, there, context, tap)
    except BaseException:  # the end of a run at stop_at_layer, or a user's hook
        hook.post_forward(module, None)
        raise
    return hook.post_forward(module, y).to(x.device)


def call(module: nn.Module, x: Tensor) -> Tensor:
    """A module's output, on the device of its input."""
    return module(x).to(x.device)


def need_whole_layers(model: nn.Module, *, devices: bool, offload: bool) -> None:
    """Raise on a placement that an adapter does not run.

    Args:
        devices: Whether it may compute on several devices.
        offload: Whether its weights may wait elsewhere.
    """
    expected, got = "", ""
    places = {place for module in model.modules() if (place := execution_device(module))}
    if not offload and is_dispatched(model):
        expected, got = "weights on one device, none offloaded", "hooks of accelerate"
    elif not devices and len(places) > 1:
        expected, got = "modules that compute on one device", ", ".join(sorted(map(str, places)))
    if expected:
        fix = "Load it without device_map, or with one device."
        raise InputError("device_map of the model", expected=expected, given=got, fix=fix)
    for name, module in model.named_modules():
        # A layer adds what its parts return to one stream, so it needs a device of its own.
        if not isinstance(module, nn.ModuleList):
            continue
        for k, layer in module.named_children():  # without places that hold None
            inside = {execution_device(part) for part in layer.modules()} - {None}
            if len(inside) > 1:
                expected, got = "each layer on one device", ", ".join(sorted(map(str, inside)))
                fix = "Map whole layers, or pass no_split_module_classes to infer_auto_device_map."
                raise InputError(f"device_map: {name}.{k}", expected=expected, given=got, fix=fix)


# Reading


def stored(module: nn.Module, name: str) -> Any:
    """A tensor of a module, from where accelerate keeps it if offloaded; None without it."""
    x = getattr(module, name, None)
    if isinstance(x, torch.Tensor) and x.device == torch.device("meta"):
        for hook in _hooks_of(module):
            if (weights := getattr(hook, "weights_map", None)) is not None:
                return weights[name].to(hook.execution_device)
    return x


def is_quantised(weight: Any) -> bool:
    """Whether a weight is no plain tensor of numbers to multiply with."""
    if not isinstance(weight, torch.Tensor) or hasattr(weight, "__tensor_flatten__"):
        return True
    return not weight.is_floating_point() or weight.itemsize < 2


def affine(linear: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Weight ``[d_out, d_in]`` and bias of a linear layer, dequantised by the layer itself.

    A quantised layer, of whichever library, maps the unit vectors: its outputs are the columns of
    its matrix.
    """
    weight, bias = stored(linear, "weight"), stored(linear, "bias")
    if not is_quantised(weight):
        return weight, bias
    with torch.no_grad():
        units = torch.eye(int(linear.in_features), dtype=dtype, device=device)
        columns = call(linear, units)  # [d_in, d_out]
        return (columns if bias is None else columns - bias.to(columns)).T, bias


class StoredTensors(Mapping[str, "Tensor"]):
    """A model's tensors by name: offloaded ones are read on demand, quantised ones in parts."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._modules, self._tensors = dict(model.named_modules()), dict(tensors)
        self._parts: dict[str, tuple[str, tuple[str, ...]]] = {}
        for name, x in self._tensors.items():
            for parts in _parts(x):
                self._parts[".".join((name, *parts))] = name, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        tensor, parts = self._parts[name]
        x = self._tensors[tensor]
        path, _, attribute = tensor.rpartition(".")
        if path in self._modules and x.device == torch.device("meta"):
            x = stored(self._modules[path], attribute)
        for part in parts:
            x = getattr(x, part)
        return x


def _parts(x: Tensor) -> Iterator[tuple[str, ...]]:
    """Attributes of a tensor of several tensors, such as its integers and their scales."""
    flatten = getattr(x, "__tensor_flatten__", None)
    if flatten is None:
        yield ()
        return
    for part in flatten()[0]:
        if isinstance(inner := getattr(x, part), torch.Tensor):
            yield from ((part, *more) for more in _parts(inner))
