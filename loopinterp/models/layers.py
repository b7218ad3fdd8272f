"""One layer of the block: its attention, its MLP, and the sign code between loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from loopinterp.models.config import FORKS
from loopinterp.models.positions import NARROW, AttentionContext, rotate
from loopinterp.models.taps import SILENT, Tap
from loopinterp.models.weights import LinearMap, apply_norm, change_of, weights_of, with_weights

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass
    from loopinterp.models.config import LoopedTransformerConfig


def _of_each_head(which: int, name: str, kind: str) -> property:
    def part(self: Attention) -> Tensor:
        axes = "(qkv head d_head) ... -> qkv head ... d_head"
        stacked = getattr(with_weights(self.qkv), kind)
        return rearrange(stacked, axes, qkv=3, head=self.n_heads)[which]

    shape = "[head, d_model, d_head]" if kind == "weight" else "[head, d_head]"
    return property(part, doc=f"{name} {kind} of each head ``{shape}``.")


class Attention(nn.Module):
    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.head_width
        width = self.n_heads * self.d_head
        self.qkv = LinearMap(config.d_model, 3 * width)
        self.out = LinearMap(width, config.d_model)
        self.projects_positions = config.abacus_target == "attention"

    W_Q, b_Q = _of_each_head(0, "Query", "weight"), _of_each_head(0, "Query", "bias")
    W_K, b_K = _of_each_head(1, "Key", "weight"), _of_each_head(1, "Key", "bias")
    W_V, b_V = _of_each_head(2, "Value", "weight"), _of_each_head(2, "Value", "bias")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        axes = "d_model (head d_head) -> head d_head d_model"
        return rearrange(with_weights(self.out).weight, axes, head=self.n_heads)

    b_O = weights_of("out", "bias", "Output bias ``[d_model]``.")

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        context: AttentionContext,
        tap: Tap = SILENT,
        forks: Sequence[Float[Tensor, "batch pos head d_model"] | None] = (None, None, None),
    ) -> Float[Tensor, "batch pos d_model"]:
        """``sum_h softmax(q_h k_h^T / sqrt(d_head) + mask) v_h W_O[h] + b_O``.

        ``forks`` replace ``x`` as input of queries, keys and values, per head.
        """
        batch, n_pos, _ = x.shape
        # From [batch, pos, qkv, head, d_head], each part [batch, head, pos, d_head].
        split = self.qkv(x).view(batch, n_pos, 3, self.n_heads, self.d_head)
        parts = [*split.permute(2, 0, 3, 1, 4).unbind(0)]
        for which, fork in enumerate(forks):
            if fork is None:
                continue
            if change_of(self.qkv) is None:
                name = "QKV"[which]
                weight, bias = getattr(self, f"W_{name}"), getattr(self, f"b_{name}")
                # [batch, head, pos, d_head]: each head reads an input of its own.
                parts[which] = torch.einsum("bphm,hmd->bhpd", fork, weight) + bias[:, None]
            else:
                # Called for all heads: of the parts of each head's input, its own are the diagonal
                # of [batch, pos, head, head, d_head].
                every = self.qkv(fork).unflatten(-1, (3, self.n_heads, self.d_head))
                every = every[..., which, :, :].diagonal(dim1=2, dim2=3)
                parts[which] = every.permute(0, 3, 1, 2)
        q, k, v = parts
        if context.qk_offset is not None:
            to_q = to_k = context.qk_offset
            if self.projects_positions:  # from [batch, 1, pos, d_model]
                at = context.qk_offset[:, 0]
                to_q, to_k = (
                    torch.einsum("bpm,hmd->bhpd", at, weight) for weight in (self.W_Q, self.W_K)
                )
            q, k = q + to_q, k + to_k
        z = attend(q, k, v, context, tap).transpose(1, 2)
        if tap.listens("attn.hook_result"):
            out = with_weights(self.out, uncalled=True)  # no call gives what each head writes
            # The output of each head: [batch, pos, head, d_model].
            heads = torch.einsum("bphd,hdm->bphm", z, self.W_O)
            return tap("attn.hook_result", heads).sum(2) + out.bias
        return self.out(z.reshape(batch, n_pos, -1))


def attend(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_head"],
    context: AttentionContext,
    tap: Tap = SILENT,
    *,
    turn: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate,
) -> Float[Tensor, "row head pos d_head"]:
    """``softmax(q k^T / sqrt(d_head) + mask) v`` for each head, with its hooks.

    Fused, or within a window alone, unless scores or pattern are hooked. Consecutive query
    heads may share a key head. ``turn`` applies rotary angles. A tap may return more rows than it
    receives.
    """
    q, k, v = _show(tap, "hook_q", q), _show(tap, "hook_k", k), _show(tap, "hook_v", v)
    if context.rotation is not None:
        q = _show(tap, "hook_rot_q", turn(q, context.rotation))
        k = _show(tap, "hook_rot_k", turn(k, context.rotation))
    if context.remember is not None:
        k, v = context.remember(k, v)
    if k.shape[1] < q.shape[1]:
        # Grouped heads: each of the keys' serves several of the queries'.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if tap.listens("attn.hook_attn_scores", "attn.hook_pattern"):
        # [batch, head, query, key]; q is scaled first, which is fewer products than scaling scores.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if context.mask is not None:
            scores = scores + context.mask
        elif context.is_causal:
            # [query, key]: True above the diagonal, where a key lies ahead.
            ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(ahead, float("-inf"))
        scores = tap("attn.hook_attn_scores", scores)
        z = tap("attn.hook_pattern", scores.softmax(-1)) @ v
    elif context.attend is not None:
        z = context.attend(q, k, v)
    elif context.window is not None:
        assert context.mask is not None
        z = _windowed_attention(q, k, v, mask=context.mask, window=context.window)
    else:
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=context.mask, is_causal=context.is_causal
        )
    return _show(tap, "hook_z", z)


def _show(
    tap: Tap, name: str, x: Float[Tensor, "batch head pos d_head"]
) -> Float[Tensor, "row head pos d_head"]:
    """Pass hooks in TransformerLens' order of axes: batch, pos, head, d_head."""
    return x if tap is SILENT else tap(f"attn.{name}", x.transpose(1, 2)).transpose(1, 2)


