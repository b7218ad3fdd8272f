"""Several seeds of one configuration, run through the loops together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.func import functional_call

from loopinterp.core.errors import InputError
from loopinterp.models.positions import AttentionContext, score_mask
from loopinterp.models.weights import need_unchanged
from loopinterp.tasks.task import IGNORE
from loopinterp.training.device import send

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig
    from loopinterp.training.objectives import Questions
    from loopinterp.training.trainer import Trainer


def advance_together(trainers: Sequence[Trainer]) -> None:
    """One step of each trainer, as each would make it alone, their loops in one batch.

    Everything but the loops is each trainer's own: data, noise, curriculum, gradient, clipping,
    optimiser, average. In the loops the weights of all are stacked ``[seed, ...]``, and the
    examples of each seed stand in a row ``[seed, place, d_model]``, without their padding.

    Args:
        trainers: Of configurations that differ in the seed alone. Each returns its own metrics
            (:func:`read`).
    """
    if len(trainers) == 1:
        return trainers[0].advance()
    models = [trainer.model for trainer in trainers]
    for trainer in trainers:
        trainer.optimiser.zero_grad(set_to_none=True)
    drawn = [trainer.draw() for trainer in trainers]
    questions = [one.questions for one in drawn]
    with trainers[0].autocast():
        bound = [trainer.bind(one) for trainer, one in zip(trainers, drawn)]
        packing = _Packing.pack_questions(questions, square=not _goes_by_key(models[0].config))
        attention = _PackedAttention(models, bound, packing)
        h, e = (packing.pack(parts) for parts in zip(*[(it.h0, it.e) for it in bound]))
        # [loop][seed], each drawn as its trainer would alone
        examples = zip(*[n for n, _ in packing.running])
        noise = list(zip(*[t.noise(it.h0, n) for t, it, n in zip(trainers, bound, examples)]))
        inputs = (h, e, noise, packing, attention)
        answers = packing.answers(functional_call(_Loops(models[0]), _stacked(models), inputs))
        supervised = []
        for model, one, h, width in zip(models, questions, answers, packing.widths):
            logits = model.readout(h[: len(one.loops), :, :width].flatten(0, 1))
            supervised.append(one.score(logits.unflatten(0, one.loops.shape)))
    torch.stack([one.loss for one in supervised]).sum().backward()
    for trainer, one, answered in zip(trainers, drawn, supervised):
        trainer.finish(one, answered)
    return None


def read(trainer: Trainer) -> list[dict[str, float | int]]:
    """:meth:`Trainer.read`, whose errors name the seed."""
    try:
        return trainer.read()
    except InputError as error:
        what = f"seed {trainer.config.seed}: {error.what}"
        again = {"expected": error.expected, "given": error.given, "fix": error.fix}
        raise InputError(what, **again) from error


@dataclass
class _Packing:
    """Where each position of each seed's examples stands in the seed's row; on the CPU.

    Attributes:
        loops: The loops that each example is asked at, in the order of the row; -1 for none.
        order: The place in its batch of each example of a row.
        lengths: Positions of it that are run; ``n_pos`` of the longest.
        widths: Positions of each seed's batch, with its padding.
        starts: Where each example begins in its row ``[seed, example]``.
        example: Which example of its row each place belongs to ``[seed, place]``.
        pos: Which position of its example each place is ``[seed, place]``.
    """

    loops: Int[Tensor, "seed ask example"]
    order: Int[Tensor, "seed example"]
    lengths: Int[Tensor, "seed example"]
    widths: Sequence[int]

    @classmethod
    def pack_questions(cls, questions: Sequence[Questions], *, square: bool = False) -> _Packing:
        """The places of the examples of each seed that questions are put to.

        An example is run until the last position that is asked for. ``square`` leaves padding that
        is less than a tenth where it is: attention over all pairs of positions has nothing to
        rearrange then.
        """
        n_asks = max(len(one.loops) for one in questions)
        loops = torch.full((len(questions), n_asks, questions[0].loops.shape[1]), -1)
        for seed, one in enumerate(questions):
            loops[seed, : len(one.loops)] = one.loops
        # [seed, example]: examples by their last loop, those that run longest first.
        order = loops.amax(1).argsort(dim=1, descending=True, stable=True)
        lengths = []
        for one in questions:
            place = torch.arange(1, one.targets.shape[-1] + 1)
            has_answer = (one.targets != IGNORE).any(0)  # [example, pos]
            lengths.append((has_answer * place).amax(1).clamp(min=1))
        lengths = torch.stack(lengths).gather(1, order)
        if square and lengths.sum() > 0.9 * lengths.numel() * lengths.max():
            lengths = torch.full_like(lengths, int(lengths.max()))
        loops = loops.gather(2, order[:, None].expand_as(loops))
        return cls(loops, order, lengths, [one.targets.shape[-1] for one in questions])

    def __post_init__(self) -> None:
        self.n_pos = int(self.lengths.max())
        self.is_square = bool((self.lengths == self.n_pos).all())
        self.starts = self.lengths.cumsum(1) - self.lengths  # [seed, example]: first place
        # Example and position of each place [seed, place]; 0 behind the end of a row.
        inside = torch.arange(self.n_pos) < self.lengths[:, :, None]  # [seed, example, pos]
        seed, example, pos = inside.nonzero(as_tuple=True)
        places = torch.zeros(2, len(self.lengths), int(self.lengths.sum(1).max()), dtype=torch.long)
        places[:, seed, self.starts[seed, example] + pos] = torch.stack([example, pos])
        self.example, self.pos = places

    @cached_property
    def running(self) -> list[tuple[list[int], list[int]]]:
        """Examples and positions of each seed that run in each loop: those of a row's beginning."""
        # [seed, example]: the last loop of each example, and where it ends in its row
        ends, until = self.loops.amax(1), self.lengths.cumsum(1)
        running = []
        for loop in range(1, int(ends.max()) + 1):
            goes_on = ends >= loop  # [seed, example]
            running.append((goes_on.sum(1).tolist(), (until * goes_on).amax(1).tolist()))
        return running

    def pack(self, batches: Sequence[Tensor]) -> Float[Tensor, "seed place *feature"]:
        """The rows of each seed's batch."""
        rows = []
        for seed, (x, width) in enumerate(zip(batches, self.widths)):
            at = self.order[seed, self.example[seed]] * width + self._pos(seed)
            rows.append(x.flatten(0, 1)[send(at, x.device)])
        return torch.stack(rows)

    def _pos(self, seed: int) -> Int[Tensor, " place"]:
        """Positions in a seed's own batch, which may be narrower than a square."""
        return self.pos[seed].clamp(max=self.widths[seed] - 1)

    def pack_noise(self, noise: Sequence[Tensor], loop: int) -> Float[Tensor, "seed place d_model"]:
        """The noise of a loop in rows; that of each seed is in the order of its row."""
        places = self.running[loop][1]
        packed = noise[0].new_zeros(len(noise), max(places), noise[0].shape[-1])
        for seed, (x, width, n) in enumerate(zip(noise, self.widths, places)):
            at = send((self.example[seed] * width + self._pos(seed))[:n], x.device)
            torch.index_select(x.flatten(0, 1), 0, at, out=packed[seed, :n])
        return packed

    def answers(self, states: Iterable[Tensor]) -> Float[Tensor, "seed ask batch pos d_model"]:
        """The state of each example at the loops it is asked at; 0 where it has no position.

        Args:
            states: After 0, 1, … loops; at least the places that run so long.
        """
        n_pos = max(self.widths)
        # [seed, question, example, pos]: the positions that have a state
        inside = torch.arange(n_pos) < self.lengths[:, None, :, None]
        loops = self.loops[..., None]
        rows, places = [], []
        for loop, state in enumerate(states):
            seed, ask, example, pos = (inside & (loops == loop)).nonzero(as_tuple=True)
            if len(seed):  # some example is asked after this loop
                at = seed * state.shape[1] + self.starts[seed, example] + pos
                rows.append(state.flatten(0, 1)[send(at, state.device)])
                places.append((seed, ask, self.order[seed, example], pos))
        seed, ask, example, pos = (torch.cat(parts) for parts in zip(*places))
        values = torch.cat(rows)  # [answer, d_model], at the indices above
        shape = (*self.loops.shape, n_pos)
        at = ((seed * shape[1] + ask) * shape[2] + example) * shape[3] + pos
        states = values.new_zeros(math.prod(shape), values.shape[-1])
        return states.index_copy(0, send(at, states.device), values).unflatten(0, shape)


