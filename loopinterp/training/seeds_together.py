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
    from loopinterp.training.objectives import Questions, Supervised
    from loopinterp.training.trainer import Trainer

_OF_A_LOOP = ("block.", "ln_loop.", "gate", "recall.")
"""How the names of the weights begin that a loop meets."""

_NEARLY_SQUARE = 0.9
"""Share of the positions of a square from which on the rest of it is run as well."""


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
    drawn = [trainer.begin() for trainer in trainers]
    with trainers[0].autocast():
        bound = [trainer.bind(one) for trainer, one in zip(trainers, drawn)]
        supervised = _supervise(trainers, bound, [one.questions for one in drawn])
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
        raise type(error)(what, **again) from error


@dataclass(frozen=True)
class Packing:
    """Where each position of each seed's examples stands in the seed's row; on the CPU.

    Attributes:
        loops: The loops that each example is asked at, in the order of the row; -1 for none.
        order: The place in its batch of each example of a row.
        lengths: Positions of it that are run.
        widths: Positions of each seed's batch, with its padding.
    """

    loops: Int[Tensor, "seed ask example"]
    order: Int[Tensor, "seed example"]
    lengths: Int[Tensor, "seed example"]
    widths: Sequence[int]

    @classmethod
    def pack_questions(cls, questions: Sequence[Questions], *, square: bool = False) -> Packing:
        """The places of the examples of each seed that questions are put to.

        Args:
            questions: By seed.
            square: Leave padding that is less than a tenth where it is: attention over all pairs of
                positions has nothing to rearrange then.
        """
        n_asks = max(len(one.loops) for one in questions)
        loops = torch.full((len(questions), n_asks, questions[0].loops.shape[1]), -1)
        for seed, one in enumerate(questions):
            loops[seed, : len(one.loops)] = one.loops
        order = loops.amax(1).argsort(dim=1, descending=True, stable=True)
        lengths = torch.stack([_read_until(one.targets) for one in questions]).gather(1, order)
        if square and lengths.sum() > _NEARLY_SQUARE * lengths.numel() * lengths.max():
            lengths = torch.full_like(lengths, int(lengths.max()))
        loops = loops.gather(2, order[:, None].expand_as(loops))
        return cls(loops, order, lengths, [one.targets.shape[-1] for one in questions])

    @cached_property
    def n_pos(self) -> int:
        """Positions of the longest example."""
        return int(self.lengths.max())

    @cached_property
    def is_square(self) -> bool:
        """Whether all examples are as long."""
        return bool((self.lengths == self.n_pos).all())

    @cached_property
    def starts(self) -> Int[Tensor, "seed example"]:
        """Where each example begins in its row."""
        return self.lengths.cumsum(1) - self.lengths

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

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Example and position of each place ``[seed, place]``; 0 behind the end of a row."""
        inside = torch.arange(self.n_pos) < self.lengths[:, :, None]  # [seed, example, pos]
        seed, example, pos = inside.nonzero(as_tuple=True)
        places = torch.zeros(2, len(self.lengths), int(self.lengths.sum(1).max()), dtype=torch.long)
        places[:, seed, self.starts[seed, example] + pos] = torch.stack([example, pos])
        return places[0], places[1]

    @property
    def example(self) -> Int[Tensor, "seed place"]:
        """Which example of its row each place belongs to."""
        return self._places[0]

    @property
    def pos(self) -> Int[Tensor, "seed place"]:
        """Which position of its example each place is."""
        return self._places[1]

    def pack(self, batches: Sequence[Tensor]) -> Float[Tensor, "seed place *feature"]:
        """The rows of each seed's batch."""
        rows = []
        for seed, (x, width) in enumerate(zip(batches, self.widths)):
            # In a square an example may be longer than its own batch.
            pos = self.pos[seed].clamp(max=width - 1)
            at = self.order[seed, self.example[seed]] * width + pos
            rows.append(x.flatten(0, 1)[send(at, x.device)])
        return torch.stack(rows)

    def pack_noise(self, noise: Sequence[Tensor], loop: int) -> Float[Tensor, "seed place d_model"]:
        """The noise of a loop in rows; that of each seed is in the order of its row."""
        places = self.running[loop][1]
        packed = noise[0].new_zeros(len(noise), max(places), noise[0].shape[-1])
        for seed, (x, width, n) in enumerate(zip(noise, self.widths, places)):
            pos = self.pos[seed, :n].clamp(max=width - 1)
            at = send(self.example[seed, :n] * width + pos, x.device)
            torch.index_select(x.flatten(0, 1), 0, at, out=packed[seed, :n])
        return packed

    def answers(self, states: Iterable[Tensor]) -> Float[Tensor, "seed ask batch pos d_model"]:
        """The state of each example at the loops it is asked at; 0 where it has no position.

        Args:
            states: After 0, 1, … loops; at least the places that run so long.
        """
        n_pos = max(self.widths)
        # [seed, question, example, pos]
        inside = torch.arange(n_pos) < self.lengths[:, None, :, None]
        loops = self.loops[..., None]
        rows, places = [], []
        for loop, state in enumerate(states):
            seed, ask, example, pos = (inside & (loops == loop)).nonzero(as_tuple=True)
            if len(seed):
                at = seed * state.shape[1] + self.starts[seed, example] + pos
                rows.append(state.flatten(0, 1)[send(at, state.device)])
                places.append((seed, ask, self.order[seed, example], pos))
        seed, ask, example, pos = (torch.cat(parts) for parts in zip(*places))
        values = torch.cat(rows)
        shape = (*self.loops.shape, n_pos)
        at = ((seed * shape[1] + ask) * shape[2] + example) * shape[3] + pos
        states = values.new_zeros(math.prod(shape), values.shape[-1])
        return states.index_copy(0, send(at, states.device), values).unflatten(0, shape)


