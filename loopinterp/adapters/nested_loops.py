r"""Loops within loops: a slow stack, and a fast one that runs several times between its steps.

.. math::
    z_L \leftarrow \operatorname{fast}(z_L + (z_H + e)) \quad \text{n times}, \qquad
    z_H \leftarrow \operatorname{slow}(z_H + z_L)

One loop is one slow cycle: the layers of the fast cycles, then those of the slow stack.
``loops.{t}.blocks.{l}`` is also ``loops.{t}.inner.{s}.blocks.{k}`` with the fast cycle s (the last
s is the slow stack). The state is ``[z_H, z_L]``; logits are read from ``z_H``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt

from loopinterp.adapters.published_model import (
    PublishedModel,
    gated,
    join_heads,
    layer_sites,
    rms_norm,
    rotate_halves,
    split_heads,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, unknown_name
from loopinterp.models.addresses import SiteMap, Sites, norm_sites
from loopinterp.models.layers import attend
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.weights import call, placed, stored

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


def nested_sites(
    fast: Sequence[Sites],
    slow: Sequence[Sites],
    n_fast: int,
    *,
    d_model: int,
    injects: bool = True,
    closing: Sites | None = None,
    **sizes: Any,
) -> SiteMap:
    """The sites of a model with a slow cycle as its loop.

    Args:
        fast: Sites of the layers of the fast stack; ``slow`` those of the slow one.
        n_fast: Runs of the fast stack in a loop.
        injects: Whether the input is injected into the fast cycles.
        closing: Sites at the end of a loop, beside the state.
        sizes: Further fields of the :class:`~loopinterp.models.addresses.SiteMap`.
    """
    stacks = [fast] * n_fast + [slow]
    names = (f"inner.{s}.blocks.{k}" for s, stack in enumerate(stacks) for k in range(len(stack)))
    injection = {"hook_injection": "residual"} if injects else {}
    parts = {"hook_z_H": "residual", "hook_z_L": "residual"}
    return SiteMap(
        d_model=d_model,
        d_state=2 * d_model,
        opening={"hook_state_pre": "state", **injection},
        block=tuple(chain.from_iterable(stacks)),
        closing={**parts, "hook_state_post": "state", **(closing or {})},
        layer_names=tuple(names),
        state_parts={"z_H": slice(d_model), "z_L": slice(d_model, 2 * d_model)},
        **{"embedding": {"hook_embed": "residual"}, **sizes},
    )


class NestedModel(PublishedModel):
    """A published model with a slow cycle as its loop; an adapter adds stacks and layers."""

    @property
    @abstractmethod
    def stacks(self) -> tuple[Any, Any, int]:
        """The fast stack, the slow one, and the runs of the fast one in a loop."""

    @abstractmethod
    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """One layer of either stack."""

    def after_stack(self, stack: Any, h: Tensor, tap: Tap) -> Tensor:
        return h

    def part(
        self, state: Float[Tensor, "*place d_state"], name: str
    ) -> Float[Tensor, "*place d_model"]:
        """One part of a state, ``z_H`` or ``z_L``."""
        if name not in self.site_map.state_parts:
            raise unknown_name("part of the state", name, self.site_map.state_parts)
        return state[..., self.site_map.state_parts[name]]

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, (fast, slow, n_fast) = taps.at("block", loop), self.stacks
        h = tap("hook_state_pre", h)
        z_H, z_L = (self.part(h, name) for name in ("z_H", "z_L"))
        injects = "hook_injection" in self.site_map.opening
        e = tap("hook_injection", e) if injects else e
        inside = (taps.at("block", loop, k) for k in range(self.site_map.n_layers))
        for _ in range(n_fast):  # [batch, pos, d_model] each
            z_L = self.run_stack(fast, z_L + (z_H + e if injects else z_H), context, inside)
        z_H = self.run_stack(slow, z_H + z_L, context, inside)
        z_H, z_L = tap("hook_z_H", z_H), tap("hook_z_L", z_L)
        return tap("hook_state_post", torch.cat((z_H, z_L), dim=-1))

    def run_stack(
        self, stack: Any, h: Tensor, context: AttentionContext, taps: Iterable[Tap]
    ) -> Tensor:
        tap = SILENT
        for layer, tap in zip(stack.layers, taps):
            h = placed(self.layer, layer, h, context, tap)
        return self.after_stack(stack, h, tap)

    @property
    @abstractmethod
    def head(self) -> Any:
        """The linear map that reads logits from z_H."""

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        return call(self.head, self.part(h, "z_H"))

    @abstractmethod
    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        """From after a layer to before it."""

    def attribute_after_stack(self, backward: AttributionPass) -> None:
        """From the end of a stack to after its last layer."""

    def attribute_readout(self, backward: AttributionPass) -> None:
        backward.through_unembedding(*self.affine(self.head))
        # Logits are read from z_H alone: nothing comes from z_L.
        of_slow = backward.direction
        backward.direction = torch.cat((of_slow, torch.zeros_like(of_slow)), dim=-1)

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        fast, slow, n_fast = self.stacks
        numbers = reversed(range(self.site_map.n_layers))
        z_H, z_L = (self.part(backward.direction, name) for name in ("z_H", "z_L"))
        z_H = self.attribute_stack(slow, z_H, backward, loop, numbers)
        # Both parts enter the slow stack's sum; the fast cycles follow, the last one first.
        z_L, injected = z_L + z_H, torch.zeros_like(z_L)
        for _ in range(n_fast):
            z_L = self.attribute_stack(fast, z_L, backward, loop, numbers)
            z_H, injected = z_H + z_L, injected + z_L
        backward.at(loop=loop)
        if "hook_injection" in self.site_map.opening:
            backward.direction = injected
            backward.write("injection", backward.read("hook_injection"))
        backward.direction = torch.cat((z_H, z_L), dim=-1)

    def attribute_stack(
        self,
        stack: Any,
        direction: Tensor,
        backward: AttributionPass,
        loop: int,
        numbers: Iterator[int],
    ) -> Tensor:
        backward.direction = direction
        for nth, layer in enumerate(reversed(stack.layers)):
            backward.at(loop=loop, layer=next(numbers))
            if nth == 0:
                self.attribute_after_stack(backward)
            self.attribute_layer(layer, backward)
        return backward.direction

    def start(self, slow: Tensor, fast: Tensor, e: Tensor) -> Tensor:
        # [batch, pos, 2 d_model], in the order of site_map.state_parts: z_H, z_L.
        return torch.cat((slow.expand_as(e), fast.expand_as(e)), dim=-1).to(e)


class HRMTextAdapter(NestedModel):
    """HRM-Text (``HrmTextForCausalLM``) with our addresses; a loop is one of its ``H_cycles``.

    Pre-norm layers with gated attention, and a norm without weights after each stack. The initial
    ``z_H`` is the embedding, which is not injected again.

    Source: ``transformers``, ``models/hrm_text/modeling_hrm_text.py``.

    Args:
        n_prefix: First positions that attend to one another in both directions
            (``token_type_ids`` 1 of the published model): an instruction.

    Raises:
        InputError: If there is a prefix, and the model has ``prefix_lm = False``.
    """

    needs = (
        "model.embed_tokens",
        "model.H_module.layers.0.self_attn.gate_proj",
        "model.L_module.final_norm",
        "model.z_L_init",
        "lm_head",
    )

    @checked
    def __init__(self, published: Any, *, n_prefix: NonNegativeInt = 0) -> None:
        config, inner = published.config, published.model
        self.n_prefix = n_prefix
        if n_prefix and not config.prefix_lm:
            expected, fix = "0 for a model of prefix_lm = False", "Leave n_prefix out."
            raise InputError("n_prefix", expected=expected, given=str(n_prefix), fix=fix)
        first = inner.L_module.layers[0]
        d_head = int(first.self_attn.head_dim)
        layer = layer_sites(before=True, after=False, gate="head")
        stack = [layer] * (len(inner.L_module.layers) - 1)
        stack.append({**layer, **norm_sites("ln_cycle")})
        super().__init__(
            published,
            nested_sites(
                stack,
                stack,
                int(config.L_cycles),
                d_model=inner.embed_tokens.embedding_dim,
                n_heads=first.self_attn.q_proj.out_features // d_head,
                d_head=d_head,
                d_mlp=first.mlp.gate_proj.out_features,
                injects=False,
            ),
            n_loops=int(config.H_cycles),
            d_vocab=inner.embed_tokens.num_embeddings,
            d_vocab_out=published.lm_head.out_features,
            causal=n_prefix < 2,
            options={"n_prefix": n_prefix},
        )

    @property
    def stacks(self) -> tuple[Any, Any, int]:
        inner = self.published.model
        return inner.L_module, inner.H_module, int(self.published.config.L_cycles)

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """The embedding, and ``z_L_init``."""
        return self.start(e, stored(self.published.model, "z_L_init").to(e.device), e)

    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        place = torch.arange(n_pos, device=self.device)
        # [query, key]: earlier positions, and within the prefix all of it.
        seen = (place <= place[:, None]) | (torch.maximum(place, place[:, None]) < self.n_prefix)
        return seen[None]

    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        context = super().length_context(n_pos, all_pairs=all_pairs)
        if self.config.causal:
            return context
        # [1, 1, query, key]: added to the scores
        mask = torch.zeros(1, 1, n_pos, n_pos, device=self.device, dtype=self.dtype)
        return replace(context, mask=mask.masked_fill(~self.visible(n_pos), float("-inf")))

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        # [1, pos]: older transformers want an axis of examples.
        places = torch.arange(n_pos, device=self.device)[None]
        cos, sin = self.published.model.rotary_emb(like, places)
        return cos[0].to(self.device), sin[0].to(self.device)

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        inner = self.published.model
        e = inner.embed_tokens(inputs.long()) * inner.embedding_scale
        return taps.at("top")("hook_embed", e)

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``h + W_O (sigmoid(gate) * attn(norm(h)))``, then ``h + mlp(norm(h))``."""
        attention, mlp, d_head = layer.self_attn, layer.mlp, self.site_map.d_head
        h = tap("hook_resid_pre", h)
        x = rms_norm(tap("hook_attn_in", h), None, layer.input_layernorm.eps, tap, "ln1")
        projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.gate_proj
        q, k, v, gate = (split_heads(project(x), d_head) for project in projections)
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        # [batch, pos, head, d_head], as the hook shows heads
        gate = tap("attn.hook_gate", gate.sigmoid().transpose(1, 2)).transpose(1, 2)
        h = h + tap("hook_attn_out", attention.o_proj(join_heads(gate * z)))
        h = tap("hook_resid_mid", h)
        x = rms_norm(tap("hook_mlp_in", h), None, layer.post_attention_layernorm.eps, tap, "ln2")
        x = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, tap))
        return tap("hook_resid_post", h + tap("hook_mlp_out", x))

    def after_stack(self, stack: Any, h: Tensor, tap: Tap) -> Tensor:
        return rms_norm(h, None, stack.final_norm.eps, tap, "ln_cycle")

    def attribute_after_stack(self, backward: AttributionPass) -> None:
        backward.through_norm("ln_cycle")

    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        backward.write("mlp", backward.read("hook_mlp_out"))
        weight, bias = self.affine(layer.self_attn.o_proj)
        backward.write_heads(weight, bias, gate="attn.hook_gate")

    @property
    def head(self) -> Any:
        return self.published.lm_head
