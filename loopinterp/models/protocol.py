"""The protocol of every looped model: four methods, optional properties, and its description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.storage import digest_tensors
from loopinterp.models.run_inputs import LoopRule, need_weights, spell

if TYPE_CHECKING:
    from jaxtyping import Float


@runtime_checkable
class LoopedModel(Protocol):
    """A discrete dynamical system on the residual stream; all that studies of dynamics need.

    ::

        e       = model.embed(inputs)         the injected input
        h_0     = model.initial_state(e)
        h_{t+1} = model.step(h_t, e)          one loop: the weight-tied block
        y_t     = model.readout(h_t)          logits, at any loop

    No method depends on anything but its arguments: not on earlier calls, and not on chance.
    A step that differs from loop to loop (a timing signal, weights of each loop) declares a
    parameter ``loop``, ``step(h, e, loop)``. Every caller then passes ``loop=t``, the index from 0
    on of the loop that is made.

    What a model may declare besides, and what holds where it does not, is in
    :class:`OptionalProperties`.
    """

    def embed(self, inputs: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The input that is injected into every loop."""
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
    """What a looped model may declare beside the four methods, each with its default.

    A model needs none of them. It declares one as an attribute or property, or as an attribute of
    its ``config``; :func:`declared` reads it.

    Attributes:
        reach: Positions to its left from which one loop can carry something to a position.
        reach_before: Positions to its left that a position's injected input has come from.
        causal: Whether no position sees later ones; None where that is not known.
        local_step: Whether a step of some positions is that of all: it asks neither for the
            places of positions nor for tokens.
        starts_by_place: Whether the initial state depends on where a token stands, and not on it.
        n_ctx: Positions at most.
        d_vocab: Tokens that the model reads.
        d_features: Width of the feature vectors that it reads instead.
        d_vocab_out: Classes that it answers in.
        n_coda: Layers between a state and its logits.
        attention_window: Positions that attention looks back.
        state_code: Bits of the code that each loop rounds its state to.
        loop_rule: How many loops the model was made for.
        task: What it was trained on.
        takes_loop: Whether its step takes the loop's index; None to look at its signature.
        repeatable: Whether its methods are known to depend on their arguments alone, so that
            nobody has to try.
        end_loop: ``(h, e) -> h``, from the output of a loop's last layer to the state.
        wrapped: The model that a wrapper of its vocabulary runs.
    """

    reach: int | None = None
    reach_before: int | None = 0
    causal: bool | None = None
    local_step: bool = True
    starts_by_place: bool = False
    n_ctx: int | None = None
    d_vocab: int | None = None
    d_features: int | None = None
    d_vocab_out: int | None = None
    n_coda: int | None = None
    attention_window: int | None = None
    state_code: int | None = None
    loop_rule: LoopRule | None = None
    task: Any = None
    takes_loop: bool | None = None
    repeatable: bool = False
    end_loop: Callable[..., Tensor] | None = None
    wrapped: Any = None


def declared(model: Any, name: str) -> Any:
    """An optional property of a model: its own, or its configuration's, or else the default.

    Example:
        >>> from types import SimpleNamespace
        >>> declared(SimpleNamespace(config=SimpleNamespace(causal=True)), "causal")
        True
        >>> declared(object(), "reach_before")
        0
    """
    default = getattr(OptionalProperties, name)
    return getattr(model, name, getattr(getattr(model, "config", None), name, default))


def takes_loop(model: Any) -> bool:
    """Whether a model's step differs from loop to loop: whether it has a parameter ``loop``.

    A wrapper of another model says so by an attribute ``takes_loop``.

    Example:
        >>> from types import SimpleNamespace
        >>> steps = lambda h, e: h, lambda h, e, loop: h + loop
        >>> [takes_loop(SimpleNamespace(step=step)) for step in steps]
        [False, True]
    """
    declaration = declared(model, "takes_loop")
    if declaration is not None:
        return bool(declaration)
    try:
        return "loop" in inspect.signature(model.step).parameters
    except (AttributeError, TypeError, ValueError):  # no step, or one that shows no signature
        return False


def rule_of(model: Any) -> LoopRule | None:
    """The rule for how many loops a model of any class was made for; None without one."""
    rule = declared(model, "loop_rule")
    return rule if isinstance(rule, LoopRule) else None


def own_depth(model: Any) -> int | None:
    """Loops of a model whose rule is one number whatever the input; None of others."""
    rule = rule_of(model)
    return rule.shown if rule is not None and rule.of_length is None else None


