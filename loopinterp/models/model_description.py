"""What may be asked of any looped model without running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import LoopedModel
from loopinterp.models.run_inputs import need_weights
from loopinterp.models.run_length import rule_of
from loopinterp.storage import digest_tensors


def device_of(model: Any) -> torch.device:
    """Where a model's weights lie; the CPU if it has none."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    parameters = getattr(model, "parameters", tuple)
    return next((x.device for x in parameters()), torch.device("cpu"))


def said_of(model: Any, name: str) -> Any:
    """What a model, or else its configuration, says of itself by some name; None if nothing."""
    return getattr(model, name, getattr(getattr(model, "config", None), name, None))


def need_causal(model: Any, *, error: type[InputError] = InputError) -> None:
    """Raise on a model, or a configuration, that is known to see positions after a position."""
    if said_of(model, "causal") is False:
        raise error(
            "model",
            expected="a causal one, whose answer at a position depends on no later one",
            given="causal=False",
            fix="Build it with causal=True, or take a task whose answers are all read at once, "
            "and stand in no input.",
        )


def describe_model(model: Any) -> dict[str, Any] | str:
    """A model for a result's provenance: its configuration and the digest of its weights.

    Every study describes its model, so that none says anything of one that is broken.

    Returns:
        The configuration, or the ``class`` of a model without one and the looped models ``inside``
        it, with the ``loop_rule`` where there is one, and ``weights_sha256``; the name of the class
        alone for what has nothing of these.

    Raises:
        InputError: If a weight is NaN or infinite; it names the tensor. If training mode makes a
            module draw, or look at the rest of the batch; it names the module.
        HookError: If hooks are on.
    """
    check_weights(model)
    check_modules(model)
    described = _without_weights(model)
    if isinstance(model, nn.Module) and isinstance(described, dict):
        # Buffers that are not saved with a model decide what it computes as those that are.
        tensors = dict(model.named_buffers()) | own_weights(model)
        return described | {"weights_sha256": digest_tensors(tensors)}
    return described


def _without_weights(model: Any) -> dict[str, Any] | str:
    """What a model is but for its weights; the class alone of what is no module and says no more.

    A model round another says of itself what that one says.
    """
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    described: dict[str, Any] = {"class": type(model).__name__} if to_dict is None else to_dict()
    if rule := rule_of(model):
        described["loop_rule"] = str(rule)
    if to_dict is None:
        parts = {"model": getattr(model, "model", None)}
        parts |= dict(getattr(model, "named_children", dict)())
        looped = {k: x for k, x in parts.items() if isinstance(x, LoopedModel) and x is not model}
        if looped:
            described["inside"] = {name: _without_weights(part) for name, part in looped.items()}
    alone = list(described) == ["class"] and not isinstance(model, nn.Module)
    return described["class"] if alone else described


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as it is saved: a weight with two names has the first of them."""
    every = dict(model.named_parameters(remove_duplicate=False))
    again = every.keys() - dict(model.named_parameters()).keys()
    return {name: x for name, x in model.state_dict().items() if name not in again}


def check_weights(model: Any) -> None:
    """Raise if a weight of a model that has named ones is NaN, infinite or on the meta device.

    Example:
        >>> broken = torch.nn.Linear(1, 1)
        >>> broken.bias.data[0] = torch.nan
        >>> check_weights(broken)
        Traceback (most recent call last):
        loopinterp.errors.InputError: weight bias: expected finite numbers, got NaN or infinity at
        1 of 1 places. Take a copy from before it broke, or train anew with a lower learning rate.
    """
    for name, weight in getattr(model, "named_parameters", tuple)():
        need_weights(weight.device)
        bad = ~weight.detach().isfinite()
        if bad.any():
            raise InputError(
                f"weight {name}",
                expected="finite numbers",
                given=f"NaN or infinity at {int(bad.sum())} of {bad.numel()} places",
                fix="Take a copy from before it broke, or train anew with a lower learning rate.",
            )


def check_modules(model: Any) -> None:
    """Raise if a part of a model does not do what it is described as: in training mode, or hooked.

    Example:
        >>> check_modules(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)))
        Traceback (most recent call last):
        loopinterp.errors.InputError: module 1: expected evaluation mode: in training a run gives
        other numbers each time, got Dropout in training mode, with dropout=0.1. Call model.eval()
        first.
    """
    for name, module in getattr(model, "named_modules", {}.items)():
        rate = module.p if isinstance(module, _DropoutNd) else _dropout_rate(module)
        draws = rate > 0
        if module.training and (draws or isinstance(module, _BatchNorm)):
            raise InputError(
                f"module {name or 'model'}",
                expected="evaluation mode: in training a run gives other numbers each time",
                given=f"{type(module).__name__} in training mode"
                + (f", with dropout={rate}" if draws else ""),
                fix="Call model.eval() first.",
            )
        if need_no_hooks := getattr(module, "need_no_hooks", None):
            need_no_hooks()


def _dropout_rate(module: nn.Module) -> float:
    """The largest rate that a module holds for dropout by a function; 0 if it holds none."""
    rates = (value for name, value in vars(module).items() if "dropout" in name)
    return max((x for x in rates if isinstance(x, (int, float))), default=0)


def reach(model: Any) -> int | None:
    """Positions to its left that one loop can carry something from, to a position.

    With reach ``r``, ``h_{t+1}[p]`` depends on ``h_t[p - r], …, h_t[p]`` alone, and ``readout(h)``
    at ``p`` on ``h[p]``: a change of the state at ``p`` stays within ``p … p + r * k`` for ``k``
    loops. It says nothing of the input, which may come in from farther away.

    Args:
        model: Any looped model. Its attribute ``reach`` is the answer; a model without one
            promises nothing.

    Returns:
        The number of positions, or None where there is no such bound.

    Raises:
        InputError: If the model's attribute is neither None nor an integer from 0 on.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> [reach(LoopedTransformer(config.replace(n_layers=2, attention_window=w)))
        ...  for w in (None, 0, 3)]
        [None, 0, 6]
    """
    given = getattr(model, "reach", None)
    return None if given is None else check_integer("reach of the model", given, least=0)
