r"""Any model that applies a module, or a list of modules, several times: ``h <- block(h, e)``.

A step runs the model's own forward, puts a state in where the first or second loop reads it, and
takes the next state out. So masks, positions and injections are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.adapters.module_calls import is_floats, need_example
from loopinterp.adapters.own_forward import (
    Block,
    Forward,
    OwnForward,
    Recording,
    RepeatedLoop,
    TappedModel,
    Tapping,
    record,
)
from loopinterp.adapters.repeated_calls import (
    as_named,
    block_of,
    find_loop,
    loop_slots,
    repeated_blocks,
)
from loopinterp.core.errors import InputError
from loopinterp.models.addresses import Axes
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import need_examples, spell
from loopinterp.models.taps import NO_TAPS, Taps, no_fast_path

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True)
class _InputContext(AttentionContext):
    """The inputs of a run, for a forward that reads them in every loop."""

    inputs: Tensor | None = None

    def select(self, rows: Tensor | slice) -> _InputContext:
        return self if self.inputs is None else replace(self, inputs=self.inputs[rows])


class RepeatedAdapter(TappedModel):
    """A model that repeats a block, with hooks at every loop and on every module inside it.

    The hooks are ``hook_state_pre`` and ``hook_state_post`` of each loop, ``hook_resid_pre`` and
    ``hook_resid_post`` of each layer, and ``loops.{t}.{module path}.hook_in`` and ``.hook_out`` of
    every module (``.calls.{k}`` before the hook if it runs several times in a loop).

    The adapter accepts a model only if, on the example, the next state of the model's own forward
    follows from each of its states, and its logits from the last one. A run costs more than the
    model's own forward: each loop repeats the layers before the first one, and with an injected
    input the start of the second.

    Args:
        published: The model, in evaluation mode; its weights are shared.
        inputs: An example ``[batch, pos]`` or ``[batch, pos, d_features]``, like the inputs of
            later runs (with padding, if they have any).
        repeat: Path of the repeated module or list of modules, or paths of modules that are
            repeated together. None: modules with weights that one forward calls several times.
        forward: From the model and inputs to logits ``[batch, pos, class]``. None: ``logits``,
            ``last_hidden_state`` or the first such tensor of ``model(inputs)``.

    Raises:
        InputError: If no such path exists, or nothing there is called twice; if arguments change
            between loops, or a loop's output does not decide the next; if logits depend on more
            than the last state; if the forward is random, or its calls depend on the input.

    Example:
        >>> class Looped(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.block = nn.Embedding(5, 4), nn.Linear(4, 4)
        ...     def forward(self, tokens):
        ...         h = e = self.embed(tokens)
        ...         for _ in range(3):
        ...             h = self.block(h + e)
        ...         return h
        >>> tokens = torch.tensor([[0, 1, 2]])
        >>> model = RepeatedAdapter(Looped(), tokens, repeat="block")
        >>> model.n_loops, model.loop.injects
        (3, True)
        >>> _, cache = model.run_with_cache(tokens, n_loops=5)
        >>> cache.stack("hook_state_post").shape
        torch.Size([5, 1, 3, 4])
    """

    repeatable = False

    def __init__(
        self,
        published: nn.Module,
        inputs: Tensor,
        *,
        repeat: str | Sequence[str] | None = None,
        forward: Forward | None = None,
    ) -> None:
        need_example(published, inputs)
        native = OwnForward(published, forward)
        with no_fast_path():  # which hooks on a module would change
            recording = record(native, inputs)
            loop = _loop_of(native, recording, repeat)
        at = {call.place: call for call in recording.calls}
        placed = recording.placed(at[loop.ends[0]])
        assert placed is not None  # as the search has tested
        axes, width = placed[1], int(placed[1][-1])
        e_axes: Axes = ("pos", inputs.shape[-1])
        if loop.entry is not None and (entry := recording.placed(at[loop.entry])) is not None:
            e_axes = entry[1]
        # Modules in several places may be parts of layers: norms, attention.
        has_layers = repeat is not None or len(loop.block) == 1
        slots = loop_slots(native, recording, loop, has_layers=has_layers)
        super().__init__(
            published,
            slots,
            e_axes=e_axes,
            state_axes=axes,
            n_loops=loop.n_loops,
            d_vocab=_vocabulary(native, recording),
            d_vocab_out=recording.logits.shape[-1],
            causal=_is_causal(native, recording),
            n_ctx=inputs.shape[1] if recording.one_length else None,
            options={"repeat": list(loop.block)},
        )
        self.loop, self._native, self._example = loop, native, inputs
        self.reads_tokens = loop.reads_inputs
        self._state_width, self._one_place_each = width, axes[0] == "pos"

    @property
    def n_coda(self) -> int | None:  # type: ignore[override]
        return None  # the layers of the model's forward after its loops are unknown

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        super().check_inputs(inputs, position_offset=position_offset)
        example = self._example
        need_examples(inputs)
        like = isinstance(inputs, torch.Tensor) and inputs.shape[2:] == example.shape[2:]
        if not like or inputs.is_floating_point() != example.is_floating_point():
            expected, fix = f"inputs like the example, {spell(example)}", "Pass such inputs."
            raise InputError("inputs", expected=expected, given=spell(inputs), fix=fix)
        n_ctx = self.config.n_ctx
        if n_ctx is not None and inputs.shape[1] != n_ctx:
            expected, fix = f"{n_ctx} positions, as the example has", "Pad the input as there."
            raise InputError("inputs", expected=expected, given=str(inputs.shape[1]), fix=fix)

    def input_context(
        self,
        inputs: Tensor,
        offset: int | Tensor,
        *,
        all_pairs: bool = False,
        checked: bool = False,
    ) -> AttentionContext:
        context = super().input_context(inputs, offset, all_pairs=all_pairs, checked=checked)
        return replace(context, inputs=inputs)  # type: ignore[call-arg]

    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        return _InputContext()

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """The state before the first loop: ``e``, zeros, or a vector that the model has learnt."""
        return self.loop.initial_state(self._native, e, self._state_width)

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        return taps.at("top")("hook_embed", self.loop.embed(self._native, inputs))

    def own_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, loop: int, tapping: Tapping
    ) -> Tensor:
        inputs = getattr(context, "inputs", None)
        inputs = self._stand_in(h) if inputs is None else inputs
        after = self.loop.step(self._native, h, e, inputs, tapping)
        if torch.is_grad_enabled() and h.requires_grad and not after.requires_grad:
            expected, got = "gradients through the loop", "none: the model's own forward stops them"
            fix = "Run it under torch.no_grad(), or take no_grad and detach out of its forward."
            raise InputError("loop of the model", expected=expected, given=got, fix=fix)
        return after

    def readout(self, h: Tensor) -> Tensor:
        """Logits of a state ``[*loop, batch, pos, d_state]``, by the forward after its loops."""
        return torch.stack([self.readout(x) for x in h]) if h.dim() > 3 else self.run_readout(h)

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        return self.loop.read(self._native, h, self._stand_in(h))

    def _stand_in(self, h: Tensor) -> Tensor:
        """Inputs of a state's size, for a part of the forward that reads no more of them."""
        example = self._example.to(h if is_floats(self._example) else h.device)
        n_pos = h.shape[1] if self._one_place_each else example.shape[1]
        place = torch.arange(n_pos, device=h.device) % example.shape[1]
        return example[:1, place].expand(len(h), *[-1] * (example.dim() - 1))


def _loop_of(
    native: OwnForward, recording: Recording, repeat: str | Sequence[str] | None
) -> RepeatedLoop:
    if repeat is not None:
        return find_loop(native, recording, block_of(native, recording.calls, repeat))
    blocks: list[Block] = repeated_blocks(native, recording.calls)
    if not blocks:
        expected = "a module with weights that one forward calls several times"
        fix = "It is no looped model; a stack of untied layers runs each of them once."
        raise InputError("model", expected=expected, given="none", fix=fix)
    first: InputError | None = None
    for block in blocks:
        try:
            return find_loop(native, recording, as_named(native, block))
        except InputError as error:
            first = first or error
    assert first is not None
    raise first


def _vocabulary(native: OwnForward, recording: Recording) -> int | None:
    """Tokens of the embedding that reads the inputs, if any."""
    for call in recording.calls:
        module, y = native.by_path[call.path], recording.inputs
        tensors = [x for x in call.arguments.values() if isinstance(x, torch.Tensor)]
        reads_inputs = any(x.shape == y.shape and bool((x == y).all()) for x in tensors)
        if reads_inputs and isinstance(module, nn.Embedding):
            return module.num_embeddings
    return None


@torch.no_grad()
def _is_causal(native: OwnForward, recording: Recording) -> bool | None:
    """Whether logits before the last position ignore the last token."""
    inputs, logits = recording.inputs, recording.logits
    if inputs.shape[1] < 2 or logits.shape[1] != inputs.shape[1]:
        return None
    other = inputs.clone()
    other[:, -1] = inputs[:, 0]
    if torch.equal(other, inputs):
        return None
    changed = native.logits(other)
    return bool(torch.allclose(changed[:, :-1], logits[:, :-1], atol=1e-5))
