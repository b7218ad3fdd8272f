"""A user's own model, in the four methods of the protocol, with hooks inside its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.adapters.module_calls import (
    Modules,
    Watch,
    another_size,
    need_example,
    record_calls,
)
from loopinterp.adapters.own_forward import (
    TappedModel,
    Tapping,
    axes_of,
    outermost_layers,
    slots_of,
)
from loopinterp.core.errors import InputError
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import CheckedModel, declared, need_model, rule_of
from loopinterp.models.run_inputs import check_loops
from loopinterp.models.taps import NO_TAPS, Taps

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class FourMethodAdapter(TappedModel):
    """A model in the four methods, with hooks on every module that its step calls.

    The hooks are those of a :class:`RepeatedAdapter`; a layer is an outermost module that maps a
    state to a state.

    Args:
        published: The model; its weights are shared.
        inputs: An example, like the inputs of later runs.
        n_loops: Default loops of a run; None: by the model's ``loop_rule``.

    Raises:
        InputError: If it is no module with the four methods, breaks their rules, or has no number
            of loops.
    """

    def __init__(self, published: Any, inputs: Tensor, *, n_loops: int | None = None) -> None:
        need_model(published)
        need_example(published, inputs)
        native, rule = CheckedModel(published), rule_of(published)
        if n_loops is None and rule is None:
            expected, fix = "a number, as the model has no loop_rule", "Pass n_loops=8, say."
            raise InputError("n_loops", expected=expected, given="None", fix=fix)
        loops = rule.shown if n_loops is None and rule is not None else check_loops(n_loops or 0)
        sizes, recorded = [], []
        with torch.no_grad():
            for x in (inputs, another_size(inputs)):
                e = native.embed(x)
                h = native.initial_state(e)
                calls, after = record_calls(published, lambda: native.step(h, e, 0))  # noqa: B023
                recorded.append((calls, e, after))
                sizes.append((x.shape[0], x.shape[1]))
            (calls, e, h), (twins, other_e, other) = recorded
            logits = native.readout(h)
        if [call.path for call in calls] != [call.path for call in twins]:
            expected, got = "a step that calls the same modules for every input", "others"
            fix = "Let the calls depend on no input."
            raise InputError("step of the model", expected=expected, given=got, fix=fix)
        layers = outermost_layers(calls, h)
        slots = slots_of(calls, twins, sizes, layers)
        placed = [axes_of(x.shape, y.shape, sizes) for x, y in ((e, other_e), (h, other))]
        super().__init__(
            published,
            slots,
            e_axes=placed[0] or ("pos", e.shape[-1]),
            state_axes=placed[1] or ("pos", h.shape[-1]),
            n_loops=loops,
            d_vocab=declared(published, "d_vocab"),
            d_vocab_out=logits.shape[-1],
            causal=declared(published, "causal"),
            n_ctx=declared(published, "n_ctx"),
        )
        if n_loops is None and rule is not None:
            self.loop_rule = rule
        self.takes_loop = native.takes_loop
        self.task = declared(published, "task")
        for name in ("reach", "reach_before", "local_step", "d_features", "repeatable"):
            setattr(self, name, declared(published, name))
        self._inside = Modules(published)

    @property
    def n_coda(self) -> int | None:  # type: ignore[override]
        return declared(self.published, "n_coda")

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        return CheckedModel(self.published).initial_state(e)

    def step(
        self,
        h: Float[Tensor, "batch pos d_state"],
        e: Float[Tensor, "batch pos d_model"],
        context: AttentionContext | None = None,
        taps: Taps = NO_TAPS,
        loop: int | None = None,
    ) -> Float[Tensor, "batch pos d_state"]:
        return super().step(h, e, AttentionContext(), taps, loop)  # which the model reads nowhere

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        return taps.at("top")("hook_embed", CheckedModel(self.published).embed(inputs))

    def own_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, loop: int, tapping: Tapping
    ) -> Tensor:
        with self._inside.watching(tapping(Watch())):
            return CheckedModel(self.published).step(h, e, loop)

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        return CheckedModel(self.published).readout(h)
