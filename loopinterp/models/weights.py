"""Weights: linear maps and norms, changed layers, and weights that are placed or quantised.

A run calls its layers, so adapters, hooks, parametrisations and pruning masks take effect. Code
that reads weights instead checks here first. ``accelerate`` moves inputs and loads weights in a
hook on each module. An adapter computes layers itself, so it enters these hooks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from loopinterp.core.errors import InputError
from loopinterp.models.taps import SILENT, Tap

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.positions import AttentionContext


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights from a seed. The caller's random numbers go on as if none had been drawn.

    ``torch.manual_seed`` would seed all GPUs besides, where only the CPU's generator is put back.
    """
    device = torch.get_default_device()
    if device.type in ("cpu", "meta"):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(device_type=device.type):
            torch.manual_seed(seed)
            yield


class LinearMap(nn.Linear):
    """``x W^T + b``, also of several models ``[model, d_out, d_in]``."""

    def forward(self, input: Float[Tensor, "*row d_in"]) -> Float[Tensor, "*row d_out"]:
        held = self._parameters
        try:  # of attributes of a module, each is looked for elsewhere first
            weight, bias = held["weight"], held["bias"]
        except KeyError:  # parametrised or pruned
            weight, bias = self.weight, self.bias
        assert weight is not None
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
    accelerate shows its weights only inside :func:`placed`.
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
