"""Lenses by loop: the answer that can be read from the state after each loop."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer, need_distinct
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.measures import AfterLoops, beside_float32, chunks, gather, stable_from
from loopinterp.lenses.fitted_lens import (
    STATE,
    LoopResidual,
    layer_hooks,
    places,
    readout_without_coda,
)
from loopinterp.lenses.lens_fits import check_lens, fitted_lens, loops_of_lens, of_other_weights
from loopinterp.models.iteration import bind, no_autocast
from loopinterp.models.protocol import device_of, need_hooks, need_model
from loopinterp.models.study_examples import (
    examples_for,
    inputs_and_loops,
    need_classes,
    need_loops,
)
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.lenses.fitted_lens import FittedLens
    from loopinterp.lenses.lens_fits import LensName
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LensResult(AfterLoops, Result, kind="lens"):
    r"""The result of :func:`lens_study`.

    ``loop`` counts loops made: 0 is the initial state. ``layer`` is "state", after a loop, or
    "layer 0", …: after that layer (NaN at loop 0, or -1 in integers).

    Arrays:
        answer: The top class.
        rank, probability: Those of the target class; rank 1 is the top.
        entropy: Entropy of the reading (nats).
        kl: :math:`\mathrm{KL}(p_T \| q)` from the final readout to the reading (nats).
        wanted: The target class, or the final answer; -1 where nothing is asked.
        settled: The loop, from 1, from which the reading equals the final one.
        flips: Changes of the reading from loop to loop, from 1 on.
        reading_kl: Mean ``kl`` over the asked positions, by ``reading``: "lens"; controls "plain"
            (final norm and unembedding alone) or, for the logit lens, "coda" (the model's readout),
            and "shuffled" (components of the state, mean of four).
        reading_top: Share of them with the target class on top, likewise.
        unigram_kl: Control: the divergence to the mean of all :math:`p_T`.
        majority_top: Control: share of targets that are the majority class.
        transfer_kl: Mean ``kl`` of the state after loop ``applied`` through the map of loop
            ``translator``.
        expected_top: Share of asked positions read as the known intermediate value.
        float32_answer: In half precision: ``answer`` of the same weights in float32.

    Attributes:
        lens: "logit", "coda", "tuned" or "jacobian".
        has_coda: If not, "logit" and "coda" are the same lens.
        n_fit: Examples of the fit, or 0.
        of_other_weights: Whether the fit had other weights.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("answer", "rank", "probability", "entropy", "kl"), "loop layer batch pos"),
        **dict.fromkeys(("wanted", "settled", "flips"), "batch pos"),
        **dict.fromkeys(("reading_kl", "reading_top"), "reading loop layer batch"),
        **dict.fromkeys(("unigram_kl", "majority_top"), "batch"),
        "transfer_kl": "translator applied batch",
        "expected_top": "loop",
        "float32_answer": "loop layer batch pos",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        {"transfer_kl", "expected_top", "float32_answer"}
    )

    lens: str
    has_coda: bool
    targets: bool
    n_fit: int = 0
    of_other_weights: bool = False

    def decided_by_rounding(self) -> float | None:
        """Share of readings that float32 has otherwise; None in float32."""
        if "float32_answer" not in self.data:
            return None
        differs = (self.data["answer"] != self.data["float32_answer"]).sel(layer=STATE)
        return float(differs.where(self.asked).mean())

    @property
    def asked(self) -> xr.DataArray:
        """Where an answer is asked [batch, pos]."""
        return self.data["wanted"] >= 0

    @property
    def top(self) -> xr.DataArray:
        """Share of asked positions with the target class on top [loop, layer]."""
        right = (self.data["rank"] == 1) & self.asked
        exists = (self.data["answer"] >= 0).any(("batch", "pos"))  # not layers before loop 1
        return (right.sum(("batch", "pos")) / self.asked.sum()).where(exists)


