"""The subspace of the state that holds what an interchange moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pad_sequence

from loopinterp.comparison.pair_strategies import SpreadPairs, check_batches, need_inputs
from loopinterp.comparison.program_runs import Prediction
from loopinterp.comparison.rule import THRESHOLD, delay_groups
from loopinterp.compiler.circuit import orthonormal
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, check_integer, need
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.interventions.engine import (
    InterchangeRun,
    check_subspace,
    principal_subspace,
    project,
    state_width,
)
from loopinterp.interventions.learned_subspace import learn_subspace
from loopinterp.models import describe_model, device_of, iterate
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.comparison.pair_strategies import PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task


_Method = Literal[
    "learned",
    "principal directions",
    "difference of means",
    "probe",
    "difference of means, per token",
    "probe, per token",
]
"""A way to find subspaces, for all tokens or per token at the position."""

PER_TOKEN = ", per token"
WHOLE_STATE = "whole state"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SubspaceSearch(Result, kind="subspace-search"):
    """The result of :func:`search_subspaces`, scored on other inputs than it was fitted on.

    Arrays of ``data``, over the ``changed`` pairs (interchanging the whole state changes an answer
    at that delay):

    - ``carried``: share in which an interchange of the subspace gives the same whole answer;
    - ``complement``: share in which one of everything but the subspace does;
    - ``iia``: share in which it gives the program's answer, where program or model change one;
    - ``carried_by_token``: ``carried`` over all delays of a run, by token at the position.

    Attributes:
        ranks: Dimensions of each subspace.
        methods: Method that found each.
        variables: The sought variables of the ``program``.
        fitted_on, scored_on: Numbers of pairs.
        scored_inputs: Number of scored inputs, which intervals count.
    """

    VARIABLES: ClassVar = {
        "carried": "subspace delay estimate",
        "complement": "subspace delay estimate",
        "changed": "delay",
        "iia": "subspace delay estimate",
        "carried_by_token": "subspace token estimate",
    }

    ranks: list[int]
    methods: list[str]
    program: str
    variables: list[str]
    fitted_on: int
    scored_on: int
    scored_inputs: int

    @property
    def smallest(self) -> dict[str, int]:
        """By method, the smallest rank that carries 0.9 at every delay; 0 if none does."""
        ranks = dict.fromkeys(self.methods[:-1], 0)
        for name, method, rank in zip(self.data.subspace.values, self.methods[:-1], self.ranks):
            if self.worst(name)[1] >= THRESHOLD:
                ranks[method] = min(rank, ranks[method] or rank)
        return ranks

    def worst(self, subspace: str) -> tuple[float, float, float]:
        """Share of pairs that a subspace carries at its worst delay, with its 95% interval.

        The worst has the lowest lower end; delays with fewer than 60 effective pairs are pooled.
        """
        changed = self.data["changed"].values
        # Share of effective pairs at each delay, [delay]; 0 where there are none.
        share = self.data["carried"].sel(subspace=subspace, estimate="value").fillna(0).values
        groups = [slice(first, last + 1) for first, last in delay_groups(changed, least=60)]
        n = np.array([changed[group].sum() for group in groups])
        same = np.array([(share * changed)[group].sum() for group in groups])
        # [group, (value, low, high)]
        estimates = wilson_estimate(same, n, independent=self.scored_inputs).tolist()
        value, low, high = min(estimates, key=lambda estimate: estimate[1])
        return value, low, high


@checked
def search_subspaces(
    model: LoopedModel | Any,
    data: Batch | Sequence[Batch] | Task,
    program: str | LoopProgram,
    *,
    variables: Sequence[str] | None = None,
    methods: Sequence[_Method] = get_args(_Method),
    ranks: Sequence[PositiveInt] = (1, 2, 3, 4),
    given: Mapping[str, Float[Tensor, "rank d_model"]] | None = None,
    pairs: PairStrategy | None = None,
    steps: NonNegativeInt = 80,
    n: int | Sequence[int] | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> SubspaceSearch:
    """Search for the subspace of the state that holds what an interchange of the state moves.

    Subspaces are fitted on half of the different inputs and scored on the rest, at every delay,
    with their complements. They are

    - ``learned``: distributed alignment search (:func:`~loopinterp.interventions.learn_subspace`);
    - ``principal directions`` of what interchanges of the whole state change;
    - ``difference of means`` between the states of the values of the program's variables;
    - ``probe``: what linear probes of these variables read;
    - the last two ``per token``: directions for each token at the position;
    - any that are ``given``, such as a compiled model's circuit.

    Args:
        data: Inputs, each batch of one length, or the task (``batch_size`` of each length ``n``).
        program: Its variables choose the pairs and label the states for probes.
        variables: Variables to look for; all by default. With fewer, learning follows the program.
        ranks: Dimensions of learned and principal subspaces.
        given: Subspaces to score too: orthonormal rows, by name.
        steps: Gradient steps of each learned subspace.

    Source: distributed alignment search, Geiger et al., arXiv 2303.02536.
    """
    import xarray as xr

    chosen = get_program(program)
    batches = check_batches(model, data, [chosen], n=n, batch_size=batch_size, seed=seed)
    fix = "Draw more: half of them are learned from, and half are counted."
    check_integer("examples of a batch", min(map(len, batches)), least=4, fix=fix)
    width = state_width(model, batches[0].inputs)
    bases, names = dict(given or {}), list(chosen.variables if variables is None else variables)
    kept_ranks = [rank for rank in dict.fromkeys(ranks) if rank < width]
    for name in names:
        check_choice(f"variable of program {chosen.name}", name, chosen.variables)
    for name, rows in bases.items():
        check_subspace(rows, width, f"given subspace {name!r}")
    reserved = {*get_args(_Method), WHOLE_STATE}
    for what, fits, expected, value in (
        ("variables", names, "some variables", names),
        ("methods", methods or bases, "some methods, or given subspaces", methods),
        ("ranks", kept_ranks, f"some below d_model = {width}", ranks),
        ("given", not reserved & {*bases}, "names that are no method's", [*bases]),
    ):
        need(fits, what, expected, str(value), f"Change {what}, or leave it out.")
    strategy = pairs or SpreadPairs(pairs=512, same_value=0)
    with study(
        seed,
        study="subspace search",
        model=describe_model(model),
        program=chosen.name,
        variables=names,
        lengths=[int(b.n[0]) for b in batches],
    ) as watch:
        half, _ = _halves(batches[0])
        fit, *held_out = runs_to_fit_and_score(model, batches, chosen, strategy, seed)
        subspaces = [
            *(_Subspace(name, len(rows), rows.to(fit.base_state)) for name, rows in bases.items()),
            *_fitted(fit, half, chosen, names, methods, kept_ranks, steps=steps, seed=seed),
        ]
        parts = [_counts(run, subspaces, chosen, names) for run in held_out]
        # Runs may be longer or shorter.
        counts = xr.concat(parts, "batch", join="outer", fill_value=0).sum("batch")
        need_inputs(bool(counts.changed.any()), "inputs on which an interchange changes an answer")
        inputs = sum(len(run.pairs.inputs) for run in held_out)
        estimate = partial(wilson_estimate, independent=inputs)
        return SubspaceSearch.of(
            watch,
            coords={
                "subspace": [*(f"{method}, {rank}" for method, rank, _ in subspaces), WHOLE_STATE],
                "delay": map(str, counts.delay.values),
                "token": chosen.inputs,
            },
            carried=estimate(counts.same, counts.changed),
            complement=estimate(counts.rest, counts.changed),
            changed=counts.changed,
            iia=estimate(counts.right, counts.effective),
            carried_by_token=estimate(counts.same_of_token, counts.of_token),
            ranks=[*(subspace.rank for subspace in subspaces), width],
            methods=[*(subspace.method for subspace in subspaces), WHOLE_STATE],
            program=chosen.name,
            variables=names,
            fitted_on=len(fit.pairs),
            scored_on=sum(len(run.pairs) for run in held_out),
            scored_inputs=inputs,
        )


def runs_to_fit_and_score(
    model: LoopedModel | Any,
    batches: Sequence[Batch],
    program: LoopProgram,
    strategy: PairStrategy,
    seed: int,
) -> list[InterchangeRun]:
    """Single interchanges: those to fit on, then those of each batch."""
    generator = torch.Generator().manual_seed(seed)
    half, _ = _halves(batches[0])
    fitted_on = set(map(tuple, half.inputs.tolist()))
    parts = [half]
    for _, other in map(_halves, batches):
        # Rows of inputs that nothing was fitted on, [row].
        new = torch.tensor([tuple(row) not in fitted_on for row in other.inputs.tolist()])
        need_inputs(bool(new.any()), "inputs besides those that subspaces are fitted on")
        parts.append(other[new])
    pairs = [strategy(model, [program], batch, generator) for batch in parts]
    return [InterchangeRun(model, replace(each, second=None)) for each in pairs]


def answers_moved(run: InterchangeRun) -> Bool[Tensor, "pair delay"]:
    """Whether the interchange of the whole state changes an answer."""
    return ((run.interchange() != run.base) & run.pairs.scored[:, None]).any(-1) & run.within


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    """Every other different input, and the rest; all rows of each."""
    # Number of each row's input, in the order of their first rows.
    _, which = batch.inputs.unique(dim=0, return_inverse=True)
    order = {k: number for number, k in enumerate(dict.fromkeys(which.tolist()))}
    odd = torch.tensor([order[k] % 2 for k in which.tolist()], dtype=torch.bool)
    return batch[~odd], batch[odd]


class _Subspace(NamedTuple):
    method: str
    rank: int
    rows: Float[Tensor, "*token rank d_model"]


def _fitted(
    fit: InterchangeRun,
    half: Batch,
    program: LoopProgram,
    names: list[str],
    methods: Sequence[str],
    ranks: Sequence[int],
    **learning: int,
) -> Iterator[_Subspace]:
    # Without a target, the answers after interchanges of the whole state are learned.
    target = None
    if len(names) < len(program.variables):
        target = Prediction(program, fit.pairs, names=names).claims(fit.base).expected
    for rank in ranks:
        if "learned" in methods:
            yield _Subspace("learned", rank, learn_subspace(fit, rank, target=target, **learning))
        if "principal directions" in methods:
            # Differences of all positions as one set of vectors, [place, d_model].
            rows = principal_subspace(fit.difference.flatten(0, 1), rank)
            yield _Subspace("principal directions", rank, rows)
    reading = [method for method in methods if method.removesuffix(PER_TOKEN) in READ]
    if reading:
        labelled = labelled_states(fit.model, program, names, half)
    for method in reading:
        find = labelled.subspace_by_token if method.endswith(PER_TOKEN) else labelled.subspace
        rows = find(READ[method.removesuffix(PER_TOKEN)])
        if rank := rows.shape[-2]:  # none for variables that never vary
            yield _Subspace(method, rank, rows)


def _counts(
    run: InterchangeRun, subspaces: Sequence[_Subspace], program: LoopProgram, names: list[str]
) -> xr.Dataset:
    """Pairs of one batch on which each subspace, and last the whole state, is right.

    ``changed`` [delay]: the whole interchange changes an answer; of those, ``same`` and ``rest``
    [subspace, delay]: the subspace, or all but it, gives the answers of the whole;
    ``same_of_token`` of ``of_token`` at all delays. ``right`` of ``effective``: as the program.
    """
    import xarray as xr

    everything = run.interchange()
    claims = Prediction(program, run.pairs, names=names).claims(run.base)
    token = run.pairs.tokens[0]
    # Token at the position of the interchange, as a mask [pair, token].
    of_token = one_hot(token, len(program.inputs)).bool()

    def alike(first: Tensor, second: Tensor) -> Bool[Tensor, "pair delay"]:
        # Equal whole answers: positions [pair, delay, pos] that are not scored count as equal.
        return ((first == second) | ~run.pairs.scored[:, None]).all(-1)

    def answers() -> Iterator[tuple[Tensor, ...]]:
        for subspace in subspaces:
            basis = subspace.rows[token] if subspace.rows.ndim > 2 else subspace.rows
            # The part of the change in the subspace, and the rest: [part, pair, …, d_model].
            part = project(run.difference, basis)
            states = run.base_state + torch.stack([part, run.difference - part])
            yield run.after(states).unbind()
        yield everything, run.base

    # Pairs and delays at which the whole interchange is effective, [pair, delay].
    moved = answers_moved(run)
    rows = []
    for inside, outside in answers():
        same = alike(inside, everything)
        effective = (~alike(inside, run.base) | claims.changes) & run.within
        # Right at every effective delay, and effective at some, [pair].
        always = moved.any(-1) & (same | ~moved).all(-1)
        by_delay = {
            "same": same & moved,
            "rest": alike(outside, everything) & moved,
            "right": claims.agree(inside) & effective,
            "effective": effective,
        }
        row = {name: ("delay", x.sum(0).cpu().numpy()) for name, x in by_delay.items()}
        row["same_of_token"] = ("token", of_token[always].sum(0).cpu().numpy())
        rows.append(xr.Dataset(row))
    counts = xr.concat(rows, "subspace").assign_coords(delay=range(moved.shape[1]))
    changed, tokens = moved.sum(0), of_token[moved.any(-1)].sum(0)
    return counts.assign(
        changed=("delay", changed.cpu().numpy()), of_token=("token", tokens.cpu().numpy())
    )


def probe_directions(
    states: Float[Tensor, "place d_model"], values: Int[Tensor, " place"]
) -> Float[Tensor, "row d_model"]:
    """The coefficients of a ridge probe.

    A weak penalty reads along directions in which the state hardly varies (IIA on the ripple: 0.53
    with 0.001); a strong one loses rare values (lookahead: 0.89 with 100).
    """
    coef = RidgeProbe(alpha=30.0).fit(states, values).coef_
    return coef - coef.mean(0) if len(coef) > 1 else coef


def mean_directions(
    states: Float[Tensor, "place d_model"], values: Int[Tensor, " place"]
) -> Float[Tensor, "class d_model"]:
    """Mean state of each value, minus the mean of these means.

    Source: mass-mean probes, Marks & Tegmark, arXiv 2310.06824.
    """
    means = torch.stack([states[values == value].mean(0) for value in values.unique()])
    return means - means.mean(0)


# From states and values to rows along which the values differ
_Directions = Callable[["Tensor", "Tensor"], "Tensor"]
READ = {"difference of means": mean_directions, "probe": probe_directions}


class _LabelledStates(NamedTuple):
    """States of a model in random order, with the values of a program's variables.

    States are those after loops 1 .. T - 1, at the asked positions.
    """

    states: Float[Tensor, "place d_model"]
    tokens: Int[Tensor, " place"]
    labels: Int[Tensor, "variable place"]
    n_tokens: int

    def subspace(
        self, directions: _Directions = probe_directions, rows: Any = slice(None)
    ) -> Float[Tensor, "rank d_model"]:
        """Orthonormal rows that span the variables' directions, from 8192 states."""
        states, labels = self.states[rows][:8192], self.labels[:, rows][:, :8192]
        basis = partial(orthonormal, least=1e-2)  # smaller singular values are rounding
        bases = [basis(directions(states, v)) for v in labels if len(v.unique()) > 1]
        return basis(torch.cat(bases)) if bases else states.new_zeros(0, states.shape[-1])

    def subspace_by_token(
        self, directions: _Directions = probe_directions
    ) -> Float[Tensor, "token rank d_model"]:
        # [rank, d_model] of each token; ranks may differ.
        spans = [self.subspace(directions, self.tokens == token) for token in range(self.n_tokens)]
        return pad_sequence(spans, batch_first=True)


@torch.no_grad()
def labelled_states(
    model: Any, program: LoopProgram, names: Sequence[str], batch: Batch
) -> _LabelledStates:
    inputs = batch.inputs.to(device_of(model))
    last = int(batch.n_loops.max())
    loops = _spread_loops(last, 12)
    is_asked = (batch.targets != IGNORE).to(inputs.device)
    # States of asked positions, one loop after the other: [place, d_model].
    states = torch.cat([h[is_asked] for t, h in iterate(model, inputs, last) if t in loops])
    trace = program.trace(inputs, n_loops=last).variables
    # The value of each variable at the same places, [variable, place].
    labels = torch.stack([torch.cat([trace[n][t][is_asked] for t in loops]) for n in names])
    tokens = inputs[is_asked].repeat(len(loops))
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(0))
    order = order.to(states.device)
    return _LabelledStates(states[order], tokens[order], labels[:, order], len(program.inputs))


def _spread_loops(n_loops: int, most: int) -> list[int]:
    """Evenly spaced numbers of loops from 1 to T - 1 (to 1 if T is 1)."""
    last = max(n_loops - 1, 1)
    count = min(most, last)
    return sorted({round(1 + k * (last - 1) / max(count - 1, 1)) for k in range(count)})
