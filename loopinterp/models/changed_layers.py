"""Which layers of a whole model have been changed, compared with what its configuration makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.models.looped_network import LoopedNetwork
from loopinterp.models.plain_layers import Change, change_of, changed_layer_error
from loopinterp.models.stacked_weights import Linear

if TYPE_CHECKING:
    from torch import Tensor


def need_plain(model: nn.Module, what: str, *, saved: bool = False) -> None:
    """Raise unless all layers of a model compute what their own weights say.

    Args:
        model: A looped model, ours or an adapter.
        what: Which call reads the weights, for the message.
        saved: Whether they are read to be written to disk. Then hooks may be on, which no file
            holds, and there may be no parametrisation, which no file could be read back into.

    Raises:
        InputError: Naming the first layer that has been changed, and how.
    """
    for name, change in changed_layers(model):
        if change != ("hooked" if saved else "parametrised"):
            raise changed_layer_error(f"{what}: {name}", change)


def changed_layers(model: Any) -> Iterator[tuple[str, Change]]:
    """The layers of a model that have been changed, by name, the outermost first.

    A model of ours is compared with one that its configuration makes; of a published one nothing
    is known but hooks, parametrisations, and the mark of PEFT.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if isinstance(model, LoopedNetwork):
        with torch.device("meta"):
            twin = LoopedNetwork(model.config)
        expected = {name: module for name, module in twin.named_modules() if name}
        for name in expected.keys() - modules.keys():
            yield name, "missing"
        for name, module in modules.items():
            if (change := change_of(module)) is not None:
                yield name, change
            elif "parametrizations" in name.split("."):
                continue  # of a layer that was named before
            elif name not in expected or not _alike(module, expected[name]):
                yield name, "wrapped"
        # The tensors of a parametrised layer have other names, which says nothing more.
        own, wanted = _shapes(model), _shapes(twin)
        odd = [name for name in own.keys() - wanted.keys() if ".parametrizations." not in name]
        if odd or any(own[name] != wanted[name] for name in own.keys() & wanted.keys()):
            yield (odd or ["the model"])[0], "tensors"
        return
    for name, module in modules.items():
        if (change := change_of(module)) is not None:
            yield name, change


def _alike(module: nn.Module, twin: nn.Module) -> bool:
    """Whether a module is of the kind that the twin is, a plain ``nn.Linear`` included."""
    kinds = (Linear, nn.Linear) if type(twin) is Linear else (type(twin),)
    return type(module) in kinds and vars(module).get("act_fn") is vars(twin).get("act_fn")


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    tensors: dict[str, Tensor] = model.state_dict()
    return {name: x.shape for name, x in tensors.items()}
