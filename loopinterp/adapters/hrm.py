r"""HRM: a slow and a fast stack of post-norm layers, in nested loops over all positions at once.

.. math::
    z_L \leftarrow \operatorname{fast}(z_L + (z_H + e)) \; \text{(n times)}, \qquad
    z_H \leftarrow \operatorname{slow}(z_H + z_L)

The published code runs segments of ``H_cycles`` such cycles, with gradients in the last step of
each alone, and asks its halting head after every segment. Here a loop is one cycle, whatever
segment it is in; all of them have gradients, and the head is read after each.

Source: arXiv 2506.21734, and the published ``hrm_act_v1.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from loopinterp.adapters.nested_loops import NestedModel, nested_sites
from loopinterp.adapters.published_layers import (
    gated,
    join_heads,
    layer_sites,
    rms_norm,
    rotate_halves,
    split_heads,
)
from loopinterp.errors import InputError
from loopinterp.models.multihead_attention import attend
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer
    from torch import Tensor

    from loopinterp.models.site_map import Sites
    from loopinterp.models.way_back import WayBack

_HALF = 0.707106781  # as the published code spells the root of a half


class HRMAdapter(NestedModel):
    """HRM (``HierarchicalReasoningModel_ACTV1``) with our addresses; a loop is one slow cycle.

    A model with puzzle embeddings has some positions before those of its tokens, which say what
    puzzle it is. Here they are positions as any other, of inputs, states and logits: the inputs
    are the puzzle's number at each of them, and then the tokens (:meth:`with_puzzle`).

    Args:
        published: The model.
    """

    needs = (
        "inner.embed_tokens.embedding_weight",
        "inner.H_level.layers.0.self_attn.qkv_proj",
        "inner.L_level.layers.0.mlp.gate_up_proj",
        "inner.q_head",
        "inner.H_init",
    )

    def __init__(self, published: Any) -> None:
        inner, config = published.inner, published.inner.config
        fast, slow, n_fast = self._stacks_of(inner)
        self._mixing = getattr(config, "mlp_t", False)
        self._rotary = config.pos_encodings == "rope"
        layer, learned = self._layer_sites(), config.pos_encodings == "learned"
        added = {"hook_pos_embed": "residual"} if learned else {}
        n_heads, width = int(config.num_heads), int(config.hidden_size)
        mlp = fast.layers[0]
        neurons = mlp.mlp_t.down_proj.weight.shape[1] if self._mixing else 0
        self.n_puzzle_positions = int(inner.puzzle_emb_len) if hasattr(inner, "puzzle_emb") else 0
        places = int(config.seq_len) + self.n_puzzle_positions
        super().__init__(
            published,
            nested_sites(
                [layer] * len(fast.layers),
                [layer] * len(slow.layers),
                n_fast,
                d_model=width,
                n_heads=n_heads,
                d_head=width // n_heads,
                d_mlp=mlp.mlp.down_proj.weight.shape[1],
                embedding={"hook_embed": "residual", **added},
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
            n_ctx=places,
        )

    @staticmethod
    def _stacks_of(inner: Any) -> tuple[Any, Any, int]:
        return inner.L_level, inner.H_level, int(inner.config.L_cycles)

    @property
    def _stacks(self) -> tuple[Any, Any, int]:
        return self._stacks_of(self.published.inner)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations, to which the published code casts its weights."""
        return self.published.inner.forward_dtype

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """``H_init`` and ``L_init``, the same at every position."""
        return self._start(self.published.inner.H_init, self.published.inner.L_init, e)

    # The input

    def with_puzzle(
        self, tokens: Integer[Tensor, "batch pos"], puzzles: Integer[Tensor, " batch"]
    ) -> Integer[Tensor, "batch place"]:
        """The model's inputs: the number of each puzzle at the positions it has, and its tokens."""
        places = puzzles.to(tokens.device)[:, None].expand(-1, self.n_puzzle_positions)
        return torch.cat((places, tokens), dim=1)  # in the wider of their types

    def _context(
        self,
        inputs: Tensor,
        offset: int | Tensor,
        taps: Taps = NO_TAPS,
        *,
        look: bool = True,
        whole: bool = False,
    ) -> AttentionContext:
        tokens = inputs
        if self.n_puzzle_positions and isinstance(inputs, torch.Tensor) and inputs.dim() == 2:
            known_from = self.n_puzzle_positions
            if inputs.shape[1] <= known_from:
                raise InputError(
                    "inputs",
                    expected=f"the number of a puzzle at {known_from} positions, and tokens",
                    given=f"{inputs.shape[1]} positions",
                    fix="Pass model.with_puzzle(tokens, puzzles).",
                )
            puzzle, known = inputs[:, :known_from], inputs[:, known_from:]
            if look:
                self._check_puzzle(puzzle)
            tokens = torch.cat((torch.zeros_like(puzzle), known), dim=1)
        return super()._context(tokens, offset, taps, look=look, whole=whole)

    def _check_puzzle(self, puzzle: Tensor) -> None:
        number = len(self.published.inner.puzzle_emb.weights)
        good = (puzzle == puzzle[:, :1]) & (puzzle >= 0) & (puzzle < number)
        if not good.all():
            raise InputError(
                "inputs",
                expected=f"the number of a puzzle, 0 to {number - 1}, the same at the first "
                f"{self.n_puzzle_positions} positions of each example",
                given=str(puzzle[~good.all(1)][0].tolist()),
                fix="Pass model.with_puzzle(tokens, puzzles).",
            )

    def _rotation(self, n_pos: int) -> tuple[Tensor, Tensor] | None:
        if not self._rotary:
            return None
        cos, sin = self.published.inner.rotary_emb()
        return cos[:n_pos], sin[:n_pos]

    def _length_context(
        self, n_pos: int, taps: Taps = NO_TAPS, *, whole: bool = False
    ) -> AttentionContext:
        if self._mixing and n_pos != self.config.n_ctx:
            raise InputError(
                "inputs",
                expected=f"{self.config.n_ctx} positions, which an MLP mixes",
                given=str(n_pos),
                fix="Pad the input as in training.",
            )
        return super()._length_context(n_pos, taps, whole=whole)

    def _embed(
        self,
        inputs: Tensor,
        context: AttentionContext,
        positions: Tensor | None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        inner, top, prefix = self.published.inner, taps.at("top"), self.n_puzzle_positions
        e = inner.embed_tokens(inputs[:, prefix:].int())
        if prefix:
            e = torch.cat((self._puzzle(inputs[:, 0]), e), dim=1)
        if inner.config.pos_encodings != "learned":
            return top("hook_embed", inner.embed_scale * e)
        scale = inner.embed_scale * _HALF
        place = inner.embed_pos.embedding_weight[: e.shape[1]].to(e)
        return top("hook_embed", scale * e) + top("hook_pos_embed", (scale * place).expand_as(e))

    def _puzzle(self, number: Int[Tensor, " batch"]) -> Float[Tensor, "batch place d_model"]:
        """What a puzzle says of itself, over the positions it has."""
        known, width = self.published.inner.puzzle_emb, self.site_map.d_model
        vectors = known.weights[number.long()].to(known.cast_to)
        vectors = F.pad(vectors, (0, self.n_puzzle_positions * width - vectors.shape[-1]))
        return vectors.unflatten(-1, (-1, width))

    # The layers

    def _layer_sites(self) -> Sites:
        return layer_sites(before=False, after=True, rotary=self._rotary)

    def _layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``norm(h + attn(h))``, then ``norm(h + mlp(h))``, by norms without weights."""
        h = self._mix(layer, tap("hook_resid_pre", h), context, tap)
        h = tap("hook_resid_mid", h)
        pre, linear = layer.mlp.gate_up_proj(h).chunk(2, dim=-1)
        x = layer.mlp.down_proj(gated(pre, linear, F.silu, tap))
        h = rms_norm(h + tap("hook_mlp_out", x), None, layer.norm_eps, tap, "ln2_post")
        return tap("hook_resid_post", h)

    def _mix(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        """What a layer lets positions tell one another."""
        d_head = self.site_map.d_head
        q, k, v = (split_heads(x, d_head) for x in layer.self_attn.qkv_proj(h).chunk(3, dim=-1))
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        x = tap("hook_attn_out", layer.self_attn.o_proj(join_heads(z)))
        return rms_norm(h + x, None, layer.norm_eps, tap, "ln1_post")

    def _layer_back(self, layer: Any, way: WayBack) -> None:
        way.through_norm("ln2_post")
        way.write("mlp", way.read("hook_mlp_out"))
        self._mix_back(layer, way)

    def _mix_back(self, layer: Any, way: WayBack) -> None:
        """A logit's direction from after what positions tell one another to before it."""
        way.through_norm("ln1_post")
        projection = layer.self_attn.o_proj
        way.write_heads(projection.weight, projection.bias)

    # The heads

    def _at_end(self, h: Tensor, tap: Tap) -> None:
        if tap.listens("hook_halt"):
            tap("hook_halt", self.halting(h))

    def halting(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch answer"]:
        """The halting head's two numbers, read at the first position: to stop, and to go on."""
        return self.published.inner.q_head(self.part(state, "z_H")[..., 0, :])

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(stop - go on)``, above a half where the published code halts."""
        stop, go_on = self.halting(state).float().unbind(-1)
        return (stop - go_on).sigmoid()[..., None].expand(state.shape[:-1])

    def _readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        return self._head(self.part(h, "z_H"))

    @property
    def _head(self) -> Any:
        return self.published.inner.lm_head