def _goes_by_key(config: LoopedTransformerConfig) -> bool:
    """Whether attention goes key by key, as it does within narrow windows."""
    window = config.window_of_all_heads
    return window is not None and window <= 4


class _PackedAttention:
    """The context of attention in each loop: masks, offsets and rotations of the rows.

    Args:
        models: Of one configuration, one for each row.
        bound: Each bound to its batch.
        packing: Where the positions of these stand.
    """

    def __init__(
        self, models: Sequence[LoopedTransformer], bound: Sequence[Iteration], packing: _Packing
    ) -> None:
        self.packing, self.device = packing, bound[0].e.device
        at, widest = send(packing.pos, self.device), max(bound, key=lambda it: it.e.shape[1])
        self.offset = self.rotation = None
        if widest.context.qk_offset is not None:
            offsets = [it.context.qk_offset.transpose(1, 2) for it in bound]
            self.offset = packing.pack(offsets).transpose(1, 2)
        if widest.context.rotation is not None:
            self.rotation = [table[at][:, None] for table in widest.context.rotation]
        self.by_key = _goes_by_key(models[0].config)
        self.bias = self._bias(models, at)

    def _bias(self, models: Sequence[LoopedTransformer], at: Tensor) -> Tensor | None:
        """The bias of scores, -inf where nothing is seen; None: causal, and without one.

        Key by key ``[distance, seed, place, head]``, of each place of a row and the key a distance
        before it; else ``[#seed, 1, #head, query, key]``, of all pairs of positions.
        """
        config, place = models[0].config, torch.arange(self.packing.n_pos, device=self.device)

        def mask(model: LoopedTransformer, query: Tensor, key: Tensor) -> Tensor:
            bias = model.relative_bias
            return score_mask(model.config, query, key, bias=bias, dtype=model.dtype)

        if self.by_key:
            assert config.attention_window is not None
            query = place[:, None, None]
            key = query - torch.arange(config.attention_window + 1, device=self.device)
            masks = [mask(model, query, key)[pos, :, 0] for model, pos in zip(models, at)]
            return torch.stack(masks).movedim(-1, 0).expand(-1, -1, -1, config.n_heads)
        query, key = place[None, :, None], place[None, None]
        if models[0].relative_bias is not None:
            # [seed, 1, head, query, key]: each model has a bias of its own.
            bias = torch.stack([mask(model, query, key) for model in models])
        # On a CPU causal attention that is fused is the slower, of rows as short as these.
        elif config.attention_window is not None or place.device.type == "cpu":
            bias = mask(models[0], query, key)[None]
        else:
            return None
        # Keys are made a multiple of 16, which a softmax takes at a stride.
        return F.pad(bias, (0, -len(place) % 16), value=-torch.inf)

    def of_loop(self, loop: int) -> AttentionContext:
        """The context of a loop, counted from 0, whose rows are those that run in it."""
        _, places = self.packing.running[loop]
        n, bias = max(places), self.bias
        if self.by_key:
            assert bias is not None
            attend = partial(_KeyByKey.apply, bias[:, :, :n])
        else:
            attend = partial(_Squares(self.packing, loop, self.device).attend, bias=bias)
        rotation = None
        if self.rotation is not None:
            cos, sin = (table[:, :, :n] for table in self.rotation)
            rotation = cos, sin
        offset = None if self.offset is None else self.offset[:, :, :n]
        return AttentionContext(rotation=rotation, qk_offset=offset, attend=attend)


