"""Swaps of a part of the state: what a probe reads, what a swap moves, and random directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.circuits.alignment import Alignment, agreement, predict
from loopinterp.circuits.alignment_choice import halves, rate_alignments
from loopinterp.circuits.intervals import Intervals, scores_by_stratum
from loopinterp.circuits.pairs import PLACES, swap_pairs
from loopinterp.circuits.runs import SwapRun, delay_name, device_of, prepare_swaps
from loopinterp.circuits.subspaces import principal_subspace, random_subspaces
from loopinterp.circuits.verdict import plain
from loopinterp.probing.linear import RidgeProbe
from loopinterp.probing.states import describe_model, states_at
from loopinterp.rasp.registry import get_program
from loopinterp.results import Figure, Finding, Result, percent, study
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.rasp.program import LoopProgram

_DELAYS = (0, 1, 2)
_AXES = ("subspace", "place", "delay")
_PROBE_EXAMPLES = 192
PRINCIPAL = "principal directions"


@dataclass(frozen=True, kw_only=True)
class SubspaceSwaps(Result):
    """What :func:`subspace_study` returns.

    Attributes:
        iia: How often the model's whole output after a swap within the subspace is the one the
            program says. The last place is the mean over places.
        iia_low: Lower end of its 95% interval over inputs.
        iia_high: Upper end.
        control: The same with random directions of equal rank, others for each pair.
        control_low: Lower end.
        control_high: Upper end.
        subspaces: What each subspace is.
        ranks: Its dimensions.
        places: Places relative to the front.
        delays: Loops between the swap and the reading of the output, in words.
        program: The program.
        alignment: How it lies over the model, in words.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("iia", "iia_low", "iia_high", "control", "control_low", "control_high"), _AXES
    )

    iia: np.ndarray
    iia_low: np.ndarray
    iia_high: np.ndarray
    control: np.ndarray
    control_low: np.ndarray
    control_high: np.ndarray
    subspaces: list[str]
    ranks: list[int]
    places: list[str]
    delays: list[str]
    program: str
    alignment: str

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.figures import subspace_figures

        return subspace_figures(self)

    def summary(self) -> list[Finding]:
        """Whether the direction that a probe reads is the one that the model uses."""
        probes = [k for k, name in enumerate(self.subspaces) if not name.startswith(PRINCIPAL)]
        found = []
        for k in probes[:1]:
            score, control = self.iia[k, -1, 1], self.control[k, -1, 1]
            used = self.iia_low[k, -1, 1] > self.control_high[k, -1, 1]
            text = (
                f"Swapping only what a {self.subspaces[k]} reads ({self.ranks[k]} of "
                f"{max(self.ranks)} dimensions) does what “{plain(self.program)}” says in "
                f"{percent(score)} of cases one loop later; random directions: {percent(control)}. "
                + (
                    "It is read and used."
                    if used
                    else "It can be read, but it is not what is used."
                )
            )
            found.append(Finding(kind="program", text=text, value=percent(score)))
        return found


def subspace_study(
    model: LoopedModel | Any,
    program: str | LoopProgram,
    *,
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 32),
    n: int = 24,
    per_place: int = 48,
    max_chain: int = 9,
    seed: int = 0,
) -> SubspaceSwaps:
    """Swap parts of the state, and see whether the model does what the program says.

    Two kinds of subspaces, learnt on other inputs than they are tried on:

    - the span of a linear probe of each variable of the program, one probe for each loop. The
      program's counterfactual then is that of this variable alone;
    - the principal directions of what swaps of the whole state change, up to the whole state.
      They show in how few dimensions the variables live.

    Each stands beside random directions of equal rank.

    Args:
        model: A model of the pairs format.
        program: A program of addition.
        ranks: Numbers of principal directions; those above the model's width are left out.
        n: Bits of each operand.
        per_place: Pairs for each place relative to the front; half of them are learnt from.
        max_chain: Longest way from the deciding bit to the swapped one.
        seed: Seed of everything random.
    """
    chosen = get_program(program) if isinstance(program, str) else program
    with study(
        seed,
        study="subspaces",
        model=describe_model(model),
        program=chosen.name,
        n=n,
        per_place=per_place,
    ) as watch:
        pairs = swap_pairs(model, n=n, per_place=per_place, seed=seed, max_chain=max_chain)
        learn = halves(pairs.place)
        run = prepare_swaps(model, pairs[learn], delays=_DELAYS)
        every = torch.ones(len(run.pairs), dtype=torch.bool, device=learn.device)
        alignment = rate_alignments(chosen, run, run.swap()).best(every)
        difference = run.difference
        d_model = difference.shape[-1]
        trial = _Trial(prepare_swaps(model, pairs[~learn], delays=_DELAYS), chosen, alignment, seed)
        kept = [r for r in ranks if r < min(d_model, len(difference))]
        for variable in chosen.variables:
            probe = _probe_subspaces(
                model, chosen, variable, alignment, int(pairs.loop.max()), n=n, seed=seed
            )
            if probe is not None:
                trial.add(f"probe of {variable}", probe[trial.run.pairs.loop], (variable,))
        for rank in kept:
            trial.add(f"{PRINCIPAL}, {rank}", principal_subspace(difference, rank))
        trial.add("the whole state", torch.eye(d_model))
        return trial.result(watch)


