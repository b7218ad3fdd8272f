"""Distributed alignment search over loops: the subspace whose exchange does what the whole does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from loopinterp.circuits.subspaces import principal_subspace
from loopinterp.errors import check_seed
from loopinterp.models.looped_model import bind
from loopinterp.models.recorded_gradients import recording_gradients
from loopinterp.progress import track

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.interchange_engine import InterchangeRun
    from loopinterp.circuits.program_counterfactuals import Claims

DELAYS = 10
"""Loops that learning looks ahead: answers at delays 0 .. 9 are followed."""

_BATCH = 48
_RATE = 0.003


def learn_subspace(
    run: InterchangeRun,
    rank: int,
    *,
    target: Claims | None = None,
    steps: int = 80,
    seed: int = 0,
) -> Float[Tensor, "rank d_model"]:
    r"""Orthonormal rows R found by gradient on the pairs of a run.

    After ``own + R^T R (donor - own)`` was put in, log probabilities at delays 0 .. 9 and at the
    positions that are asked for shall be those that follow an exchange of the whole state (mean
    square); after ``own + (1 - R^T R)(donor - own)``, the undisturbed ones. Where a program says
    what the answers are, the loss is the cross entropy with them. R starts from the principal
    directions of ``donor - own``.

    Args:
        run: Pairs to learn from; those with a second interchange are left out.
        rank: Dimensions.
        target: What a program says the answers are, in place of those of the whole exchange.
        steps: Steps of Adam, each on a batch of pairs.
        seed: Seed of the batches.
    """
    generator = torch.Generator().manual_seed(check_seed(seed))
    delays = min(DELAYS, run.pairs.longest + 1)
    answers = run.interchange() if target is None else target.expected
    crop = _Crop(run, delays)
    # An exchange that changes nothing teaches nothing.
    moved = answers != run.base
    useful = (moved & (answers >= 0)).any(-1)[:, :delays].any(-1)
    if run.pairs.second is not None:  # whose answers are not those of the first interchange alone
        useful &= ~run.pairs.second.made
    rows = useful.nonzero().squeeze(1)
    n_sites = run.pairs.positions.shape[1]  # the state of a second interchange comes after these
    own, donor = run.own[:, :n_sites], run.donor[:, :n_sites]
    start = principal_subspace((donor - own).flatten(0, 1), min(rank, len(run.pairs)))
    # In half precision the directions are learned in single: torch has no QR in half.
    exact = torch.promote_types(own.dtype, torch.float32)
    weight = start.mT.to(exact, copy=True).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=_RATE)
    with recording_gradients():
        for _ in track(range(steps if len(rows) else 0), f"learn {rank} directions"):
            batch = rows[torch.randint(len(rows), (_BATCH,), generator=generator).to(rows.device)]
            basis = torch.linalg.qr(weight).Q.to(own.dtype)
            change = donor[batch] - own[batch]
            inside = (change @ basis) @ basis.mT
            if target is None:
                states = torch.cat([own[batch] + inside, own[batch] + change - inside])
                wanted = torch.cat([donor[batch], own[batch]])
                loss = crop.distance(batch.repeat(2), states, wanted)
            else:
                loss = crop.loss(batch, own[batch] + inside, answers, moved)
                loss = loss + crop.loss(batch, own[batch] + change - inside, run.base, moved)
            # The model's own weights get no gradients.
            (weight.grad,) = torch.autograd.grad(loss, [weight])
            optimiser.step()
    return torch.linalg.qr(weight.detach()).Q.mT.to(own.dtype).contiguous()


class _Crop:
    """Runs on with gradients, on the positions that can matter within some loops.

    With a window of w, positions from ``first - w * loops`` on determine what happens at
    ``first .. first + w * loops``; without one all positions are run.
    """

    def __init__(self, run: InterchangeRun, delays: int) -> None:
        self.run, self.delays = run, delays
        with torch.no_grad():
            self._iteration = bind(run.model, run.pairs.inputs)
        n_pos, positions = run.pairs.inputs.shape[1], run.pairs.positions
        around = n_pos if run.reach is None else run.reach * delays
        first, last = positions.amin(1), positions.amax(1)
        self._width = min(int((last - first).max()) + 2 * around + 1, n_pos)
        self._start = (first - around).clamp(min=0, max=n_pos - self._width)
        every = torch.arange(len(first), device=first.device)
        self._states = run.base_states(self._places(every))

    def distance(self, rows: Int[Tensor, " pair"], state: Tensor, other: Tensor) -> Tensor:
        """Mean square of what the logits differ by from those after another exchange."""
        with torch.no_grad():
            wanted = list(self._logits(rows, other))
        found = self._logits(rows, state)
        losses = [
            (f[counted].log_softmax(-1) - w[counted].log_softmax(-1)).square().mean()
            for (f, counted), (w, _) in zip(found, wanted)
            if bool(counted.any())
        ]
        return torch.stack(losses).mean()

    def loss(
        self,
        rows: Int[Tensor, " pair"],
        state: Tensor,
        answers: Int[Tensor, "all_pairs delay pos"],
        moved: Bool[Tensor, "all_pairs delay pos"],
    ) -> Tensor:
        """Mean cross entropy with the answers at each delay and asked position.

        Most answers stay as they are: those that ``moved`` weigh as much as all the others.
        """
        place, losses = self._places(rows), []
        for delay, (logits, inside) in enumerate(self._logits(rows, state)):
            said = answers[rows, delay].gather(1, place).long()
            changed = moved[rows, delay].gather(1, place)
            for some in (changed, ~changed):
                counted = inside & some & (said >= 0)
                if bool(counted.any()):
                    losses.append(cross_entropy(logits[counted], said[counted]))
        return torch.stack(losses).mean()

    def _places(self, rows: Int[Tensor, " pair"]) -> Int[Tensor, "pair pos"]:
        return self._start[rows, None] + torch.arange(self._width, device=rows.device)

    def _logits(
        self, rows: Int[Tensor, " pair"], state: Tensor
    ) -> Iterator[tuple[Float[Tensor, "pair pos d_vocab_out"], Bool[Tensor, "pair pos"]]]:
        """Logits at each delay after ``state`` was put in, and the positions that count."""
        pairs, place = self.run.pairs, self._places(rows)
        base = pairs.base[rows, None]
        at = (pairs.positions[rows] - self._start[rows, None])[..., None].expand_as(state)
        h = self._states[rows].scatter(1, at, state)
        own, model = self._iteration, self.run.model
        if self.run.reach is None:
            own = own.select(pairs.base[rows])
        else:  # positions by themselves, of which the model is asked without a context
            own = replace(
                own,
                e=own.e[base, place],
                h0=h,
                advance=lambda h, e, _, **index: model.step(h, e, **index),
                readout=model.readout,
                context=None,
            )
        # Left of the first exchanged position the crop's own edge is seen, not the run's.
        counts = pairs.asked[base, place] & (place >= pairs.positions[rows].amin(1, keepdim=True))
        for delay in range(self.delays):
            if delay:
                h = own.step_each(h, pairs.loop[rows] + delay - 1)
            yield own.readout(h), counts & self.run.within[rows, delay, None]