def device_of(model: Any) -> torch.device:
    """Where a model's weights lie; the CPU if it has none."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    parameters = getattr(model, "parameters", tuple)
    return next((x.device for x in parameters()), torch.device("cpu"))


def reach(model: Any) -> int | None:
    """Positions to its left that one loop can carry something from, to a position.

    With reach ``r``, ``h_{t+1}[p]`` depends on ``h_t[p - r], …, h_t[p]`` alone, and ``readout(h)``
    at ``p`` on ``h[p]``: a change of the state at ``p`` stays within ``p … p + r * k`` for ``k``
    loops. The injected input may come in from farther away.

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
    positions = declared(model, "reach")
    if positions is None:
        return None
    return check_integer("reach of the model", positions, least=0)


# What a study asks of a model


def need_model(model: object) -> None:
    """Raise unless a model has the protocol's methods."""
    is_class = isinstance(model, type)
    if not is_class and (hasattr(model, "bind") or isinstance(model, LoopedModel)):
        return
    inside = getattr(model, "model", None)
    fix = "Pass a LoopedTransformer, or wrap your own model in these four methods."
    if isinstance(inside, LoopedModel):
        fix = "Pass its .model."
    elif callable(inside) and not is_class:  # a run
        fix = "Pass its .model()."
    elif isinstance(model, (str, PathLike)):
        fix = f"Pass loopinterp.load({str(model)!r})."
    raise InputError(
        "model",
        expected="a looped model, with embed, initial_state, step and readout",
        given=f"the class {model.__name__} itself" if is_class else type(model).__name__,
        fix=fix,
    )


def need_one_map(model: LoopedModel | Any) -> None:
    """Raise on a step that takes the loop's index, where a study is of one map for all loops."""
    if takes_loop(model):
        raise InputError(
            "model",
            expected="one map for all loops, as fixed points, basins, spectra and transition "
            "tables are those of a map",
            given=f"{type(model).__name__}, whose step depends on the loop's index",
            fix="Wrap it in a model whose step calls model.step(h, e, loop=t) with one t, to "
            "study that loop's map; patching, lenses and comparisons take the model as it is.",
        )


def need_hooks(model: object) -> None:
    """Raise unless the activations inside a model's loops have addresses, and can be changed."""
    need_model(model)
    if not hasattr(model, "run_with_cache") or not hasattr(model, "site"):
        raise InputError(
            "model",
            expected="a LoopedTransformer or an adapter, as this study looks inside a loop, where "
            "heads and layers need hooks",
            given=f"{type(model).__name__}, which shows its states between loops only",
            fix="Use studies of states (convergence_study, compare_programs, patching_sweep of "
            "component='state'), convert its weights with loopinterp.models.convert_model, or pass "
            "loopinterp.adapters.adapt(model) of a published one.",
        )


def need_causal(model: Any, *, error: type[InputError] = InputError) -> None:
    """Raise on a model, or a configuration, that is known to see positions after a position."""
    if declared(model, "causal") is False:
        raise error(
            "model",
            expected="a causal one, whose answer at a position depends on no later one",
            given="causal=False",
            fix="Build it with causal=True, or take a task whose answers are all read at once, "
            "and stand in no input.",
        )


