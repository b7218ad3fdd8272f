"""A run written out by hand: every receiver's stream is added up from the embedding on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Sees = Callable[[str, str, Tensor], Tensor]
"""What a receiver sees of a sender, whose own output is given: (sender, receiver, output)."""


def as_it_is(sender: str, receiver: str, output: Tensor) -> Tensor:
    return output


@torch.no_grad()
def run_by_hand(
    model: Any, tokens: Tensor, n_loops: int, sees: Sees = as_it_is
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and what every component wrote. Nothing of the model but its weights is used."""
    config = model.config
    embedded = model.embedding.weight[tokens]
    if model.position_embedding is not None:
        embedded = embedded + model.position_embedding.weight[: tokens.shape[1]]
    written = {"input": embedded}
    steps = list(_steps(model, n_loops))

    def stream(receiver: str, until: int) -> tuple[Tensor, Any]:
        """The stream before a step as one receiver sees it, and the input injected into it."""
        x = sees("input", receiver, embedded)
        e = x if not config.n_prelude else None
        e_now = e
        for kind, place, layer in steps[:until]:
            if kind == "begin":
                e_now = x if e_now is None else e_now
                if place == "0:" and config.initial_state == "zeros":
                    x = torch.zeros_like(x)
                if config.injection == "input":
                    x = x + e_now
                elif config.injection == "concat":
                    x = x @ model.recall.state.weight.T + e_now @ model.recall.input.weight.T
            elif kind == "end":
                if config.injection == "gated_output":
                    x = x + model.gate * e_now
                if config.loop_norm:
                    x = normed(model.ln_loop, x)
            else:
                names = [place + name for name in parts(config, kind)]
                new = sum(sees(name, receiver, written[name]) for name in names)
                new = new + (layer.attn.out.bias if kind == "attn" else layer.mlp.fc_out.bias)
                norm_name = "ln1" if kind == "attn" else "ln2"
                if config.norm == "sandwich":
                    new = normed(getattr(layer, f"{norm_name}_post"), new)
                x = x + new
                if config.norm == "post":
                    x = normed(getattr(layer, norm_name), x)
        return x, e_now

    for at, (kind, place, layer) in enumerate(steps):
        if kind in ("begin", "end"):
            continue

        def read(
            receiver: str,
            ln: str,
            recall: str,
            at: int = at,
            place: str = place,
            layer: Any = layer,
        ) -> Tensor:
            x, e = stream(receiver, at)
            if config.norm in ("pre", "sandwich"):
                x = normed(getattr(layer, ln), x)
            if "block" in place and config.injection == "sublayer":
                x = x + e
            if "block" in place and config.injection == "internal":
                recalled = getattr(layer, recall)
                x = x @ recalled.state.weight.T + e @ recalled.input.weight.T
            return x

        if kind == "mlp":
            x = read(f"{place}mlp", "ln2", "recall2")
            x = x @ layer.mlp.fc_in.weight.T + layer.mlp.fc_in.bias
            x = torch.nn.functional.gelu(x) if config.act_fn == "gelu" else x.relu()
            written[f"{place}mlp"] = x @ layer.mlp.fc_out.weight.T
            continue
        for head in range(config.n_heads):
            name = f"{place}head.{head}"
            q, k, v = (read(f"{name}.{slot}", "ln1", "recall1") for slot in "qkv")
            written[name] = attend(model, layer.attn, head, q, k, v)
    x, _ = stream("readout", len(steps))
    x = normed(model.ln_final, x) if config.final_norm else x
    return x @ model.unembedding.weight.T + model.unembedding.bias, written


def _steps(model: Any, n_loops: int) -> Iterable[tuple[str, str, Any]]:
    def layers(section: str, prefix: str, stack: Any) -> Iterable[tuple[str, str, Any]]:
        for k, layer in enumerate(stack):
            yield "attn", f"{prefix}{section}.{k}.", layer
            yield "mlp", f"{prefix}{section}.{k}.", layer

    yield from layers("prelude", "", model.prelude)
    for t in range(n_loops):
        yield "begin", f"{t}:", None
        yield from layers("block", f"{t}:", model.block)
        yield "end", f"{t}:", None
    yield from layers("coda", "", model.coda)


def parts(config: Any, kind: str) -> list[str]:
    return ["mlp"] if kind == "mlp" else [f"head.{h}" for h in range(config.n_heads)]


def normed(norm: Any, x: Tensor) -> Tensor:
    if norm.bias is None:
        return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / scale * norm.weight + norm.bias


def attend(model: Any, attn: Any, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    config, n = model.config, q.shape[1]
    d = config.head_width
    rows = slice(head * d, (head + 1) * d)
    (wq, wk, wv), (bq, bk, bv) = (x.chunk(3) for x in (attn.qkv.weight, attn.qkv.bias))
    q, k, v = (x @ w[rows].T + b[rows] for x, w, b in ((q, wq, bq), (k, wk, bk), (v, wv, bv)))
    out = torch.zeros_like(v)
    for i in range(n):
        left = 0 if config.attention_window is None else max(0, i - config.attention_window)
        keys = range(left, i + 1)
        scores = torch.stack([(q[:, i] * k[:, j]).sum(-1) / d**0.5 for j in keys], -1)
        for share, j in zip(scores.softmax(-1).unbind(-1), keys):
            out[:, i] += share[:, None] * v[:, j]
    return out @ attn.out.weight[:, rows].T
