"""Interchanges of a state, or of its part in a subspace, and the answers after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import InputError, check_integer, describe_tensor
from loopinterp.core.text import ShortRepr, track
from loopinterp.interventions.light_cone import Change, LightCone, cone_growth
from loopinterp.interventions.pairs import Sites
from loopinterp.models import bind, device_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.interventions.pairs import InterchangePairs
    from loopinterp.models import LoopedModel

_AT_A_TIME = 128  # pairs in a batch of narrow cones
_NUMBERS_AT_A_TIME = 2**18  # of the states in a larger batch of whole sequences
_HELD_NUMBERS = 2**26  # numbers of clean states held at a time: 256 MiB


def answer(logits: Float[Tensor, "*shape d_vocab_out"]) -> Int[Tensor, "*shape"]:
    """The class with the largest logit; of those equal up to rounding the first, in any basis."""
    narrow = torch.int16 if logits.shape[-1] <= 2**15 else torch.int32
    return _largest(logits).int().argmax(-1).to(narrow)


def decided(logits: Float[Tensor, "*shape d_vocab_out"]) -> Bool[Tensor, "*shape"]:
    """Whether one logit exceeds all others by more than rounding."""
    return _largest(logits).sum(-1) == 1


def _largest(logits: Float[Tensor, "*shape d_vocab_out"]) -> Bool[Tensor, "*shape d_vocab_out"]:
    return logits >= logits.amax(-1, keepdim=True) - 1e-4  # those that differ by less are equal


def state_width(model: LoopedModel | Any, inputs: Int[Tensor, "batch pos"]) -> int:
    return bind(model, inputs[:1].to(device_of(model))).h0.shape[-1]


@torch.no_grad()
def answers_by_loop(
    model: LoopedModel | Any, inputs: Int[Tensor, "batch pos"], n_loops: int
) -> Int[Tensor, "loops batch pos"]:
    bound = bind(model, inputs)
    read = [answer(bound.read(h, loop)) for loop, h in bound.run(n_loops)]
    return torch.stack(read).long()  # classes as torch's indexing wants them


class CleanRun:
    """The clean run of some inputs, its logits and answers, and runs on from its states."""

    def __init__(self, model: Any, inputs: Tensor, n_loops: int) -> None:
        self._model, self._inputs, self._n_loops = model, inputs, n_loops
        self._states = model(inputs, n_loops=n_loops, return_type="states")  # [loop, batch, pos, d]
        self.logits: Float[Tensor, "batch pos d_vocab_out"] = model.readout(self._states[-1])
        self.answers: Int[Tensor, "batch pos"] = self.logits.argmax(-1)

    def with_hooks(
        self, hooks: Sequence[tuple[str, Callable[..., Any]]], loop: int = 0
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits of a run with hooks, from the clean state before a loop on."""
        start = {"start_at_loop": loop, "state": self._states[loop]}
        return self._model.run_with_hooks(
            self._inputs, n_loops=self._n_loops, fwd_hooks=hooks, **start
        )


