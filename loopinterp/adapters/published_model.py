"""Published models with our addresses, hooks, runs and protocol: the base of all adapters.

An adapter computes each layer itself, from the published weights, with a tap at every named
activation, and gradients in every loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loopinterp.core.errors import InputError
from loopinterp.core.text import MOST, ShortRepr, as_table
from loopinterp.models.addresses import SiteMap, norm_sites
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import LoopRule, check_tokens, device_of, refuse
from loopinterp.models.run import HookedRun
from loopinterp.models.taps import SILENT, Tap
from loopinterp.models.weights import (
    affine,
    first_device,
    is_dispatched,
    is_quantised,
    need_whole_layers,
    placed,
    stored,
    with_weights,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.addresses import Sites


def layer_sites(
    *,
    before: bool,
    after: bool,
    of_sum: bool = False,
    rotary: bool = True,
    grouped: bool = False,
    gated: bool = True,
    gate: str | None = None,
) -> Sites:
    """Components of a layer, in the order they fire.

    Args:
        before: Whether norms precede attention and MLP (``ln1``, ``ln2``).
        after: Whether norms follow them (``ln1_post``, ``ln2_post``).
        of_sum: Whether these norm the sum of output and stream, not the output.
        grouped: Whether keys and values have fewer heads than queries.
        gated: Whether the MLP has a factor beside its activation (``mlp.hook_pre_linear``).
        gate: The kind of the gate on heads (``attn.hook_gate``), if any.
    """
    kv = "kv_head" if grouped else "head"

    def written(norm: str, output: str) -> Sites:
        sites = norm_sites(norm, present=after)
        return {output: "residual", **sites} if of_sum else {**sites, output: "residual"}

    return {
        "hook_resid_pre": "residual",
        **norm_sites("ln1", present=before),
        "attn.hook_q": "head",
        "attn.hook_k": kv,
        "attn.hook_v": kv,
        **({"attn.hook_rot_q": "head", "attn.hook_rot_k": kv} if rotary else {}),
        "attn.hook_attn_scores": "pattern",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "head",
        **({} if gate is None else {"attn.hook_gate": gate}),
        **written("ln1_post", "hook_attn_out"),
        "hook_resid_mid": "residual",
        **norm_sites("ln2", present=before),
        "mlp.hook_pre": "neuron",
        **({"mlp.hook_pre_linear": "neuron"} if gated else {}),
        "mlp.hook_post": "neuron",
        **written("ln2_post", "hook_mlp_out"),
        "hook_resid_post": "residual",
    }


def rms_norm(
    x: Float[Tensor, "*place d_model"],
    weight: Float[Tensor, " d_model"] | None,
    eps: float,
    tap: Tap = SILENT,
    name: str = "",
) -> Float[Tensor, "*place d_model"]:
    r"""``x / sqrt(mean(x^2) + eps) * weight``, the quotient in float32; both have hooks."""
    wide, scale_name = x.float(), f"{name}.hook_scale"
    # Mean square over features: [*place, 1].
    power = wide.square().mean(-1, keepdim=True) + eps
    if tap.edits(scale_name):
        wide = wide / tap(scale_name, power.sqrt().to(x.dtype)).float()
    else:  # the recorded root may be rounded, the quotient's is not
        wide = wide * power.rsqrt()
        if tap.listens(scale_name):
            tap(scale_name, power.sqrt().to(x.dtype))
    normalized = tap(f"{name}.hook_normalized", wide.to(x.dtype))
    return normalized if weight is None else normalized * weight


def weighted_norm(norm: Any, x: Tensor, tap: Tap, name: str) -> Tensor:
    """:func:`rms_norm` with weight and epsilon of a published norm."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def normed(norm: Any, x: Tensor, _: object, tap: Tap) -> Tensor:
        return rms_norm(x, with_weights(norm, uncalled=True).weight, eps, tap, name)

    return placed(normed, norm, x, tap=tap)


def split_heads(
    x: Float[Tensor, "batch pos width"], d_head: int
) -> Float[Tensor, "batch head pos d_head"]:
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)  # via [batch, pos, head, d_head]


def join_heads(z: Float[Tensor, "batch head pos d_head"]) -> Float[Tensor, "batch pos width"]:
    return z.transpose(1, 2).flatten(2)  # heads next to each other in one axis