def _read_until(targets: Int[Tensor, "ask batch pos"]) -> Int[Tensor, " batch"]:
    """Positions of each example until the last that is asked for, one at least."""
    place = torch.arange(1, targets.shape[-1] + 1)
    return ((targets != IGNORE).any(0) * place).amax(1).clamp(min=1)


_NARROW = 4
"""Windows up to this go key by key."""


_LANES = 16
"""Keys of a square are made a multiple of this, which a softmax takes at a stride."""


def goes_by_key(config: LoopedTransformerConfig) -> bool:
    """Whether attention goes key by key."""
    window = config.window_of_all_heads
    return window is not None and window <= _NARROW


class PackedAttention:
    """The context of attention in each loop: masks, offsets and rotations of the rows.

    Args:
        models: Of one configuration, one for each row.
        bound: Each bound to its batch.
        packing: Where the positions of these stand.
    """

    def __init__(
        self, models: Sequence[LoopedTransformer], bound: Sequence[Iteration], packing: Packing
    ) -> None:
        self.packing, self.device = packing, bound[0].e.device
        at, widest = send(packing.pos, self.device), max(bound, key=lambda it: it.e.shape[1])
        self.offset = self.rotation = None
        if widest.context.qk_offset is not None:
            offsets = [it.context.qk_offset.transpose(1, 2) for it in bound]
            self.offset = packing.pack(offsets).transpose(1, 2)
        if widest.context.rotation is not None:
            self.rotation = [table[at][:, None] for table in widest.context.rotation]
        self.by_key = goes_by_key(models[0].config)
        place = torch.arange(packing.n_pos, device=self.device)
        self.bias = _by_key(models, place, at) if self.by_key else _of_squares(models, place)

    def of_loop(self, loop: int) -> AttentionContext:
        """The context of a loop, counted from 0, whose rows are those that run in it."""
        _, places = self.packing.running[loop]
        n, bias = max(places), self.bias
        if self.by_key:
            assert bias is not None
            attend = partial(_attend_by_key, bias=bias[:, :, :n])
        else:
            squares = _Squares(self.packing, loop, self.device)
            attend = partial(squares.attend, bias=bias)
        rotation = None
        if self.rotation is not None:
            cos, sin = (table[:, :, :n] for table in self.rotation)
            rotation = cos, sin
        offset = None if self.offset is None else self.offset[:, :, :n]
        return AttentionContext(rotation=rotation, qk_offset=offset, attend=attend)


def _by_key(
    models: Sequence[LoopedTransformer], place: Tensor, at: Tensor
) -> Float[Tensor, "distance seed place head"]:
    """The bias of the score of each place of a row and the key a distance before it."""
    config = models[0].config
    assert config.attention_window is not None
    query = place[:, None, None]
    key = query - torch.arange(config.attention_window + 1, device=place.device)
    masks = [_mask(model, query, key)[pos, :, 0] for model, pos in zip(models, at)]
    return torch.stack(masks).movedim(-1, 0).expand(-1, -1, -1, config.n_heads)


def _of_squares(
    models: Sequence[LoopedTransformer], place: Tensor
) -> Float[Tensor, "#seed 1 #head query key"] | None:
    """The bias of the scores of all pairs; None where attention is causal and unbiased."""
    model, query, key = models[0], place[None, :, None], place[None, None]
    if model.relative_bias is not None:
        bias = torch.stack([_mask(one, query, key) for one in models])
    # On a CPU causal attention that is fused is the slower, of rows as short as these.
    elif model.config.attention_window is not None or place.device.type == "cpu":
        bias = _mask(model, query, key)[None]
    else:
        return None
    return F.pad(bias, (0, -len(place) % _LANES), value=-torch.inf)


def _mask(model: LoopedTransformer, query: Tensor, key: Tensor) -> Tensor:
    return score_mask(model.config, query, key, bias=model.relative_bias, dtype=model.dtype)


