r"""A looped model whose state is reduced to a few directions of each token.

A *reduced-order model* projects the state after every loop onto the affine span of ``r``
directions, those of the position's token (and of the loop, if the step takes its index):

.. math::
    h' = m_x + B_x^T B_x (\\mathrm{step}(h) - m_x), \\qquad B_x B_x^T = 1_r

Initial state and injected input are not projected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import Field, PositiveInt

from loopinterp.comparison.pair_strategies import check_batches, need_inputs
from loopinterp.comparison.rule import LEAST_INPUTS, DelayShare, delay_shares
from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.interventions.engine import InterchangeRun, state_width
from loopinterp.interventions.pairs import InterchangePairs, drawn_pairs, join, repeated_pairs
from loopinterp.models import Iteration, bind, describe_model, device_of, iterate, reach
from loopinterp.models.protocol import declared
from loopinterp.tasks.sampling import check_tokens

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch, Task

ENOUGH = 0.95
"""Accuracy of a sufficient rank, at every kind, length and delay."""

_Kind = Literal["same loop", "any loop", "two interchanges"]
"""The source is of the same loop, or of any loop; or two interchanges of any loops."""

_ALIKE = "different inputs with the same token at some position"

_BASE = 256  # of the two digits of a token's number


@dataclass(frozen=True, eq=False)
class StateDirections(ShortRepr):
    """The principal directions of a model's states, for each token (a row each).

    If the step takes the loop's index: for each token after loop 0, then after loop 1, and so on.
    Rows of ``directions`` are orthonormal, by decreasing variance around the mean.
    """

    tokens: Int[Tensor, " token"]
    means: Float[Tensor, "row d_model"]
    directions: Float[Tensor, "row d_model d_model"]

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        model: LoopedModel | Any,
        pairs: InterchangePairs,
        *,
        tokens: Int[Tensor, " token"],
    ) -> StateDirections:
        """Directions of all states of some runs, clean and after interchanges.

        Tokens without states get those of all tokens together.
        """
        run = InterchangeRun(model, pairs)
        inputs = run.pairs.inputs
        clean = [h for t, h in iterate(model, inputs, pairs.n_loops) if t]
        after = run.states_after(run.source_state)[run.within]
        pair, delay = run.within.nonzero().unbind(1)
        # The token of each state: those of clean runs [loop, input, pos], then [after, pos].
        seen = torch.cat([
            inputs.expand(len(clean), *inputs.shape).flatten(),
            inputs[run.pairs.base][pair].flatten(),
        ])  # fmt: skip
        states = torch.cat([torch.stack(clean).flatten(0, 2), after.flatten(0, 1)]).double()
        groups = [slice(None)]
        if bind(model, inputs[:1]).takes_loop:
            first = torch.arange(len(clean)).repeat_interleave(inputs.numel())
            later = (run.pairs.loop[pair] + delay - 1).repeat_interleave(inputs.shape[1])
            loop = torch.cat([first.to(later), later])
            groups = [loop == t for t in range(len(clean))]
        rows = []
        for group in groups:
            token_of, group_states = seen[group], states[group]
            of_all = _principal(group_states)
            for token in tokens.tolist():
                here = token_of == token
                rows.append(_principal(group_states[here]) if here.any() else of_all)
        means, directions = (torch.stack(part).to(after) for part in zip(*rows))
        return cls(tokens.to(after.device), means, directions)


def _principal(states: Float[Tensor, "state d_model"]) -> tuple[Tensor, Tensor]:
    mean = states.mean(0)
    _, directions = torch.linalg.eigh((states - mean).mT @ (states - mean))
    return mean, directions.mT.flip(0)


class ReducedModel(ShortRepr):
    """A looped model whose state is projected onto some directions of each token.

    ``subset`` chooses directions: ``slice(8)`` the first eight, ``slice(8, None)`` all others.
    """

    def __init__(
        self, model: LoopedModel | Any, directions: StateDirections, subset: slice
    ) -> None:
        self.model, self.directions, self.subset = model, directions, subset
        # A projection moves nothing from position to position.
        self.device, self.reach = device_of(model), reach(model)
        self.local_step = declared(model, "local_step")

    def bind(self, inputs: Int[Tensor, "batch pos"]) -> Iteration:
        """The model's iteration, with its state reduced after every loop.

        The injected input holds the token's number as two more features, exact in half precision.
        """
        run = bind(self.model, inputs)

        def advance(h: Tensor, e: Tensor, context: Any, **loop: int) -> Tensor:
            return self._reduced(run.advance(h, e[..., :-2], context, **loop), e, **loop)

        # Row of each position's token, [batch, pos], in two digits.
        which = torch.searchsorted(self.directions.tokens, inputs.contiguous())
        number = torch.stack([which // _BASE, which % _BASE], -1)
        e = torch.cat([run.e, number.to(run.e)], -1)
        return replace(run, e=e, advance=advance)

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_injected"],
        **loop: int,
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop, for positions that see no others."""
        return self._reduced(self.model.step(h, e[..., :-2], **loop), e, **loop)

    def _reduced(self, h: Tensor, e: Tensor, loop: int = 0) -> Tensor:
        which = e[..., -2].long() * _BASE + e[..., -1].long() + loop * len(self.directions.tokens)
        reduced = torch.empty_like(h)
        for k in which.unique().tolist():  # one matrix per row, not per position
            here, mean = which == k, self.directions.means[k]
            basis = self.directions.directions[k, self.subset]
            # Projection onto the rows of the basis, [place, d_model].
            reduced[here] = mean + (h[here] - mean) @ basis.mT @ basis
        return reduced


