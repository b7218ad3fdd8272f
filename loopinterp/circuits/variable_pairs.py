"""Pairs for exchanging one variable of a program: those on which the exchange matters to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.interchange_pairs import (
    InterchangePairs,
    draw_pairs,
    evenly_by_class,
    join,
)
from loopinterp.circuits.program_counterfactuals import Prediction
from loopinterp.rasp.language import UNKNOWN
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.circuits.program_counterfactuals import ProgramRuns
    from loopinterp.tasks.task import Batch

_SEARCHED = 8
"""So many times as many exchanges are looked at as are wanted after each loop."""


@dataclass(frozen=True, eq=False)
class Control:
    """What is exchanged in place of the variable, in all bases of some pairs.

    Attributes:
        pairs: The same bases and positions, maybe with other donors.
        counts: Where the program tells it from what it is a control of.
    """

    pairs: InterchangePairs
    counts: Bool[Tensor, "pair delay"]


@dataclass(frozen=True, eq=False, repr=False)
class VariablePairs(ShortRepr):
    """Finds pairs for every variable of a program, and those of its controls.

    The variable has two values there, and with the source's value the program gives another answer
    at some delay than without. So nothing that leaves the answer as it is can be right on them.
    Each control exchanges something else in the same bases, and counts only where the program says
    that this comes to another answer.

    Attributes:
        runs: The program on the inputs of a batch.
        batch: Inputs of one length.
        n_loops: Loops of a full run.
        apart: The variables that can be exchanged by themselves. An exchange of another one is
            one of the whole state, and so of all variables, at positions with the same token.
        per_loop: Most pairs of a variable after each number of loops.
        generator: Draws pairs and positions.
    """

    runs: ProgramRuns
    batch: Batch
    n_loops: int
    apart: Collection[str]
    per_loop: int
    generator: torch.Generator

    def of(self, variable: str, loops: Collection[int]) -> InterchangePairs:
        """Pairs on which an exchange of the variable matters, after each number of loops.

        They are drawn evenly by the last delay at which the answer is another one.
        """
        return join([self._after(variable, loop) for loop in loops], "loop", tuple(map(str, loops)))

    def told(self, variable: str, pairs: InterchangePairs) -> Bool[Tensor, "pair delay"]:
        """Where the program gives another answer with the exchange than without."""
        prediction = self.predict(variable, pairs)
        return _apart(prediction.base, prediction.exchanged, pairs)

    def predict(self, variable: str, pairs: InterchangePairs) -> Prediction:
        """What the program says if a variable (or with the whole state, all) is exchanged."""
        names = (variable,) if variable in self.apart else None
        return Prediction(self.runs.program, pairs, names=names, runs=self.runs)

    def another_loop(self, variable: str, pairs: InterchangePairs) -> Control:
        """The source after the nearest loop at which the variable has another value there."""
        values = self._values(variable)[:, pairs.source, pairs.positions[:, 0]]
        values = values[: pairs.n_loops + 1]
        loops = torch.arange(len(values))[:, None]
        own = values.gather(0, pairs.loop[None])
        # Of two that are as near, the later one; where there is none, the right loop itself.
        distance = 2 * (loops - pairs.loop).abs() + (loops < pairs.loop)
        distance = distance.masked_fill((values == own) & (loops != pairs.loop), 2 * len(values))
        distance = distance.masked_fill(loops == pairs.loop, 2 * len(values) - 1)
        made = replace(pairs, source_loop=distance.argmin(0))
        return Control(made, self._otherwise(variable, pairs, self.predict(variable, made)))

    def another_variable(
        self, variable: str, pairs: InterchangePairs
    ) -> tuple[str, Control] | None:
        """The variable that differs in most of the pairs, of those exchanged by themselves."""
        others = [n for n in self.runs.program.variables if n in self.apart and n != variable]
        if variable not in self.apart or not others:
            return None
        position = pairs.positions[:, 0]

        def differing(name: str) -> int:
            values = self._values(name)
            own, donor = (values[pairs.loop, row, position] for row in (pairs.base, pairs.source))
            return int((own != donor).sum())

        other = max(others, key=differing)
        return other, Control(pairs, self._otherwise(variable, pairs, self.predict(other, pairs)))

    def same_value(self, variable: str, pairs: InterchangePairs) -> Control:
        """Donors with the base's own value of what is exchanged, in another context.

        Another token at the position is preferred, where not the whole state is exchanged.
        """
        names = (variable,) if variable in self.apart else self.runs.program.variables
        position, token = pairs.positions[:, 0], pairs.inputs[:, pairs.positions[:, 0]].T
        same_token = token == token.gather(1, pairs.base[:, None])
        fits = torch.ones_like(same_token) if variable in self.apart else same_token.clone()
        for name in names:
            values = self._values(name)[pairs.loop, :, position]  # [pair, input]
            fits &= values == values.gather(1, pairs.base[:, None])
        fits.scatter_(1, pairs.base[:, None], False)
        score = (
            torch.rand(fits.shape, generator=self.generator, dtype=torch.float32)
            + (~same_token).float()
        )
        best = score.masked_fill(~fits, -1).max(1)
        source = torch.where(best.values < 0, pairs.base, best.indices)
        made = replace(pairs, source=source, source_loop=pairs.loop)
        delays = torch.arange(pairs.longest + 1)
        return Control(made, (source != pairs.base)[:, None] & (delays <= pairs.horizon[:, None]))

    def _after(self, variable: str, loop: int) -> InterchangePairs:
        """The pairs after one number of loops."""
        inputs = self.batch.inputs
        base, source = draw_pairs(len(inputs), _SEARCHED * self.per_loop, self.generator)
        values = self._values(variable)[loop]
        differs = values[base] != values[source]
        if variable not in self.apart:
            # The whole state also holds what it was given of the token.
            differs &= inputs[base] == inputs[source]
        pair, position = differs.nonzero(as_tuple=True)
        some = torch.randperm(len(pair), generator=self.generator)[: _SEARCHED * self.per_loop]
        tried = InterchangePairs.of(
            self.batch,
            base=base[pair[some]],
            source=source[pair[some]],
            positions=position[some, None],
            loop=torch.full_like(some, loop),
            n_loops=self.n_loops,
        )
        matters = self.told(variable, tried).int()
        found = matters.any(1).nonzero().squeeze(1)
        last = matters.shape[1] - 1 - matters.flip(1).argmax(1)
        return tried[found[evenly_by_class(last[found], self.per_loop, self.generator)]]

    def _values(self, variable: str) -> Int[Tensor, "loops input pos"]:
        return self.runs.trace.variables[variable]

    def _otherwise(
        self, variable: str, pairs: InterchangePairs, control: Prediction
    ) -> Bool[Tensor, "pair delay"]:
        """Where the program says something else to a control than to the right exchange."""
        right = self.predict(variable, pairs)
        told = _apart(right.base, right.exchanged, pairs)
        return told & _apart(right.exchanged, control.exchanged, pairs)


def _apart(
    first: Int[Tensor, "pair delay pos"],
    second: Int[Tensor, "pair delay pos"],
    pairs: InterchangePairs,
) -> Bool[Tensor, "pair delay"]:
    """Whether two answers differ where one is asked for and both are decided, before the end."""
    decided = (first != UNKNOWN) & (second != UNKNOWN) & pairs.scored[:, None]
    within = torch.arange(first.shape[1]) <= pairs.horizon[:, None]
    return ((first != second) & decided).any(-1) & within
