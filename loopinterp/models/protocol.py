"""The protocol of looped models: four methods, optional properties, inputs and number of loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from loopinterp.core.errors import MOST_LOOPS, InputError, check_integer
from loopinterp.core.storage import digest_tensors
from loopinterp.models.weights import StoredTensors

if TYPE_CHECKING:
    from jaxtyping import Float, Int


TOKEN_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # widen exactly


@dataclass(frozen=True)
class LoopRule:
    """The number of loops of a model's runs where the caller sets none.

    Attributes:
        shown: Loops of the hook names, layers and blocks that the model shows.
        of_length: From the number of positions to T(n), the required number of loops. None:
            always ``shown``.
        scale: With ``of_length``, the model answers after ``ceil(scale T(n)) + extra`` loops.

    Example:
        >>> LoopRule(13, of_length=lambda n_pos: n_pos - 1)(5), LoopRule(1)(5)
        (4, 1)
        >>> LoopRule(14, of_length=lambda n_pos: n_pos - 1, extra=1)(5)
        5
    """

    shown: int
    of_length: Callable[[int], int] | None = None
    scale: float = 1.0
    extra: int = 0

    def __call__(self, n_pos: int) -> int:
        """Loops of a run over ``n_pos`` positions."""
        if self.of_length is None:
            return self.shown
        return int(self.loops_for(torch.tensor(self.of_length(n_pos))))

    def loops_for(self, n_loops: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Loops after which the model answers, given T(n)."""
        if self.of_length is None:
            return torch.full_like(n_loops, self.shown)
        return shifted_loops(n_loops, scale=self.scale, extra=self.extra)

    def __str__(self) -> str:
        """``4``, ``T(n)``, ``ceil(2 T(n)) + 3``."""
        if self.of_length is None:
            return str(self.shown)
        scaled = "T(n)" if self.scale == 1 else f"ceil({self.scale:g} T(n))"
        sign = "+" if self.extra > 0 else "-"
        return f"{scaled} {sign} {abs(self.extra)}" if self.extra else scaled


def shifted_loops(
    n_loops: Int[Tensor, "*batch"], *, scale: float, extra: int
) -> Int[Tensor, "*batch"]:
    """``max(1, ceil(scale T) + extra)``."""
    if (scale, extra) == (1.0, 0):
        return n_loops
    # Rounded first: in binary, 1.1 times 10 is above 11.
    scaled = (n_loops.double() * scale).round(decimals=6).ceil().long()
    return (scaled + extra).clamp(min=1)


def check_loops(n_loops: int) -> int:
    return check_integer("n_loops", n_loops, least=1, far=MOST_LOOPS)


def check_ends(n_loops: Tensor, inputs: Any) -> Tensor:
    if isinstance(inputs, torch.Tensor):
        need_examples(inputs)
        check_each("n_loops", n_loops, inputs)
        for end in n_loops.aminmax():
            check_integer("n_loops", int(end), least=0, far=MOST_LOOPS)
    return n_loops


def loop_span(start: int, stop: int | None, n_loops: int, state: Tensor | None) -> range:
    """The loops to run, out of ``n_loops``; a later start needs a state."""
    stop = check_integer("stop_at_loop", n_loops if stop is None else stop, least=0, most=n_loops)
    start = check_integer("start_at_loop", start, least=0, most=stop)
    if start > 0 and state is None:
        fix = "Pass state=, from model(inputs, stop_at_loop=..., return_type='state')."
        raise InputError("state", expected=f"that before loop {start}", given="None", fix=fix)
    return range(start, stop)


def check_features(inputs: Tensor, d_features: int | None) -> None:
    is_batch = isinstance(inputs, torch.Tensor) and inputs.dim() == 3
    fits = is_batch and inputs.shape[-1] == d_features and inputs.is_floating_point()
    _check_kind(inputs, fits, f"floats [batch, pos, d_features={d_features}]")


def check_tokens(inputs: Tensor, d_vocab: int, fix: str = "Use the model's own task.") -> None:
    tokens = isinstance(inputs, torch.Tensor) and inputs.dtype in TOKEN_TYPES and inputs.dim() == 2
    _check_kind(inputs, tokens, "integers [batch, pos] (uint8 or int8 to int64)")
    low, high = map(int, inputs.aminmax())
    if low < 0 or high >= d_vocab:
        expected = f"tokens from 0 to {d_vocab - 1}"
        raise InputError("inputs", expected=expected, given=f"{low} to {high}", fix=fix)


def _check_kind(inputs: Any, fits: bool, expected: str) -> None:
    if not fits or inputs.shape[1] == 0:
        fix = "Pass the inputs of the task's sampler: task.sample(...).inputs."
        raise InputError("inputs", expected=expected, given=spell(inputs), fix=fix)
    need_examples(inputs)


def need_examples(inputs: Any) -> None:
    if isinstance(inputs, torch.Tensor) and inputs.dim() and not len(inputs):
        fix = "Leave empty batches out."
        raise InputError("inputs", expected="an example or more", given="an empty batch", fix=fix)


def check_each(name: str, values: Tensor, inputs: Tensor) -> None:
    """Raise unless there is one integer per example, on its device."""
    shape, device = inputs.shape[:1], inputs.device
    if values.dtype not in TOKEN_TYPES or values.shape != shape or values.device != device:
        expected, fix = f"integers {list(shape)} on {device}", "Pass one for each example."
        raise InputError(name, expected=expected, given=spell(values), fix=fix)


def check_dtype(dtype: Any) -> torch.dtype | None:
    """A floating-point type, or its name; None stays None."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(kind, torch.dtype) and kind.is_floating_point):
        return kind
    expected, fix = "a floating-point type or its name", "Pass e.g. dtype='float32'."
    raise InputError("dtype", expected=expected, given=repr(dtype), fix=fix)


def check_logits(logits: Float[Tensor, "batch ..."], after: str) -> None:
    """Raise on NaN logits, which an argmax would choose."""
    bad = logits.isnan().flatten(1).any(1)
    if bool(bad.any()):
        got = f"NaN in examples {bad.nonzero().flatten().tolist()[:8]} of {len(logits)}"
        fix = "Run fewer loops, or check the model's weights and inputs."
        raise InputError(f"logits {after}", expected="numbers", given=got, fix=fix)


def spell(x: Any) -> str:
    """Shape, type and device of a tensor; the class of anything else."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{list(x.shape)} of {x.dtype} on {x.device}"


def refuse(options: Mapping[str, Any], expected: str, fix: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(name, expected=expected, given=repr(value), fix=fix)


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
