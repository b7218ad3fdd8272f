"""In how few directions of the state does a looped model keep what an interchange moves?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.circuits.comparison_inputs import check_batches, check_program
from loopinterp.circuits.interchange_engine import InterchangeRun
from loopinterp.circuits.learned_subspace import learn_subspace
from loopinterp.circuits.pair_strategies import SpreadPairs
from loopinterp.circuits.probed_subspaces import probe_directions
from loopinterp.circuits.program_counterfactuals import Prediction
from loopinterp.circuits.subspaces import principal_subspace, project
from loopinterp.circuits.verdict import delay_groups
from loopinterp.errors import InputError, check_choice, check_integer
from loopinterp.intervals import wilson_estimate
from loopinterp.models import describe_model
from loopinterp.models.looped_model import need_model
from loopinterp.results import Result, study

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import InterchangePairs, PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

LEARNED, PRINCIPAL = "learned", "principal directions"
PROBE, PROBE_BY_TOKEN = "probe", "probe, per token"
METHODS = (LEARNED, PRINCIPAL, PROBE, PROBE_BY_TOKEN)
WHOLE = "whole state"
CARRIED = 0.95
"""A subspace carries an exchange if it does so in this share of pairs, at every delay."""


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
        smallest: The smallest rank that carries the exchange at every delay, by method; 0 if none
            of those tried does.
        fitted_on: Pairs that subspaces were fitted on.
        scored_on: Pairs that they were scored on.
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
    smallest: dict[str, int]
    fitted_on: int
    scored_on: int


def search_subspaces(
    model: LoopedModel | Any,
    data: Batch | Sequence[Batch],
    program: str | LoopProgram,
    *,
    variables: Sequence[str] | None = None,
    methods: Sequence[str] = METHODS,
    ranks: Sequence[int] = (1, 2, 3, 4),
    given: Mapping[str, Float[Tensor, "rank d_model"]] | None = None,
    pairs: PairStrategy | None = None,
    steps: int = 80,
    seed: int = 0,
) -> SubspaceSearch:
    """Look for the subspace of the state that holds what an interchange of the state moves.

    Subspaces are fitted on half of the inputs and scored on the other half, at every delay from
    the exchange to the end, each with its complement. They are

    - ``learned``: a rotation found by gradient so that exchanging its first directions gives the
      same answers as exchanging the whole state, and exchanging the rest changes nothing
      (distributed alignment search);
    - ``principal directions`` of what exchanges of the whole state change;
    - ``probe``: what linear probes of the program's variables read, over all tokens together;
    - ``probe, per token``: one probe for each token at the position, as the direction of a
      variable may turn with the token;
    - any that are ``given``, a compiled model's circuit for instance.

    Args:
        model: Any looped model.
        data: Inputs, each batch of one length; even rows are fitted on, odd ones scored.
        program: Its variables choose the pairs, and are what probes are fitted to.
        variables: Those that are looked for; all by default. For some of them, learning follows
            the program's counterfactual instead of the exchange of the whole state.
        methods: Ways to find subspaces.
        ranks: Dimensions of learned and principal subspaces.
        given: Subspaces to score too: orthonormal rows, by name.
        pairs: How pairs are chosen.
        steps: Gradient steps of each learned subspace.
        seed: Seed of pairs and of learning.

    Raises:
        InputError: unknown methods or variables, ranks that the state does not have, or no pair
            in which an exchange changes an answer.

    Source: distributed alignment search, Geiger et al., arXiv 2303.02536. TransformerLens'
    ``fit_das`` aligns one read-out class at one hook; here a whole answer at several delays
    follows a state that each pair exchanges after its own number of loops.
    """
    chosen = check_program(program)
    need_model(model)
    batches = check_batches(data, [chosen])
    for method in methods:
        check_choice("method", method, METHODS)
    names = list(chosen.variables if variables is None else variables)
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
        generator = torch.Generator().manual_seed(seed)
        fit = InterchangeRun(model, strategy(model, [chosen], batches[0][::2], generator))
        width = fit.own.shape[-1]
        kept = [rank for rank in ranks if rank < width]
        if not kept:
            raise InputError(
                "ranks", expected=f"some below d_model = {width}", given=str(ranks), fix="Pass 1."
            )
        whole = len(names) == len(chosen.variables)
        target = None if whole else Prediction(chosen, fit.pairs, names=names).claims(fit.base)
        found: list[tuple[str, int, Tensor | _ByToken]] = []
        for name, rows in (given or {}).items():
            found.append((name, len(rows), rows.to(fit.own)))
        for rank in kept:
            if LEARNED in methods:
                rows = learn_subspace(fit, rank, target=target, steps=steps, seed=seed)
                found.append((LEARNED, rank, rows))
            if PRINCIPAL in methods:
                found.append(
                    (PRINCIPAL, rank, principal_subspace(fit.difference.flatten(0, 1), rank))
                )
        if PROBE in methods:
            rows = probe_directions(model, chosen, names, batches[0][::2])
            found.append((PROBE, len(rows), rows))
        if PROBE_BY_TOKEN in methods:
            each = _ByToken(probe_directions(model, chosen, names, batches[0][::2], by_token=True))
            found.append((PROBE_BY_TOKEN, each.rank, each))
        held_out = [
            InterchangeRun(model, strategy(model, [chosen], batch[1::2], generator))
            for batch in batches
        ]
        return _result(found, held_out, chosen, names, whole, len(fit.pairs), watch)


class _ByToken:
    """A subspace for each token at the exchanged position."""

    def __init__(self, rows: dict[int, Tensor]) -> None:
        self.rank = max(len(r) for r in rows.values())
        self._rows = rows

    def of(self, pairs: InterchangePairs) -> Float[Tensor, "pair d_model d_model"]:
        """The projection for each pair; nothing for a token without a probe."""
        tokens, _ = pairs.tokens
        some = next(iter(self._rows.values()))
        width = some.shape[-1]
        table = some.new_zeros(int(pairs.inputs.max()) + 1, width, width)
        for token, rows in self._rows.items():
            if token < len(table):
                table[token] = rows.mT @ rows
        return table[tokens]


def _result(
    found: Sequence[tuple[str, int, Tensor | _ByToken]],
    held_out: Sequence[InterchangeRun],
    program: LoopProgram,
    names: list[str],
    whole: bool,
    fitted_on: int,
    watch: Any,
) -> SubspaceSearch:
    delays = max(run.pairs.longest for run in held_out) + 1
    tokens = list(program.inputs)
    table = _Tally(len(found) + 1, delays, len(tokens))
    for run in held_out:
        everything = run.interchange()
        claims = Prediction(program, run.pairs, names=names).claims(run.base)
        asked = run.pairs.scored[:, None]
        moves = ((everything != run.base) & asked).any(-1) & run.within
        own, _ = run.pairs.tokens
        for k, (_, _, rows) in enumerate(found):
            inside = _projected(run.difference, rows, run.pairs)
            part = run.after(run.own + inside)
            rest = run.after(run.own + run.difference - inside)
            table.add(k, run, part, rest, everything, moves, claims, own)
        table.add(len(found), run, everything, run.base, everything, moves, claims, own)
    labels = [f"{method}, {rank}" for method, rank, _ in found] + [WHOLE]
    if not table.active.any():
        raise InputError(
            "data",
            expected="inputs on which exchanging a state changes an answer of the model",
            given="none",
            fix="Draw more, or longer, inputs.",
        )
    ranks = [rank for _, rank, _ in found] + [held_out[0].own.shape[-1]]
    methods = [method for method, _, _ in found] + [WHOLE]
    return SubspaceSearch.of(
        watch,
        coords={
            "subspace": labels,
            "delay": [*map(str, range(delays))],
            "token": tokens,
        },
        carried=wilson_estimate(table.same, table.active),
        complement=wilson_estimate(table.rest, table.active),
        active=table.active,
        iia=wilson_estimate(table.right, table.says),
        carried_by_token=wilson_estimate(table.by_token, table.of_token),
        ranks=ranks,
        methods=methods,
        program=program.name,
        variables=names,
        smallest=_smallest(methods, ranks, table),
        fitted_on=fitted_on,
        scored_on=sum(len(run.pairs) for run in held_out),
    )


def _smallest(methods: list[str], ranks: list[int], table: _Tally) -> dict[str, int]:
    """The smallest rank of each method that carries exchanges at every delay."""
    groups = delay_groups(table.active)
    smallest = {}
    for k, (method, rank) in enumerate(zip(methods, ranks)):
        shares = [
            table.same[k, a : b + 1].sum() / max(table.active[a : b + 1].sum(), 1)
            for a, b in groups
        ]
        if method != WHOLE and min(shares) >= CARRIED:
            smallest[method] = min(rank, smallest.get(method, rank))
    return {m: smallest.get(m, 0) for m in dict.fromkeys(methods) if m != WHOLE}


class _Tally:
    """Counts of what each subspace does, by delay and by token."""

    def __init__(self, subspaces: int, delays: int, tokens: int) -> None:
        self.active = np.zeros(delays, dtype=np.int64)
        self.same, self.rest, self.right, self.says = (
            np.zeros((subspaces, delays), dtype=np.int64) for _ in range(4)
        )
        self.by_token, self.of_token = (
            np.zeros((subspaces, tokens), dtype=np.int64) for _ in range(2)
        )

    def add(
        self,
        k: int,
        run: InterchangeRun,
        part: Int[Tensor, "pair delay pos"],
        rest: Int[Tensor, "pair delay pos"],
        everything: Int[Tensor, "pair delay pos"],
        moves: Tensor,
        claims: Any,
        own: Tensor,
    ) -> None:
        asked = run.pairs.scored[:, None]
        n = moves.shape[1]
        same = ((part == everything) | ~asked).all(-1)
        left = ((rest == everything) | ~asked).all(-1)
        happens = (((part != run.base) & asked).any(-1) | claims.changes) & run.within
        if k == len(self.same) - 1:  # once for each run
            self.active[:n] += moves.sum(0).cpu().numpy()
        self.same[k, :n] += (same & moves).sum(0).cpu().numpy()
        self.rest[k, :n] += (left & moves).sum(0).cpu().numpy()
        self.right[k, :n] += (claims.agree(part) & happens).sum(0).cpu().numpy()
        self.says[k, :n] += happens.sum(0).cpu().numpy()
        ever, always = moves.any(-1), (same | ~moves).all(-1)
        size = self.by_token.shape[1]
        self.of_token[k] += np.bincount(own[ever].cpu().numpy(), minlength=size)
        self.by_token[k] += np.bincount(own[ever & always].cpu().numpy(), minlength=size)


def _projected(
    change: Float[Tensor, "pair site d_model"], rows: Tensor | _ByToken, pairs: InterchangePairs
) -> Float[Tensor, "pair site d_model"]:
    if isinstance(rows, _ByToken):
        return change @ rows.of(pairs).to(change)
    return project(change, rows)