def _windowed_attention(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch head pos d_head"],
    v: Float[Tensor, "batch head pos d_head"],
    *,
    mask: Float[Tensor, "#block #head query key"] | Float[Tensor, "distance 1 #head pos"],
    window: int,
) -> Float[Tensor, "batch head pos d_head"]:
    """Attention within a window: distance by distance if it is narrow, else block by block.

    The ``mask`` of each distance or block is a bias that bars padding too.
    """
    if window <= NARROW:
        k, v = (F.pad(x, (0, 0, window, 0)) for x in (k, v))
        return attend_near(q, k, v, mask)
    n_pos, (n_blocks, _, length, _) = q.shape[2], mask.shape
    behind = n_blocks * length - n_pos

    def blocks(x: Tensor, before: int) -> Tensor:  # [batch, block, head, before + length, d_head]
        padded = F.pad(x, (0, 0, before, behind))
        return padded.unfold(2, before + length, length).permute(0, 2, 1, 4, 3)

    q, k, v = blocks(q * q.shape[-1] ** -0.5, 0), blocks(k, window), blocks(v, window)
    # Scores [batch, block, head, length, before + length].
    pattern = (q @ k.transpose(-2, -1) + mask).softmax(-1)
    return (pattern @ v).transpose(1, 2).flatten(2, 3)[:, :, :n_pos]


NEAR = 8  # widest window for which attend_near is quicker in a light cone