class _Squares:
    """The square of examples and positions of a loop, and the way back to its rows."""

    def __init__(self, packing: Packing, loop: int, device: torch.device) -> None:
        examples, places = packing.running[loop]
        n_examples, n_places, self.n_pos = max(examples), max(places), packing.n_pos
        self.n_seeds, self.there = len(examples), None
        if packing.is_square:
            return
        seed = torch.arange(self.n_seeds)[:, None, None]
        pos = torch.arange(self.n_pos)
        lengths, starts = packing.lengths[:, :n_examples], packing.starts[:, :n_examples]
        ended = torch.arange(n_examples) >= torch.tensor(examples)[:, None]
        idle = (pos >= lengths[..., None]) | ended[..., None]
        there = (seed * n_places + starts[..., None] + pos).masked_fill(idle, 0)
        example, pos = packing.example[:, :n_places], packing.pos[:, :n_places]
        behind = torch.arange(n_places) >= torch.tensor(places)[:, None]
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
            z = self._explicit(q, k, v, bias)
        z = z.transpose(1, 2).flatten(0, 1)  # [place, head, d_head]
        if self.there is not None:
            z = _Move.apply(z, self.back, self.there, self.idle)
        return z.view(self.n_seeds, n_places, *z.shape[1:]).transpose(1, 2)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Products of matrices, one for each example and head; keys as many as the bias has."""
        shape, more = q.shape, bias.shape[-1] - k.shape[2]
        k, v = (F.pad(x, (0, 0, 0, more)).flatten(0, 1) for x in (k, v))
        if bias.shape[:3].numel() > 1:
            bias = bias.expand(self.n_seeds, shape[0] // self.n_seeds, shape[1], -1, -1)
        q, bias = q.flatten(0, 1), bias.flatten(0, 2)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape[-1] ** -0.5)
        return (scores.softmax(-1).to(v) @ v).view(shape)

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


def _attend_by_key(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor) -> Tensor:
    return _KeyByKey.apply(q, k, v, bias)  # which takes no arguments by name


class _KeyByKey(Function):
    """``sum_d p_d v_{i-d}`` with ``p = softmax_d(q_i k_{i-d} / sqrt(d_head) + bias_d)``.

    A few products of whole rows for each distance d, and nothing of the size of a square.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "seed head place d_head"],
        k: Float[Tensor, "seed head place d_head"],
        v: Float[Tensor, "seed head place d_head"],
        bias: Float[Tensor, "distance seed place head"],
    ) -> Float[Tensor, "seed head place d_head"]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        scale, n = q.shape[-1] ** -0.5, q.shape[1]
        scores = bias.clone()
        for d in range(min(len(bias), n)):
            scores[d, :, d:].add_((q[:, d:] * k[:, : n - d]).sum(-1), alpha=scale)
        p = scores.softmax(0).to(q)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return _mixed(p, v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        q, k, v, p = ctx.saved_tensors
        g, n = g.transpose(1, 2).contiguous(), q.shape[1]
        dp = torch.zeros_like(p)
        for d in range(min(len(p), n)):
            dp[d, :, d:] = (g[:, d:] * v[:, : n - d]).sum(-1)
        ds = p * (dp - (p * dp).sum(0))
        scaled = ds * ctx.scale
        gradients = _mixed(scaled, k), _mixed(scaled, q, back=True), _mixed(p, g, back=True)
        return *(x.transpose(1, 2) for x in gradients), ds


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


def _supervise(
    trainers: Sequence[Trainer], bound: Sequence[Iteration], questions: Sequence[Questions]
) -> list[Supervised]:
    """Loss and answers of each model."""
    models = [trainer.model for trainer in trainers]
    packing = Packing.pack_questions(questions, square=not goes_by_key(models[0].config))
    answers = packing.answers(_run(trainers, bound, packing))
    supervised = []
    for model, one, h, width in zip(models, questions, answers, packing.widths):
        logits = model.readout(h[: len(one.loops), :, :width].flatten(0, 1))
        supervised.append(one.score(logits.unflatten(0, one.loops.shape)))
    return supervised


def _run(
    trainers: Sequence[Trainer], bound: Sequence[Iteration], packing: Packing
) -> Sequence[Tensor]:
    """States ``[seed, running, d_model]`` after 0, 1, … loops."""
    attention = PackedAttention([trainer.model for trainer in trainers], bound, packing)
    h, e = (packing.pack(parts) for parts in zip(*[(it.h0, it.e) for it in bound]))
    # [loop][seed], each drawn as its trainer would alone
    examples = zip(*[n for n, _ in packing.running])
    noise = list(zip(*[t.noise(it.h0, n) for t, it, n in zip(trainers, bound, examples)]))
    loops = _Loops(trainers[0].model)
    return functional_call(loops, _stacked(trainers), (h, e, noise, packing, attention))


def _stacked(trainers: Sequence[Trainer]) -> dict[str, Tensor]:
    """The weights of a loop, those of each model ``[seed, ...]``, by their plain names."""
    for trainer in trainers:
        need_unchanged(trainer.model, "seeds that are trained together")
    weights = [dict(trainer.model.named_parameters()) for trainer in trainers]
    stacked_weights = {}
    for name, one in weights[0].items():
        if name.startswith(_OF_A_LOOP):
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
        packing: Packing,
        attention: PackedAttention,
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
