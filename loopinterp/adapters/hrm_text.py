r"""HRM-Text: a slow and a fast stack of pre-norm layers with gated attention, in nested loops.

.. math::
    z_H = \operatorname{embed}(x), \; z_L = z_0; \qquad
    z_L \leftarrow \operatorname{fast}(z_L + z_H) \; \text{(3 times)}, \quad
    z_H \leftarrow \operatorname{slow}(z_H + z_L)

Each stack ends in a norm without weights; the logits of any loop are the head's of :math:`z_H`.

Source: ``transformers``, ``models/hrm_text/modeling_hrm_text.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt

from loopinterp.adapters.nested_loops import NestedModel, nested_sites
from loopinterp.adapters.published_model import (
    gated,
    join_heads,
    layer_sites,
    rms_norm,
    rotate_halves,
    split_heads,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.models.addresses import norm_sites
from loopinterp.models.attention import attend
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


class HRMTextAdapter(NestedModel):
    """HRM-Text (``HrmTextForCausalLM``) with our addresses; a loop is one of its ``H_cycles``.

    Args:
        published: The model.
        n_prefix: Positions at the start of every input that attend to one another in both
            directions, as the published model's do where ``token_type_ids`` are 1: an instruction.

    Raises:
        InputError: If there is a prefix, and the model is not one of those that know any.
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
            expected = "0 for a model of prefix_lm = False, which is causal throughout"
            fix = "Leave n_prefix out."
            raise InputError("n_prefix", expected=expected, given=str(n_prefix), fix=fix)
        first = inner.L_module.layers[0]
        self._d_head = int(first.self_attn.head_dim)
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
                n_heads=first.self_attn.q_proj.out_features // self._d_head,
                d_head=self._d_head,
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
        return self.start(e, self.published.model.z_L_init, e)

    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        """True where a query may attend, of so many positions."""
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
        cos, sin = self.published.model.rotary_emb(like, torch.arange(n_pos, device=self.device))
        return cos, sin

    def run_embedding(
        self, inputs: Tensor, context: AttentionContext, added: Tensor | None, taps: Taps = NO_TAPS
    ) -> Tensor:
        inner = self.published.model
        e = inner.embed_tokens(inputs.long()) * inner.embedding_scale
        return taps.at("top")("hook_embed", e)

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``h + W_O (sigmoid(gate) * attn(norm(h)))``, then ``h + mlp(norm(h))``."""
        attention, mlp = layer.self_attn, layer.mlp
        h = tap("hook_resid_pre", h)
        x = rms_norm(h, None, layer.input_layernorm.eps, tap, "ln1")
        projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.gate_proj
        q, k, v, gate = (split_heads(project(x), self._d_head) for project in projections)
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        # [batch, pos, head, d_head], as the hook shows heads
        gate = tap("attn.hook_gate", gate.sigmoid().transpose(1, 2)).transpose(1, 2)
        h = h + tap("hook_attn_out", attention.o_proj(join_heads(gate * z)))
        h = tap("hook_resid_mid", h)
        x = rms_norm(h, None, layer.post_attention_layernorm.eps, tap, "ln2")
        x = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, tap))
        return tap("hook_resid_post", h + tap("hook_mlp_out", x))

    def after_stack(self, stack: Any, h: Tensor, tap: Tap) -> Tensor:
        return rms_norm(h, None, stack.final_norm.eps, tap, "ln_cycle")

    def attribute_after_stack(self, backward: AttributionPass) -> None:
        backward.through_norm("ln_cycle")

    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        backward.write("mlp", backward.read("hook_mlp_out"))
        projection = layer.self_attn.o_proj
        backward.write_heads(projection.weight, projection.bias, gate="attn.hook_gate")

    @property
    def head(self) -> Any:
        return self.published.lm_head