class InterchangeRun(ShortRepr):
    """A model's runs on pairs of base and source, for any number of interventions.

    Attributes:
        base_state: Clean state of the base at the sites and loop of the interchange; the site of a
            second interchange is the last one.
        source_state: State of the source there.
        natural: Clean answers of all inputs after 0 .. T loops.
        reach: Positions by which the light cone grows in a loop; None if all are recomputed.
    """

    base_state: Float[Tensor, "pair site d_model"]
    source_state: Float[Tensor, "pair site d_model"]
    natural: Int[Tensor, "loops input pos"]

    @torch.no_grad()
    def __init__(
        self,
        model: LoopedModel | Any,
        pairs: InterchangePairs,
        *,
        clean: InterchangeRun | None = None,
    ) -> None:
        """With ``clean``, pairs of its inputs and loops, whose clean runs are taken from there."""
        _check_ranges(pairs)
        self.model, self.pairs = model, pairs.to(device_of(model))
        self.reach = cone_growth(model)
        self._cached: tuple[int, LightCone] | None = None if clean is None else clean._cached
        pairs, natural, sites = self.pairs, [], self.pairs.sites
        bases = pairs.base[:, None].expand_as(sites.loop)  # [pair, site]
        for first, runs in self._runs():
            states = runs.states
            if first == 0:
                shape = (*sites.loop.shape, states.shape[-1])
                self.base_state, self.source_state = (states.new_empty(shape) for _ in range(2))
            _fill(self.base_state, first, states, bases, sites.loop, sites.position)
            _fill(self.source_state, first, states, sites.source, sites.source_loop, sites.position)
            if clean is None:
                # Answers after every loop, [loops, input, pos].
                read = [answer(runs.iteration.read(state, t)) for t, state in enumerate(states)]
                natural.append(torch.stack(read))
        self.natural = torch.cat(natural, dim=1) if clean is None else clean.natural

    @cached_property
    def base(self) -> Int[Tensor, "pair delay pos"]:
        """Clean answers of the base at each delay; past the end its last ones."""
        return self.natural[self._loops_read, self.pairs.base[:, None]]

    @cached_property
    def within(self) -> Bool[Tensor, "pair delay"]:
        """Whether a delay is before the end of the run."""
        delays = torch.arange(self.pairs.longest + 1, device=self.pairs.loop.device)
        return delays <= self.pairs.horizon[:, None]

    @property
    def difference(self) -> Float[Tensor, "pair site d_model"]:
        """The change that an interchange makes."""
        return self.source_state - self.base_state

    def interchange(
        self, subspace: Float[Tensor, "... rank d_model"] | None = None, *, complement: bool = False
    ) -> Int[Tensor, "pair delay pos"]:
        """Answers after an interchange of the state, or of its part in a subspace.

        Args:
            subspace: Orthonormal rows, for all pairs [rank, d_model] or for each
                [pair, rank, d_model]; the whole state by default.
            complement: Interchange everything outside the subspace instead.
        """
        change = self.difference
        if subspace is not None:
            _check_orthonormal(subspace)
            inside = project(change, subspace)
            change = change - inside if complement else inside
        elif complement:
            fix = "Pass subspace= too."
            raise InputError("complement", expected="a subspace", given="none", fix=fix)
        return self.after(self.base_state + change)

    @torch.no_grad()
    def after(
        self, state: Float[Tensor, "*kind pair site d_model"]
    ) -> Int[Tensor, "*kind pair delay pos"]:
        """Answers at each delay after ``state`` was put in at the interchange's sites.

        Several kinds of states share the clean runs.
        """
        # [kind, pair, site, d_model]; every kind starts from the clean answers.
        kinds = state[None] if state.ndim == self.base_state.ndim else state.flatten(0, -4)
        read = self.base.repeat(len(kinds), 1, 1, 1)
        for runs, base, rows in self._batches():
            for put_in, answers in zip(kinds, read):
                # Pairs whose state stays as it is keep their clean answers.
                new = rows[(put_in[rows] != self.base_state[rows]).flatten(1).any(1)]
                for h, cells, inside in self._fronts(runs, new, base, put_in) if len(new) else ():
                    answers[cells] = answer(runs.iteration.readout(h))[inside]
        return read.reshape(*state.shape[:-3], *self.base.shape)

    @torch.no_grad()
    def states_after(
        self, state: Float[Tensor, "pair site d_model"]
    ) -> Float[Tensor, "pair delay pos d_model"]:
        """The states at each delay after ``state`` was put in; arbitrary past the run's end."""
        states = self.base_state.new_empty(*self.base.shape, state.shape[-1])
        for runs, base, rows in self._batches():
            states[rows] = runs.states[self._loops_read[rows], base[rows, None]]
            for h, cells, inside in self._fronts(runs, rows, base, state):
                states[cells] = h[inside]
        return states

    @torch.no_grad()
    def base_states(
        self, places: Int[Tensor, "pair pos"], delays: int
    ) -> Float[Tensor, "pair delay pos d_model"]:
        """The base's clean states at some positions, at delays 0 .. ``delays`` - 1."""
        loop = self._loops_read[:, :delays, None].expand(-1, -1, places.shape[1])
        row, place = self.pairs.base[:, None, None].expand_as(loop), places[:, None].expand_as(loop)
        states = self.base_state.new_empty(*loop.shape, self.base_state.shape[-1])
        for first, runs in self._runs():
            _fill(states, first, runs.states, row, loop, place)
        return states

    @property
    def _loops_read(self) -> Int[Tensor, "pair delay"]:
        delays = torch.arange(self.pairs.longest + 1, device=self.pairs.loop.device)
        return (self.pairs.loop[:, None] + delays).clamp(max=self.pairs.n_loops)

    def _runs(self) -> Iterator[tuple[int, LightCone]]:
        """Clean runs h_0 .. h_T of some inputs at a time, with the number of the first input."""
        if self._cached is not None:
            yield self._cached
            return
        inputs, n_loops = self.pairs.inputs, self.pairs.n_loops
        width = state_width(self.model, inputs)
        at_a_time = max(_HELD_NUMBERS // ((n_loops + 1) * inputs.shape[1] * width), 1)
        for first in range(0, len(inputs), at_a_time):
            some = inputs[first : first + at_a_time]
            bound = bind(self.model, some)
            states = torch.stack([h for _, h in bound.run(n_loops)])
            run = first, LightCone(self.model, bound, states)
            if len(some) == len(inputs):
                self._cached = run
            yield run

    def _batches(self) -> Iterator[tuple[LightCone, Int[Tensor, " pair"], Int[Tensor, " row"]]]:
        """Clean runs, each with pairs whose bases are among them, in the order of loops, and the
        bases' rows.
        """
        for first, runs in self._runs():
            base = self.pairs.base - first
            here = ((base >= 0) & (base < runs.states.shape[1])).nonzero().squeeze(1)
            rows = here[self.pairs.loop[here].argsort(stable=True)]
            second = self.pairs.second
            has_second = (
                torch.zeros_like(rows, dtype=torch.bool) if second is None else second.made[rows]
            )
            most = _AT_A_TIME
            if self.reach is None:  # small states cost little beside the steps themselves
                most = max(most, _NUMBERS_AT_A_TIME // runs.states[0, 0].numel())
            parts = [*rows[~has_second].split(most), *rows[has_second].split(most)]
            for part in track([part for part in parts if len(part)], "interchange"):
                yield runs, base, part

    def _fronts(
        self, runs: LightCone, rows: Tensor, base: Tensor, state: Tensor
    ) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """States of some pairs after each loop, and those inside the cone: their places among all
        pairs (pair, delay, pos), and among the states (row, column).
        """
        loop, positions, state = self.pairs.loop[rows], self.pairs.positions[rows], state[rows]
        n_sites, sites = positions.shape[1], Sites(*(x[rows] for x in self.pairs.sites))
        each = torch.arange(len(rows), device=rows.device)[:, None]

        def put_in(new: slice, place: Tensor, fresh: Tensor) -> Tensor:
            # Column of a site: the positions held begin at ``place[:, 0]``.
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
        for front in runs.go_on(base[rows], loop, first, last, change):
            row, column = front.reached.nonzero(as_tuple=True)
            cells = rows[row], front.loop - loop[row], front.place[row, column]
            yield front.h, cells, (row, column)


def _fill(
    filled: Float[Tensor, "*place d_model"],
    first: int,
    states: Float[Tensor, "loops input pos d_model"],
    row: Int[Tensor, "*place"],
    loop: Int[Tensor, "*place"],
    positions: Int[Tensor, "*place"],
) -> None:
    """Fill in the states of pairs whose input is in ``states``, from number ``first`` on."""
    row = row - first
    here = (row >= 0) & (row < states.shape[1])
    filled[here] = states[loop[here], row[here], positions[here]]


def _check_ranges(pairs: InterchangePairs) -> None:
    n_inputs, n_pos = pairs.inputs.shape
    loops = ("loop", pairs.n_loops), ("source_loop", pairs.n_loops)
    ranges = [("base", n_inputs - 1), ("source", n_inputs - 1), ("positions", n_pos - 1), *loops]
    columns = [(name, getattr(pairs, name), last) for name, last in ranges]
    if pairs.second is not None and bool((has_second := pairs.second.made).any()):
        second = pairs.second.map(lambda column: column[has_second])
        for name, last in (("source", n_inputs - 1), ("position", n_pos - 1), *loops):
            columns.append((f"second.{name}", getattr(second, name), last))
        after = second.loop - pairs.loop[has_second]
        columns.append(("second.loop, after the first", after, pairs.n_loops))
    for name, values, last in columns:
        if not bool(((values >= 0) & (values <= last)).all()):
            raise InputError(
                f"pairs.{name}",
                expected=f"integers from 0 to {last}",
                given=f"{int(values.min())} to {int(values.max())}",
                fix="Take pairs of these inputs and loops.",
            )


def principal_subspace(
    difference: Float[Tensor, "pair d_model"], rank: int
) -> Float[Tensor, "rank d_model"]:
    """The uncentred principal directions of some differences."""
    most = min(difference.shape)
    check_integer("rank", rank, least=1, most=most, fix=f"Pass a rank from 1 to {most}.")
    return torch.linalg.svd(difference.double(), full_matrices=False).Vh[:rank].to(difference)


def project(
    change: Float[Tensor, "... site d_model"], subspace: Float[Tensor, "... rank d_model"]
) -> Float[Tensor, "... site d_model"]:
    """The part of each change in a subspace, whose rows are orthonormal or 0."""
    basis = subspace.to(change)
    return change @ basis.mT @ basis


def random_change(
    change: Float[Tensor, "... d_model"],
    generator: torch.Generator,
    *,
    within: Bool[Tensor, "... d_model"] | None = None,
) -> Float[Tensor, "... d_model"]:
    """A random change of equal norm at each place; ``within`` limits it to some features."""
    noise = torch.randn(change.shape, generator=generator, dtype=torch.float32).to(change)
    length = change.norm(dim=-1, keepdim=True)
    if within is not None:
        noise, length = noise * within, torch.where(within.any(-1, keepdim=True), length, 0)
    least = torch.finfo(noise.dtype).tiny  # where nothing may change
    return noise * (length / noise.norm(dim=-1, keepdim=True).clamp(min=least))


def check_subspace(rows: Any, d_model: int, what: str) -> None:
    """Raise unless the rows are orthonormal [rank, d_model], with rank 1 .. d_model."""
    shape = list(rows.shape) if isinstance(rows, torch.Tensor) else None
    if shape is None or len(shape) != 2 or not 1 <= shape[0] <= d_model or shape[1] != d_model:
        raise InputError(
            what,
            expected=f"rows [rank, d_model] of the model's width {d_model}, rank 1..{d_model}",
            given=describe_tensor(rows),
            fix="Give one row for each direction.",
        )
    _check_orthonormal(rows, what)


def _check_orthonormal(rows: Float[Tensor, "... rank d_model"], what: str = "subspace") -> None:
    gram = rows.double() @ rows.double().mT  # scalar products of the rows, [..., rank, rank]
    if not torch.allclose(gram, torch.eye(rows.shape[-2]).to(gram), atol=1e-4):
        raise InputError(
            what,
            expected="orthonormal rows [..., rank, d_model]",
            given="rows that are not",
            fix="Orthonormalise them: torch.linalg.qr(rows.mT).Q.mT.",
        )
