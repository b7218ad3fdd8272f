"""Training objectives (the loops after which the answer is read), curriculum, learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from loopinterp.core.errors import need
from loopinterp.models.protocol import shifted_loops
from loopinterp.tasks.task import IGNORE
from loopinterp.training.config import OptimiserConfig
from loopinterp.training.device import send

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.iteration import Iteration
    from loopinterp.tasks.task import Batch
    from loopinterp.training.config import CurriculumConfig, ObjectiveConfig


@dataclass(frozen=True)
class Supervised:
    """The loss, and each example's logits at the loop that counts."""

    loss: Float[Tensor, ""]
    logits: Float[Tensor, "batch pos d_vocab_out"]


@dataclass(frozen=True)
class Questions:
    """When the examples of a batch are read, and the loss of their answers.

    Attributes:
        loops: The loops after which each example is read; on the CPU.
        combine: From the loss of each reading to the total. None: every answer counts the same.
        answer: The reading that counts as the model's answer.
        share: Share of these examples in the mean.
    """

    loops: Int[Tensor, "ask batch"]
    targets: Int[Tensor, "ask batch pos"]
    combine: Callable[[Float[Tensor, " ask"]], Float[Tensor, ""]] | None = None
    answer: int = 0
    share: float = 1.0

    def share_of(self, rows: slice) -> Questions:
        """The part for some examples; losses of the parts sum to the whole."""
        targets = self.targets[:, rows]
        # The mean over these targets, weighted by their share of all.
        share = int((targets != IGNORE).sum()) / max(int((self.targets != IGNORE).sum()), 1)
        return replace(self, loops=self.loops[:, rows], targets=targets, share=share)

    def score(self, logits: Float[Tensor, "ask batch pos d_vocab_out"]) -> Supervised:
        targets = send(self.targets, logits.device)
        if self.combine is None:
            # Questions and examples are one axis: a mean over all targets of all questions.
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        else:
            losses = [cross_entropy(y, right) for y, right in zip(logits, targets)]
            loss = self.combine(torch.stack(losses))
        return Supervised(loss if self.share == 1 else loss * self.share, logits[self.answer])


def ask(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Questions:
    """The loops after which each example of a batch is read, and the loss of the answers.

    T(n) below is ``ceil(loop_scale T(n)) + extra_loops``, at least 1. T is ``n_loops``, or the
    largest T(n) of the batch. By ``kind``:

    - ``last``: ``CE(y_T)``, with the same T for all examples.
    - ``step_dependent``: see :func:`_step_dependent`.
    - ``progressive``: ``(1 - alpha) CE(y_T) + alpha CE(y_r)`` with r uniform in 1..T, drawn once
      per batch (arXiv 2405.17399).
    - ``every``: ``sum_t w_t CE(y_t) / sum_t w_t``, t = 1..T.
    - ``drawn``: ``CE(y_r)`` with r uniform in least_loops..T, drawn once per batch.
    """
    n_loops = shifted_loops(batch.n_loops.cpu(), scale=config.loop_scale, extra=config.extra_loops)
    if config.kind == "step_dependent":
        return _step_dependent(config, n_loops, batch.targets, generator)
    last = int(n_loops.max()) if config.n_loops is None else config.n_loops
    got = f"T(n) = {last} for every example of the batch"
    need(last > 0, "n_loops", "at least one loop", got, "Set objective.n_loops.")
    loops = [last]  # of all examples alike
    if config.kind == "every":
        loops = list(range(1, last + 1))
    elif config.kind == "drawn":
        loops = [int(torch.randint(config.least_loops, last + 1, (), generator=generator))]
    elif config.kind == "progressive":
        loops.append(int(torch.randint(1, last + 1, (), generator=generator)))
        if loops == [last, last]:
            loops = [last]

    def mean(losses: Float[Tensor, " ask"]) -> Float[Tensor, ""]:
        if config.kind == "progressive":
            return (1 - config.alpha) * losses[0] + config.alpha * losses[1]
        if config.weights is None:
            return losses.mean()
        weights = send(torch.tensor(config.weights, dtype=losses.dtype), losses.device)
        return (weights * losses).sum() / weights.sum()

    weighted = config.kind == "every" or len(loops) > 1
    return Questions(
        torch.tensor(loops)[:, None].expand(-1, len(batch)),  # [ask, batch]
        batch.targets.expand(len(loops), -1, -1),  # [ask, batch, pos]
        mean if weighted else None,
        answer=-1 if config.kind == "every" else 0,
    )


def _step_dependent(
    config: ObjectiveConfig,
    n_loops: Int[Tensor, " batch"],
    right: Int[Tensor, "batch pos"],
    generator: torch.Generator,
) -> Questions:
    """Loss of each example at its own loop T(n) alone: ``CE(y_{T(n)})``.

    With ``hold_loops`` or ``due_share``, a random share of the examples is read again, and every
    answer counts the same. Source: arXiv 2409.15647, step-dependent supervision
    (``hold_loops = due_share = 0``).
    """
    shape, device = n_loops.shape, right.device
    loops, targets = [n_loops], [right]
    if config.hold_loops:
        # 1..hold_loops after T(n), so that what was found in time also has to be held.
        later = torch.randint(1, config.hold_loops + 1, shape, generator=generator)
        again = torch.rand(shape, generator=generator, dtype=torch.float32) < config.hold_share
        loops.append(n_loops + later * again)
        targets.append(right.masked_fill(~send(again, device)[:, None], IGNORE))
    if config.due_share:
        # Before T(n), to the targets that are due by then.
        again = torch.rand(shape, generator=generator, dtype=torch.float32) < config.due_share
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32)
        early = (drawn * n_loops).long() + 1  # uniform in 1..T(n)
        loops.append(early.where(again, n_loops))
        left = send((n_loops - early).where(again, -1), device)[:, None]
        has_target = right != IGNORE
        after = has_target.flip(-1).cumsum(-1).flip(-1) - has_target.long()  # answers after each
        targets.append(right.masked_fill((after < left) | (left < 0), IGNORE))
    return Questions(torch.stack(loops), torch.stack(targets))