def gated(
    pre: Float[Tensor, "batch pos d_mlp"],
    linear: Float[Tensor, "batch pos d_mlp"],
    act_fn: Callable[[Tensor], Tensor],
    tap: Tap = SILENT,
) -> Float[Tensor, "batch pos d_mlp"]:
    """``act(pre) * linear``: the neurons of a gated MLP."""
    pre, linear = tap("mlp.hook_pre", pre), tap("mlp.hook_pre_linear", linear)
    return tap("mlp.hook_post", act_fn(pre) * linear)


def rotate_halves(
    x: Float[Tensor, "batch head pos d_head"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch head pos d_head"]:
    """Turn the pairs ``(i, i + d_head / 2)`` by the angle of their position."""
    cos, sin = rotation  # [pos, d_head]
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def half_rotation(rotary: Any, n_pos: int, like: PublishedModel) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[pos, d_head]`` for :func:`rotate_halves`, by Llama's ``inv_freq``."""
    place = torch.arange(n_pos, device=like.device).float()
    # [pos, d_head]: the angles of the first half of the features, and again for the second.
    angles = torch.outer(place, stored(rotary, "inv_freq").to(place)).repeat(1, 2)
    scaling = getattr(rotary, "attention_scaling", 1.0)
    return (angles.cos() * scaling).to(like.dtype), (angles.sin() * scaling).to(like.dtype)


def need_angles(published: Any, path: str) -> None:
    """Raise if the ``inv_freq`` of a module was lost in loading."""
    angles = stored(published.get_submodule(path), "inv_freq")
    if not bool((angles > 0).all() and (angles.diff() < 0).all()):
        # transformers 5 fills in only saved tensors: code for transformers 4 loses its angles.
        got = f"{path}.inv_freq = {angles.tolist()[:4]} …"
        fix = f"Set inv_freq of {path} after loading, and call adapt(model)."
        raise InputError("model", expected="falling frequencies", given=got, fix=fix)


@dataclass(frozen=True, kw_only=True, repr=False)
class PublishedConfig(ShortRepr):
    """The description of a published model for results, caches and messages.

    Attributes:
        architecture: Class of the published model.
        d_vocab: Input tokens; None: unknown, or features.
        causal: Whether no position sees later ones; None: unknown.
        n_ctx: Positions at most; None: no bound.
        options: Options of the adapter.
        published: Its own configuration, JSON-ready.
    """

    architecture: str
    n_loops: int
    d_vocab: int | None
    d_vocab_out: int
    causal: bool | None = True
    n_ctx: int | None = None
    options: Mapping[str, Any]
    published: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {name: dict(x) if isinstance(x, Mapping) else x for name, x in vars(self).items()}


class _Absent:
    """A TransformerLens name that a published model lacks."""

    def __get__(self, model: object, owner: type | None = None) -> Any:
        if model is None:
            return self
        what, got = "layers and weights by TransformerLens' names", type(model).__name__
        fix = "Patch activations by their hook names, or read the weights of model.published."
        raise InputError(what, expected="a LoopedTransformer", given=got, fix=fix)


class PublishedModel(HookedRun):
    """A published looped model, hooked at every loop. Base of all adapters.

    An adapter defines its ``needs``, its site map, :meth:`run_embedding`, :meth:`run_loop` and
    :meth:`run_readout`; and, if any, its initial state, its angles (:meth:`rotation`) and its gate.
    The published weights are shared. ``settings`` are further fields of :class:`PublishedConfig`.
    """

    needs: ClassVar[tuple[str, ...]]  # dotted names of the parts by which it knows its model
    several_devices: ClassVar[bool] = True  # accelerate may put layers on several devices
    offloads: ClassVar[bool] = True  # weights may be offloaded
    published: Any

    blocks = unembed = tl_parameters = tl_named_parameters = _Absent()
    W_E = W_pos = W_U = b_U = W_Q = W_K = W_V = W_O = W_in = W_out = QK = OV = _Absent()
    b_Q = b_K = b_V = b_O = b_in = b_out = all_composition_scores = all_head_labels = _Absent()
    set_use_attn_result = set_use_split_qkv_input = set_use_hook_mlp_in = _Absent()

    def __init__(
        self,
        published: Any,
        site_map: SiteMap,
        *,
        n_loops: int,
        d_vocab: int | None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        need_whole_layers(published, devices=self.several_devices, offload=self.offloads)
        super().__init__(n_loops)
        self.published = published
        self._is_placed = is_dispatched(published)
        self.training = published.training
        self._site_map = site_map
        config = getattr(published, "config", None)
        to_dict = getattr(config, "to_dict", None)
        values = to_dict() if to_dict is not None else dict(getattr(config, "__dict__", {}))
        self.config = PublishedConfig(
            architecture=type(published).__name__,
            n_loops=n_loops,
            d_vocab=d_vocab,
            options=options or {},
            # Other than plain values become text.
            published=json.loads(json.dumps(values, default=str, sort_keys=True)),
            **{"d_vocab_out": d_vocab, **settings},
        )
        self.loop_rule = LoopRule(n_loops)

    @classmethod
    def fits(cls, model: object) -> bool:
        """Whether a model has the parts in ``needs``."""
        try:
            return all(attrgetter(name)(model) is not None for name in cls.needs)
        except AttributeError:
            return False

    def __repr__(self) -> str:
        weights, sizes = sum(x.numel() for x in self.parameters()), self._site_map
        if hasattr(self.published, "hf_quantizer"):  # transformers counts packed numbers
            weights = self.published.num_parameters()
        shape = f"{sizes.n_prelude} + {sizes.n_layers} x {self.n_loops} + {sizes.n_coda} layers"
        about = f"{self.config.architecture}, {weights:,} weights, {shape}"
        return f"{type(self).__name__}({about}, d_model {sizes.d_model})"[: MOST - 1]

    def _repr_html_(self) -> str:
        return as_table(repr(self), self.config.to_dict().items(), fold="All settings")

    @property
    def device(self) -> torch.device:
        """Where inputs, states, logits and all that hooks see belong."""
        is_placed = self._is_placed or "_hf_hook" in vars(self.published)
        place = first_device(self.published) if is_placed else None
        return device_of(self.published) if place is None else place

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations; quantised weights have others."""
        types = (x.dtype for x in self.parameters() if not is_quantised(x))
        return next(types, torch.get_default_dtype())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # to, cuda, half, …
        if is_dispatched(self.published):
            expected = "a model without device_map"
            got, fix = "one that accelerate has placed", "Load it anew, where and as it shall be."
            raise InputError("model to be moved or cast", expected=expected, given=got, fix=fix)
        return super()._apply(fn, recurse)

    def affine(self, linear: Any) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a published linear layer; quantised ones in float."""
        return affine(linear, self.dtype, self.device)

    @property
    def site_map(self) -> SiteMap:
        return self._site_map

    @property
    def n_coda(self) -> int:
        return self._site_map.n_coda

    def cfg_options(self) -> dict[str, Any]:
        return {"model_name": self.config.architecture}

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """The state before the first loop: the embedding."""
        return e

    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        """True where a query may attend, among ``n_pos`` positions."""
        everything = torch.ones(1, n_pos, n_pos, dtype=torch.bool, device=self.device)
        return everything.tril() if self.config.causal else everything

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """Probability to stop at a state, if the model has not stopped before."""
        fix = "Use a rule that reads states or logits, such as ResidualBelow or ReadoutKL."
        got = type(self).__name__
        raise InputError("model", expected="one with an exit gate", given=got, fix=fix)

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        if isinstance(position_offset, torch.Tensor) or position_offset:
            offset = {"position_offset": position_offset}
            refuse(offset, "0 for a published model", "Leave it out.")
        if self.config.d_vocab is not None:
            check_tokens(inputs, self.config.d_vocab, "Use the model's own tokenizer.")

    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        n_ctx = self.config.n_ctx
        if n_ctx is not None and n_pos > n_ctx:
            expected, fix = f"at most {n_ctx} positions", "Shorten the input."
            raise InputError("inputs", expected=expected, given=str(n_pos), fix=fix)
        return AttentionContext(is_causal=self.config.causal, rotation=self.rotation(n_pos))

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the angles of positions ``[pos, d_head]``, if any."""
        return None

    def mask_at(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> tuple[Tensor, Tensor]:
        # [block, head, query, key]: keys after their query are not seen
        ahead = (key > query)[:, None] if self.config.causal else (key > key)[:, None]
        mask = torch.zeros_like(ahead, dtype=self.dtype).masked_fill(ahead, float("-inf"))
        return mask, mask
