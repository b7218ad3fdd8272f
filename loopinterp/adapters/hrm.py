r"""HRM and TRM: post-norm layers in nested loops over all positions at once.

TRM has one stack for both cycles. The published code of HRM runs segments of ``H_cycles`` slow
cycles, with gradients in the last step and a halting head after each; here every cycle has both.

Sources: arXiv 2506.21734 and the published ``hrm_act_v1.py``; arXiv 2510.04871 and ``trm.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from loopinterp.adapters.nested_loops import NestedModel, nested_sites
from loopinterp.adapters.published_model import (
    gated,
    join_heads,
    layer_sites,
    rms_norm,
    rotate_halves,
    split_heads,
)
from loopinterp.core.errors import InputError
from loopinterp.models.layers import attend
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


# Sites of an MLP over the positions, in place of those of attention
_MIXING = {
    "hook_resid_pre": "residual",
    "mlp_t.hook_post": "pos_neuron",
    "hook_mix_out": "residual",
    "ln1_post.hook_scale": "feature_scale",
    "ln1_post.hook_normalized": "turned",
}


class HRMAdapter(NestedModel):
    """HRM (``HierarchicalReasoningModel_ACTV1``) with our addresses; a loop is one slow cycle.

    Puzzle embeddings have positions before those of the tokens, also in inputs, states and logits
    (:meth:`with_puzzle`).
    """

    needs = (
        "inner.embed_tokens.embedding_weight",
        "inner.H_level.layers.0.self_attn.qkv_proj",
        "inner.L_level.layers.0.mlp.gate_up_proj",
        "inner.q_head",
        "inner.H_init",
        "inner.L_init",
    )

    several_devices = offloads = False  # weights are read without a call

    _slow_stack = "H_level"

    def __init__(self, published: Any) -> None:
        inner, config = published.inner, published.inner.config
        fast, slow = inner.L_level, getattr(inner, self._slow_stack)
        self._mixing = getattr(config, "mlp_t", False)
        self._rotary = config.pos_encodings == "rope"
        layer = layer_sites(before=False, after=True, of_sum=True, rotary=self._rotary)
        if self._mixing:
            attention = ("attn.", "ln1_post.", "hook_attn_out")
            layer = _MIXING | {k: x for k, x in layer.items() if not k.startswith(attention)}
        embedding = {"hook_embed": "residual"}
        if config.pos_encodings == "learned":
            embedding["hook_pos_embed"] = "residual"
        n_heads, width = int(config.num_heads), int(config.hidden_size)
        first = fast.layers[0]
        neurons = first.mlp_t.down_proj.weight.shape[1] if self._mixing else 0
        self.n_puzzle_positions = int(inner.puzzle_emb_len) if hasattr(inner, "puzzle_emb") else 0
        super().__init__(
            published,
            nested_sites(
                [layer] * len(fast.layers),
                [layer] * len(slow.layers),
                int(config.L_cycles),
                d_model=width,
                n_heads=n_heads,
                d_head=width // n_heads,
                d_mlp=first.mlp.down_proj.weight.shape[1],
                embedding=embedding,
                closing={"hook_halt": "halt"},
                more_axes={
                    "halt": (2,),
                    "pos_neuron": (width, neurons),
                    "feature_scale": (width, 1),
                    "turned": (width, "pos"),
                },
            ),
            n_loops=int(config.H_cycles) * int(config.halt_max_steps),
            d_vocab=inner.embed_tokens.embedding_weight.shape[0],
            d_vocab_out=inner.lm_head.weight.shape[0],
            causal=False,
            n_ctx=int(config.seq_len) + self.n_puzzle_positions,
        )

    @property
    def stacks(self) -> tuple[Any, Any, int]:
        inner = self.published.inner
        return inner.L_level, getattr(inner, self._slow_stack), int(inner.config.L_cycles)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations, to which the weights are cast."""
        return self.published.inner.forward_dtype

    def float(self) -> HRMAdapter:
        """Weights and activations in float32."""
        self.published.inner.forward_dtype = torch.float32
        self.published.inner.config.forward_dtype = "float32"
        for module in self.published.modules():  # embeddings cast their rows
            if hasattr(module, "cast_to"):
                module.cast_to = torch.float32
        return super().float()

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """``H_init`` and ``L_init``, the same at every position."""
        return self.start(self.published.inner.H_init, self.published.inner.L_init, e)

    def with_puzzle(
        self, tokens: Integer[Tensor, "batch pos"], puzzles: Integer[Tensor, " batch"]
    ) -> Integer[Tensor, "batch place"]:
        """The model's inputs: the number of each puzzle at its positions, then the tokens."""
        places = puzzles.to(tokens.device)[:, None].expand(-1, self.n_puzzle_positions)
        return torch.cat((places, tokens), dim=1)  # in the wider of their types

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        n_puzzle = self.n_puzzle_positions
        if n_puzzle and isinstance(inputs, torch.Tensor) and inputs.dim() == 2:
            number = len(self.published.inner.puzzle_emb.weights)
            puzzle = inputs[:, :n_puzzle]
            # [batch, puzzle pos]: one number that the model has, the same at all its positions.
            good = (puzzle == puzzle[:, :1]) & (puzzle >= 0) & (puzzle < number)
            if not (inputs.shape[1] > n_puzzle and good.all()):
                expected = f"a puzzle's number below {number} at the first {n_puzzle} positions"
                got = f"{inputs.shape[1]} positions, {puzzle[~good.all(1)][:1].tolist()} of them"
                fix = "Pass model.with_puzzle(tokens, puzzles)."
                raise InputError("inputs", expected=expected, given=got, fix=fix)
            inputs = torch.cat((torch.zeros_like(puzzle), inputs[:, n_puzzle:]), dim=1)
        super().check_inputs(inputs, position_offset=position_offset)

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor] | None:
        if not self._rotary:
            return None
        cos, sin = self.published.inner.rotary_emb()
        return cos[:n_pos], sin[:n_pos]

    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        if self._mixing and n_pos != self.config.n_ctx:
            expected = f"{self.config.n_ctx} positions, which an MLP mixes"
            fix = "Pad the input as in training."
            raise InputError("inputs", expected=expected, given=str(n_pos), fix=fix)
        return super().length_context(n_pos, all_pairs=all_pairs)

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        inner, top, prefix = self.published.inner, taps.at("top"), self.n_puzzle_positions
        e = inner.embed_tokens(inputs[:, prefix:].int())
        if prefix:
            # [batch, n * d_model], filled up with zeros and cut into the puzzle's positions
            puzzle, width = inner.puzzle_emb, e.shape[-1]
            vectors = puzzle.weights[inputs[:, 0].long()].to(puzzle.cast_to)
            vectors = F.pad(vectors, (0, prefix * width - vectors.shape[-1]))
            e = torch.cat((vectors.unflatten(-1, (-1, width)), e), dim=1)
        if inner.config.pos_encodings != "learned":
            return top("hook_embed", inner.embed_scale * e)
        scale = inner.embed_scale * 0.707106781  # as the published code spells the root of a half
        place = inner.embed_pos.embedding_weight[: e.shape[1]].to(e)
        return top("hook_embed", scale * e) + top("hook_pos_embed", (scale * place).expand_as(e))

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``norm(h + attn(h))``, then ``norm(h + mlp(h))``, by norms without weights."""
        h = self.mix(layer, tap("hook_resid_pre", h), context, tap)
        h = tap("hook_resid_mid", h)
        # [batch, pos, d_mlp] each
        pre, linear = layer.mlp.gate_up_proj(tap("hook_mlp_in", h)).chunk(2, dim=-1)
        x = layer.mlp.down_proj(gated(pre, linear, F.silu, tap))
        h = rms_norm(h + tap("hook_mlp_out", x), None, layer.norm_eps, tap, "ln2_post")
        return tap("hook_resid_post", h)

    def mix(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        d_head, x = self.site_map.d_head, layer.self_attn.qkv_proj(tap("hook_attn_in", h))
        q, k, v = (split_heads(part, d_head) for part in x.chunk(3, dim=-1))
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        x = tap("hook_attn_out", layer.self_attn.o_proj(join_heads(z)))
        return rms_norm(h + x, None, layer.norm_eps, tap, "ln1_post")

    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        backward.through_norm("ln2_post")
        backward.write("mlp", backward.read("hook_mlp_out"))
        self.attribute_mix(layer, backward)

    def attribute_mix(self, layer: Any, backward: AttributionPass) -> None:
        backward.through_norm("ln1_post")
        backward.write_heads(*self.affine(layer.self_attn.o_proj))

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        h, tap = super().run_loop(h, e, context, taps, loop), taps.at("block", loop)
        if tap.listens("hook_halt"):
            tap("hook_halt", self.halting(h))
        return h

    def halting(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch answer"]:
        """The halting head's two numbers at the first position: to stop, and to go on."""
        return self.published.inner.q_head(self.part(state, "z_H")[..., 0, :])

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(stop - go on)``, above a half where the published code halts."""
        # [..., batch], the same at every position
        stop, go_on = self.halting(state).float().unbind(-1)
        return (stop - go_on).sigmoid()[..., None].expand(state.shape[:-1])

    @property
    def head(self) -> Any:
        return self.published.inner.lm_head


class TRMAdapter(HRMAdapter):
    """TRM (``TinyRecursiveReasoningModel_ACTV1``) with our addresses; a loop is one slow cycle.

    With ``mlp_t`` an MLP over the positions replaces attention, with the sites ``hook_mix_out`` and
    ``mlp_t.hook_post`` ``[batch, feature, neuron]``; ``ln1_post.hook_scale`` is then
    ``[batch, feature, 1]``.
    """

    needs = (
        "inner.embed_tokens.embedding_weight",
        "inner.L_level.layers.0.mlp.gate_up_proj",
        "inner.q_head",
        "inner.H_init",
        "inner.L_init",
    )

    _slow_stack = "L_level"  # one stack for both

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether a model has the parts, and no slow stack of its own."""
        return super().fits(model) and not hasattr(model.inner, "H_level")

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(stop)``, or ``sigmoid(stop - go on)`` where the model learnt to go on."""
        if not self.published.inner.config.no_ACT_continue:
            return super().exit_probability(state)
        stop = self.halting(state)[..., 0].float()  # [..., batch], the same at every position
        return stop.sigmoid()[..., None].expand(state.shape[:-1])

    def mix(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        if not self._mixing:
            return super().mix(layer, h, context, tap)
        x = h.mT  # [batch, feature, pos]: the norm is over positions too
        pre, linear = layer.mlp_t.gate_up_proj(x).chunk(2, dim=-1)
        neurons = tap("mlp_t.hook_post", F.silu(pre) * linear)
        x = tap("hook_mix_out", layer.mlp_t.down_proj(neurons).mT)
        return rms_norm((h + x).mT, None, layer.norm_eps, tap, "ln1_post").mT

    def attribute_mix(self, layer: Any, backward: AttributionPass) -> None:
        if not self._mixing:
            super().attribute_mix(layer, backward)
            return
        backward.through_scale(1 / backward.read("ln1_post.hook_scale").mT)
        backward.write("mixing", backward.read("hook_mix_out"))
