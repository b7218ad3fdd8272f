r"""A stack of Llama's layers that is applied again and again: Ouro and Nanbeige4.2.

.. math::
    h_0 = \operatorname{embed}(x), \qquad h_{t+1} = \operatorname{norm}(\operatorname{stack}(h_t))

The head reads logits from the state of any loop. Ouro has sandwich norms, and a gate after each
loop. Nanbeige4.2 applies the layers of Llama twice (3B: 22 layers, 2 loops).

Sources: arXiv 2510.25741, and the published ``modeling_ouro.py`` and ``modeling_nanbeige.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from loopinterp.adapters.published_model import (
    PublishedModel,
    gated,
    half_rotation,
    join_heads,
    layer_sites,
    need_angles,
    rotate_halves,
    split_heads,
    weighted_norm,
)
from loopinterp.core.errors import InputError
from loopinterp.models.addresses import SiteMap, Sites, norm_sites
from loopinterp.models.layers import attend
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.weights import call, placed, stored

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


class LlamaLoops(PublishedModel):
    """A looped stack of Llama's layers, with ``model.norm`` after each loop."""

    sandwich: ClassVar[bool] = False  # norms after attention and MLP (input_layernorm_2 …) too

    def __init__(self, published: Any, rotary: str, *, n_loops: int, closing: Sites) -> None:
        """``rotary`` is the path of the module with the angles, ``closing`` a loop's last sites."""
        inner = published.model
        need_angles(published, rotary)
        attention, mlp = inner.layers[0].self_attn, inner.layers[0].mlp
        d_head = int(attention.head_dim)
        n_heads = attention.q_proj.out_features // d_head
        n_kv = attention.k_proj.out_features // d_head
        layer = layer_sites(before=True, after=self.sandwich, grouped=n_kv < n_heads)
        sites = SiteMap(
            d_model=inner.embed_tokens.embedding_dim,
            n_heads=n_heads,
            n_kv_heads=n_kv,
            d_head=d_head,
            d_mlp=mlp.gate_proj.out_features,
            embedding={"hook_embed": "residual"},
            opening={"hook_state_pre": "state"},
            block=(layer,) * len(inner.layers),
            closing={**norm_sites("ln_loop"), "hook_state_post": "state", **closing},
        )
        super().__init__(
            published,
            sites,
            n_loops=n_loops,
            d_vocab=inner.embed_tokens.num_embeddings,
            d_vocab_out=published.lm_head.out_features,
        )
        self._rotary_path = rotary

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor]:
        return half_rotation(self.published.get_submodule(self._rotary_path), n_pos, self)

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        e = self.published.model.embed_tokens(inputs.long())
        return taps.at("top")("hook_embed", e)

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, inner = taps.at("block", loop), self.published.model
        h = tap("hook_state_pre", h)
        for k, layer in enumerate(inner.layers):
            h = placed(self.layer, layer, h, context, taps.at("block", loop, k))
        return tap("hook_state_post", self.end_loop(h, e, tap))

    def end_loop(self, h: Tensor, e: Tensor, tap: Tap = SILENT) -> Tensor:
        """``model.norm`` of the last layer's output."""
        return weighted_norm(self.published.model.norm, h, tap, "ln_loop")

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``h + attn(norm(h))``, and the same for the MLP; a sandwich norms what is added."""
        attention, mlp = layer.self_attn, layer.mlp
        h = tap("hook_resid_pre", h)
        x = weighted_norm(layer.input_layernorm, tap("hook_attn_in", h), tap, "ln1")
        q, k, v = (
            split_heads(project(x), self.site_map.d_head)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        x = attention.o_proj(join_heads(z))
        if self.sandwich:
            x = weighted_norm(layer.input_layernorm_2, x, tap, "ln1_post")
        h = tap("hook_resid_mid", h + tap("hook_attn_out", x))
        x = weighted_norm(layer.post_attention_layernorm, tap("hook_mlp_in", h), tap, "ln2")
        # [batch, pos, d_mlp] inside, back to d_model for the stream.
        x = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, tap))
        if self.sandwich:
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
        for layer in backward.backwards(inner.layers, loop=loop):
            backward.write("mlp", backward.read("hook_mlp_out"))  # what its norm leaves
            with backward.branch():
                if self.sandwich:
                    backward.through_norm("ln1_post", stored(layer.input_layernorm_2, "weight"))
                backward.write_heads(*self.affine(layer.self_attn.o_proj))


class OuroAdapter(LlamaLoops):
    """Ouro (``OuroForCausalLM``) with our addresses; ``model.norm`` is the loop norm.

    Raises:
        InputError: If a layer attends within a sliding window, or the angles of positions were
            lost in loading.
    """

    sandwich = True

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
        if "sliding_attention" in (getattr(published.config, "layer_types", None) or ()):
            fix = "Load it with use_sliding_window=False, as published."
            got = "layer_types = sliding_attention"
            raise InputError("model", expected="full attention", given=got, fix=fix)
        super().__init__(
            published,
            "model.rotary_emb",
            n_loops=int(published.model.total_ut_steps),
            closing={"hook_exit_gate": "scale"},
        )

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(early_exit_gate(h))``: to stop at a loop, if it has not stopped before."""
        return call(self.published.model.early_exit_gate, state).sigmoid().squeeze(-1)

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        h, tap = super().run_loop(h, e, context, taps, loop), taps.at("block", loop)
        if tap.listens("hook_exit_gate"):
            tap("hook_exit_gate", self.exit_probability(h)[..., None])  # [batch, pos, 1]
        return h


_ROTARY = "layers.0.self_attn.rotary_emb"
_OFF = (  # settings of the published code that the released model leaves off
    *("enable_double_loop_split", "skip_loop_final_norm", "enable_hyper_connection"),
    *("enable_depth_attention", "qk_layernorm", "loop_share_kv", "emb_neighbor_num"),
)


class NanbeigeAdapter(LlamaLoops):
    """Nanbeige4.2 (``NanbeigeForCausalLM``) with our addresses; ``model.norm`` is the loop norm.

    Raises:
        InputError: If the model has one of the code's further options, or the angles of positions
            were lost in loading.
    """

    needs = (
        "model.embed_tokens",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.ngram_layer_fusion",
        "model._get_num_loops",
        "model.norm",
        "lm_head",
    )

    def __init__(self, published: Any) -> None:
        config, inner = published.config, published.model
        on = [name for name in _OFF if getattr(config, name, None)]
        if getattr(inner.get_submodule(_ROTARY), "scaling_factor", 1.0) != 1.0:
            on.append("rope_scaling")
        if on:
            expected, got = "the options of Nanbeige4.2-3B", f"{', '.join(on)} as well"
            fix = "Pass repeat='model.layers' and inputs= for a generic adapter."
            raise InputError("model", expected=expected, given=got, fix=fix)
        n_loops = int(inner._get_num_loops())  # by num_loops, or by the weights of their losses
        super().__init__(published, f"model.{_ROTARY}", n_loops=n_loops, closing={})
