"""The protocol of looped models: four methods, optional properties, description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.storage import digest_tensors
from loopinterp.models.placement import StoredTensors
from loopinterp.models.run_inputs import LoopRule, spell

if TYPE_CHECKING:
    from jaxtyping import Float


@runtime_checkable
class LoopedModel(Protocol):
    """A discrete dynamical system on the residual stream.

    ::

        e       = model.embed(inputs)         the injected input
        h_0     = model.initial_state(e)
        h_{t+1} = model.step(h_t, e)          one loop: the weight-tied block
        y_t     = model.readout(h_t)          logits, at any loop

    Each method depends on its arguments alone, without randomness. A step that differs between
    loops (a timing signal, weights per loop) has a parameter ``loop``, the index from 0 on.
    :class:`OptionalProperties` says more of a model.
    """

    def embed(self, inputs: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The input injected into every loop."""
        ...

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The state before the first loop."""
        ...

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop."""
        ...

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits read from a state."""
        ...


class OptionalProperties(Protocol):
    """Optional attributes of a looped model or its ``config``."""

    reach: int | None = None  #: positions to the left that one loop reads
    reach_before: int | None = 0  #: positions to the left that the injected input reads
    causal: bool | None = None  #: no position sees later ones; None where that is unknown
    local_step: bool = True  #: a step of some positions needs neither their places nor tokens
    starts_by_place: bool = False  #: the initial state depends on the place, not on the token
    n_ctx: int | None = None  #: positions at most
    d_vocab: int | None = None  #: input tokens
    d_features: int | None = None  #: width of input feature vectors
    d_vocab_out: int | None = None  #: output classes
    n_coda: int | None = None  #: layers between a state and its logits
    attention_window: int | None = None  #: positions that attention looks back
    state_code: int | None = None  #: bits of the code that each loop rounds its state to
    loop_rule: LoopRule | None = None  #: rule for the number of loops
    task: Any = None  #: the task it was trained on
    takes_loop: bool | None = None  #: its step takes the loop's index; None: by its signature
    repeatable: bool = False  #: its methods are known to depend on their arguments alone
    end_loop: Callable[..., Tensor] | None = None  #: (h, e) -> h, from the last layer to the state
    wrapped: Any = None  #: the model inside a wrapper of its vocabulary


def declared(model: Any, name: str) -> Any:
    """The model's property, else its configuration's, else the default."""
    default = getattr(OptionalProperties, name)
    return getattr(model, name, getattr(getattr(model, "config", None), name, default))


def takes_loop(model: Any) -> bool:
    """Whether a model's step has a parameter ``loop``."""
    declaration = declared(model, "takes_loop")
    if declaration is not None:
        return bool(declaration)
    try:
        return "loop" in inspect.signature(model.step).parameters
    except (AttributeError, TypeError, ValueError):  # no step, or one that shows no signature
        return False


def rule_of(model: Any) -> LoopRule | None:
    rule = declared(model, "loop_rule")
    return rule if isinstance(rule, LoopRule) else None


def own_depth(model: Any) -> int | None:
    """Loops of a model with the same number for every input, else None."""
    rule = rule_of(model)
    return rule.shown if rule is not None and rule.of_length is None else None