class _Trial:
    """Tries subspaces on one run, each with its control."""

    def __init__(self, run: SwapRun, program: LoopProgram, alignment: Alignment, seed: int) -> None:
        self.run, self.program, self.alignment, self.seed = run, program, alignment, seed
        self._generator = torch.Generator().manual_seed(seed)
        self.names: list[str] = []
        self.ranks: list[int] = []
        self.scores: list[Intervals] = []
        self.controls: list[Intervals] = []

    def add(self, name: str, subspace: Tensor, variables: tuple[str, ...] | None = None) -> None:
        rank, d_model = subspace.shape[-2:]
        random = random_subspaces(len(self.run.pairs), rank, d_model, self._generator)
        said = predict(
            self.program,
            self.run.pairs,
            alignment=self.alignment,
            delays=_DELAYS,
            variables=variables,
        )
        place = self.run.pairs.place.cpu().numpy()
        for rows, into in ((subspace, self.scores), (random, self.controls)):
            right = agreement(said, self.run.base, self.run.swap(rows), self.run.pairs.scored)
            into.append(
                scores_by_stratum(
                    [right.T.cpu().numpy()], [place], n_strata=len(PLACES), seed=self.seed
                )
            )
        self.names.append(name)
        self.ranks.append(rank)

    def result(self, watch: Any) -> SubspaceSwaps:
        def stack(parts: list[Intervals], end: str) -> np.ndarray:
            return np.stack([getattr(part, end) for part in parts])

        return SubspaceSwaps(
            provenance=watch.provenance(),
            iia=stack(self.scores, "value"),
            iia_low=stack(self.scores, "low"),
            iia_high=stack(self.scores, "high"),
            control=stack(self.controls, "value"),
            control_low=stack(self.controls, "low"),
            control_high=stack(self.controls, "high"),
            subspaces=self.names,
            ranks=self.ranks,
            places=[*PLACES, "all places"],
            delays=[delay_name(d) for d in _DELAYS],
            program=self.program.name,
            alignment=str(self.alignment),
        )


def _probe_subspaces(
    model: Any,
    program: LoopProgram,
    variable: str,
    alignment: Alignment,
    last: int,
    *,
    n: int,
    seed: int,
) -> Tensor | None:
    """What a probe of the variable reads after 0 .. ``last`` loops, [loop, rank, d_model].

    None for a variable that does not depend on the input: there is nothing to swap.
    """
    task = Addition()
    generator = torch.Generator().manual_seed(seed)
    batch = task.sample(n, batch_size=_PROBE_EXAMPLES, generator=generator)
    inputs = batch.inputs.to(device_of(model))
    trace = program.trace(inputs, n_loops=last + max(alignment.shift, 0))
    values = trace.variables[variable]
    if bool((values == values[:, :1]).all()):
        return None
    row, pos = torch.meshgrid(
        torch.arange(len(inputs), device=inputs.device),
        torch.arange(task.offset, inputs.shape[1], device=inputs.device),
        indexing="ij",
    )
    row, pos = row.reshape(-1), pos.reshape(-1)
    states, _ = states_at(model, inputs, row, pos, loops=range(last + 1))
    loops = (torch.arange(last + 1, device=inputs.device) + alignment.shift).clamp(min=0)
    labels = values[loops][:, row, pos - alignment.offset]
    return RidgeProbe().fit(states, labels).subspace()