def attend_near(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch head key d_head"],
    v: Float[Tensor, "batch head key d_head"],
    bias: Float[Tensor, "#distance #batch #head #pos"],
) -> Float[Tensor, "batch head pos d_head"]:
    """Attention within a narrow causal window, distance by distance.

    Args:
        k: Keys of as many positions before the first query as the window is wide, and of the
            queries' positions.
        bias: Added to the scores of each distance 0 .. window; minus infinity where barred.
    """
    n_pos, window, q = q.shape[2], len(bias) - 1, q * q.shape[-1] ** -0.5
    # The keys at each distance back, for all queries at once.
    shifts = [slice(window - back, window - back + n_pos) for back in range(window + 1)]
    scores = torch.stack([(q * k[:, :, shift]).sum(-1) for shift in shifts]) + bias
    pattern = scores.softmax(0)[..., None]  # [distance, batch, head, pos, 1]
    # The mean of the values, distance by distance: [batch, head, pos, d_head].
    z = pattern[0] * v[:, :, shifts[0]]
    for weight, shift in zip(pattern[1:], shifts[1:]):
        z = torch.addcmul(z, weight, v[:, :, shift])
    return z


def tapped_norm(
    x: Float[Tensor, "*shape d_model"],
    weight: Float[Tensor, "*model d_model"],
    bias: Float[Tensor, "*model d_model"] | None,
    eps: float,
    tap: Tap = SILENT,
    name: str = "",
) -> Float[Tensor, "*shape d_model"]:
    if tap is SILENT:
        return apply_norm(x, weight, bias, eps)
    scale_name, normalized_name = f"{name}.hook_scale", f"{name}.hook_normalized"
    if not tap.listens(scale_name, normalized_name):
        return apply_norm(x, weight, bias, eps)
    if x.element_size() < 4 and not tap.edits(scale_name, normalized_name):
        # The recorded values are rounded; the run does not use them.
        wide = x.float()
        centred = wide if bias is None else wide - wide.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        tap(scale_name, scale.to(x.dtype))
        tap(normalized_name, (centred / scale).to(x.dtype))
        return apply_norm(x, weight, bias, eps)
    if bias is not None and not tap.edits(scale_name):
        # One fused operation gives both, as long as no hook may change the scale.
        normalized, _, inverse = torch.native_layer_norm(x, weight.shape, None, None, eps)
        tap(scale_name, inverse.reciprocal())
    else:
        centred = x if bias is None else x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        normalized = centred / tap(scale_name, scale)
    normalized = tap(normalized_name, normalized)
    return normalized * weight if bias is None else torch.addcmul(bias, normalized, weight)


class Norm(nn.Module):
    r"""LayerNorm, ``(x - mean) / sqrt(var + eps) * w + b``, or RMSNorm, ``x / rms(x) * w``."""

    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))
        layer_norm = config.norm_type == "layernorm"
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if layer_norm else None

    w = property(attrgetter("weight"), doc="The weight under TransformerLens' name.")
    b = property(attrgetter("bias"), doc="The bias under TransformerLens' name, or None.")

    def forward(
        self, x: Float[Tensor, "*shape d_model"], tap: Tap = SILENT, name: str = ""
    ) -> Float[Tensor, "*shape d_model"]:
        return tapped_norm(x, self.weight, self.bias, self.eps, tap, name)


class MLP(nn.Module):
    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.fc_in = LinearMap(config.d_model, config.mlp_width)
        self.fc_out = LinearMap(config.mlp_width, config.d_model)
        self.act_fn = _gelu_new if config.act_fn == "gelu_new" else getattr(F, config.act_fn)

    W_in = weights_of("fc_in", "weight.T", "Input weights ``[d_model, d_mlp]``.")
    b_in = weights_of("fc_in", "bias", "Input biases ``[d_mlp]``.")
    W_out = weights_of("fc_out", "weight.T", "Output weights ``[d_mlp, d_model]``.")
    b_out = weights_of("fc_out", "bias", "Output bias ``[d_model]``.")

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], tap: Tap = SILENT
    ) -> Float[Tensor, "batch pos d_model"]:
        """``act(x W_in + b_in) W_out + b_out``."""
        x = tap("mlp.hook_pre", self.fc_in(x))
        return self.fc_out(tap("mlp.hook_post", self.act_fn(x)))