def device_of(model: Any) -> torch.device:
    """The device of a model's weights; the CPU without any."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    parameters = getattr(model, "parameters", tuple)
    return next((x.device for x in parameters()), torch.device("cpu"))


def reach(model: Any) -> int | None:
    """Receptive reach: how many positions to the left one loop reads; None: no bound.

    With reach ``r``, ``h_{t+1}[p]`` depends on ``h_t[p - r], …, h_t[p]`` alone: after ``k`` loops,
    a change of the state at ``p`` is within ``p … p + r * k``. The injected input may reach
    farther.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> [reach(LoopedTransformer(config.replace(n_layers=2, attention_window=w)))
        ...  for w in (None, 0, 3)]
        [None, 0, 6]
    """
    positions = declared(model, "reach")
    if positions is None:
        return None
    return check_integer("reach of the model", positions, least=0)


def need_model(model: object) -> None:
    is_class = isinstance(model, type)
    if not is_class and (hasattr(model, "bind") or isinstance(model, LoopedModel)):
        return
    fix = "Wrap your own model in these four methods."
    if (inside := getattr(model, "model", None)) is not None and not is_class:
        fix = "Pass its .model." if isinstance(inside, LoopedModel) else "Pass its .model()."
    elif isinstance(model, (str, PathLike)):
        fix = f"Pass loopinterp.load({str(model)!r})."
    got = f"the class {model.__name__} itself" if is_class else type(model).__name__
    expected = "a looped model, with embed, initial_state, step and readout"
    raise InputError("model", expected=expected, given=got, fix=fix)


def need_weights(model: Any) -> None:
    if device_of(model) == torch.device("meta"):
        fix = "Call model.to_empty(device='cpu') and load its weights."
        raise InputError("model", expected="weights", given="none, on the meta device", fix=fix)


def need_one_map(model: LoopedModel | Any) -> None:
    if takes_loop(model):
        expected, got = "a step that is one map for all loops", "one by the loop's index"
        fix = "Wrap it in a model whose step calls model.step(h, e, loop=t) with one t."
        raise InputError("model", expected=expected, given=got, fix=fix)


def need_hooks(model: object) -> None:
    need_model(model)
    if not hasattr(model, "run_with_cache") or not hasattr(model, "site"):
        expected = "a LoopedTransformer or an adapter: heads and layers need hooks"
        fix = "Study its states, or use adapters.adapt(model, inputs=…) or convert_model."
        raise InputError("model", expected=expected, given=type(model).__name__, fix=fix)


def need_causal(model: Any, *, error: type[InputError] = InputError) -> None:
    if declared(model, "causal") is False:
        fix = "Build it with causal=True, or take a task whose inputs hold no answers."
        raise error("model", expected="causal attention", given="causal=False", fix=fix)


class CheckedModel:
    """The four methods of a user's model, which raise where it breaks the protocol.

    They must return floats ``[batch, pos, …]`` and leave their arguments unchanged.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.takes_loop = model, takes_loop(model)

    def embed(self, inputs: Tensor) -> Tensor:
        if not isinstance(inputs, Tensor):
            return self._checked("embed", self._model.embed(inputs), ("batch", "pos"))
        return self._checked("embed", self._call("embed", inputs=inputs), inputs.shape[:2])

    def initial_state(self, e: Tensor) -> Tensor:
        return self._checked("initial_state", self._call("initial_state", e=e), e.shape[:-1])

    def step(self, h: Tensor, e: Tensor, loop: int | None = None) -> Tensor:
        if self.takes_loop and loop is None:
            fix = "Pass it to step, or take bind(model, inputs).at(loop).step."
            raise InputError("loop", expected="the loop's index", given="none", fix=fix)
        index = {"loop": loop} if self.takes_loop else {}
        stepped = self._call("step", index, h=h, e=e)
        return self._checked("step", stepped, h.shape[:-1], width=h.shape[-1])

    def readout(self, h: Tensor) -> Tensor:
        return self._checked("readout", self._call("readout", h=h), h.shape[:-1])

    def _call(
        self, name: str, index: dict[str, int | None] | None = None, /, **inputs: Tensor
    ) -> Any:
        method, index = getattr(self._model, name), index or {}
        # A method must not write into its arguments; inference tensors count no versions.
        if any(x.is_inference() for x in inputs.values()):
            return method(*(x.clone() for x in inputs.values()), **index)
        versions = [x._version for x in inputs.values()]
        returned = method(*inputs.values(), **index)
        for version, (argument, x) in zip(versions, inputs.items()):
            if x._version != version:
                what, got = f"{name} of {type(self._model).__name__}", f"{argument} written into"
                fix = f"Write {argument} = {argument} + x, not +=; or clone {argument} first."
                raise InputError(what, expected="a new tensor", given=got, fix=fix)
        return returned

    def _checked(
        self, name: str, returned: Any, places: Sequence[int | str], *, width: int | None = None
    ) -> Tensor:
        shape: list[int] = list(returned.shape) if isinstance(returned, Tensor) else []
        if len(shape) == len(places) + 1 and returned.is_floating_point():
            fits = all(isinstance(place, str) or n == place for n, place in zip(shape, places))
            if fits and shape[-1] >= 1 and width in (None, shape[-1]):
                return returned
        last = width or ("classes" if name == "readout" else "d_model")
        fix = "Return one tensor; parts of a state lie side by side on the last axis."
        if name in ("step", "initial_state") and len(shape) == 3 and shape[:2] != list(places):
            fix = "Make room for states beside the input's (registers) in embed, not here."
        expected = f"floats [{', '.join(map(str, (*places, last)))}]"
        what = f"{name} of {type(self._model).__name__}"
        raise InputError(what, expected=expected, given=spell(returned), fix=fix)


