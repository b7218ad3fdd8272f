"""Training objectives: at which loops the answer is asked for.

Every objective sees the model as a bare iteration ``h -> step(h)`` with a readout, so it works
for any looped model, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from loopinterp.errors import InputError
from loopinterp.models.run_length import shifted_loops
from loopinterp.tasks.task import IGNORE
from loopinterp.training.device import send

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration
    from loopinterp.tasks.task import Batch
    from loopinterp.training.config import ObjectiveConfig


@dataclass(frozen=True)
class Supervised:
    """What an objective gives.

    Attributes:
        loss: Scalar to descend.
        logits: The model's answer to each example, at the loop where it counts.
    """

    loss: Float[Tensor, ""]
    logits: Float[Tensor, "batch pos d_vocab_out"]


@dataclass(frozen=True)
class Asked:
    """What an objective wants to know of a batch, and what it makes of the answers.

    Attributes:
        loops: The loops after which each example is asked, any number of times; on the CPU, which
            plans the run by them.
        targets: The right answers of each asking.
        combine: From the losses of each asking to that of all. None: every answer counts the same.
        answer: The asking that counts as the model's answer.
        share: What these examples are of those that the loss is the mean of.
    """

    loops: Int[Tensor, "ask batch"]
    targets: Int[Tensor, "ask batch pos"]
    combine: Callable[[Float[Tensor, " ask"]], Float[Tensor, ""]] | None = None
    answer: int = 0
    share: float = 1.0

    def of(self, rows: slice) -> Asked:
        """What is asked of some of the examples; the losses of all shares add up to the whole."""
        own = self.targets[:, rows]
        share = int((own != IGNORE).sum()) / max(int((self.targets != IGNORE).sum()), 1)
        return replace(self, loops=self.loops[:, rows], targets=own, share=share)

    def score(self, logits: Float[Tensor, "ask batch pos d_vocab_out"]) -> Supervised:
        """Loss and answer, from the logits of each asking."""
        targets = send(self.targets, logits.device)
        if self.combine is None:
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        else:
            losses = [cross_entropy(y, right) for y, right in zip(logits, targets)]
            loss = self.combine(torch.stack(losses))
        return Supervised(loss if self.share == 1 else loss * self.share, logits[self.answer])


def supervise(
    config: ObjectiveConfig, iteration: Iteration, batch: Batch, *, generator: torch.Generator
) -> Supervised:
    """Run the loops of a bound model, and take the loss where the configuration says.

    Args:
        config: The objective.
        iteration: The model bound to ``batch.inputs``.
        batch: The examples.
        generator: On the CPU, for objectives that draw a loop.

    Raises:
        InputError: If no number of loops is given and T(n) is 0 throughout.
    """
    asked = ask(config, batch, generator)
    return asked.score(answers_at(iteration, asked.loops))


def ask(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Asked:
    """The part of :func:`supervise` before the model is run.

    What the objectives call T(n) is ``ceil(loop_scale T(n)) + extra_loops``, at least 1, where
    these are set.
    """
    shifted = shifted_loops(batch.n_loops.cpu(), scale=config.loop_scale, extra=config.extra_loops)
    return _OBJECTIVES[config.kind](config, replace(batch, n_loops=shifted), generator)


def _once(n_loops: Int[Tensor, " batch"], batch: Batch) -> Asked:
    """Every answer once, all counting the same."""
    return Asked(n_loops[None], batch.targets[None])


def _last(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Asked:
    """Loss after the last loop: ``CE(y_T)``, the same T for all examples of a batch."""
    return _once(torch.full_like(batch.n_loops, _n_loops(config, batch)), batch)


def _step_dependent(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Asked:
    """Loss of each example at its own loop T(n), and nowhere else: ``CE(y_{T(n)})``.

    Examples leave the batch as they finish, so that a short one costs no more than its own
    loops. The result equals running each example alone.

    With ``hold_loops``, a drawn share of the examples is asked a second time, k loops after T(n)
    with k uniform in 1..hold_loops, so that what was found in time also has to be held. With
    ``due_share``, others are asked before T(n), for what is due by then. Every answer counts the
    same.

    Source: arXiv 2409.15647, step-dependent supervision (``hold_loops = due_share = 0``).
    """
    shape, device = batch.n_loops.shape, batch.targets.device
    loops, targets = [batch.n_loops], [batch.targets]
    if config.hold_loops:
        later = torch.randint(1, config.hold_loops + 1, shape, generator=generator)
        again = torch.rand(shape, generator=generator, dtype=torch.float32) < config.hold_share
        loops.append(batch.n_loops + later * again)
        targets.append(batch.targets.masked_fill(~send(again, device)[:, None], IGNORE))
    if config.due_share:
        again = torch.rand(shape, generator=generator, dtype=torch.float32) < config.due_share
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32)
        early = (drawn * batch.n_loops).long() + 1  # uniform in 1..T(n)
        loops.append(early.where(again, batch.n_loops))
        left = send((batch.n_loops - early).where(again, -1), device)[:, None]
        asked = batch.targets != IGNORE
        after = asked.flip(-1).cumsum(-1).flip(-1) - asked.long()  # answers after each
        targets.append(batch.targets.masked_fill((after < left) | (left < 0), IGNORE))
    return Asked(torch.stack(loops), torch.stack(targets))


def _progressive(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Asked:
    """``(1 - alpha) CE(y_T) + alpha CE(y_r)`` with r uniform in 1..T, drawn once per batch.

    Source: arXiv 2405.17399, progressive loss.
    """
    last = _n_loops(config, batch)
    drawn = int(torch.randint(1, last + 1, (), generator=generator))
    asked = torch.full_like(batch.n_loops, last)
    if drawn == last:
        return _once(asked, batch)

    def combine(losses: Tensor) -> Tensor:
        return (1 - config.alpha) * losses[0] + config.alpha * losses[1]

    loops = torch.stack([asked, torch.full_like(asked, drawn)])
    return Asked(loops, batch.targets.expand(2, -1, -1), combine)


def _every(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Asked:
    """Weighted mean of the loss over loops: ``sum_t w_t CE(y_t) / sum_t w_t``, t = 1..T."""
    loops = torch.arange(1, _n_loops(config, batch) + 1)

    def combine(losses: Tensor) -> Tensor:
        if config.weights is None:
            return losses.mean()
        weights = send(torch.tensor(config.weights, dtype=losses.dtype), losses.device)
        return (weights * losses).sum() / weights.sum()

    targets = batch.targets.expand(len(loops), -1, -1)
    return Asked(loops[:, None].expand(-1, len(batch)), targets, combine, answer=-1)


def _drawn(config: ObjectiveConfig, batch: Batch, generator: torch.Generator) -> Asked:
    """``CE(y_r)`` with r uniform in least_loops..n_loops, drawn once per batch: T(n) unknown."""
    most = _n_loops(config, batch)
    drawn = int(torch.randint(config.least_loops, most + 1, (), generator=generator))
    return _once(torch.full_like(batch.n_loops, drawn), batch)


_OBJECTIVES = {
    "last": _last,
    "step_dependent": _step_dependent,
    "progressive": _progressive,
    "every": _every,
    "drawn": _drawn,
}


def answers_at(
    iteration: Iteration, loops: Int[Tensor, "ask batch"]
) -> Float[Tensor, "ask batch pos d_vocab_out"]:
    """Logits of each example after its own numbers of loops.

    An example is run no further than the last loop it is asked at.

    Args:
        iteration: The model bound to the examples.
        loops: Loops after which each example is asked, any number of times; on the CPU.
    """
    order = loops.amax(0).argsort(descending=True, stable=True)  # those that run longest first
    asked, rows = loops[:, order], iteration.select(send(order, iteration.e.device))
    answers, places = [], []
    for loop, state in _running(rows, asked.amax(0)):
        due = (asked[:, : len(state)] == loop).nonzero()  # [place, (ask, row)]
        if len(due):
            answers.append(iteration.readout(state[send(due[:, 1], state.device)]))
            places.append(due)
    asking, row = torch.cat(places).unbind(1)
    back = torch.empty_like(asked)
    back[asking, order[row]] = torch.arange(len(asking))
    read_in_turn = torch.cat(answers)
    return read_in_turn[send(back, read_in_turn.device)]


def _running(
    iteration: Iteration, ends: Int[Tensor, " batch"]
) -> Iterator[tuple[int, Float[Tensor, "running pos d_model"]]]:
    """States after 0, 1, … loops of the examples that go on so long, which are the first ones."""
    state, running = iteration.h0, iteration
    for loop in range(int(ends[0]) + 1):
        state = running.step(state) if loop else state
        yield loop, state
        still = int((ends > loop).sum())
        if still < len(state):
            running, state = iteration.select(slice(0, still)), state[:still]


def cross_entropy(
    logits: Float[Tensor, "batch pos d_vocab_out"], targets: Int[Tensor, "batch pos"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy over all positions of the batch that are asked for."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


def _n_loops(config: ObjectiveConfig, batch: Batch) -> int:
    """T: what is configured, or the largest T(n) of the batch."""
    if config.n_loops is not None:
        return config.n_loops
    longest = int(batch.n_loops.max())
    if longest < 1:
        raise InputError(
            "n_loops",
            expected="at least one loop",
            given=f"T(n) = {longest} for every example of the batch",
            fix="Set objective.n_loops.",
        )
    return longest
