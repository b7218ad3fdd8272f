"""In how few directions of the state does a looped model keep what an interchange moves?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn.functional import one_hot

from loopinterp.circuits.comparison_inputs import check_batches
from loopinterp.circuits.interchange_engine import InterchangeRun, state_width
from loopinterp.circuits.learned_subspace import learn_subspace
from loopinterp.circuits.pair_strategies import SpreadPairs
from loopinterp.circuits.program_counterfactuals import Prediction
from loopinterp.circuits.subspaces import check_subspace, principal_subspace, project
from loopinterp.circuits.variable_directions import (
    labelled_states,
    mean_directions,
    probe_directions,
)
from loopinterp.circuits.verdict import THRESHOLD, delay_groups
from loopinterp.errors import InputError, check_choice, check_integer
from loopinterp.intervals import wilson_estimate
from loopinterp.models import describe_model
from loopinterp.rasp.program_registry import get_program
from loopinterp.results import Result, study

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task

LEARNED, PRINCIPAL = "learned", "principal directions"
MEANS, PROBE = "difference of means", "probe"
READ = {MEANS: mean_directions, PROBE: probe_directions}
"""Ways to find the directions along which a variable can be read."""

BY_TOKEN = {f"{method}, per token": method for method in READ}
"""The same with directions for each token at the exchanged position."""

METHODS = (LEARNED, PRINCIPAL, *READ, *BY_TOKEN)
WHOLE = "whole state"


DELAY_PAIRS = 60
"""Delays at which fewer pairs change an answer are taken together with those beside them."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SubspaceSearch(Result, kind="subspace-search"):
    """What :func:`search_subspaces` returns; scored on other inputs than it was fitted on.

    Arrays of ``data``, over pairs in which the exchange of the whole state changes an answer at
    that delay (``active``, how many):

    - ``carried``: how often exchanging the subspace alone gives the same whole answer as
      exchanging the whole state does;
    - ``complement``: how often exchanging everything BUT the subspace does: 0 if the subspace
      holds it all;
    - ``iia``: how often exchanging the subspace gives the answer that the program says, over pairs
      on which the program or the model changes an answer;
    - ``carried_by_token``: ``carried`` over all delays of a run, by token at the position.

    Attributes:
        ranks: Dimensions of each subspace.
        methods: How each was found.
        program: The program whose variables were looked for.
        variables: Those variables.
        fitted_on: Pairs that subspaces were fitted on.
        scored_on: Pairs that they were scored on.
        scored_inputs: The inputs that these are of; intervals count no more than these.
    """

    VARIABLES: ClassVar = {
        "carried": "subspace delay estimate",
        "complement": "subspace delay estimate",
        "active": "delay",
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
        """The smallest rank that carries exchanges at every delay, by method; 0 if none does.

        As in a verdict, the lower end of the 95% interval has to reach 0.9 at each of them.
        """
        found = dict.fromkeys(self.methods[:-1], 0)
        for name, method, rank in zip(self.data.subspace.values, self.methods[:-1], self.ranks):
            if self.worst(name)[1] >= THRESHOLD:
                found[method] = min(rank, found[method] or rank)
        return found

    def worst(self, subspace: str) -> tuple[float, float, float]:
        """Share of pairs that a subspace carries at its worst delay, with its 95% interval.

        The worst is that whose interval begins lowest. Delays with few pairs are taken together
        with those beside them.
        """
        active = self.data["active"].values
        share = self.data["carried"].sel(subspace=subspace, estimate="value").fillna(0).values
        groups = [slice(first, last + 1) for first, last in delay_groups(active, DELAY_PAIRS)]
        n = np.array([active[group].sum() for group in groups])
        same = np.array([(share * active)[group].sum() for group in groups])
        value, low, high = min(
            wilson_estimate(same, n, independent=self.scored_inputs).tolist(),
            key=lambda found: found[1],
        )
        return value, low, high


def search_subspaces(
    model: LoopedModel | Any,
    data: Batch | Sequence[Batch] | Task,
    program: str | LoopProgram,
    *,
    variables: Sequence[str] | None = None,
    methods: Sequence[str] = METHODS,
    ranks: Sequence[int] = (1, 2, 3, 4),
    given: Mapping[str, Float[Tensor, "rank d_model"]] | None = None,
    pairs: PairStrategy | None = None,
    steps: int = 80,
    n: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> SubspaceSearch:
    """Look for the subspace of the state that holds what an interchange of the state moves.

    Subspaces are fitted on half of the inputs and scored on the other half, at every delay from
    the exchange to the end, each with its complement. They are

    - ``learned``: a rotation found by gradient so that exchanging its first directions gives the
      same answers as exchanging the whole state, and exchanging the rest changes nothing
      (distributed alignment search);
    - ``principal directions`` of what exchanges of the whole state change;
    - ``difference of means``: between the mean states of the values of the program's variables,
      over all tokens together;
    - ``probe``: what linear probes of these variables read;
    - each of the two ``per token``: directions for each token at the position, as those of a
      variable may turn with the token;
    - any that are ``given``, a compiled model's circuit for instance.

    Args:
        model: Any looped model.
        data: Inputs, each batch of one length, or the task to draw them from. Different inputs
            are fitted on and scored by turns, each with all rows that are equal to it.
        program: Its variables choose the pairs, and are what probes are fitted to.
        variables: Those that are looked for; all by default. For some of them, learning follows
            the program's counterfactual instead of the exchange of the whole state.
        methods: Ways to find subspaces.
        ranks: Dimensions of learned and principal subspaces.
        given: Subspaces to score too: orthonormal rows, by name.
        pairs: How pairs are chosen.
        steps: Gradient steps of each learned subspace.
        n: Problem length or lengths, where a task is given; see
            :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples of each length, where a task is given.
        seed: Seed of pairs, of learning, and of what is drawn.

    Raises:
        InputError: unknown methods or variables, ranks that the state does not have, rows that are
            not orthonormal, no input to score besides those fitted on, or no pair in which an
            exchange changes an answer.

    Source: distributed alignment search, Geiger et al., arXiv 2303.02536. TransformerLens'
    ``fit_das`` aligns one read-out class at one hook; here a whole answer at several delays
    follows a state that each pair exchanges after its own number of loops.
    """
    chosen = get_program(program)
    batches = check_batches(model, data, [chosen], n=n, batch_size=batch_size, seed=seed)
    least = min(map(len, batches))
    fix = "Draw more: half of them are learned from, and half are counted."
    check_integer("examples of a batch", least, least=4, fix=fix)
    bases = dict(given or {})
    width = state_width(model, batches[0].inputs)
    for name, rows in bases.items():
        if name in (*METHODS, WHOLE):
            raise InputError(
                "given",
                expected="subspaces under names that are no method's",
                given=repr(name),
                fix="Pass given={'circuit': rows}, for instance.",
            )
        check_subspace(rows, width, f"given subspace {name!r}")
    for method in methods:
        check_choice("method", method, METHODS)
    names = list(chosen.variables if variables is None else variables)
    if not names or not (methods or bases):
        raise InputError(
            "variables and methods",
            expected="some variables, and some methods or given subspaces",
            given=f"{names}, and {list(methods)}",
            fix="Leave both out for all that there are.",
        )
    for name in names:
        check_choice(f"variable of program {chosen.name}", name, chosen.variables)
    for rank in ranks:
        check_integer("rank", rank, least=1)
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
        if not (kept := [rank for rank in dict.fromkeys(ranks) if rank < width]):
            raise InputError(
                "ranks", expected=f"some below d_model = {width}", given=str(ranks), fix="Pass 1."
            )
        found = [
            *(_Subspace(name, len(rows), rows.to(fit.own)) for name, rows in bases.items()),
            *_fitted(fit, half, chosen, names, kept, methods, steps=steps, seed=seed),
        ]
        counts = _joined([_counts(run, found, chosen, names) for run in held_out])
        inputs = sum(len(run.pairs.inputs) for run in held_out)
        estimate = partial(wilson_estimate, independent=inputs)
        return SubspaceSearch.of(
            watch,
            coords={
                "subspace": [*(f"{method}, {rank}" for method, rank, _ in found), WHOLE],
                "delay": map(str, counts.delay.values),
                "token": chosen.inputs,
            },
            carried=estimate(counts.same, counts.active),
            complement=estimate(counts.rest, counts.active),
            active=counts.active,
            iia=estimate(counts.right, counts.says),
            carried_by_token=estimate(counts.same_of_token, counts.of_token),
            ranks=[*(subspace.rank for subspace in found), width],
            methods=[*(subspace.method for subspace in found), WHOLE],
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
    """Single interchanges: first those that subspaces are fitted on, then those of each batch."""
    generator = torch.Generator().manual_seed(seed)
    half, _ = _halves(batches[0])
    seen = set(map(tuple, half.inputs.tolist()))
    given = [half, *(_without(seen, other) for _, other in map(_halves, batches))]
    drawn = [strategy(model, [program], batch, generator) for batch in given]
    return [InterchangeRun(model, replace(pairs, second=None)) for pairs in drawn]


def answers_moved(run: InterchangeRun) -> Bool[Tensor, "pair delay"]:
    """Whether the exchange of the whole state changes an answer."""
    return ((run.interchange() != run.base) & run.pairs.scored[:, None]).any(-1) & run.within


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    """Every other one of the different inputs, in their order, and the others; all rows of each."""
    _, which = batch.inputs.unique(dim=0, return_inverse=True)
    order = {k: number for number, k in enumerate(dict.fromkeys(which.tolist()))}
    odd = torch.tensor([order[k] % 2 for k in which.tolist()], dtype=torch.bool)
    return batch[~odd], batch[odd]


def _without(seen: set[tuple[int, ...]], batch: Batch) -> Batch:
    """The rows of a batch that nothing was fitted on."""
    new = torch.tensor([tuple(row) not in seen for row in batch.inputs.tolist()], dtype=torch.bool)
    if not new.any():
        raise InputError(
            "data",
            expected="inputs besides those that subspaces are fitted on",
            given="none that differ from them",
            fix="Draw more, or longer, inputs.",
        )
    return batch[new]


def _fitted(
    fit: InterchangeRun,
    half: Batch,
    program: LoopProgram,
    names: list[str],
    ranks: Sequence[int],
    methods: Sequence[str],
    *,
    steps: int,
    seed: int,
) -> Iterator[_Subspace]:
    """The subspaces that each method finds."""
    target = None
    if len(names) < len(program.variables):
        target = Prediction(program, fit.pairs, names=names).claims(fit.base)
    for rank in ranks:
        if LEARNED in methods:
            rows = learn_subspace(fit, rank, target=target, steps=steps, seed=seed)
            yield _Subspace(LEARNED, rank, rows)
        if PRINCIPAL in methods:
            rows = principal_subspace(fit.difference.flatten(0, 1), rank)
            yield _Subspace(PRINCIPAL, rank, rows)
    reading = [method for method in methods if BY_TOKEN.get(method, method) in READ]
    if reading:
        labelled = labelled_states(fit.model, program, names, half)
    for method in reading:
        find = labelled.subspace_by_token if method in BY_TOKEN else labelled.subspace
        rows = find(READ[BY_TOKEN.get(method, method)])
        if rank := rows.shape[-2]:  # none for variables that never vary
            yield _Subspace(method, rank, rows)


class _Subspace(NamedTuple):
    """A subspace that was found, or one for each token at the exchanged position."""

    method: str
    rank: int
    rows: Float[Tensor, "*token rank d_model"]

    def part(self, run: InterchangeRun) -> Float[Tensor, "pair site d_model"]:
        """What an exchange of it adds."""
        rows = self.rows[run.pairs.tokens[0]] if self.rows.ndim > 2 else self.rows
        return project(run.difference, rows)


def _counts(
    run: InterchangeRun, found: Sequence[_Subspace], program: LoopProgram, names: list[str]
) -> xr.Dataset:
    """Pairs of one batch on which each subspace, and last the whole state, is right.

    ``active`` [delay]: the whole exchange changes an answer; of those, ``same`` and ``rest``
    [subspace, delay]: the subspace, or all but it, does what the whole does; ``same_of_token`` of
    ``of_token`` at all delays. ``right`` of ``says``: the answer is the program's, of those on
    which it or the model changes one.
    """
    import xarray as xr

    everything = run.interchange()
    claims = Prediction(program, run.pairs, names=names).claims(run.base)
    token = one_hot(run.pairs.tokens[0], len(program.inputs)).bool()

    def alike(first: Tensor, second: Tensor) -> Bool[Tensor, "pair delay"]:
        return ((first == second) | ~run.pairs.scored[:, None]).all(-1)

    def exchanged() -> Iterator[tuple[Tensor, ...]]:
        for subspace in found:
            part = subspace.part(run)
            yield run.after(run.own + torch.stack([part, run.difference - part])).unbind()
        yield everything, run.base

    moves = answers_moved(run)
    rows = []
    for inside, outside in exchanged():
        same = alike(inside, everything)
        happens = (~alike(inside, run.base) | claims.changes) & run.within
        always = moves.any(-1) & (same | ~moves).all(-1)
        row = {
            "same": same & moves,
            "rest": alike(outside, everything) & moves,
            "right": claims.agree(inside) & happens,
            "says": happens,
            "same_of_token": always[:, None] & token,
        }
        rows.append({name: x.sum(0) for name, x in row.items()})
    delays, by_token = range(moves.shape[1]), ("subspace", "token")
    table = {name: torch.stack([row[name] for row in rows]).cpu().numpy() for name in rows[0]}
    return xr.Dataset(
        {
            "active": ("delay", moves.sum(0).cpu().numpy()),
            "of_token": ("token", (moves.any(-1)[:, None] & token).sum(0).cpu().numpy()),
            "same_of_token": (by_token, table.pop("same_of_token")),
            **{name: (("subspace", "delay"), x) for name, x in table.items()},
        },
        coords={"delay": delays},
    )


def _joined(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """The counts of all batches, whose runs may be longer or shorter."""
    import xarray as xr

    counts = xr.concat(parts, "batch", join="outer", fill_value=0).sum("batch")
    if not counts.active.any():
        raise InputError(
            "data",
            expected="inputs on which exchanging a state changes an answer of the model",
            given="none",
            fix="Draw more, or longer, inputs.",
        )
    return counts
