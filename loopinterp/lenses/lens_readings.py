"""What lenses read at each place of a run: of the wanted class, beside controls and baselines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.readouts import stable_from
from loopinterp.dynamics.state_trajectories import chunks
from loopinterp.errors import InputError
from loopinterp.lenses.lens_places import (
    Place,
    layer_label,
    layers_around,
    places,
    readout_without_coda,
)
from loopinterp.models.looped_model import bind
from loopinterp.models.model_description import device_of
from loopinterp.progress import track
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.lenses.fitted_lens import FittedLens

_TRANSFERRED = 8
"""Loops of which each reads with the map of each other."""

_SHUFFLES = 4
"""One may by chance read what another does not."""


class PlaceReader:
    """What a lens reads at the places of a run over one input: logits ``[batch, pos, class]``.

    Args:
        model: The model.
        inputs: What it runs on.
        name: "logit", "coda", "tuned" or "jacobian".
        fitted: The lens, where it is one of the last two.
    """

    def __init__(
        self, model: Any, inputs: Tensor, name: str, fitted: FittedLens | None = None
    ) -> None:
        self.iteration, self._name, self._fitted = bind(model, inputs), name, fitted
        self.own = self.iteration.readout
        self.plain = readout_without_coda(model, inputs) or self.own

    @property
    def reads_layers(self) -> bool:
        """Whether it reads within loops too: a fitted lens has to have maps for that."""
        lens = self._fitted
        return lens is None or lens.shared or lens.n_layers > 0

    def read(self, h: Tensor, loop: int) -> Tensor:
        """The reading of the state after some loop.

        Raises:
            InputError: If the logits of a finite state are not finite.
        """
        if self._name == "coda":
            return self.iteration.read(h, loop)
        return self.at(Place(loop, None, h, h))

    def at(self, place: Place) -> Tensor:
        """The reading of a place."""
        if self._fitted is None:
            return (self.plain if self._name == "logit" else self.own)(place.ended)
        h = place.ended if self._fitted.kind == "tuned" else place.residual
        return self.own(self._fitted.transport(h, place.loop, place.layer))


class LensReader:
    """Reads the places of a run through a lens and its controls.

    Args:
        model: The model.
        name: "logit", "coda", "tuned" or "jacobian".
        fitted: The lens, where it is one of the last two.
        n_loops: Loops of the run.
        inside: Whether layers are read too.
        positions: Positions that are read.
        seed: Seed of the shuffles.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        fitted: FittedLens | None,
        n_loops: int,
        inside: bool,
        positions: list[int],
        seed: int,
    ) -> None:
        self.model, self.name, self.fitted, self.seed = model, name, fitted, seed
        self.n_loops, self.inside, self.positions = n_loops, inside, positions
        self.has_coda = bool(layers_around(model, "coda"))
        beside = ["plain"] if fitted is not None or self.has_coda else []
        if name == "logit" and self.has_coda:
            beside = ["coda"]
        self.readings = ["lens", *beside, "shuffled"]
        self.layers = [layer_label(None)]
        self.transferred: list[int] = []
        if fitted is not None and not fitted.shared:
            some = torch.linspace(0, n_loops, min(_TRANSFERRED, n_loops + 1)).round().int()
            self.transferred = some.tolist()

    def parts(self, inputs: Tensor, targets: Tensor | None) -> list[dict[str, Tensor]]:
        """The arrays of each part of a batch."""
        found = list(places(self.model, inputs[:1], 1, inside=self.inside))
        self.layers = [layer_label(place.layer) for place in found[1:]]
        size = found[0].residual
        logits = bind(self.model, inputs[:1]).readout(size)
        each = (size.numel() * len(self.layers) * (self.n_loops + 1) + 8 * logits.numel()) * 4
        rows = list(chunks(len(inputs), each))
        device = device_of(self.model)
        own = [None if targets is None else targets[part].to(device) for part in rows]
        return [self._part(inputs[part], t) for part, t in zip(track(rows, "lens"), own)]

    def _part(self, inputs: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        run = list(places(self.model, inputs, self.n_loops, inside=self.inside))
        lens = PlaceReader(self.model, inputs, self.name, self.fitted)
        log_p = self._chosen(_log(lens.iteration.read(run[-1].residual, self.n_loops)))
        if targets is None:
            wanted = log_p.argmax(-1)
        else:
            targets = self._chosen(targets[..., None])[..., 0]
            wanted = targets.where(targets != IGNORE, -1)
            n_classes = log_p.shape[-1]
            if int(wanted.max()) >= n_classes:
                raise InputError(
                    "data",
                    expected=f"right answers among the model's {n_classes} classes",
                    given=f"class {int(wanted.max())}",
                    fix="Pass the model's own task, or inputs alone.",
                )
        asked = wanted >= 0
        share = asked / asked.sum(1, keepdim=True).clamp(min=1)
        orders = self._shuffles(run[0].residual)
        found: dict[str, list[Tensor]] = defaultdict(list)
        readings: dict[str, list[Tensor]] = defaultdict(list)
        for place in run:
            log_q = self._chosen(_log(lens.at(place)))
            for name, values in measures(log_p, log_q, wanted).items():
                found[name].append(values)
            others = (lens.own(place.ended), lens.plain(place.ended))
            own, plain = (self._chosen(_log(logits)) for logits in others)
            turned = (_shuffled(place, order) for order in orders)
            shuffled = [self._chosen(_log(lens.at(one))) for one in turned]
            read = {"lens": [log_q], "plain": [plain], "coda": [own], "shuffled": shuffled}
            for reading in self.readings:
                gaps = [(divergence(log_p, one) * share).sum(1) for one in read[reading]]
                tops = [((one.argmax(-1) == wanted) * share).sum(1) for one in read[reading]]
                readings["reading_kl"].append(torch.stack(gaps).mean(0))
                readings["reading_top"].append(torch.stack(tops).mean(0))
        arrays = {k: self._laid_out(torch.stack(v)) for k, v in found.items()}
        for name, values in readings.items():
            by_reading = torch.stack(values).unflatten(0, (len(run), len(self.readings)))
            arrays[name] = torch.stack([self._laid_out(x) for x in by_reading.unbind(1)])
        answers = arrays["answer"][:, -1]
        arrays |= {"wanted": wanted, "flips": (answers[2:] != answers[1:-1]).sum(0)}
        arrays["settled"] = (
            1 + stable_from(answers[1:]) if self.n_loops > 1 else torch.ones_like(wanted)
        )
        if self.transferred:
            arrays["transfer_kl"] = self._transfer(run, lens.own, log_p, share)
        p = log_p.exp() * share[..., None]
        arrays["_mean"], arrays["_negentropy"] = p.sum(1), (p * log_p).nan_to_num().sum((1, 2))
        return arrays

    def _shuffles(self, like: Tensor) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        orders = (torch.randperm(like.shape[-1], generator=generator) for _ in range(_SHUFFLES))
        return [order.to(like.device) for order in orders]

    def _transfer(
        self,
        run: list[Place],
        readout: Callable[[Tensor], Tensor],
        log_p: Tensor,
        share: Tensor,
    ) -> Tensor:
        assert self.fitted is not None
        states = {place.loop: place.residual for place in run if place.layer is None}
        rows = []
        for translator in self.transferred:
            for applied in self.transferred:
                moved = self.fitted.transport(states[applied], translator)
                gap = divergence(log_p, self._chosen(_log(readout(moved))))
                rows.append((gap * share).sum(1))
        return torch.stack(rows).unflatten(0, (len(self.transferred),) * 2)

    def _laid_out(self, values: Tensor) -> Tensor:
        """Values of all places as [loop, layer, …], with nothing where loop 0 has no layers."""
        n = len(self.layers)
        empty = -1 if not values.is_floating_point() else torch.nan
        before = torch.full_like(values[:1].expand(n - 1, *values.shape[1:]), empty)
        return torch.cat([before, values]).unflatten(0, (self.n_loops + 1, n))

    def _chosen(self, x: Tensor) -> Tensor:
        return x if self.positions == [*range(x.shape[1])] else x[:, self.positions]


def _shuffled(place: Place, order: Tensor) -> Place:
    # A layer may be narrower than the state, and then has the order of its own components.
    within = order[order < place.residual.shape[-1]]
    return place._replace(residual=place.residual[..., within], ended=place.ended[..., order])


def _log(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def divergence(
    log_p: Float[Tensor, "*at d_vocab_out"], log_q: Float[Tensor, "*at d_vocab_out"]
) -> Float[Tensor, "*at"]:
    r""":math:`\mathrm{KL}(p \| q)` in nats, of log-probabilities."""
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -torch.inf, 0, terms).sum(-1).clamp(min=0)


def measures(
    log_p: Float[Tensor, "batch pos d_vocab_out"],
    log_q: Float[Tensor, "batch pos d_vocab_out"],
    wanted: Int[Tensor, "batch pos"],
) -> dict[str, Tensor]:
    """What a reading q says of the wanted class, and how far it is from p, at each position.

    Example:
        >>> log_q = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
        >>> found = measures(log_q, log_q, torch.tensor([[1]]))
        >>> found["rank"].item(), found["probability"].item(), found["kl"].item()
        (2, 0.25, 0.0)
    """
    own = log_q.gather(-1, wanted.clamp(min=0)[..., None])
    asked: Bool[Tensor, "batch pos"] = wanted >= 0
    return {
        "answer": log_q.argmax(-1).int(),
        "rank": (1 + (log_q > own).sum(-1)).where(asked, -1).int(),
        "probability": own[..., 0].exp().float().masked_fill(~asked, torch.nan),
        "entropy": torch.special.entr(log_q.exp()).sum(-1).float(),
        "kl": divergence(log_p, log_q).float(),
    }


def baselines(run: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What one distribution for all, and one class for all, come to in each example."""
    own, negentropy, wanted = (
        torch.cat([part[name] for part in run]) for name in ("_mean", "_negentropy", "wanted")
    )
    mean = own.mean(0)
    common = mean.log().clamp(min=-1e4)
    counts = torch.bincount(wanted[wanted >= 0], minlength=2)
    asked = (wanted >= 0).sum(1).clamp(min=1)
    return {
        "unigram_kl": (negentropy - own @ common).clamp(min=0),
        "majority_top": (wanted == counts.argmax()).sum(1) / asked,
    }
