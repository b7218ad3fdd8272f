"""Runs of published models written out by hand: every receiver's stream is added up anew.

Nothing of the adapters is used, and of the published models only weights and norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.edges.by_hand import Sees, as_it_is

Map = Callable[[Tensor], Tensor]
_LLAMAS = "Ouro", "LoopedLlama"


@dataclass
class Layer:
    """A layer: what its heads and its MLP read, write, and add to the stream."""

    weights: list[list[tuple[Tensor, Tensor | float]]]  # of queries, keys, values by head
    turn: Map  # of queries and keys
    out: list[Tensor]  # of each head, [d_model, d_head]
    out_bias: Tensor | float
    before: Map
    own_norm: Map  # of the heads' sum, before it is added
    mlp: Map
    norms: dict[str, Map] = field(default_factory=dict)  # of the stream, after heads and after MLP
    causal: bool = True


def head_of(layer: Layer, head: int, streams: list[Tensor]) -> Tensor:
    """What a head writes that reads three streams."""
    q, k, v = (
        layer.before(x) @ weights[head][0].T + weights[head][1]
        for x, weights in zip(streams, layer.weights)
    )
    scores = layer.turn(q) @ layer.turn(k).mT / math.sqrt(q.shape[-1])
    if layer.causal:
        scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
    return scores.softmax(-1) @ v @ layer.out[head].T


@torch.no_grad()
def run_by_hand(
    published: Any,
    embedded: Tensor,
    start: Tensor | None,
    n_loops: int,
    sees: Sees = as_it_is,
    *,
    nodes: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and what every component wrote; with ``nodes``, norms of the stream are such too.

    ``start`` replaces the embedding as the state before the first loop.
    """
    steps, read = _steps(published, n_loops)
    written = {"input": embedded}

    def stream(receiver: str, until: int) -> Tensor:
        """The stream before a step, as one receiver sees it."""
        x = e = sees("input", receiver, embedded)
        for kind, name, what in steps[:until]:
            if kind == "start":
                e, x = x, x if start is None else start
            elif kind == "inject":
                x = torch.cat([x, e], -1) @ what.T
            elif kind == "norm":
                x = sees(name, receiver, written[name]) if nodes else what(x)
            elif kind == "mlp":
                x = x + sees(name, receiver, written[name])
            else:
                heads = [f"{name}.{head}" for head in range(len(what.out))]
                new = sum(sees(head, receiver, written[head]) for head in heads)
                x = x + what.own_norm(new + what.out_bias)
        return x

    for at, (kind, name, what) in enumerate(steps):
        if kind == "norm" and nodes:
            written[name] = what(stream(name, at))
        elif kind == "mlp":
            written[name] = what.mlp(stream(name, at))
        elif kind == "heads":
            for head in range(len(what.out)):
                streams = [stream(f"{name}.{head}.{slot}", at) for slot in "qkv"]
                written[f"{name}.{head}"] = head_of(what, head, streams)
    return read(stream("readout", len(steps))), written


def embedding_of(published: Any, tokens: Tensor) -> Tensor:
    """The embedding, as the stream begins."""
    kind = type(published).__name__
    if kind.startswith(_LLAMAS):
        return published.model.embed_tokens(tokens)
    if kind.startswith("Raven"):
        return published.transformer.wte(tokens) * published.emb_scale
    inner = published.albert
    tables = inner.embeddings
    x = tables.word_embeddings.weight[tokens] + tables.token_type_embeddings.weight[0]
    x = x + tables.position_embeddings.weight[: tokens.shape[1]]
    return inner.encoder.embedding_hidden_mapping_in(tables.LayerNorm(x))


def _steps(published: Any, n_loops: int) -> tuple[list[Any], Map]:
    kind = type(published).__name__
    if kind.startswith(_LLAMAS):
        inner = published.model
        layers = [_llama_layer(layer, inner) for layer in inner.layers]
        steps: list[Any] = [("start", "", None)]
        for t in range(n_loops):
            steps += _in_order(f"{t}:block.", layers)
            steps.append(("norm", f"{t}:block.{len(layers) - 1}.ln_loop", _norm(inner.norm)))
        return steps, lambda x: x @ published.lm_head.weight.T
    if kind.startswith("Raven"):
        parts = published.transformer
        prelude, core, coda = (
            [_huginn_layer(layer, published) for layer in parts[name]]
            for name in ("prelude", "core_block", "coda")
        )
        steps = [*_in_order("prelude.", prelude), ("start", "", None)]
        for t in range(n_loops):
            steps += [("inject", "", parts["adapter"].weight), *_in_order(f"{t}:block.", core)]
        steps += [("norm", "coda.0.ln_coda", parts["ln_f"]), *_in_order("coda.", coda)]
        return steps, lambda x: parts["ln_f"](x) @ published.lm_head.weight.T
    groups, head = published.albert.encoder.albert_layer_groups, published.predictions
    layers = [_albert_layer(layer, published.config) for layer in groups[0].albert_layers]
    steps = [("start", "", None)]
    for t in range(n_loops):
        steps += _in_order(f"{t}:block.", layers)
    return steps, lambda x: head.decoder(head.LayerNorm(head.activation(head.dense(x))))