class _Weakest(NamedTuple):
    """Where a reduced model is right least often."""

    kind: str
    n: int
    share: DelayShare


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Reduction(Result, kind="reduction"):
    """The result of :func:`reduction_study`, on other inputs than directions were fitted on.

    Arrays of ``data``, over pairs in which an answer of the model or of the reduced one changes:

    - ``accuracy``: share of equal whole answers at each delay (``effective`` pairs, of ``inputs``
      different inputs);
    - ``whole_run``: at all delays;
    - ``others``: the same for the model that keeps all directions *but* these, on every third pair;
    - ``undisturbed``: in clean runs, at all loops, or only at the end.

    Attributes:
        fitted_at: Problem length at which directions were fitted.
        at_end: Whether only answers at the end of a run are compared.
    """

    VARIABLES: ClassVar = {
        "accuracy": "kind n rank delay estimate",
        "effective": "kind n rank delay",
        "inputs": "kind n rank delay",
        "whole_run": "kind n rank estimate",
        "others": "kind n rank estimate",
        "undisturbed": "n rank estimate",
    }

    width: int
    fitted_at: int
    at_end: bool = False

    def weakest(self, rank: int, **where: Any) -> _Weakest:
        """Where a rank is right least often (:func:`~loopinterp.comparison.rule.delay_shares`).

        ``where`` restricts the axes ``kind`` and ``n``. The share is NaN if no interchange of some
        kind and length changes an answer.
        """
        shares = self._shares(rank, **where)
        return min(shares, key=lambda x: np.nan_to_num(x.share.value, nan=-1.0))

    def _shares(self, rank: int, **where: Any) -> list[_Weakest]:
        at = self.data.sel({"rank": rank, **{k: np.atleast_1d(v) for k, v in where.items()}})
        weakest = []
        for kind, n in product(at["kind"].values, at["n"].values):
            cell = at.sel(kind=kind, n=n)
            last = int(cell["effective"].values.nonzero()[0].max(initial=0))
            cell = cell.isel(delay=slice(last + 1))  # shorter runs end before longer ones
            effective, inputs = cell["effective"].values, cell["inputs"].values
            right = cell["accuracy"].sel(estimate="value").fillna(0).values * effective
            # With fewer inputs of a delay that is judged by itself, one error weighs too much.
            shares = delay_shares(right, effective, inputs, ENOUGH, least_alone=18)
            weakest += [_Weakest(str(kind), int(n), share) for share in shares]
        return weakest

    @property
    def enough(self) -> int:
        """The smallest rank with an accuracy of 0.95 at every kind, length and delay.

        0 if none has, or if some kind or length has too few effective inputs.
        """
        for rank in self.data["rank"].values.tolist():
            shares = [x.share for x in self._shares(rank)]
            if all(x.value >= ENOUGH and x.inputs >= LEAST_INPUTS for x in shares):
                return rank
        return 0