def _gelu_new(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Recall(nn.Module):
    """``W_h x + W_e e``."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.state = LinearMap(d_model, d_model, bias=False)
        self.input = LinearMap(d_model, d_model, bias=False)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self.state(x) + self.input(e)


class Layer(nn.Module):
    """Attention and MLP around the residual stream, each with its norms.

    ``norm="pre"``: ``h + attn(ln1(h))``, then ``h + mlp(ln2(h))``. ``post`` norms the sum,
    ``sandwich`` a sublayer's input and output, ``none`` nothing. ``gated``:
    ``h + sigmoid(W h + b) * attn(ln1(h))``, and likewise for the MLP.
    """

    def __init__(self, config: LoopedTransformerConfig, *, tied: bool) -> None:
        super().__init__()
        self.norms_sum = config.norm == "post"
        self.injects = tied and config.injection in ("sublayer", "internal")
        self.ln1 = Norm(config) if config.norm != "none" else None
        self.attn = Attention(config)
        self.ln1_post = Norm(config) if config.norm == "sandwich" else None
        self.ln2 = Norm(config) if config.norm != "none" else None
        self.mlp = MLP(config)
        self.ln2_post = Norm(config) if config.norm == "sandwich" else None
        gated, d_model = config.norm == "gated", config.d_model
        self.attn_gate = LinearMap(d_model, d_model) if gated else None
        self.mlp_gate = LinearMap(d_model, d_model) if gated else None
        internal = self.injects and config.injection == "internal"
        self.recall1 = Recall(config.d_model) if internal else None
        self.recall2 = Recall(config.d_model) if internal else None

    def forward(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"] | None,
        context: AttentionContext,
        tap: Tap = SILENT,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after the layer; ``e`` is None outside the block."""
        ln1, ln2 = self.ln1, self.ln2
        h = tap("hook_resid_pre", h)
        forks = self._forks(h, e, tap) if tap.listens(*FORKS) else (None, None, None)
        x = h if ln1 is None or self.norms_sum else ln1(h, tap, "ln1")
        x = self.attn(self._inject(x, e, self.recall1), context, tap, forks)
        if self.ln1_post is not None:
            x = self.ln1_post(x, tap, "ln1_post")
        if self.attn_gate is not None:
            x = x * tap("hook_attn_gate", self.attn_gate(h).sigmoid())
        h = h + tap("hook_attn_out", x)
        if ln1 is not None and self.norms_sum:
            h = ln1(h, tap, "ln1")
        h = tap("hook_resid_mid", h)
        x = tap("hook_mlp_in", h)
        x = x if ln2 is None or self.norms_sum else ln2(x, tap, "ln2")
        x = self.mlp(self._inject(x, e, self.recall2), tap)
        if self.ln2_post is not None:
            x = self.ln2_post(x, tap, "ln2_post")
        if self.mlp_gate is not None:
            x = x * tap("hook_mlp_gate", self.mlp_gate(h).sigmoid())
        h = h + tap("hook_mlp_out", x)
        if ln2 is not None and self.norms_sum:
            h = ln2(h, tap, "ln2")
        return tap("hook_resid_post", h)

    def attribute(self, backward: AttributionPass) -> None:
        def through(name: str) -> None:
            norm = getattr(self, name)
            backward.through_norm(name, norm.weight, norm.bias)

        if self.norms_sum:
            through("ln2")
        backward.write("mlp", backward.read("hook_mlp_out"))
        if self.norms_sum:
            through("ln1")
        with backward.branch():
            if self.ln1_post is not None:
                through("ln1_post")
            if self.attn_gate is not None:
                backward.through_scale(backward.read("hook_attn_gate"))
            backward.write_heads(self.attn.out.weight, self.attn.out.bias)

    def _forks(self, h: Tensor, e: Tensor | None, tap: Tap) -> list[Tensor | None]:
        # Hooked inputs of queries, keys, values [batch, pos, head, d_model].
        shared = h[:, :, None].expand(-1, -1, self.attn.n_heads, -1)
        injected = None if e is None else e[:, :, None]
        forks: list[Tensor | None] = []
        for name in FORKS:
            x = tap(name, shared) if tap.listens(name) else None
            if x is not None:
                x = x if self.ln1 is None or self.norms_sum else self.ln1(x)
                x = self._inject(x, injected, self.recall1)
            forks.append(x)
        return forks

    def _inject(self, x: Tensor, e: Tensor | None, recall: Recall | None) -> Tensor:
        if e is None or not self.injects:
            return x
        return x + e if recall is None else recall(x, e)


@dataclass(frozen=True)
class Softening:
    """Soft signs in training.

    A random share ``hard`` of bits and positions, redrawn every loop, is ``sign(tanh(gain z))``
    with the gradient of ``tanh(gain z)``; the rest is ``tanh(gain z)`` plus Gaussian noise of
    standard deviation ``noise``. ``generator`` is on the model's device.
    """

    hard: float
    gain: float
    noise: float
    generator: torch.Generator


class StateCode(nn.Module):
    """Rounds a state to the signs of ``n_bits`` of its directions."""

    def __init__(self, d_model: int, n_bits: int) -> None:
        super().__init__()
        self.read = LinearMap(d_model, n_bits)
        self.write = LinearMap(n_bits, d_model)
        self._softening: Softening | None = None

    def init_weights(self) -> None:
        """``U ~ N(0, 1)``, ``D ~ N(0, 1 / d_model)``, no biases."""
        d_model = self.read.weight.shape[-1]
        nn.init.normal_(self.write.weight)
        nn.init.normal_(self.read.weight, std=d_model**-0.5)
        nn.init.zeros_(self.read.bias)
        nn.init.zeros_(self.write.bias)

    @property
    def n_bits(self) -> int:
        return self.read.weight.shape[-2]

    def forward(
        self, h: Float[Tensor, "*shape d_model"], tap: Tap = SILENT
    ) -> Float[Tensor, "*shape d_model"]:
        z = tap("hook_code_pre", self.read(h))  # [*shape, n_bits]
        return self.write(tap("hook_code", self._bits(z)))

    def state(self, bits: Float[Tensor, "*shape n_bits"]) -> Float[Tensor, "*shape d_model"]:
        return self.write(bits)

    @contextmanager
    def softened(self, softening: Softening) -> Iterator[None]:
        self._softening = softening
        try:
            yield
        finally:
            self._softening = None

    def _bits(self, z: Tensor) -> Tensor:
        soft = self._softening
        if soft is None:
            return _sign(z)
        how = {"generator": soft.generator, "device": z.device, "dtype": z.dtype}
        # Straight-through: the value is the sign's, the gradient that of the tanh.
        smooth = torch.tanh(soft.gain * z)
        straight = smooth + (_sign(z) - smooth).detach()
        noisy = smooth + soft.noise * torch.randn(z.shape, **how)
        # [batch, pos, bit]: each bit is hard with probability `hard`, else soft with noise.
        return straight.where(torch.rand(z.shape, **how) < soft.hard, noisy)

    def attribute(self, backward: AttributionPass) -> None:
        """Backward through ``sign(z) = z / |z|``, with ``|z|`` fixed to the run's."""
        backward.write("code bias", self.write.bias)
        backward.through_linear(self.write.weight)
        backward.through_scale(backward.read("hook_code_pre").abs().reciprocal())
        backward.write("code threshold", self.read.bias)
        backward.through_linear(self.read.weight)


def _sign(z: Tensor) -> Tensor:
    """-1 or 1 (1 at 0), with derivative 0."""
    return torch.sign(torch.sign(z) + 0.5)