def describe_model(model: Any) -> dict[str, Any] | str:
    """A model for a result's provenance: its configuration and the digest of its weights.

    Without a configuration, it has the ``class`` and the looped models ``inside``; with a rule, the
    ``loop_rule``; and a module has ``weights_sha256``.

    Raises:
        InputError: If a weight is not finite, hooks are on, or training mode has an effect.
    """
    need_weights(model)
    weights: Mapping[str, Tensor] = dict(getattr(model, "named_parameters", tuple)())
    tensors: Mapping[str, Tensor] = weights
    if isinstance(model, nn.Module):  # offloaded weights are read one by one
        tensors = StoredTensors(model, every_tensor(model))
    for name in tensors:
        if name not in weights and name.rpartition(".")[0] not in weights:
            continue  # a buffer, which may be infinite
        weight = tensors[name]
        bad = ~weight.detach().isfinite()
        if bad.any():
            got = f"NaN or infinity at {int(bad.sum())} of {bad.numel()} places"
            fix = "Take a copy from before it broke, or train anew with a lower learning rate."
            raise InputError(f"weight {name}", expected="finite numbers", given=got, fix=fix)
    for name, module in getattr(model, "named_modules", tuple)():
        need_evaluation(name or "model", module)
        if need_no_hooks := getattr(module, "need_no_hooks", None):
            need_no_hooks()
    described = _without_weights(model)
    if isinstance(model, nn.Module) and isinstance(described, dict):
        return described | {"weights_sha256": digest_tensors(tensors)}
    return described


def _without_weights(model: Any) -> dict[str, Any] | str:
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
    bare = list(described) == ["class"] and not isinstance(model, nn.Module)
    return described["class"] if bare else described


def every_tensor(model: nn.Module) -> dict[str, Tensor]:
    """The saved tensors of a model (a shared weight once), and its other buffers."""
    every = dict(model.named_parameters(remove_duplicate=False))
    again = every.keys() - dict(model.named_parameters()).keys()
    saved = {name: x for name, x in model.state_dict().items() if name not in again}
    return dict(model.named_buffers()) | saved


def need_evaluation(name: str, module: nn.Module) -> None:
    """Raise on a module in training mode with randomness or batch statistics."""
    if not module.training:
        return
    # A module's own rate, or the largest of its settings for functional dropout.
    rates = [x for k, x in vars(module).items() if "dropout" in k and isinstance(x, (int, float))]
    rate = module.p if isinstance(module, _DropoutNd) else max(rates, default=0)
    if rate > 0 or isinstance(module, _BatchNorm):
        what, got = f"module {name}", f"{type(module).__name__} in training, dropout={rate}"
        raise InputError(what, expected="evaluation mode", given=got, fix="Call model.eval().")
