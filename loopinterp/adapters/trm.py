r"""TRM: as HRM, with one stack for both parts of the state.

.. math::
    z_L \leftarrow f(z_L + (z_H + e)) \; \text{(n times)}, \qquad z_H \leftarrow f(z_H + z_L)

Source: arXiv 2510.04871, and the published ``trm.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from loopinterp.adapters.hrm import HRMAdapter
from loopinterp.adapters.published_layers import rms_norm
from loopinterp.models.positions import AttentionContext
from loopinterp.models.site_map import Sites
from loopinterp.models.taps import Tap

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.way_back import WayBack


class TRMAdapter(HRMAdapter):
    """TRM (``TinyRecursiveReasoningModel_ACTV1``) with our addresses; a loop is one slow cycle.

    With ``mlp_t`` an MLP over the positions stands where attention is, and shows
    ``hook_mix_out`` and its neurons, ``mlp_t.hook_post`` ``[batch, feature, neuron]``. The norm
    after it is over positions too: ``ln1_post.hook_scale`` is ``[batch, feature, 1]``.
    """

    needs = (
        "inner.embed_tokens.embedding_weight",
        "inner.L_level.layers.0.mlp.gate_up_proj",
        "inner.q_head",
        "inner.H_init",
    )

    @classmethod
    def fits(cls, model: object) -> bool:
        """Whether a model has the parts, and no slow stack of its own."""
        return super().fits(model) and not HRMAdapter.fits(model)

    @staticmethod
    def _stacks_of(inner: Any) -> tuple[Any, Any, int]:
        return inner.L_level, inner.L_level, int(inner.config.L_cycles)

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(stop)``, or ``sigmoid(stop - go on)`` where the model learnt to go on."""
        if not self.published.inner.config.no_ACT_continue:
            return super().exit_probability(state)
        stop = self.halting(state)[..., 0].float()
        return stop.sigmoid()[..., None].expand(state.shape[:-1])

    def _layer_sites(self) -> Sites:
        if not self._mixing:
            return super()._layer_sites()
        attention = {"hook_attn_out"}
        sites = super()._layer_sites()
        kept = {
            name: kind
            for name, kind in sites.items()
            if not name.startswith(("attn.", "ln1_post.")) and name not in attention
        }
        first = {
            "hook_resid_pre": "residual",
            "mlp_t.hook_post": "pos_neuron",
            "hook_mix_out": "residual",
            "ln1_post.hook_scale": "feature_scale",
            "ln1_post.hook_normalized": "turned",
        }
        return {**first, **kept}

    def _mix(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        if not self._mixing:
            return super()._mix(layer, h, context, tap)
        x = h.mT  # [batch, feature, pos]: the norm is over positions too
        pre, linear = layer.mlp_t.gate_up_proj(x).chunk(2, dim=-1)
        neurons = tap("mlp_t.hook_post", F.silu(pre) * linear)
        x = tap("hook_mix_out", layer.mlp_t.down_proj(neurons).mT)
        return rms_norm((h + x).mT, None, layer.norm_eps, tap, "ln1_post").mT

    def _mix_back(self, layer: Any, way: WayBack) -> None:
        if not self._mixing:
            super()._mix_back(layer, way)
            return
        way.through_scale(1 / way.read("ln1_post.hook_scale").mT)
        way.write("mixing", way.read("hook_mix_out"))
