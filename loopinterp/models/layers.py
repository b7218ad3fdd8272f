"""One layer of the block: its weights, and its fast path without hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from loopinterp.models.positions import AttentionContext, rotate

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}

LayerFunction = Callable[["Tensor", "Tensor | None", AttentionContext], "Tensor"]


class Norm(nn.Module):
    r"""LayerNorm, ``(x - mean) / sqrt(var + eps) * w + b``, or RMSNorm, ``x / rms(x) * w``."""

    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))
        layer_norm = config.norm_type == "layernorm"
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if layer_norm else None

    @property
    def w(self) -> Tensor:
        """The weight under TransformerLens' name."""
        return self.weight

    @property
    def b(self) -> Tensor | None:
        """The bias under TransformerLens' name."""
        return self.bias

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        if self.bias is None:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def function(self) -> Callable[[Tensor], Tensor]:
        """The same map with the weights looked up once."""
        weight, bias, eps, shape = self.weight, self.bias, self.eps, self.weight.shape
        if bias is None:
            return lambda x: F.rms_norm(x, shape, weight, eps)
        layer_norm = torch.layer_norm
        return lambda x: layer_norm(x, shape, weight, bias, eps)


class Attention(nn.Module):
    """Multi-head attention. Queries, keys and values are one matrix product."""

    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.head_width
        width = self.n_heads * self.d_head
        self.qkv = nn.Linear(config.d_model, 3 * width)
        self.out = nn.Linear(width, config.d_model)

    def _input(self, which: int) -> Float[Tensor, "head d_model d_head"]:
        weight = self.qkv.weight.view(3, self.n_heads, self.d_head, -1)[which]
        return weight.transpose(1, 2)

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """Query weights of each head."""
        return self._input(0)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        """Key weights of each head."""
        return self._input(1)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        """Value weights of each head."""
        return self._input(2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output weights of each head."""
        return self.out.weight.T.reshape(self.n_heads, self.d_head, -1)

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """Query biases of each head."""
        return self.qkv.bias.view(3, self.n_heads, self.d_head)[0]

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:
        """Key biases of each head."""
        return self.qkv.bias.view(3, self.n_heads, self.d_head)[1]

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """Value biases of each head."""
        return self.qkv.bias.view(3, self.n_heads, self.d_head)[2]

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        return self.out.bias

    def function(self) -> Callable[[Tensor, AttentionContext], Tensor]:
        """Fused attention with the weights looked up once."""
        qkv_weight, qkv_bias = self.qkv.weight, self.qkv.bias
        out_weight, out_bias = self.out.weight, self.out.bias
        n_heads, d_head = self.n_heads, self.d_head
        width = n_heads * d_head
        attend = F.scaled_dot_product_attention

        def run(x: Tensor, context: AttentionContext) -> Tensor:
            batch, n_pos, _ = x.shape
            split = F.linear(x, qkv_weight, qkv_bias).view(batch, n_pos, 3, n_heads, d_head)
            if context.qk_offset is not None or context.rotation is not None:
                q, k, v = split.unbind(2)
                q, k, v = place(q, k, v, context)
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            else:
                q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
            z = attend(q, k, v, attn_mask=context.mask, is_causal=context.is_causal)
            return F.linear(z.transpose(1, 2).reshape(batch, n_pos, width), out_weight, out_bias)

        return run


def place(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Give queries and keys ``[batch, pos, head, d_head]`` their positions."""
    if context.qk_offset is not None:
        q, k = q + context.qk_offset, k + context.qk_offset
    if context.rotation is not None:
        q, k = rotate(q, context.rotation), rotate(k, context.rotation)
    return q, k, v


class MLP(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(config.d_model, config.mlp_width)
        self.fc_out = nn.Linear(config.mlp_width, config.d_model)
        self.act_fn = ACTIVATIONS[config.act_fn]

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """Input weights."""
        return self.fc_in.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Output weights."""
        return self.fc_out.weight.T

    @property
    def b_in(self) -> Float[Tensor, " d_mlp"]:
        """Input biases."""
        return self.fc_in.bias

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        return self.fc_out.bias

    def function(self) -> Callable[[Tensor], Tensor]:
        """The same map with the weights looked up once."""
        in_weight, in_bias = self.fc_in.weight, self.fc_in.bias
        out_weight, out_bias = self.fc_out.weight, self.fc_out.bias
        act_fn, linear = self.act_fn, F.linear
        return lambda x: linear(act_fn(linear(x, in_weight, in_bias)), out_weight, out_bias)


class Recall(nn.Module):
    """``W_h x + W_e e``: a learned mix of the state and the injected input."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.state = nn.Linear(d_model, d_model, bias=False)
        self.input = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self.state(x) + self.input(e)


class Layer(nn.Module):
    """Attention and MLP around the residual stream, each with its norms.

    With ``norm="pre"``: ``h + attn(ln1(h))``, then ``h + mlp(ln2(h))``. ``post`` norms the sum
    instead, ``sandwich`` norms the sublayer's input and its output, ``none`` norms nothing.
    """

    def __init__(self, config: LoopedTransformerConfig, *, tied: bool) -> None:
        super().__init__()
        self.norm = config.norm
        # Only layers inside the loop see the injected input; the surround runs once.
        self.injection = config.injection if tied else "none"
        self.ln1 = Norm(config) if config.norm != "none" else None
        self.attn = Attention(config)
        self.ln1_post = Norm(config) if config.norm == "sandwich" else None
        self.ln2 = Norm(config) if config.norm != "none" else None
        self.mlp = MLP(config)
        self.ln2_post = Norm(config) if config.norm == "sandwich" else None
        internal = self.injection == "internal"
        self.recall1 = Recall(config.d_model) if internal else None
        self.recall2 = Recall(config.d_model) if internal else None

    def function(self) -> LayerFunction:
        """The layer's fast path: one plain function, weights and branches resolved once."""
        attn, mlp = self.attn.function(), self.mlp.function()
        ln1, ln2 = (None if n is None else n.function() for n in (self.ln1, self.ln2))
        if self.norm == "pre" and self.injection not in ("sublayer", "internal"):
            assert ln1 is not None and ln2 is not None

            def pre_norm(h: Tensor, e: Tensor | None, context: AttentionContext) -> Tensor:
                h = h + attn(ln1(h), context)
                return h + mlp(ln2(h))

            return pre_norm

        def general(h: Tensor, e: Tensor | None, context: AttentionContext) -> Tensor:
            x = self.sublayer_input(h if ln1 is None or self.norm == "post" else ln1(h), e, 1)
            out = attn(x, context)
            h = h + (out if self.ln1_post is None else self.ln1_post(out))
            h = ln1(h) if ln1 is not None and self.norm == "post" else h
            x = self.sublayer_input(h if ln2 is None or self.norm == "post" else ln2(h), e, 2)
            out = mlp(x)
            h = h + (out if self.ln2_post is None else self.ln2_post(out))
            return ln2(h) if ln2 is not None and self.norm == "post" else h

        return general

    def sublayer_input(self, x: Tensor, e: Tensor | None, which: int) -> Tensor:
        """What sublayer 1 (attention) or 2 (MLP) reads, once the input is injected into it."""
        if e is None or self.injection not in ("sublayer", "internal"):
            return x
        recall = self.recall1 if which == 1 else self.recall2
        return x + e if recall is None else recall(x, e)


def layer_functions(layers: nn.ModuleList) -> list[LayerFunction]:
    """The fast paths of some layers, in order."""
    return [layer.function() for layer in layers if isinstance(layer, Layer)]