@checked
def reduction_study(
    model: LoopedModel | Any,
    data: Batch | Sequence[Batch] | Task,
    *,
    ranks: Sequence[PositiveInt] = (1, 2, 4, 8, 12, 16),
    kinds: Sequence[_Kind] = get_args(_Kind),
    at_end: bool = False,
    pairs: Annotated[int, Field(ge=8)] = 512,
    n: int | Sequence[int] | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> Reduction:
    """Reduce a model's state to a few directions per token, and compare both by interchanges.

    Directions are the principal ones of each token's states, clean and after interchanges.

    Args:
        model: Any looped model that reads tokens.
        data: Inputs, each batch of one length, or the task (``batch_size`` of each length ``n``).
            Directions are fitted on the first 128 different inputs of the first batch, at most half
            of them; the others are scored.
        ranks: Numbers of directions; those of d_model or more are ignored.
        kinds: Kinds of interchange; ``("same loop",)`` for untied layers, one per loop.
        at_end: Compare only answers at the end of a run; the delay is then the loops until it.
        pairs: Interchanges of each kind and length.

    Source: proper orthogonal decomposition (Sirovich, Quarterly of Applied Mathematics 45, 1987);
    approximate causal abstraction, Geiger et al., arXiv 2106.02997.
    """
    batches = check_batches(model, data, [], n=n, batch_size=batch_size, seed=seed)
    lengths = [int(batch.n[0]) for batch in batches]
    expected, fix = "batches of different lengths", "Put examples of one length into one batch."
    need(len({*lengths}) == len(lengths), "data", expected, f"lengths {lengths}", fix)
    for batch in batches:  # directions are those of a token
        check_tokens(batch.inputs, 2**31, "data")
    width = state_width(model, batches[0].inputs)
    chosen = tuple(kind for kind in get_args(_Kind) if kind in kinds)
    kept_ranks = sorted({rank for rank in ranks if rank < width})
    expected = f"some kinds, and some ranks below d_model = {width}"
    got, fix = f"{ranks}, {kinds}", "Leave kinds out, and pass ranks=(1, 2)."
    need(kept_ranks and chosen, "ranks, kinds", expected, got, fix)
    with study(
        seed,
        study="reduction",
        model=describe_model(model),
        ranks=kept_ranks,
        lengths=lengths,
    ) as watch:
        generator = torch.Generator().manual_seed(seed)
        fitted, *held_out = _split(batches)
        n_loops, across = int(fitted.n_loops.max()), chosen != ("same loop",)
        to_fit = drawn_pairs(fitted, n_loops, pairs, generator, across_loops=across)
        need_inputs(len(to_fit) > 0, _ALIKE)
        tokens = torch.cat([batch.inputs.flatten() for batch in batches]).unique()
        directions = StateDirections.fit(model, to_fit, tokens=tokens)
        longest = max(int(batch.n_loops.max()) for batch in held_out)
        shape = (len(chosen), len(held_out), len(kept_ranks))
        # Right pairs, pairs that count and their inputs, [count, kind, length, rank, delay].
        counts = np.zeros((3, *shape, longest + 1))
        (whole_runs, others), clean = np.zeros((2, *shape, 3)), np.zeros((*shape[1:], 3))
        for b, batch in enumerate(held_out):
            run = InterchangeRun(model, _of_each_kind(batch, chosen, pairs, generator))
            control = InterchangeRun(model, run.pairs[torch.arange(len(run.pairs)) % 3 == 0])
            answers, of_control = run.interchange(), control.interchange()
            delays = slice(run.pairs.longest + 1)
            for r, rank in enumerate(kept_ranks):
                reduced = ReducedModel(model, directions, slice(rank))
                rest = ReducedModel(model, directions, slice(rank, None))
                counts[:, :, b, r, delays], whole_runs[:, b, r], clean[b, r] = _agreement(
                    run, answers, reduced, at_end=at_end
                )
                _, others[:, b, r], _ = _agreement(control, of_control, rest, at_end=at_end)
        right, effective, inputs = counts
        return Reduction.of(
            watch,
            coords={
                "kind": chosen,
                "n": [int(batch.n[0]) for batch in held_out],
                "rank": kept_ranks,
                "delay": [*range(longest + 1)],
            },
            accuracy=wilson_estimate(right, effective, independent=inputs),
            effective=effective,
            inputs=inputs,
            whole_run=whole_runs,
            others=others,
            undisturbed=clean,
            width=width,
            fitted_at=int(fitted.n[0]),
            at_end=at_end,
        )


def _agreement(
    run: InterchangeRun,
    answers: Int[Tensor, "pair delay pos"],
    model: ReducedModel,
    *,
    at_end: bool,
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """How often a reduced model answers like the model after a run's interchanges.

    Returns:
        [count, kind, delay]: right pairs, pairs that count, and their inputs; of each kind the
        share of pairs right at every delay; the share of clean answers.
    """
    pairs, reduced = run.pairs, InterchangeRun(model, run.pairs)
    after, is_scored = reduced.interchange(), pairs.scored[:, None]
    # Answers that the interchange changes in either model, [pair, delay, pos].
    changed = (answers != run.base) | (after != reduced.base)
    read = run.within  # [pair, delay]
    if at_end:
        read = read & (read.sum(1, keepdim=True) == read.cumsum(1))
    moved = (changed & is_scored).any(-1) & read
    same = ((after == answers) | ~is_scored).all(-1)
    counts, whole_runs = [], []
    for kind in range(len(pairs.strata["kind"].labels)):
        counted = moved & (pairs.strata["kind"].codes == kind)[:, None]
        inputs = torch.tensor([len(pairs.base[rows].unique()) for rows in counted.T])
        counts.append(torch.stack([(same & counted).sum(0).cpu(), counted.sum(0).cpu(), inputs]))
        ever = counted.any(-1)
        right, n = ((same | ~read).all(-1) & ever).sum(), ever.sum()
        n_inputs = len(pairs.base[ever].unique())
        whole_runs.append(wilson_estimate(int(right), int(n), independent=n_inputs))
    # Whole clean answers that are the model's, [loop, input].
    clean = ((reduced.natural == run.natural) | ~pairs.asked).all(-1)[-1 if at_end else 0 :]
    clean = wilson_estimate(int(clean.sum()), clean.numel(), independent=clean.shape[1])
    return torch.stack(counts, 1).numpy(), whole_runs, clean


def _of_each_kind(
    batch: Batch, kinds: Sequence[_Kind], number: int, generator: torch.Generator
) -> InterchangePairs:
    drawn, parts = (batch, int(batch.n_loops.max()), number, generator), []
    for kind in kinds:
        pairs = (repeated_pairs if kind == "two interchanges" else drawn_pairs)(*drawn)
        if kind == "any loop":
            # The source is read after any loop, the end included, [pair].
            loops = torch.randint(pairs.n_loops + 1, pairs.loop.shape, generator=generator)
            pairs = replace(pairs, source_loop=loops)
        need_inputs(len(pairs) > 0, _ALIKE)
        parts.append(pairs)
    return join(parts, "kind", tuple(kinds))


def _split(batches: Sequence[Batch]) -> list[Batch]:
    distinct = list(dict.fromkeys(tuple(row) for row in batches[0].inputs.tolist()))
    fitted = {*distinct[: min(128, len(distinct) // 2)]}
    # Whether directions are fitted on each row of each batch.
    chosen = [torch.tensor([tuple(x) in fitted for x in b.inputs.tolist()]) for b in batches]
    least = min(len(fitted), *(int((~rows).sum()) for rows in chosen))
    expected, actual = "inputs to fit directions on, and others to score", f"{len(distinct)} in all"
    need_inputs(least >= 2, expected, actual)
    return [batches[0][chosen[0]], *(batch[~rows] for batch, rows in zip(batches, chosen))]
