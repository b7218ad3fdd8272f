"""Exchanges of a state between runs, and the answers after them, loop by loop.

On the four methods of the protocol alone. What an exchange can reach is run again, and nothing
else (:mod:`loopinterp.circuits.causal_cone`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.causal_cone import CausalCone, Change, Front, growth_of
from loopinterp.circuits.interchange_pairs import Sites
from loopinterp.circuits.subspaces import check_orthonormal, project
from loopinterp.errors import InputError
from loopinterp.models import bind, device_of
from loopinterp.progress import track
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import InterchangePairs
    from loopinterp.models import LoopedModel

TIE = 1e-4
"""Logits that differ by no more are equal."""

_AT_A_TIME = 128
"""Pairs that go on together."""

_KEPT = 2**26
"""Numbers of undisturbed states that are kept at a time: 256 MiB."""


def answer(logits: Float[Tensor, "*shape d_vocab_out"]) -> Int[Tensor, "*shape"]:
    """The class with the largest logit; of those that are equal to rounding, the first.

    A model that has not decided yet may have all logits alike; which of them is largest by a
    rounding error says nothing, but would change from one basis of the state to another. Answers
    are kept for every pair, delay and position, and so in as few bytes as classes need.

    Example:
        >>> answer(torch.tensor([[0.2, 1.3], [1e-7, 2e-7]])).tolist()
        [1, 0]
    """
    narrow = torch.int16 if logits.shape[-1] <= 2**15 else torch.int32
    return _largest(logits).int().argmax(-1).to(narrow)


def decided(logits: Float[Tensor, "*shape d_vocab_out"]) -> Bool[Tensor, "*shape"]:
    """Whether one logit is larger than all others, by more than rounding."""
    return _largest(logits).sum(-1) == 1


def _largest(logits: Float[Tensor, "*shape d_vocab_out"]) -> Bool[Tensor, "*shape d_vocab_out"]:
    return logits >= logits.amax(-1, keepdim=True) - TIE


def state_width(model: LoopedModel | Any, inputs: Int[Tensor, "batch pos"]) -> int:
    """The width of the states that a model has on such inputs."""
    return bind(model, inputs[:1].to(device_of(model))).h0.shape[-1]


@torch.no_grad()
def answers_by_loop(
    model: LoopedModel | Any, inputs: Int[Tensor, "batch pos"], n_loops: int
) -> Int[Tensor, "loops batch pos"]:
    """The answer that would be read after 0, 1, … ``n_loops`` loops."""
    bound = bind(model, inputs)
    read = [answer(bound.read(h, loop)) for loop, h in bound.run(n_loops)]
    return torch.stack(read).long()  # classes as torch's indexing wants them


_Runs = tuple[int, CausalCone]
"""The first of some inputs, and their runs h_0 .. h_T without an intervention."""


class InterchangeRun(ShortRepr):
    """Pairs of runs of a model, ready for any number of interventions.

    Args:
        model: Any looped model.
        pairs: What is exchanged.

    Raises:
        InputError: an input, a position or a loop of the pairs that there is not.

    Attributes:
        own: Clean state of the base at the positions of the exchange, at its loop. Where some pairs
            have a second interchange, the last site is that one's.
        donor: State of the source there.
        natural: Answers of all inputs after 0 .. T loops, undisturbed.
        reach: Positions that one loop can carry something to the right; None where all are run.
    """

    own: Float[Tensor, "pair site d_model"]
    donor: Float[Tensor, "pair site d_model"]
    natural: Int[Tensor, "loops input pos"]

    @torch.no_grad()
    def __init__(self, model: LoopedModel | Any, pairs: InterchangePairs) -> None:
        _check_ranges(pairs)
        self.model, self.pairs = model, pairs.to(device_of(model))
        self.reach = growth_of(model)
        self._cached: _Runs | None = None
        pairs, natural, sites = self.pairs, [], self.pairs.sites
        bases = pairs.base[:, None].expand_as(sites.loop)
        for first, runs in self._runs():
            states = runs.states
            if not natural:
                shape = (*sites.loop.shape, states.shape[-1])
                self.own, self.donor = (states.new_empty(shape) for _ in range(2))
            _fill(self.own, first, states, bases, sites.loop, sites.position)
            _fill(self.donor, first, states, sites.source, sites.source_loop, sites.position)
            read = [answer(runs.iteration.read(state, t)) for t, state in enumerate(states)]
            natural.append(torch.stack(read))
        self.natural = torch.cat(natural, dim=1)

    @cached_property
    def base(self) -> Int[Tensor, "pair delay pos"]:
        """Answers of the base, undisturbed, at each delay; past the end those of the end."""
        return self.natural[self._loops_read, self.pairs.base[:, None]]

    @cached_property
    def within(self) -> Bool[Tensor, "pair delay"]:
        """Whether a delay comes before the end of the run."""
        delays = torch.arange(self.pairs.longest + 1, device=self.pairs.loop.device)
        return delays <= self.pairs.horizon[:, None]

    @property
    def difference(self) -> Float[Tensor, "pair site d_model"]:
        """What an exchange of the whole state adds."""
        return self.donor - self.own

    def interchange(
        self, subspace: Float[Tensor, "... rank d_model"] | None = None, *, complement: bool = False
    ) -> Int[Tensor, "pair delay pos"]:
        """Answers after the donor's state, or its part in a subspace, was put in.

        Args:
            subspace: Orthonormal rows; one for all pairs [rank, d_model], or one each
                [pair, rank, d_model]. The whole state if omitted.
            complement: Put in everything but that part.

        Raises:
            InputError: rows that are not orthonormal, or a complement of nothing.
        """
        change = self.difference
        if subspace is not None:
            check_orthonormal(subspace)
            inside = project(change, subspace)
            change = change - inside if complement else inside
        elif complement:
            raise InputError(
                "complement",
                expected="a subspace whose complement is put in",
                given="no subspace",
                fix="Pass subspace= too.",
            )
        return self.after(self.own + change)

    @torch.no_grad()
    def after(
        self, state: Float[Tensor, "*kind pair site d_model"]
    ) -> Int[Tensor, "*kind pair delay pos"]:
        """Answers at each delay after ``state`` was put in at the positions of the exchange.

        Several kinds of states at once cost one undisturbed run and not one each.
        """
        kinds = state[None] if state.ndim == self.own.ndim else state.flatten(0, -4)
        read = self.base.repeat(len(kinds), 1, 1, 1)
        for first, runs in self._runs():
            base = self.pairs.base - first
            here = ((base >= 0) & (base < runs.states.shape[1])).nonzero().squeeze(1)
            if not len(here):
                continue
            for rows in track(self._in_order(here), "exchange"):
                for put_in, found in zip(kinds, read):
                    # The base's own state, as at equal embeddings, changes nothing.
                    new = rows[(put_in[rows] != self.own[rows]).flatten(1).any(1)]
                    if len(new):
                        self._go_on(runs, new, base[new], put_in[new], found)
        return read.reshape(*state.shape[:-3], *self.base.shape)

    @torch.no_grad()
    def states_after(
        self, state: Float[Tensor, "pair site d_model"]
    ) -> Float[Tensor, "pair delay pos d_model"]:
        """The whole states at each delay after ``state`` was put in, which :meth:`after` reads.

        Past the end of the run they mean nothing.
        """
        shape = (*self.base.shape, state.shape[-1])
        kept = self.own.new_empty(shape)
        for first, runs in self._runs():
            base = self.pairs.base - first
            here = ((base >= 0) & (base < runs.states.shape[1])).nonzero().squeeze(1)
            kept[here] = runs.states[self._loops_read[here], base[here, None]]
            for rows in self._in_order(here):
                for front, pair, column in self._fronts(runs, rows, base[rows], state[rows]):
                    place = front.place[pair, column]
                    delay = front.loop - self.pairs.loop[rows][pair]
                    kept[rows[pair], delay, place] = front.h[pair, column]
        return kept

    @torch.no_grad()
    def base_states(self, places: Int[Tensor, "pair pos"]) -> Float[Tensor, "pair pos d_model"]:
        """The base's undisturbed state at some positions, at the loop of the exchange."""
        pairs = self.pairs
        found = self.own.new_empty(*places.shape, self.own.shape[-1])
        for first, runs in self._runs():
            row, loop = (x[:, None].expand_as(places) for x in (pairs.base, pairs.loop))
            _fill(found, first, runs.states, row, loop, places)
        return found

    @property
    def _loops_read(self) -> Int[Tensor, "pair delay"]:
        delays = torch.arange(self.pairs.longest + 1, device=self.pairs.loop.device)
        return (self.pairs.loop[:, None] + delays).clamp(max=self.pairs.n_loops)

    def _runs(self) -> Iterator[_Runs]:
        """The undisturbed runs of all inputs, some at a time; kept if they are few."""
        if self._cached is not None:
            yield self._cached
            return
        inputs, n_loops = self.pairs.inputs, self.pairs.n_loops
        width = state_width(self.model, inputs)
        at_a_time = max(_KEPT // ((n_loops + 1) * inputs.shape[1] * width), 1)
        for first in range(0, len(inputs), at_a_time):
            some = inputs[first : first + at_a_time]
            bound = bind(self.model, some)
            states = torch.stack([h for _, h in bound.run(n_loops)])
            run = first, CausalCone(self.model, bound, states)
            if len(some) == len(inputs):
                self._cached = run
            yield run

    def _in_order(self, pairs: Int[Tensor, " pair"]) -> list[Tensor]:
        """Pairs by loop, some at a time; those with a second interchange apart: they are wider."""
        in_order = pairs[self.pairs.loop[pairs].argsort(stable=True)]
        if self.pairs.second is None:
            return list(in_order.split(_AT_A_TIME))
        made = self.pairs.second.made[in_order]
        both = in_order[~made].split(_AT_A_TIME), in_order[made].split(_AT_A_TIME)
        return [rows for parts in both for rows in parts if len(rows)]

    def _go_on(
        self, runs: CausalCone, rows: Tensor, base: Tensor, state: Tensor, read: Tensor
    ) -> None:
        """Read the answers that the exchange can have reached; pairs in loop order."""
        loop = self.pairs.loop[rows]
        for front, pair, column in self._fronts(runs, rows, base, state):
            answers = answer(runs.iteration.readout(front.h))[pair, column]
            read[rows[pair], front.loop - loop[pair], front.place[pair, column]] = answers

    def _fronts(
        self, runs: CausalCone, rows: Tensor, base: Tensor, state: Tensor
    ) -> Iterator[tuple[Front, Tensor, Tensor]]:
        """Go on with the positions that the exchange can have reached; pairs in loop order.

        Each front comes with the rows and columns of it that were reached.
        """
        loop, positions = self.pairs.loop[rows], self.pairs.positions[rows]
        n_sites, sites = positions.shape[1], Sites(*(x[rows] for x in self.pairs.sites))
        each = torch.arange(len(rows), device=rows.device)[:, None]

        def put_in(new: slice, place: Tensor, fresh: Tensor) -> Tensor:
            fresh[each[: len(fresh)], positions[new] - place[:, :1]] = state[new, :n_sites]
            return fresh

        def put_in_later(loops_done: int, place: Tensor, h: Tensor) -> Tensor:
            now = sites.made[: len(h), -1] & (sites.loop[: len(h), -1] == loops_done)
            row = now.nonzero().squeeze(1)
            if len(row):
                h = h.clone()
                h[row, sites.position[row, -1] - place[row, 0]] = state[row, -1]
            return h

        has_later = sites.position.shape[1] > n_sites
        change = Change(state=put_in, later=put_in_later if has_later else None)
        first, last = sites.position.aminmax(dim=1)
        for front in runs.go_on(base, loop, first, last, change):
            pair, column = front.reached.nonzero(as_tuple=True)
            yield front, pair, column


def _fill(
    found: Float[Tensor, "pair site d_model"],
    first: int,
    states: Float[Tensor, "loops input pos d_model"],
    row: Int[Tensor, "pair site"],
    loop: Int[Tensor, "pair site"],
    positions: Int[Tensor, "pair site"],
) -> None:
    """Put in the states of those pairs whose input is one whose states these are."""
    row = row - first
    here = (row >= 0) & (row < states.shape[1])
    found[here] = states[loop[here], row[here], positions[here]]


def _check_ranges(pairs: InterchangePairs) -> None:
    n_inputs, n_pos = pairs.inputs.shape
    most = {"base": n_inputs - 1, "source": n_inputs - 1, "positions": n_pos - 1}
    most |= {"loop": pairs.n_loops, "source_loop": pairs.n_loops}
    ranges = [(name, getattr(pairs, name), 0, last) for name, last in most.items()]
    if pairs.second is not None and bool((made := pairs.second.made).any()):
        second, least = pairs.second, int(pairs.loop[made].min())
        ranges += [
            ("second.source", second.source[made], 0, n_inputs - 1),
            ("second.position", second.position[made], 0, n_pos - 1),
            ("second.loop", second.loop[made], least, pairs.n_loops),
            ("second.source_loop", second.source_loop[made], 0, pairs.n_loops),
            ("second.loop, after the first", (second.loop - pairs.loop)[made], 0, pairs.n_loops),
        ]
    for name, values, least, last in ranges:
        if not bool(((values >= least) & (values <= last)).all()):
            raise InputError(
                f"pairs.{name}",
                expected=f"integers from {least} to {last}",
                given=f"{int(values.min())} to {int(values.max())}",
                fix="Mend the strategy that chose them.",
            )