def _in_order(prefix: str, layers: list[Layer]) -> Iterator[tuple[str, str, Any]]:
    for k, layer in enumerate(layers):
        for kind, name, norm in (("heads", "head", "ln1_post"), ("mlp", "mlp", "ln2_post")):
            yield kind, f"{prefix}{k}.{name}", layer
            if norm in layer.norms:
                yield "norm", f"{prefix}{k}.{norm}", layer.norms[norm]


def _norm(module: Any) -> Map:
    """``x / rms(x) * weight``, as wide as x, which Llama's own code is not; None: x."""

    def norm(x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
        return x * scale * module.weight

    return (lambda x: x) if module is None else norm


def _parts(weight: Tensor, bias: Any, d_head: int, n_heads: int) -> list[Any]:
    """Rows of each head, of shared ones several times."""
    rows = weight.split(d_head)
    biases = [0.0] * len(rows) if bias is None else bias.split(d_head)
    each = [(rows[k], biases[k]) for k in range(len(rows))]
    return [each[head * len(each) // n_heads] for head in range(n_heads)]


def _llama_layer(layer: Any, inner: Any) -> Layer:
    # Ouro's has norms after attention and MLP; Nanbeige's has angles of its own.
    of_heads, of_mlp = (
        _norm(getattr(layer, name, None))
        for name in ("input_layernorm_2", "post_attention_layernorm_2")
    )
    angles_of = getattr(inner, "rotary_emb", None) or layer.self_attn.rotary_emb
    attention, mlp, d_head = layer.self_attn, layer.mlp, layer.self_attn.head_dim
    n_heads = attention.q_proj.out_features // d_head
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)

    def turn(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), angles_of.inv_freq).to(x)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def neurons(x: Tensor) -> Tensor:
        x = _norm(layer.post_attention_layernorm)(x)
        return of_mlp(mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x)))

    return Layer(
        [_parts(x.weight, x.bias, d_head, n_heads) for x in projections],
        turn,
        list(attention.o_proj.weight.split(d_head, 1)),
        0.0 if attention.o_proj.bias is None else attention.o_proj.bias,
        _norm(layer.input_layernorm),
        of_heads,
        neurons,
    )


def _huginn_layer(layer: Any, published: Any) -> Layer:
    config, attention, mlp = published.config, layer.attn, layer.mlp
    width, n_heads, d_head = config.n_embd, config.n_heads, config.head_dim
    weights = [_parts(x, None, d_head, n_heads) for x in attention.Wqkv.weight.split(width)]
    for kind in (0, 1):  # queries and keys have biases, [2, 1, head, d_head]
        of_kind = attention.qk_bias[kind, 0]
        weights[kind] = [(w, of_kind[head]) for head, (w, _) in enumerate(weights[kind])]

    def turn(x: Tensor) -> Tensor:
        inverse = config.rope_base ** -(torch.arange(0, d_head, 2) / d_head)
        angles = torch.outer(torch.arange(x.shape[1]), inverse).to(x)
        pairs = torch.complex(x[..., ::2], x[..., 1::2])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.stack([turned.real, turned.imag], -1).flatten(-2)

    def neurons(x: Tensor) -> Tensor:
        gate, linear = (layer.norm_3(x) @ mlp.fc.weight.T).chunk(2, -1)
        return (silu(gate) * linear) @ mlp.proj.weight.T

    return Layer(
        weights,
        turn,
        list(attention.proj.weight.split(d_head, 1)),
        0.0,
        layer.norm_1,
        lambda x: x,
        neurons,
        {"ln1_post": layer.norm_2, "ln2_post": layer.norm_4},
    )


def _albert_layer(layer: Any, config: Any) -> Layer:
    attention, n_heads = layer.attention, config.num_attention_heads
    d_head = config.hidden_size // n_heads
    projections = (attention.query, attention.key, attention.value)

    def neurons(x: Tensor) -> Tensor:
        x = gelu(x @ layer.ffn.weight.T + layer.ffn.bias, approximate="tanh")
        return x @ layer.ffn_output.weight.T + layer.ffn_output.bias

    return Layer(
        [_parts(x.weight, x.bias, d_head, n_heads) for x in projections],
        lambda x: x,
        list(attention.dense.weight.split(d_head, 1)),
        attention.dense.bias,
        lambda x: x,
        lambda x: x,
        neurons,
        {"ln1_post": attention.LayerNorm, "ln2_post": layer.full_layer_layer_norm},
        causal=False,
    )
