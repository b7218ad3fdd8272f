r"""Huginn (Raven): a prelude, a core that loops on state and input, a coda.

.. math::
    e = \operatorname{prelude}(x), \qquad h_0 \sim \mathcal N, \qquad
    h_{t+1} = \operatorname{core}(A [h_t; e])

Source: arXiv 2502.05171, and the published ``raven_modeling_minimal.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

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
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.core.settings import Seed
from loopinterp.models.addresses import SiteMap, norm_sites
from loopinterp.models.layers import attend
from loopinterp.models.positions import AttentionContext, rotate
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.weights import call, placed, stored

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


class HuginnAdapter(PublishedModel):
    """Huginn (``RavenForCausalLM``) with our addresses; norms after a sublayer are of the sum.

    Args:
        seed: Seed of the initial noise, the same for every example and length. The published code
            draws anew in each run: pass ``state=`` for a draw of yours.

    Raises:
        InputError: If the model draws noise at each step.
    """

    needs = (
        "transformer.wte",
        "transformer.prelude",
        "transformer.adapter",
        "transformer.core_block.0.norm_4",
        "transformer.coda",
        "transformer.ln_f",
        "freqs_cis",
        "lm_head",
    )

    _norms_sums: ClassVar[bool] = True  # after attention and MLP, and the state before the coda

    @checked
    def __init__(self, published: Any, *, seed: Seed = 0) -> None:
        config, parts = published.config, published.transformer
        if noise := getattr(config, "test_time_noise", 0):
            expected, fix = "steps without noise", "Set model.config.test_time_noise = 0."
            got = f"test_time_noise = {noise}"
            raise InputError("model", expected=expected, given=got, fix=fix)
        self._seed, sums = seed, self._norms_sums
        n_heads, n_kv = int(config.num_attention_heads), int(config.num_key_value_heads)
        layer = layer_sites(before=True, after=sums, of_sum=sums, grouped=n_kv < n_heads)
        super().__init__(
            published,
            SiteMap(
                d_model=int(config.n_embd),
                n_heads=n_heads,
                n_kv_heads=n_kv,
                d_head=int(config.n_embd) // n_heads,
                d_mlp=parts["core_block"][0].mlp.proj.in_features,
                embedding={"hook_embed": "residual"},
                prelude=(layer,) * len(parts["prelude"]),
                opening={"hook_state_pre": "state", "hook_injection": "residual"},
                block=(layer,) * len(parts["core_block"]),
                closing={"hook_state_post": "state"},
                entry=norm_sites("ln_coda", present=sums),
                coda=(layer,) * len(parts["coda"]),
                final=norm_sites("ln_final"),
            ),
            n_loops=int(config.mean_recurrence),
            d_vocab=parts["wte"].num_embeddings,
            d_vocab_out=published.lm_head.out_features,
            n_ctx=self._most_positions(published),
            options={"seed": seed},
        )

    starts_by_place = True

    def _most_positions(self, published: Any) -> int | None:
        return published.freqs_cis.shape[1]

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """Seeded normal noise, cut off at three standard deviations, at the scale of ``e``."""
        std = float(self.published.config.init_values["std"])
        generator = torch.Generator().manual_seed(self._seed)
        # By the inverse of the distribution: uniform numbers are the same at every length.
        below = torch.rand(e.shape[1:], generator=generator, dtype=torch.float64)
        least = math.erfc(3 / math.sqrt(2)) / 2
        # [pos, d_state]: normal quantiles of the share between -3 and 3 deviations.
        noise = torch.special.ndtri(least + (1 - 2 * least) * below)
        return (noise * std * float(self.published.emb_scale)).to(e).expand_as(e)

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor]:
        turns = stored(self.published, "freqs_cis")[0, :n_pos, 0]  # [pos, d_head / 2, 2]
        turns = turns.float().to(self.device)
        cos, sin = turns.repeat_interleave(2, dim=1).unbind(-1)
        return cos, sin

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        parts = self.published.transformer
        e = parts["wte"](inputs.long()) * float(self.published.emb_scale)
        e = taps.at("top")("hook_embed", e)
        for k, layer in enumerate(parts["prelude"]):
            e = placed(self.layer, layer, e, context, taps.at("prelude", None, k))
        return e

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, parts = taps.at("block", loop), self.published.transformer
        h, e = tap("hook_state_pre", h), tap("hook_injection", e)
        # [batch, pos, 2 * d_model]: state and input side by side
        h = call(parts["adapter"], torch.cat([h, e], dim=-1))
        for k, layer in enumerate(parts["core_block"]):
            h = placed(self.layer, layer, h, context, taps.at("block", loop, k))
        return tap("hook_state_post", h)

    def end_loop(self, h: Tensor, e: Tensor) -> Tensor:
        return h

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``norm(h + attn(norm(h)))``, and the same for the MLP."""
        h = self.add_attention(layer, tap("hook_resid_pre", h), context, tap)
        h = tap("hook_resid_mid", weighted_norm(layer.norm_2, h, tap, "ln1_post"))
        h = self.add_mlp(layer, layer.norm_3, h, tap)
        return tap("hook_resid_post", weighted_norm(layer.norm_4, h, tap, "ln2_post"))

    def add_attention(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        attention, sizes = layer.attn, self.site_map
        n_kv = (sizes.n_kv_heads or sizes.n_heads) * sizes.d_head
        # [batch, pos, heads * d_head] of queries, keys and values, split into heads
        x = attention.Wqkv(weighted_norm(layer.norm_1, tap("hook_attn_in", h), tap, "ln1"))
        q, k, v = x.split((sizes.d_model, n_kv, n_kv), dim=-1)
        q, k, v = (split_heads(part, sizes.d_head) for part in (q, k, v))
        bias = stored(attention, "qk_bias")  # [2, 1, head, d_head]
        if bias is not None:
            q, k = (x + b.transpose(0, 1) for x, b in zip((q, k), bias))
        z = attend(q, k, v, context, tap, turn=self.turn)
        return h + tap("hook_attn_out", attention.proj(join_heads(z)))

    def add_mlp(self, layer: Any, norm: Any, h: Tensor, tap: Tap) -> Tensor:
        mlp, x = layer.mlp, weighted_norm(norm, tap("hook_mlp_in", h), tap, "ln2")
        pre, linear = mlp.fc(x).chunk(2, dim=-1)  # [batch, pos, d_mlp] each
        return h + tap("hook_mlp_out", mlp.proj(gated(pre, linear, mlp.nonlin, tap)))

    @staticmethod
    def turn(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Turn neighbouring features, in float32 as the published code does."""
        return rotate(x.float(), rotation).to(x.dtype)

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        parts, top = self.published.transformer, taps.at("top")
        if context is None:
            context = self.length_context(h.shape[1])
        if self._norms_sums:
            h = weighted_norm(parts["ln_f"], h, top, "ln_coda")
        for k, layer in enumerate(parts["coda"]):
            h = placed(self.layer, layer, h, context, taps.at("coda", None, k))
        return call(self.published.lm_head, weighted_norm(parts["ln_f"], h, top, "ln_final"))

    def attribute_readout(self, backward: AttributionPass) -> None:
        parts = self.published.transformer
        backward.through_unembedding(*self.affine(self.published.lm_head))
        backward.through_norm("ln_final", stored(parts["ln_f"], "weight"))
        for layer in backward.backwards(parts["coda"]):
            self.attribute_layer(layer, backward)
        if self._norms_sums:
            backward.through_norm("ln_coda", stored(parts["ln_f"], "weight"))

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        parts = self.published.transformer
        for layer in backward.backwards(parts["core_block"], loop=loop):
            self.attribute_layer(layer, backward)
        weight, bias = self.affine(parts["adapter"])
        # The adapter reads [h; e]: its weights are two maps side by side.
        of_state, of_input = weight.chunk(2, dim=1)
        if bias is not None:
            backward.write("adapter bias", bias)
        with backward.branch():
            backward.through_linear(of_input)
            backward.write("injection", backward.read("hook_injection"))
        backward.through_linear(of_state)

    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        backward.through_norm("ln2_post", stored(layer.norm_4, "weight"))
        backward.write("mlp", backward.read("hook_mlp_out"))
        backward.through_norm("ln1_post", stored(layer.norm_2, "weight"))
        backward.write_heads(*self.affine(layer.attn.proj))


class RetrofittedAdapter(HuginnAdapter):
    """A Llama that was cut up and trained to loop as Huginn does, with our addresses.

    Only the last norm precedes the head. OLMo's layers, which norm queries and keys, need the
    generic adapter (``repeat="transformer.core_block"``).

    Raises:
        InputError: If the model draws noise at each step, or lost its angles in loading.

    Source: arXiv 2511.07384, and ``raven_modeling_minimal_llama.py``.
    """

    needs = (
        "transformer.wte",
        "transformer.prelude",
        "transformer.adapter",
        "transformer.core_block.0.norm_2",
        "transformer.coda",
        "transformer.ln_f",
        "rotary_emb.inv_freq",
        "lm_head",
    )

    _norms_sums = False

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether a model has the parts, and layers of Llama's."""
        if not super().fits(model):
            return False
        layer = model.transformer.core_block[0]
        return not (hasattr(layer, "norm_3") or hasattr(layer.attn, "q_norm"))

    def _most_positions(self, published: Any) -> None:
        need_angles(published, "rotary_emb")

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor]:
        return half_rotation(self.published.rotary_emb, n_pos, self)

    turn = staticmethod(rotate_halves)

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``h + attn(norm(h))``, then ``h + mlp(norm(h))``."""
        h = self.add_attention(layer, tap("hook_resid_pre", h), context, tap)
        h = self.add_mlp(layer, layer.norm_2, tap("hook_resid_mid", h), tap)
        return tap("hook_resid_post", h)

    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        backward.write("mlp", backward.read("hook_mlp_out"))
        backward.write_heads(layer.attn.proj.weight, layer.attn.proj.bias)
