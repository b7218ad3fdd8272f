"""Lenses by loop: what the state says of the answer after each loop, read in one of four ways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch

from loopinterp.dynamics.readouts import stable_from
from loopinterp.dynamics.state_trajectories import chunks, gather
from loopinterp.errors import GREATEST_SEED, InputError, check_choice, check_integer
from loopinterp.lenses.fitted_lens import FittedLens
from loopinterp.lenses.jacobian_lens import fit_jacobian_lens
from loopinterp.lenses.lens_places import (
    Place,
    layer_label,
    layers_around,
    places,
    readout_without_coda,
)
from loopinterp.lenses.tuned_lens import fit_tuned_lens
from loopinterp.models.looped_model import bind, need_hooks, need_model
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.progress import track
from loopinterp.results import Result, study
from loopinterp.study_examples import examples_for, inputs_and_loops, need_loops
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Task

LensName = Literal["logit", "coda", "tuned", "jacobian"]

_CELL = "loop layer batch pos"
_TRANSFERRED = 8
"""Loops of which each reads with the map of each other."""

_SHUFFLES = 4
"""One may by chance read what another does not."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LensResult(Result, kind="lens"):
    r"""What :func:`lens_study` returns.

    ``loop`` counts loops made: loop 0 is the initial state. ``layer`` is "state", what the loop
    leaves, and where the study looks inside loops "layer 0", …: the residual after that layer of
    the last loop made. The initial state has no layers: NaN there, and -1 where numbers are whole.

    Arrays:
        answer: The class that is on top.
        rank: Rank of the wanted class, 1 for the top.
        probability: Probability of the wanted class.
        entropy: Entropy of the reading, in nats.
        kl: :math:`\mathrm{KL}(p_T \| q)` in nats: from the model's own readout after the last loop
            to the reading.
        wanted: The right class; where the data has none, the model's own answer after the last
            loop; -1 where nothing is asked.
        settled: The loop from which on the state is read as it is at the end (from 1 on, as
            the initial state has seen no loop).
        flips: How often the reading changes from one loop to the next, from loop 1 on.
        reading_kl: Mean of ``kl`` over the asked positions of an example, by ``reading``: "lens";
            "plain", final norm and unembedding alone, or where that is the lens and the model has
            a coda, "coda", its own readout; and "shuffled", the lens on states whose components
            are shuffled, all alike, the mean of four shuffles (controls).
        reading_top: Share of its asked positions at which the wanted class is on top, likewise.
        unigram_kl: The same divergence to the mean of all :math:`p_T` (control: nothing of the
            state is read).
        majority_top: Share of its asked positions whose wanted class is the most frequent of all
            (control).
        transfer_kl: With a map for each place: mean ``kl`` where the map of loop ``translator``
            reads the state after loop ``applied`` (control: whether a loop needs its own). That
            of the last loop is the identity.

    Attributes:
        lens: "logit", "coda", "tuned" or "jacobian".
        has_coda: Whether the model has a coda, without which "logit" and "coda" are the same lens.
        targets: Whether the data says what is right.
        n_fit: Examples that the lens was fitted on; 0 where none are needed.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("answer", "rank", "probability", "entropy", "kl"), _CELL),
        **dict.fromkeys(("wanted", "settled", "flips"), "batch pos"),
        **dict.fromkeys(("reading_kl", "reading_top"), "reading loop layer batch"),
        **dict.fromkeys(("unigram_kl", "majority_top"), "batch"),
        "transfer_kl": "translator applied batch",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"transfer_kl"})

    lens: str
    has_coda: bool
    targets: bool
    n_fit: int = 0

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.data.sizes["loop"] - 1

    @property
    def asked(self) -> xr.DataArray:
        """Where an answer is asked for, [batch, pos]."""
        return self.data["wanted"] >= 0

    @property
    def top(self) -> xr.DataArray:
        """Share of asked positions at which the wanted class is on top, [loop, layer]."""
        right = (self.data["rank"] == 1) & self.asked
        return (right.sum(("batch", "pos")) / self.asked.sum()).where(self.there)

    @property
    def there(self) -> xr.DataArray:
        """Which places there are, [loop, layer]: all but the layers before the first loop."""
        return (self.data["answer"] >= 0).any(("batch", "pos"))


@torch.no_grad()
def lens_study(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    lens: LensName | FittedLens = "logit",
    n_loops: int | None = None,
    inside: bool = False,
    positions: Sequence[int] | None = None,
    fit_on: Batch | Task | Tensor | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> LensResult:
    r"""Read every state of a run through a lens, with its controls.

    ========== ==========================================================================
    logit      ``unembed(final_norm(h))``, without a coda
    coda       ``model.readout(h)``, coda included: the same where there is none
    tuned      ``model.readout(A_t h + b_t)``, trained: :func:`fit_tuned_lens`
    jacobian   ``model.readout(J_t h)``, :math:`J_t = \mathbb{E}\,\partial h_T/\partial h_t`:
               :func:`fit_jacobian_lens`
    ========== ==========================================================================

    Inside a loop the first three read what the loop would leave if it ended at that layer: with
    its loop norm. At the last state all but the logit lens of a model with a coda are the model's
    own readout. A lens that has to be fitted is fitted on other examples than it reads.

    Args:
        model: Any looped model.
        data: A batch, its inputs alone, or a task to draw a batch from; all asked for after one
            number of loops.
        lens: Its name, or one that is fitted already.
        n_loops: Loops T of the run; T(n) by default, that of its fit for a fitted lens.
        inside: Whether to read after each layer too, which takes a model with hooks.
        positions: Positions to read; all by default.
        fit_on: What to fit on; by default the task that the data is of, with another seed.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If examples are asked for after several numbers of loops, the lens does not fit
            the model, or nothing is asked at any position that is read.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> result = lens_study(model, Addition(), lens="coda", n=5, batch_size=32)
        >>> result.top.sel(layer="state").values.round(1).tolist()
        [0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    need_model(model)
    if not isinstance(lens, FittedLens):
        check_choice("lens", lens, get_args(LensName))
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, targets, n_loops = _inputs(model, data, n_loops, lens, drawn)
    if inside:
        need_hooks(model)
    n_pos = inputs.shape[1]
    chosen = [
        check_integer("positions", p, least=-n_pos, most=n_pos - 1) % n_pos
        for p in positions or range(n_pos)
    ]
    described = describe_model(model)
    options = {"n_loops": n_loops, "inside": inside, "n_examples": len(inputs)}
    name = lens.kind if isinstance(lens, FittedLens) else lens
    with study(seed, study="lens", model=described, lens=name, **options) as watch:
        if isinstance(lens, str) and lens in ("tuned", "jacobian"):
            other = (seed + 1_000_003) % GREATEST_SEED
            fit_at = {"n_loops": n_loops, "inside": inside, "seed": other}
            lens = _fit(lens, model, data, fit_on, n, **fit_at)
        fitted = lens if isinstance(lens, FittedLens) else None
        reader = _Reader(model, name, fitted, n_loops, inside, chosen, seed)
        run = reader.parts(inputs, targets)
        wanted = torch.cat([part["wanted"] for part in run])
        if not bool((wanted >= 0).any(1).all()):
            raise InputError(
                "data",
                expected="an answer to be asked for at some position of each example that is read",
                given=f"none in {int((wanted < 0).all(1).sum())} of {len(wanted)} examples",
                fix="Leave positions= out, or pass inputs alone to read what the model ends with.",
            )
        controls = _baselines(run)
        coords: dict[str, Any] = {
            "loop": range(n_loops + 1),
            "layer": reader.layers,
            "pos": chosen,
            "reading": reader.readings,
        }
        if reader.transferred:
            coords |= {"translator": reader.transferred, "applied": reader.transferred}
        return LensResult.of(
            watch,
            coords=coords,
            **gather(LensResult, [{k: v for k, v in p.items() if k[0] != "_"} for p in run]),
            **controls,
            lens=name,
            has_coda=reader.has_coda,
            targets=targets is not None,
            n_fit=fitted.n_examples if fitted else 0,
        )


def _inputs(
    model: Any, data: Any, n_loops: int | None, lens: LensName | FittedLens, drawn: dict[str, Any]
) -> tuple[Tensor, Tensor | None, int]:
    """Inputs, what is right if that is known, and loops."""
    if isinstance(lens, FittedLens):
        if n_loops not in (None, lens.n_loops):
            raise InputError(
                "n_loops",
                expected=f"the {lens.n_loops} loops of the lens, whose maps lead to that end",
                given=str(n_loops),
                fix=f"Leave n_loops out, or fit a lens with n_loops={n_loops}.",
            )
        n_loops = lens.n_loops
    if isinstance(data, torch.Tensor):
        inputs, n_loops = inputs_and_loops(model, data, n_loops)
        check_integer("n_loops", n_loops, least=1)
        return inputs, None, n_loops
    batch = examples_for(model, data, **drawn)
    if n_loops is None:
        need_loops(model)
        if len(own := batch.n_loops.unique().tolist()) != 1:
            raise InputError(
                "data",
                expected="examples that are asked for after one number of loops",
                given=f"examples asked for after {own} loops",
                fix="Sample them with one n, or pass n_loops.",
            )
        n_loops = own[0]
    return batch.inputs, batch.targets, check_integer("n_loops", n_loops, least=1)


def _to_fit_on(data: Any, fit_on: Any) -> Any:
    """Examples to fit on that are not those to be read."""
    if fit_on is not None:
        return fit_on
    task = data.task if isinstance(data, Batch) else data
    if task is None or isinstance(task, torch.Tensor):
        raise InputError(
            "fit_on",
            expected="examples to fit the lens on, other than those it reads",
            given="None, and data of no task that more could be drawn from",
            fix="Pass fit_on=other_inputs, or a lens that is fitted already.",
        )
    return task


def _fit(
    name: str, model: Any, data: Any, fit_on: Any, n: int | None, **options: Any
) -> FittedLens:
    fit: Callable[..., FittedLens] = fit_tuned_lens if name == "tuned" else fit_jacobian_lens
    on = _to_fit_on(data, fit_on)
    if not isinstance(on, (torch.Tensor, Batch)):
        length = int(data.n[0]) if isinstance(data, Batch) and n is None else n
        options |= {"n": length, "batch_size": 32}
    return fit(model, on, **options)


class _Reader:
    """Reads the places of a run through a lens and its controls."""

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
        iteration = bind(self.model, inputs)
        readouts = iteration.readout, readout_without_coda(self.model, inputs) or iteration.readout
        log_p = self._chosen(_log(iteration.read(run[-1].residual, self.n_loops)))
        if targets is None:
            wanted = log_p.argmax(-1)
        else:
            targets = self._chosen(targets[..., None])[..., 0]
            wanted = targets.where(targets != IGNORE, -1)
        asked = wanted >= 0
        share = asked / asked.sum(1, keepdim=True).clamp(min=1)
        orders = self._shuffles(run[0].residual)
        found: dict[str, list[Tensor]] = defaultdict(list)
        readings: dict[str, list[Tensor]] = defaultdict(list)
        for place in run:
            log_q = self._read(place, *readouts)
            for name, values in measures(log_p, log_q, wanted).items():
                found[name].append(values)
            own, plain = (self._chosen(_log(read(place.ended))) for read in readouts)
            shuffled = [self._read(_shuffled(place, order), *readouts) for order in orders]
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
            arrays["transfer_kl"] = self._transfer(run, iteration.readout, log_p, share)
        p = log_p.exp() * share[..., None]
        arrays["_mean"], arrays["_negentropy"] = p.sum(1), (p * log_p).nan_to_num().sum((1, 2))
        return arrays

    def _shuffles(self, like: Tensor) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        orders = (torch.randperm(like.shape[-1], generator=generator) for _ in range(_SHUFFLES))
        return [order.to(like.device) for order in orders]

    def _read(
        self, place: Place, own: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The lens at a place: log-probabilities [batch, pos, class]."""
        if self.fitted is not None:
            h = place.ended if self.fitted.kind == "tuned" else place.residual
            moved = self.fitted.transport(h, place.loop, place.layer)
            return self._chosen(_log(own(moved)))
        return self._chosen(_log((plain if self.name == "logit" else own)(place.ended)))

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
        return x if len(self.positions) == x.shape[1] else x[:, self.positions]


def _shuffled(place: Place, order: Tensor) -> Place:
    # A layer may be narrower than the state: then it is the state that is shuffled.
    x = place.residual
    mixed = x[..., order] if x.shape[-1] == len(order) else x
    return place._replace(residual=mixed, ended=place.ended[..., order])


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


def _baselines(run: list[dict[str, Tensor]]) -> dict[str, Tensor]:
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