def answers_at(
    iteration: Iteration, loops: Int[Tensor, "ask batch"]
) -> Float[Tensor, "ask batch pos d_vocab_out"]:
    """Logits of each example after its own numbers of loops, which are on the CPU.

    Examples leave the batch after their last reading.
    """
    order = loops.amax(0).argsort(descending=True, stable=True)  # those that run longest first
    loops, rows = loops[:, order], iteration.select(send(order, iteration.e.device))
    ends = loops.amax(0)  # [batch]: the last loop of each example
    # States are collected loop by loop, read out at once, and put back in the order
    # [question, example].
    reached, places = [], []
    state, running = rows.h0, rows  # [running, pos, d_model] of the examples that go on
    for loop in range(int(ends[0]) + 1):
        state = running.step(state) if loop else state
        still = int((ends > loop).sum())
        due = (loops[:, : len(state)] == loop).nonzero()  # [place, (ask, row)]
        if len(due):
            # With one question, those that leave: a slice, as the longest run first.
            due_rows = slice(still, None) if len(loops) == 1 else send(due[:, 1], state.device)
            reached.append(state[due_rows])
            places.append(due)
        if still < len(state):
            running, state = rows.select(slice(0, still)), state[:still]
    # [answer] each: the question, and the row in the order of running.
    question, row = torch.cat(places).unbind(1)
    back = torch.empty_like(loops)
    back[question, order[row]] = torch.arange(len(question))
    read_in_turn = rows.readout(torch.cat(reached))
    return read_in_turn[send(back, read_in_turn.device)]


def cross_entropy(
    logits: Float[Tensor, "batch pos d_vocab_out"], targets: Int[Tensor, "batch pos"]
) -> Float[Tensor, ""]:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


class Curriculum:
    """Draws one length per example, uniform in ``min_n .. M``, where M grows.

    ``longest`` is M; ``done_at`` the step at which it reached its greatest value, if it has.
    """

    _momentum = 0.9  # of the running accuracy
    _saved = ("longest", "running_accuracy", "n_steps", "grown_at", "done_at")

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self.longest = config.first_longest
        self.running_accuracy = 0.0
        self.n_steps = 0
        self.grown_at = 0
        self.done_at: int | None = 0 if self.longest == config.max_n else None

    def lengths(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
        return torch.randint(
            self.config.min_n, self.longest + 1, (batch_size,), generator=generator
        )

    def update(self, exact_match: float) -> None:
        self.running_accuracy += (1 - self._momentum) * (exact_match - self.running_accuracy)
        self.n_steps += 1
        if self._may_grow(self.n_steps, self.running_accuracy):
            self.longest += 1
            self.grown_at = self.n_steps
            if self.longest == self.config.max_n:
                self.done_at = self.n_steps

    def may_grow(self, n_steps: int) -> bool:
        """Whether M may have grown after ``n_steps`` more calls of :meth:`update`."""
        # The running accuracy if every answer of these steps were right: 1 - (1 - a) momentum^n.
        highest = 1 - (1 - self.running_accuracy) * self._momentum**n_steps
        # Within the rounding of that many additions.
        return self._may_grow(self.n_steps + n_steps, highest + 1e-9)

    def _may_grow(self, n_steps: int, accuracy: float) -> bool:
        config, steps_at_this_length = self.config, n_steps - self.grown_at
        if self.done_at is not None:
            return False
        if config.kind == "interval":
            return steps_at_this_length >= config.interval
        return steps_at_this_length >= config.min_steps and accuracy > config.threshold

    def state(self) -> dict[str, float | int | None]:
        return {name: getattr(self, name) for name in self._saved}

    def load(self, state: dict[str, float | int | None]) -> None:
        for name in self._saved:
            setattr(self, name, state[name])


def learning_rate_factor(
    optimiser: OptimiserConfig, *, step: int, n_steps: int, curriculum_done_at: int | None
) -> float:
    """The factor of the peak learning rate at a step.

    All rise over ``warmup_steps``. ``linear`` falls to 0 over the last ``decay`` share of the
    steps; ``cosine`` along half a cosine after the curriculum (arXiv 2409.15647); ``constant``
    never.
    """
    # From 0 up to 1 over the first steps, whatever the schedule.
    warm = min(1.0, (step + 1) / optimiser.warmup_steps) if optimiser.warmup_steps else 1.0
    if optimiser.schedule == "linear" and optimiser.decay > 0:
        return warm * min(1.0, (n_steps - step) / (optimiser.decay * n_steps))
    if optimiser.schedule == "cosine" and curriculum_done_at is not None:
        span = max(n_steps - curriculum_done_at, 1)
        return warm * 0.5 * (1 + math.cos(math.pi * (step - curriculum_done_at) / span))
    return warm
