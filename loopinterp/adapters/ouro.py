r"""Ouro: a looped stack of sandwich-norm layers, with a norm and a gate after each loop.

.. math::
    h_0 = \operatorname{embed}(x), \qquad h_{t+1} = \operatorname{norm}(\operatorname{stack}(h_t))

The head reads logits from the state of any loop, and the gate the probability to stop there.

Source: arXiv 2510.25741, and the published ``modeling_ouro.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.adapters.published_model import (
    PublishedModel,
    gated,
    join_heads,
    layer_sites,
    rotate_halves,
    split_heads,
    weighted_norm,
)
from loopinterp.core.errors import InputError
from loopinterp.models.addresses import SiteMap, norm_sites
from loopinterp.models.attention import attend
from loopinterp.models.placement import call, placed, stored
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


class OuroAdapter(PublishedModel):
    """Ouro (``OuroForCausalLM``) with our addresses; ``model.norm`` is the loop norm.

    Raises:
        InputError: If a layer attends within a sliding window, or the angles of positions were
            lost in loading.
    """

    needs = (
        "model.embed_tokens",
        "model.layers.0.input_layernorm_2",
        "model.layers.0.post_attention_layernorm_2",
        "model.early_exit_gate",
        "model.norm",
        "model.rotary_emb.inv_freq",
        "lm_head",
    )

    def __init__(self, published: Any) -> None:
        config, inner = published.config, published.model
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            fix = "Load it with use_sliding_window=False, as published."
            got = "layer_types = sliding_attention"
            raise InputError("model", expected="full attention", given=got, fix=fix)
        angles = stored(inner.rotary_emb, "inv_freq")
        if not bool((angles > 0).all() and (angles.diff() < 0).all()):
            # transformers 5 fills in only saved tensors: code for transformers 4 loses its angles.
            got = f"rotary_emb.inv_freq = {angles.tolist()[:4]} …"
            fix = "Set model.model.rotary_emb.inv_freq after loading, and call adapt(model)."
            raise InputError("model", expected="falling frequencies", given=got, fix=fix)
        attention, mlp = inner.layers[0].self_attn, inner.layers[0].mlp
        self._d_head = int(attention.head_dim)
        n_heads = attention.q_proj.out_features // self._d_head
        n_kv = attention.k_proj.out_features // self._d_head
        layer = layer_sites(before=True, after=True, grouped=n_kv < n_heads)
        sites = SiteMap(
            d_model=inner.embed_tokens.embedding_dim,
            n_heads=n_heads,
            n_kv_heads=n_kv,
            d_head=self._d_head,
            d_mlp=mlp.gate_proj.out_features,
            embedding={"hook_embed": "residual"},
            opening={"hook_state_pre": "state"},
            block=(layer,) * len(inner.layers),
            closing=norm_sites("ln_loop") | {"hook_state_post": "state", "hook_exit_gate": "scale"},
        )
        super().__init__(
            published,
            sites,
            n_loops=int(inner.total_ut_steps),
            d_vocab=inner.embed_tokens.num_embeddings,
            d_vocab_out=published.lm_head.out_features,
        )

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(early_exit_gate(h))``: to stop at a loop, if it has not stopped before."""
        return call(self.published.model.early_exit_gate, state).sigmoid().squeeze(-1)

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor]:
        rotary = self.published.model.rotary_emb
        place = torch.arange(n_pos, device=self.device).float()
        # [pos, d_head]: the angles of the first half of the features, and again for the second.
        angles = torch.outer(place, stored(rotary, "inv_freq").to(place)).repeat(1, 2)
        scaling = getattr(rotary, "attention_scaling", 1.0)
        return (angles.cos() * scaling).to(self.dtype), (angles.sin() * scaling).to(self.dtype)

    def run_embedding(
        self, inputs: Tensor, context: AttentionContext, added: Tensor | None, taps: Taps = NO_TAPS
    ) -> Tensor:
        e = self.published.model.embed_tokens(inputs.long())
        return taps.at("top")("hook_embed", e)

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, inner = taps.at("block", loop), self.published.model
        h = tap("hook_state_pre", h)
        for k, layer in enumerate(inner.layers):
            h = placed(self.layer, layer, h, context, taps.at("block", loop, k))
        h = tap("hook_state_post", self.end_loop(h, e, tap))
        if tap.listens("hook_exit_gate"):
            tap("hook_exit_gate", self.exit_probability(h)[..., None])  # [batch, pos, 1]
        return h

    def end_loop(self, h: Tensor, e: Tensor, tap: Tap = SILENT) -> Tensor:
        """The state: ``model.norm`` of the last layer's output."""
        return weighted_norm(self.published.model.norm, h, tap, "ln_loop")

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``h + norm(attn(norm(h)))``, and the same for the MLP."""
        attention, mlp = layer.self_attn, layer.mlp
        h = tap("hook_resid_pre", h)
        x = weighted_norm(layer.input_layernorm, tap("hook_attn_in", h), tap, "ln1")
        q, k, v = (
            split_heads(project(x), self._d_head)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        x = weighted_norm(layer.input_layernorm_2, attention.o_proj(join_heads(z)), tap, "ln1_post")
        h = tap("hook_resid_mid", h + tap("hook_attn_out", x))
        x = weighted_norm(layer.post_attention_layernorm, tap("hook_mlp_in", h), tap, "ln2")
        # [batch, pos, d_mlp] inside, back to d_model for the stream.
        x = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, tap))
        x = weighted_norm(layer.post_attention_layernorm_2, x, tap, "ln2_post")
        return tap("hook_resid_post", h + tap("hook_mlp_out", x))

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        return call(self.published.lm_head, h)

    def attribute_readout(self, backward: AttributionPass) -> None:
        backward.through_unembedding(*self.affine(self.published.lm_head))

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        inner = self.published.model
        backward.at(loop=loop)
        backward.through_norm("ln_loop", stored(inner.norm, "weight"))
        for k in reversed(range(len(inner.layers))):
            backward.at(loop=loop, layer=k)
            backward.write("mlp", backward.read("hook_mlp_out"))  # what its norm leaves
            with backward.branch():
                norm = inner.layers[k].input_layernorm_2
                backward.through_norm("ln1_post", stored(norm, "weight"))
                backward.write_heads(*self.affine(inner.layers[k].self_attn.o_proj))
