"""Distributed alignment search: a subspace whose interchange acts like the whole state's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch.nn.functional import cross_entropy

from loopinterp.core.boundary import checked
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.interventions.engine import principal_subspace
from loopinterp.models.iteration import bind
from loopinterp.models.taps import recording_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.interventions.engine import InterchangeRun


@checked
def learn_subspace(
    run: InterchangeRun,
    rank: PositiveInt,
    *,
    target: Int[Tensor, "pair delay pos"] | None = None,
    steps: NonNegativeInt = 80,
    seed: Seed = 0,
) -> Float[Tensor, "rank d_model"]:
    """Orthonormal rows R, learned by gradient on the pairs of a run.

    With the base's state b and the source's s, log probabilities at delays 0 .. 9 after
    :math:`b + R^T R (s - b)` are fitted to those after :math:`s` (mean square), and those after
    :math:`b + (1 - R^T R)(s - b)` to those of the clean run. With a target, the loss is the cross
    entropy with its answers. R starts from the principal directions of :math:`s - b`.

    Args:
        run: Pairs to learn from; those with a second interchange are left out.
        target: Answers to learn, in place of those of the whole interchange; negative if none.
        steps: Steps of Adam, each on a batch of pairs.
        seed: Seed of the batches.

    Source: distributed alignment search, Geiger et al., arXiv 2303.02536.
    """
    generator = torch.Generator().manual_seed(seed)
    delays = min(10, run.pairs.longest + 1)
    answers = run.interchange() if target is None else target
    crop = _Crop(run, delays)
    moved = answers != run.base  # [pair, delay, pos]; pairs that nothing moves are left out
    useful = (moved & (answers >= 0)).any(-1)[:, :delays].any(-1)
    if run.pairs.second is not None:  # whose answers are not those of the first interchange alone
        useful &= ~run.pairs.second.made
    rows = useful.nonzero().squeeze(1)  # [pair]
    n_sites = run.pairs.positions.shape[1]  # the state of a second interchange comes after these
    base, source = run.base_state[:, :n_sites], run.source_state[:, :n_sites]
    start = principal_subspace((source - base).flatten(0, 1), min(rank, len(run.pairs)))
    # In half precision the directions are learned in single: torch has no QR in half.
    exact = torch.promote_types(base.dtype, torch.float32)
    weight = start.mT.to(exact, copy=True).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=0.003)
    with recording_gradients(run.model):
        for _ in track(range(steps if len(rows) else 0), f"learn {rank} directions"):
            batch = rows[torch.randint(len(rows), (48,), generator=generator).to(rows.device)]
            # Orthonormal columns [d_model, rank]; the part of the change inside them.
            basis = torch.linalg.qr(weight).Q.to(base.dtype)
            change = source[batch] - base[batch]
            inside = (change @ basis) @ basis.mT  # [pair, site, d_model]
            if target is None:
                states = torch.cat([base[batch] + inside, base[batch] + change - inside])
                references = torch.cat([source[batch], base[batch]])
                loss = crop.distance(batch.repeat(2), states, references)
            else:
                loss = crop.loss(batch, base[batch] + inside, answers, moved)
                loss = loss + crop.loss(batch, base[batch] + change - inside, run.base, moved)
            # The model's own weights get no gradients.
            (weight.grad,) = torch.autograd.grad(loss, [weight])
            optimiser.step()
    return torch.linalg.qr(weight.detach()).Q.mT.to(base.dtype).contiguous()


class _Crop:
    """Differentiable runs; with a window, only of the positions that the change reaches.

    A window looks to the left: to the left of the change all states are the clean ones.
    """

    def __init__(self, run: InterchangeRun, delays: int) -> None:
        self.run, self.delays = run, delays
        with torch.no_grad():
            self._iteration = bind(run.model, run.pairs.inputs)
        n_pos, positions = run.pairs.inputs.shape[1], run.pairs.positions
        reach = n_pos if run.reach is None else run.reach
        self._first, last = positions.amin(1), positions.amax(1)
        self._start = (self._first - reach).clamp(min=0)
        # The same width for every pair, [pair, width] positions from its start.
        self._width = min(int((last - self._start).max()) + 1 + reach * (delays - 1), n_pos)
        places = self._places(torch.arange(len(self._start), device=self._start.device))
        self._states = run.base_states(places, 1)[:, 0]
        # Clean states to the left of the change, [pair, delay, reach, d_model].
        self._before = None if run.reach is None else run.base_states(places[:, :reach], delays)

    def distance(self, rows: Int[Tensor, " pair"], state: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            references = list(self._logits(rows, other))
        losses = [
            (x[counted].log_softmax(-1) - reference[counted].log_softmax(-1)).square().mean()
            for (x, counted), (reference, _) in zip(self._logits(rows, state), references)
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
        """Mean cross entropy with the answers; ``moved`` and other answers have equal weight."""
        place, losses = self._places(rows), []
        for delay, (logits, inside) in enumerate(self._logits(rows, state)):
            labels = answers[rows, delay].gather(1, place).long()
            changed = moved[rows, delay].gather(1, place)
            for part in (changed, ~changed):
                counted = inside & part & (labels >= 0)
                if bool(counted.any()):
                    losses.append(cross_entropy(logits[counted], labels[counted]))
        return torch.stack(losses).mean()

    def _places(self, rows: Int[Tensor, " pair"]) -> Int[Tensor, "pair pos"]:
        """Positions from the start on; past the end the last one again, which none looks at."""
        places = self._start[rows, None] + torch.arange(self._width, device=rows.device)
        return places.clamp(max=self.run.pairs.inputs.shape[1] - 1)

    def _logits(
        self, rows: Int[Tensor, " pair"], state: Tensor
    ) -> Iterator[tuple[Float[Tensor, "pair pos d_vocab_out"], Bool[Tensor, "pair pos"]]]:
        pairs, place = self.run.pairs, self._places(rows)
        base = pairs.base[rows, None]
        # Columns of the changed positions within the crop, [pair, site, d_model].
        at = (pairs.positions[rows] - self._start[rows, None])[..., None].expand_as(state)
        h = self._states[rows].scatter(1, at, state)
        run, model = self._iteration, self.run.model
        if self.run.reach is None:
            run = run.select(pairs.base[rows])
        else:  # a window of positions, which the model steps without a context
            run = replace(
                run,
                e=run.e[base, place],
                h0=h,
                advance=lambda h, e, _, **index: model.step(h, e, **index),
                readout=model.readout,
                context=None,
            )
        # Left of the first changed position nothing changes.
        changed = place >= self._first[rows, None]
        counts = pairs.asked[base, place] & changed
        counts[:, 1:] &= place[:, 1:] > place[:, :-1]  # past the end the last position again
        for delay in range(self.delays):
            if delay:
                h = run.step_each(h, pairs.loop[rows] + delay - 1)
                if self._before is not None:
                    clean = self._before[rows, delay]  # [pair, reach, d_model]
                    # There a step saw the edge of the crop, not of the run.
                    edge, rest = h.tensor_split([clean.shape[1]], dim=1)
                    edge = torch.where(changed[:, : edge.shape[1], None], edge, clean)
                    h = torch.cat([edge, rest], dim=1)
            yield run.readout(h), counts & self.run.within[rows, delay, None]