@torch.no_grad()
@checked
def lens_study(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    lens: LensName | FittedLens = "logit",
    n_loops: Loops | None = None,
    inside: bool = False,
    positions: Sequence[int] | None = None,
    fit_on: Batch | Task | Tensor | None = None,
    expected: Int[Tensor, "loop batch pos"] | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> LensResult:
    r"""Read every state of a run through a lens, with its controls.

    ========== ==========================================================================
    logit      ``unembed(final_norm(h))``, without a coda
    coda       ``model.readout(h)``, coda included: the same where there is none
    tuned      ``model.readout(A_t h + b_t)``, trained: :func:`fit_tuned_lens`
    jacobian   ``model.readout(J_t h)``, :math:`J_t = \mathbb{E}\,\partial h_T/\partial h_t`:
               :func:`fit_jacobian_lens`
    ========== ==========================================================================

    Inside a loop the first three read the state in which the loop would end there.

    Args:
        data: Examples with one T(n), or inputs alone.
        lens: Its name, or a fitted lens.
        n_loops: T, by default T(n), or that of a fitted lens.
        inside: Read after each layer too, by hooks.
        positions: Positions to read; all by default.
        fit_on: Other examples, to fit on; by default of the data's task.
        expected: Known intermediate answers after each loop from 0 on, -1 for none:
            ``program.trace(batch.inputs, n_loops=T).outputs``.

    Raises:
        InputError: If examples differ in T(n), one has no asked position, or the lens does not fit.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> result = lens_study(model, Addition(), lens="coda", n=5, batch_size=32)
        >>> result.top.sel(layer="state").values.round(1).tolist()
        [0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    need_model(model)
    name = check_lens(lens)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, n_loops, targets = _lens_inputs(model, data, n_loops, lens, drawn)
    if inside:
        need_hooks(model)
    n_pos = inputs.shape[1]
    chosen = [
        check_integer("positions", p, least=-n_pos, most=n_pos - 1) % n_pos
        for p in (range(n_pos) if positions is None else positions)
    ]
    need_distinct("positions", chosen, "Pass e.g. positions=[-1], or None for all.")
    how = {"n_loops": n_loops, "inside": inside}
    about, precise = beside_float32(model, inputs)
    with study(seed, study="lens", **about, lens=name, **how, n_examples=len(inputs)) as watch:
        fitted = fitted_lens(lens, model, data, fit_on=fit_on, n=n, seed=seed, **how)
        reader = _LensReader(model, name, fitted, n_loops, inside, chosen, seed)
        run = reader.parts(inputs, targets)
        if precise is not None:
            with no_autocast(inputs.device):
                again = replace(reader, model=precise).parts(inputs, targets)
            for part, other in zip(run, again):
                part["float32_answer"] = other["answer"]
        target_class = torch.cat([part["wanted"] for part in run])
        if not bool((target_class >= 0).any(1).all()):
            raise InputError(
                "data",
                expected="a target at one of the positions of each example",
                given=f"none in {int((target_class < 0).all(1).sum())} of {len(inputs)} examples",
                fix="Leave positions= out, or pass inputs alone to read the model's own answers.",
            )
        controls = _baselines(run, target_class)
        if expected is not None:
            controls["expected_top"] = _expected_top(run, target_class, expected, chosen)
        coords: dict[str, Any] = {"loop": range(n_loops + 1), "layer": reader.layers}
        coords |= {"pos": chosen, "reading": reader.readings}
        if reader.transferred:
            coords |= {"translator": reader.transferred, "applied": reader.transferred}
        return LensResult.of(
            watch,
            coords=coords,
            **gather(LensResult, run),
            **controls,
            lens=name,
            has_coda=reader.has_coda,
            targets=targets is not None,
            n_fit=fitted.n_examples if fitted else 0,
            of_other_weights=fitted is not None and of_other_weights(fitted, about["model"]),
        )


def _baselines(run: list[dict[str, Tensor]], target_class: Tensor) -> dict[str, Tensor]:
    """Readings without a state, [batch]."""
    mean_p, negentropy = (
        torch.cat([part[name] for part in run]) for name in ("_mean", "_negentropy")
    )
    common = mean_p.mean(0).log().clamp(min=-1e4)  # of the mean distribution, [class]
    has_target = target_class >= 0  # [batch, pos]
    counts = torch.bincount(target_class[has_target], minlength=2)  # [class]
    return {
        "unigram_kl": (negentropy - mean_p @ common).clamp(min=0),
        "majority_top": (target_class == counts.argmax()).sum(1) / has_target.sum(1).clamp(min=1),
    }


def _expected_top(
    run: list[dict[str, Tensor]], target_class: Tensor, expected: Tensor, chosen: list[int]
) -> Tensor:
    """Share of positions that are read as the expected class, [loop]."""
    answer = torch.cat([part["answer"][:, -1] for part in run], dim=1)  # [loop, batch, pos]
    n_pos = max(chosen) + 1
    fits = expected.ndim == 3 and expected.shape[2] >= n_pos
    if not fits or expected.shape[:2] != answer.shape[:2]:
        raise InputError(
            "expected",
            expected=f"a class for each loop, example and position, {[*answer.shape[:2], n_pos]}",
            given=str([*expected.shape]),
            fix="Trace the program on the same inputs, over as many loops.",
        )
    wish = expected.to(answer.device)[:, :, chosen]  # [loop, batch, pos]
    decided = (wish >= 0) & (target_class >= 0)
    # NaN (0 / 0) at a loop without a known value.
    return ((answer == wish) & decided).sum((1, 2)) / decided.sum((1, 2))


def _lens_inputs(
    model: Any, data: Any, n_loops: int | None, lens: LensName | FittedLens, drawn: dict[str, Any]
) -> tuple[Tensor, int, Tensor | None]:
    n_loops = loops_of_lens(lens, n_loops)
    if isinstance(data, torch.Tensor):
        return *inputs_and_loops(model, data, n_loops), None
    batch = examples_for(model, data, **drawn)
    need_classes(model, batch)
    if n_loops is None:
        need_loops(model)
        if len(loops := batch.n_loops.unique().tolist()) != 1:
            raise InputError(
                "data",
                expected="examples that are asked for after one number of loops",
                given=f"examples asked for after {loops} loops",
                fix="Sample them with one n, or pass n_loops.",
            )
        n_loops = loops[0]
    return batch.inputs, check_integer("n_loops", n_loops, least=1), batch.targets


class PlaceReader:
    """The logits that a lens reads at the places of a run."""

    def __init__(self, model: Any, inputs: Tensor, name: str, fitted: FittedLens | None) -> None:
        self.iteration, self._name, self._fitted = bind(model, inputs), name, fitted
        self.readout = self.iteration.readout
        self.plain = readout_without_coda(model, inputs) or self.readout

    @property
    def reads_layers(self) -> bool:
        """Whether it reads inside loops too."""
        lens = self._fitted
        return lens is None or lens.shared or lens.n_layers > 0

    def read(self, h: Tensor, loop: int) -> Tensor:
        if self._name == "coda":
            return self.iteration.read(h, loop)
        return self.at(LoopResidual(loop, None, h, h))

    def at(self, place: LoopResidual) -> Tensor:
        if self._fitted is None:
            return (self.plain if self._name == "logit" else self.readout)(place.ended)
        h = place.ended if self._fitted.kind == "tuned" else place.residual
        return self.readout(self._fitted.transport(h, place.loop, place.layer))


@dataclass
class _LensReader:
    """Reads the places of a run through a lens and its controls."""

    model: Any
    name: str
    fitted: FittedLens | None
    n_loops: int
    inside: bool
    positions: list[int]
    seed: int

    def __post_init__(self) -> None:
        self.has_coda = bool(layer_hooks(self.model, None, 1, section="coda"))
        controls = ["plain"] if self.fitted is not None or self.has_coda else []
        if self.name == "logit" and self.has_coda:
            controls = ["coda"]
        self.readings = ["lens", *controls, "shuffled"]
        self.transferred: list[int] = []
        if self.fitted is not None and not self.fitted.shared:
            # At most eight loops, each to be read through the map of each other.
            some = torch.linspace(0, self.n_loops, min(8, self.n_loops + 1)).round().int()
            self.transferred = some.tolist()

    def parts(self, inputs: Tensor, targets: Tensor | None) -> list[dict[str, Tensor]]:
        first_loop = list(places(self.model, inputs[:1], 1, inside=self.inside))
        self.layers = [
            STATE if place.layer is None else f"layer {place.layer}" for place in first_loop[1:]
        ]
        size = first_loop[0].residual
        logits = bind(self.model, inputs[:1]).readout(size)
        each = (size.numel() * len(self.layers) * (self.n_loops + 1) + 8 * logits.numel()) * 4
        targets = targets if targets is None else targets.to(device_of(self.model))
        return [
            self._part(inputs[rows], None if targets is None else targets[rows])
            for rows in track(list(chunks(len(inputs), each)), "lens")
        ]

    def _part(self, inputs: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        run = list(places(self.model, inputs, self.n_loops, inside=self.inside))
        lens = PlaceReader(self.model, inputs, self.name, self.fitted)
        log_p = self._log(lens.iteration.read(run[-1].residual, self.n_loops))
        if targets is None:
            target_class = log_p.argmax(-1)  # [batch, pos]
        else:
            targets = self._read_positions(targets)
            target_class = targets.where(targets != IGNORE, -1)
        has_target = target_class >= 0
        share = has_target / has_target.sum(1, keepdim=True).clamp(min=1)  # [batch, pos]
        generator, first = torch.Generator().manual_seed(self.seed), run[0].residual
        # Four orders of the components, as one may read the answer by chance.
        orders = [torch.randperm(first.shape[-1], generator=generator) for _ in range(4)]
        measured: dict[str, list[Tensor]] = defaultdict(list)
        readings: dict[str, list[Tensor]] = defaultdict(list)
        for place in run:
            log_q = self._log(lens.at(place))  # [batch, pos, class]
            for name, values in _measures(log_p, log_q, target_class).items():
                measured[name].append(values)
            read = {"lens": [log_q], "shuffled": []}
            for reading, readout in (("plain", lens.plain), ("coda", lens.readout)):
                if reading in self.readings:
                    read[reading] = [self._log(readout(place.ended))]
            for order in orders:
                order = order.to(first.device)
                # A layer may be narrower than the state: then in the order of its own components.
                within = order[order < place.residual.shape[-1]]
                residual, ended = place.residual[..., within], place.ended[..., order]
                shuffled = place._replace(residual=residual, ended=ended)
                read["shuffled"].append(self._log(lens.at(shuffled)))
            for reading in self.readings:  # mean over positions, [batch]
                gaps = [(_divergence(log_p, one) * share).sum(1) for one in read[reading]]
                tops = [((one.argmax(-1) == target_class) * share).sum(1) for one in read[reading]]
                readings["reading_kl"].append(torch.stack(gaps).mean(0))
                readings["reading_top"].append(torch.stack(tops).mean(0))
        # [loop, layer, batch, pos]
        arrays = {k: self._laid_out(torch.stack(v)) for k, v in measured.items()}
        for name, values in readings.items():
            # [place, reading, batch]
            by_reading = torch.stack(values).unflatten(0, (len(run), len(self.readings)))
            arrays[name] = torch.stack([self._laid_out(x) for x in by_reading.unbind(1)])
        answers = arrays["answer"][:, -1]  # of the states, [loop, batch, pos]
        arrays |= {"wanted": target_class, "flips": (answers[2:] != answers[1:-1]).sum(0)}
        arrays["settled"] = (
            1 + stable_from(answers[1:]) if self.n_loops > 1 else torch.ones_like(target_class)
        )
        if self.transferred:
            assert self.fitted is not None
            states = {place.loop: place.residual for place in run if place.layer is None}
            pairs = itertools.product(self.transferred, repeat=2)  # (translator, applied)
            moved = (self.fitted.transport(states[t], translator) for translator, t in pairs)
            gaps = [(_divergence(log_p, self._log(lens.readout(h))) * share).sum(1) for h in moved]
            arrays["transfer_kl"] = torch.stack(gaps).unflatten(0, (len(self.transferred),) * 2)
        p = log_p.exp() * share[..., None]  # [batch, pos, class]
        arrays["_mean"], arrays["_negentropy"] = p.sum(1), (p * log_p).nan_to_num().sum((1, 2))
        return arrays

    def _laid_out(self, values: Tensor) -> Tensor:
        """Values of all places as [loop, layer, …], filled where loop 0 has no layers."""
        n = len(self.layers)
        empty = -1 if not values.is_floating_point() else torch.nan
        # Loop 0: the state alone is a place
        before = torch.full_like(values[:1].expand(n - 1, *values.shape[1:]), empty)
        return torch.cat([before, values]).unflatten(0, (self.n_loops + 1, n))

    def _log(self, logits: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return self._read_positions(logits.log_softmax(-1, dtype=dtype))

    def _read_positions(self, x: Tensor) -> Tensor:
        # A list as an index is sent to the device, so it is left out where all are read.
        return x if self.positions == [*range(x.shape[1])] else x[:, self.positions]


def _divergence(
    log_p: Float[Tensor, "*at d_vocab_out"], log_q: Float[Tensor, "*at d_vocab_out"]
) -> Float[Tensor, "*at"]:
    r""":math:`\mathrm{KL}(p \| q)` in nats, of log-probabilities."""
    terms = log_p.exp() * (log_p - log_q)  # [*at, d_vocab_out]
    return torch.where(log_p == -torch.inf, 0, terms).sum(-1).clamp(min=0)


def _measures(
    log_p: Float[Tensor, "batch pos d_vocab_out"],
    log_q: Float[Tensor, "batch pos d_vocab_out"],
    target_class: Int[Tensor, "batch pos"],
) -> dict[str, Tensor]:
    """Measures of a reading q at each position: its target class, and its KL from p."""
    target_log_q = log_q.gather(-1, target_class.clamp(min=0)[..., None])  # [batch, pos, 1]
    has_target: Bool[Tensor, "batch pos"] = target_class >= 0
    return {
        "answer": log_q.argmax(-1).int(),
        "rank": (1 + (log_q > target_log_q).sum(-1)).where(has_target, -1).int(),
        "probability": target_log_q[..., 0].exp().float().masked_fill(~has_target, torch.nan),
        "entropy": torch.special.entr(log_q.exp()).sum(-1).float(),
        "kl": _divergence(log_p, log_q).float(),
    }