class CheckedModel:
    """The four methods of a user's model, each of which raises where it breaks the protocol.

    What a method returns has the axes by which every study reads it, and its arguments stay as they
    were: studies keep states, and a step that writes into one changes those that were kept. That is
    seen from shapes and version counters, at no cost and with no run.

    Args:
        model: A model that has them.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.takes_loop = model, takes_loop(model)

    def embed(self, inputs: Tensor) -> Tensor:
        """The injected input."""
        if not isinstance(inputs, Tensor):
            return self._checked("embed", self._model.embed(inputs), ("batch", "pos"))
        return self._checked("embed", self._call("embed", inputs=inputs), inputs.shape[:2])

    def initial_state(self, e: Tensor) -> Tensor:
        """The state before the first loop."""
        return self._checked("initial_state", self._call("initial_state", e=e), e.shape[:-1])

    def step(self, h: Tensor, e: Tensor, loop: int | None = None) -> Tensor:
        """One loop, of that index."""
        index = {"loop": loop} if self.takes_loop else {}
        if self.takes_loop and loop is None:
            raise InputError(
                "loop",
                expected=f"the index of the loop, as step of {type(self._model).__name__} takes it",
                given="none",
                fix="Pass it to step; or take the map of one loop, "
                "bind(model, inputs).at(loop).step.",
            )
        stepped = self._call("step", index, h=h, e=e)
        return self._checked("step", stepped, h.shape[:-1], width=h.shape[-1])

    def readout(self, h: Tensor) -> Tensor:
        """Logits."""
        return self._checked("readout", self._call("readout", h=h), h.shape[:-1])

    def _call(
        self, name: str, index: dict[str, int | None] | None = None, /, **inputs: Tensor
    ) -> Any:
        """What a method returns; raise if it has written into its arguments."""
        method, index = getattr(self._model, name), index or {}
        if any(x.is_inference() for x in inputs.values()):  # these count no versions
            return method(*(x.clone() for x in inputs.values()), **index)
        versions = [x._version for x in inputs.values()]
        returned = method(*inputs.values(), **index)
        for version, (argument, x) in zip(versions, inputs.items()):
            if x._version != version:
                raise InputError(
                    f"{name} of {type(self._model).__name__}",
                    expected=f"a new tensor, and {argument} left as it was",
                    given=f"{argument} written in place",
                    fix=f"Write {argument} = {argument} + x instead of {argument} += x, or begin "
                    f"with {argument} = {argument}.clone().",
                )
        return returned

    def _checked(
        self, name: str, returned: Any, places: Sequence[int | str], *, width: int | None = None
    ) -> Tensor:
        """What a method returned, if it is floats of some width at every place."""
        is_tensor = isinstance(returned, Tensor)
        if is_tensor and returned.is_floating_point() and returned.ndim == len(places) + 1:
            sizes = zip(returned.shape, places)
            fits = all(isinstance(place, str) or n == place for n, place in sizes)
            if fits and returned.shape[-1] >= 1 and width in (None, returned.shape[-1]):
                return returned
        last = width or ("classes" if name == "readout" else "d_model")
        shape = tuple(returned.shape) if is_tensor else ()
        fix = (
            "Return one tensor with the axes batch, pos and features; parts of a state lie side by "
            "side on the last one."
        )
        if name in ("step", "initial_state") and len(shape) == 3 and shape[:2] != tuple(places):
            fix = (
                "Keep a state for each position of the input and no others: as many positions, of "
                "as many examples, as embed returns. A model with states of its own beside them "
                "(memory or register tokens) makes room for them in embed, and reads none of them "
                "in readout."
            )
        raise InputError(
            f"{name} of {type(self._model).__name__}",
            expected=f"floats [{', '.join(map(str, (*places, last)))}]",
            given=spell(returned) if is_tensor else f"a {type(returned).__name__}",
            fix=fix,
        )


# A model's description


def describe_model(model: Any) -> dict[str, Any] | str:
    """A model for a result's provenance: its configuration and the digest of its weights.

    Every study describes its model, so that none studies one that is broken.

    Returns:
        The configuration, or the ``class`` of a model without one and the looped models ``inside``
        it; the ``loop_rule``, where it has one; and ``weights_sha256`` where it is a module.

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
    """A model but for its weights; the class alone of an object that is no module.

    A wrapper is described with the models that it wraps.
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
    bare = list(described) == ["class"] and not isinstance(model, nn.Module)
    return described["class"] if bare else described


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
        loopinterp.core.errors.InputError: weight bias: expected finite numbers, got NaN or
        infinity at 1 of 1 places. Take a copy from before it broke, or train anew with a
        lower learning rate.
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
    """Raise if a part of a model does not compute what its description says: in training, hooked.

    Example:
        >>> check_modules(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)))
        Traceback (most recent call last):
        loopinterp.core.errors.InputError: module 1: expected evaluation mode: in training a run
        gives other numbers each time, got Dropout in training mode, with dropout=0.1. Call
        model.eval() first.
    """
    for name, module in getattr(model, "named_modules", {}.items)():
        rate = module.p if isinstance(module, _DropoutNd) else _dropout_rate(module)
        if module.training and (rate > 0 or isinstance(module, _BatchNorm)):
            dropout = f", with dropout={rate}" if rate > 0 else ""
            raise InputError(
                f"module {name or 'model'}",
                expected="evaluation mode: in training a run gives other numbers each time",
                given=f"{type(module).__name__} in training mode{dropout}",
                fix="Call model.eval() first.",
            )
        if need_no_hooks := getattr(module, "need_no_hooks", None):
            need_no_hooks()


def _dropout_rate(module: nn.Module) -> float:
    """The largest rate that a module holds for dropout by a function; 0 if it holds none."""
    rates = (value for name, value in vars(module).items() if "dropout" in name)
    return max((x for x in rates if isinstance(x, (int, float))), default=0)