class _Squares:
    """The square of examples and positions of a loop, and the way back to its rows."""

    def __init__(self, packing: _Packing, loop: int, device: torch.device) -> None:
        examples, places = packing.running[loop]
        n_examples, n_places, self.n_pos = max(examples), max(places), packing.n_pos
        self.n_seeds, self.there = len(examples), None
        if packing.is_square:
            return
        seed = torch.arange(self.n_seeds)[:, None, None]
        pos = torch.arange(self.n_pos)
        lengths, starts = packing.lengths[:, :n_examples], packing.starts[:, :n_examples]
        ended = torch.arange(n_examples) >= torch.tensor(examples)[:, None]  # [seed, example]
        idle = (pos >= lengths[..., None]) | ended[..., None]
        # [seed, example, pos]: the place of each position of the square, in the rows one after the
        # other; and [seed, place]: back from there
        there = (seed * n_places + starts[..., None] + pos).masked_fill(idle, 0)
        example, pos = packing.example[:, :n_places], packing.pos[:, :n_places]
        behind = torch.arange(n_places) >= torch.tensor(places)[:, None]  # [seed, place]
        back = ((seed[..., 0] * n_examples + example) * self.n_pos + pos).masked_fill(behind, 0)
        self.there, self.idle, self.back, self.behind = (
            send(x.flatten(), device) for x in (there, idle, back, behind)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Attention over all pairs of positions of each example."""
        n_places = q.shape[2]
        q, k, v = map(self._squares, (q, k, v))
        if bias is None:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # Products of matrices, one for each example and head; keys as many as the bias has.
            shape, more = q.shape, bias.shape[-1] - k.shape[2]
            k, v = (F.pad(x, (0, 0, 0, more)).flatten(0, 1) for x in (k, v))
            if bias.shape[:3].numel() > 1:
                bias = bias.expand(self.n_seeds, shape[0] // self.n_seeds, shape[1], -1, -1)
            q, bias = q.flatten(0, 1), bias.flatten(0, 2)
            # [example and head, query, key]
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape[-1] ** -0.5)
            z = (scores.softmax(-1).to(v) @ v).view(shape)
        z = z.transpose(1, 2).flatten(0, 1)  # [place, head, d_head]
        if self.there is not None:
            z = _Move.apply(z, self.back, self.there, self.idle)
        return z.view(self.n_seeds, n_places, *z.shape[1:]).transpose(1, 2)

    def _squares(self, x: Tensor) -> Tensor:
        """``[example, head, pos, d_head]`` of all seeds from ``[seed, head, place, d_head]``."""
        x = x.transpose(1, 2).flatten(0, 1)
        if self.there is not None:
            x = _Move.apply(x, self.there, self.back, self.behind)
        return x.unflatten(0, (-1, self.n_pos)).transpose(1, 2)


class _Move(Function):
    """Rows at other places, ``x[there]``; ``back`` says where each has gone, but for the unread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, unread: Tensor) -> Tensor:
        ctx.save_for_backward(back, unread)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        back, unread = ctx.saved_tensors
        return g.index_select(0, back).masked_fill_(unread[:, None, None], 0), None, None, None


class _KeyByKey(Function):
    """``sum_d p_d v_{i-d}`` with ``p = softmax_d(q_i k_{i-d} / sqrt(d_head) + bias_d)``.

    A few products of whole rows for each distance d, and nothing of the size of a square.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bias: Float[Tensor, "distance seed place head"],
        q: Float[Tensor, "seed head place d_head"],
        k: Float[Tensor, "seed head place d_head"],
        v: Float[Tensor, "seed head place d_head"],
    ) -> Float[Tensor, "seed head place d_head"]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        scale, n = q.shape[-1] ** -0.5, q.shape[1]
        scores = bias.clone()  # [distance, seed, place, head]
        for d in range(min(len(bias), n)):
            scores[d, :, d:].add_((q[:, d:] * k[:, : n - d]).sum(-1), alpha=scale)
        p = scores.softmax(0).to(q)  # the share of each distance
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return _mixed(p, v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        q, k, v, p = ctx.saved_tensors
        g, n = g.transpose(1, 2).contiguous(), q.shape[1]
        dp = torch.zeros_like(p)  # gradients: of the shares, and of the scores
        for d in range(min(len(p), n)):
            dp[d, :, d:] = (g[:, d:] * v[:, : n - d]).sum(-1)
        # The derivative of a softmax over distances: [distance, seed, place, head].
        ds = p * (dp - (p * dp).sum(0))
        scaled = ds * ctx.scale
        gradients = _mixed(scaled, k), _mixed(scaled, q, back=True), _mixed(p, g, back=True)
        return ds, *(x.transpose(1, 2) for x in gradients)


def _mixed(
    p: Float[Tensor, "distance seed place head"],
    x: Float[Tensor, "seed place head d_head"],
    *,
    back: bool = False,
) -> Float[Tensor, "seed place head d_head"]:
    """``sum_d p_{d,i} x_{i-d}``; ``back``: ``sum_d p_{d,i+d} x_{i+d}``, the transposed of it."""
    n, shares = x.shape[1], p[..., None]
    mixed = shares[0] * x
    for d in range(1, min(len(p), n)):
        if back:
            mixed[:, : n - d].addcmul_(shares[d, :, d:], x[:, d:])
        else:
            mixed[:, d:].addcmul_(shares[d, :, d:], x[:, : n - d])
    return mixed


def _stacked(models: Sequence[LoopedTransformer]) -> dict[str, Tensor]:
    """The weights of a loop, those of each model ``[seed, ...]``, by their plain names."""
    for model in models:
        need_unchanged(model, "seeds that are trained together")
    weights = [dict(model.named_parameters()) for model in models]
    stacked_weights = {}
    for name, one in weights[0].items():
        if name.startswith(("block.", "ln_loop.", "gate", "recall.")):
            stacked = torch.stack([w[name] for w in weights])
            stacked_weights[f"model.{name}"] = stacked if one.dim() else stacked[:, None, None]
    return stacked_weights


class _Loops(nn.Module):
    """All loops of one model as a ``forward``, which ``functional_call`` gives other weights."""

    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        h: Tensor,
        e: Tensor,
        noise: Sequence[Sequence[Tensor]],
        packing: _Packing,
        attention: _PackedAttention,
    ) -> list[Tensor]:
        states = [h]
        for loop, (_, places) in enumerate(packing.running):
            n = max(places)
            h, e = h[:, :n], e[:, :n]
            if noise:
                h = h + packing.pack_noise(noise[loop], loop)
            h = self.model.run_loop(h, e, attention.of_loop(loop))
            states.append(h)
        return states
